"""``trainer tune batch_size`` and ``trainer tune lr``: find these settings before a training run. Imports no torch.

The config is composed and checked as for ``fit``. The training steps run in child processes
(`trainer.cli.tune.child`), each with a config made by `plain`.

Each attempt is a process, so that one that runs out of memory does not affect the next.

Lightning's ``Tuner.scale_batch_size`` tries all sizes in one process. After an out-of-memory error, measurements in the
same process are unreliable; a budget on a CPU can only be enforced by ending the process; and Lightning measures
neither the speed nor the peak memory of each size.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from trainer.arguments import ARGUMENTS, NUMBER, TEXT, WHOLE, Kind
from trainer.cli.compose import resolve
from trainer.cli.config_checks import validate
from trainer.cli.parsing import COMPARED_PRECISIONS, Arguments, UsageError
from trainer.cli.processes import under_torchrun
from trainer.cli.schema import mistake, read_settings, setting
from trainer.cli.tune.child import Message, run_in_child
from trainer.cli.warm_process import warm_processes
from trainer.cli.workdir import claim, with_folder
from trainer.common import redaction
from trainer.common.files import from_here
from trainer.common.machine import readable
from trainer.common.terminal import Table, command_line, four_digits, inform
from trainer.errors import TrainerError, did_you_mean

RESULT = "tune.json"
LOG = "tune.log"
_TRAIN = "trainer.cli.tune.attempt:train"

_NAMES = ("batch_size", "lr")
_LISTED = "batch_size, for the largest batch that fits into memory, or lr, for a learning rate"

_DEFAULTS = (
    "barebones", "exact_resume", "fast_dev_run", "limit_train_batches", "max_time", "min_epochs", "min_steps",
    "num_nodes", "overfit_batches", "profiler", "resume", "strategy",
)  # fmt: skip
_OFF = ("enable_checkpointing", "enable_model_summary", "enable_progress_bar")
_SHORT_TRAINING = {
    **{name: ARGUMENTS[name].default for name in _DEFAULTS},
    **dict.fromkeys(_OFF, False),
    "devices": 1,
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
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", str(size).lower())
    if match is None:
        return None
    base = 1000 if match[3] == "b" else 1024
    return int(float(match[1]) * base ** " kmgt".index(match[2] or " ")) or None


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
    if name not in _NAMES:
        example = command_line("tune", "batch_size", *(arguments.overrides or ["+recipe=NAME"]))
        raise UsageError(f"Got {name}, expected {_LISTED}.{did_you_mean(name, _NAMES)} `{example}`")
    arguments.check_flags()
    if under_torchrun():
        raise UsageError("Got tune under torchrun, but tune uses one device. Run it without torchrun.")
    with warm_processes():
        return (tune_batch_size if name == "batch_size" else tune_lr)(arguments)


def composed(arguments: Arguments) -> tuple[DictConfig, Settings]:
    """Return the config, checked as for ``fit``, and its settings ``tune``.

    Raises:
        UsageError: if ``fit`` would raise it, or a setting of ``tune`` is invalid.
    """
    config = validate(arguments)
    settings = read_settings(Settings, "tune", OmegaConf.to_container(config.tune, resolve=True))
    if not (low := settings.min_lr) < (high := settings.max_lr):
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
    inform(f"The results of all attempts are in {from_here(file)}")


# --- batch_size ------------------------------------------------------------------------------------------------

_ADVICE = "tune.batch_size_key names the setting of the batch size."


def tune_batch_size(arguments: Arguments) -> int:
    """Run ``trainer tune batch_size``.

    Returns:
        0, or 1 if not even one sample fits in any precision.

    Raises:
        UsageError: as in `trainer.cli.tune.command`.
        TuneError: if an attempt failed for a reason other than memory.
    """
    given = [word for word in arguments.overrides if word.partition("=")[0] == "precision"]
    others = [word for word in arguments.overrides if word not in given]
    names = precisions_in(given)
    variants = [replace(arguments, overrides=[*others, f"precision={name}"]) for name in names]
    jobs = [composed(variant) for variant in variants]
    config, settings = jobs[0]
    start = start_of(config, settings)
    folder = claim(variants[0], config).resolve()
    results = []
    for name, (variant, _) in zip(names, jobs, strict=True):
        attempt = partial(attempt_size, variant, settings, folder)
        results.append(find(name, attempt, start, settings, are_given=bool(given), folder=folder))
    _report_sizes(results, settings)
    result = {"tuned": "batch_size", "key": settings.batch_size_key, "seed": config.seed}
    write(folder, result | {"settings": asdict(settings), "results": results})
    return 0 if any(result["largest"] for result in results) else 1


def attempt_size(config: DictConfig, settings: Settings, folder: Path, size: int) -> Message:
    """Train for a few steps with a batch size in a child process, and return its message.

    Args:
        config: the config with the node ``hydra``.
        settings: settings of the search.
        folder: folder of the run.
        size: the batch size.
    """
    job = plain(config, folder, **{settings.batch_size_key: size})
    # Within an accumulation window, gradients need memory during the next batch, so two batches show the peak.
    job["trainer"]["accumulate_grad_batches"] = min(2, job["trainer"]["accumulate_grad_batches"] or 1)
    limits = {"steps": settings.steps_per_try, "memory": bytes_in(settings.memory)}
    return run_in_child(_TRAIN, folder / LOG, settings=job, limits=limits)


def precisions_in(given: list[str]) -> list[str]:
    """Return the precisions to try, from the overrides ``precision=...``."""
    if not given:
        return list(COMPARED_PRECISIONS)
    value = given[-1].partition("=")[2]
    return [value] if value.startswith("{") else [name.strip() for name in value.split(",")]


def start_of(config: DictConfig, settings: Settings) -> int:
    """Return the batch size of the config, which is the start of the search.

    Raises:
        UsageError: if the config has none, or it is not a size.
    """
    size: int = OmegaConf.select(config, settings.batch_size_key)
    if problem := mistake(settings.batch_size_key, size, (WHOLE.at_least(1),)):
        raise UsageError(f"{problem} {_ADVICE}")
    return size if settings.max_batch_size is None else min(size, settings.max_batch_size)


def find(
    precision: str, attempt: Callable[[int], Message], start: int, settings: Settings, *, are_given: bool, folder: Path
) -> dict[str, Any]:
    """Search for the largest batch in one precision.

    Args:
        precision: its name.
        attempt: tries a size, and returns the message of the child process.
        start: the first size.
        settings: settings of the search.
        are_given: whether the user chose this precision. If so, a device that does not support it is an error.
        folder: folder of the run, for messages.

    Returns:
        The ``precision``; the messages of the child processes (``tried``) with the ``size``; the ``largest`` size that
        fits, 0 if no size does; and ``problem``, the reason if the precision was not tried.

    Raises:
        UsageError: if the config cannot be built, or the setting is not the batch size.
        TuneError: if an attempt failed for a reason other than memory.
    """
    key, most, size = settings.batch_size_key, settings.max_batch_size, start
    fits, too_large, tried = 0, None, list[Message]()
    while size:
        place = f"{key}={size} in precision={precision}"
        message = attempt(size)
        if message["status"] == "failed":
            if are_given or not message.get("is_precision"):
                raise failure(message, place, folder)
            return {"precision": precision, "tried": [], "largest": 0, "problem": message["error"]}
        tried.append({"size": size, **message})
        inform(f"{place}: {message['status']}. {message.get('error', '')[:120]}".rstrip())
        if message["status"] == "ok":
            samples, batch = message["samples"], message["batch"]
            if batch < size and size == start and (samples is None or samples >= size):
                raise UsageError(f"{key} is {size}, but the batches have {batch} samples. {_ADVICE}")
            samples = batch if batch < size else samples  # the dataset has no more samples
            most = min((bound for bound in (samples, settings.max_batch_size) if bound is not None), default=None)
            fits = size if most is None else min(size, most)
        else:
            too_large = size
        size = next_size(fits, too_large, most, settings.multiple_of)
    return {"precision": precision, "tried": tried, "largest": fits, "problem": ""}


def next_size(fits: int, too_large: int | None, most: int | None, multiple_of: int = 1) -> int:
    """Return the size to try next: doubled until it does not fit, then bisected; 0 at the end.

    Args:
        fits: the largest size that fit so far; 0 if none did.
        too_large: the smallest size that did not fit, or None. At least one of the two is known.
        most: the largest size to try; None for no limit.
        multiple_of: bisection uses multiples of this number. Below it, any number is tried.
    """
    if too_large is None:
        size = 2 * fits if most is None else min(2 * fits, most)
        return size if size > fits else 0
    unit = multiple_of if too_large > multiple_of else 1
    first, last = fits // unit + 1, (too_large - 1) // unit
    return (first + last) // 2 * unit if first <= last else 0


def _report_sizes(results: list[dict[str, Any]], settings: Settings) -> None:
    rows, lines = [], []
    for result in results:
        name, largest = f"precision={result['precision']}", result["largest"]
        fits = [attempt for attempt in result["tried"] if attempt["status"] == "ok" and attempt["batch"] == largest]
        rate, memory = (fits[-1][figure] if fits else None for figure in ("samples_per_second", "memory"))
        numbers = [four_digits(rate) if rate else "-", readable(memory) if memory else "-"]
        rows.append([result["precision"], str(largest or "none"), *numbers])
        reason = result["problem"] or "not even one sample fits."
        lines.append(f"{name} {settings.batch_size_key}={largest}" if largest else f"{name}: {reason}")
    Table("Batch sizes that fit", ("precision", "largest batch", "samples/s", "peak memory"), rows).show()
    print("\n".join(lines))


# --- lr --------------------------------------------------------------------------------------------------------

_CLEAR = 5  # standard errors; a smaller decrease may be chance, because many means are compared
_MEDIAN_OF_NORMAL = 0.6745  # median of the absolute value of a standard normal variable


def tune_lr(arguments: Arguments) -> int:
    """Run ``trainer tune lr``.

    Returns:
        0, or 1 if the curve suggests no rate.

    Raises:
        UsageError: as in `trainer.cli.tune.command`.
        TuneError: if the test failed.
    """
    config, settings = composed(arguments)
    folder = claim(arguments, config).resolve()
    rates = {name: getattr(settings, name) for name in ("min_lr", "max_lr", "steps")}
    message = run_in_child(_TRAIN, folder / LOG, settings=plain(config, folder), rates=rates)
    if message["status"] != "ok":
        raise failure(message, "The range test failed", folder)
    return report_lr(message, config, settings, folder)


def report_lr(message: Message, config: DictConfig, settings: Settings, folder: Path) -> int:
    """Print the suggestion of a curve, and write ``tune.json``.

    Args:
        message: message of `trainer.cli.tune.attempt.train`.
        config: the config with the node ``hydra``.
        settings: settings of the test.
        folder: folder of the run.
    """
    points = [(float(rate), float(loss)) for rate, loss in message["points"]]
    rate, reason = suggest(points)
    result = {"tuned": "lr", "key": settings.lr_key, "seed": config.seed, "suggestion": rate, "reason": reason}
    result |= {name: message[name] for name in ("precision", "ended_by", "skipped", "first_loss")}
    result["curve"] = {"lr": [rate for rate, _ in points], "loss": [loss for _, loss in points]}
    ended = f"{message['ended_by']}, after {len(points)} rates and {message['skipped']} skipped steps"
    inform(f"The test ended with {ended}.")
    if rate is None:
        print(f"No suggestion: {reason}.")
    else:
        current = OmegaConf.select(config, settings.lr_key)
        current_text = f" (currently {current:.2g})" if isinstance(current, (int, float)) else ""
        print(f"Suggestion, {reason}: {settings.lr_key}={rate:.2g}{current_text}")
    write(folder, result)
    return 0 if rate is not None else 1


def suggest(points: Sequence[tuple[float, float]]) -> tuple[float | None, str]:
    """Return the learning rate with the steepest decrease of the loss over the logarithm of the rate, and the reason.

    The slope at a point is that of a least-squares line through the point and its neighbors, an eighth of the curve in
    total. Points after the lowest loss are ignored. fastai's ``lr_find`` calls this rule "steep". The rate at the
    lowest loss itself is too large, because training is about to diverge there.

    Args:
        points: pairs of a rate and a loss, with a constant factor between consecutive rates.

    Returns:
        The rate and the rule; or None and the reason why there is no suggestion.
    """
    losses, logs = [loss for _, loss in points], [math.log(rate) for rate, _ in points]
    reach = max(2, len(points) // 16)
    smoothed = [statistics.fmean(losses[max(0, i - reach) : i + reach + 1]) for i in range(len(losses))]
    if len(points) < 4 * reach:
        return None, f"the curve has only {len(points)} points: use more tune.steps, or a smaller tune.min_lr"
    inner = range(reach, len(points) - reach)  # points with means over the same number of points
    lowest = min(inner, key=smoothed.__getitem__)
    # The spread of the loss from one point to the next, as a standard deviation, before the loss diverges.
    calm = losses[: max(lowest + 1, len(losses) // 2)]
    spread = statistics.median(abs(b - a) for a, b in pairwise(calm)) / (math.sqrt(2) * _MEDIAN_OF_NORMAL)
    if smoothed[reach] - smoothed[lowest] <= _CLEAR * spread / math.sqrt(2 * reach + 1):
        advice = "use another tune.min_lr and tune.max_lr, larger batches, or more tune.steps"
        return None, f"the loss does not decrease clearly: {advice}"

    def slope(i: int) -> float:
        window = slice(i - reach, i + reach + 1)
        return statistics.linear_regression(logs[window], losses[window]).slope

    steepest = min(range(reach, lowest + 1), key=slope)
    return points[steepest][0], "at the steepest decrease of the loss"
