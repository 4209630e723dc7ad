"""Attributes and random generators of modules, datamodules and callbacks: found, saved, restored, or reported."""

import importlib
import random
from collections import Counter, UserList, deque
from functools import cached_property
from itertools import count, cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, TQDMProgressBar
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MinMaxMetric, SumMetric

from tests.state.test_attributes import through_a_file
from tests.support import Irrep
from trainer.compat.modules import program_state


class Anneal:
    """An object of the user's class that is no module."""

    def __init__(self):
        self.factor = 1.0


class Block(nn.Identity):
    """A class of the user with a base of torch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = 1.0


class Module(LightningModule):
    """Saves only a part of its weights."""

    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"rate": 0.5})
        self.blocks = nn.Sequential(Block(), nn.ReLU(), Block())
        self.parts = Irrep([{"anneal": Anneal()}])
        self.recent = deque(maxlen=2)
        self.counts = Counter()
        self.mean = None
        self.large = torch.zeros(3)
        self.views = [parameter.data.view(-1) for parameter in self.parameters()]
        self.rng = np.random.default_rng(0)
        self.handle = None
        self.events = UserList()

    @cached_property
    def tokenizer(self):
        return object()

    def state_dict(self, *args, **kwargs):
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "0" in name}

    def load_state_dict(self, state_dict, *_, **__):
        return super().load_state_dict(state_dict, strict=False)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["note"] = "hello"


class Data(LightningDataModule):
    def __init__(self):
        super().__init__()
        self.rng = random.Random(0)
        self.passes = 0


class Counts(Callback):
    def __init__(self):
        self.batches = 0


class SavesItself(Counts):
    """Saves its own attributes, but not those of an object in them."""

    def __init__(self):
        super().__init__()
        self.anneal = Anneal()

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state_dict):
        self.batches = state_dict["batches"]


def objects():
    torch.manual_seed(0)
    return Module(), Data(), [Counts(), SavesItself()]


def state_of(module, data=None, callbacks=()):
    trainer = SimpleNamespace(lightning_module=module, datamodule=data, callbacks=callbacks, optimizers=[])
    trainer.lr_scheduler_configs = []
    return program_state(trainer)


def carried(change, *into):
    """Return the messages, and the objects after the state of changed ones was restored to them."""
    given, others = objects(), into or objects()
    before, after = state_of(*given), state_of(*others)
    change(*given)
    return after.write(through_a_file(before.read())), others


def test_plain_attributes_and_generators_are_restored():
    def change(module, data, callbacks):
        module.blocks[2].scale, module.parts[0]["anneal"].factor = 0.5, 0.25
        module.recent.extend([1.0, 2.0, 3.0])
        module.counts["a"] += 2
        module.mean = torch.tensor(2.0, dtype=torch.float16)
        module.hparams["rate"] = 0.1
        data.passes, callbacks[0].batches, callbacks[1].batches = 3, 7, 9
        callbacks[1].anneal.factor = 0.5
        module.rng.random()
        data.rng.random()

    problems, (module, data, callbacks) = carried(change)
    assert problems == []
    assert [module.blocks[0].scale, module.blocks[2].scale, module.parts[0]["anneal"].factor] == [1.0, 0.5, 0.25]
    assert (module.recent, module.recent.maxlen, module.counts) == (deque([2.0, 3.0]), 2, Counter(a=2))
    assert type(module.counts) is Counter
    assert (module.mean.item(), module.mean.dtype, module.hparams.rate) == (2.0, torch.float16, 0.1)
    assert (data.passes, callbacks[0].batches) == (3, 7)
    assert (callbacks[1].batches, callbacks[1].anneal.factor) == (0, 1.0)
    drawn = [[one.rng.random() for _ in range(2)] for one in objects()[:2]]
    assert [module.rng.random(), data.rng.random()] == [second for _, second in drawn]


def test_weights_and_objects_of_other_packages_are_left_to_their_owners():
    def change(module, data, callbacks):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)
        module.events.append(3)
        module.forward = lambda x: x  # as strategies replace it during a step
        module.train(False)
        _ = module.tokenizer

    problems, (module, *_) = carried(change)
    assert problems == []
    assert module.training
    assert not module.events
    assert [view.data_ptr() for view in module.views] == [weight.data_ptr() for weight in module.parameters()]
    assert torch.equal(module.views[0], objects()[0].views[0])


@pytest.mark.parametrize(
    ("name", "value"), [("handle", object()), ("large", torch.zeros(2**22 + 1)), ("recent", deque([object()]))]
)
def test_object_with_an_attribute_that_cannot_be_saved_keeps_all_of_them(name, value):
    def change(module, data, callbacks):
        module.mean = 3.0
        callbacks[0].batches = 7
        setattr(module, name, value)

    (problem,), (module, _, callbacks) = carried(change)
    assert problem.startswith(f"The checkpoint lacks attributes that its run changed: Module.{name}. ")
    assert (module.mean, callbacks[0].batches) == (None, 7)


def test_large_tensors_that_change_in_place_are_reported():
    module = Module()
    module.large = torch.zeros(2**22 + 1)
    module.mean = {"a": {"b": torch.zeros(2**22 + 1)}, "c": torch.zeros(1)}
    state = state_of(module)
    assert state.write(state.read()) == []
    for place in ("large", "mean"):
        {"large": module.large, "mean": module.mean["c"]}[place][0] += 1
        assert f"Module.{place}" in state.write(state.read())[0]


class Countdown:
    """An iterator of the user's class, with attributes."""

    left = 9

    def __next__(self):
        self.left -= 1
        return self.left

    def __iter__(self):
        return self


@pytest.mark.parametrize(
    "make", [lambda: iter(DataLoader(range(9))), lambda: cycle([1, 2]), lambda: [count()], lambda: {"a": iter([1])}]
)
def test_iterator_is_reported(make):
    module = Module()
    module.handle = make()
    state = state_of(module)
    assert "Module.handle" in state.write(state.read())[0]


def test_iterators_with_attributes_and_open_files_are_not_reported(tmp_path):
    module = Module()
    module.handle = Countdown()
    with (tmp_path / "log").open("w") as module.parts[0]["log"]:
        state = state_of(module)
        _ = next(module.handle), module.parts[0]["log"].write("a")
        saved = state.read()
        _ = next(module.handle)
        assert state.write(saved) == []
    assert module.handle.left == 8


def test_objects_that_do_not_exist_any_more_are_left_out_and_other_numbers_are_reported():
    def change(module, data, callbacks):
        module.mean, data.passes, callbacks[0].batches = 3.0, 2, 7

    assert carried(change, Module(), None, [])[0] == [
        "The modules and callbacks had 2 random generators, and have 1 now: these are not restored."
    ]
    module, data = Module(), Data()
    problems, _ = carried(change, module, data, [Counts(), Counts()])
    assert problems == ["The attributes of Counts are not restored: there is another number of these objects now."]
    assert (module.mean, data.passes) == (3.0, 2)


def test_subclass_of_a_stock_callback_has_attributes():
    class Patient(EarlyStopping):
        checks = 0

    class Bar(TQDMProgressBar):
        shown = 0

    changed, resumed = ([Patient("loss"), Bar()] for _ in range(2))
    before, after = state_of(Module(), None, changed), state_of(Module(), None, resumed)
    changed[0].checks, changed[0].wait_count = 3, 2
    changed[1].shown, changed[1].train_progress_bar = 3, object()
    assert after.write(through_a_file(before.read())) == []
    assert (resumed[0].checks, resumed[0].wait_count, resumed[1].shown) == (3, 0, 3)


def test_attributes_of_metric_objects_that_are_no_states_are_restored():
    class Best(SumMetric):
        best = torch.inf

        def compute(self):
            self.best = min(self.best, super().compute().item())

    changed, resumed = Module(), Module()
    for module in (changed, resumed):
        module.metrics = nn.ModuleList([MinMaxMetric(MeanMetric()), Best()])
        module.plain = [Best()]
    before, after = state_of(changed), state_of(resumed)
    for metric in (*changed.metrics, *changed.plain):
        metric.update(3.0)
        metric.compute()
    assert after.write(through_a_file(before.read())) == []
    extremes, best = resumed.metrics
    assert (extremes.min_val.item(), extremes.max_val.item(), best.best) == (3.0, 3.0, 3.0)
    assert (best.sum_value.item(), best.update_count) == (0.0, 0)  # `MetricObjects` restores states of submodules
    (best,) = resumed.plain
    assert (best.sum_value.item(), best.update_count, best.best) == (3.0, 1, 3.0)


def test_installed_package_of_the_module_is_part_of_the_program(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    code = "class Anneal:\n    factor = 1.0\n    def __init__(self):\n        self.factor = 1.0\n"
    (folder / "installed_library.py").write_text(code)
    code += "from lightning.pytorch import LightningModule\nclass Net(LightningModule):\n    pass\n"
    (folder / "installed_project.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    project, library = map(importlib.import_module, ("installed_project", "installed_library"))

    class Mine(project.Net):
        def __init__(self, make):
            super().__init__()
            self.anneal = make()

    for kind in (project.Net, Mine):
        for make, factor in ((project.Anneal, 0.5), (library.Anneal, 1.0)):
            changed, resumed = Mine(make), Mine(make)
            changed.__class__ = resumed.__class__ = kind
            before, after = state_of(changed), state_of(resumed)
            changed.weight, changed.anneal.factor = 0.25, 0.5
            assert after.write(through_a_file(before.read())) == []
            assert (resumed.weight, resumed.anneal.factor) == (0.25, factor)


def test_module_that_fsdp_wraps_has_the_attributes_of_its_class():
    module = Module()
    module.__class__ = type("FSDPModule", (FSDPModule, Module), {"__module__": FSDPModule.__module__})
    problems, _ = carried(lambda module, *_: setattr(module, "mean", 3.0), module, Data(), [])
    assert (problems, module.mean) == ([], 3.0)


def test_state_of_an_older_checkpoint_changes_nothing(tmp_path):
    module = Module()
    state = state_of(module)
    module.mean = 2.0
    assert state.write([]) == []
    assert module.mean == 2.0
