"""``trainer tune batch_size``: the largest batch that fits into memory, in each precision. Imports no torch.

Lightning's ``Tuner.scale_batch_size`` tries all sizes in one process. After an out-of-memory error, measurements in the
same process are unreliable; a budget on a CPU can only be enforced by ending the process; and Lightning measures
neither the speed nor the peak memory of each size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer.arguments import WHOLE
from trainer.cli import tune
from trainer.cli.parsing import COMPARED_PRECISIONS, Arguments, UsageError
from trainer.cli.schema import mistake
from trainer.cli.tune import LOG, Settings
from trainer.cli.tune.child import Message, run_in_child
from trainer.cli.workdir import claim
from trainer.common.machine import readable
from trainer.common.terminal import Table, four_digits


def run(arguments: Arguments) -> int:
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
    each = [replace(arguments, overrides=[*others, f"precision={name}"]) for name in names]
    configs = [tune.composed(one) for one in each]
    config, settings = configs[0]
    start = start_of(config, settings)
    folder = claim(each[0], config).resolve()
    results = []
    for name, (own_config, _) in zip(names, configs, strict=True):
        attempt = partial(attempt_size, own_config, settings, folder)
        results.append(find(name, attempt, start, settings, are_given=bool(given), folder=folder))
    result = {"tuned": "batch_size", "key": settings.batch_size_key, "seed": config.seed}
    _report(results, settings)
    tune.write(folder, result | {"settings": asdict(settings), "results": results})
    return 0 if any(result["largest"] for result in results) else 1


def attempt_size(config: DictConfig, settings: Settings, folder: Path, size: int) -> Message:
    """Train for a few steps with a batch size in a child process, and return its message.

    Args:
        config: the config with the node ``hydra``.
        settings: settings of the search.
        folder: folder of the run.
        size: the batch size.
    """
    made = tune.plain(config, folder, **{settings.batch_size_key: size})
    # Within an accumulation window, gradients need memory during the next batch, so two batches show the peak.
    made["trainer"]["accumulate_grad_batches"] = min(2, made["trainer"]["accumulate_grad_batches"] or 1)
    limits = {"steps": settings.steps_per_try, "memory": tune.bytes_in(settings.memory)}
    return run_in_child("trainer.cli.tune.attempt:train", folder / LOG, settings=made, limits=limits)


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
        raise UsageError(f"{problem} tune.batch_size_key names the setting of the batch size.")
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
                raise tune.failure(message, place, folder)
            return {"precision": precision, "tried": [], "largest": 0, "problem": message["error"]}
        tried.append({"size": size, **message})
        tune.print_unless_quiet(f"{place}: {message['status']}. {message.get('error', '')[:120]}".rstrip())
        if message["status"] == "ok":
            samples, batch = message["samples"], message["batch"]
            if batch < size and size == start and (samples is None or samples >= size):
                advice = "tune.batch_size_key names the setting of the batch size."
                raise UsageError(f"{key} is {size}, but the batches have {batch} samples. {advice}")
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


def _report(results: list[dict[str, Any]], settings: Settings) -> None:
    rows, lines = [], []
    for result in results:
        name, largest = result["precision"], result["largest"]
        fits = [one for one in result["tried"] if one["status"] == "ok" and one["batch"] == largest]
        rate, memory = (fits[-1][name] if fits else None for name in ("samples_per_second", "memory"))
        numbers = [four_digits(rate) if rate else "-", readable(memory) if memory else "-"]
        rows.append([name, str(largest or "none"), *numbers])
        reason = result["problem"] or "not even one sample fits."
        fitting = f"precision={name} {settings.batch_size_key}={largest}"
        lines.append(fitting if largest else f"precision={name}: {reason}")
    Table("Batch sizes that fit", ("precision", "largest batch", "samples/s", "peak memory"), rows).show()
    print("\n".join(lines))
