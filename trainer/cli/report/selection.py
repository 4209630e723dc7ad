"""Which folder is a run, which a sweep, and which ones are meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.cli.arguments import UsageError
from trainer.cli.keys import example_recipe
from trainer.record.run_record import RUN, of_older_version, read_json
from trainer.record.run_record import changed as written
from trainer.terminal import command_line

_OF_A_RUN = (RUN, "metrics.csv", "csv/metrics.csv", ".hydra/config.yaml")
_OF_A_SWEEP = ("multirun.yaml", "summary.md", "compare.json", "optimization_results.yaml")
_TOPS = ("outputs", "multirun", "lightning_logs")
_MOST_NEAR = 5
_DEPTH = 4
"""Levels below a folder that runs are looked for in: outputs/RECIPE/DATE_TIME, and a name with a slash or two."""


def is_sweep(folder: Path) -> bool:
    """Whether ``folder`` holds the jobs of one sweep, or comparison."""
    if any((folder / name).is_file() for name in _OF_A_SWEEP):
        return True
    return any("job" in read_json(child) for child in _children(folder))


def is_run(folder: Path) -> bool:
    """Whether ``folder`` is what one run has left, or is writing into."""
    return any((folder / name).is_file() for name in _OF_A_RUN)


def jobs_of(sweep: Path) -> list[Path]:
    """The folders of a sweep's jobs."""
    return [folder for child in _children(sweep) for folder in _found(child, _DEPTH, is_run)]


@dataclass(frozen=True)
class Chosen:
    """What a report is about.

    Args:
        kind: ``"run"``, ``"sweep"`` or ``"runs"``: several that need not belong together.
        folder: of the run or the sweep; of several the one that was named, or the working directory.
        runs: the folders of the runs, in the order in which they were named.
        left_out: what is not on the page, and why.
    """

    kind: str
    folder: Path
    runs: Sequence[Path]
    left_out: Sequence[str] = ()


def chosen(given: Sequence[str]) -> Chosen:
    """The run, the sweep, or the runs that are meant.

    Args:
        given: folders, as on the command line: runs, sweeps, and folders that hold some. None for the newest fit or
            sweep below ``outputs``, ``multirun`` and ``lightning_logs``, or the newest run if there is no fit.

    Raises:
        UsageError: there is no run in any of them, or all are of an older version.
    """
    if not given:
        found = [folder for top in _TOPS for folder in below(Path(top))]
        if not found:
            raise UsageError(
                "Got no folder, and there is no run below outputs/, multirun/ or lightning_logs/ here. Name the folder"
                f" of a run, or train first: `{command_line('fit', f'+recipe={example_recipe()}')}`."
            )
        fits = [folder for folder in found if is_sweep(folder) or read_json(folder).get("command", "fit") == "fit"]
        return _chosen([max(fits or found, key=changed)])
    folders: list[Path] = []
    problems: list[str] = []
    for name in given:
        try:
            folders += _runs_and_sweeps(name)
        except UsageError as problem:
            problems.append(str(problem))
    folders = list({folder.resolve(): folder for folder in folders}.values())
    if not folders:
        raise UsageError("\n".join(problems))
    return _chosen(folders, problems, Path(given[0]) if len(given) == 1 else Path())


def _runs_and_sweeps(given: str) -> list[Path]:
    """What a word names: a run, a sweep, or all that are in a folder.

    Raises:
        UsageError: there is no such folder, or none in it.
    """
    folder = Path(given)
    if not folder.exists():
        raise UsageError(f"There is no folder {given}.{_near(folder)}")
    if not folder.is_dir():
        raise UsageError(f"{given} is a file, expected the folder of a run.{_near(folder)}")
    found = [folder] if of_older_version(folder) else below(folder)
    if not found:
        raise UsageError(
            f"{given} is not the folder of a run or a sweep. A run's folder contains {RUN} or metrics.csv. In Python,"
            f" Trainer(callbacks=[RunRecorder()]) writes {RUN}.{_near(folder)}"
        )
    return found


def _chosen(folders: Sequence[Path], problems: Sequence[str] = (), holder: Path | None = None) -> Chosen:
    """The report on these runs and sweeps, without what an older version has written.

    Raises:
        UsageError: an older version has written all of it.
    """
    runs, old = list[Path](), list[str]()
    for folder in folders:
        said = {place: told for place in (folder, *_children(folder)) if (told := of_older_version(place))}
        runs += [run for run in (jobs_of(folder) if is_sweep(folder) else [folder]) if run not in said]
        old += said.values()
    if old and not runs:
        raise UsageError("\n".join([*problems, *old]))
    if len(folders) > 1 or problems:
        runs = list({run.resolve(): run for run in runs}.values())  # a sweep may have been named, and a job of it
        return Chosen("runs", holder or Path(), runs, [*problems, *old])
    return Chosen("sweep" if is_sweep(folders[0]) else "run", folders[0], runs, old)


def below(folder: Path) -> list[Path]:
    """The runs and the sweeps below ``folder``; those in a sweep are part of it."""
    return _found(folder, _DEPTH, lambda place: is_sweep(place) or is_run(place)) if folder.is_dir() else []


def changed(folder: Path) -> float:
    """When something was last written into the folder of a run or a sweep, as a time (of `time.time`)."""
    names = (*_OF_A_RUN, *_OF_A_SWEEP)
    times = [written(place / name) for place in (folder, *_children(folder)) for name in names]
    return max(times, default=0.0)


def _found(folder: Path, depth: int, wanted: Callable[[Path], bool]) -> list[Path]:
    if wanted(folder):
        return [folder]
    return [each for child in _children(folder) for each in _found(child, depth - 1, wanted)] if depth else []


def _children(folder: Path) -> Iterator[Path]:
    try:
        children = sorted(folder.iterdir())
    except OSError:
        return
    yield from (child for child in children if child.is_dir() and not child.name.startswith("."))


def _near(folder: Path) -> str:
    """Runs beside the one that was asked for, or where runs usually are."""
    beside = [place for place in (folder.parent, *_children(folder.parent)) if is_sweep(place) or is_run(place)]
    found = beside or [place for top in _TOPS for place in below(Path(top))]
    newest = sorted(found, key=changed, reverse=True)[:_MOST_NEAR]
    return "".join([" There are:", *(f"\n  {command_line('report', place)}" for place in newest)]) if found else ""
