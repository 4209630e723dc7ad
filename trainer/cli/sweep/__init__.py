"""The table at the end of a sweep, made of what its jobs (`trainer.cli.sweep.jobs`) have left in their folders."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from trainer.cli.objective import best
from trainer.record.reader import RunRecord, jobs_of, without_twins
from trainer.terminal import Table, markdown_table, tell

ENDED_WELL = ("completed", "pruned")
"""What a job's status is when nothing went wrong. A sweeper stops ("prunes") a job that is not worth finishing."""


_SPARE = ("run dir", "scale", "epochs", "memory", "skipped")
"""Columns that the terminal does without where it is too narrow for all, in this order. ``summary.md`` has them."""

_NO_METRICS = ("amp/", "lr-", "grad_norm")
"""How the names begin of values that callbacks log, and that are no measure of success."""
_METRICS = 4

_REPEATS = re.compile(r"[+~]*(\w+\.)*(seed|fold)=")
"""How overrides begin by which jobs repeat each other, so that their mean is what one wants to know."""

PRUNING = "++callbacks.pruning={_target_:trainer.callbacks.OptunaPruning,"
"""How the override begins by which Optuna's sweeper has a job report to its study."""

MEASURING = ("++callbacks.throughput._target_=trainer.callbacks.Throughput",)
"""The override with which ``compare`` measures a job."""


def shown(overrides: Sequence[str]) -> list[str]:
    """The overrides a person wants to see."""
    return [override for override in overrides if not override.startswith(("command=", PRUNING, *MEASURING))]


def planned(composer: Any, words: Sequence[str], config: Any) -> int | None:
    """How many jobs a sweep is to have; None where its sweeper alone knows.

    Args:
        composer: that reads the command line.
        words: what the config is composed with.
        config: of the first job, with Hydra's node.
    """
    sweeper = config.hydra.sweeper
    if "BasicSweeper" not in str(sweeper["_target_"]):
        return None
    overrides = {one.get_key_element(): one for one in composer.parse(words)}
    for name, values in (sweeper.get("params") or {}).items():
        for one in composer.parse([f"{name}={values}"]):
            overrides.setdefault(one.get_key_element(), one)
    swept = [one for one in overrides.values() if one.is_sweep_override()]
    return math.prod(len(list(one.sweep_string_iterator())) for one in swept)


def report(folder: Path, since: float = 0.0, wanted: int | None = None, again: str = "") -> int:
    """Print the table of the sweep in ``folder``; write it to ``summary.md`` and the numbers to
    ``summary.json``.

    Args:
        folder: of the sweep; the jobs have theirs in it.
        since: a time (of `time.time`); jobs that ended before it are an earlier sweep's and left out.
        wanted: how many jobs there were to be; None where that is not known.
        again: the command that goes on, for where it was interrupted.

    Returns:
        How many jobs did not complete.
    """
    runs = jobs_of(folder, since)
    if not runs:
        return 0
    winner = best(runs)
    too_long = ("curves", "environment")
    numbers = [{**{n: v for n, v in run.facts.items() if n not in too_long}, "best": run is winner} for run in runs]
    (folder / "summary.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    header, rows = _rows(runs, winner, folder)
    said = "\n\n".join(part for part in (_means(runs), _best(runs, winner)) if part)
    text = f"{markdown_table(header, rows)}\n" + (f"\n{said}\n" if said else "")
    (folder / "summary.md").write_text(text, encoding="utf-8")
    _print(header, rows, said, runs, folder, wanted)
    if again and (len(runs) < (wanted or 0) or any(run.status == "interrupted" for run in runs)):
        print(f"To go on: {again}", flush=True)
    return sum(run.status not in ENDED_WELL for run in runs)


def _rows(runs: Sequence[RunRecord], winner: RunRecord | None, folder: Path) -> tuple[list[str], list[list[str]]]:
    rows, metrics = [], _metrics(runs)
    for run, own in zip(runs, own_overrides(runs), strict=True):
        rows.append(
            [
                ("job", f"{run.job}{' (best)' if run is winner else ''}"),
                ("overrides", " ".join(own)),
                ("status", run.status),
                ("epochs", _number(run.epochs)),
                ("time", "-" if run.seconds is None else f"{run.seconds:.1f} s"),
                *((name, f"{run.metrics[name]:.4g}" if name in run.metrics else "-") for name in metrics),
                ("skipped", _number(run.skipped_steps)),
                ("scale", _number(run.scale)),
                ("memory", "-" if run.peak_memory is None else f"{run.peak_memory / 2**20:,.0f} MiB"),
                ("run dir", os.path.relpath(run.folder, folder)),
            ]
        )
    return [name for name, _ in rows[0]], [[cell for _, cell in row] for row in rows]


def _metrics(runs: Sequence[RunRecord]) -> list[str]:
    """Those that the table shows."""
    objectives = [run.objective[0] for run in runs if run.objective]
    return worth_showing({name for run in runs for name in run.metrics}, objectives)[:_METRICS]


def own_overrides(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Of each job the overrides that not all of several have."""
    common = set.intersection(*(set(run.overrides) for run in runs)) if len(runs) > 1 else set()
    return [[override for override in shown(run.overrides) if override not in common] for run in runs]


def _means(runs: Sequence[RunRecord]) -> str:
    """For completed jobs that differ by a seed or a fold alone, a line with means and standard deviations (n - 1)."""
    groups = dict[tuple[str, ...], list[RunRecord]]()
    for run, own in zip(runs, own_overrides(runs), strict=True):
        others = tuple(override for override in own if not _REPEATS.match(override))
        if run.completed and len(others) < len(own):
            groups.setdefault(others, []).append(run)
    lines = []
    for others, members in groups.items():
        values = {name: [run.metrics.get(name, math.nan) for run in members] for name in _metrics(members)}
        told = [
            f"{name} {fmean(n):.4g} ± {stdev(n):.2g}" for name, n in values.items() if math.isfinite(sum(n)) and n[1:]
        ]
        if told:
            lines.append(f"Mean of {len(members)} jobs{''.join(f' {word}' for word in others)}: {', '.join(told)}")
    return "\n".join(lines)


def _best(runs: Sequence[RunRecord], winner: RunRecord | None) -> str:
    """A sentence on the best job, and the command that is like it, or on why there is none; empty without objective."""
    if winner is not None and winner.objective is not None:
        own = " ".join(own_overrides(runs)[runs.index(winner)])
        metric, mode = winner.objective
        what = f"{metric} {winner.objective_value:.4g}, the {'lowest' if mode == 'min' else 'highest'}"
        flags = winner.facts.get("flags") or []
        command = shlex.join(["python", "-m", "trainer", winner.command or "fit", *flags, *shown(winner.overrides)])
        return f"Best: job {winner.job}, with {what}{f': {own}' if own else ''}\n\n    {command}"
    asked = {run.objective for run in runs if run.objective}
    if len(asked) == 1 and any(run.completed for run in runs):
        return f"No job is the best: none has ended with a finite value of {asked.pop()[0]}."
    return ""


def worth_showing(names: Iterable[str], objectives: Iterable[str] = ()) -> list[str]:
    """Of the metrics of some runs the objectives, then those of validation and test, or the others without these."""
    wanted, whole = set(objectives), sorted(names)
    metrics = [name for name in without_twins(whole) if not name.startswith(_NO_METRICS)]
    evaluated = [name for name in metrics if name.startswith(("val", "test"))]
    others = [name for name in evaluated or metrics or whole if name not in wanted]
    return [*(name for name in whole if name in wanted), *others]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _print(
    header: list[str], rows: list[list[str]], said: str, runs: Sequence[RunRecord], folder: Path, wanted: int | None
) -> None:
    of_all = f" of {wanted}" if wanted and wanted > len(rows) else ""
    jobs = "1 job" if len(rows) == 1 and not of_all else f"{len(rows)}{of_all} jobs"
    narrow = [[cells[0], cells[1].replace(" ", "\n"), *cells[2:]] for cells in rows]
    Table(f"Sweep of {jobs}", header, narrow, ("overrides", "status", "run dir"), _SPARE).show()
    if said:
        tell(said, "bold green" if "Best: job" in said else "yellow")
    for run in runs:
        if run.error:
            tell(f"Job {run.job} {run.status}: {run.error}")
    tell(f"Everything is in {folder}")
