"""Find the checkpoint of a run in its folder. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from trainer.checkpoint.sharded_files import MANIFEST
from trainer.common.files import from_here
from trainer.errors import ConfigurationError, did_you_mean
from trainer.record.run_record import load_run
from trainer.record.sweep_record import load_sweep

CONFIG = Path(".hydra", "config.yaml")
"""The config of a run, in its folder."""
_MAX_DEPTH = 4
"""Number of folders above a checkpoint that are searched for its run."""


def is_checkpoint_folder(path: Path) -> bool:
    """Return whether a folder is a sharded checkpoint."""
    return (path / MANIFEST).is_file()


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder and its subfolders, without the parts of sharded checkpoints."""
    return [file for file in folder.rglob("*.ckpt") if ".ckpt" not in file.relative_to(folder).parent.name]


def find(path: Path, *, latest: bool = False, key: str = "ckpt") -> Path:
    """Return the checkpoint at ``path``, or the best checkpoint of the run in that folder, otherwise its last one.

    Args:
        path: a checkpoint, or a folder of a run, of a sweep (its best job) or of checkpoints.
        latest: whether to return the newest checkpoint, for resuming. Default: False.
        key: the name of the setting, for messages.

    Raises:
        ConfigurationError: if there is no checkpoint.
    """
    if path.is_file() or is_checkpoint_folder(path):
        return path
    if not path.is_dir():
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, siblings)
        expected = "a checkpoint" if key == "ckpt_path" else "a checkpoint, or the folder of a run"
        raise ConfigurationError(f"{key} is {path}: there is no such file or folder.{hint} Expected {expected}.")
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    is_of_run = folder != path or (path / CONFIG).is_file()
    # names such as {val/loss} have a slash, and ModelCheckpoint may have another folder
    files = checkpoints_in(folder) if is_of_run else list(folder.glob("*.ckpt"))
    files.sort(key=lambda file: file.stat().st_mtime)
    last = [file for file in files if file.stem.partition("-v")[0] == "last"]
    others = [file for file in files if file not in last]
    if latest and files:  # an interruption may have written a checkpoint after last.ckpt
        return max(files, key=lambda file: (file.stat().st_mtime, file in last))
    # compared below the folder of the run, which may have been moved; without a record, the only file is the best
    name = str(load_run(path).paths.get("best_checkpoint", "")).replace("\\", "/")
    best = [file for file in others if name.endswith(f"/{file.relative_to(path).as_posix()}")]
    if best or (not name and len(others) == 1):
        return (best or others)[0]
    if not files:
        if (job := load_sweep(path).best) is not None and job.folder != path:
            return find(job.folder, latest=latest, key=key)
        raise ConfigurationError(f"{key} is {path}, a folder without checkpoints.")
    return (last or files)[-1]


def find_weights(path: str | Path) -> Path:
    """Return the file or folder for the setting ``weights``: any file, otherwise the result of :func:`find`.

    Raises:
        ConfigurationError: if it does not exist.
    """
    if "://" in str(path):
        raise ConfigurationError(f"weights is {path}, expected a file or folder of this machine. Fetch it first.")
    return find(Path(path).expanduser(), key="weights")


def run_of(checkpoint: Path) -> Path | None:
    """Return the folder of the run that wrote ``checkpoint``; None if it is not in the folder of a run."""
    for folder in checkpoint.absolute().parents[:_MAX_DEPTH]:
        if (folder / CONFIG).is_file():
            return from_here(folder)
    return None
