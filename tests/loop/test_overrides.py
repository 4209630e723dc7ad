"""Overridden methods of strategies, plugins, loggers, profilers, samplers and datamodules are called as by Lightning.

The scan records every method that Lightning's own Trainer calls on such an object in a small fit, validation, test,
prediction and resumed fit. Then each of them is overridden for our Trainer, and the calls, their arguments and their
places between the hooks of the module are compared.
"""

import functools
import inspect
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningDataModule
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import HalfPrecision, TorchCheckpointIO
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from tests.parity import (
    MODULE_HOOKS,
    Classifier,
    Learner,
    Logs,
    RecordingLogger,
    assert_agree,
    assert_same_weights,
    data,
    lightning,
    lightnings_noise_ignored,
    ours,
)
from tests.parity import plain as plain_value
from tests.support import (
    Regression,
    assert_identical,
    loader_of,
    make_batches,
    make_net,
    make_trainer,
    manual_step,
    native_fp16,
    needs_fsdp2,
    train_by_hand,
)
from trainer import FSDP2Strategy
from trainer.errors import PrecisionError, UnsupportedError
from trainer.loop.optimizers import MultipleOptimizersError
from trainer.loop.overrides import overridden
from trainer.precision import Precision

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")  # of the resumed fit

LANDMARKS = [
    name
    for name in MODULE_HOOKS
    if (name.startswith("on_") or name.endswith("_step")) and not name.endswith(("_model_eval", "_model_train"))
]
"""Hooks of the module that show the place of a call."""

UNRECORDED = {
    "self", "trainer", "model", "checkpoint", "filepath", "path", "checkpoint_path", "closure", "log_dir",
    "weights_only",  # we always pass one: checkpoints are read without executing them
}  # fmt: skip
"""Arguments that differ between two runs of the same Trainer, and one that differs on purpose."""

DIFFERENT = {
    "strategy": {
        # how processes communicate is up to the Trainer: an override is used for each exchange that takes place
        "barrier", "broadcast", "reduce", "reduce_boolean_decision", "all_gather",
    },
    "environment": {"global_rank", "local_rank", "node_rank", "world_size"},  # numbers, read whenever they are needed
    "sampler": {"__len__"},  # a number, read whenever it is needed
    "batch_sampler": {"__len__"},
    "profiler": {"start", "stop", "profile"},  # the names of actions are compared in test_profiling.py
}  # fmt: skip
"""Methods that may be called in other places, or in other numbers, than by Lightning; each with the reason."""

RESUME = ("resume", {})
"""Separates the calls of the resumed fit from the others."""


# --- recording -------------------------------------------------------------------------------------------------------


def plain(value):
    if callable(value) and not isinstance(value, type):
        return "callable"
    return plain_value(value)


def functions(cls):
    """Return the methods of a class by name, with dunder methods for samplers only."""
    found = {name: inspect.getattr_static(cls, name) for name in dir(cls)}
    return {
        name: attribute
        for name, attribute in found.items()
        if inspect.isfunction(attribute) and (not name.startswith("__") or name in ("__iter__", "__len__"))
    }


def recorder(owner, name, original, log):
    """Return a method that appends its call to ``log``, and calls the original."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = {k: plain(v) for k, v in bound.arguments.items() if k not in UNRECORDED}
        log.append((f"{owner}.{name}", given))
        return original(*args, **kwargs)

    return method


class Watch:
    """Overrides methods of the objects of one Trainer in subclasses.

    Args:
        wanted: the names of the methods to override, by owner.
    """

    def __init__(self, wanted):
        self.wanted, self.log = wanted, []

    def make(self, owner, cls, *args, **kwargs):
        names = self.wanted.get(owner, [])
        methods = {name: recorder(owner, name, functions(cls)[name], self.log) for name in names}
        return type(f"Recording{cls.__name__}", (cls,), methods)(*args, **kwargs) if names else cls(*args, **kwargs)


class ByHand(Logs):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        manual_step(self, self.loss(batch))


class Order(SequentialSampler):
    """A class to patch."""


class Batches(BatchSampler):
    """Keeps the batch size, which Lightning does not keep for torch's own under DDP."""


class Data(LightningDataModule):
    def train_dataloader(self):
        return self.training

    def val_dataloader(self):
        return data(4)

    test_dataloader = predict_dataloader = val_dataloader


def program(make, watch, folder, base, ddp, resumes):
    """Fit, validate, test, predict and, if ``resumes``, a second fit. Returns all recorded calls."""
    extra = {"checkpoint_io": watch.make("checkpoint_io", TorchCheckpointIO)}
    extra |= {"cluster_environment": watch.make("environment", LightningEnvironment)} if ddp else {"device": "cpu"}
    if make is lightning:
        extra["precision_plugin"] = watch.make("precision", LightningPrecision)
    hooks = {name: recorder("module", name, getattr(base, name), watch.log) for name in LANDMARKS}
    module = type(f"Recording{base.__name__}", (base,), hooks)()
    datamodule, source = watch.make("datamodule", Data), data(8).dataset
    batches = watch.make(
        "batch_sampler", Batches, watch.make("sampler", RandomSampler if ddp else Order, source), 2, False
    )
    datamodule.training = DataLoader(source, batch_sampler=batches)
    trainer = make(
        strategy=watch.make("strategy", DDPStrategy if ddp else SingleDeviceStrategy, **extra),
        accelerator=watch.make("accelerator", CPUAccelerator),
        logger=watch.make("logger", RecordingLogger) if "logger" in watch.wanted else False,
        profiler=watch.make("profiler", PassThroughProfiler),
        callbacks=[ModelCheckpoint(folder, every_n_epochs=1, save_top_k=1)],
        enable_checkpointing=True,
        default_root_dir=folder,
        max_epochs=2,
        log_every_n_steps=1,
        num_sanity_val_steps=1,
        accumulate_grad_batches=2 if module.automatic_optimization else 1,
    )
    trainer.fit(module, datamodule)
    for evaluate in (trainer.validate, trainer.test):
        evaluate(module, datamodule, verbose=False)
    trainer.predict(module, datamodule)
    if resumes:
        watch.log.append(RESUME)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, datamodule, ckpt_path=trainer.checkpoint_callback.best_model_path)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return watch.log


BASES = {
    "strategy": SingleDeviceStrategy,
    "precision": LightningPrecision,
    "checkpoint_io": TorchCheckpointIO,
    "accelerator": CPUAccelerator,
    "logger": RecordingLogger,
    "profiler": PassThroughProfiler,
    "datamodule": Data,
    "sampler": Order,
    "batch_sampler": Batches,
}


@functools.cache
def lightnings(base, ddp, folder):
    """Return the calls of Lightning's Trainer."""
    bases = {**BASES, "strategy": DDPStrategy, "environment": LightningEnvironment} if ddp else BASES
    everything = {owner: list(functions(cls)) for owner, cls in bases.items()}
    with lightnings_noise_ignored():
        return program(lightning, Watch(everything), folder, base, ddp, resumes=True)


def called(events, owner):
    """Return the called methods of ``owner`` without those that differ on purpose."""
    names = {name.removeprefix(f"{owner}.") for name, _ in events if name.startswith(f"{owner}.")}
    return sorted(names - DIFFERENT.get(owner, set()))


def among(events, owner, names):
    """Return the calls of these methods between those of the module's hooks."""
    wanted = {f"{owner}.{name}" for name in names}
    return [event for event in events if event[0] in wanted or event[0].startswith("module.")]


def compare(theirs, owner, names, folder, base, ddp):
    """Run the program with these methods overridden; compare the calls with Lightning's."""
    resumes = not {f"{owner}.{name}" for name in names} <= {event for event, _ in theirs[: theirs.index(RESUME)]}
    mine = program(ours, Watch({owner: names}), folder / f"{owner}-{names[0]}", base, ddp, resumes)
    end = None if resumes else theirs.index(RESUME)
    assert among(mine, owner, names) == among(theirs[:end], owner, names), names


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lightning")


@pytest.mark.whole
@pytest.mark.parametrize(("base", "ddp"), [(Logs, False), (ByHand, True)])
def test_each_method_of_a_strategy_is_called_as_by_lightning(base, ddp, folder, tmp_path):
    """A few methods at a time, so that each is called without an override of a related one."""
    theirs = lightnings(base, ddp, folder)
    names = called(theirs, "strategy")
    assert len(names) > 30
    for first in range(6):
        compare(theirs, "strategy", names[first::6], tmp_path, base, ddp)


@pytest.mark.whole
def test_each_method_of_other_objects_is_called_as_by_lightning(folder, tmp_path):
    theirs = lightnings(Logs, False, folder)
    for owner in BASES.keys() - {"strategy", "precision"}:
        names = called(theirs, owner)
        for one in [[name] for name in names] if owner == "datamodule" else [names]:
            compare(theirs, owner, one, tmp_path, Logs, False)
    theirs = lightnings(ByHand, True, folder)
    compare(theirs, "environment", called(theirs, "environment"), tmp_path, ByHand, True)


def test_refused_methods_are_called_by_lightning(folder):
    """Each method of Lightning's precision plugins that its loops call is refused if it is overridden here."""
    names = called(lightnings(Logs, False, folder), "precision")
    assert len(names) > 15
    for number, name in enumerate(names):
        trainer = ours(max_epochs=1)
        owner = trainer.precision_plugin if number % 2 else LightningPrecision
        with mock.patch.object(owner, name), pytest.raises(PrecisionError, match=f"its own `{name}`, .*precision"):
            trainer.fit(Learner(), data(2))
    assert overridden(ours().precision_plugin, LightningPrecision) == []  # all patches are undone


# --- overrides that change behavior ----------------------------------------------------------------------------------


def trained(setup, methods=(), batches=None):
    """Fit with overridden methods of the strategy that call the base class."""

    def passes(name):
        return lambda self, *args, **kwargs: getattr(SingleDeviceStrategy, name)(self, *args, **kwargs)

    kind = type("Own", (SingleDeviceStrategy,), {name: passes(name) for name in methods})
    trainer = make_trainer(None, strategy=kind(torch.device("cpu")), accelerator="auto", max_epochs=2, **setup)
    trainer.fit(module := Regression(make_net(dropout=0.1)), loader_of(batches or make_batches(5)))
    return trainer, module


OVERFLOWS = make_batches(5, gains={1: 1e6, 3: 1e6})


@pytest.mark.parametrize(
    ("setup", "batches"),
    [
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, None),
        ({"precision": native_fp16(init_scale=2.0**10, growth_interval=3), "accumulate_grad_batches": 2}, OVERFLOWS),
    ],
    ids=["32-true", "16-mixed"],
)
@pytest.mark.parametrize(
    "methods",
    [("backward",), ("training_step", "batch_to_device", "on_train_batch_start"),
     ("optimizer_step", "post_backward", "post_training_step", "setup_optimizers")],
    ids=",".join,
)  # fmt: skip
def test_override_that_calls_the_base_class_changes_nothing(setup, batches, methods):
    (usual, expected), (trainer, found) = (trained(setup, names, batches) for names in ((), methods))
    assert (trainer.global_step, trainer.skipped_steps) == (usual.global_step, usual.skipped_steps)
    assert (trainer.skipped_steps > 0) == (batches is not None)
    assert trainer.scaler.get_scale() == usual.scaler.get_scale()
    assert_same_weights(found, expected)


def test_loss_arrives_unscaled_and_the_step_outside_of_autocast():
    """As in Lightning, scaling and autocast are in the methods of the base class."""
    seen = []

    def look(value, *_):
        seen.append(torch.is_autocast_enabled("cpu"))
        return value

    class Own(SingleDeviceStrategy):
        def training_step(self, *args):
            self.loss = look(super().training_step(*look(args)))
            return self.loss

        def backward(self, closure_loss, optimizer, *args, **kwargs):
            assert closure_loss.item() == self.loss.item() / 2  # two batches in a window
            assert optimizer is self.optimizers[0]
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    options = {"accumulate_grad_batches": 2, "precision": native_fp16(init_scale=1024.0)}
    trainer = make_trainer(None, strategy=Own(torch.device("cpu")), accelerator="auto", **options)
    trainer.fit(Regression(change=look), loader_of(make_batches(4)))
    assert seen == [False, True, False] * 4


def test_step_of_a_strategy_may_return_something_else():
    class Doubled(SingleDeviceStrategy):
        def training_step(self, *args):
            return 2 * super().training_step(*args)

        def batch_to_device(self, batch, *args, **kwargs):
            return [part.flip(0) if part.ndim else part for part in super().batch_to_device(batch, *args, **kwargs)]

    module, batches = Regression(), make_batches(3)
    make_trainer(None, strategy=Doubled(torch.device("cpu")), accelerator="auto").fit(module, loader_of(batches))
    train_by_hand(by_hand := make_net(), [[x.flip(0), y.flip(0), 2 * gain] for x, y, gain in batches])
    assert_same_weights(module.net, by_hand)


# --- patches ----------------------------------------------------------------------------------------------------------


def test_patches_of_the_default_checkpoint_io_count(tmp_path):
    names = ("save_checkpoint", "load_checkpoint", "remove_checkpoint")

    def scenario(make):
        log, saver = [], ModelCheckpoint(tmp_path / make.__name__)
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.setattr(TorchCheckpointIO, name, recorder("io", name, vars(TorchCheckpointIO)[name], log))
            trainer = make(max_epochs=2, callbacks=[saver], enable_checkpointing=True)
            trainer.fit(Learner(), data(4))
            trainer.fit_loop.max_epochs = 3
            trainer.fit(Learner(), data(4), ckpt_path=saver.best_model_path)
        return [name for name, _ in log]

    assert {*assert_agree(scenario)} == {f"io.{name}" for name in names}


def test_patch_counts_while_it_lasts():
    trainer = ours(max_epochs=1)
    for epochs in (1, 2, 3):
        trainer.fit_loop.max_epochs = epochs
        patch = mock.patch.object(trainer.strategy, "training_step", wraps=trainer.strategy.training_step)
        with patch if epochs == 2 else nullcontext() as step:
            trainer.fit(Learner(), data(4))
        assert step is None or step.call_count == 2
        assert (trainer.loop.path.forward_context is nullcontext) == (epochs == 2)


@pytest.mark.parametrize("way", ["subclass", "object", "class"])
def test_own_precision_converts_batches_with_each_kind_of_override(way):
    def halve(*args):
        features, labels = args[-1]
        return features[:1], labels[:1]

    class Module(Learner):
        def training_step(self, batch, batch_idx):
            assert len(batch[0]) == 1
            return super().training_step(batch, batch_idx)

    plugin = type("Own", (Precision,), {"convert_batch": halve} if way == "subclass" else {})()
    patched = {"subclass": None, "object": plugin, "class": Precision}[way]
    with mock.patch.object(patched, "convert_batch", halve) if patched else nullcontext():
        ours(max_epochs=1, precision=plugin).fit(Module(), data(4))


@needs_fsdp2
def test_step_of_a_sharding_strategy_changes_nothing():
    names = ("optimizer_step", "batch_to_device", "setup_optimizers", "on_train_batch_start", "on_train_end")
    found, log = [], []
    for wanted in ((), names):
        methods = {name: recorder("strategy", name, getattr(FSDP2Strategy, name), log) for name in wanted}
        trainer = make_trainer(
            None, strategy=type("Own", (FSDP2Strategy,), methods)(), devices=1, accumulate_grad_batches=2,
            precision=native_fp16(init_scale=1024.0),
        )  # fmt: skip
        trainer.fit(module := Regression(), loader_of(make_batches(5, gains={3: 1e6})))
        found.append([trainer.skipped_steps, dict(module.state_dict())])
    torch.distributed.destroy_process_group()
    assert_identical(*found)
    assert found[0][0] == 1
    called = [name.removeprefix("strategy.") for name, _ in log]
    assert [called.count(name) for name in names] == [3, 5, 1, 5, 1]


# --- refused methods -------------------------------------------------------------------------------------------------


def test_subclass_of_a_lightning_precision_is_refused():
    ours(plugins=[LightningPrecision()])  # does nothing, as ours
    plugin, trainer = LightningPrecision(), ours(max_epochs=1)
    plugin.clip_grad_by_norm = print
    with pytest.raises(PrecisionError, match=r"Got plugins with its own `clip_grad_by_norm`.*trainer\.precision"):
        ours(plugins=[plugin])
    trainer.strategy.precision_plugin = HalfPrecision("bf16-true")
    with pytest.raises(PrecisionError, match=r"Got HalfPrecision through SingleDeviceStrategy\.precision_plugin"):
        trainer.fit(Learner(), data(2))
    with pytest.raises(PrecisionError, match=r"Got a GradScaler for `precision_plugin\.scaler`.*init_scale="):
        ours(precision="16-mixed").precision_plugin.scaler = torch.amp.GradScaler("cpu")


def test_strategy_that_accumulates_by_itself_is_refused():
    strategy = type("Accumulates", (SingleDeviceStrategy,), {"handles_gradient_accumulation": True})("cpu")
    with pytest.raises(UnsupportedError, match=r"Accumulates\.handles_gradient_accumulation=True, expected False"):
        ours(strategy=strategy, accelerator="auto", devices="auto")


def test_several_optimizers_are_refused_with_a_step_of_the_strategy():
    trainer, module = ours(max_epochs=1), Learner()
    module.configure_optimizers = lambda: [torch.optim.SGD(part.parameters(), lr=0.1) for part in module.net[::2]]
    trainer.fit(module, data(2))
    with mock.patch.object(trainer.strategy, "optimizer_step"), pytest.raises(MultipleOptimizersError):
        trainer.fit(module, data(2))


@needs_fsdp2
@pytest.mark.parametrize("name", ["validation_step", "backward"])
def test_methods_bypassed_by_a_sharded_module_are_refused(name):
    strategy = type("Own", (FSDP2Strategy,), {name: lambda *_: None})()
    with pytest.raises(UnsupportedError, match=f"Got Own with its own `{name}`.*Override `LightningModule\\."):
        ours(strategy=strategy, devices=2)
    trainer = ours(strategy=FSDP2Strategy(), devices=2)
    with mock.patch.object(trainer.strategy, name), pytest.raises(UnsupportedError, match=f"`{name}`"):
        trainer.engine.connect(Classifier())


@needs_fsdp2
def test_methods_of_a_strategy_that_is_replaced_are_refused():
    strategy = type("Own", (ModelParallelStrategy,), {"on_train_start": lambda self: None})(1, 2)
    with pytest.raises(UnsupportedError, match=r"Got Own with its own `on_train_start`.*FSDP2Strategy"):
        ours(strategy=strategy, devices=2)
