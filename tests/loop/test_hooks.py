"""The order of all hooks equals that of Lightning's own Trainer."""

import re
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule

from tests.parity import (
    CALLBACK_HOOKS,
    DATAMODULE_HOOKS,
    MODULE_HOOKS,
    Classifier,
    Learner,
    data,
    ours,
    recording,
    run_both,
)
from trainer.loop import hooks


class TwoStageData(LightningDataModule):
    def train_dataloader(self):
        return data(8)

    def val_dataloader(self):
        return data(4, seed=1)

    def test_dataloader(self):
        return [data(4, seed=2), data(2, seed=3)]

    def predict_dataloader(self):
        return data(4, seed=4)


class Scheduled(Classifier):
    """With one schedule for each way to step schedules."""

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def record(make, function, hooks_of_module, *, base=Scheduled, **arguments):
    calls = []
    module = recording(base, hooks_of_module, "module")()
    datamodule = recording(TwoStageData, DATAMODULE_HOOKS, "datamodule")()
    callback = recording(Callback, CALLBACK_HOOKS, "callback")()
    for owner in (module, datamodule, callback):
        vars(owner)["calls"] = calls
    getattr(make(callbacks=[callback], **arguments), function)(module, datamodule=datamodule)
    return calls


# --- differences on purpose ---------------------------------------------------------------------------------------


def without_known_differences(call):
    """Return ``call`` without the known differences from Lightning.

    - Lightning requests evaluation data under ``no_grad``, and validation data with the stage VALIDATING even without
      a sanity check; we request all data in the current stage.
    - ``gradient_clip_algorithm`` is "norm" by default; Lightning passes its default None, which means "norm".
    """
    name, arguments, situation = call
    if name.endswith("_dataloader"):
        return name, arguments, None
    if name == "module.configure_gradient_clipping" and arguments["gradient_clip_algorithm"] is None:
        return name, {**arguments, "gradient_clip_algorithm": arguments["gradient_clip_val"] and "norm"}, situation
    return call


def assert_same(theirs, mine):
    assert [name for name, *_ in theirs] == [name for name, *_ in mine]
    pairs = [(without_known_differences(a), without_known_differences(b)) for a, b in zip(theirs, mine, strict=True)]
    differences = [pair for pair in pairs if pair[0] != pair[1]]
    assert not differences, differences[:5]


FITS = {
    "validation at the end of the epoch": {"max_epochs": 2},
    "validation in the middle of it": {"max_epochs": 1, "val_check_interval": 2},
    "validation every second epoch": {"max_epochs": 2, "check_val_every_n_epoch": 2},
    "validation by batches": {"max_epochs": 2, "val_check_interval": 3, "check_val_every_n_epoch": None},
    "no sanity check": {"max_epochs": 1, "num_sanity_val_steps": 0},
    "no validation": {"max_epochs": 1, "limit_val_batches": 0},
    "accumulation and clipping": {"max_epochs": 1, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    "max_steps inside an epoch": {"max_steps": 3},
    "fast_dev_run": {"fast_dev_run": True},
    "no training": {"max_epochs": 0},
    "no training batches": {"max_epochs": 1, "limit_train_batches": 0},
}


@pytest.mark.parametrize("arguments", FITS.values(), ids=FITS.keys())
def test_fit_calls_the_same_hooks_as_lightnings(arguments):
    theirs, mine = run_both(lambda make: record(make, "fit", MODULE_HOOKS, **arguments))
    assert_same(theirs, mine)
    assert len(mine) > 40


@pytest.mark.parametrize("overridden", [[], ["training_step", "validation_step"], ["optimizer_step", *MODULE_HOOKS]],
                         ids=["callbacks only", "steps", "everything and optimizer_step"])  # fmt: skip
def test_order_is_independent_of_the_overridden_hooks(overridden):
    arguments = {"max_epochs": 1, "val_check_interval": 2, "accumulate_grad_batches": 2}
    theirs, mine = run_both(lambda make: record(make, "fit", overridden, **arguments))
    assert_same(theirs, mine)


@pytest.mark.parametrize("function", ["validate", "test", "predict"])
def test_evaluations_call_the_same_hooks_as_lightnings(function):
    theirs, mine = run_both(lambda make: record(make, function, MODULE_HOOKS))
    assert_same(theirs, mine)
    assert len(mine) > 30


# --- additional hooks -------------------------------------------------------------------------------------------------


def test_on_after_optimizer_step_receives_the_outcome():
    seen = []

    class Watching(Learner):
        def on_after_optimizer_step(self, optimizer, outcome):
            seen.append(("module", outcome.skipped))

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            seen.append(("before", trainer.global_step))

        def on_after_optimizer_step(self, trainer, pl_module, optimizer, outcome):
            assert optimizer is trainer.optimizers[0]
            assert outcome is trainer.step_outcome
            seen.append(("after", trainer.global_step, outcome.skipped, outcome.scale, outcome.optimizers))

        def on_train_batch_end(self, trainer, *args):
            seen.append(("batch end", trainer.global_step))

    ours(max_epochs=1, callbacks=[Watch()], accumulate_grad_batches=2).fit(Watching(), data(4))
    assert seen == [
        ("batch end", 0), ("before", 0), ("after", 1, False, 1.0, (0,)), ("module", False), ("batch end", 1),
    ]  # fmt: skip


# --- the annotated loop -------------------------------------------------------------------------------------------

NOT_IN_THE_LOOP = {
    "on_save_checkpoint": "runs where a checkpoint is written, at any point",
    "on_load_checkpoint": "runs before a run starts",
    "state_dict": "likewise",
    "load_state_dict": "likewise",
    "configure_callbacks": "runs before everything",
    "on_test_model_eval": "as validation",
    "on_test_model_train": "as validation",
    "on_predict_model_eval": "as validation",
    "on_gpu": "a property of modules",
}


@pytest.mark.parametrize("owner", [Callback, LightningModule, LightningDataModule])
def test_annotated_loop_names_every_hook(owner):
    known = {Callback: CALLBACK_HOOKS, LightningModule: MODULE_HOOKS, LightningDataModule: DATAMODULE_HOOKS}[owner]
    written = set(re.findall(r"\w+", hooks.__doc__ or ""))
    as_validation = {f"{a}test{b}" for a, b in (w.split("validation") for w in written if w.count("validation") == 1)}
    as_validation |= {name.replace("test", "predict") for name in as_validation}
    data_hooks = {name for name in known if name.endswith("_dataloader")}
    assert not set(known) - written - as_validation - data_hooks - NOT_IN_THE_LOOP.keys()


def test_annotated_loop_names_no_hook_that_does_not_exist():
    written = set(re.findall(r"\bon_\w+", hooks.__doc__ or ""))
    known = {*CALLBACK_HOOKS, *MODULE_HOOKS, *DATAMODULE_HOOKS, "on_after_optimizer_step"}
    assert written <= known


def test_hooks_of_the_loop_are_lightnings_and_ours():
    around_a_run = {"on_exception", "on_save_checkpoint", "on_load_checkpoint"}
    of_callbacks = {name for name in CALLBACK_HOOKS if name.startswith("on_")} - around_a_run
    assert set(hooks.CALLBACK_HOOKS) == of_callbacks | {"on_after_optimizer_step"}


# --- how hooks are called -----------------------------------------------------------------------------------------


def test_only_overridden_hooks_are_called():
    class Quiet(Callback):
        pass

    class Loud(Callback):
        def on_train_start(self, *args): ...

    scope, callbacks = hooks.NO_HOOKS.scope, [Quiet(), Loud()]
    made = hooks.Hooks(None, Classifier(), callbacks, scope, lambda o, n: n in vars(type(o)), lambda callback: False)
    assert [name for name in hooks.CALLBACK_HOOKS if not made.of(name).is_empty] == ["on_train_start"]
    assert made.override_of("backward") is None
    assert made.override_of("validation_step") is not None


class Director(Classifier):
    """Changes callbacks or hooks once."""

    change: Any = None

    def direct(self):
        change, self.change = self.change, None
        if change is not None:
            change(self)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


@pytest.mark.parametrize("profiler", [None, "simple"])
@pytest.mark.parametrize("change", ["appended", "removed", "other list", "set on a callback", "set on the module"])
@pytest.mark.parametrize("when", ["on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end"])
def test_changes_between_epochs_are_used_as_in_lightning(when, change, profiler):
    def scenario(make):
        calls = []
        first, later = (recording(Callback, CALLBACK_HOOKS, name)() for name in ("first", "later"))
        silent = Callback()
        vars(first)["calls"] = vars(later)["calls"] = calls

        def do(module):
            trainer = module.trainer
            if change == "appended":
                trainer.callbacks.append(later)
            elif change == "removed":
                trainer.callbacks.remove(first)
            elif change == "other list":
                trainer.callbacks = [later, *trainer.callbacks]
            else:
                owner = silent if change == "set on a callback" else module
                owner.on_train_batch_end = owner.on_validation_batch_end = lambda *_: calls.append(("set", {}, {}))

        trainer = make(max_epochs=3, callbacks=[first, silent], profiler=profiler)
        module = Director()
        module.change = do
        setattr(module, when, module.direct)
        trainer.fit(module, data(4), data(2, seed=1))
        return calls

    theirs, mine = run_both(scenario)
    assert_same(theirs, mine)
    names = {name for name, *_ in mine}
    if change == "removed":
        assert "first.on_train_end" not in names
    else:
        assert ("set" if change.startswith("set") else "later.on_train_batch_end") in names


@pytest.mark.parametrize("when", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_hook_of_validation_batches_that_no_callback_had_before_is_called(when):
    """The path of a batch contains a function instead of an empty hook, which is replaced."""

    class Later(Callback):
        batches = 0

        def on_validation_batch_end(self, *_):
            self.batches += 1

    module, later = Director(), Later()
    module.change = lambda module: module.trainer.callbacks.append(later)
    setattr(module, when, module.direct)
    ours(max_epochs=2, num_sanity_val_steps=0).fit(module, data(4), data(2, seed=1))
    assert later.batches == 2
