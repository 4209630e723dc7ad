"""Precision plugins: how a forward is computed and whether its loss is scaled. The protocol is in ``base``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer._lazy import attribute_from

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

# The names alone must be readable without torch (the command line checks `precision=...` with them).
_HOMES = {
    "AutoPrecision": "trainer.precision.auto",
    "DoublePrecision": "trainer.precision.full",
    "Float8Precision": "trainer.precision.float8",
    "FullPrecision": "trainer.precision.full",
    "HalfPrecision": "trainer.precision.half",
    "LossScaler": "trainer.precision.scaler",
    "MixedPrecision": "trainer.precision.mixed",
    "Precision": "trainer.precision.base",
    "cuda_autocast_ops": "trainer.precision.autocast_ops",
    "resolve_precision": "trainer.precision.registry",
}


def __getattr__(name: str) -> Any:
    return attribute_from(__name__, _HOMES, name)
