"""The page of several runs: of a sweep, a comparison, or any that are to be seen side by side."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer import redaction
from trainer.cli.arguments import UsageError
from trainer.cli.objective import best
from trainer.cli.report.charts import overlay, sections_of
from trainer.cli.report.drawing import PALETTE, told
from trainer.cli.report.folders import Chosen
from trainer.cli.report.page import (
    SAYS,
    Tile,
    best_point,
    drawn,
    duration,
    environment_of,
    flat,
    note_of,
    render,
    tiles_of,
)  # fmt: skip
from trainer.cli.report.record import NOT_A_RUNS, Run, unreadable
from trainer.cli.sweep import worth_showing
from trainer.machine import readable
from trainer.record.reader import direction_of
from trainer.record.run_file import read

_LONG = re.compile(r"(?<![\w.])\d+\.\d{5,}(?:e[+-]?\d+)?(?![\w.])")  # numbers that a sweeper has drawn
_LONGEST = 64  # characters of a label
_METRICS = 4
_DIFFERENCES = 16
_ALWAYS_ITS_OWN = ("command", "directory", "SLURM_JOB_ID")
"""What no two runs have in common, and says nothing."""


@dataclass(frozen=True)
class Job:
    """A run among others."""

    anchor: str
    label: str
    number: str
    run: Run
    color: int | None
    is_best: bool
    cells: Sequence[str]
    tiles: Sequence[Tile]
    note: str = ""
    verdict: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """A setting that is not the same in all runs.

    Args:
        name: of the setting.
        values: of each run; "" where it has no such setting.
        said: whether a command line has set it.
    """

    name: str
    values: Sequence[str]
    said: bool = False


def several_page(about: Chosen, out: Path) -> tuple[str, list[str]]:
    """The HTML of the report on several runs.

    Args:
        about: which.
        out: where the page is going to be: links to files lead from there.

    Returns:
        The page; and what could not be read, and why.

    Raises:
        UsageError: nothing could be read.
    """
    runs, left_out = _readable(about.runs)
    is_sweep = about.kind == "sweep"
    if is_sweep:
        runs.sort(key=_order)
    comparison = dict(redaction.containers(read(about.folder, "compare.json"))) if is_sweep else {}
    goal = None if is_sweep else _goal(runs)
    winner = _winner(runs, goal)
    jobs, header = _jobs(runs, is_sweep, winner, goal, comparison)
    best_job = next((job for job in jobs if job.is_best), None)
    sections = overlay([(job.label, job.run) for job in jobs], [job.color for job in jobs], winner)
    counts = {status: sum(job.run.record.status == status for job in jobs) for status in SAYS}
    names = list(dict.fromkeys(run.name for run in runs))
    settings, elsewhere = ([], []) if is_sweep else _differences(runs)
    text = render(
        "several.html.jinja",
        out,
        folder=about.folder if is_sweep or about.folder != Path() else "",
        title=", ".join(names[:3]) or about.folder.resolve().name,
        kind="Comparison" if comparison else "Sweep" if is_sweep else "Runs",
        noun="job" if is_sweep else "run",
        jobs=jobs,
        header=header,
        counts=[(SAYS[status], count, status) for status, count in counts.items() if count],
        tiles=_tiles(jobs, best_job, goal, "Jobs" if is_sweep else "Runs"),
        common=_common(runs),
        differences=settings,
        shown=_DIFFERENCES,
        elsewhere=elsewhere,
        unset=[job for job in jobs if not is_sweep and not job.run.config],
        left_out=[*about.left_out, *left_out],
        conditions=[str(line) for line in comparison.get("conditions", [])],
        sections=drawn(sections, max((run.step or 0 for run in runs), default=0)),
        without_curves=[job for job in jobs if not is_sweep and not any(part.charts for part in sections_of(job.run))],
        environment=environment_of(runs[0]) if runs else [],
        colored=sum(job.color is not None for job in jobs),
    )
    return text, left_out


def _readable(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs, and what is to be said of those that cannot be shown.

    Raises:
        UsageError: none can.
    """
    runs, left_out = [], []
    for folder in folders:
        try:
            run = Run(folder)
            sections_of(run), tiles_of(run), environment_of(run), _order(run)
        except NOT_A_RUNS as error:
            left_out.append(unreadable(folder, error))
        else:
            runs.append(run)
    if left_out and not runs:
        raise UsageError("\n".join(left_out))
    return runs, left_out


def _goal(runs: Sequence[Run]) -> tuple[str, str] | None:
    """The metric, and which way it is better, that most of the runs are judged by; None without one."""
    goals = Counter(run.record.objective for run in runs if run.record.objective)
    if goals:
        return goals.most_common(1)[0][0]
    names = worth_showing({name for run in runs for name in run.metrics})
    return next(((name, mode) for name in names if (mode := direction_of(name))), None)


def _winner(runs: Sequence[Run], goal: tuple[str, str] | None) -> Run | None:
    """The run with the best value of ``goal``, at whatever step; without one, the one that a sweep's own table names.

    None where there is only one run, or they have no values.
    """
    if goal is None:
        found = best([run.record for run in runs]) if len(runs) > 1 else None
        return next((run for run in runs if run.record is found), None)
    rated = [(run, value) for run in runs if (value := best_point(run, *goal)[0]) is not None]
    return (max if goal[1] == "max" else min)(rated, key=lambda each: each[1])[0] if len(rated) > 1 else None


def _jobs(
    runs: Sequence[Run],
    is_sweep: bool,
    winner: Run | None,
    goal: tuple[str, str] | None,
    comparison: Mapping[str, Any],
) -> tuple[list[Job], list[str]]:
    """The runs, each with its number and label, in the order of the table; and the header of its columns."""
    colors, labels = _colors(runs, winner), _labels(runs, any_runs=not is_sweep)
    objectives = [run.record.objective[0] for run in runs if run.record.objective]
    metrics = worth_showing({name for run in runs for name in run.metrics}, objectives)[:_METRICS]
    if goal is not None:
        metrics = [name for name in metrics if name != goal[0]]
    verdicts = {
        Path(str(told_of.get("run_dir", ""))).name: told_of
        for told_of in comparison.get("runs", [])
        if isinstance(told_of, dict)
    }
    jobs = []
    for index, run in enumerate(runs):
        number = index + 1 if not is_sweep else run.folder.name if run.record.job is None else run.record.job
        record, verdict = run.record, verdicts.get(run.folder.name, {}).get("verdict")
        value, step = best_point(run, *goal) if goal else (None, None)
        cells = [
            *((told(value), "-" if step is None else f"{step:,.0f}") if goal else ()),
            *(told(run.metrics.get(name)) for name in metrics),
            "-" if run.duration is None else duration(run.duration),
            "-" if record.samples_per_second is None else told(float(f"{record.samples_per_second:.4g}")),
            "-" if record.peak_memory is None else readable(record.peak_memory),
            "-" if record.skipped_steps is None else f"{record.skipped_steps:,}",
        ]
        jobs.append(
            Job(
                f"job-{index}", labels[index], str(number), run, colors[index], run is winner, cells, tiles_of(run),
                note_of(run), verdict if isinstance(verdict, dict) else {},
            )
        )  # fmt: skip
    first = [f"Best {goal[0]}", "at step"] if goal else []
    return jobs, [*first, *metrics, "Time", "Samples/s", "Memory", "Skipped"]


def _labels(runs: Sequence[Run], *, any_runs: bool) -> list[str]:
    """What each is called: by what its command line has set and not all the others have."""
    shared = set(_common(runs)) if len(runs) > 1 else set()
    labels = [_label(run, shared) for run in runs]
    short = [_LONG.sub(lambda found: f"{float(found[0]):.4g}", label) for label in labels]
    labels = short if len(set(short)) == len(set(labels)) else labels
    if not any_runs:
        return labels
    cut = [label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}\u2026" for label in labels]
    twins = Counter(cut)
    named = [
        f"{label} ({run.folder.resolve().name})" if twins[label] > 1 and label != run.folder.name else label
        for run, label in zip(runs, cut, strict=True)
    ]
    again = Counter(named)
    return [f"{label} [{number}]" if again[label] > 1 else label for number, label in enumerate(named, start=1)]


def _label(run: Run, shared: set[str]) -> str:
    own = [word.removeprefix("precision=") for word in run.overrides if word not in shared]
    own = [word.lstrip("+").removeprefix("recipe=") if word.lstrip("+").startswith("recipe=") else word for word in own]
    return " ".join(own) or run.precision or run.folder.name


def _common(runs: Sequence[Run]) -> list[str]:
    """The overrides that all of them have."""
    if not runs:
        return []
    return [word for word in runs[0].overrides if all(word in run.overrides for run in runs)]


def _differences(runs: Sequence[Run]) -> tuple[list[Difference], list[Difference]]:
    """The settings that differ, the telling ones first; and what differs of code, machine and versions.

    The telling ones are those of a command line, and which class a part is of; where that differs, so do its settings.
    A run whose settings are not known, one of a script, has none of them.
    """
    settings = [{**_shortly(run), **dict(flat(run.config))} if run.config else {} for run in runs]
    where = [
        {label: value for _, rows in environment_of(run) for label, value in rows if label not in _ALWAYS_ITS_OWN}
        for run in runs
    ]
    said = {word.lstrip("+~").partition("=")[0] for run in runs for word in run.overrides}
    differing = _differing(settings, said)
    others = {one.name.removesuffix("_target_") for one in differing if one.name.endswith("._target_")}
    consequences = [one for one in differing if not one.said and one.name.startswith(tuple(others))]
    consequences = [one for one in consequences if not one.name.endswith("_target_")]
    telling = [one for one in differing if one not in consequences]
    first = [one for one in telling if one.said or one.name in ("recipe", "precision")]
    return [*first, *(one for one in telling if one not in first), *consequences], _differing(where, set())


def _shortly(run: Run) -> dict[str, str]:
    """What one calls a run by, before all its settings."""
    return {"recipe": run.name, "precision": run.precision, "seed": run.record.seed or ""}


def _differing(settings: Sequence[Mapping[str, str]], said: set[str]) -> list[Difference]:
    known = [of_run for of_run in settings if of_run]
    names = dict.fromkeys(name for of_run in known for name in of_run)
    return [
        Difference(name, [of_run.get(name, "") for of_run in settings], name in said)
        for name in names
        if len({of_run.get(name) for of_run in known}) > 1
    ]


def _colors(runs: Sequence[Run], winner: Run | None) -> list[int | None]:
    """A colour for each run, or for the best of them where there are too many to tell apart."""
    order = list(range(len(runs)))
    if len(runs) > PALETTE and winner is not None and (goal := winner.record.objective) is not None:
        sign = -1.0 if goal[1] == "max" else 1.0
        values = [run.record.objective_value for run in runs]
        order.sort(key=lambda i: sign * v if (v := values[i]) is not None and math.isfinite(v) else math.inf)
    chosen = sorted(order[:PALETTE])
    return [chosen.index(index) if index in chosen else None for index in range(len(runs))]


def _tiles(jobs: Sequence[Job], winner: Job | None, goal: tuple[str, str] | None, noun: str) -> list[Tile]:
    tiles = []
    if winner is not None and goal is not None:
        value, step = best_point(winner.run, *goal)
        at = "" if step is None else f"at step {step:,.0f}, "
        way = "Lowest" if goal[1] == "min" else "Highest"
        tiles.append(Tile(f"{way} {goal[0]}", told(value), f"{at}{winner.label}", strong=True))
    elif winner is not None and winner.run.record.objective is not None:
        (metric, mode), last = winner.run.record.objective, told(winner.run.record.objective_value)
        way = "Lowest" if mode == "min" else "Highest"  # of the last values: a job may have been better before
        tiles.append(Tile(f"{way} {metric} at the end", last, winner.label, strong=True))
    ended = sum(job.run.record.status in ("completed", "pruned") for job in jobs)
    tiles.append(Tile(noun, f"{len(jobs)}", f"{ended} ended well"))
    times = [job.run.duration for job in jobs if job.run.duration is not None]
    if times:
        tiles.append(Tile("Time", duration(sum(times)), "of all together"))
    skipped = [job.run.record.skipped_steps or 0 for job in jobs]
    if any(skipped):
        tiles.append(Tile("Skipped steps", f"{sum(skipped):,}", "in all of them"))
    return tiles


def _order(run: Run) -> tuple[float, str]:
    return (math.inf, str(run.folder)) if run.record.job is None else (run.record.job, "")
