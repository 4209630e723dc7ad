"""Match the names and short forms of precisions. Does not import torch, because the command line needs it first.

The names are declared by the plugins (``Precision.names``), and are those of the options in ``conf/precision``. The
short forms are Lightning's: ``16`` and ``fp16`` for ``16-mixed``, ``32`` for ``32-true``, ``bf16`` for ``bf16-mixed``.
"""

from __future__ import annotations

from collections.abc import Collection

from trainer.errors import PrecisionError, did_you_mean


def match(precision: str | int, names: Collection[str]) -> str | None:
    """Return the name that ``precision`` stands for, or None without a match.

    A short form leaves out ``-mixed``, or else ``-true``, and may begin with ``fp``.

    >>> match("fp16", ["16-mixed", "16-true"]), match(32, ["32-true"]), match("fp8", ["fp8-mixed"])
    ('16-mixed', '32-true', 'fp8-mixed')
    """
    given = str(precision).strip().lower()
    forms = (f"{stem}{suffix}" for stem in (given, given.removeprefix("fp")) for suffix in ("", "-mixed", "-true"))
    return next((name for name in forms if name in names), None)


def canonical(precision: str | int, names: Collection[str]) -> str:
    """Return the name that ``precision`` stands for.

    Raises:
        PrecisionError: if ``precision`` stands for no name.
    """
    if (name := match(precision, names)) is None:
        short = dict.fromkeys(name.partition("-")[0] for name in names)
        raise PrecisionError(
            f"Got precision={precision!r}, expected one of {', '.join(names)} (or a short form: {', '.join(short)})."
            + did_you_mean(str(precision).strip().lower(), [*names, *short])
            + " Pass a custom precision as an object: Trainer(precision=MyPrecision())."
        )
    return name
