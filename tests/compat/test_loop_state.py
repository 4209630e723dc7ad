"""Our counters in Lightning's format, compared with Lightning's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from tests.loops.test_hooks import Scheduled
from tests.parity import Classifier, assert_agree, data


class FailedError(Exception):
    pass


class FailsInTraining(Scheduled):
    """Fails in batch ``at`` of the second epoch."""

    at = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (self.current_epoch, batch_idx) == (1, self.at):
            raise FailedError
        return super().training_step(batch, batch_idx)


class FailsInItsLastBatch(FailsInTraining):
    at = 2


class FailsInValidation(Classifier):
    """Fails in the second dataloader of the second epoch's validation."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        if (self.current_epoch, dataloader_idx, batch_idx) == (1, 1, 1):
            raise FailedError


class FailsAfterABatch(Scheduled):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (self.current_epoch, batch_idx) == (1, 1):
            raise FailedError


class FailsByHand(FailsAfterABatch):
    """Uses manual optimization."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        self.lr_schedulers().step()


def counts(fit_loop: dict[str, Any]) -> dict[str, Any]:
    """Return the counters only."""
    return {key: value for key, value in fit_loop.items() if not key.endswith("state_dict")}


@pytest.mark.parametrize(
    ("module", "accumulate"),
    [
        (FailsInTraining, 1),
        (FailsInTraining, 3),
        (FailsInItsLastBatch, 2),
        (FailsInValidation, 1),
        (FailsAfterABatch, 2),
        (FailsByHand, 1),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(previous `fit` call will be used|there is no last checkpoint)")
def test_failed_runs_checkpoint_counts_as_lightnings(module: Any, accumulate: int, tmp_path: Path) -> None:
    def scenario(make: Any) -> Any:
        folder = tmp_path / make.__name__
        trainer = make(
            max_epochs=3,
            accumulate_grad_batches=accumulate,
            val_check_interval=2,
            enable_checkpointing=True,
            callbacks=OnExceptionCheckpoint(folder),
        )
        val = [data(4), data(6, seed=1)] if module is FailsInValidation else data(4)
        with pytest.raises(FailedError):
            trainer.fit(module(), data(6), val)
        checkpoint = torch.load(folder / "on_exception.ckpt", weights_only=True)
        seen = [counts(checkpoint["loops"]["fit_loop"]), counts(trainer.fit_loop.state_dict())]
        trainer.fit_loop.load_state_dict(checkpoint["loops"]["fit_loop"])
        seen.append(counts(trainer.fit_loop.state_dict()))
        trainer.fit_loop.reset()
        trainer.fit_loop.epoch_loop.reset()
        epoch_loop = trainer.fit_loop.epoch_loop
        current = epoch_loop.batch_progress.current
        optimizer = epoch_loop.automatic_optimization.optim_progress.optimizer
        seen += [current.ready, current.completed, optimizer.step.current.ready, optimizer.zero_grad.current.completed]
        return [*seen, epoch_loop.scheduler_progress.total.completed]

    assert_agree(scenario)
