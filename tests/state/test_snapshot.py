"""The snapshot of the user's objects: which values are stored as plain data, restored in another process, or named.

The tests of a fit that is resumed are in ``tests/checkpoint/test_contents.py``.
"""

import importlib
import io
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
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import MeanMetric, MinMaxMetric, SumMetric

from tests.state.test_generators import KINDS, draw
from tests.support import Irrep, assert_identical, nested_tensor, through_a_file
from trainer.lightning.modules import snapshot_of
from trainer.state import random_states
from trainer.state.random_states import is_watched
from trainer.state.snapshot import Rules, Snapshot, lost_in, memory_of


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
        self.blocks = nn.Sequential(Block(), nn.ReLU(), Block(), nn.Dropout(0.5), nn.BatchNorm1d(2))
        self.parts = Irrep([{"anneal": Anneal()}])
        self.recent = deque(maxlen=2)
        self.counts = Counter()
        self.mean = self.handle = None
        self.large = torch.zeros(3)
        self.views = [parameter.data.view(-1) for parameter in self.parameters()]
        self.rng = np.random.default_rng(0)
        self.events = UserList()

    @cached_property
    def tokenizer(self):
        return object()

    def state_dict(self, *args, **kwargs):
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "0" in name}

    def load_state_dict(self, state_dict, *_, **__):
        return super().load_state_dict(state_dict, strict=False)


class Data(LightningDataModule):
    def __init__(self):
        super().__init__()
        self.rng = random.Random(0)
        self.passes = 0


class Counts(Callback):
    def __init__(self):
        self.batches = 0


class SavesAPart(Counts):
    """Saves one of its attributes."""

    def __init__(self):
        super().__init__()
        self.anneal, self.noted = Anneal(), 0

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state_dict):
        self.batches = state_dict["batches"]


def objects():
    torch.manual_seed(0)
    return Module(), Data(), [Counts(), SavesAPart()]


def state_of(module, data=None, callbacks=(), **engine):
    engine = {
        "exposes_gradients": True,
        "world_size": 1,
        "global_rank": 0,
        "device": torch.device("cpu"),
    } | engine
    run = SimpleNamespace(module=module, datamodule=data, callbacks=callbacks, optimizers=[], schedules=[])
    run.engine, run.trainer, run.is_sharded = SimpleNamespace(**engine), SimpleNamespace(), False
    return snapshot_of(run)


def carried(change, *into):
    """Return the lost values, and the objects after the state of changed ones was restored to them."""
    given, others = objects(), into or objects()
    before, after = state_of(*given), state_of(*others)
    change(*given)
    return after.write(through_a_file(before.read())), others


def of_data(*roots):
    (found,) = random_states.find(*roots)
    return found


class Thing(Dataset):
    def __init__(self):
        self.number = 1
        self.items = [1, 2]
        self.shared = self.items
        self.tensor = torch.zeros(2, dtype=torch.bfloat16)
        self.array = np.zeros((2, 2), dtype=np.float32)
        self.handle = None


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("number", 2), ("number", None), ("number", "text"), ("number", (1, {"a": [2.5, {3}]})),
        ("number", np.float32(1.5)), ("items", [3]), ("new", 5), ("array", np.eye(2, dtype=np.float32)),
        ("tensor", torch.tensor([1.5, 2], dtype=torch.bfloat16)), ("tensor", torch.ones(3, dtype=torch.bool)),
        ("tensor", torch.tensor([1 + 2j]).conj()), ("tensor", torch.arange(3.0)[1::2]),
    ],
    ids=str,
)  # fmt: skip
def test_plain_values_are_restored(name, value):
    thing, other = Thing(), Thing()
    watched, restored = of_data(thing), of_data(other)
    setattr(thing, name, value)
    state = watched.read()
    assert [(path, kind, list(values)) for path, (kind, values) in state.items()] == [("0", "Thing", [name])]
    assert restored.write(through_a_file(state)) == []
    got = getattr(other, name)
    assert type(got) is type(value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        assert (got.dtype, got.tolist()) == (value.dtype, value.tolist())
    else:
        assert got == value
    assert other.shared == [1, 2]
    assert restored.read() == state


@pytest.mark.parametrize(
    "value", [object(), iter([1]), [object()], list(range(2000)), torch.ones(10_000), nested_tensor()], ids=type
)
def test_held_values_of_data_are_named_and_all_others_are_restored(value):
    thing, other = Thing(), Thing()
    watched, restored = of_data(thing), of_data(other)
    thing.handle, thing.number = value, 2
    state = watched.read()
    assert [lost.name for lost in lost_in(state)] == ["Thing.handle"]
    restored.write(through_a_file(state))
    assert (other.handle, other.number) == (None, 2)


def test_weights_of_samplers_may_be_large():
    class Weighted(Sampler):
        def __init__(self):
            self.weights, self.losses = torch.zeros(100_000), dict.fromkeys(range(5000), 0.0)

    sampler, other = Weighted(), Weighted()
    watched, restored = of_data(sampler), of_data(other)
    sampler.weights[70_000] = 1.5  # in place
    sampler.losses[4000] = 2.5
    restored.write(through_a_file(watched.read()))
    assert (other.weights[70_000].item(), other.weights.sum().item(), other.losses[4000]) == (1.5, 1.5, 2.5)


def test_containers_are_restored_in_place_and_unchanged_ones_are_reset():
    thing = Thing()
    watched = [of_data(thing)]
    before = random_states.states_of(watched)
    assert before == [{}]
    thing.items.append(3)
    thing.tensor += 1
    after = random_states.states_of(watched)
    for state, items, tensor in ((before, [1, 2], [0, 0]), (after, [1, 2, 3], [1, 1])):
        random_states.set_states(watched, state)
        assert thing.items is thing.shared
        assert (thing.items, thing.tensor.tolist()) == (items, tensor)
    thing.handle = 3
    random_states.set_states(watched, before)
    assert thing.handle is None


@pytest.mark.parametrize("kind", KINDS)
def test_generators_that_were_created_later_are_restored(kind):
    things, others = [Thing(), Thing()], [Thing(), Thing()]
    make = KINDS[kind]
    things[0].number, others[0].number = make(), make()  # is in the snapshot, until it is replaced
    watched, restored = of_data(things), of_data(others)
    things[0].number = things[0].handle = things[1].handle = make()
    draw(things[0].number, 1)
    restored.write(through_a_file(watched.read()))
    (thing, _), (other, second) = things, others
    assert other.number is other.handle is second.handle
    assert type(other.number) is type(thing.number)
    assert draw(other.number, 3) == draw(thing.number, 3)


def test_only_generators_of_objects_of_other_packages_are_part_of_data():
    class Foreign:
        __module__ = "torch.foreign"

    one, other = Foreign(), Foreign()
    one.handle, other.handle = random.Random(1), random.Random(1)
    watched, restored = of_data(one), of_data(other)
    one.handle, one.number = random.Random(2), 5
    restored.write(through_a_file(watched.read()))
    assert other.handle.random() == random.Random(2).random()
    assert not hasattr(other, "number")
    assert is_watched(Thing())
    assert not any(map(is_watched, [nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)], 0.1), io.BytesIO(), Thing, 1]))


def test_data_with_a_held_value_saves_itself():
    class Stored(Thing):
        def state_dict(self):
            return {"at": 7, "rest": torch.ones(2)}

        def load_state_dict(self, state):
            self.loaded = state

    thing, other = Stored(), Stored()
    watched, restored = of_data(thing), of_data(other)
    thing.handle = object()
    state = through_a_file(watched.read())
    assert lost_in(state) == []
    restored.write(state)
    assert_identical(other.loaded, thing.state_dict())


# --- the program --------------------------------------------------------------------------------------------------


def test_attributes_generators_and_references_are_restored():
    def change(module, data, callbacks):
        module.blocks[2].scale, module.parts[0]["anneal"].factor = 0.5, 0.25
        module.recent.extend([1.0, 2.0, 3.0])
        module.counts["a"] += 2
        module.mean = torch.tensor(2.0, dtype=torch.float16)
        module.hparams["rate"] = 0.1
        module.handle = [module.blocks[0]]
        data.passes, callbacks[0].batches = 3, 7
        callbacks[1].batches, callbacks[1].anneal.factor, callbacks[1].noted = 9, 0.5, 2
        module.rng.random()
        data.rng.random()

    lost, (module, data, callbacks) = carried(change)
    assert lost == []
    assert [module.blocks[0].scale, module.blocks[2].scale, module.parts[0]["anneal"].factor] == [1.0, 0.5, 0.25]
    assert (module.recent, module.recent.maxlen, module.counts) == (deque([2.0, 3.0]), 2, Counter(a=2))
    assert type(module.counts) is Counter
    assert (module.mean.item(), module.mean.dtype, module.hparams.rate) == (2.0, torch.float16, 0.1)
    assert module.handle[0] is module.blocks[0]
    assert (data.passes, callbacks[0].batches) == (3, 7)
    assert (callbacks[1].batches, callbacks[1].anneal.factor, callbacks[1].noted) == (9, 0.5, 2)
    drawn = [[one.rng.random() for _ in range(2)] for one in objects()[:2]]
    assert [module.rng.random(), data.rng.random()] == [second for _, second in drawn]


def test_weights_and_objects_of_other_packages_are_left_to_their_owners():
    def change(module, data, callbacks):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)
        module.events.append(3)
        module.forward = lambda x: x  # as strategies replace it during a step
        _ = module.tokenizer

    lost, (module, *_) = carried(change)
    assert lost == []
    assert not module.events
    assert [view.data_ptr() for view in module.views] == [weight.data_ptr() for weight in module.parameters()]
    assert torch.equal(module.views[0], objects()[0].views[0])


def test_flags_and_numbers_of_modules_of_other_packages_are_restored():
    def change(module, data, callbacks):
        dropout, norm = module.blocks[3:]
        dropout.p, norm.momentum, norm.cache = 0.25, None, torch.ones(1)
        norm.eval()
        norm.bias.requires_grad_(False)

    lost, (module, *_) = carried(change)
    dropout, norm = module.blocks[3:]
    assert (lost, dropout.p, norm.momentum, hasattr(norm, "cache")) == ([], 0.25, None, False)
    assert [norm.training, dropout.training] == [False, True]
    assert [norm.weight.requires_grad, norm.bias.requires_grad] == [True, False]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("handle", object(), "value"),
        ("large", torch.zeros(2**22 + 1), "value"),
        ("handle", [0.0] * (2**22 + 1), "value"),
        ("recent", deque([object()]), "value"),
        ("handle", [count()], "iterator"),
        ("handle", type("Mine", (random.Random,), {})(), "generator"),
    ],
    ids=["object", "tensor", "list", "item", "iterator", "generator"],
)
def test_held_value_is_named_and_all_others_are_restored(name, value, reason):
    def change(module, data, callbacks):
        module.mean = 3.0
        callbacks[0].batches = 7
        setattr(module, name, value)

    lost, (module, _, callbacks) = carried(change)
    assert [(one.name, one.reason) for one in lost] == [(f"Module.{name}", reason)]
    assert (module.mean, callbacks[0].batches) == (3.0, 7)


def test_large_tensors_that_change_in_place_are_named():
    module = Module()
    module.large = torch.zeros(2**22 + 1)
    module.mean = {"a": {"b": torch.zeros(2**22 + 1)}, "c": torch.zeros(1)}
    state = state_of(module)
    assert lost_in(state.read()) == []
    for place, expected in (("large", ["Module.large"]), ("mean", ["Module.mean", "Module.large"])):
        {"large": module.large, "mean": module.mean["c"]}[place][0] += 1
        assert {one.name for one in lost_in(state.read())} == set(expected)


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
def test_iterator_counts_as_changed(make):
    module = Module()
    module.handle = make()
    assert [(one.name, one.reason) for one in lost_in(state_of(module).read())] == [("Module.handle", "iterator")]


def test_iterators_with_attributes_and_open_files_are_restored(tmp_path):
    module = Module()
    module.handle = Countdown()
    with (tmp_path / "log").open("w") as module.parts[0]["log"]:
        state = state_of(module)
        _ = next(module.handle), module.parts[0]["log"].write("a")
        saved = state.read()
        _ = next(module.handle)
        assert state.write(saved) == []
    assert module.handle.left == 8


def test_tensors_of_a_gpu_are_restored_on_the_device_of_the_run():
    """A checkpoint of a GPU is resumed on a CPU."""
    module, value = Module(), torch.ones(2)
    before = state_of(module)
    module.mean, module.handle = value, [value]
    saved = before.read()
    values = saved["module"][1]
    values["mean"][1][-1] = values["handle"][1][1][0][-1] = "cuda"
    other = Module()
    assert state_of(other).write(saved) == []
    assert_identical([other.mean, *other.handle], [value, value])


def test_objects_of_a_removed_root_are_left_out_and_other_numbers_are_named():
    def change(module, data, callbacks):
        module.mean, data.passes, callbacks[0].batches = 3.0, 2, 7

    assert carried(change, Module(), None, [])[0] == []
    module, data = Module(), Data()
    lost, _ = carried(change, module, data, [Counts(), Counts()])
    assert [(one.name, one.reason) for one in lost] == [("Counts.batches", "missing")]
    assert (module.mean, data.passes) == (3.0, 2)


class Own:
    """Saves itself, or cannot."""

    def __init__(self):
        self.value, self.other = 1, 1

    def load_state_dict(self, state):
        self.value = state["value"]


class Saves(Own):
    def state_dict(self):
        return {"value": self.value, "weights": [nn.Parameter(torch.ones(1))]}


class NeedsAnArgument(Own):
    def state_dict(self, batches):
        return {"value": self.value}


class Raises(Own):
    def state_dict(self):
        raise RuntimeError("not ready")


class HasObjects(Own):
    def state_dict(self):
        return {"value": self}


@pytest.mark.parametrize(("make", "other"), [(Saves, 1), (NeedsAnArgument, 2), (Raises, 2), (HasObjects, 2)])
def test_object_saves_itself_if_its_state_dict_can_be_called(make, other):
    changed, resumed = Module(), Module()
    changed.own, resumed.own = make(), make()
    before, after = state_of(changed), state_of(resumed)
    changed.own.value = changed.own.other = 2
    assert after.write(through_a_file(before.read())) == []
    assert (resumed.own.value, resumed.own.other) == (2, other)


def test_only_attributes_that_a_subclass_of_a_stock_callback_adds_are_restored():
    class Patient(EarlyStopping):
        checks = 0

    class Bar(TQDMProgressBar):
        shown = 0

    changed, resumed = ([Patient("loss"), Bar(), EarlyStopping("loss", mode="max")] for _ in range(2))
    before, after = state_of(Module(), None, changed), state_of(Module(), None, resumed)
    changed[0].checks, changed[0].wait_count, changed[2].wait_count = 3, 2, 2
    changed[1].shown, changed[1].train_progress_bar = 3, object()
    assert after.write(through_a_file(before.read())) == []
    assert (resumed[0].checks, resumed[0].wait_count, resumed[2].wait_count, resumed[1].shown) == (3, 0, 0, 3)


def test_states_and_other_attributes_of_metric_objects_are_restored():
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
    assert (best.sum_value.item(), best.update_count) == (3.0, 1)
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
    lost, _ = carried(lambda module, *_: setattr(module, "mean", 3.0), module, Data(), [])
    assert (lost, module.mean) == ([], 3.0)


# --- tensors of modules -------------------------------------------------------------------------------------------


def outside(**engine):
    module = Module()
    module.hidden = [nn.BatchNorm1d(2), nn.Linear(2, 1), module.blocks]
    return module, state_of(module, **engine)


def test_changed_tensors_of_modules_outside_of_the_module_are_restored():
    module, before = outside()
    assert not any(":tensor" in name for _, values in before.read().values() for name in values)
    module.hidden[0].num_batches_tracked.add_(1)
    module.hidden[1].weight.data.mul_(2)  # does not change the tensor's version
    saved = before.read()
    tensors = [value for _, values in saved.values() for name, value in values.items() if name.startswith(":tensor")]
    assert [tensor.data_ptr() for _, tensor, _ in tensors] == [  # no copies
        module.hidden[0].num_batches_tracked.data_ptr(), module.hidden[1].weight.data_ptr()
    ]  # fmt: skip
    other, after = outside()
    assert after.write(through_a_file(saved)) == []
    assert other.hidden[0].num_batches_tracked == 1
    assert torch.equal(other.hidden[1].weight, module.hidden[1].weight)
    assert after.read().keys() == saved.keys()  # also if the next process begins with these values


def test_tensors_outside_of_the_module_that_are_not_restored_are_named():
    module, before = outside(world_size=2)
    module.hidden[1].bias.data.add_(1)
    assert [(one.name, one.reason) for one in lost_in(before.read())] == [("Linear.bias", "value")]
    module, before = outside()
    module.hidden[1].bias.data.add_(1)
    saved = before.read()
    module.hidden[1] = nn.Linear(2, 3)
    assert [one.name for one in state_of(module).write(saved)] == ["Linear.bias"]


def test_buffers_that_are_saved():
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("own", torch.ones(1), persistent=False)
    module.register_buffer("none", None, persistent=False)
    module.register_buffer("kept_none", None)
    module.register_buffer("empty", torch.ones(1, device="meta"), persistent=False)
    module.register_buffer("unknown", nn.UninitializedBuffer(), persistent=False)

    def elsewhere():
        return memory_of([module.kept])

    def names(**rules):
        rules = Rules(lambda _: None, elsewhere=elsewhere, **rules)
        return {name.partition(" ")[2] for name in Snapshot({"module": module}, rules).read()["module"][1]}

    assert names() == {"own", "none"}
    assert names(saves_buffers=True) == {"own", "none", "kept"}
    saved = {"unknown": torch.ones(2), "own": torch.zeros(1), "none": None, "empty": torch.ones(1)}
    values = {f":tensor {n}": ["weights", value, "cpu"] for n, value in saved.items()}
    assert Snapshot({"module": module}, Rules(lambda _: None)).write({"module": ["torch.Module", values]}) == []
    assert_identical({name: module._buffers[name] for name in saved}, saved)
