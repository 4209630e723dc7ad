"""The table at the end of a sweep, made of what its jobs (`trainer.cli.sweep.jobs`) have left in their folders."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli.objective import best
from trainer.cli.processes import is_quiet
from trainer.record.reader import RunRecord, jobs_of

if TYPE_CHECKING:  # takes a moment to import
    from rich.console import Console
    from rich.table import Table

ENDED_WELL = ("completed", "pruned")
"""What a job's status is when nothing went wrong. A sweeper stops ("prunes") a job that is not worth finishing."""


_SPARE = ("run dir", "scale", "epochs", "memory", "skipped")
"""Columns that the terminal does without where it is too narrow for all, in this order. ``summary.md`` has them."""

PRUNING = "++callbacks.pruning={_target_:trainer.callbacks.OptunaPruning,"
"""How the override begins by which Optuna's sweeper has a job report to its study."""

MEASURING = ("++callbacks.throughput._target_=trainer.callbacks.Throughput",)
"""The override with which ``compare`` measures a job."""


def shown(overrides: Sequence[str]) -> list[str]:
    """The overrides a person wants to see."""
    return [override for override in overrides if not override.startswith(("command=", PRUNING, *MEASURING))]


def report(folder: Path, since: float = 0.0) -> int:
    """Print the table of the sweep in ``folder``; write it to ``summary.md`` and the numbers to
    ``summary.json``.

    Args:
        folder: of the sweep; the jobs have theirs in it.
        since: a time (of `time.time`); jobs that ended before it are an earlier sweep's and left out.

    Returns:
        How many jobs did not complete.
    """
    runs = jobs_of(folder, since)
    if not runs:
        return 0
    winner = best(runs)
    numbers = [{**_facts(run), "best": run is winner} for run in runs]
    (folder / "summary.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    header, rows = _rows(runs, winner, folder)
    said = _best(runs, winner)
    text = f"{markdown_table(header, rows)}\n" + (f"\n{said}\n" if said else "")
    (folder / "summary.md").write_text(text, encoding="utf-8")
    _print(header, rows, said, runs, folder)
    return sum(run.status not in ENDED_WELL for run in runs)


def _facts(run: RunRecord) -> dict[str, Any]:
    """What ``run.json`` says, without what is too long for a table."""
    return {name: fact for name, fact in run.facts.items() if name not in ("curves", "environment")}


def _rows(runs: Sequence[RunRecord], winner: RunRecord | None, folder: Path) -> tuple[list[str], list[list[str]]]:
    common = common_overrides(runs)
    metrics = _metrics(runs)
    header = [
        "job",
        "overrides",
        "status",
        "epochs",
        "time",
        *metrics,
        "skipped",
        "scale",
        "memory",
        "run dir",
    ]
    rows = []
    for run in runs:
        own = [override for override in shown(run.overrides) if override not in common]
        rows.append(
            [
                f"{run.job}{' (best)' if run is winner else ''}",
                " ".join(own),
                run.status,
                _number(run.epochs),
                "-" if run.seconds is None else f"{run.seconds:.1f} s",
                *(f"{run.metrics[name]:.4g}" if name in run.metrics else "-" for name in metrics),
                _number(run.skipped_steps),
                _number(run.scale),
                "-" if run.peak_memory is None else f"{run.peak_memory / 2**20:,.0f} MiB",
                os.path.relpath(run.folder, folder),
            ]
        )
    return header, rows


def common_overrides(runs: Sequence[RunRecord]) -> set[str]:
    """The overrides that all of several jobs have."""
    return set.intersection(*(set(run.overrides) for run in runs)) if len(runs) > 1 else set()


def _best(runs: Sequence[RunRecord], winner: RunRecord | None) -> str:
    """A sentence on the best job, and the command that is like it, or on why there is none; empty without objective."""
    if winner is not None and winner.objective is not None:
        common = common_overrides(runs)
        own = " ".join(word for word in shown(winner.overrides) if word not in common)
        metric, mode = winner.objective
        what = f"{metric} {winner.objective_value:.4g}, the {'lowest' if mode == 'min' else 'highest'}"
        command = shlex.join(["python", "-m", "trainer", "fit", *shown(winner.overrides)])
        return f"Best: job {winner.job}, with {what}{f': {own}' if own else ''}\n\n    {command}"
    asked = {run.objective for run in runs if run.objective}
    if len(asked) == 1 and any(run.completed for run in runs):
        return f"No job is the best: none has ended with a finite value of {asked.pop()[0]}."
    return ""


def _metrics(runs: Sequence[RunRecord], most: int = 4) -> list[str]:
    """The metrics worth a column: the objective, and those of validation and test, or all where there are none."""
    names = sorted({name for run in runs for name in run.metrics})
    objectives = {run.objective[0] for run in runs if run.objective}
    evaluated = [name for name in names if name.startswith(("val", "test"))]
    whole = [name for name in evaluated or names if not name.endswith(("_step", "_epoch"))]
    others = [name for name in whole or evaluated or names if name not in objectives]
    return [*(name for name in names if name in objectives), *others][:most]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _print(header: list[str], rows: list[list[str]], said: str, runs: Sequence[RunRecord], folder: Path) -> None:
    jobs = "1 job" if len(rows) == 1 else f"{len(rows)} jobs"
    narrow = [[cells[0], cells[1].replace(" ", "\n"), *cells[2:]] for cells in rows]
    title, left = f"Sweep of {jobs}", ("overrides", "status", "run dir")
    console = console_of_tables() if is_quiet() else print_table(title, header, narrow, left, _SPARE)
    if said:
        style = "bold green" if said.startswith("Best") else "yellow"
        console.print(said, style=style, soft_wrap=True, markup=False, highlight=False)
    for run in runs:
        if run.error:
            told = f"Job {run.job} {run.status}: {run.error}"
            console.print(told, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Everything is in {folder}", soft_wrap=True, markup=False, highlight=False)


def four_digits(value: float) -> str:
    """A rate, without a power of ten.

    >>> four_digits(34.831), four_digits(66961.2)
    ('34.83', '66,960')
    """
    return f"{float(f'{value:.4g}'):,.10g}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


def print_table(
    title: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Sequence[str],
    spare: Sequence[str] = (),
) -> Console:
    """Print a table; rows in which something failed or was interrupted are red, those of pruned jobs dim.

    The row of the best job, whose first cell says so, is bold.

    Args:
        title: above the table.
        header: the columns' names.
        rows: their cells.
        left: names of the columns that are aligned to the left.
        spare: names of the columns that are left out, one after the other, while the terminal is too narrow for all.

    Returns:
        The console it went to, for more.
    """
    from rich.measure import Measurement

    console, listed, dropped = console_of_tables(), list(rows), list[str]()
    unlimited = console.options.update(max_width=1000)
    table = _table(title, header, listed, left, dropped)
    for name in spare:
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            break
        dropped.append(name)
        table = _table(title, header, listed, left, dropped)
    console.print(table)
    return console


def _table(
    title: str, header: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str], dropped: Sequence[str]
) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    kept = [place for place, name in enumerate(header) if name not in dropped]
    for name in (header[place] for place in kept):
        is_left = name in left
        # when columns have been dropped, what is still too wide is a text, and no number is folded
        table.add_column(
            Text(name), justify="left" if is_left else "right", overflow="fold", no_wrap=bool(dropped) and not is_left
        )
    for cells in rows:
        table.add_row(*(Text(cells[place]) for place in kept), style=_style(cells))
    return table


def console_of_tables() -> Console:
    """A console as wide as a table wants where it is not a terminal's."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)


def _style(cells: Sequence[str]) -> str | None:
    if "failed" in cells or "interrupted" in cells:
        return "red"
    if "pruned" in cells:
        return "dim"
    return "bold green" if cells[0].endswith("(best)") else None
