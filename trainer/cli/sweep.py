"""Sweeps: every job in a process and a folder of its own, and one table at the end.

Hydra's sweeper makes the jobs and its launcher calls `trainer.cli.run.task` for each, in whatever process or
machine the launcher likes. There, `run_job` starts the same command line once more, with the overrides of
that job alone. So nothing leaks from job to job (peak memory, random state, torch's global flags, the
variables of a process group), several processes per job work, and the sweep itself never imports torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from trainer.cli.arguments import read
from trainer.cli.objective import best, value_of
from trainer.cli.processes import clean_environment
from trainer.cli.results import RESULT, write_result
from trainer.cli.workdir import quoted

if TYPE_CHECKING:  # takes a moment to import
    from rich.console import Console

ENDED_WELL = ("completed", "pruned")
"""What a job's status is when nothing went wrong. A sweeper stops ("prunes") a job that is not worth finishing."""

# Hydra's settings for the sweep, which are none of a job's business.
_SWEEP_ONLY = (
    "hydra.mode",
    "hydra.run.dir",
    "hydra.sweep",
    "hydra.launcher",
    "hydra/launcher",
    "hydra/sweeper",
)


def run_job(own: Callable[[list[str]], list[str]] = list) -> float | None:
    """Run the job that Hydra has composed, in a process of its own, and wait for it. Its failure is not ours.

    Args:
        own: makes the overrides that the process is started with from those of the job.

    Returns:
        The value of its objective; None if it has none, or failed.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    overrides = _as_written(hydra.overrides.task)
    ours = [word for word in _as_written(hydra.overrides.hydra) if not word.lstrip("+~").startswith(_SWEEP_ONLY)]
    placement = [
        f"hydra.run.dir={quoted(str(folder))}",
        f"hydra.job.num={hydra.job.num}",
        f"hydra.job.id={hydra.job.id}",
        "hydra.mode=RUN",
    ]
    flags = read(sys.argv[1:]).flags
    places = [
        word
        for flag in ("--config-dir", "--config-path", "--config-name")
        if flag in flags
        for word in (flag, flags[flag])
    ]
    if not any(word.lstrip("+") in ("resume=auto", "trainer.resume=auto") for word in overrides):
        (folder / RESULT).unlink(missing_ok=True)  # a job that goes on, or has nothing left to do, wants to know
    print(f"\nJob {hydra.job.num}: {' '.join(shown(overrides))}", flush=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", *own(overrides), *ours, *placement, *places],
        cwd=hydra.runtime.cwd,
        env=clean_environment(os.environ),
    )
    try:
        with _passed_on(process) as received:
            process.wait()
    except KeyboardInterrupt:
        process.wait()  # the terminal has interrupted the job too
        raise
    finally:
        result = _finish(folder, hydra.job.num, overrides, process.returncode)
    if received:
        raise SystemExit(128 + received[-1])
    return value_of(result)


@contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """While a job runs, pass on to it the signals that end a run, after it has saved. Yields those that come."""
    received: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        received.append(number)
        process.send_signal(number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # of a launcher's; there are no signals
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _as_written(overrides: Any) -> list[str]:
    words = OmegaConf.to_container(overrides, resolve=False)
    assert isinstance(words, list)
    return words


def _finish(folder: Path, number: int, overrides: list[str], status: int | None) -> dict[str, Any]:
    """Complete the job's result, or write one for a job that could not."""
    file = folder / RESULT
    result: dict[str, Any] = {"status": "failed", "metrics": {}, "run_dir": str(folder)}
    if file.is_file():
        result = json.loads(file.read_text(encoding="utf-8"))
    if status != 0 and result["status"] == "completed":
        result["status"] = "failed"
    if status != 0 and "error" not in result:
        result["error"] = f"ended by signal {-status}" if status is not None and status < 0 else f"exit status {status}"
    result |= {"job": number, "overrides": overrides, "exit_status": status}
    write_result(folder, result)
    return result


def shown(overrides: Sequence[str]) -> list[str]:
    """The overrides a person wants to see."""
    return [override for override in overrides if not override.startswith("command=")]


def read_results(folder: Path, since: float = 0.0) -> list[dict[str, Any]]:
    """What the jobs of the sweep in ``folder`` left, in their order, but for those that ended before ``since``."""
    files = [file for file in folder.rglob(RESULT) if file.stat().st_mtime >= since]
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return sorted((result for result in results if "job" in result), key=lambda result: result["job"])


def report(folder: Path, since: float = 0.0) -> int:
    """Print the table of the sweep in ``folder``; write it to ``summary.md`` and the numbers to
    ``summary.json``.

    Args:
        folder: of the sweep; the jobs have theirs in it.
        since: a time (of `time.time`); jobs that ended before it are an earlier sweep's and left out.

    Returns:
        How many jobs did not complete.
    """
    results = read_results(folder, since)
    if not results:
        return 0
    winner = best(results)
    for result in results:
        result["best"] = result is winner
    (folder / "summary.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    header, rows = _rows(results, folder)
    said = _best(results)
    text = f"{markdown_table(header, rows)}\n" + (f"\n{said}\n" if said else "")
    (folder / "summary.md").write_text(text, encoding="utf-8")
    _print(header, rows, results, folder)
    return sum(result["status"] not in ENDED_WELL for result in results)


def _rows(results: list[dict[str, Any]], folder: Path) -> tuple[list[str], list[list[str]]]:
    common = _common(results)
    metrics = _metrics(results)
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
    for result in results:
        own = [override for override in shown(result["overrides"]) if override not in common]
        values = result["metrics"]
        rows.append(
            [
                f"{result['job']}{' (best)' if result['best'] else ''}",
                " ".join(own),
                result["status"],
                _number(result.get("epochs")),
                f"{result['seconds']:.1f} s" if "seconds" in result else "-",
                *(f"{values[name]:.4g}" if name in values else "-" for name in metrics),
                _number(result.get("skipped_steps")),
                _number(result.get("scale")),
                " ".join(f"{size / 2**20:,.0f} MiB" for size in result.get("peak_memory", {}).values()) or "-",
                os.path.relpath(result["run_dir"], folder),
            ]
        )
    return header, rows


def _common(results: list[dict[str, Any]]) -> set[str]:
    """The overrides that all jobs have."""
    return set.intersection(*(set(result["overrides"]) for result in results)) if len(results) > 1 else set()


def _best(results: list[dict[str, Any]]) -> str:
    """A sentence on the best job; empty where there is none."""
    for result in results:
        if result["best"]:
            objective, common = result["objective"], _common(results)
            own = " ".join(word for word in shown(result["overrides"]) if word not in common)
            way = "lowest" if objective["mode"] == "min" else "highest"
            what = f"{objective['metric']} {objective['value']:.4g}, the {way}"
            return f"Best: job {result['job']}, with {what}{f': {own}' if own else ''}"
    return ""


def _metrics(results: list[dict[str, Any]], most: int = 4) -> list[str]:
    """The metrics worth a column: the objective, and those of validation and test, or all where there are none."""
    names = sorted({name for result in results for name in result["metrics"]})
    objectives = {objective["metric"] for result in results if (objective := result.get("objective"))}
    evaluated = [name for name in names if name.startswith(("val", "test"))]
    whole = [name for name in evaluated or names if not name.endswith(("_step", "_epoch"))]
    others = [name for name in whole or evaluated or names if name not in objectives]
    return [*(name for name in names if name in objectives), *others][:most]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _print(header: list[str], rows: list[list[str]], results: list[dict[str, Any]], folder: Path) -> None:
    jobs = "1 job" if len(rows) == 1 else f"{len(rows)} jobs"
    narrow = [[cells[0], cells[1].replace(" ", "\n"), *cells[2:]] for cells in rows]
    console = print_table(f"Sweep of {jobs}", header, narrow, left=("overrides", "status", "run dir"))
    if said := _best(results):
        console.print(said, style="bold green", soft_wrap=True, markup=False, highlight=False)
    for result in results:
        if "error" in result:
            console.print(f"Job {result['job']} {result['status']}: {result['error']}", markup=False, highlight=False)
    console.print(f"Everything is in {folder}", soft_wrap=True, markup=False, highlight=False)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str]) -> Console:
    """Print a table; rows in which something failed or was interrupted are red, those of pruned jobs dim.

    The row of the best job, whose first cell says so, is bold.

    Args:
        title: above the table.
        header: the columns' names.
        rows: their cells.
        left: names of the columns that are aligned to the left.

    Returns:
        The console it went to, for more.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    for name in header:
        table.add_column(Text(name), justify="left" if name in left else "right", overflow="fold")
    for cells in rows:
        table.add_row(*map(Text, cells), style=_style(cells))
    console.print(table)
    return console


def _style(cells: Sequence[str]) -> str | None:
    if "failed" in cells or "interrupted" in cells:
        return "red"
    if "pruned" in cells:
        return "dim"
    return "bold green" if cells[0].endswith("(best)") else None
