"""The folder of a run or a sweep: made here, before Hydra, so that all ranks and all jobs agree on it."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from trainer.cli.arguments import OURS, Arguments, UsageError
from trainer.cli.failure import forget_last
from trainer.cli.processes import agree, is_first, is_quiet, under_torchrun

_OF_RESUMING = ("resume", "exact_resume", "trainer.resume", "trainer.exact_resume")


def sweeps(arguments: Arguments, config: DictConfig) -> bool:
    """Whether the command line, or a config it chose, asks for several jobs."""
    return arguments.multirun or config.hydra.mode == RunMode.MULTIRUN


def claim(arguments: Arguments, config: DictConfig) -> Path:
    """Make the folder that ``config`` names and write it into ``arguments``; ranks but the first only read it
    there.

    A folder with the time in its name gets a number when another run was given the same second. With ``resume=auto`` it
    has a name made of the command in the place of the time: so the same command finds it again.

    Raises:
        UsageError: ``resume=auto`` for a command that does not train, a folder that cannot be made, or a sweep under
            torchrun, where every rank would start all jobs.
    """
    sweeping = sweeps(arguments, config)
    if sweeping and under_torchrun():
        words = "compare" if arguments.command == "compare" else "fit -m"
        raise UsageError(
            "A sweep starts its processes itself: run it without torchrun, as in"
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
    if resumes and not chosen:
        config = _named_after(arguments, config, key)
    HydraConfig.instance().set_config(config)  # for folders named with ${hydra:...}
    folder = str(OmegaConf.select(config, key))
    if is_first():
        folder = str(_make(Path(folder), exist_ok=chosen or resumes))
        forget_last(Path(folder))
        if resumes and not chosen and not is_quiet():
            print(f"resume=auto: the folder of this command is {folder}", flush=True)
    else:
        arguments.overrides += ["hydra.output_subdir=null", "hydra/job_logging=none"]
    folder = agree(folder)
    arguments.overrides.append(f"{key}={quoted(folder)}")
    return Path(folder)


def _named_after(arguments: Arguments, config: DictConfig, key: str) -> DictConfig:
    """``config`` with a folder that is named after the command where it was named after the time.

    Settings that say how to resume are left out, and so is the order of the others.
    """
    said = {*arguments.overrides, f"command={arguments.command}", *map("".join, _hydras(arguments.flags))}
    counted = sorted(word for word in said if word.lstrip("+").partition("=")[0] not in _OF_RESUMING)
    name = f"auto-{hashlib.sha256(json.dumps(counted).encode()).hexdigest()[:8]}"
    section = key.rpartition(".")[0]
    written: Any = OmegaConf.to_container(OmegaConf.select(config, section), resolve=False)
    config = copy.deepcopy(config)
    OmegaConf.set_readonly(config.hydra, False)
    OmegaConf.update(config, key, re.sub(r"\$\{now:[^}]*\}", name, str(written["dir"])))
    return config


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
