"""The names of the precisions. Imports no torch: the command line reads this before anything else.

The canonical names are Lightning's; its aliases are accepted, and ``fp32``, ``fp16-mixed`` and their like
beside them. ``auto`` is ours, and becomes one of the others when the device is known.
"""

from __future__ import annotations

from trainer.errors import PrecisionError, did_you_mean

ALIASES: dict[str, str] = {
    "32": "32-true",
    "fp32": "32-true",
    "fp32-true": "32-true",
    "16": "16-mixed",
    "fp16": "16-mixed",
    "fp16-mixed": "16-mixed",
    "fp16-true": "16-true",
    "bf16": "bf16-mixed",
    "fp8": "fp8-mixed",
    "64": "64-true",
    "fp64": "64-true",
    "fp64-true": "64-true",
}
"""Every accepted spelling and the canonical name it stands for."""

NAMES: tuple[str, ...] = ("32-true", "16-mixed", "bf16-mixed", "fp8-mixed", "16-true", "bf16-true", "64-true", "auto")
"""The canonical names of the precisions that ship."""


def canonical(precision: str | int) -> str:
    """The canonical name of ``precision``.

    Raises:
        PrecisionError: the name is neither canonical nor an alias.

    >>> canonical(16), canonical("fp32"), canonical("bf16-mixed")
    ('16-mixed', '32-true', 'bf16-mixed')
    """
    given = str(precision).strip().lower()
    name = ALIASES.get(given, given)
    if name not in NAMES:
        known = (*NAMES, *ALIASES)
        raise PrecisionError(
            f"Got precision={precision!r}, expected one of {', '.join(NAMES)} (or an alias: {', '.join(ALIASES)})."
            + did_you_mean(given, known)
            + " A precision of your own is passed as an object: Trainer(precision=MyPrecision())."
        )
    return name
