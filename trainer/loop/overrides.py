"""Find the methods of an object that its user overrides.

Lightning's loops call many methods of a strategy, profiler, callback or module that do nothing by default, or that our
loops replace by something faster. Our loops call such a method only if it is overridden. A method is overridden if a
subclass defines it, if it is set on the object, or if it is patched on a base class, such as by
``mock.patch.object(Strategy, "backward")``. Each run looks up the overrides once, before its first batch.
"""

from __future__ import annotations

from typing import Any, TypeVar

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies import DeepSpeedStrategy as LightningDeepSpeedStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from trainer.precision.base import Precision

Class = TypeVar("Class", bound=type)

_DEFAULTS: dict[int, Any] = {}  # the values keep the objects alive, so that no other object gets their ids


def defines_defaults(cls: Class) -> Class:
    """Record the methods of a class and its bases as defaults, which do not count as overrides. A class decorator."""
    for base in cls.__mro__:
        _DEFAULTS.update((id(attribute), attribute) for attribute in vars(base).values())
    return cls


for _base in (
    Callback,
    LightningModule,
    LightningDataModule,
    SingleDeviceStrategy,
    DDPStrategy,
    LightningDeepSpeedStrategy,
    ModelParallelStrategy,
    LightningPrecision,
    PassThroughProfiler,
    Precision,
):
    defines_defaults(_base)


def overrides(owner: Any, name: str) -> bool:
    """Return whether ``owner`` overrides the method ``name``.

    A method that is set to None does not count as an override. Neither does a wrapper of
    ``on_validation_model_train`` and the like that is set on a module, because our loop does more than the default.
    """
    attributes = getattr(owner, "__dict__", {})
    if name in attributes:
        return attributes[name] is not None and (not name.endswith("_model_train") or is_overridden(name, owner))
    if name == "on_train_batch_end" and follows_outcomes(owner):
        return False
    definitions = [vars(cls)[name] for cls in type(owner).__mro__ if name in vars(cls)]
    if not definitions:
        return getattr(owner, name, None) is not None
    return definitions[0] is not None and any(id(definition) not in _DEFAULTS for definition in definitions)


def overridden(owner: Any, base: type) -> list[str]:
    """Return the names of the methods of ``base`` that ``owner`` overrides, sorted. Dunder methods are left out."""
    names = (name for name in dir(base) if not name.startswith("__") and callable(getattr(base, name)))
    return [name for name in names if overrides(owner, name)]


def follows_outcomes(callback: Any) -> bool:
    """Return whether a callback's ``on_train_batch_end`` runs with the outcome of an update, not after the batch."""
    return isinstance(callback, WeightAveraging) and "on_after_optimizer_step" in vars(callback)
