"""Roll back to an earlier checkpoint when the loss spikes, and skip the batches since then."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from trainer.common.run_callback import RunCallback
from trainer.errors import ConfigurationError, LossSpikeError, expect, rank_zero_warn
from trainer.loop.run_state import state_of
from trainer.precision.readback import Readback


class RollBackOnLossSpike(RunCallback):
    """Roll back to the last checkpoint if the loss of an update is a spike, and skip the batches since then.

    A loss is a spike if it exceeds ``threshold`` times the median loss of the last ``window`` updates. A loss that is
    not finite is also a spike, unless its step is skipped by :class:`~trainer.callbacks.NonFiniteGuard` or a loss
    scaler. The loss of an update is the mean over its accumulation window and all processes.

    Weights, optimizers, schedules, the loss scale, random states and other callbacks are restored from the newest good
    checkpoint of this run's ModelCheckpoints before the spike, and the run continues with the next batch. This is
    bitwise equal to a run that continues from that checkpoint without those batches. ``trainer.global_step`` is that of
    the checkpoint; the counts of epochs and batches are not reset. PaLM was trained this way, by hand
    (https://arxiv.org/abs/2204.02311, section 5.1: about 100 steps back, and 200 to 500 batches skipped).

    Loggers keep the rows of the undone steps, and add new rows with the same step numbers. A schedule that monitors a
    metric ignores the validations between the checkpoint and the spike. If samples draw random numbers in the training
    process (``num_workers=0``), later samples draw from the checkpoint's random state.

    Costs an addition for each batch and about 30 microseconds on the host for each update; with several processes, also
    a collective of two numbers. On a GPU, a loss is checked one update later, without a host-device synchronization. If
    a checkpoint with non-finite weights is due before that check, the run ends without a rollback.

    Args:
        threshold: a loss is a spike if it exceeds the median by this factor; above 1. Losses must be positive.
            Default: 2.0.
        window: the number of updates in the median. No rollback happens before this many updates. Default: 100.
        margin: the smallest number of optimizer steps between the checkpoint and the spike, because a spike may begin
            before it is visible. Without ``save_top_k=-1`` there may be no checkpoint that old. Default: 0.
        max_rollbacks: the maximum number of rollbacks in a run; None for no limit. Default: 3.

    Attributes:
        rollbacks: one dict for each rollback, also in ``run.json`` and in checkpoints: ``step``, ``loss`` and
            ``median`` of the spike; the ``checkpoint`` and its step, ``to_step``; and the ``first`` and the ``last``
            skipped batch, each as ``[epoch, batch_idx]``.

    Raises:
        ConfigurationError: if a number is out of range; when a fit starts, if the Trainer has no ModelCheckpoint, or
            the module uses manual optimization.
        LossSpikeError: at the first spike after ``max_rollbacks`` rollbacks.
    """

    runs_last: ClassVar = True
    unsupported_with: ClassVar = {
        "deepspeed": "loads a checkpoint in the middle of a run, which DeepSpeed does not support."
    }
    reset_in_copies: ClassVar = {"_sum": None, "_last": None, "_readback": Readback("cpu")}

    def __init__(
        self, threshold: float = 2.0, window: int = 100, margin: int = 0, max_rollbacks: int | None = 3
    ) -> None:
        expect(threshold > 1, "a factor above 1", threshold=threshold)
        expect(window >= 1, "at least 1 update", window=window)
        expect(margin >= 0, "at least 0 optimizer steps", margin=margin)
        expect(
            max_rollbacks is None or max_rollbacks >= 0, "at least 0, or None for no limit", max_rollbacks=max_rollbacks
        )
        self.threshold, self.window = threshold, window
        self.margin, self.max_rollbacks = margin, max_rollbacks
        self.rollbacks: list[dict[str, Any]] = []
        self._losses: deque[float] = deque(maxlen=window)
        self._sum: Tensor | None = None  # of the open window
        self._step = 0  # `trainer.global_step` when the open window began
        self._readback = Readback("cpu")
        # the update that is not checked yet: its step, and the loss if it was read
        self._last: tuple[int, float | None] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Refuse fits that cannot be rolled back."""
        if not pl_module.automatic_optimization:
            raise ConfigurationError(
                "Got RollBackOnLossSpike with manual optimization, expected automatic optimization: with manual"
                " optimization, the loss of an optimizer step is unknown. Remove the callback."
            )
        if not any(isinstance(callback, ModelCheckpoint) for callback in trainer.checkpoint_callbacks):
            raise ConfigurationError(
                "Got RollBackOnLossSpike without a ModelCheckpoint, so there is no checkpoint to roll back to. Add one,"
                " such as ModelCheckpoint(every_n_train_steps=500, save_top_k=-1)."
            )
        self._readback, self._step = Readback(state_of(trainer).device.type), trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the batch's share of the loss; at the end of an update, check the loss and roll back after a spike."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if loss is not None:
            self._sum = loss.detach().float().clone() if self._sum is None else self._sum + loss.detach()
        run = state_of(trainer)
        if run.window.is_open:
            return
        total, self._sum, step, self._step = self._sum, None, self._step, trainer.global_step
        unchecked = self._read_loss()  # on a GPU, of the previous update
        engine = run.engine
        numbers: list[Any] = [] if total is None else [total]
        if engine.data_parallel_size > 1:
            numbers = engine.collectives.begin_sum(0.0 if total is None else total, float(total is not None))()
        if numbers:
            self._readback.start([torch.as_tensor(number) for number in numbers])
            self._last = step, None
            unchecked = self._read_loss() if self._readback.arrives_at_once else unchecked
        if unchecked is not None:
            self._check_spike(trainer, batch_idx, *unchecked)

    def _read_loss(self) -> tuple[int, float] | None:
        """Return the step and the loss of the update to check next, or None if there is no update or it has no loss."""
        if self._last is None:
            return None
        (step, loss), self._last = self._last, None
        if loss is None:
            total, *count = self._readback.wait()
            if count == [0.0]:
                return None
            loss = total / count[0] if count else total
        return step, loss

    def _check_spike(self, trainer: pl.Trainer, batch_idx: int, step: int, loss: float) -> None:
        """Record the loss of the update that began at ``step``, or roll back if it is a spike."""
        is_complete, is_finite = len(self._losses) == self.window, math.isfinite(loss)
        usual = median(self._losses) if is_complete else math.inf
        if not is_complete or (loss <= self.threshold * usual if is_finite else state_of(trainer).scaler.skips_steps):
            if is_finite:
                self._losses.append(loss)
            return
        size = f"more than {self.threshold:g} times {usual:.5g}," if is_finite else f"not finite; {usual:.5g} is"
        spike = f"The loss of step {step} is {loss:.5g}, {size} the median of the last {self.window} updates."
        if len(self.rollbacks) == self.max_rollbacks:
            raise LossSpikeError(
                f"{spike} The number of rollbacks has already reached the limit of"
                f" RollBackOnLossSpike(max_rollbacks={self.max_rollbacks}). Use a lower learning rate, gradient"
                " clipping, a larger limit, or an older checkpoint (margin=...)."
            )
        earlier, epoch = self.rollbacks, trainer.current_epoch
        restored = trainer.roll_back(step - self.margin)  # type: ignore[attr-defined]
        if restored is None:
            if is_finite:
                self._losses.append(loss)
            rank_zero_warn(
                f"{spike} The run continues without a rollback, because no checkpoint has at most"
                f" {step - self.margin} optimizer steps."
            )
            return
        self._step = trainer.global_step
        self.rollbacks = [
            *earlier,
            {
                "step": step, "loss": loss, "median": usual, "to_step": restored.step, "checkpoint": restored.path,
                "first": [restored.epoch, restored.batch_idx], "last": [epoch, batch_idx],
            },
        ]  # fmt: skip
        limit = "without a limit" if self.max_rollbacks is None else f"of at most {self.max_rollbacks}"
        rank_zero_warn(
            f"{spike} Rolled back to step {restored.step} ({restored.path}), and skipped the batches from batch_idx"
            f" {restored.batch_idx} of epoch {restored.epoch} to batch_idx {batch_idx} of epoch {epoch}. This is"
            f" rollback {len(self.rollbacks)} {limit}."
        )

    def run_facts(self) -> dict[str, Any]:
        """Return the entries for the record of the run."""
        return {"rollbacks": self.rollbacks} if self.rollbacks else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the losses of the window, the update that is not checked yet, and the rollbacks.

        A host-device synchronization if the loss is on a GPU.
        """
        if (last := self._read_loss()) is not None:
            self._last = last
        total = None if self._sum is None else float(self._sum)
        return {"losses": list(self._losses), "last": last, "sum": total, "rollbacks": self.rollbacks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`."""
        self._losses = deque(state_dict["losses"], maxlen=self.window)
        last, total = state_dict["last"], state_dict["sum"]
        self._last = None if last is None else (int(last[0]), float(last[1]))
        self._sum = None if total is None else torch.tensor(total)
        self.rollbacks = list(state_dict["rollbacks"])
