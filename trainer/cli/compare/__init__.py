"""``trainer compare``: a sweep with jobs that are measured and compared with the first one. Imports no torch.

The jobs are those of a sweep (`trainer.cli.sweep`): each is an ordinary ``fit`` with its own process and folder, and
the additional callback `trainer.callbacks.Throughput`. Only the report at the end differs: ``compare.md`` and
``compare.json``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer.cli.compare.verdict import Thresholds, Verdict, assess, choose_metric
from trainer.cli.help import versions
from trainer.cli.parsing import Arguments, UsageError
from trainer.cli.schema import read_settings
from trainer.common.terminal import (
    Table,
    command_line,
    format_mebibytes,
    format_number,
    four_digits,
    is_quiet,
    markdown_table,
    print_line,
)
from trainer.record.run_record import MEASURING, RunRecord
from trainer.record.sweep_record import Sweep, load_sweep

_FEW_BATCHES = 20

_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("label", "run", str),
    ("final_loss", "final loss", format_number),
    ("metric", "", format_number),
    ("train_seconds", "training", "{:.1f} s".format),
    ("samples_per_second", "samples/s", four_digits),
    ("peak_memory", "peak memory", lambda sizes: format_mebibytes(next(iter(sizes.values())))),
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
    words = [word for word in overrides if not word.startswith("hydra.sweep.dir=")]
    command = command_line("compare", *words)
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
        self.conditions = [*([remark] if remark else []), *condition_differences(runs), *_reliability_notes(runs)]
        self.title = f"{first.recipe or 'Comparison'}: {', '.join(run.label for run in runs)}"

    def markdown(self, command: str) -> str:
        """Return the report, with the command line ``command``."""
        findings = "\n".join(line if line.startswith(" ") else f"- {line}" for line in self._findings())
        parts = [
            f"# {self.title}",
            f"    {command}",
            markdown_table(*self._table()),
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
        return {
            "metric": self.goal[0] if self.goal else None,
            "thresholds": asdict(self.limits),
            "conditions": self.conditions,
            "runs": [
                {
                    "label": run.label,
                    "precision": run.precision,
                    "status": run.status,
                    "error": run.error or None,
                    "final_loss": run.final_loss,
                    "metric": run.value_of(self.goal[0]) if self.goal else None,
                    "train_seconds": run.throughput.get("train_seconds"),
                    "samples_per_second": run.samples_per_second,
                    "peak_memory": run.facts.get("peak_memory") or None,
                    "skipped_steps": run.skipped_steps,
                    "verdict": asdict(verdict) if verdict else None,
                    "run_dir": run.facts.get("run_dir"),
                }
                for run, verdict in zip(self.runs, self.verdicts, strict=True)
            ],
        }

    def _findings(self) -> Iterator[str]:
        """Iterate over lines with the label and the verdict or error of each run, and its advice, indented."""
        first, *others = self.runs
        if not first.completed or not others:
            yield f"{first.label}: {_outcome(first) or 'there is no other run to compare with.'}"
        for run, verdict in zip(others, self.verdicts[1:], strict=True):
            if verdict is None:
                yield f"{run.label}: {_outcome(run) or f'completed, but {first.label} did not.'}"
            else:
                yield f"{run.label}: {verdict.text}"
                yield from (f"  - {line}" for line in verdict.advice)

    def _table(self) -> tuple[list[str], list[list[str]]]:
        metric = Sweep(self.runs).titled(self.goal[0]) if self.goal else None
        columns = [(key, name or metric, form) for key, name, form in _FIGURES if name or metric]
        rows = []
        for run in self.as_dict()["runs"]:
            verdict = run["verdict"] or {}
            word = run["status"] if run["status"] != "completed" else None
            if verdict and word is None:
                word = "met" if verdict["met"] else "missed"
            figures = run | verdict | {"word": word}
            rows.append(["-" if figures.get(key) is None else form(figures[key]) for key, _, form in columns])
        return [str(name) for _, name, _ in columns], rows


def condition_differences(runs: Sequence[RunRecord]) -> list[str]:
    """Return sentences about seeds, devices, lengths and batches that differ, or one sentence if all are equal."""
    done = [run for run in runs if run.completed]
    if len(done) < 2:
        return []
    first, *others = done
    found = []
    for run in others:
        for fact in ("seed", "devices"):
            value, first_value = run.facts.get(fact), first.facts.get(fact)
            if value != first_value:
                found.append(f"{run.label} has {fact} {value}, {first.label} {first_value}.")
        if _length(run) != _length(first):
            found.append(f"{run.label} has {_length(run)}; {first.label} has {_length(first)}.")
        epoch = _first_difference(run, first)
        if epoch is not None:
            found.append(
                f"{run.label} and {first.label} got different batches from epoch {epoch} (counted from 1): the runs"
                " draw different random numbers (for example, torch.randn_like depends on the precision). Give the"
                " dataloader its own generator."
            )
    if found:
        return [f"Different between runs: {found[0]}", *found[1:]]
    batches = "the first batch of every epoch" if all(run.throughput.get("batches") for run in done) else ""
    conditions = (f"seed {first.facts.get('seed')}", first.devices, _length(first), batches)
    return [f"Equal in all runs: {', '.join(filter(None, conditions))}."]


def _length(run: RunRecord) -> str:
    return f"epochs: {format_number(run.epochs)}, optimizer steps: {format_number(run.steps)}"


def _first_difference(run: RunRecord, first: RunRecord) -> int | None:
    """Return the first epoch, counted from 1, in which the first batches differ, or None."""
    pairs = zip(run.throughput.get("batches", []), first.throughput.get("batches", []), strict=False)
    for epoch, (batches, first_batches) in enumerate(pairs, start=1):
        if any(a != b for a, b in zip(batches, first_batches, strict=True) if a is not None and b is not None):
            return epoch
    return None


def _reliability_notes(runs: Sequence[RunRecord]) -> list[str]:
    """Return sentences about the reliability of the numbers."""
    found = []
    batches = [measured for run in runs if (measured := run.throughput.get("measured_batches")) is not None]
    if batches and min(batches) < _FEW_BATCHES:
        found.append(f"The rates were measured over too few batches ({min(batches)}). Train longer for reliable rates.")
    if not any(run.memory_is_the_gpus for run in runs):
        found.append(
            "On a CPU, 16 bits are not expected to be faster: it has no Tensor Cores, and only some CPUs have"
            " instructions for float16 or bfloat16. The peak memory is that of the whole process and hardly depends on"
            " the precision. Speed and memory affect the verdict only if you set a threshold for them."
        )
    found.append(
        "Each setting has only one run, and two seeds can differ as much. To see how much, compare again with seed=7."
    )
    return found


def _outcome(run: RunRecord) -> str:
    """Return status and error of a run that did not complete; "" if it completed."""
    return "" if run.completed else f"{run.status}: {run.error or 'no error was recorded'}"
