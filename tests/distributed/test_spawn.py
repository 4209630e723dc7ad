"""Processes that are started from inside of ``fit``: what they are sent, and what comes back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.parity import QUIET, Classifier, data
from trainer import Trainer

pytestmark = pytest.mark.slow


class Validated(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), sync_dist=True)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """A launch leaves addresses and ranks behind; the next would believe in them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def trained(strategy: str, folder: Path) -> tuple[dict[str, Tensor], float, bool]:
    best = ModelCheckpoint(folder / strategy, monitor="val_loss")
    arguments = {**QUIET, "enable_checkpointing": True, "devices": 2, "strategy": strategy, "callbacks": [best]}
    trainer = Trainer(max_epochs=1, num_sanity_val_steps=0, use_distributed_sampler=False, **arguments)
    module = Validated()
    trainer.fit(module, data(6), data(4, seed=1))
    assert trainer.state.finished
    return module.state_dict(), trainer.callback_metrics["val_loss"].item(), Path(best.best_model_path).is_file()


def test_spawned_and_forked_processes_do_what_one_does(tmp_path: Path) -> None:
    # both processes see the same batches, so two do what one does; if spawned ones shared the weights that they are
    # sent, each step would be taken twice
    alone = Trainer(max_epochs=1, num_sanity_val_steps=0, **QUIET)
    module = Validated()
    alone.fit(module, data(6), data(4, seed=1))
    for strategy in ("ddp_fork", "ddp_spawn"):
        weights, val_loss, has_checkpoint = trained(strategy, tmp_path)
        torch.testing.assert_close(weights, module.state_dict(), rtol=1e-6, atol=1e-7)
        assert val_loss == pytest.approx(alone.callback_metrics["val_loss"].item())
        assert has_checkpoint
