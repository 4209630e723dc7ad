"""``trainer tune batch_size`` and ``trainer tune lr``: what to set before a training. Imports no torch.

The config is composed and checked as ``fit`` does it. What is tried runs in processes of its own
(`trainer.cli.tune.attempt`); here is what they are asked to do, and what is made of their answers.
"""

from __future__ import annotations

import copy
import json
import math
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from trainer import redaction
from trainer.cli.arguments import Arguments, UsageError
from trainer.cli.compose import resolve
from trainer.cli.processes import is_quiet, under_torchrun
from trainer.cli.schema import describe
from trainer.cli.validate import validate
from trainer.cli.workdir import claim
from trainer.errors import TrainerError, did_you_mean

RESULT = "tune.json"
LOG = "tune.log"

_MODULES = {"batch_size": "trainer.cli.tune.batch_size", "lr": "trainer.cli.tune.lr"}
_EPOCHS, _STEPS = 1000, 100_000  # more than any test takes: schedules want to know how long a run may get

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


class TuneError(TrainerError):
    """A try has failed for another reason than memory. The message is the try's own."""


@dataclass(frozen=True)
class Settings:
    """The settings ``tune.*``; conf/tune/default.yaml says what they mean."""

    batch_size_key: str = "data.batch_size"
    memory: int | str | None = None
    max_batch_size: int | None = None
    multiple_of: int = 8
    steps_per_try: int = 3
    lr_key: str = "optimizer.lr"
    min_lr: float = 1e-6
    max_lr: float = 10.0
    steps: int = 100

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Settings:
        """The settings that the config's node ``tune`` describes.

        Raises:
            UsageError: a setting that does not exist, or a value that makes no sense.
        """
        names = [setting.name for setting in fields(cls)]
        for name, value in settings.items():
            if name not in names:
                raise UsageError(f"There is no setting 'tune.{name}'.{did_you_mean(name, names)}")
            if wanted := _expected(name, value):
                raise UsageError(f"tune.{name} is {describe(value)}, expected {wanted}.")
        made = cls(**settings)
        if not made.min_lr < made.max_lr:
            raise UsageError(
                f"tune.min_lr is {made.min_lr:g} and tune.max_lr is {made.max_lr:g}: expected more than that."
            )
        return made

    @property
    def budget(self) -> int | None:
        """``memory`` in bytes."""
        return None if self.memory is None else bytes_in(self.memory)


@dataclass(frozen=True)
class Try:
    """A batch size to try.

    Args:
        settings: the config, resolved, with that size in it.
        folder: for what a Trainer may write; emptied afterwards.
        memory: budget in bytes, of the process on a CPU, of torch's allocations on a GPU. None for what there is.
        only_on_cpu: the budget is the host's, and says nothing about a GPU.
        steps: weight updates.
    """

    settings: dict[str, Any]
    folder: Path
    memory: int | None
    only_on_cpu: bool
    steps: int


@dataclass(frozen=True)
class RangeTest:
    """A learning-rate range test to run.

    Args:
        settings: the config, resolved.
        folder: for what a Trainer may write; emptied afterwards.
        min_lr: learning rate of the first update.
        max_lr: that of the last.
        steps: weight updates.
    """

    settings: dict[str, Any]
    folder: Path
    min_lr: float
    max_lr: float
    steps: int


def _expected(name: str, value: Any) -> str | None:
    """What a setting should have been; None if it is that."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    match name:
        case "memory":
            return None if value is None or bytes_in(value) else "a size such as 3GiB, 500MB or 4000000000, or null"
        case "max_batch_size":
            return None if value is None or (is_whole and value >= 1) else "a whole number of at least 1, or null"
        case "multiple_of":
            return None if is_whole and value >= 1 else "a whole number of at least 1"
        case "steps_per_try":
            return None if is_whole and value >= 2 else "a whole number of at least 2"
        case "steps":
            return None if is_whole and value >= 10 else "a whole number of at least 10"
        case "min_lr" | "max_lr":
            return None if is_number and value > 0 else "a number above 0"
        case _:
            return None if isinstance(value, str) else "the name of a setting, such as data.batch_size"


def bytes_in(size: object) -> int | None:
    """How many bytes ``size`` is; None where it is no size.

    >>> bytes_in("3GiB"), bytes_in("1.5 GB"), bytes_in("512M"), bytes_in(4096), bytes_in("much")
    (3221225472, 1500000000, 536870912, 4096, None)
    """
    if isinstance(size, bool) or not isinstance(size, (int, float, str)):
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", str(size), re.IGNORECASE)
    if found is None:
        return None
    unit, ending = found[2].lower(), (found[3] or "").lower()
    factor = _DECIMAL[unit] if unit and ending == "b" else _UNITS[unit]
    return int(float(found[1]) * factor) or None


def command(arguments: Arguments) -> int:
    """``trainer tune batch_size|lr``.

    Returns:
        0, or 1 when nothing was found, or a try failed for another reason than memory.

    Raises:
        UsageError: what `trainer.cli.validate.validate` refuses, no word or another one, a sweep, or a config that
            cannot be built.
    """
    words = arguments.words
    if not words or words[0] not in _MODULES:
        given = f"Got {words[0]!r}, expected" if words else "Say what to tune:"
        near = did_you_mean(words[0], _MODULES) if words else ""
        raise UsageError(
            f"{given} batch_size, for the largest batch that fits into memory, or lr, for a learning rate.{near}"
            " `python -m trainer tune batch_size +recipe=resnet50`"
        )
    if arguments.shows or arguments.multirun:
        flag = "--multirun" if arguments.multirun else next(iter(arguments.flags))
        raise UsageError(f"{flag} does not go with tune. `python -m trainer fit ... --cfg job` shows the config.")
    if under_torchrun():
        raise UsageError("tune works on one device: run it without torchrun.")
    try:
        status: int = import_module(_MODULES[words[0]]).run(arguments)
    except TuneError as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 1
    return status


def composed(arguments: Arguments) -> tuple[DictConfig, Settings]:
    """The config, checked as that of a fit, and the settings of ``tune`` in it.

    Raises:
        UsageError: what ``fit`` would refuse, a checkpoint, or settings of ``tune`` that make no sense.
    """
    config = validate(arguments)
    if config.ckpt_path is not None:
        raise UsageError("tune starts from the weights that the model is built with: leave ckpt_path out.")
    node: Any = OmegaConf.to_container(config.tune, resolve=True)
    return config, Settings.read({str(name): value for name, value in node.items()})


def claim_folder(arguments: Arguments, config: DictConfig) -> Path:
    """The folder of this run, made."""
    return claim(replace(arguments, overrides=list(arguments.overrides)), config).resolve()


def plain(config: DictConfig, folder: Path, **changes: Any) -> dict[str, Any]:
    """The config as the processes get it: resolved, for a short training that neither validates, saves nor logs.

    Args:
        config: with Hydra's node.
        folder: of the run.
        changes: values by dotted key (as ``**{"data.batch_size": 8}``).
    """
    job = copy.deepcopy(config)
    OmegaConf.set_readonly(job.hydra, False)
    with open_dict(job):
        job.hydra.runtime.output_dir = str(folder)
        HydraConfig.instance().set_config(job)  # for ${hydra:runtime.output_dir}
        del job["hydra"]
        for key, value in changes.items():
            OmegaConf.update(job, key, value)
    settings = resolve(job)
    trainer = settings["trainer"]
    settings |= {"command": "fit", "ckpt_path": None, "logger": {}}
    trainer |= {
        "devices": 1,
        "num_nodes": 1,
        "strategy": "auto",
        "barebones": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "exact_resume": True,
        "fast_dev_run": False,
        "limit_train_batches": None,
        "limit_val_batches": 0,
        "max_time": None,
        "min_epochs": None,
        "min_steps": None,
        "num_sanity_val_steps": 0,
        "overfit_batches": 0.0,
        "profiler": None,
        "resume": None,
    }
    if trainer["max_epochs"] != -1:
        trainer["max_epochs"] = max(_EPOCHS, trainer["max_epochs"] or 0)
    if trainer["max_steps"] != -1:
        trainer["max_steps"] = max(_STEPS, trainer["max_steps"])
    return settings


def scratch(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder for what the processes' Trainers write, gone with its context."""
    return tempfile.TemporaryDirectory(prefix=".tries-", dir=folder, ignore_cleanup_errors=True)


def one_device(config: DictConfig) -> list[str]:
    """A remark, where the config asks for several devices."""
    trainer = config.trainer
    several = trainer.devices not in (1, "1", "auto") or trainer.num_nodes != 1
    if not several:
        return []
    return [
        "The config asks for several devices, and tune works on one: DDP takes memory for one more copy of the"
        " gradients, and more devices make a larger batch in all."
    ]


def failure(message: Mapping[str, Any], where: str, folder: Path) -> TrainerError:
    """What to raise for a try that failed for another reason than memory.

    Args:
        message: of the process.
        where: what was tried.
        folder: of the run.
    """
    if message["status"] == "died":
        end = f"signal {message['signal']}" if message["signal"] is not None else f"status {message['exit_status']}"
        text = f"its process ended with {end}, without a word"
    else:
        text = " ".join(str(message["error"]).split()).rstrip(".")
    if message.get("is_usage"):
        return UsageError(redaction.text(f"{text}."))
    return TuneError(redaction.text(f"{where}: {text}. What it printed is in {seen(folder) / LOG}"))


def write(folder: Path, result: dict[str, Any]) -> None:
    """Write ``tune.json``."""
    (folder / RESULT).write_text(redaction.text(json.dumps(result, indent=2)) + "\n", encoding="utf-8")


def seen(folder: Path) -> Path:
    """A folder as it is told of: from here, where it lies below."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def say(text: str) -> None:
    """A line for the person who waits; none with ``--quiet``."""
    if not is_quiet():
        print(text, flush=True)
