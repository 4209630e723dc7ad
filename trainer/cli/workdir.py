"""The folder of a run or a sweep: made here, before Hydra, so that all ranks and all jobs agree on it."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from trainer.cli.arguments import OURS, Arguments, UsageError
from trainer.cli.compose import CONFIG_NAME
from trainer.cli.failure import forget_last
from trainer.cli.folders import packaged_conf
from trainer.cli.processes import agree, is_first, slurm_step, under_torchrun
from trainer.terminal import is_quiet

_OF_RESUMING = ("resume", "exact_resume", "trainer.resume", "trainer.exact_resume")
_OF_DEVICES = ("trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy")


def sweeps(arguments: Arguments, config: DictConfig) -> bool:
    """Whether the command line, or a config it chose, asks for several jobs."""
    return arguments.multirun or config.hydra.mode == RunMode.MULTIRUN


def go_on_again(arguments: Arguments) -> None:
    """Where Slurm runs a job again that srun has started, have a fit go on in the folder that the job has had before.

    Unless the command line says what it goes on from.
    """
    is_again = slurm_step() is not None and int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0
    keys = {override.lstrip("+").partition("=")[0] for override in arguments.overrides}
    told = keys & {"ckpt", "ckpt_path", "resume", "trainer.resume", "hydra.run.dir"}
    if is_again and arguments.command == "fit" and not told and not arguments.multirun:
        arguments.overrides.append("resume=auto")
        arguments.again = True


def claim(arguments: Arguments, config: DictConfig) -> Path:
    """Make the folder that ``config`` names and write it into ``arguments``; ranks but the first only read it
    there.

    A folder with the time in its name gets a number when another run was given the same second. With ``resume=auto`` it
    has a name made of the command in the place of the time: so the same command finds it again. So it has where srun
    has started the processes, with Slurm's number of the job: so they have one folder, and a job that is run again.

    Raises:
        UsageError: ``resume=auto`` for a command that does not train, a folder that cannot be made, or a sweep under
            torchrun or srun, where every rank would start all jobs.
    """
    sweeping = sweeps(arguments, config)
    by_srun = slurm_step() is not None and int(os.environ.get("SLURM_NTASKS") or 1) > 1
    if sweeping and (under_torchrun() or by_srun):
        words = "compare" if arguments.command == "compare" else "fit -m"
        raise UsageError(
            "A sweep starts its processes itself: run it without torchrun or srun, as in"
            f" `python -m trainer {words} ... trainer=ddp trainer.devices=2`."
        )
    key = "hydra.sweep.dir" if sweeping else "hydra.run.dir"
    chosen = any(override.startswith(f"{key}=") for override in arguments.overrides)
    resumes = OmegaConf.select(config, "trainer.resume") == "auto"
    if resumes and arguments.command not in ("fit", "compare"):
        raise UsageError(
            f"resume=auto goes on with a training, and {arguments.command} is none. Got it with {arguments.command},"
            " expected fit or compare. For the weights of a run, write ckpt_path=RUN/checkpoints/last.ckpt."
        )
    step = slurm_step()
    if not chosen and (resumes or step):
        by_job = step and (arguments.again or not resumes)
        config = _named_after(arguments, config, key, f"slurm-{step}" if by_job else "auto")
    HydraConfig.instance().set_config(config)  # for folders named with ${hydra:...}
    folder = str(OmegaConf.select(config, key))
    if is_first():
        folder = str(_make(Path(folder), exist_ok=chosen or resumes or by_srun))
        forget_last(Path(folder))
        if resumes and not chosen and not is_quiet():
            print(f"resume=auto: the folder of this command is {folder}", flush=True)
    else:
        arguments.overrides += ["hydra.output_subdir=null", "hydra/job_logging=none"]
    folder = agree(folder)
    arguments.overrides.append(f"{key}={quoted(folder)}")
    return Path(folder)


def go_on_command(
    command: str | None, words: Sequence[str], folder: Path | str, key: str, flags: Mapping[str, str] | None = None
) -> str:
    """The command that goes on in ``folder`` with what ``words`` have begun there.

    Args:
        command: such as ``fit``.
        words: the overrides that were given.
        folder: of the run or of the sweep.
        key: the setting of that folder.
        flags: that were given.
    """
    names = {word.lstrip("+").partition("=")[0] for word in words}
    more = [] if names & {"resume", "trainer.resume"} else ["resume=auto"]
    if key not in names and more:  # with resume=auto the same command finds its folder again
        place = str(folder)
        more.append(f"{key}={place if re.fullmatch(r'[a-zA-Z0-9_./-]+', place) else quoted(place)}")
    said = [word for name, value in (flags or {}).items() if name != "--quiet" for word in (name, value) if word]
    return shlex.join(["python", "-m", "trainer", str(command), *said, *words, *more])


def config_flags(hydra: Any) -> dict[str, str]:
    """Return the flags with which another command finds the configs of this run.

    Args:
        hydra: the node of that name.
    """
    flags = {}
    paths = {source.provider: str(source.path) for source in hydra.runtime.config_sources}
    if "command-line" in paths:
        flags["--config-dir"] = paths["command-line"]
    if paths.get("main", str(packaged_conf())) != str(packaged_conf()):
        flags["--config-path"] = paths["main"]
    if hydra.job.config_name != CONFIG_NAME:
        flags["--config-name"] = str(hydra.job.config_name)
    return flags


def _named_after(arguments: Arguments, config: DictConfig, key: str, kind: str) -> DictConfig:
    """``config`` with a folder that is named after ``kind`` and the command where it was named after the time.

    Settings that say how to resume are left out, and so is the order of the others; so are those of devices, for a run
    may go on on others, except in a sweep, which may be one over them.
    """
    said = {*arguments.overrides, f"command={arguments.command}", *map("".join, _hydras(arguments.flags))}
    counted = sorted(word for word in said if word.lstrip("+").partition("=")[0] not in _OF_RESUMING)
    if key == "hydra.run.dir":
        counted = [word for word in counted if not _says_where(word)]
    name = f"{kind}-{hashlib.sha256(json.dumps(counted).encode()).hexdigest()[:8]}"
    section = key.rpartition(".")[0]
    written: Any = OmegaConf.to_container(OmegaConf.select(config, section), resolve=False)
    config = copy.deepcopy(config)
    OmegaConf.set_readonly(config.hydra, False)
    OmegaConf.update(config, key, re.sub(r"\$\{now:[^}]*\}", name, str(written["dir"])))
    return config


def _says_where(word: str) -> bool:
    """Whether an override says on which devices a run is, and how they work together, and nothing else."""
    name, _, value = word.lstrip("+").partition("=")
    if name == "trainer":
        return (packaged_conf() / "trainer" / f"{value}.yaml").is_file()
    return any(name == one or name.startswith(f"{one}.") for one in _OF_DEVICES)


def _hydras(flags: dict[str, str]) -> list[tuple[str, str]]:
    return [(flag, value) for flag, value in flags.items() if flag not in OURS]


def quoted(text: str) -> str:
    """``text`` as the value of an override, whatever is in it."""
    return str(QuotedString(text.replace("${", "\\${"), Quote.single).with_quotes())


def _make(folder: Path, *, exist_ok: bool) -> Path:
    wanted, number = folder, 1
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=exist_ok)
        except FileExistsError:
            if exist_ok:
                raise UsageError(f"Cannot write into {folder}: it is a file, expected a folder.") from None
            number += 1
            folder = wanted.with_name(f"{wanted.name}_{number}")
        except OSError as error:
            raise UsageError(
                f"Cannot make the folder {folder}: {error.strerror}. Choose another with hydra.run.dir=FOLDER, or"
                " hydra.sweep.dir=FOLDER for a sweep."
            ) from error
        else:
            return folder
