"""Keep the best checkpoint without a configured metric: choose the metric from the first validation."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from trainer.loop.run_state import state_of
from trainer.record.run_record import direction_of, without_step_epoch_variants

AUTO = "auto"


class BestCheckpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint; with ``monitor="auto"`` it chooses the metric from the first validation.

    Among the metrics that the validation has logged, it prefers a loss, and among several losses ``val_loss``. Without
    a loss, it chooses the first metric with a name that implies the direction (accuracy, f1, error, perplexity, ...).
    ``mode`` follows from the name. If there is no such metric, or if a checkpoint was written before the end of the
    first validation, the newest checkpoint is kept, as with ``monitor=None``; with a ``save_top_k`` above 1, all
    checkpoints are kept.

    With ``save_last=True`` the last checkpoint is written each time it is due. Lightning writes it only if the metric
    was among the best, and with ``every_n_train_steps`` only after the metric exists. A resumed run keeps the chosen
    metric. Everything else, including the arguments, is as in Lightning.
    """

    @functools.wraps(ModelCheckpoint.__init__)  # type: ignore[misc]  # configs are checked against the signature
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._chooses = self.monitor == AUTO
        self._known: dict[str, Any] = {}
        if self._chooses:
            self.monitor = None  # until the first validation has logged metrics

    @property
    def state_key(self) -> str:
        """Lightning's key. With ``monitor="auto"``, it is the same before and after the choice."""
        if not self._chooses:
            return super().state_key
        intervals = {"every_n_train_steps": self._every_n_train_steps, "every_n_epochs": self._every_n_epochs}
        return self._generate_state_key(monitor=AUTO, **intervals, train_time_interval=self._train_time_interval)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Store the metrics, to recognize those that the validation logs."""
        self._known = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Choose the metric if none is chosen yet, then save if a checkpoint is due."""
        if self._chooses and self.monitor is None and not self.best_model_path and not trainer.sanity_checking:
            metrics = trainer.callback_metrics
            self._choose(name for name, value in metrics.items() if self._known.get(name) is not value)
        super().on_validation_end(trainer, pl_module)
        if not self._should_save_on_train_epoch_end(trainer):
            self._save_last(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Save if a checkpoint is due."""
        super().on_train_epoch_end(trainer, pl_module)
        if self._should_save_on_train_epoch_end(trainer) or self._defer_save_until_validation:
            self._save_last(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return Lightning's state, and the mode."""
        return {**super().state_dict(), "mode": self.mode}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state, including the chosen metric."""
        if self._chooses and state_dict["monitor"] is not None:
            self._monitor(state_dict["monitor"], state_dict["mode"])
        super().load_state_dict(state_dict)

    def save_last_before_validation(self, trainer: pl.Trainer) -> None:
        """Write the last checkpoint if a save waits for a validation that does not follow this batch."""
        if not trainer.is_last_batch and not state_of(trainer).loop.validation_is_due():
            self._save_last(trainer)

    def _save_last(self, trainer: pl.Trainer) -> None:
        """Write the last checkpoint, unless Lightning has just written it."""
        interval, is_deferred = self._every_n_epochs, self._defer_save_until_validation
        is_due = is_deferred or (interval >= 1 and (trainer.current_epoch + 1) % interval == 0)
        if self.save_last is True and is_due and not self._should_skip_saving_checkpoint(trainer):
            saved = self._last_global_step_saved
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
            if is_deferred:
                self._last_global_step_saved = saved  # otherwise the save after the validation would skip this step

    def _choose(self, logged: Iterable[str]) -> None:
        names = [name for name in without_step_epoch_variants(logged) if direction_of(name)]
        names.sort(key=lambda name: (name != "val_loss", "loss" not in name.lower()))
        if not names:
            return
        direction = direction_of(names[0])
        assert direction is not None
        self._monitor(names[0], direction)
        rank_zero_info(
            f"The best checkpoint is the one with the {'lowest' if direction == 'min' else 'highest'} {names[0]},"
            " chosen from the metrics of the first validation (monitor='auto')."
        )

    def _monitor(self, metric: str, mode: str) -> None:
        self.monitor, self.mode = metric, mode
        self.kth_value = torch.tensor(torch.inf if mode == "min" else -torch.inf)
