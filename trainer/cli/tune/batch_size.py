"""``trainer tune batch_size``: the largest batch that fits into memory, in each precision. Imports no torch.

Lightning's ``Tuner.scale_batch_size`` tries all sizes in one process. After an out-of-memory error, measurements in the
same process are unreliable; a budget on a CPU can only be enforced by ending the process; and Lightning measures
neither the speed nor the peak memory of each size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer import machine
from trainer.cli import tune
from trainer.cli.arguments import COMPARED_PRECISIONS, Arguments, UsageError
from trainer.cli.tune import LOG, Settings
from trainer.cli.tune.child import Message, run_in_child
from trainer.cli.workdir import claim
from trainer.files import from_here
from trainer.machine import readable
from trainer.terminal import Table, four_digits

_MARGIN = 0.9  # of the host's free memory; the rest is for the system and the growth of other processes


@dataclass
class Finding:
    """The result in one precision.

    Args:
        precision: value of the override.
        tried: the messages of the child processes (`trainer.cli.tune.attempt.train`), with the ``size``.
        largest: the largest size that fits; 0 if no size does.
        problem: why this precision was not tried, or "".
    """

    precision: str
    tried: list[Message] = field(default_factory=list)
    largest: int = 0
    problem: str = ""


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
    each = [replace(arguments, overrides=[*others, f"precision={name}"]) for name in precisions_in(given)]
    configs = [tune.composed(one) for one in each]
    config, settings = configs[0]
    start = start_of(config, settings)
    folder = claim(each[0], config).resolve()
    budget, is_default = tune.bytes_in(settings.memory), settings.memory is None
    if is_default and (usable := machine.memory().usable) is not None:
        budget = int(_MARGIN * usable)
    limits = {"steps": settings.steps_per_try, "memory": budget, "only_on_cpu": is_default}
    tune.print_unless_quiet(f"Memory budget on a CPU{'' if is_default else ' or a GPU'}: {readable(budget)}.")
    findings = []
    for name, (own_config, _) in zip(precisions_in(given), configs, strict=True):
        attempt = partial(attempt_size, own_config, settings, folder, limits)
        findings.append(find(name, attempt, start, settings, are_given=bool(given), folder=folder))
    result = {"tuned": "batch_size", "key": settings.batch_size_key, "budget": budget, "seed": config.seed}
    tune.write(folder, result | {"settings": asdict(settings), "results": [asdict(one) for one in findings]})
    _report(findings, settings, folder)
    return 0 if any(finding.largest for finding in findings) else 1


def attempt_size(config: DictConfig, settings: Settings, folder: Path, limits: dict[str, Any], size: int) -> Message:
    """Train for a few steps with a batch size in a child process, and return its message.

    Args:
        config: the config with the node ``hydra``.
        settings: settings of the search.
        folder: folder of the run.
        limits: arguments of `trainer.cli.tune.attempt.Meter`.
        size: the batch size.
    """
    made = tune.plain(config, folder, **{settings.batch_size_key: size})
    # Within an accumulation window, gradients need memory during the next batch, so two batches show the peak.
    made["trainer"]["accumulate_grad_batches"] = min(2, made["trainer"]["accumulate_grad_batches"] or 1)
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
    key = settings.batch_size_key
    size = OmegaConf.select(config, key)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        found = "the config has no such setting" if size is None else f"its value is {size!r}"
        raise UsageError(
            f"tune.batch_size_key is {key}, and {found}; expected the setting of the batch size, a whole number. For"
            " example: tune.batch_size_key=model.batch_size."
        )
    return size if settings.max_batch_size is None else min(size, settings.max_batch_size)


def find(
    precision: str, attempt: Callable[[int], Message], start: int, settings: Settings, *, are_given: bool, folder: Path
) -> Finding:
    """Search for the largest batch in one precision.

    Args:
        precision: its name.
        attempt: tries a size, and returns the message of the child process.
        start: the first size.
        settings: settings of the search.
        are_given: whether the user chose this precision. If so, a device that does not support it is an error.
        folder: folder of the run, for messages.

    Raises:
        UsageError: if the config cannot be built, or the setting is not the batch size.
        TuneError: if an attempt failed for a reason other than memory.
    """
    key = settings.batch_size_key
    finding = Finding(precision)
    most = settings.max_batch_size
    size: int | None = start
    too_large: int | None = None
    while size is not None:
        place = f"{key}={size} in precision={precision}"
        message = attempt(size)
        if message["status"] == "failed":
            if are_given or not message.get("is_precision"):
                raise tune.failure(message, place, folder)
            finding.problem = message["error"]
            tune.print_unless_quiet(f"precision={precision}: {finding.problem}")
            return finding
        finding.tried.append({"size": size, **message})
        tune.print_unless_quiet(f"{place}: {message['status']}. {message.get('error', '')[:120]}".rstrip())
        if message["status"] == "ok":
            samples, batch = message["samples"], message["batch"]
            if batch < size and size == start and (samples is None or samples >= size):
                raise UsageError(
                    f"{key} is {size}, but the batches have {batch} samples, so it is not the batch size. Name the"
                    " setting of the batch size: tune.batch_size_key=KEY"
                )
            samples = batch if batch < size else samples  # the dataset has no more samples
            most = min((bound for bound in (samples, settings.max_batch_size) if bound is not None), default=None)
            finding.largest = size if most is None else min(size, most)
        else:
            too_large = size
        size = next_size(finding.largest, too_large, most, settings.multiple_of)
    return finding


def next_size(fits: int, too_large: int | None, most: int | None, multiple_of: int = 1) -> int | None:
    """Return the size to try next: doubled or halved, then bisected; None at the end.

    Args:
        fits: the largest size that fit so far; 0 if none did.
        too_large: the smallest size that did not fit, or None. At least one of the two is known.
        most: the largest size to try; None for no limit.
        multiple_of: bisection uses multiples of this number. Below it, any number is tried.
    """
    if too_large is None:
        size = 2 * fits if most is None else min(2 * fits, most)
        return size if size > fits else None
    if not fits:
        return too_large // 2 or None
    unit = multiple_of if too_large > multiple_of else 1
    first, last = fits // unit + 1, (too_large - 1) // unit
    return (first + last) // 2 * unit if first <= last else None


def _report(findings: list[Finding], settings: Settings, folder: Path) -> None:
    rows, lines = [], []
    for finding in findings:
        fits = [trial for trial in finding.tried if trial["status"] == "ok" and trial["batch"] == finding.largest]
        rate, memory = (fits[-1].get(name) if fits else None for name in ("samples_per_second", "memory"))
        numbers = [four_digits(rate) if rate else "-", readable(memory) if memory else "-"]
        rows.append([finding.precision, str(finding.largest or "none"), *numbers])
        if finding.largest:
            lines.append(f"precision={finding.precision} {settings.batch_size_key}={finding.largest}")
        else:
            lines.append(f"precision={finding.precision}: {finding.problem or 'not even one sample fits.'}")
    Table("Batch sizes that fit", ("precision", "largest batch", "samples/s", "peak memory"), rows).show()
    print("\n".join(lines))
    tune.print_unless_quiet(f"The results of all attempts are in {from_here(folder / tune.RESULT)}")
