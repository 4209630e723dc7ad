"""Callbacks: who overrides what, in which order they run, and those that come from the module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lightning.fabric.utilities.registry import _load_external_callbacks
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, Checkpoint, EarlyStopping, LearningRateFinder
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden

from trainer.arguments import refuse_other_package
from trainer.compat.averaging import follows_outcomes
from trainer.compat.logging import ModuleScope
from trainer.loops.hooks import Hook

_BASES = (Callback, LightningModule, LightningDataModule)


def overrides(owner: Any, name: str) -> bool:
    """Whether ``owner``'s method ``name`` is its own, not the empty one of Lightning's base class.

    What is set on the instance counts, also where it only watches the base's (a spy is to be called); but a step that
    is set to None does not. ``on_validation_model_train`` and its kin are another matter: the base's does less than
    what is done in its place, so whatever ends up there does not count.
    """
    if name in vars(owner):
        return vars(owner)[name] is not None and (not name.endswith("_model_train") or is_overridden(name, owner))
    if name == "on_train_batch_end" and follows_outcomes(owner):
        return False
    method = getattr(type(owner), name, None) or getattr(owner, name, None)
    base = next((getattr(base, name, None) for base in _BASES if isinstance(owner, base)), None)
    return method is not base and method is not None


def monitors(callback: Any) -> bool:
    """Whether a callback's ``on_train_epoch_end`` comes after the module's: it reads metrics logged there."""
    return isinstance(callback, (EarlyStopping, Checkpoint))


def saves(callback: Any) -> bool:
    """Whether a callback writes checkpoints, and so is to come when everything else is over."""
    return isinstance(callback, Checkpoint)


def in_order(callbacks: Sequence[Any]) -> list[Any]:
    """Tuners first, those that save checkpoints last, the others between them as they were given."""

    def place(callback: Any) -> int:
        if isinstance(callback, (BatchSizeFinder, LearningRateFinder)):
            return 0
        return 2 if isinstance(callback, Checkpoint) else 1

    return sorted(callbacks, key=place)


def with_model_callbacks(callbacks: list[Any], module: LightningModule) -> list[Any]:
    """``callbacks`` with those of ``module.configure_callbacks()``, which replace those of their types and bases."""
    returned = Hook("configure_callbacks", ModuleScope(module), module=module.configure_callbacks)()
    if not returned:
        return callbacks
    own = list(returned) if isinstance(returned, Sequence) else [returned]
    refuse_other_package("configure_callbacks", *own)
    types = {type(callback) for callback in callbacks} - {Callback}
    replaced = {kind for kind in types if any(issubclass(type(callback), kind) for callback in own)}
    if replaced:
        rank_zero_info(
            "The following callbacks returned in `LightningModule.configure_callbacks` will override existing callbacks"
            f" passed to Trainer: {', '.join(sorted(kind.__name__ for kind in replaced))}"
        )
    return in_order([callback for callback in callbacks if type(callback) not in replaced] + own)


def check_state_keys(callbacks: Sequence[Any]) -> None:
    """Refuse callbacks whose states would take each other's place in a checkpoint.

    Raises:
        RuntimeError: two callbacks with a state have the same ``state_key``.
    """
    seen = set()
    for callback in callbacks:
        if not overrides(callback, "state_dict"):
            continue
        if callback.state_key in seen:
            raise RuntimeError(
                f"Found more than one stateful callback of type `{type(callback).__name__}`. In the current"
                " configuration, this callback does not support being saved alongside other instances of the same type:"
                f" both have state_key={callback.state_key!r}, and one's state would take the other's place. Leave one"
                " out, or give them different arguments, or a `state_key` of their own."
            )
        seen.add(callback.state_key)


def run_hook_around(trainer: Any, name: Literal["setup", "teardown"]) -> None:
    """Run ``setup`` or ``teardown``: the datamodule's, then the callbacks', then the module's."""
    module, datamodule, stage = trainer.lightning_module, trainer.datamodule, trainer.state.fn
    calls: list[tuple[str, str, Any, tuple[Any, ...]]] = []
    calls += [("LightningDataModule", type(datamodule).__name__, getattr(datamodule, name, None), ())]
    calls += [("Callback", one.state_key, getattr(one, name), (trainer, module)) for one in trainer.callbacks]
    calls += [("LightningModule", type(module).__name__, getattr(module, name), ())]
    outer, module._current_fx_name = module._current_fx_name, name
    for kind, owner, call, arguments in calls:
        if callable(call):
            with trainer.profiler.profile(f"[{kind}]{owner}.{name}"):
                call(*arguments, stage=stage)
    module._current_fx_name = outer


def external_callbacks() -> list[Any]:
    """Callbacks that installed packages register under Lightning's entry point."""
    return list(_load_external_callbacks("lightning.pytorch.callbacks_factory"))
