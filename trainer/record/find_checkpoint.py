"""Which checkpoint of a run is meant where its folder is named. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from trainer.checkpoint.sharded_files import MANIFEST
from trainer.errors import ConfigurationError, did_you_mean
from trainer.record.run_record import load_run, of_older_version
from trainer.record.sweep import load_sweep


def is_checkpoint_folder(path: Path) -> bool:
    """Whether a run has written the folder as a checkpoint."""
    return (path / MANIFEST).is_file()


def find(path: Path, *, latest: bool = False, key: str = "ckpt") -> Path:
    """Return the checkpoint that ``path`` names: itself, or the best one of a run, else its last one.

    Args:
        path: a checkpoint, or a folder of a run, of a sweep (its best job) or of checkpoints.
        latest: prefer the last one, to resume from. A sweep has none.
        key: the setting with ``path``, for messages.

    Raises:
        ConfigurationError: there is no checkpoint.
    """
    if path.is_file() or is_checkpoint_folder(path):
        return path
    if not path.is_dir():
        beside = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigurationError(
            f"{key} is {path}: there is no such file or folder.{did_you_mean(path.name, beside)} Expected a checkpoint,"
            " or the folder of a run, such as outputs/RECIPE/DATE_TIME."
        )
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    files = sorted(folder.glob("*.ckpt"), key=lambda file: file.stat().st_mtime)
    last = [file for file in files if file.stem.partition("-v")[0] == "last"]
    others = [file for file in files if file not in last]
    if latest and last:
        return last[-1]
    if best := _best(path, others, key):
        return best
    if not files:
        if not latest and (job := load_sweep(path).best) is not None:
            return find(job.folder, key=key)
        raise ConfigurationError(f"{key} is {path}, a folder without checkpoints.{_runs_in(path, key)}")
    return (last or files)[-1]


def find_weights(path: str | Path) -> Path:
    """What ``weights`` names: a file of any kind, or else as by :func:`find`.

    Raises:
        ConfigurationError: there is none.
    """
    if "://" in str(path):
        raise ConfigurationError(f"weights is {path}, expected a file or folder of this machine. Fetch it first.")
    return find(Path(path).expanduser(), key="weights")


def _best(run: Path, files: list[Path], key: str) -> Path | None:
    """Of ``files`` the one that the run's record calls the best; where it has none, the only one."""
    name = load_run(run).best_checkpoint
    if name is None:
        if len(files) > 1 and (said := of_older_version(run)):
            raise ConfigurationError(
                f"{said} Which checkpoint is the best is not known: name one, such as {key}={files[-1]}"
            )
        return files[0] if len(files) == 1 else None
    return next((file for file in files if file.name == name), None)


def _runs_in(folder: Path, key: str) -> str:
    """A hint where ``folder`` holds runs, as that of a sweep does."""
    runs = sorted(one.parent.parent for one in folder.glob("*/.hydra/config.yaml"))
    if not runs:
        return ""
    return f" It has {len(runs)} runs in it: name one, such as {key}={runs[-1]}"
