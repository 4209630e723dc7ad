"""Save and restore the state of the loss scaler."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback, LightningModule

from trainer.errors import rank_zero_warn
from trainer.loop.run_state import state_of

KEY = "MixedPrecision"
"""Lightning's key (the class name of its precision plugin), so that each Trainer restores the other's state."""


class ScalerCheckpoint(Callback):
    """Saves the scale and the growth tracker in every checkpoint, and restores them.

    A default callback. The settings (factors, interval, floor and ceiling) are saved for reference only; a resumed run
    uses its current ones. A warning is issued if this run scales the loss and the checkpoint has no scaler state, or if
    this run does not scale the loss and the checkpoint has a state. In the second case, the state is copied to this
    run's checkpoints, for a later run with loss scaling.
    """

    def __init__(self) -> None:
        self._unused: dict[str, Any] = {}

    def setup(self, trainer: pl.Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop the state that an earlier fit has loaded."""
        if stage == "fit":
            self._unused = {}

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the scaler's state. Checkpoints are saved between updates, so it is complete."""
        state = state_of(trainer).scaler.state_dict() or self._unused
        if state:
            checkpoint[KEY] = state

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the state, or warn if it is missing or unused. Evaluating a checkpoint does not change the scaler."""
        if not trainer.training:
            return
        # by its contents, because other versions and strategies of Lightning use other keys
        states = (value for value in checkpoint.values() if isinstance(value, dict) and "_growth_tracker" in value)
        state = next(states, None)
        scaler = state_of(trainer).scaler
        enabled = scaler.is_enabled()
        self._unused = dict(state) if state and not enabled else {}
        if state and enabled:
            scaler.load_state_dict(state)
        elif enabled:
            rank_zero_warn(
                "The checkpoint has no loss-scaler state (it was saved by a run without loss scaling), but"
                f" precision={trainer.precision!r} scales the loss. The scale starts again at"
                f" {scaler.current_scale:g}; a few steps may be skipped until it has settled."
            )
        elif state:
            rank_zero_warn(
                f"The checkpoint has a loss-scaler state (scale {state['scale']:g}), but"
                f" precision={trainer.precision!r} does not scale the loss. The state is not used, but it is kept"
                " in the checkpoints for a run that scales the loss again."
            )
