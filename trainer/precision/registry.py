"""From a name, or an object, to a precision plugin."""

from __future__ import annotations

from collections.abc import Callable

from trainer.errors import PrecisionError
from trainer.precision.auto import AutoPrecision
from trainer.precision.base import Precision
from trainer.precision.float8 import Float8Precision
from trainer.precision.full import DoublePrecision, FullPrecision
from trainer.precision.half import HalfPrecision
from trainer.precision.mixed import MixedPrecision
from trainer.precision.names import canonical

_PLUGINS: dict[str, Callable[[], Precision]] = {
    "32-true": FullPrecision,
    "64-true": DoublePrecision,
    "16-mixed": lambda: MixedPrecision("float16"),
    "bf16-mixed": lambda: MixedPrecision("bfloat16"),
    "fp8-mixed": Float8Precision,
    "16-true": lambda: HalfPrecision("float16"),
    "bf16-true": lambda: HalfPrecision("bfloat16"),
    "auto": AutoPrecision,
}


def resolve_precision(precision: str | int | Precision | None) -> Precision:
    """The plugin that ``precision`` names, or the plugin itself if it is one already. None is ``32-true``.

    Raises:
        PrecisionError: an unknown name, or an object that is no precision plugin of ours.
    """
    if precision is None:
        return FullPrecision()
    if isinstance(precision, (str, int)):
        return _PLUGINS[canonical(precision)]()
    if isinstance(precision, Precision):
        return precision
    kind = type(precision)  # type: ignore[unreachable]  # callers without types
    raise PrecisionError(
        f"Got precision of type {kind.__module__}.{kind.__qualname__}, expected a name such as '16-mixed' or a"
        " trainer.precision.Precision object."
        + (
            " Lightning's precision plugins bring autocast and a scaler of their own: use"
            " trainer.precision.MixedPrecision, HalfPrecision, FullPrecision or DoublePrecision in their place."
            if kind.__module__.startswith(("lightning", "pytorch_lightning"))
            else ""
        )
    )
