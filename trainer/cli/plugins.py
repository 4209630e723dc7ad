"""The launchers and sweepers beside Hydra's basic ones: which package each needs, and those of our own."""

from __future__ import annotations

import shutil
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from trainer.cli.arguments import UsageError
from trainer.cli.folders import packaged_conf

ELSEWHERE = "hydra_plugins.hydra_submitit_launcher."
"""How the targets of launchers begin whose jobs run on other machines."""

_NEEDS = {
    "hydra_plugins.amp_trainer.JoblibLauncher": ("joblib", "joblib", "trainer.cli.sweep.joblib_launcher"),
    "hydra_plugins.amp_trainer.OptunaSweeper": ("optuna", "optuna", "trainer.cli.sweep.optuna_sweeper"),
    ELSEWHERE: ("hydra_plugins.hydra_submitit_launcher", "slurm", None),
}
"""By how a target begins: the module it needs, the extra that installs that, and of our own classes the module that
they are in. Hydra takes plugins of the package ``hydra_plugins`` only, and asks for no more than the name: there is no
module ``hydra_plugins.amp_trainer``."""


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
        for start, (module, extra, ours) in _NEEDS.items():
            if target.startswith(start) and not _is_installed(module):
                chosen = hydra.runtime.choices.get(f"hydra/{kind}")
                raise UsageError(
                    f"hydra/{kind}={chosen} needs {module}, which is not installed: pip install 'amp-trainer[{extra}]'"
                )
            if target == start and ours:
                _register(target, ours)
        if target == f"{ELSEWHERE}submitit_launcher.SlurmLauncher" and shutil.which("srun") is None:
            raise UsageError(
                "hydra/launcher=submitit_slurm has Slurm run the jobs, and there is no srun here. Give the command on a"
                " machine of the cluster; on this one, hydra/launcher=joblib runs several jobs at a time."
            )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package it is in
        return False


def _register(target: str, module: str) -> None:
    """Have Hydra find one of our classes by its name in the config. Nothing of it is loaded before it is asked for."""
    plugins = Plugins.instance()
    plugins.register(plugin := getattr(import_module(module), target.rpartition(".")[2]))
    plugins.class_name_to_class[target] = plugin
