"""The launchers and sweepers beside Hydra's basic ones: which package each needs, and those of our own."""

from __future__ import annotations

import shutil
from importlib import import_module
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from trainer import packages
from trainer.cli.arguments import UsageError
from trainer.cli.folders import packaged_conf

ELSEWHERE = "hydra_plugins.hydra_submitit_launcher."
"""How the targets of launchers begin whose jobs run on other machines."""

_NEEDS = {
    "hydra_plugins.amp_trainer.JoblibLauncher": ("joblib", "trainer.cli.sweep.joblib_launcher"),
    "hydra_plugins.amp_trainer.OptunaSweeper": ("optuna", "trainer.cli.sweep.optuna_sweeper"),
    ELSEWHERE: ("slurm", None),
}
"""By the beginning of a target: the extra that it needs, and the module of our own classes.

Hydra takes plugins of the package ``hydra_plugins`` only, and uses nothing but the name: there is no module
``hydra_plugins.amp_trainer``.
"""


def take_over_configs() -> None:
    """Our configs take the place of those of the same name that the packages bring along: Hydra would mix them."""
    launchers: Any = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    for file in (packaged_conf() / "hydra" / "launcher").glob("*.yaml"):
        launchers.pop(file.name, None)


def prepare(hydra: Any) -> None:
    """Have Hydra know the launcher and the sweeper of its node ``hydra``.

    Raises:
        UsageError: the package they need is not installed.
    """
    for kind in ("launcher", "sweeper"):
        target = str(hydra[kind]["_target_"])
        for start, (extra, ours) in _NEEDS.items():
            if target.startswith(start) and (problem := packages.missing(extra)):
                raise UsageError(f"hydra/{kind}={hydra.runtime.choices.get(f'hydra/{kind}')} needs {problem}")
            if target == start and ours:
                _register(target, ours)
        if target == f"{ELSEWHERE}submitit_launcher.SlurmLauncher" and shutil.which("srun") is None:
            raise UsageError(
                "hydra/launcher=submitit_slurm has Slurm run the jobs, and there is no srun here. Give the command on a"
                " machine of the cluster; on this one, hydra/launcher=joblib runs several jobs at a time."
            )


def _register(target: str, module: str) -> None:
    """Have Hydra find one of our classes by its name in the config. Nothing of it is loaded before it is asked for."""
    plugins = Plugins.instance()
    plugins.register(plugin := getattr(import_module(module), target.rpartition(".")[2]))
    plugins.class_name_to_class[target] = plugin
