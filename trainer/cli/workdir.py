"""Create the folder of a run or a sweep before Hydra starts, so that all ranks and jobs use the same one."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from trainer.cli.compose import CONFIG_NAME, RESTORED
from trainer.cli.failure import forget_last
from trainer.cli.folders import packaged_conf
from trainer.cli.parsing import OWN_FLAGS, Arguments, UsageError
from trainer.cli.processes import broadcast_folder, is_first, slurm_step, under_torchrun
from trainer.common.terminal import command_line, inform
from trainer.record.find_checkpoint import run_of
from trainer.record.run_record import RUN

_EVALUATIONS = ("validate", "test", "predict")
_DEFAULT_FOLDER = "outputs/${oc.select:name,"
"""Beginning of hydra.run.dir in conf/amp_trainer.yaml."""
_RESUME_SETTINGS = ("resume", "exact_resume", "trainer.resume", "trainer.exact_resume")
_DEVICE_SETTINGS = ("trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy")


def sweeps(arguments: Arguments, config: DictConfig) -> bool:
    """Return whether the command line, or a config that it chooses, starts several jobs."""
    return arguments.multirun or config.hydra.mode == RunMode.MULTIRUN


def resume_requeued_job(arguments: Arguments) -> None:
    """If Slurm requeued this job, add ``resume=auto`` to a fit, so that it resumes in the folder of the job.

    Nothing is added if the command line chooses a checkpoint or a folder.
    """
    is_requeued = slurm_step() is not None and int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0
    keys = {override.lstrip("+").partition("=")[0] for override in arguments.overrides}
    is_chosen = not keys.isdisjoint({"ckpt", "ckpt_path", "resume", "trainer.resume", "hydra.run.dir"})
    if is_requeued and arguments.command == "fit" and not is_chosen and not arguments.multirun:
        arguments.overrides.append("resume=auto")
        arguments.requeued = True


def claim(arguments: Arguments, config: DictConfig) -> Path:
    """On rank 0, create the folder that ``config`` names; on all ranks, add it to ``arguments`` and return it.

    A number is appended to a folder with the time in its name if another run started in the same second. With
    ``resume=auto``, a hash of the command replaces the time, so that the same command finds the folder again. If srun
    started the processes, the job and step of Slurm replace the time, so that all tasks and a requeued job find the
    folder.
    ``validate``, ``test`` and ``predict`` get a folder below the folder of the run that wrote their checkpoint.

    Raises:
        UsageError: if ``resume=auto`` is given to a command that does not train, the folder cannot be created, or a
            sweep runs under torchrun or srun, so that each rank would start all jobs.
    """
    sweeping, step = sweeps(arguments, config), slurm_step()
    by_srun = step is not None and int(os.environ.get("SLURM_NTASKS") or 1) > 1
    if sweeping and (under_torchrun() or by_srun):
        flag = [] if arguments.command == "compare" else ["-m"]
        command = command_line(arguments.command, *flag, *arguments.overrides, "trainer=ddp", "trainer.devices=2")
        raise UsageError(f"Got a sweep under torchrun or srun. It starts its processes: run it directly, `{command}`.")
    key = "hydra.sweep.dir" if sweeping else "hydra.run.dir"
    chosen = any(override.startswith(f"{key}=") for override in arguments.overrides)
    resumes = OmegaConf.select(config, "trainer.resume") == "auto"
    if resumes and arguments.command not in ("fit", "compare"):
        raise UsageError(f"Got resume=auto with {arguments.command}, expected fit or compare. For a run, use ckpt=RUN.")
    if not (chosen or sweeping) and arguments.command in _EVALUATIONS:
        config = _place_below_run(arguments, config)
    if not chosen and (resumes or step):
        by_job = step and (arguments.requeued or not resumes)
        config = _named_after(arguments, config, key, f"slurm-{step}" if by_job else "auto")
    HydraConfig.instance().set_config(config)  # for folders named with ${hydra:...}
    folder = str(OmegaConf.select(config, key))
    if is_first():
        folder = str(_make(Path(folder).expanduser(), exist_ok=chosen or resumes or by_srun))
        forget_last(Path(folder))
        if resumes and not chosen:
            inform(f"resume=auto: using the folder {folder}")
    else:
        arguments.overrides += ["hydra.output_subdir=null", "hydra/job_logging=none"]
    folder = broadcast_folder(folder)
    arguments.overrides.append(f"{key}={quoted(folder)}")
    return Path(folder)


def resume_command(command: str | None, words: Sequence[str], folder: Path | str, key: str) -> str:
    """Return the command that resumes a run or a sweep in its folder, from its newest checkpoints.

    Args:
        command: such as ``fit``.
        words: the flags and overrides of the command that was interrupted.
        folder: folder of the run or the sweep.
        key: the setting of that folder.
    """
    replaced = ("ckpt", "ckpt_path", "resume", "trainer.resume", key)
    others = [word for word in words if word.lstrip("+").partition("=")[0] not in replaced]
    has_config = any(word.lstrip("+").startswith("ckpt=") for word in words)  # a config of another run
    config = [path_override("ckpt", folder)] if has_config else []
    return command_line(command, *others, *config, "resume=auto", path_override(key, folder))


def words_of_run() -> list[str]:
    """Return the flags and overrides that compose the config of this run again, without the command and the folder."""
    hydra = HydraConfig.get()
    flags = [word for flag in config_flags(hydra).items() for word in flag]
    words = [*unresolved_words(hydra.overrides.task), *unresolved_words(hydra.overrides.hydra)]
    return [*flags, *(word for word in words if not word.startswith(("command=", "hydra.run.dir=", "hydra.mode=")))]


def unresolved_words(overrides: Any) -> list[str]:
    """Return overrides of ``HydraConfig`` with their interpolations, which may be secrets."""
    words: Any = OmegaConf.to_container(overrides, resolve=False)
    return list(words)


def config_flags(hydra: Any) -> dict[str, str]:
    """Return the flags that another command needs to find the configs of this run.

    Args:
        hydra: the config's node ``hydra``.
    """
    flags = {}
    paths = {source.provider: str(source.path) for source in hydra.runtime.config_sources}
    if "command-line" in paths:
        flags["--config-dir"] = paths["command-line"]
    if paths.get("main", str(packaged_conf())) != str(packaged_conf()):
        flags["--config-path"] = paths["main"]
    if hydra.job.config_name not in (CONFIG_NAME, RESTORED):  # ckpt= composes the latter
        flags["--config-name"] = str(hydra.job.config_name)
    return flags


def _place_below_run(arguments: Arguments, config: DictConfig) -> DictConfig:
    """Return ``config`` with a folder of this run below the folder of the run that wrote its checkpoint.

    Return ``config`` unchanged if there is no such checkpoint, if the folder of the run that wrote it is not writable,
    or if the user chose a folder: by ``name=``, or by ``hydra.run.dir`` in a config.
    """
    checkpoint = config.get("ckpt_path")
    run = run_of(Path(str(checkpoint))) if checkpoint is not None and Path(str(checkpoint)).exists() else None
    is_named = any(word.lstrip("+").startswith("name=") for word in arguments.overrides)
    is_default = _unresolved_folder(config, "hydra.run.dir").startswith(_DEFAULT_FOLDER) and not is_named
    if run is None or not (is_default and (run / RUN).is_file() and os.access(run, os.W_OK)):
        return config
    place = str(run).replace("${", "\\${")
    return with_folder(config, "hydra.run.dir", f"{place}/{arguments.command}/${{now:%Y-%m-%d_%H-%M-%S}}")


def with_folder(config: DictConfig, key: str, folder: str) -> DictConfig:
    """Return a copy of ``config`` with a folder at ``key``, in its node ``hydra``."""
    config = copy.deepcopy(config)
    OmegaConf.set_readonly(config.hydra, False)
    OmegaConf.update(config, key, folder)
    return config


def _named_after(arguments: Arguments, config: DictConfig, key: str, start: str) -> DictConfig:
    """Return ``config`` with a folder named after ``start`` and a hash of the command instead of the time.

    The hash does not depend on the order of the settings, nor on settings for resuming. For a run, it does not depend
    on settings of devices either, because a run may resume on other devices.
    """
    flags = [f"{flag}{value}" for flag, value in arguments.flags.items() if flag not in OWN_FLAGS]
    given = {*arguments.overrides, f"command={arguments.command}", *flags}
    counted = sorted(word for word in given if word.lstrip("+").partition("=")[0] not in _RESUME_SETTINGS)
    if key == "hydra.run.dir":
        counted = [word for word in counted if not _is_about_devices(word)]
    name = f"{start}-{hashlib.sha256(json.dumps(counted).encode()).hexdigest()[:8]}"
    return with_folder(config, key, re.sub(r"\$\{now:[^}]*\}", name, _unresolved_folder(config, key)))


def _unresolved_folder(config: DictConfig, key: str) -> str:
    """Return the folder ``hydra.run.dir`` or ``hydra.sweep.dir`` of a config with its interpolations."""
    section: Any = OmegaConf.to_container(OmegaConf.select(config, key.rpartition(".")[0]), resolve=False)
    return str(section["dir"])


def _is_about_devices(word: str) -> bool:
    """Return whether an override sets only devices, nodes or the strategy."""
    name, _, value = word.lstrip("+").partition("=")
    if name == "trainer":
        return (packaged_conf() / "trainer" / f"{value}.yaml").is_file()
    return any(name == setting or name.startswith(f"{setting}.") for setting in _DEVICE_SETTINGS)


def path_override(key: str, path: Path | str) -> str:
    """Return the override that sets ``key`` to a path, which is quoted if it has special characters."""
    place = str(path)
    return f"{key}={place if re.fullmatch(r'[a-zA-Z0-9_./-]+', place) else quoted(place)}"


def quoted(text: str) -> str:
    """Return ``text`` quoted and escaped as the value of an override."""
    return str(QuotedString(text.replace("${", "\\${"), Quote.single).with_quotes())


def _make(folder: Path, *, exist_ok: bool) -> Path:
    wanted, number = folder, 1
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=exist_ok)
        except FileExistsError:
            if exist_ok:
                raise UsageError(f"Cannot write to {folder}: it is a file, expected a folder.") from None
            number += 1
            folder = wanted.with_name(f"{wanted.name}_{number}")
        except OSError as error:
            advice = "Choose another: hydra.run.dir=FOLDER, or hydra.sweep.dir=FOLDER for a sweep."
            raise UsageError(f"Cannot create the folder {folder}: {error.strerror}. {advice}") from error
        else:
            return folder
