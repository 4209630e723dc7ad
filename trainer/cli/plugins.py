"""Register the launchers and sweepers of this package with Hydra.

Also check that the packages that a launcher or sweeper needs are installed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from trainer.cli.folders import packaged_conf
from trainer.cli.parsing import UsageError
from trainer.common import packages

SUBMITIT_PREFIX = "hydra_plugins.hydra_submitit_launcher."
"""Prefix of the targets of launchers that run jobs on other machines."""

PARALLEL = "hydra_plugins.amp_trainer.ParallelLauncher"
"""Target of the launcher that runs several jobs at a time on this machine."""

_NEEDS = {
    PARALLEL: (None, "trainer.cli.sweep.parallel_launcher"),
    "hydra_plugins.amp_trainer.OptunaSweeper": ("optuna", "trainer.cli.sweep.optuna_sweeper"),
    SUBMITIT_PREFIX: ("slurm", None),
}
"""By prefix of a target: the extra that it needs, or None, and the module of the class if it is in this package.

Hydra 1.3 requires targets in the package ``hydra_plugins``. There is no file ``hydra_plugins/amp_trainer``.
"""


def take_over_configs() -> None:
    """Remove launcher configs of other packages that this package replaces, because Hydra would merge both."""
    launchers: Any = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    for file in (packaged_conf() / "hydra" / "launcher").glob("*.yaml"):
        launchers.pop(file.name, None)


def prepare(hydra: Any) -> None:
    """Register the launcher and the sweeper of a config with Hydra.

    Args:
        hydra: the config's node ``hydra``.

    Raises:
        UsageError: if a package that they need is missing.
    """
    for kind in ("launcher", "sweeper"):
        target = str(hydra[kind]["_target_"])
        for start, (extra, module) in _NEEDS.items():
            if target.startswith(start) and extra and (problem := packages.missing(extra)):
                raise UsageError(f"hydra/{kind}={hydra.runtime.choices.get(f'hydra/{kind}')} needs {problem}")
            if target == start and module:  # a class of this package; Hydra finds it under its name in the config
                package, _, name = target.rpartition(".")
                plugin = type(name, (getattr(import_module(module), name),), {"__module__": package})
                setattr(sys.modules.setdefault(package, ModuleType(package)), name, plugin)  # Hydra 1.4 looks there
                Plugins.instance().register(plugin)
                Plugins.instance().class_name_to_class[target] = plugin
