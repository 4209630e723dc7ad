"""``trainer tune batch_size`` and ``trainer tune lr``: find these settings before a training run. Imports no torch.

The config is composed and checked as for ``fit``. The training steps run in child processes
(`trainer.cli.tune.child`), each with a config made by `plain`.

Each attempt is a process, so that one that runs out of memory does not affect the next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from trainer.arguments import ARGUMENTS, NUMBER, TEXT, WHOLE, Kind
from trainer.cli.compose import resolve
from trainer.cli.config_checks import validate
from trainer.cli.parsing import Arguments, UsageError
from trainer.cli.processes import under_torchrun
from trainer.cli.schema import read_settings, setting
from trainer.cli.warm_process import warm_processes
from trainer.cli.workdir import with_folder
from trainer.common import redaction
from trainer.common.files import from_here
from trainer.common.terminal import command_line, is_quiet
from trainer.errors import TrainerError, did_you_mean

RESULT = "tune.json"
LOG = "tune.log"

_MODULES = {"batch_size": "trainer.cli.tune.batch_size", "lr": "trainer.cli.tune.lr"}

_DEFAULTS = (
    "barebones", "exact_resume", "fast_dev_run", "limit_train_batches", "max_time", "min_epochs", "min_steps",
    "overfit_batches", "profiler", "resume", "strategy",
)  # fmt: skip
_SHORT_TRAINING = {name: ARGUMENTS[name].default for name in _DEFAULTS} | {
    "devices": 1,
    "num_nodes": 1,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}
"""Arguments of the Trainer for a fit without validation, checkpoints and logs."""
_LONGEST = {"max_epochs": 1000, "max_steps": 100_000}
"""Minimum length of the run, so that ``tune`` does not reach its end. It is finite, because some schedulers use it."""


class TuneError(TrainerError):
    """A training step failed for a reason other than memory. The message is that of its error."""


def bytes_in(size: object) -> int | None:
    """Return the number of bytes, or None if ``size`` is not a size.

    >>> bytes_in("3GiB"), bytes_in("1.5 GB"), bytes_in("512M"), bytes_in(4096), bytes_in("much")
    (3221225472, 1500000000, 536870912, 4096, None)
    """
    if isinstance(size, bool) or not isinstance(size, (int, float, str)):
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", str(size), re.IGNORECASE)
    if found is None:
        return None
    is_decimal = (found[3] or "").lower() == "b"
    return int(float(found[1]) * (1000 if is_decimal else 1024) ** " kmgt".index(found[2].lower() or " ")) or None


_KEY = TEXT._replace(words="the name of a setting, such as data.batch_size")
SIZE = Kind("a size such as 3GiB, 500MB or 4000000000", lambda value: bytes_in(value) is not None)
"""A size of memory."""
_RATE = NUMBER._replace(above=0)


@dataclass(frozen=True)
class Settings:
    """The settings ``tune.*``. conf/tune/default.yaml describes them."""

    batch_size_key: str = setting("data.batch_size", _KEY)
    memory: int | str | None = setting(None, SIZE, None)
    max_batch_size: int | None = setting(None, WHOLE.at_least(1), None)
    multiple_of: int = setting(8, WHOLE.at_least(1))
    steps_per_try: int = setting(3, WHOLE.at_least(2))
    lr_key: str = setting("optimizer.lr", _KEY)
    min_lr: float = setting(1e-6, _RATE)
    max_lr: float = setting(10.0, _RATE)
    steps: int = setting(100, WHOLE.at_least(10))


def command(arguments: Arguments) -> int:
    """Run ``trainer tune batch_size`` or ``trainer tune lr``.

    Returns:
        0, or 1 if nothing was found.

    Raises:
        TuneError: if a training step failed for a reason other than memory.
        UsageError: if `trainer.cli.config_checks.validate` raises it, the word is missing or unknown, a sweep was
            given, or the config cannot be built.
    """
    name = arguments.words[0] if arguments.words else "nothing to tune"
    if name not in _MODULES:
        example = command_line("tune", "batch_size", *(arguments.overrides or ["+recipe=NAME"]))
        expected = "batch_size, for the largest batch that fits into memory, or lr, for a learning rate"
        raise UsageError(f"Got {name}, expected {expected}.{did_you_mean(name, _MODULES)} `{example}`")
    arguments.check_flags()
    if under_torchrun():
        raise UsageError("Got tune under torchrun, but tune uses one device. Run it without torchrun.")
    with warm_processes():
        status: int = import_module(_MODULES[name]).run(arguments)
    return status


def composed(arguments: Arguments) -> tuple[DictConfig, Settings]:
    """Return the config, checked as for ``fit``, and its settings ``tune``.

    Raises:
        UsageError: if ``fit`` would raise it, or a setting of ``tune`` is invalid.
    """
    config = validate(arguments)
    settings = read_settings(Settings, "tune", OmegaConf.to_container(config.tune, resolve=True))
    low, high = settings.min_lr, settings.max_lr
    if not low < high:
        raise UsageError(f"tune.max_lr is {high:g}, expected more than tune.min_lr, which is {low:g}.")
    return config, settings


def plain(config: DictConfig, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the resolved config of a child process, for a short run without validation, checkpoints and logs.

    Args:
        config: the config with the node ``hydra``.
        folder: folder of the run.
        changes: values by dotted key, such as ``**{"data.batch_size": 8}``.
    """
    job = with_folder(config, "hydra.runtime.output_dir", str(folder))
    with open_dict(job):
        HydraConfig.instance().set_config(job)  # for ${hydra:runtime.output_dir}
        del job["hydra"]
        for key, value in changes.items():
            OmegaConf.update(job, key, value)
    settings = resolve(job)
    trainer = settings["trainer"] | _SHORT_TRAINING
    for name, longest in _LONGEST.items():
        if trainer[name] != -1:
            trainer[name] = max(longest, trainer[name] or 0)
    return settings | {"command": "fit", "ckpt_path": None, "logger": {}, "trainer": trainer}


def failure(message: Mapping[str, Any], attempt: str, folder: Path) -> TrainerError:
    """Return the error for training steps that failed for a reason other than memory.

    Args:
        message: message of the child process.
        attempt: description of the attempt.
        folder: folder of the run.
    """
    error = str(message["error"]).rstrip(".")
    if message.get("is_usage"):
        return UsageError(redaction.text(f"{error}."))
    return TuneError(redaction.text(f"{attempt}: {error}. Its output is in {from_here(folder) / LOG}"))


def write(folder: Path, result: dict[str, Any]) -> None:
    """Write ``tune.json``, and print its name."""
    file = folder / RESULT
    file.write_text(redaction.text(json.dumps(result, indent=2)) + "\n", encoding="utf-8")
    print_unless_quiet(f"The results of all attempts are in {from_here(file)}")


def print_unless_quiet(text: str) -> None:
    """Print a line, unless ``--quiet`` was given."""
    if not is_quiet():
        print(text, flush=True)
