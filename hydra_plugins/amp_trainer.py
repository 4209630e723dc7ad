"""The launcher and the sweeper of amp-trainer, by names that Hydra takes: it takes none from outside of this package.

Hydra imports this module in every program that uses it. So nothing is loaded before somebody asks for it by name.
"""

from __future__ import annotations

from typing import Any

_PLACES = {
    "JoblibLauncher": "trainer.cli.sweep.joblib_launcher",
    "OptunaSweeper": "trainer.cli.sweep.optuna_sweeper",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)
