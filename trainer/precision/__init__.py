"""Precision plugins, which set the dtypes of a forward pass and the loss scaling. The base class is in ``base``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.precision.auto import AutoPrecision
    from trainer.precision.autocast_ops import cuda_autocast_ops
    from trainer.precision.base import Precision
    from trainer.precision.float8 import Float8Precision
    from trainer.precision.full import DoublePrecision, FullPrecision
    from trainer.precision.half import HalfPrecision
    from trainer.precision.mixed import MixedPrecision
    from trainer.precision.registry import resolve_precision
    from trainer.precision.scaler import LossScaler

__all__ = [
    "AutoPrecision",
    "DoublePrecision",
    "Float8Precision",
    "FullPrecision",
    "HalfPrecision",
    "LossScaler",
    "MixedPrecision",
    "Precision",
    "cuda_autocast_ops",
    "resolve_precision",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainer.precision.registry import MODULES  # here, because it imports torch, and `names` must not

    value = next(getattr(module, name) for module in MODULES if hasattr(module, name))
    globals()[name] = value  # the next access does not call this function
    return value
