"""Anomaly detection (``Trainer(detect_anomaly=True)``) with loss scaling."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from trainer.common.run_callback import RunCallback, refuse_other_trainers
from trainer.diagnosis.recording import Recorder
from trainer.diagnosis.replay import backward, refuse_drawn_batches, replay
from trainer.loop.run_state import state_of
from trainer.state.outcome import StepOutcome

_SCALE = 2.0**-100
"""Loss scale of the replay: no gradient of a float32 loss can overflow in float16 with it."""


class AnomalyDetection(RunCallback):
    """Raise if a backward pass computes NaN, with the traceback of the forward operation; ignore overflows.

    Torch's anomaly mode cannot be used with loss scaling: the first overflow, which is normal, would end the run
    (Lightning #9799). Therefore each skipped step is replayed in that mode with the same random numbers and with a
    loss scale so small that no gradient can overflow. A NaN in this replay is an anomaly.

    ``Trainer(detect_anomaly=True)`` adds this callback if the loss is scaled; otherwise, it enables torch's mode. The
    callback stores a copy of the buffers and random states with each batch.

    Raises:
        RuntimeError: torch's error, during a fit.
    """

    unsupported_with: ClassVar = {
        "deepspeed": "inspects the gradients of skipped steps, which DeepSpeed does not expose."
    }
    reset_in_copies: ClassVar = {"_recorder": None}

    def __init__(self) -> None:
        self._recorder: Recorder | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Start to record batches."""
        refuse_other_trainers(self, trainer)
        run = state_of(trainer)
        refuse_drawn_batches(run, "detect_anomaly=True with loss scaling")
        self._recorder = Recorder(run)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Assign the recorded batches to this step."""
        if self._recorder is not None:
            self._recorder.close()

    def on_after_optimizer_step(
        self, trainer: pl.Trainer, pl_module: LightningModule, optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Replay a step that was skipped."""
        if self._recorder is None or optimizer is not trainer.optimizers[outcome.optimizers[0]]:
            return
        batches = self._recorder.closed
        if outcome.skipped:
            with torch.autograd.set_detect_anomaly(True):
                deque(replay(state_of(trainer), batches, _backward), maxlen=0)

    def _clean_up(self, trainer: pl.Trainer) -> None:
        """Drop the recorded batches."""
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder = None


def _backward(loss: Tensor, parameters: Mapping[str, Tensor]) -> None:
    backward(loss, _SCALE, parameters, lambda gradient: None)
