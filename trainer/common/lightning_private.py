"""Private functions and attributes of Lightning without a public counterpart, under public names.

``pyproject.toml`` lists the other modules that use private names of Lightning.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from lightning.fabric.loggers.csv_logs import _ExperimentWriter as FabricWriter
from lightning.fabric.strategies.model_parallel import _setup_device_mesh as setup_device_mesh
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads_if_needed
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers.utilities import _log_hyperparams as log_hyperparams
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as ScriptLauncher
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.trainer.connectors.callback_connector import _CallbackConnector
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.setup import _init_profiler as init_profiler
from lightning.pytorch.trainer.setup import _log_device_info as log_devices
from lightning.pytorch.utilities.argparse import _defaults_from_env_vars as defaults_from_environment
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExit

__all__ = [
    "FabricWriter", "MultiProcessingLauncher", "ScriptLauncher", "TunerExit", "add_timer", "defaults_from_environment",
    "found_rate", "hpc_save_path", "init_profiler", "log_devices", "log_hyperparams", "optimizers_to_device",
    "process_group_backend", "scripts_started_with", "set_device_mesh", "hparams_name_of",
    "set_num_threads_if_needed", "settings_of", "setup_device_mesh",
]  # fmt: skip

hpc_save_path = _CheckpointConnector.hpc_save_path
"""Return the path of the next checkpoint that Slurm's signal causes in a folder."""


def hparams_name_of(owner: Any) -> dict[str, str | None]:
    """Return the name of the argument that ``save_hyperparameters`` stores, as an entry of a checkpoint, or {}."""
    return {owner.CHECKPOINT_HYPER_PARAMS_NAME: owner._hparams_name} if hasattr(owner, "_hparams_name") else {}


def set_device_mesh(module: Any, mesh: Any) -> None:
    """Set the module's ``device_mesh``."""
    module._device_mesh = mesh


def settings_of(strategy: Any) -> dict[str, Any]:
    """Return the arguments that any strategy with processes was created with."""
    names = "process_group_backend", "timeout", "checkpoint_io"
    return {name: getattr(strategy, f"_{name}") for name in names}


def process_group_backend(strategy: Any) -> Any:
    """Return the backend of the process group that the strategy creates."""
    return strategy._get_process_group_backend()


def add_timer(callbacks: list[Any], max_time: Any) -> None:
    """Add a ``Timer`` for the argument ``max_time``, unless it is None or there is one."""
    _CallbackConnector(SimpleNamespace(callbacks=callbacks))._configure_timer_callback(max_time)  # type: ignore[arg-type]


def found_rate(callback: LearningRateFinder) -> float | None:
    """Return the learning rate that a finder has found, if it sets it. Otherwise None."""
    index = getattr(callback.optimal_lr, "_optimal_idx", None)
    if not callback._update_attr or callback.optimal_lr is None or index is None:
        return None
    rate: float = callback.optimal_lr.results["lr"][index]
    return rate


@contextmanager
def scripts_started_with(command: Sequence[str]) -> Iterator[None]:
    """Let launchers of scripts start ``command`` with the arguments of the program, instead of the program."""
    module: Any = subprocess_script
    basic, hydra = module._basic_subprocess_cmd, module._hydra_subprocess_cmd

    def started_by_hydra(local_rank: int) -> tuple[list[str], str]:
        words, folder = hydra(local_rank)
        return [*command, *words[3 if words[1] == "-m" else 2 :]], folder

    module._basic_subprocess_cmd = lambda: [*command, *sys.argv[1:]]
    module._hydra_subprocess_cmd = started_by_hydra
    try:
        yield
    finally:
        module._basic_subprocess_cmd, module._hydra_subprocess_cmd = basic, hydra
