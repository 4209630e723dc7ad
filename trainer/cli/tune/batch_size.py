"""``trainer tune batch_size``: the largest batch that fits, and the fastest, in each precision. Imports no torch.

Lightning's ``Tuner.scale_batch_size`` works with our Trainer, but is not used here: it tries all sizes in one process.
After an out-of-memory error such a process is no reliable measure for the next size; on a CPU a budget can only be
enforced by ending the process; and the speed and the peak memory of each size are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer import machine
from trainer.cli import tune
from trainer.cli.arguments import COMPARED, Arguments, UsageError
from trainer.cli.tune import LOG, Settings
from trainer.cli.tune.child import Message, run_in_child
from trainer.files import from_here
from trainer.terminal import Table, four_digits

_MARGIN = 0.9  # of the host's free memory: the rest is the system's, and what other processes grow by


@dataclass
class Tried:
    """A batch size that was tried.

    Args:
        size: the batch size.
        fits: whether it does.
        samples_per_second: of training steps, without the waiting for batches.
        memory: bytes at the peak; None where it is not known.
        note: a remark for the reader.
    """

    size: int
    fits: bool
    samples_per_second: float | None = None
    memory: int | None = None
    note: str = ""


@dataclass
class Finding:
    """What was found in one precision.

    Args:
        precision: as it is overridden.
        tried: in the order of the tries.
        largest: the largest size that fits; 0 for none.
        bound: what kept it from being larger: ``memory``, ``samples`` or ``tune.max_batch_size``.
        problem: why this precision was not tried; empty if it was.
    """

    precision: str
    tried: list[Tried] = field(default_factory=list)
    largest: int = 0
    bound: str = "memory"
    problem: str = ""

    @property
    def fastest(self) -> Tried | None:
        """The size with the highest rate."""
        timed = [one for one in self.tried if one.fits and one.samples_per_second]
        return max(timed, key=lambda one: one.samples_per_second or 0.0, default=None)

    def at(self, size: int) -> Tried | None:
        """The try of a size."""
        return next((one for one in self.tried if one.size == size), None)


def run(arguments: Arguments) -> int:
    """``trainer tune batch_size``.

    Returns:
        0, or 1 when in no precision even one sample fits.

    Raises:
        UsageError: as `trainer.cli.tune.command`.
        TuneError: a try failed for another reason than memory.
    """
    precisions, are_given, others = precisions_in(arguments)
    each = [replace(arguments, overrides=[*others, f"precision={name}"]) for name in precisions]
    configs = [tune.composed(one) for one in each]
    config, settings = configs[0]
    start = start_of(config, settings)
    folder = tune.claim_folder(each[0], config)
    budget, is_default = tune.bytes_in(settings.memory), settings.memory is None
    if is_default and (usable := machine.memory().usable) is not None:
        budget = int(_MARGIN * usable)
    on_gpu_too = "" if is_default else ", or of torch's on a GPU"
    tune.say(f"Budget on a CPU: {_mebibytes(budget)} for the whole process{on_gpu_too}.")

    findings = []
    for name, (its_config, _) in zip(precisions, configs, strict=True):
        attempt = partial(attempt_size, its_config, settings, folder, memory=budget, only_on_cpu=is_default)
        findings.append(find(name, attempt, start, settings, are_given=are_given, folder=folder))
    tune.write(folder, _as_dict(findings, settings, budget, config))
    _report(findings, settings, folder)
    return 0 if any(finding.largest for finding in findings) else 1


def attempt_size(config: DictConfig, settings: Settings, folder: Path, size: int, **limits: Any) -> Message:
    """Train for a few steps with a batch size, in a child process, and return its message.

    Args:
        config: with Hydra's node.
        settings: of the search.
        folder: of the run.
        size: the batch size.
        limits: of the memory, as `trainer.cli.tune.attempt.Meter` takes them.
    """
    made = tune.plain(config, folder, **{settings.batch_size_key: size})
    # Gradients that wait for another batch take memory while it is computed: one more batch shows that.
    made["trainer"]["accumulate_grad_batches"] = min(2, made["trainer"]["accumulate_grad_batches"] or 1)
    function = "trainer.cli.tune.attempt:try_batch_size"
    return run_in_child(function, folder / LOG, settings=made, steps=settings.steps_per_try, **limits)


def precisions_in(arguments: Arguments) -> tuple[list[str], bool, list[str]]:
    """The precisions to try one after the other; whether they were given; and all other overrides."""
    given = [word for word in arguments.overrides if word.partition("=")[0] == "precision"]
    others = [word for word in arguments.overrides if word not in given]
    if not given:
        return list(COMPARED), False, others
    value = given[-1].partition("=")[2]
    return [value] if value.startswith("{") else [name.strip() for name in value.split(",")], True, others


def start_of(config: DictConfig, settings: Settings) -> int:
    """The config's own batch size, with which the search begins.

    Raises:
        UsageError: there is none, or it is no size.
    """
    key = settings.batch_size_key
    size = OmegaConf.select(config, key)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        what = "the config has no such setting" if size is None else f"that is {size!r}"
        raise UsageError(
            f"tune.batch_size_key is {key}, and {what}; expected the setting that is the batch size, a whole number."
            " Name it: tune.batch_size_key=model.batch_size, for example."
        )
    return size if settings.max_batch_size is None else min(size, settings.max_batch_size)


def find(
    precision: str, attempt: Callable[[int], Message], start: int, settings: Settings, *, are_given: bool, folder: Path
) -> Finding:
    """Look for the largest batch in one precision.

    Args:
        precision: its name.
        attempt: tries a size.
        start: the first one.
        settings: what is looked for.
        are_given: whether the user has asked for this precision: then it is an error where it cannot be computed in.
        folder: of the run, for messages.

    Raises:
        UsageError: the config cannot be built, or the setting is not the batch size.
        TuneError: a try failed for another reason than memory.
    """
    key = settings.batch_size_key
    finding = Finding(precision)
    samples: int | None = None  # in the training set
    most = settings.max_batch_size
    size: int | None = start
    too_large: int | None = None
    while size is not None:
        where = f"{key}={size} in precision={precision}"
        message = attempt(size)
        if message["status"] == "out of memory":
            too_large = size
            tried = Tried(size, False, memory=message.get("memory"), note=message["error"][:120])
        elif message["status"] == "ok":
            samples, batch = message["samples"], message["batch"]
            if batch < size:  # there are no more
                if size == start and (samples is None or samples >= size):
                    raise UsageError(
                        f"{key} is {size}, but the batches have {batch} samples: is it the setting that is the batch"
                        " size? Name the one that is: tune.batch_size_key=KEY"
                    )
                samples = batch
            finding.largest = size
            note = f"{message['skipped']} updates overflowed" if message["skipped"] else ""
            tried = Tried(min(size, batch), True, message["samples_per_second"], message["memory"], note)
            most = min((bound for bound in (samples, settings.max_batch_size) if bound is not None), default=None)
        elif message.get("is_precision") and not are_given:
            finding.problem = message["error"]
            tune.say(f"precision={precision}: {finding.problem}")
            return finding
        else:
            raise tune.failure(message, where, folder)
        finding.tried.append(tried)
        tune.say(f"{where}: {_said(tried)}")
        size = next_size(finding.largest, too_large, most, settings.multiple_of)
    if finding.largest and most is not None and finding.largest >= most:
        finding.largest, finding.bound = most, "samples" if most == samples else "tune.max_batch_size"
    return finding


def next_size(fits: int, too_large: int | None, most: int | None, multiple_of: int = 1) -> int | None:
    """The size to try next, on the way to the largest that fits: doubled or halved, then bisected. None at the end.

    Args:
        fits: the largest that is known to fit; 0 for none.
        too_large: the smallest that is known not to; None for none. One of the two is known.
        most: no larger one is tried; None for no such bound.
        multiple_of: sizes in between are multiples of this. Below it, any number is one.
    """
    if too_large is None:
        size = 2 * fits if most is None else min(2 * fits, most)
        return size if size > fits else None
    if not fits:
        return too_large // 2 or None
    unit = multiple_of if too_large > multiple_of else 1
    first, last = fits // unit + 1, (too_large - 1) // unit
    return (first + last) // 2 * unit if first <= last else None


def _said(tried: Tried) -> str:
    if not tried.fits:
        return f"does not fit ({tried.note})"
    rate = f"{four_digits(tried.samples_per_second)} samples/s" if tried.samples_per_second else ""
    return f"fits, {', '.join(filter(None, [rate, _mebibytes(tried.memory), tried.note]))}"


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.0f} MiB"


def _as_dict(findings: Sequence[Finding], settings: Settings, budget: int | None, config: DictConfig) -> dict[str, Any]:
    return {
        "tuned": "batch_size",
        "key": settings.batch_size_key,
        "budget": budget,
        "settings": asdict(settings),
        "seed": config.seed,
        "results": [
            asdict(finding) | {"fastest": finding.fastest.size if finding.fastest else None} for finding in findings
        ],
    }


def _report(findings: Sequence[Finding], settings: Settings, folder: Path) -> None:
    header = ["precision", "largest batch", "samples/s", "peak memory", "bound by", "fastest batch", "samples/s "]
    rows = []
    for finding in findings:
        at, fastest = finding.at(finding.largest), finding.fastest
        rows.append(
            [
                finding.precision,
                "failed" if finding.problem else str(finding.largest or "none"),
                _rate(at),
                _mebibytes(at.memory if at else None),
                "-" if finding.problem else finding.bound,
                str(fastest.size) if fastest else "-",
                _rate(fastest),
            ]
        )
    Table("Batch sizes that fit", header, rows, ("precision", "bound by")).show()
    for finding in findings:
        if finding.largest:
            print(f"precision={finding.precision} {settings.batch_size_key}={finding.largest}")
        else:
            print(f"precision={finding.precision}: {finding.problem or 'not even one sample fits.'}")
    tune.say(f"Everything is in {from_here(folder / tune.RESULT)}")


def _rate(tried: Tried | None) -> str:
    return four_digits(tried.samples_per_second) if tried and tried.samples_per_second else "-"
