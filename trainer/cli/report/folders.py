"""Which folder is a run, which a sweep, and which one is meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from trainer.cli.arguments import UsageError
from trainer.record.reader import changed as written
from trainer.record.run_file import RUN, of_older_version, read

_OF_A_RUN = (RUN, "metrics.csv", "csv/metrics.csv", ".hydra/config.yaml")
_OF_A_SWEEP = ("multirun.yaml", "summary.md", "compare.json", "optimization_results.yaml")
_TOPS = ("outputs", "multirun", "lightning_logs")
_DEPTH = 4
"""Levels below a folder that runs are looked for in: outputs/RECIPE/DATE_TIME, and a name with a slash or two."""


def is_sweep(folder: Path) -> bool:
    """Whether ``folder`` holds the jobs of one sweep, or comparison."""
    if any((folder / name).is_file() for name in _OF_A_SWEEP):
        return True
    return any("job" in read(child) for child in _children(folder))


def is_run(folder: Path) -> bool:
    """Whether ``folder`` is what one run has left, or is writing into."""
    return any((folder / name).is_file() for name in _OF_A_RUN)


def jobs_of(sweep: Path) -> list[Path]:
    """The folders of a sweep's jobs."""
    return [folder for child in _children(sweep) for folder in _found(child, _DEPTH, is_run)]


def chosen(given: str | None) -> Path:
    """The folder of the run or the sweep that is meant.

    Args:
        given: on the command line; None for the newest below ``outputs``, ``multirun`` and ``lightning_logs``.

    Raises:
        UsageError: there is no such folder, it is neither, or it holds several.
    """
    if given is None:
        found = [folder for top in _TOPS for folder in below(Path(top))]
        if not found:
            raise UsageError(
                "Got no folder, and there is no run below outputs/, multirun/ or lightning_logs/ here. Write"
                " `python -m trainer report RUN_DIR`, or train first: `python -m trainer fit +recipe=resnet50`."
            )
        return _readable(max(found, key=changed))
    folder = Path(given)
    if not folder.exists():
        raise UsageError(f"There is no folder {given}.{_near(folder)}")
    if not folder.is_dir():
        raise UsageError(f"{given} is a file, expected the folder of a run.{_near(folder)}")
    if is_sweep(folder) or is_run(folder):
        return _readable(folder)
    found = below(folder)
    if not found:
        raise UsageError(
            f"{given} is not the folder of a run or a sweep. A run's folder has a {RUN} or a metrics.csv in it."
            f"{_near(folder)}"
        )
    if len(found) == 1:
        return _readable(found[0])
    raise UsageError(f"{given} holds {len(found)} runs and sweeps, expected one. The newest:{_list(found)}")


def _readable(folder: Path) -> Path:
    """``folder``, of a run or a sweep, if it is of this version.

    Raises:
        UsageError: an older version has written it, or a job in it.
    """
    for place in (folder, *_children(folder)):
        if said := of_older_version(place):
            raise UsageError(said)
    return folder


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
    return f" There are:{_list(found)}" if found else ""


def _list(folders: list[Path], most: int = 5) -> str:
    newest = sorted(folders, key=changed, reverse=True)[:most]
    return "".join(f"\n  python -m trainer report {folder}" for folder in newest)
