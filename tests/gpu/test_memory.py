"""A step needs no more GPU memory than a hand-written loop.

Measured on the simulated device by counting the bytes of all live tensors. CUDA's allocator rounds
each up to 512 bytes, and workspaces of kernels are not counted; both are equal in both loops.
"""

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from tests.gpu.test_steps import LIMIT, OPTIMIZERS, PRECISIONS, SCALE, ByHand
from tests.simulated_cuda.device import Simulated
from tests.support import Regression, loader_of, make_trainer
from trainer.cli.checks.fake_step import LiveMemory
from trainer.diagnosis.recording import Evidence
from trainer.precision import MixedPrecision

pytestmark = pytest.mark.usefixtures("no_gc")  # memory must be freed by reference counts

BATCHES = 8
FIRST = 4
"""The first measured batch: with all optimizer states, at the start of a window."""

SIZES = {"activations": (256, 16), "weights": (2, 128)}
"""Sizes with mostly activations, and with mostly weights: samples per batch, and width."""


class OnDevice(LiveMemory):
    """Counts the bytes on the simulated device."""

    def storage_of(self, tensor):
        return tensor.held.untyped_storage() if isinstance(tensor, Simulated) else None


@pytest.fixture(autouse=True)
def _keep_nothing(monkeypatch):
    """Have OverflowReport keep no batches and no weights, which it does up to 64 MiB."""
    monkeypatch.setattr(Evidence, "_record", lambda evidence, scale, loss: scale(loss))


def make_net(width):
    return nn.Sequential(
        nn.Linear(6, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width), nn.Linear(width, 3)
    )


def batches_of(samples):
    return [[torch.ones(samples, 6), torch.zeros(samples, 3), torch.tensor(1.0)]] * BATCHES


def peak_by_hand(samples, width, precision, kind, clips, window):
    with OnDevice() as living:
        loop = ByHand(make_net(width).cuda(), precision, kind, clips, window)
        for number, batch in enumerate(batches_of(samples)):
            if number == FIRST:
                living.peak = living.current
            loop.step(number, batch)
    return living.peak


class Watch(Callback):
    """Measures between two batches: from the end of the first to the end of the last."""

    def __init__(self, living):
        self.living = living
        self.peak = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == FIRST:
            self.living.peak = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.peak = self.living.peak


def peak_of_fit(folder, samples, module, precision, **options):
    if precision == "16-mixed":
        precision = MixedPrecision("float16", init_scale=SCALE)
    with OnDevice() as living:
        watch = Watch(living)
        trainer = make_trainer(
            folder, accelerator="gpu", precision=precision, log_every_n_steps=10 * BATCHES, callbacks=[watch], **options
        )
        trainer.fit(module, loader_of(batches_of(samples)))
    return watch.peak


@pytest.mark.parametrize(("clips", "window"), [(False, 1), (True, 2)], ids=["plain", "clips in windows"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_peak_memory_of_a_step_equals_a_hand_written_loop(cuda, tmp_path, precision, optimizer, clips, window):
    """Except numbers kept until they are read, four bytes each: losses (for the curve, of scaled steps) and norms."""
    clipping = {"gradient_clip_val": LIMIT} if clips else {}
    for what, logger in (("activations", False), ("weights", True)):
        samples, width = SIZES[what]
        hand = peak_by_hand(samples, width, precision, optimizer, clips, window)
        ours = peak_of_fit(
            tmp_path, samples, Regression(make_net(width), OPTIMIZERS[optimizer]), precision,
            accumulate_grad_batches=window, logger=logger, **clipping,
        )  # fmt: skip
        kept = BATCHES * (logger + (precision == "16-mixed")) + BATCHES // window * clips
        assert 0 < hand <= ours <= hand + 4 * kept, what


def test_validation_has_the_memory_for_itself(cuda, tmp_path):
    class Validates(Regression):
        now: list[int] = []

        def validation_step(self, batch, batch_idx):
            pass

        def on_validation_start(self):
            self.now.append(living.current)

    with OnDevice() as living:
        trainer = make_trainer(
            tmp_path, accelerator="gpu", num_sanity_val_steps=0, val_check_interval=BATCHES // 2, logger=False
        )
        batches = loader_of(batches_of(64))
        module = Validates(make_net(32), OPTIMIZERS["fused momentum"])
        trainer.fit(module, batches, batches)
    weights = 4 * sum(parameter.numel() for parameter in module.parameters())
    assert module.now == [2 * weights] * 2  # with the momentum
