"""``trainer compare``: a sweep with jobs that are measured and compared with the first one. Imports no torch.

The jobs are those of a sweep (`trainer.cli.sweep`): each is an ordinary ``fit`` with its own process and folder, and
the additional callback `trainer.callbacks.Throughput`. Only the report at the end differs: ``compare.md`` and
``compare.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer.arguments import NUMBER, SWITCH, TEXT
from trainer.cli.help import versions
from trainer.cli.objective import not_logged
from trainer.cli.parsing import Arguments, UsageError
from trainer.cli.schema import read_settings, setting
from trainer.common import terminal
from trainer.common.terminal import Table, command_line, is_quiet, print_line
from trainer.record.run_record import MEASURING, RunRecord, direction_of
from trainer.record.sweep_record import Sweep, load_sweep

MIN_SPEEDUP = 1.5
"""Smallest expected speed-up over 32 bits. Below it, the GPU hardly used its Tensor Cores, or was not busy."""

MIN_MEMORY_SAVING = 0.3
"""Smallest expected saving, as a share of the peak memory in 32 bits. If activations dominate, it is 30 to 50%."""

_SAVED = (
    " Mixed precision keeps weights, gradients and optimizer states in 32 bits, and copies of the weights in 16 bits."
    " Only activations become smaller; their share grows with the batch size."
)
_SAME_SPEED = 1.05  # smaller ratios are reported as equal


@dataclass(frozen=True)
class Thresholds:
    """The settings ``compare.*``. conf/compare/default.yaml describes them."""

    metric: str | None = setting(None, TEXT._replace(words="the name of a metric"), None)
    mode: str | None = setting(None, "max", "min", None)
    accuracy_tolerance: float | None = setting(1.0, NUMBER, None)
    min_speedup: float | str | None = setting("auto", NUMBER, "auto", None)
    min_memory_saving: float | str | None = setting("auto", NUMBER, "auto", None)
    strict: bool = setting(False, *SWITCH)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one run.

    Args:
        text: a clause for each compared figure.
        met: whether it meets all thresholds.
        advice: possible reasons for each missed threshold.
        speedup: samples per second divided by those of the first run; None if one of them is unknown.
        memory_saving: 1 minus the peak memory divided by that of the first run; None if one of them is unknown.
    """

    text: str
    met: bool
    advice: tuple[str, ...] = ()
    speedup: float | None = None
    memory_saving: float | None = None


_FEW_BATCHES = 20
_WORDS: dict[bool | None, str] = {True: "met", False: "missed"}

_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("label", "run", str),
    ("final_loss", "final loss", terminal.format_number),
    ("metric", "", terminal.format_number),
    ("train_seconds", "training", "{:.1f} s".format),
    ("samples_per_second", "samples/s", terminal.four_digits),
    ("peak_memory", "peak memory", lambda sizes: terminal.format_mebibytes(next(iter(sizes.values()), None))),
    ("skipped_steps", "skipped", str),
    ("speedup", "speed-up", "{:.2f}x".format),
    ("memory_saving", "memory", lambda saving: f"{-saving:+z.0%}"),
    ("word", "verdict", str),
)
"""The columns of the table: key of the figure, header ("" for the name of the metric), and format."""


def as_sweep(arguments: Arguments) -> None:
    """Turn the command line of ``compare`` into a sweep of fits with `trainer.callbacks.Throughput`."""
    arguments.command = "fit"
    arguments.overrides += MEASURING


def check(config: DictConfig, jobs: int) -> None:
    """Check the requirements of a comparison, in addition to those of a sweep.

    Args:
        config: config of the first job.
        jobs: number of runs.

    Raises:
        UsageError: if there is only one run, no seed, or an invalid setting of ``compare``.
    """
    thresholds(config)
    if jobs < 2:
        raise UsageError("Got 1 run to compare, expected at least 2. List several values: precision=32,16-mixed.")
    if OmegaConf.select(config, "seed") is None:
        raise UsageError("seed is null, expected a number, so that all runs get the same batches. Use seed=42.")


def thresholds(config: DictConfig) -> Thresholds:
    """Return the node ``compare`` of a config.

    Raises:
        UsageError: if a setting is invalid.
    """
    return read_settings(Thresholds, "compare", OmegaConf.to_container(config.compare, resolve=True))


def report(folder: Path, limits: Thresholds, overrides: Sequence[str] = (), since: float = 0.0) -> int:
    """Print the comparison of the runs in ``folder``, and write ``compare.md`` and ``compare.json``.

    Args:
        folder: folder of the comparison. It contains the folders of the runs.
        limits: the thresholds.
        overrides: overrides of the command line, to be written to the report.
        since: a time (of `time.time`). Runs that ended before it are left out.

    Returns:
        The number of runs that did not complete; with ``compare.strict``, plus those that missed a threshold.
    """
    runs = read_runs(folder, since)
    if not runs:
        return 0
    comparison = Comparison(runs, limits)
    command = command_line("compare", *(word for word in overrides if not word.startswith("hydra.sweep.dir=")))
    (folder / "compare.md").write_text(comparison.markdown(command), encoding="utf-8")
    numbers = {"command": command, **comparison.as_dict()}
    (folder / "compare.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    comparison.print(folder)
    failed = sum(not run.completed for run in runs)
    missed = sum(not verdict.met for verdict in comparison.verdicts if verdict is not None)
    return failed + (missed if limits.strict else 0)


def read_runs(folder: Path, since: float = 0.0) -> list[RunRecord]:
    """Return the runs in ``folder`` in order, labeled by the overrides that differ."""
    sweep = load_sweep(folder, since)
    sweep.set_labels()
    for run in sweep.runs:
        if len(sweep.runs) == 1 or (run.label == "auto" and run.precision != "auto"):
            run.label = f"auto ({run.precision})" if run.label == "auto" else str(run.precision)
    return sweep.runs


class Comparison:
    """A comparison of runs with the first of them.

    Args:
        runs: at least one.
        limits: the thresholds.

    Attributes:
        goal: the metric that is compared and its mode, "min" or "max"; or None.
        verdicts: verdict on each run; None for the first run and for runs that cannot be compared.
        conditions: sentences about differences between the runs and the reliability of the numbers.
    """

    def __init__(self, runs: Sequence[RunRecord], limits: Thresholds) -> None:
        self.runs = runs
        self.limits = limits
        self.goal, remark = choose_metric(runs, limits)
        first = runs[0]
        self.verdicts: list[Verdict | None] = [
            assess(run, first, self.goal, limits) if run is not first and run.completed and first.completed else None
            for run in runs
        ]
        self.conditions = [*filter(None, [remark]), *condition_differences(runs), *_reliability_notes(runs)]
        self.title = f"{first.recipe or 'Comparison'}: {', '.join(run.label for run in runs)}"

    def markdown(self, command: str) -> str:
        """Return the report, with the command line ``command``."""
        findings = "\n".join(line if line.startswith(" ") else f"- {line}" for line in self._findings())
        parts = [
            f"# {self.title}",
            f"    {command}",
            terminal.markdown_table(*self._table()),
            f"## Verdicts\n\n{findings}",
            "## Conditions\n\n" + "\n".join(f"- {condition}" for condition in self.conditions),
            f"Made with {', '.join(versions().splitlines())}.",
        ]
        return "\n\n".join(parts) + "\n"

    def print(self, folder: Path) -> None:
        """Print the report, with ``--quiet`` one line per run. ``folder`` is the folder of ``compare.md``."""
        Table(self.title, *self._table()).show()
        for line in self._findings():
            if not (is_quiet() and line.startswith(" ")):
                print_line(line)
        for condition in () if is_quiet() else ("", *self.conditions):
            print_line(condition, "dim")
        print_line(f"The report is {folder / 'compare.md'}")

    def as_dict(self) -> dict[str, Any]:
        """Return the content of ``compare.json``."""
        metric = self.goal[0] if self.goal else None
        runs = [
            run.brief
            | {
                "label": run.label,
                "final_loss": run.final_loss,
                "metric": run.value_of(metric) if metric else None,
                "verdict": asdict(verdict) if verdict else None,
            }
            for run, verdict in zip(self.runs, self.verdicts, strict=True)
        ]
        return {"metric": metric, "thresholds": asdict(self.limits), "conditions": self.conditions, "runs": runs}

    def _findings(self) -> Iterator[str]:
        """Iterate over lines with the label and the verdict or error of each run, and its advice, indented."""
        first = self.runs[0]
        alone = "there is no other run to compare with." if len(self.runs) == 1 else ""
        for run, verdict in zip(self.runs, self.verdicts, strict=True):
            if verdict is not None:
                yield f"{run.label}: {verdict.text}"
                yield from (f"  - {line}" for line in verdict.advice)
            elif not run.completed:
                yield f"{run.label}: {run.status}: {run.error or 'no error was recorded'}"
            elif run is not first or alone:
                yield f"{run.label}: {alone or f'completed, but {first.label} did not.'}"

    def _table(self) -> tuple[list[str], list[list[str]]]:
        metric = Sweep(self.runs).titled(self.goal[0]) if self.goal else None
        columns = [(key, name or metric, form) for key, name, form in _FIGURES if name or metric]
        rows = []
        for run in self.as_dict()["runs"]:
            verdict = run["verdict"] or {}
            word = run["status"] if run["status"] != "completed" else _WORDS.get(verdict.get("met"))
            figures = run | verdict | {"word": word}
            rows.append(["-" if figures.get(key) is None else form(figures[key]) for key, _, form in columns])
        return [str(name) for _, name, _ in columns], rows


def condition_differences(runs: Sequence[RunRecord]) -> list[str]:
    """Return sentences about seeds, devices, lengths and batches that differ, or one sentence if all are equal."""
    done = [run for run in runs if run.completed]
    if len(done) < 2:
        return []
    first, *others = done
    names = ("seed", "devices", "epochs", "steps")
    differences = []
    for run in others:
        for name in names:
            value, first_value = run.facts.get(name), first.facts.get(name)
            if value != first_value:
                differences.append(f"{run.label} has {name} {value}, {first.label} {first_value}.")
        if (epoch := _first_difference(run, first)) is not None:
            advice = "because they draw different random numbers. Give the dataloader its own generator."
            differences.append(f"{run.label} and {first.label} got different batches from epoch {epoch} on, {advice}")
    if differences:
        return [f"Different between runs: {differences[0]}", *differences[1:]]
    conditions = [f"{name} {first.facts.get(name)}" for name in names]
    if all(run.throughput.get("batches") for run in done):
        conditions.append("the first batch of every epoch")
    return [f"Equal in all runs: {', '.join(conditions)}."]


def _first_difference(run: RunRecord, first: RunRecord) -> int | None:
    """Return the first epoch, counted from 1, in which the first batches differ, or None."""
    pairs = zip(run.throughput.get("batches", []), first.throughput.get("batches", []), strict=False)
    for epoch, (batches, first_batches) in enumerate(pairs, start=1):
        if any(a != b for a, b in zip(batches, first_batches, strict=True) if a is not None and b is not None):
            return epoch
    return None


def _reliability_notes(runs: Sequence[RunRecord]) -> list[str]:
    """Return sentences about the reliability of the numbers."""
    notes = []
    batches = [measured for run in runs if (measured := run.throughput.get("measured_batches")) is not None]
    if batches and min(batches) < _FEW_BATCHES:
        notes.append(f"The rates were measured over too few batches ({min(batches)}). Train longer for reliable rates.")
    if not any(run.memory_is_the_gpus for run in runs):
        notes.append("On a CPU, 16 bits are not expected to be faster, and the peak memory is that of the process.")
    notes.append("Each setting has only one run, and two seeds can differ as much: compare again with seed=7.")
    return notes


# --- the verdict on a run -------------------------------------------------------------------------------------


def choose_metric(runs: Sequence[RunRecord], thresholds: Thresholds) -> tuple[tuple[str, str] | None, str | None]:
    """Return the name and mode of the metric to compare, and a remark if no run has logged ``compare.metric``.

    The metric is the first of these that a run has logged: ``compare.metric``; the objective of the runs; an accuracy;
    another validation score; a validation loss.
    """
    logged = list(dict.fromkeys(name for run in runs for name in run.metrics))
    names = [name for name in logged if not name.endswith(("_step", "_epoch"))] or logged
    name, remark = thresholds.metric, None
    if name is not None and name not in logged:
        remark = not_logged("compare.metric", name, "no run logged", logged)
        name = None
    objectives = [run.objective for run in runs if run.objective is not None and run.objective[0] in logged]
    if name is None and objectives:
        return (objectives[0][0], thresholds.mode or objectives[0][1]), remark
    validation = [name for name in names if name.startswith("val")]
    accuracies = [name for name in [*validation, *names] if "acc" in name.lower()]
    scores = [name for name in validation if direction_of(name) != "min"]
    name = name or next(iter([*accuracies, *scores, *validation]), None)
    return (None if name is None else (name, thresholds.mode or direction_of(name) or "max")), remark


def assess(run: RunRecord, first: RunRecord, goal: tuple[str, str] | None, thresholds: Thresholds) -> Verdict:
    """Compare a completed run with the first run, which has completed too."""
    clauses: list[str] = []
    advice: list[str] = []
    if goal is not None:
        clause, missed = _assess_quality(run, first, *goal, thresholds.accuracy_tolerance)
        clauses.append(clause)
        advice += filter(None, [missed])
    rate, first_rate = run.samples_per_second, first.samples_per_second
    speedup = rate / first_rate if rate and first_rate else None
    if speedup is not None:
        wanted = _threshold(thresholds.min_speedup, MIN_SPEEDUP, run, first)
        clauses.append(_speed(speedup))
        if wanted is not None and speedup < wanted:
            reasons = _slowness_reasons(run, first) if run.memory_is_the_gpus else ()
            advice.append(" ".join([f"Less than {wanted:g}x as fast as {first.label}.", *reasons]))
    memory, first_memory = run.peak_memory, first.peak_memory
    saving = 1 - memory / first_memory if memory and first_memory else None
    if saving is not None:
        wanted = _threshold(thresholds.min_memory_saving, MIN_MEMORY_SAVING, run, first)
        if wanted is not None or run.memory_is_the_gpus:
            clauses.append(_memory(saving))
        if wanted is not None and saving < wanted:
            advice.append(f"Saves less than {wanted:.0%} of the memory.{_SAVED * run.memory_is_the_gpus}")
    text = f"{', '.join(clauses)}." if clauses else "no figure was measured in both runs."
    return Verdict(text, met=not advice, advice=tuple(advice), speedup=speedup, memory_saving=saving)


def _is_half(run: RunRecord) -> bool:
    """Return whether the precision of a run computes in 16 bits."""
    return str(run.precision).startswith(("16", "bf16", "fp8"))


def _threshold(setting: float | str | None, on_gpu: float, run: RunRecord, first: RunRecord) -> float | None:
    """Return the threshold, or None for no threshold.

    "auto" means ``on_gpu`` if both runs used GPUs and only ``run`` is in 16 bits, otherwise no threshold.
    """
    if setting == "auto":
        on_gpus = run.memory_is_the_gpus and first.memory_is_the_gpus
        return on_gpu if on_gpus and _is_half(run) and not _is_half(first) else None
    assert not isinstance(setting, str)
    return setting


def _assess_quality(
    run: RunRecord, first: RunRecord, name: str, mode: str, tolerance: float | None
) -> tuple[str, str | None]:
    """Return a clause about the metric and, if it is worse by more than ``tolerance``, advice.

    The difference is in points for a score in [0, 1], otherwise in percent.
    """
    value, reference = run.value_of(name), first.value_of(name)
    if value is None or reference is None:
        return f"no {name} to compare", f"{name} was not logged by both runs."
    difference, unit = (0.0 if value == reference else value - reference), "%"
    if "loss" not in name.lower() and 0 <= value <= 1 and 0 <= reference <= 1:
        difference, unit = 100 * difference, " points"
    elif difference:  # also if it is NaN
        difference = 100 * difference / abs(reference) if reference else math.copysign(math.inf, value)
    difference = round(difference, 4)  # further digits exceed float32's precision
    worse = -difference if mode == "max" else difference
    if not math.isfinite(difference):
        is_worse = tolerance is not None and (worse > tolerance or not math.isfinite(value))
        clause = f"{name} is {value:g} ({first.label}: {reference:g})"
        return clause, f"{name} cannot be compared with {first.label}'s." if is_worse else None
    size = f"{math.ceil(abs(difference) * 10) / 10:.1f}{unit}"  # rounded up, so that "within" is true
    if size.startswith("0.0"):
        return f"the same {name} as {first.label}", None
    if tolerance is None or abs(difference) <= tolerance:
        return f"{name} within {size} of {first.label}", None
    side = "above" if difference > 0 else "below"
    clause = f"{name} {size} {side} {first.label}"
    if worse <= tolerance:
        return clause, None
    advice = "To exclude chance, compare with another seed (seed=7). Look at the skipped steps and the loss curves."
    return clause, f"{name} is worse by more than {tolerance:g}{unit}. {advice}"


def _speed(ratio: float) -> str:
    if 1 / _SAME_SPEED < ratio < _SAME_SPEED:
        return "as fast"
    return f"{ratio:.2f}x faster" if ratio > 1 else f"{1 / ratio:.2f}x slower"


def _memory(saving: float) -> str:
    size = f"{abs(saving):.1%} {'less' if saving > 0 else 'more'}"
    return f"{'as much' if abs(saving) < 0.005 else size} memory"


def _slowness_reasons(run: RunRecord, first: RunRecord) -> Iterable[str]:
    """Iterate over reasons why 16 bits are not faster on a GPU: recorded ones first, then usual ones."""
    waiting = run.throughput.get("waiting")
    if waiting is not None and waiting > 0.2:
        yield f"The loop waited for batches {waiting:.0%} of the time: use more data.num_workers or cheaper transforms."
    if tf32 := first.gpu.get("tf32"):
        yield f"{first.label} used Tensor Cores too: TF32 in {' and '.join(tf32)}."
    yield (
        "Usual reasons: a GPU without Tensor Cores for this precision (compute capability below 7.0, or below 8.0 for"
        " bfloat16), layer sizes that are not multiples of 8, batches that do not keep the GPU busy (data.batch_size,"
        " torch.compile), or most of the work in 32 bits (precision.fp32_modules, operations in float32)."
    )
