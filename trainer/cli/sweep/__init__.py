"""The summary at the end of a sweep, from the records in the folders of its jobs (`trainer.cli.sweep.jobs`)."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from statistics import fmean, stdev

from trainer.cli.workdir import path_override
from trainer.common import terminal
from trainer.common.files import from_here
from trainer.common.terminal import Table, command_line, format_number, is_quiet, print_line
from trainer.errors import counted
from trainer.record.find_checkpoint import run_of
from trainer.record.run_record import SUCCESSFUL, RunRecord
from trainer.record.sweep_record import Sweep, load_sweep

_ONLY_IN_FILES = ("run dir", "scale", "epochs")
"""Columns that ``summary.md`` has, but not the table on the terminal."""


def report(folder: Path, since: float = 0.0, again: str = "") -> int:
    """Print the table of a sweep, and write it to ``summary.md`` and ``summary.json``.

    Args:
        folder: folder of the sweep. It contains the folders of the jobs.
        since: a time (of `time.time`). Jobs that ended before it belong to an earlier sweep and are left out.
        again: command that resumes the sweep. It is printed if a job was interrupted.

    Returns:
        The number of jobs that neither completed nor were pruned.
    """
    sweep = load_sweep(folder, since)
    if not sweep.runs:
        return 0
    best = sweep.best if sweep.folds is None else None
    numbers = [run.brief | {"best": run is best} for run in sweep.runs]
    (folder / "summary.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    header, rows = _rows(sweep, best, folder)
    result = "\n\n".join(paragraph for paragraph in (_means(sweep), _best(sweep, folder)) if paragraph)
    text = f"{terminal.markdown_table(header, rows)}\n" + (f"\n{result}\n" if result else "")
    (folder / "summary.md").write_text(text, encoding="utf-8")
    shown = [place for place, name in enumerate(header) if name not in _ONLY_IN_FILES]
    cells = [[row[place].replace(" ", "\n") if place == 1 else row[place] for place in shown] for row in rows]
    Table(f"Sweep of {counted(len(rows), 'job')}", [header[place] for place in shown], cells).show()
    if result:
        print_line(result, "bold green" if sweep.best is not None else "yellow")
    for run in sweep.runs:
        if run.error:  # the line about the job has the whole error
            print_line(f"Job {run.job} {run.status}: {run.error if is_quiet() else terminal.shortened(run.error)}")
    print_line(f"Results are in {folder}")
    if again and any(run.status == "interrupted" for run in sweep.runs):
        print(f"To resume: {again}", flush=True)
    return sum(run.status not in SUCCESSFUL for run in sweep.runs)


def _rows(sweep: Sweep, best: RunRecord | None, folder: Path) -> tuple[list[str], list[list[str]]]:
    rows = [
        {
            "job": f"{run.job}{' (best)' if run is best else ''}",
            "overrides": " ".join(overrides),
            "status": run.status,
            "epochs": format_number(run.epochs),
            "time": "-" if run.seconds is None else f"{run.seconds:.1f} s",
            **{sweep.titled(name): format_number(run.value_of(name)) for name in sweep.metrics},
            "skipped": format_number(run.skipped_steps),
            "scale": format_number(run.scale),
            "memory": terminal.format_mebibytes(run.peak_memory),
            "run dir": os.path.relpath(run.folder, folder),
        }
        for run, overrides in zip(sweep.runs, sweep.own(), strict=True)
    ]
    return list(rows[0]), [list(row.values()) for row in rows]


def _means(sweep: Sweep) -> str:
    """Return lines with means and standard deviations (n - 1) of completed jobs that differ only by seed or fold."""
    lines = []
    for others, members in sweep.repetitions.items():
        repeated = Sweep(members)
        values = {
            repeated.titled(name): [math.nan if (value := run.value_of(name)) is None else value for run in members]
            for name in repeated.metrics
        }
        means = [
            f"{name} {fmean(n):.4g} ± {stdev(n):.2g}" for name, n in values.items() if math.isfinite(sum(n)) and n[1:]
        ]
        if means:
            lines.append(f"Mean of {len(members)} jobs{''.join(f' {word}' for word in others)}: {', '.join(means)}")
    return "\n".join(lines)


def _best(sweep: Sweep, folder: Path) -> str:
    """Return sentences about the best job or folds with a command, or about missing values; "" without an objective."""
    best, goal, folds = sweep.best, sweep.goal, sweep.folds
    if folds is not None:
        overrides, jobs = folds
        text, mean = "", sweep.mean(jobs)
        if overrides and goal is not None and mean is not None:
            way = "lowest" if goal[1] == "min" else "highest"
            value = f"{mean[0]:.4g} ± {mean[1]:.2g} over {len(jobs)} jobs"
            text = f"Best: {' '.join(overrides)}, with the {way} mean {goal[0]}, {value}\n\n"
        if all(job.paths.get("best_checkpoint") for job in jobs):
            text += f"To average the predictions of these models:\n\n    {_use(jobs[0], 'predict', from_here(folder))}"
        return text.strip()
    if best is not None and goal is not None:
        others = " ".join(sweep.own()[sweep.runs.index(best)])
        where = " at its best checkpoint" if best.reached(goal).is_best else ""
        value = f"the {'lowest' if goal[1] == 'min' else 'highest'} {goal[0]}, {best.objective_value:.4g}{where}"
        numbers = [f"hydra.job.num={best.job}", f"hydra.job.id={best.job}"]  # for interpolations in its config
        flags = best.facts.get("flags") or []
        words = [*flags, *best.chosen, *(numbers if "hydra:job." in str(best.config) else [])]
        command = command_line(best.command, *words)
        text = f"Best: job {best.job}, with {value}{f': {others}' if others else ''}\n\n    {command}"
        is_validated = where and goal[0] in best.stages.get("val", {})
        if is_validated and run_of(Path(str(best.paths.get("best_checkpoint")))) == (place := from_here(best.folder)):
            command = _use(best, "validate", place)
            text += f"\n\nTo use its best checkpoint (test, predict and export take the same ckpt=):\n\n    {command}"
        return text
    objectives = {run.objective for run in sweep.runs if run.objective}
    if len(objectives) == 1 and any(run.completed for run in sweep.runs):
        return f"There is no best job: no job has a finite value of {objectives.pop()[0]}."
    return ""


def _use(run: RunRecord, command: str, folder: Path) -> str:
    """Return the command line that runs ``command`` with ``ckpt=FOLDER`` and finds the configs of ``run``."""
    flags = run.facts.get("flags") or []
    pairs = zip(flags[::2], flags[1::2], strict=True)
    others = [word for pair in pairs if pair[0] != "--config-name" for word in pair]  # ckpt= has a config
    return command_line(command, *others, path_override("ckpt", folder))
