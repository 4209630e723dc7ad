"""With a fused optimizer, a steady-state step makes no host-device synchronization."""

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim.lr_scheduler import LambdaLR

from tests.support import OPTIMIZERS, Regression, loader_of, make_batches, make_trainer
from trainer.callbacks import ScaleMonitor
from trainer.precision import MixedPrecision

BATCHES, WINDOW = 300, 2
FIRST, LAST = 20, 290
"""The measured batches: after the set-up, and enough for events at every 256 logged values."""


class Logging(Regression):
    """Logs its loss, as most modules do."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        return loss


class ForbidSynchronization(Callback):
    """Make torch raise at any synchronization, from the start of a batch to the end of another."""

    def __init__(self):
        self.watched = 0
        self.is_on = False

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == FIRST:
            self.switch(True)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.watched += self.is_on
        if batch_idx == LAST:
            self.switch(False)

    def on_exception(self, trainer, module, exception):
        self.switch(False)

    def switch(self, on):
        self.is_on = on
        torch.cuda.set_sync_debug_mode("error" if on else "default")


def fit(folder, optimizer, watch):
    """16-mixed with clipping, accumulation, a schedule and ScaleMonitor, on batches that are on the device."""
    module = Logging(None, OPTIMIZERS[optimizer], lambda o: LambdaLR(o, lambda step: 0.99**step), interval="step")
    trainer = make_trainer(
        folder,
        accelerator="gpu",
        devices=1,
        precision=MixedPrecision("float16", init_scale=2.0**10),  # low enough that no step is skipped
        accumulate_grad_batches=WINDOW,
        gradient_clip_val=0.5,
        log_every_n_steps=10 * BATCHES,
        callbacks=[ScaleMonitor(), watch],
    )
    trainer.fit(module, loader_of([[part.cuda() for part in batch] for batch in make_batches(BATCHES)]))
    assert (trainer.global_step, trainer.skipped_steps) == (BATCHES // WINDOW, 0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_steady_state_step_synchronizes_nothing(tmp_path):
    watch = ForbidSynchronization()
    fit(tmp_path, "momentum-fused", watch)
    assert watch.watched == LAST - FIRST + 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_watch_sees_the_synchronization_of_a_plain_optimizer(tmp_path):
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        fit(tmp_path, "momentum", ForbidSynchronization())
