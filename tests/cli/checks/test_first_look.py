"""The report of ``checks`` on the user's data: batches of any kind, layers, float16, and bottlenecks."""

import json
import os
import random
import sys
from itertools import takewhile
from textwrap import dedent
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.cli.conftest import write
from tests.support import HAS_FSDP2, assert_identical, loss_of, make_batches, make_net
from trainer.cli import main
from trainer.cli.checks import LoadedBatch, Recipe, first_look, steps
from trainer.cli.checks.batch import classes_of, describe, images_in, labels_out_of_range, load, save_images, suspicious
from trainer.cli.checks.steps import SCALE, Layer, describe_groups, largest_scale, part_for

MODULE = """
import random

import lightning as L
import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset


def pairs(number=16, classes=3):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(number, 4, generator=generator), torch.arange(number) % classes


class Broken(TensorDataset):
    def __getitem__(self, index):
        raise ValueError("sample 3 is not readable")


class Data(L.LightningDataModule):
    def __init__(self, kind="tuple", batch_size=8):
        super().__init__()
        self.kind, self.batch_size = kind, batch_size

    def train_dataloader(self):
        x, y = pairs()
        match self.kind:
            case "nans":
                x[0, 0], x[1, 1], x[1, 2] = float("nan"), float("inf"), float("nan")
            case "labels":
                y[2] = 7
            case "large":
                x = 1e6 * x
            case "random":
                x = x + random.random() + np.random.rand() + torch.rand(1)
            case "none":
                return None
            case "texts":
                return DataLoader([f"a text, {number}" for number in range(16)], batch_size=self.batch_size)
            case "empty":
                return DataLoader([1, 2], batch_size=self.batch_size, drop_last=True)
        return DataLoader((Broken if self.kind == "raises" else TensorDataset)(x, y), self.batch_size)


class Net(L.LightningModule):
    def __init__(self, optimizer, num_classes=3):
        super().__init__()
        self.num_classes = num_classes
        self.make_optimizer = optimizer
        self.embedded = torch.nn.Embedding(20, 4)
        self.embedded.requires_grad_(False)
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, num_classes)

    def training_step(self, batch, batch_idx):
        if isinstance(batch[0], str):
            x, y = self.embedded(torch.tensor([len(text) for text in batch])), torch.zeros(8, dtype=torch.int64)
        else:
            x, y = batch
        batch.clear()  # the report shows it nevertheless
        print("a step of one's own")
        loss = cross_entropy(self.second(self.first(x).relu()), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        scheduler = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class GroupPerParameter(Net):
    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.first = torch.nn.Sequential(self.first, *[torch.nn.Linear(8, 8) for _ in range(5)])

    def configure_optimizers(self):
        rates = {"first": 0.1, "second": 0.2}
        groups = [{"params": [p], "lr": rates.get(n.split(".")[0], 0.0)} for n, p in self.named_parameters()]
        return self.make_optimizer(groups)


class Failing(Net):
    def training_step(self, batch, batch_idx):
        raise ValueError("asked to fail")


class ByItself(Net):  # with its own data, and parameters without gradients
    automatic_optimization = False

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.unused = torch.nn.Linear(2, 2)

    def train_dataloader(self):
        return Data().train_dataloader()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step()

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())
"""
RECIPE = """
# @package _global_
defaults:
  - override /optimizer: sgd
model: {_target_: looked_at.Net, optimizer: "${optimizer}"}
data: {_target_: looked_at.Data, kind: tuple}
seed: 1
"""


BARE = RECIPE.replace("data: {_target_: looked_at.Data, kind: tuple}\n", "")


@pytest.fixture(autouse=True)
def looked_at(project):
    write(project, {"looked_at.py": MODULE, "conf/recipe/mine.yaml": RECIPE, "conf/recipe/bare.yaml": BARE})
    yield
    sys.modules.pop("looked_at", None)


def look(capsys, *settings, status=0):
    assert main(["checks", "json", "+recipe=mine", *settings]) == status
    return json.loads(capsys.readouterr().out)


def test_shown_report(capsys):
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    state = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    environment = dict(os.environ)
    assert main(["checks", "+recipe=mine", "data.kind=random"]) == 0
    assert state == [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    assert environment == dict(os.environ)
    printed, errors = capsys.readouterr()
    assert len(printed.splitlines()) < 60  # one screen
    assert "a step of one's own" not in printed
    assert "a step of one's own" in errors  # JSON would be none with it
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    for start in (
        "batch[1] 8 int64 0 to 2 0: 3, 1: 3, 2: 2",
        "single 1 32-true ",
        *["fsdp 8 32-true "] * HAS_FSDP2,
        "2 of 2 layers, in float32: 147 parameters, 67 trained, loss ",
        "first Linear 40 256 bytes ",
        "Measured time of loading and of a training step",
        "loading a batch ",
        "Note: This batch fits into float16 (largest number 65,504): the largest activation is ",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, start


@pytest.mark.whole
def test_numbers_equal_those_of_a_hand_written_step(capsys):
    found = look(capsys, "seed=3")
    torch.manual_seed(3)
    import looked_at

    module = looked_at.Net(None)
    x, y = looked_at.pairs()
    hidden = module.first(x[:8])
    outputs = module.second(hidden.relu())
    loss = torch.nn.functional.cross_entropy(outputs, y[:8])
    gradients = torch.autograd.grad(
        loss, [hidden, outputs, module.first.weight, module.first.bias, module.second.weight, module.second.bias]
    )
    largest = [gradient.abs().max().item() for gradient in gradients]
    assert found["loss"] == loss.item()
    first, second = found["layers"]
    assert (first["activation"], second["activation"]) == (hidden.abs().max().item(), outputs.abs().max().item())
    assert first["gradient"] == max(largest[0], *largest[2:4])
    assert second["gradient"] == max(largest[1], *largest[4:])
    assert first["nonzero"] == sum(int(g.count_nonzero()) for g in (gradients[0], *gradients[2:4]))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("settings", "status", "problem", "remark"),
    [
        (["data.kind=nans"], 1, "The loss of this batch is nan", "batch[0] has 2 NaN and 1 inf among 32 elements."),
        (["data.kind=labels"], 1, "batch[1] has the label 7, expected labels from 0 to 2", ""),
        (["data.kind=large", "precision=16-mixed"], 0, "", "float16 overflows in 'first' (Linear), 'second' (Linear)"),
        (["model._target_=looked_at.Failing"], 1, "fails: ValueError: asked to fail. Raised in looked_at.py:", ""),
        (["data.kind=texts"], 0, "", "has no tensor"),
        (["checks.steps=false"], 0, "", "No step was run: checks.steps=false."),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_anomalies_are_reported(settings, status, problem, remark, capsys):
    found = look(capsys, *settings, status=status)
    assert bool(found["problems"]) == bool(problem)
    assert problem in " ".join(found["problems"])
    assert remark in " ".join(found["remarks"])


@pytest.mark.parametrize(
    ("settings", "status", "expected"),
    [
        (["+recipe=mine", "data.kind=empty"], 2, "Got 0 batches from the training data"),
        (["+recipe=mine", "data.kind=none"], 2, "train_dataloader of data returns null, expected a DataLoader."),
        (["+recipe=mine", "data.kind=raises"], 1, "ValueError: sample 3 is not readable Raised in looked_at.py:"),
        (["+recipe=bare"], 2, "`train_dataloader` must be implemented"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_unavailable_data(settings, status, expected, capsys):
    assert main(["checks", *settings]) == status
    printed, errors = capsys.readouterr()
    assert expected in " ".join(errors.split())
    assert "Traceback" not in errors
    assert printed == ""


def test_manual_optimization_and_own_data_are_shown_without_a_memory_prediction(capsys):
    assert main(["checks", "json", "+recipe=bare", "model._target_=looked_at.ByItself"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "cannot be predicted: it uses manual optimization" in found["problems"][0]
    assert [layer["name"] for layer in found["layers"]] == ["first", "second"]
    assert found["layers"][0]["gradient"] > 0
    assert any("2 parameters that require gradients get none" in remark for remark in found["remarks"])
    assert [entry["name"] for entry in found["batch"]] == ["batch[0]", "batch[1]"]
    assert [row["measured"] for row in found["loading"]] == ["loading a batch", "a step"]
    assert "memory" not in found


def groups_by_layer(net):
    return [{"params": parameter, "lr": 0.1 if "0" in name else 0.05} for name, parameter in net.named_parameters()]


def trained(lines, net):
    """Return the weights after three steps with a group for each parameter, and ``lines`` in configure_optimizers."""
    names = {"optimizer": torch.optim.AdamW(groups_by_layer(net), weight_decay=0.1)}
    exec(lines, names)
    optimizer = names["optimizer"]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for batch in make_batches(3):
        loss_of(net, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return optimizer, dict(net.state_dict())


def test_shown_lines_merge_equal_groups(capsys):
    """The lines are executed as they are printed."""
    assert main(["checks", "+recipe=mine", "model._target_=looked_at.GroupPerParameter"]) == 0
    before, _, after = capsys.readouterr().out.partition("configure_optimizers, before a schedule is created:\n")
    assert before.splitlines()[-1].startswith("Note: SGD has 15 parameter groups with 3 different settings, and")
    lines = dedent("".join(takewhile(lambda line: line.startswith("    "), after.splitlines(keepends=True))))
    few, apart = (trained(one, make_net()) for one in (lines, ""))
    assert [len(optimizer.param_groups) for optimizer, _ in (few, apart)] == [2, 6]
    assert_identical(few[1], apart[1])
    assert describe_groups(apart[0]) is None  # too few to matter


# --- batches --------------------------------------------------------------------------------------------------


def test_contents_of_tensors():
    batch = {
        "mask": torch.tensor([True, False, True]),
        "scores": torch.tensor([1.0, float("nan"), 3.0, float("-inf")], dtype=torch.bfloat16),
        "nothing": torch.empty(0, 3),
        "tokens": torch.arange(100).reshape(2, 50),
        "sparse": torch.eye(3).to_sparse(),
        "long": "x" * 100,
        "several": [torch.tensor([3]), ["a", "b"]],
    }
    assert {entry.name[len("batch['") :].removesuffix("']"): entry[1:] for entry in describe(batch)} == {
        "mask": ("3", "bool", "", "false: 1, true: 2", ""),
        "scores": ("4", "bfloat16", "1 to 3", "mean 2, std 1", "1 NaN and 1 inf"),
        "nothing": ("0 x 3", "float32", "", "", ""),
        "tokens": ("2 x 50", "int64", "0 to 99", "100 different values", ""),
        "sparse": ("3 x 3", "float32", "", "sparse_coo", ""),
        "long": ("", "str", "", f"'{'x' * 12}...{'x' * 13}'", ""),
        "several'][0]": ("1", "int64", "3 to 3", "3: 1", ""),
        "several'][1]": ("2", "list of str", "", "the first: 'a'", ""),
    }
    assert suspicious(batch) == ["batch['scores'] has 1 NaN and 1 inf among 4 elements."]
    labels, inputs = suspicious([torch.zeros(4, dtype=torch.int64), torch.full((4, 2), 0.5), torch.ones(4) > 0])
    assert labels.startswith("All labels in batch[0] are 0.")
    assert inputs.startswith("All elements of batch[1] are 0.5,")


@pytest.mark.parametrize(
    ("labels", "classes", "expected"),
    [
        ([0, 1, 2], 3, ""),
        ([0, 3, 9], 3, "batch[0] has the labels 3, 9, expected labels from 0 to 2, because the model has 3 classes."),
        ([0, -100, -1], 3, ""),  # which torch's losses, and many data sets, leave out
        ([0, -2], 3, "batch[0] has the label -2, expected"),
        ([9], None, ""),
    ],
)
def test_labels_out_of_range(labels, classes, expected):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if classes is not None:
        module[0].num_classes = classes
    assert classes_of(module) == classes
    found = labels_out_of_range([torch.tensor(labels)], classes)
    assert (found.startswith(expected), bool(found)) == (True, bool(expected))
    assert labels_out_of_range([torch.tensor(labels), torch.tensor(labels)], classes) == ""  # which of them?
    module[0].num_classes, module[1].num_classes = 5, 6
    assert classes_of(module) is None


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        (torch.rand(40, 3, 8, 8), (32, 3, 8, 8)),
        (torch.zeros(2, 16, 12, 3, dtype=torch.uint8), (2, 3, 16, 12)),
        (torch.rand(2, 7, 8, 8), None),
        (torch.rand(2, 3, 2, 2), None),
        (torch.zeros(2, 1, 8, 8, dtype=torch.int64), None),
    ],
)
def test_image_like_tensors(tensor, shape):
    images = images_in({"x": torch.zeros(3), "y": tensor})
    assert (None if images is None else tuple(images.shape)) == shape


def test_picture_of_the_images(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    file = tmp_path / "new" / "batch.png"
    batch = torch.zeros(9, 1, 8, 8)
    batch[1, 0, 0, 0], batch[2, 0, 0, 0] = 300.0, float("nan")
    assert save_images(batch, file)
    picture = image.open(file)
    assert picture.size == (8 * 78, 2 * 78)  # eight in a row, each of 72 pixels and a margin of six
    assert [picture.getpixel((x, 4))[0] for x in (4, 78 + 4, 78 + 12, 156 + 4)] == [0, 255, 0, 0]
    assert not save_images(torch.zeros(9, 3), file)
    monkeypatch.setattr("trainer.cli.checks.batch.find_spec", lambda name: None)
    assert not save_images(batch, file)


# --- layers, steps and loading --------------------------------------------------------------------------------


def test_predicted_effects_of_float16():
    layer = Layer("a", "Linear", 1, 4, 2.0, 4.0, nonzero=1000, vanishing=250, vanishing_scaled=10)
    text = first_look.describe_float16([layer])
    assert "25% of the gradients underflow (below 6e-8; 25% in 'a' (Linear)); with a scale of 65,536, 1%." in text
    assert "steps are skipped until the scale is about 8,192." in text
    text = first_look.describe_float16([Layer("", "Net", 1, gradient=1e6, nonzero=1)])
    assert text.startswith("float16 overflows in Net itself: ")
    assert " Use bf16-mixed, which has float32's range." in text
    layers = [Layer(str(number), "Linear", 10 * number, outputs=1, activation=1.0) for number in range(10)]
    for layers[0].gradient, scale in ((0.0, None), (1.0, 2.0**15), (1e-9, SCALE)):
        assert largest_scale(layers) == scale


def recipe(batch, **known):
    return Recipe("mine", {"data": {}}, loaded=LoadedBatch(batch, 0.0, None, 0, 0), **known)


def test_batch_size_of_the_trial_step():
    batch = [torch.zeros(64, 3)]
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert part_for(recipe(batch), cpu, 100) == (batch, "")
    assert part_for(recipe(batch, peak=101), cpu, 100)[0] is None
    assert part_for(recipe(batch, operations=1000), cpu, 100) == (batch, "")
    assert part_for(recipe(batch, operations=10**15), cuda, 100) == (batch, "")
    part, why = part_for(recipe(batch, operations=int(2 * steps._OPERATIONS / 18)), cpu, 100)
    assert len(part[0]) == 32
    assert why == "The steps were run with 32 of the batch's 64 samples to save time on the CPU."
    part, why = part_for(recipe(batch, operations=int(100 * steps._OPERATIONS)), cpu, 100)
    assert part is None
    assert "too many for a quick check on a CPU" in why


class Slow:
    """A loader with a simulated clock: the first batch takes 5 seconds, batches that are ready none, and others 1."""

    num_workers, prefetch_factor = 1, 2

    def __init__(self, clock, number):
        self.clock, self.number = clock, number

    def __iter__(self):
        for index in range(self.number):
            self.clock.time += 5.0 if index == 0 else 0.0 if index < 3 else 1.0
            yield index


@pytest.mark.parametrize(("number", "seconds", "timed"), [(1, None, 0), (3, 0.0, 1), (8, 1.0, 5), (100, 1.0, 11)])
def test_batches_that_were_ready_are_not_timed(number, seconds, timed):
    clock = SimpleNamespace(time=0.0)
    found = load(Slow(clock, number), seconds=10.5, clock=lambda: clock.time)
    assert found == LoadedBatch(0, 5.0, seconds, timed, 1)


@pytest.mark.parametrize(
    ("workers", "loading", "step", "gpus", "expected"),
    [
        (0, 0.001, 1.0, 1, "The training step is the bottleneck: training waits for data < 0.1% of the time"),
        (0, 3.0, 1.0, 1, "The dataloader is the bottleneck: training waits for data 75% of the time. Try +data.num_"),
        (0, 1.0, 3.0, 0, "Training waits for data 25% of the time. More workers help"),
        (2, 1.0, 3.0, 1, "The training step is the bottleneck: training waits for data 0% of the time"),
        (2, 4.0, 1.0, 1, "The dataloader is the bottleneck: training waits for data 75% of the time. More workers"),
    ],
)
def test_bottleneck(workers, loading, step, gpus, expected, monkeypatch):
    monkeypatch.setattr("trainer.common.machine.cores", lambda: SimpleNamespace(usable=4))
    loaded = LoadedBatch(None, 1.0, loading, 10, workers)
    assert first_look.bottleneck(recipe(None), loaded, step, gpus).startswith(expected)
