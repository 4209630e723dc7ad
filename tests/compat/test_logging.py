"""The ``log`` that replaces a module's own, in isolation. Recorded values are in ``test_metrics.py``."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.parity import Learner
from trainer.compat.logging import ModuleLog, ModuleScope, ResultsView, attach_log, detach_log
from trainer.state.metrics import MetricStore


def stand_in(module: Any, *, training: bool = True, world_size: int = 1) -> Any:
    store = MetricStore(training)
    store.begin_batch([torch.zeros(3, 2)])
    vars(module)["_current_fx_name"] = "training_step"
    return SimpleNamespace(
        barebones=False,
        active_metrics=store,
        logger=None,
        world_size=world_size,
        engine=SimpleNamespace(reduce=lambda tensor, op, group: tensor),
        callbacks=[],
    )


def test_scope_has_the_current_and_previous_hook() -> None:
    module = Learner()
    scope = ModuleScope(module)
    assert scope.enter("on_train_start") is None
    assert module._current_fx_name == "on_train_start"
    assert scope.enter(None) == "on_train_start"


def test_value_is_stored_under_its_hook_with_the_batch_size() -> None:
    module = Learner()
    trainer = stand_in(module)
    log = ModuleLog(module, trainer)
    log("x", torch.tensor(2.0), on_epoch=True)
    (key,) = trainer.active_metrics.entries
    assert key == ("training_step", "x", None)
    entry = trainer.active_metrics.entries[key]
    assert (entry.options.on_step, entry.options.on_epoch) == (True, True)  # the defaults of training_step, and ours
    log("x", 4, on_epoch=True)
    assert entry.epoch_value() == 3.0
    assert entry._weight == 6.0  # two batches of 3


@pytest.mark.parametrize(
    "value", [1, 1.0, True, torch.tensor(1.0), torch.tensor([1.0]), torch.tensor(1.0).double()], ids=str
)
def test_numbers_and_tensors_become_scalars(value: Any) -> None:
    module = Learner()
    trainer = stand_in(module)
    ModuleLog(module, trainer)("x", value)
    (entry,) = trainer.active_metrics.entries.values()
    assert entry.step_value.shape == ()
    assert entry.step_value == 1.0
    assert entry.step_value.is_floating_point()


def test_defaults_depend_on_the_hook() -> None:
    module = Learner()
    trainer = stand_in(module)
    log = ModuleLog(module, trainer)
    found = {}
    for hook in ("training_step", "on_train_epoch_end", "validation_step", "on_after_optimizer_step"):
        vars(module)["_current_fx_name"] = hook
        log("x", 1.0)
        options = trainer.active_metrics.entries[hook, "x", None].options
        found[hook] = options.on_step, options.on_epoch
    assert found == {
        "training_step": (True, False),
        "on_train_epoch_end": (False, True),
        "validation_step": (False, True),
        "on_after_optimizer_step": (True, False),
    }


def test_outside_of_hooks_and_without_a_stage() -> None:
    module = Learner()
    trainer = stand_in(module)
    log = ModuleLog(module, trainer)
    vars(module)["_current_fx_name"] = None
    with pytest.raises(MisconfigurationException, match="not managed by the `Trainer` control flow"):
        log("x", 1.0)
    trainer.active_metrics = None
    with pytest.raises(MisconfigurationException, match="not registered yet"):
        log("x", 1.0)


def test_epoch_values_on_several_processes_should_be_synchronised() -> None:
    module = Learner()
    log = ModuleLog(module, stand_in(module, world_size=2))
    with pytest.warns(UserWarning, match=r"recommended to use `self.log\('x', ..., sync_dist=True\)`"):
        log("x", torch.tensor(1.0), on_epoch=True)
    log("y", torch.tensor(1.0), on_epoch=True, sync_dist=True)
    log("z", torch.tensor(1.0), on_epoch=True, rank_zero_only=True)
    log("step", torch.tensor(1.0))


def test_sync_dist_alone_does_not_reduce_over_the_epoch() -> None:
    module = Learner()
    trainer = stand_in(module)
    ModuleLog(module, trainer)("x", 1.0, sync_dist=True)
    (entry,) = trainer.active_metrics.entries.values()
    assert entry.options.sync_dist is False


def test_attach_and_detach() -> None:
    class Child(Learner):
        pass

    class Overrides(LightningModule):
        def log(self, *args: Any, **kwargs: Any) -> None: ...  # type: ignore[override]

    module = Learner()
    module.child, module.other = Child(), Overrides()
    trainer = stand_in(module)
    callback = SimpleNamespace()
    trainer.callbacks = [callback]
    attach_log(module, trainer)
    log = vars(module)["log"]
    assert isinstance(log, ModuleLog)
    assert vars(module.child)["log"] is log
    assert "log" not in vars(module.other)
    assert callback.log is log
    detach_log(module, [callback])
    assert "log" not in vars(module)
    assert "log" not in vars(module.child)
    assert not vars(callback)


def test_overridden_log_is_kept_and_super_works() -> None:
    module = Learner()
    trainer = stand_in(module)
    view = ResultsView(trainer, trainer.active_metrics)
    view.log("training_step", "x", torch.tensor(3.0), prog_bar=True, logger=True, on_step=True, on_epoch=True,
             batch_size=None, sync_dist_fn=print, metric_attribute=None)  # fmt: skip
    (entry,) = trainer.active_metrics.entries.values()
    assert entry.step_value == 3.0
    view.reset()
    assert entry.step_value == 3.0


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda log: pickle.loads(pickle.dumps(log))])
def test_copies_are_detached_from_the_trainer(duplicate: Any) -> None:
    module = Learner()
    trainer = stand_in(module)
    log = duplicate(ModuleLog(module, trainer))
    with pytest.warns(UserWarning, match="reference is not registered on the model yet"):
        log("x", 1.0)
    assert not trainer.active_metrics.entries


def test_collection_of_devices_is_reduced_on_one() -> None:
    """0-dim values of one name may be on several devices."""
    module = Learner()
    trainer = stand_in(module)
    log = ModuleLog(module, trainer)
    for value in (1.0, torch.tensor(3.0, device="meta")):
        log("x", value, on_epoch=True, batch_size=1)
    (entry,) = trainer.active_metrics.entries.values()
    assert entry.epoch_value().device.type == "meta"


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(3, 2), torch.zeros(3)], 3),
        ((torch.zeros(0, 2),), 0),
        ({"a": torch.zeros(2), "b": torch.zeros(2, 5)}, 2),
        ({"a": ["words"], "b": {"c": torch.zeros(4)}}, 4),
        (torch.tensor(1.0), 1),
        (None, 1),
    ],
    ids=str,
)
def test_batch_sizes(batch: Any, size: int) -> None:
    module = Learner()
    trainer = stand_in(module)
    trainer.active_metrics.begin_batch(batch)
    ModuleLog(module, trainer)("x", 1.0, on_epoch=True)
    (entry,) = trainer.active_metrics.entries.values()
    assert entry.accumulated()[1] == size
