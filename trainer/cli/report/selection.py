"""Find the folders of runs and sweeps for a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.cli.parsing import UsageError
from trainer.common.terminal import command_line
from trainer.record.run_record import RUN, RunRecord, read_json

_RUN_FILES = (RUN, "metrics.csv", "csv/metrics.csv", ".hydra/config.yaml")
_SWEEP_FILES = ("multirun.yaml", "summary.md", "compare.json", "optimization_results.yaml")
_TOPS = ("outputs", "multirun", "lightning_logs")
_DEPTH = 4
"""Number of levels to search below a folder: outputs/NAME/DATE_TIME, with up to two slashes in NAME."""


def is_sweep(folder: Path) -> bool:
    """Return whether ``folder`` contains the jobs of a sweep or comparison."""
    if any((folder / name).is_file() for name in _SWEEP_FILES):
        return True
    return any("job" in read_json(child) for child in _children(folder))


def is_run(folder: Path) -> bool:
    """Return whether ``folder`` is the folder of a run, which may still be running."""
    return any((folder / name).is_file() for name in _RUN_FILES)


def jobs_of(sweep: Path) -> list[Path]:
    """Return the folders of a sweep's jobs."""
    return [folder for child in _children(sweep) for folder in _find_runs(child, _DEPTH, is_run)]


class ReportSubject(NamedTuple):
    """The subject of a report.

    Args:
        kind: ``"run"``, ``"sweep"``, or ``"runs"`` for several independent runs.
        folder: folder of the run or the sweep; for several runs the given folder, or the working directory.
        runs: folders of the runs in the given order.
        left_out: messages about folders that are not on the page.
    """

    kind: str
    folder: Path
    runs: Sequence[Path]
    left_out: Sequence[str] = ()


def choose_subject(given: Sequence[str]) -> ReportSubject:
    """Return the runs or the sweep in the given folders.

    Args:
        given: folders of runs and sweeps, or folders that contain them. If empty, the newest fit or sweep in
            ``outputs``, ``multirun`` and ``lightning_logs`` is returned, or the newest run if there is no fit.

    Raises:
        UsageError: if there is no run in any of them.
    """
    folders: list[Path] = []
    problems: list[str] = []
    if not given:
        candidates = [folder for top in _TOPS for folder in below(Path(top))]
        if not candidates:
            train = command_line("fit", "+recipe=NAME")
            raise UsageError(f"Got no folder, and there is no run in {', '.join(_TOPS)}. Train first: `{train}`.")
        fits = [folder for folder in candidates if is_sweep(folder) or read_json(folder).get("command", "fit") == "fit"]
        folders = [max(fits or candidates, key=lambda folder: RunRecord({}, folder).changed)]
    for name in given:
        folders += (named := below(Path(name)))
        if not named:
            expected = f"the folder of a run contains {RUN}, which RunRecorder writes, or metrics.csv"
            problems.append(f"{name} is not the folder of a run or a sweep: {expected}.")
    folders = list({folder.resolve(): folder for folder in folders}.values())
    if not folders:
        raise UsageError("\n".join(problems))
    runs = [run for folder in folders for run in (jobs_of(folder) if is_sweep(folder) else [folder])]
    if len(folders) > 1 or problems:
        runs = list({run.resolve(): run for run in runs}.values())  # the words may name a sweep and one of its jobs
        return ReportSubject("runs", Path(given[0]) if len(given) == 1 else Path(), runs, problems)
    return ReportSubject("sweep" if is_sweep(folders[0]) else "run", folders[0], runs)


def below(folder: Path) -> list[Path]:
    """Return ``folder`` if it is a run or a sweep, or else the runs and sweeps below it, without the jobs of sweeps."""
    return _find_runs(folder, _DEPTH, lambda place: is_sweep(place) or is_run(place)) if folder.is_dir() else []


def _find_runs(folder: Path, depth: int, wanted: Callable[[Path], bool]) -> list[Path]:
    if wanted(folder):
        return [folder]
    return [each for child in _children(folder) for each in _find_runs(child, depth - 1, wanted)] if depth else []


def _children(folder: Path) -> Iterator[Path]:
    try:
        children = sorted(folder.iterdir())
    except OSError:
        return
    yield from (child for child in children if child.is_dir() and not child.name.startswith("."))
