"""What Lightning's ModelCheckpoint has to know again in a run that goes on, and does not put in its state itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from trainer.checkpoint.files import EXTENSION
from trainer.checkpoint.state import OUR_KEY
from trainer.compat.checkpoint_io import local_path

_SAVERS = "savers"


def note(trainer: Any, checkpoint: dict[str, Any], path: str | Path) -> None:
    """Note in ``checkpoint``, which is about to be written to ``path``, what each ModelCheckpoint has done until then.

    That is: at which step it has saved last, so that it does not do so twice; and whether it waits for the metrics of a
    validation to save what was due before. Of the one that writes this checkpoint it is what is so once it is written.
    """
    states = {}
    for saver in _savers(trainer):
        step, waits = saver._last_global_step_saved, saver._defer_save_until_validation
        if os.fspath(path) in (saver.best_model_path, saver.last_model_path, *saver.best_k_models):
            step, waits = trainer.global_step, False
        states[saver.state_key] = {"dirpath": str(saver.dirpath), "step": step, "waits": waits}
    if states:
        checkpoint["loops"][OUR_KEY][_SAVERS] = states


def restore(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Have each ModelCheckpoint know again what ``checkpoint`` says of it; the step, where its folder is the same."""
    states = checkpoint.get("loops", {}).get(OUR_KEY, {}).get(_SAVERS, {})
    for saver in _savers(trainer):
        if (state := states.get(saver.state_key)) is None:
            continue
        saver._defer_save_until_validation = state["waits"]
        if state["dirpath"] == str(saver.dirpath):
            saver._last_global_step_saved = state["step"]
            saver.last_model_path = saver.last_model_path or _link_to(str(trainer.ckpt_path), str(saver.dirpath))


def replaceable(trainer: Any, session: ExitStack) -> None:
    """The checkpoint that the run goes on from is one of its own, and is removed in its turn, until ``session`` closes.

    ModelCheckpoint keeps it for good, as a file that somebody has named.
    """
    for saver in _savers(trainer):
        vars(saver)["_should_remove_checkpoint"] = partial(_should_remove, saver)
        session.callback(vars(saver).pop, "_should_remove_checkpoint", None)


def _should_remove(saver: ModelCheckpoint, trainer: Any, previous: str, current: str) -> bool:
    named_none: Any = SimpleNamespace(ckpt_path=None)
    return type(saver)._should_remove_checkpoint(saver, named_none, previous, current)


def _link_to(path: str, folder: str) -> str:
    """The link to ``path`` in ``folder``; "" for none. It is made (``save_last="link"``) when the file is written."""
    place = local_path(folder)
    links = [] if place is None else [one for one in place.glob(f"*{EXTENSION}") if one.is_symlink()]
    target = os.path.realpath(path)
    return next((os.path.join(folder, link.name) for link in links if os.path.realpath(link) == target), "")


def _savers(trainer: Any) -> Iterator[ModelCheckpoint]:
    return (callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint))
