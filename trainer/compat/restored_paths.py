"""Paths that a checkpoint brings along: of files of the run that wrote it, or whatever somebody has put there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trainer import redaction
from trainer.compat.checkpoint_io import local_path
from trainer.errors import ConfigurationError


def take_note(trainer: Any) -> None:
    """After a restore: the best checkpoint, where that is in none of this run's folders, is not to be read by itself.

    Those are where ModelCheckpoints write, and where the checkpoint that was read is.
    """
    folders = [callback.dirpath for callback in trainer.checkpoint_callbacks if getattr(callback, "dirpath", None)]
    folders.append(os.path.dirname(str(trainer.ckpt_path)))
    for callback in trainer.checkpoint_callbacks:
        best = getattr(callback, "best_model_path", "")
        if best and not any(_is_inside(best, folder) for folder in folders):
            trainer.foreign_checkpoints[str(best)] = str(trainer.ckpt_path)


def refuse_foreign(trainer: Any, path: str | Path | None, fn: str) -> None:
    """Refuse to read a checkpoint that only another checkpoint has named.

    Raises:
        ConfigurationError: that is where ``path`` comes from.
    """
    origin = trainer.foreign_checkpoints.get(str(path))
    if origin is not None:
        raise ConfigurationError(
            f"The best checkpoint is {redaction.text(str(path))}, says {redaction.text(origin)}, from which this run"
            " was resumed; but that is in none of this run's folders, and a checkpoint may say anything. If it is what"
            f" you want, pass its path: `.{fn}(ckpt_path={redaction.text(str(path))!r})`."
        )


def _is_inside(path: str, folder: str) -> bool:
    place, home = local_path(path), local_path(folder)
    if place is None or home is None:
        return str(path).startswith(f"{str(folder).rstrip('/')}/") and "/../" not in str(path)
    return Path(os.path.realpath(place)).is_relative_to(os.path.realpath(home))
