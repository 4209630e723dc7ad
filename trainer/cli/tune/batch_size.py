"""``trainer tune batch_size``: the largest batch that fits, and the fastest, in each precision. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer import machine
from trainer.cli import tune
from trainer.cli.arguments import COMPARED, Arguments, UsageError
from trainer.cli.processes import is_quiet
from trainer.cli.sweep import four_digits, print_table
from trainer.cli.tune import LOG, Settings, Try
from trainer.cli.tune.apart import Message, killed, run_apart
from trainer.cli.tune.search import largest

_MARGIN = 0.9  # of the host's free memory: the rest is the system's, and what other processes grow by


@dataclass
class Tried:
    """A batch size, and what came of it.

    Args:
        size: the batch size.
        fits: whether it does.
        samples_per_second: of training steps, without the waiting for batches.
        memory: bytes at the peak; None where nobody knows.
        note: what there is to say besides.
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
        """What came of a size."""
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
    each = [replace(arguments, overrides=[*others, word]) for word in precisions]
    configs = [tune.composed(one) for one in each]
    config, settings = configs[0]
    start = start_of(config, settings)
    folder = tune.claim_folder(each[0], config)
    for remark in tune.one_device(config):
        tune.say(remark)
    budget, is_default = settings.budget, settings.memory is None
    if is_default and (usable := machine.memory().usable) is not None:
        budget = int(_MARGIN * usable)
    on_gpu_too = "" if is_default else ", or of torch's on a GPU"
    tune.say(f"Budget on a CPU: {_mebibytes(budget)} for the whole process{on_gpu_too}.")

    findings = []
    with tune.scratch(folder) as scratch:
        for word, (its_config, its_settings) in zip(precisions, configs, strict=True):
            name = word.partition("=")[2]
            attempt = _Attempts(its_config, folder, Path(scratch), budget, is_default, its_settings)
            finding = find(name, attempt, start, its_settings, are_given=are_given, folder=folder)
            findings.append(finding)
    result = _as_dict(findings, settings, budget, config)
    tune.write(folder, result)
    _report(findings, settings, folder)
    return 0 if any(finding.largest for finding in findings) else 1


class _Attempts:
    """Tries sizes in processes of their own."""

    def __init__(
        self, config: DictConfig, folder: Path, scratch: Path, budget: int | None, is_default: bool, settings: Settings
    ) -> None:
        self._config, self._folder, self._scratch = config, folder, scratch
        self._budget, self._is_default, self._settings = budget, is_default, settings

    def __call__(self, size: int) -> Message:
        """What came of a size."""
        changes = {self._settings.batch_size_key: size}
        settings = tune.plain(self._config, self._folder, **changes)
        # Gradients that wait for another batch take memory while it is computed: one more batch shows that.
        windows = settings["trainer"]["accumulate_grad_batches"] or 1
        settings["trainer"]["accumulate_grad_batches"] = min(2, windows)
        job = Try(settings, self._scratch, self._budget, self._is_default, self._settings.steps_per_try)
        return run_apart("trainer.cli.tune.attempt:try_batch_size", job, self._folder / LOG)


def precisions_in(arguments: Arguments) -> tuple[list[str], bool, list[str]]:
    """The overrides of ``precision`` to try one after the other; whether they were given; and all other overrides."""
    given = [word for word in arguments.overrides if word.partition("=")[0] == "precision"]
    others = [word for word in arguments.overrides if word not in given]
    if not given:
        return [f"precision={name}" for name in COMPARED], False, others
    value = given[-1].partition("=")[2]
    names = [value] if value.startswith("{") else [name.strip() for name in value.split(",")]
    return [f"precision={name}" for name in names], True, others


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
    finding = Finding(precision)
    samples: int | None = None

    def fits(size: int) -> bool:
        nonlocal samples
        where = f"{settings.batch_size_key}={size} in precision={precision}"
        message = attempt(size)
        if message.get("is_precision") and not are_given:
            raise _CannotBeComputedError(str(message["error"]))
        if message["status"] == "out of memory" or killed(message):
            tried = Tried(size, False, memory=message.get("memory"), note=_short(message))
        elif message["status"] == "ok":
            samples = message["samples"]
            if message["batch"] < size:  # there are no more
                if size == start and (samples is None or samples >= size):
                    raise UsageError(
                        f"{settings.batch_size_key} is {size}, but the batches have {message['batch']} samples: is it"
                        " the setting that is the batch size? Name the one that is: tune.batch_size_key=KEY"
                    )
                samples = message["batch"]
            note = f"{message['skipped']} updates overflowed" if message["skipped"] else ""
            tried = Tried(min(size, message["batch"]), True, message["samples_per_second"], message["memory"], note)
        else:
            raise tune.failure(message, where, folder)
        finding.tried.append(tried)
        tune.say(f"{where}: {_said(tried)}")
        return tried.fits

    def most() -> int | None:
        known = [bound for bound in (samples, settings.max_batch_size) if bound is not None]
        return min(known) if known else None

    try:
        finding.largest = largest(fits, start, most, settings.multiple_of)
    except _CannotBeComputedError as error:
        finding.problem = " ".join(str(error).split())
        tune.say(f"precision={precision}: {finding.problem}")
    if finding.largest and (bound := most()) is not None and finding.largest >= bound:
        finding.largest, finding.bound = bound, "samples" if bound == samples else "tune.max_batch_size"
    return finding


class _CannotBeComputedError(Exception):
    """A precision that this device does not have."""


def _short(message: Message) -> str:
    if message["status"] == "died":
        return "killed by the system"
    return " ".join(str(message["error"]).split())[:120]


def _said(tried: Tried) -> str:
    if not tried.fits:
        return f"does not fit ({tried.note})"
    parts = [
        f"{four_digits(tried.samples_per_second)} samples/s" if tried.samples_per_second else "",
        _mebibytes(tried.memory),
    ]
    return f"fits, {', '.join(filter(None, [*parts, tried.note]))}"


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
    if not is_quiet():
        print_table("Batch sizes that fit", header, rows, left=("precision", "bound by"))
    for finding in findings:
        if finding.largest:
            print(f"precision={finding.precision} {settings.batch_size_key}={finding.largest}")
        else:
            print(f"precision={finding.precision}: {finding.problem or 'not even one sample fits.'}")
    tune.say(f"Everything is in {tune.seen(folder) / tune.RESULT}")


def _rate(tried: Tried | None) -> str:
    return four_digits(tried.samples_per_second) if tried and tried.samples_per_second else "-"
