"""Build the page of several runs: a sweep, a comparison, or any runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.cli.parsing import UsageError
from trainer.cli.report.artifacts import diagnoses_of, figures_of
from trainer.cli.report.page import Tile, draw_sections, environment_of, flat, note_of, render, tiles_of
from trainer.cli.report.selection import ReportSubject
from trainer.common import redaction
from trainer.common.machine import readable
from trainer.common.terminal import format_number, format_seconds, four_digits
from trainer.errors import join_first
from trainer.record.charts import overlay, sections_of
from trainer.record.drawing import PALETTE
from trainer.record.run_record import SUCCESSFUL, RunRecord, direction_of, load_run, read_json
from trainer.record.sweep_record import Sweep, best_of, worth_showing

INVALID_RECORD_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that reading a file raises if its contents are not those that a run writes."""

_DIFFERENCES = 16
_ALWAYS_DIFFERENT = ("command", "directory", "SLURM_JOB_ID")
"""Facts that differ between any two runs."""


Goal = tuple[str, str]
"""A metric, and its better direction, ``"min"`` or ``"max"``."""


def unreadable(folder: Path, error: Exception) -> str:
    """Return the message for a folder that raised one of `INVALID_RECORD_ERRORS` when it was read."""
    reason = "They were changed, or are from another version."
    return f"The files in {folder} have contents that no run writes ({type(error).__name__}: {error}). {reason}"


class Difference(NamedTuple):
    """A setting that differs between runs.

    Args:
        name: name of the setting.
        values: one per run; "" if the run has no such setting.
        chosen: whether a command line set it.
    """

    name: str
    values: Sequence[str]
    chosen: bool = False


def several_page(about: ReportSubject) -> tuple[str, list[str]]:
    """Return the HTML of the report on several runs.

    Args:
        about: the runs.

    Returns:
        The page, and messages about runs that could not be read.

    Raises:
        UsageError: if no run could be read.
    """
    is_sweep = about.kind == "sweep"
    runs, left_out = _readable(about.runs)
    if is_sweep:
        runs.sort(key=_order)
    sweep = Sweep(runs)
    sweep.set_labels()
    comparison = dict(redaction.containers(read_json(about.folder, "compare.json"))) if is_sweep else {}
    goal = sweep.goal if is_sweep else _goal(runs)
    folds = sweep.folds if is_sweep else None
    winner = None
    if folds is None and len(runs) > 1:
        winner = best_of([run for run in runs if run.completed or not is_sweep], goal)
    jobs, header = _jobs(sweep, winner, goal, comparison, is_sweep=is_sweep)
    names = list(dict.fromkeys(run.name for run in runs))
    settings, elsewhere = ([], []) if is_sweep else _differences(runs)
    charts = overlay(runs, [job["color"] for job in jobs], winner)
    text = render(
        "several.html.jinja",
        folder=about.folder if is_sweep or about.folder != Path() else "",
        title=join_first(names, 3) or about.folder.resolve().name,
        kind="Comparison" if comparison else "Sweep" if is_sweep else "Runs",
        noun="job" if is_sweep else "run",
        jobs=jobs,
        header=header,
        counts=Counter(run.status for run in runs),
        tiles=[*_tile_of_folds(sweep, folds), *_tiles(runs, winner, goal, "Jobs" if is_sweep else "Runs")],
        common=sweep.common,
        differences=settings,
        shown=_DIFFERENCES,
        elsewhere=elsewhere,
        unset=[job for job in jobs if not is_sweep and not job["run"].config],
        left_out=[*about.left_out, *left_out],
        conditions=[str(line) for line in comparison.get("conditions", [])],
        sections=draw_sections(charts, max((run.step or 0 for run in runs), default=0)),
        without_curves=[
            job for job in jobs if not (is_sweep or any(section.charts for section in sections_of(job["run"])))
        ],
        environment=environment_of(runs[0]) if runs else [],
        colored=sum(job["color"] is not None for job in jobs),
    )
    return text, left_out


def _readable(folders: Sequence[Path]) -> tuple[list[RunRecord], list[str]]:
    """Return the runs, and messages about those that cannot be shown.

    Raises:
        UsageError: if no run can be shown.
    """
    runs, left_out = [], []
    for folder in folders:
        try:
            run = load_run(folder)
            sections_of(run), tiles_of(run, run.objective), environment_of(run), _order(run)
        except INVALID_RECORD_ERRORS as error:
            left_out.append(unreadable(folder, error))
        else:
            runs.append(run)
    if left_out and not runs:
        raise UsageError("\n".join(left_out))
    return runs, left_out


def _goal(runs: Sequence[RunRecord]) -> tuple[str, str] | None:
    """Return metric and mode of the most common objective of the runs, or None."""
    if goals := Counter(run.objective for run in runs if run.objective):
        return goals.most_common(1)[0][0]
    names = worth_showing({name for run in runs for name in run.latest})
    return next(((name, mode) for name in names if (mode := direction_of(name))), None)


def _jobs(
    sweep: Sweep, winner: RunRecord | None, goal: Goal | None, comparison: Mapping[str, Any], *, is_sweep: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of the table, and the header of its columns."""
    colors = _colors(sweep.runs, winner, goal)
    metrics = [name for name in sweep.metrics if goal is None or name != goal[0]]
    compared = [entry for entry in comparison.get("runs", []) if isinstance(entry, dict)]
    verdicts = {Path(str(entry.get("run_dir", ""))).name: entry.get("verdict") for entry in compared}
    jobs, is_best = [], False
    for index, (run, color) in enumerate(zip(sweep.runs, colors, strict=True)):
        number = index + 1 if not is_sweep else run.folder.name if run.job is None else run.job
        verdict, reached = verdicts.get(run.folder.name), run.reached(goal)
        is_best |= reached.is_best
        at = "-" if reached.step is None else f"{reached.step:,.0f}"
        cells = [
            *((format_number(reached.value), at) if goal else ()),
            *(format_number(run.latest.get(name)) for name in metrics),
            "-" if run.duration is None else format_seconds(run.duration),
            "-" if run.samples_per_second is None else four_digits(run.samples_per_second),
            "-" if run.peak_memory is None else readable(run.peak_memory),
            format_number(run.skipped_steps),
        ]
        jobs.append(
            {
                "anchor": f"job-{index}", "number": str(number), "run": run, "color": color, "is_best": run is winner,
                "cells": cells, "tiles": tiles_of(run, goal), "figures": figures_of(run),
                "diagnoses": diagnoses_of(run), "note": note_of(run),
                "verdict": verdict if isinstance(verdict, dict) else {},
            }
        )  # fmt: skip
    first = [f"{'Best' if is_best else 'Last'} {goal[0]}", "at step"] if goal else []
    return jobs, [*first, *metrics, "Time", "Samples/s", "Memory", "Skipped"]


def _differences(runs: Sequence[RunRecord]) -> tuple[list[Difference], list[Difference]]:
    """Return the settings that differ, the important ones first, and the facts about code and machine that differ.

    Recipe, precision and settings of the command line come first; settings of a class that differs come last. A run
    without a config, such as that of a script, has no settings.
    """
    settings = [
        {"recipe": run.name, "precision": run.precision or "", "seed": run.seed or "", **dict(flat(run.config))}
        if run.config
        else {}
        for run in runs
    ]
    chosen = {word.lstrip("+~").partition("=")[0] for run in runs for word in run.chosen}
    differing = _differing(settings, chosen)
    differing.sort(key=lambda setting: not (setting.chosen or setting.name in ("recipe", "precision")))
    elsewhere = _differing([dict(environment_of(run)) for run in runs], set())
    return differing, [fact for fact in elsewhere if fact.name not in _ALWAYS_DIFFERENT]


def _differing(settings: Sequence[Mapping[str, str]], chosen: set[str]) -> list[Difference]:
    known = [run_settings for run_settings in settings if run_settings]
    names = dict.fromkeys(name for run_settings in known for name in run_settings)
    return [
        Difference(name, [run_settings.get(name, "") for run_settings in settings], name in chosen)
        for name in names
        if len({run_settings.get(name) for run_settings in known}) > 1
    ]


def _colors(runs: Sequence[RunRecord], winner: RunRecord | None, goal: tuple[str, str] | None) -> list[int | None]:
    """Return a color for each run with a curve, or None. If there are more of them than colors, the best get one."""
    order = [index for index, run in enumerate(runs) if run.losses or run.stages or run.rows]
    if len(order) > len(PALETTE) and winner is not None and goal is not None:
        sign = -1.0 if goal[1] == "max" else 1.0
        values = [run.reached(goal).value for run in runs]
        order.sort(key=lambda index: math.inf if (value := values[index]) is None else sign * value)
    chosen = sorted(order[: len(PALETTE)])
    return [chosen.index(index) if index in chosen else None for index in range(len(runs))]


def _tile_of_folds(sweep: Sweep, folds: tuple[tuple[str, ...], list[RunRecord]] | None) -> list[Tile]:
    if folds is None or sweep.goal is None or (mean := sweep.mean(folds[1])) is None:
        return []
    about = " ".join((f"over {len(folds[1])} jobs", *folds[0]))
    return [Tile(f"Mean {sweep.goal[0]}", f"{mean[0]:.4g} ± {mean[1]:.2g}", about, strong=True)]


def _tiles(runs: Sequence[RunRecord], winner: RunRecord | None, goal: tuple[str, str] | None, noun: str) -> list[Tile]:
    tiles = []
    if winner is not None and goal is not None:
        reached = winner.reached(goal)
        way, last = "Lowest" if goal[1] == "min" else "Highest", "" if reached.is_best else " at the end"
        at = "" if reached.step is None or not reached.is_best else f"at step {reached.step:,.0f}, "
        tiles.append(Tile(f"{way} {goal[0]}{last}", format_number(reached.value), f"{at}{winner.label}", strong=True))
    done = sum(run.status in SUCCESSFUL for run in runs)
    pruned = sum(run.status == "pruned" for run in runs)
    tiles.append(Tile(noun, f"{len(runs)}", f"{done} completed{' or pruned' if pruned else ''}"))
    if times := [run.duration for run in runs if run.duration is not None]:
        tiles.append(Tile("Time", format_seconds(sum(times)), "in total"))
    if skipped := sum(run.skipped_steps or 0 for run in runs):
        tiles.append(Tile("Skipped steps", f"{skipped:,}", "in total"))
    return tiles


def _order(run: RunRecord) -> tuple[float, str]:
    return (math.inf, str(run.folder)) if run.job is None else (run.job, "")
