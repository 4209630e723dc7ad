"""ModelCheckpoint after a resume: it has saved what it has saved, and still saves what it had put off."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.support import Regression, loader_of, make_batches, make_trainer

BATCHES = make_batches(4)


class Logs(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, batch_idx), batch_size=4)


class Killed(BaseException):
    """As good as a kill: nobody saves anything because of it."""


class Interrupts(Callback):
    """SIGTERM in the batch with this number: the run ends before the validation that may be due after it. Or a kill."""

    def __init__(self, batch: int | None, killed: int | None) -> None:
        self.batch, self.killed = batch, killed

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.progress.batches == self.killed:
            raise Killed

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.progress.batches == self.batch:
            signal.raise_signal(signal.SIGTERM)


def train(
    folder: Path, saver: ModelCheckpoint, interrupted: int | None = None, killed: int | None = None, **arguments: Any
) -> Any:
    """The steps of the files that there are in the end, by their names; None where the run was interrupted."""
    callbacks = [Interrupts(interrupted, killed), saver]
    trainer = make_trainer(folder, callbacks=callbacks, enable_checkpointing=True, resume="auto", **arguments)
    try:
        trainer.fit(Logs(optimizer=partial(torch.optim.SGD, lr=0.02)), loader_of(BATCHES), loader_of(BATCHES[:2]))
    except (SIGTERMException, Killed):
        return None
    files = {path.name: path for path in folder.rglob("*.ckpt") if path.name != "interrupted.ckpt"}
    return {name: torch.load(path, weights_only=True)["global_step"] for name, path in sorted(files.items())}


def best_two(folder: Path) -> ModelCheckpoint:
    """Due every four steps, and put off until the validation that comes then."""
    return ModelCheckpoint(folder / "kept", monitor="val_loss", save_top_k=2, every_n_train_steps=4, filename="{step}")


def test_what_waits_for_a_validation_is_saved_after_it(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"max_epochs": 3, "val_check_interval": 2}
    whole = train(tmp_path / "whole", best_two(tmp_path / "whole"), **arguments)
    assert whole == {"step=12.ckpt": 12, "step=8.ckpt": 8}
    assert train(tmp_path / "run", best_two(tmp_path / "run"), interrupted=8, **arguments) is None
    assert train(tmp_path / "run", best_two(tmp_path / "run"), **arguments) == whole


def test_no_step_is_saved_twice(tmp_path: Path) -> None:
    saver = partial(ModelCheckpoint, save_top_k=-1, every_n_train_steps=1)
    arguments: dict[str, Any] = {"accumulate_grad_batches": 3, "max_steps": 3, "max_epochs": -1}
    whole = train(tmp_path / "whole", saver(tmp_path / "whole" / "kept"), **arguments)
    assert train(tmp_path / "run", saver(tmp_path / "run" / "kept"), interrupted=5, **arguments) is None
    assert train(tmp_path / "run", saver(tmp_path / "run" / "kept"), **arguments) == whole


@pytest.mark.parametrize(("killed", "save_last"), [(7, None), (3, "link"), (7, "link"), (3, True)])
def test_there_are_no_more_files_than_without_the_kill(tmp_path: Path, killed: int, save_last: Any) -> None:
    saver = partial(ModelCheckpoint, every_n_train_steps=2, save_last=save_last)
    whole = train(tmp_path / "whole", saver(tmp_path / "whole" / "kept"), max_epochs=3)
    assert train(tmp_path / "run", saver(tmp_path / "run" / "kept"), killed=killed, max_epochs=3) is None
    assert train(tmp_path / "run", saver(tmp_path / "run" / "kept"), max_epochs=3) == whole


def test_a_checkpoint_that_was_named_is_kept(tmp_path: Path) -> None:
    train(tmp_path, ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2), max_epochs=1)
    (named,) = (tmp_path / "kept").iterdir()
    trainer = make_trainer(
        tmp_path,
        callbacks=[ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2)],
        enable_checkpointing=True,
        resume="auto",
        max_epochs=2,
    )
    module = Logs(optimizer=partial(torch.optim.SGD, lr=0.02))
    trainer.fit(module, loader_of(BATCHES), loader_of(BATCHES[:2]), ckpt_path=named)
    assert {path.name for path in (tmp_path / "kept").glob("*.ckpt")} == {named.name, "epoch=1-step=8.ckpt"}
