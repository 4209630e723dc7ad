"""``trainer compare``: a sweep whose jobs are measured and compared with the first one. Imports no torch.

The jobs are those of any sweep (`trainer.cli.sweep`): each is an ordinary ``fit`` in a process and a folder of its own,
with one more callback, `trainer.callbacks.Throughput`. Only the report at the end differs: ``compare.md`` and
``compare.json``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer.cli.arguments import Arguments, UsageError
from trainer.cli.compare.verdict import Thresholds, Verdict, choose_metric, judge
from trainer.cli.help import versions
from trainer.cli.schema import read_settings
from trainer.record.run_record import MEASURING, RunRecord
from trainer.record.sweep import load_sweep
from trainer.terminal import Table, command_line, format_mebibytes, four_digits, is_quiet, markdown_table, print_line

_FEW_BATCHES = 20

_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("label", "run", str),
    ("final_loss", "final loss", "{:.4g}".format),
    ("metric", "", "{:.4g}".format),
    ("train_seconds", "training", "{:.1f} s".format),
    ("samples_per_second", "samples/s", four_digits),
    ("peak_memory", "peak memory", lambda sizes: format_mebibytes(next(iter(sizes.values())))),
    ("skipped_steps", "skipped", str),
    ("speedup", "speed-up", "{:.2f}x".format),
    ("memory_saving", "memory", lambda saving: f"{-saving:+z.0%}"),
    ("word", "verdict", str),
)
"""The columns of the table: the name of a figure, the column's, and how it is written. The metric's name is its own."""

_SPARE = ("memory", "training", "final loss", "skipped", "peak memory")
"""Columns that the terminal does without where it is too narrow for all."""

_COLUMNS = """\
- **final loss**: mean training loss over the last tenth of the batches.
- **training**: time spent on training; validation and checkpoints are left out.
- **samples/s**: training samples per second, over all ranks: the median of the epochs' rates. Waiting for batches
  counts; validation, and the fit's first 10 batches (at most half of the first epoch), do not.
- **peak memory**: on a GPU the most that tensors occupied, else the largest size of the process.
- **speed-up**, **memory**: samples/s and peak memory against the first run's.
- **verdict**: whether the run keeps to the thresholds `compare.*`."""


def as_sweep(arguments: Arguments) -> None:
    """Turn a command line of ``compare`` into that of a sweep of ordinary fits that are measured."""
    arguments.command = "fit"
    arguments.overrides += MEASURING


def check(config: DictConfig, jobs: int) -> None:
    """Check what a comparison needs, in addition to what every sweep needs.

    Args:
        config: of its first job.
        jobs: how many runs the command line asks for.

    Raises:
        UsageError: only one run, no seed, or a setting of ``compare`` that makes no sense.
    """
    thresholds(config)
    if jobs < 2:
        raise UsageError(
            "compare holds several runs against the first, and this is only one. Give a setting several values, such"
            " as precision=32,16-mixed,bf16-mixed, which is also what you get when you leave precision out."
        )
    if OmegaConf.select(config, "seed") is None:
        raise UsageError("seed is null, expected a number: the runs are to see the same batches. Write seed=42.")


def thresholds(config: DictConfig) -> Thresholds:
    """The node ``compare`` of a config.

    Raises:
        UsageError: a setting that makes no sense.
    """
    node: Any = OmegaConf.select(config, "compare")
    settings: Any = {} if node is None else OmegaConf.to_container(node, resolve=True)
    return read_settings(Thresholds, "compare", settings)


def report(folder: Path, limits: Thresholds, overrides: Sequence[str] = (), since: float = 0.0) -> int:
    """Print the comparison of the runs in ``folder``, and write ``compare.md`` and ``compare.json``.

    Args:
        folder: of the comparison; the runs have theirs in it.
        limits: what the runs are held against the first by.
        overrides: of the command line, for the record.
        since: a time (of `time.time`); runs that ended before it are left out.

    Returns:
        How many runs did not complete; with ``compare.strict`` those that missed a threshold count as well.
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
    """Return the runs in ``folder``, in their order, labeled by the overrides that differ."""
    sweep = load_sweep(folder, since)
    sweep.set_labels()
    for run in sweep.runs:
        if len(sweep.runs) == 1 or (run.label == "auto" and run.precision != "auto"):
            run.label = f"auto ({run.precision})" if run.label == "auto" else str(run.precision)
    return sweep.runs


class Comparison:
    """Some runs, held against the first of them.

    Args:
        runs: at least one.
        limits: what they are held against it by.

    Attributes:
        metric: the metric that is compared; None without any.
        verdicts: on each run, in their order; None for the first, and for one that cannot be judged.
        conditions: whether the comparison was fair, and what to bear in mind with its numbers: sentences.
    """

    def __init__(self, runs: Sequence[RunRecord], limits: Thresholds) -> None:
        self.runs = runs
        self.limits = limits
        self.metric, remark = choose_metric(runs, limits)
        first = runs[0]
        self.verdicts: list[Verdict | None] = [
            judge(run, first, self.metric, limits) if run is not first and run.completed and first.completed else None
            for run in runs
        ]
        self.conditions = [*([remark] if remark else []), *unequal(runs), *_circumstances(runs)]
        self.title = f"{first.recipe or 'Comparison'}: {', '.join(run.label for run in runs)}"

    def markdown(self, command: str) -> str:
        """Return the report. ``command`` is the command line that made it."""
        findings = "\n".join(
            "\n".join([f"- **{label}**: {text}", *(f"  - {line}" for line in advice)])
            for label, text, advice in self._findings()
        )
        parts = [
            f"# {self.title}",
            f"    {command}",
            markdown_table(*self._table()),
            f"## Verdicts\n\n{findings}",
            "## Conditions\n\n" + "\n".join(f"- {condition}" for condition in self.conditions),
            f"## Columns\n\n{_COLUMNS}",
            f"Made with {', '.join(versions().splitlines())}.",
        ]
        return "\n\n".join(parts) + "\n"

    def print(self, folder: Path) -> None:
        """Print the report, with ``--quiet`` a line for each run; ``folder`` is where it is."""
        Table(self.title, *self._table(), ("run", "verdict"), _SPARE).show()
        for label, text, advice in self._findings():
            for line in (f"{label}: {text}", *(() if is_quiet() else (f"  - {line}" for line in advice))):
                print_line(line)
        for condition in () if is_quiet() else ("", *self.conditions):
            print_line(condition, "dim")
        print_line(f"The report is {folder / 'compare.md'}")

    def as_dict(self) -> dict[str, Any]:
        """The numbers."""
        return {
            "metric": self.metric.name if self.metric else None,
            "thresholds": asdict(self.limits),
            "conditions": self.conditions,
            "runs": [
                {
                    "label": run.label,
                    "precision": run.precision,
                    "status": run.status,
                    "error": run.error or None,
                    "final_loss": run.final_loss,
                    "metric": run.metrics.get(self.metric.name) if self.metric else None,
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

    def _findings(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """For each run that there is something to say of: its label, a sentence, and advice."""
        first, *others = self.runs
        found: list[tuple[str, str, tuple[str, ...]]] = []
        if not first.completed or not others:
            found.append((first.label, _outcome(first) or "there is nothing to compare it with.", ()))
        for run, verdict in zip(others, self.verdicts[1:], strict=True):
            if verdict is not None:
                found.append((run.label, verdict.text, verdict.advice))
            else:
                found.append((run.label, _outcome(run) or f"completed, but {first.label} did not.", ()))
        return found

    def _table(self) -> tuple[list[str], list[list[str]]]:
        metric = self.metric.name if self.metric else None
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


def unequal(runs: Sequence[RunRecord]) -> list[str]:
    """What was not the same in all runs, though a comparison wants it to be; or the sentence that it was."""
    done = [run for run in runs if run.completed]
    if len(done) < 2:
        return []
    first, *others = done
    found = []
    for run in others:
        for what in ("seed", "devices"):
            own, of_first = run.facts.get(what), first.facts.get(what)
            if own != of_first:
                found.append(f"{run.label} has {what} {own}, {first.label} {of_first}.")
        if _length(run) != _length(first):
            found.append(f"{run.label} trained for {_length(run)}, {first.label} for {_length(first)}.")
        epoch = _first_difference(run, first)
        if epoch is not None:
            found.append(
                f"{run.label} was given other batches than {first.label} from epoch {epoch} on, counted from 1: the"
                " random numbers behind them are not drawn in the same way in both (torch.randn_like, for one, depends"
                " on the precision). Give the data loader a generator of its own."
            )
    if found:
        return [f"Not the same in all runs: {found[0]}", *found[1:]]
    batches = "the first batch of every epoch" if all(run.throughput.get("batches") for run in done) else ""
    same = (f"seed {first.facts.get('seed')}", first.devices, _length(first), batches)
    return [f"The same in all runs: {', '.join(filter(None, same))}."]


def _length(run: RunRecord) -> str:
    return f"{_count(run.epochs, 'epoch')} ({_count(run.steps, 'optimizer step')})"


def _first_difference(run: RunRecord, first: RunRecord) -> int | None:
    """The first epoch, counted from 1, whose first batches are known to differ."""
    pairs = zip(run.throughput.get("batches", []), first.throughput.get("batches", []), strict=False)
    for epoch, (ours, theirs) in enumerate(pairs, start=1):
        if any(a != b for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None):
            return epoch
    return None


def _circumstances(runs: Sequence[RunRecord]) -> list[str]:
    """What to bear in mind with the numbers."""
    found = []
    batches = [measured for run in runs if (measured := run.throughput.get("measured_batches")) is not None]
    if batches and min(batches) < _FEW_BATCHES:
        few = _count(min(batches), "batch", "batches")
        found.append(f"The rates rest on {few}: train for longer before you rely on them.")
    if not any(run.memory_is_the_gpus for run in runs):
        found.append(
            "On a CPU 16 bits are not expected to be faster: it has no Tensor Cores, and only some have instructions"
            " for float16 or bfloat16. The peak memory is that of the whole process and says little about the"
            " precision. Neither is judged here unless you set a threshold."
        )
    found.append("One run each: a difference no larger than another seed makes (try seed=7) means nothing.")
    return found


def _outcome(run: RunRecord) -> str:
    """What became of a run that did not complete; empty for one that did."""
    return "" if run.completed else f"{run.status}: {run.error or 'it did not say why'}"


def _count(number: int | None, one: str, many: str | None = None) -> str:
    return f"{number} {one}" if number == 1 else f"{'?' if number is None else f'{number:,}'} {many or f'{one}s'}"
