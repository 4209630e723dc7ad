"""A step with a late outcome is bitwise equal to the hand-written loop."""

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim.lr_scheduler import LambdaLR

from tests.support import (
    OPTIMIZERS,
    Regression,
    loader_of,
    make_batches,
    make_net,
    make_trainer,
    norm_of,
    train_by_hand,
)
from trainer.precision import MixedPrecision

INF = float("inf")
CLIP = 0.05
INIT_SCALE = 2.0**10  # at torch's default the net's first gradients overflow by themselves


class Recorder(Callback):
    """Records the outcome of each step, and the order of events.

    Args:
        asks: read the outcome at the end of each batch, which completes the step.
    """

    def __init__(self, asks=False):
        self.asks = asks
        self.outcomes = []
        self.weights = []
        self.order = []
        self.rates_after_asking = []

    def on_after_backward(self, trainer, module):
        self.order.append("backward")

    def on_after_optimizer_step(self, trainer, module, optimizer, outcome):
        self.order.append("outcome")
        self.outcomes.append(outcome)
        self.weights.append([p.detach().clone() for p in module.net.parameters()])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.asks:
            if self.order.count("step"):
                assert trainer.step_outcome is self.outcomes[-1]
            self.rates_after_asking.append(trainer.optimizers[0].param_groups[0]["lr"])


def recording(make, rates, order=None):
    """Return ``make`` for an optimizer that records the learning rate of each step."""

    def build(parameters):
        optimizer = make(parameters)

        def note(stepping, args, kwargs):
            rates.append(stepping.param_groups[0]["lr"])
            if order is not None:
                order.append("step")

        optimizer.register_step_pre_hook(note)
        return optimizer

    return build


def decay(optimizer):
    return LambdaLR(optimizer, lambda step: 0.8**step)


def on_cuda(batches):
    return [[part.cuda() for part in batch] for batch in batches]


def fit(folder, optimizer, batches, recorder, rates, **more):
    trainer = make_trainer(
        folder,
        accelerator="gpu",
        devices=1,
        precision=MixedPrecision("float16", init_scale=INIT_SCALE, growth_interval=3),
        callbacks=[recorder],
        **more,
    )
    make = recording(OPTIMIZERS[optimizer], rates, recorder.order)
    trainer.fit(Regression(make_net(), make, decay, interval="step"), loader_of(on_cuda(batches)))
    return trainer


@pytest.mark.gpu
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("optimizer", ["momentum-fused", "adamw-fused", "adamw"])
def test_equals_the_hand_written_loop(tmp_path, optimizer, window, asks):
    batches = make_batches(9, gains={3: INF, 4: INF, 8: INF})  # the epoch's last, alone in its window, too
    recorder, rates, rates_by_hand = Recorder(asks), [], []
    trainer = fit(
        tmp_path, optimizer, batches, recorder, rates,
        max_epochs=2, accumulate_grad_batches=window, gradient_clip_val=CLIP,
    )  # fmt: skip
    net = make_net().to("cuda")
    scaler = torch.amp.GradScaler("cuda", INIT_SCALE, growth_interval=3)
    by_hand = train_by_hand(
        net, on_cuda(batches), precision="16-mixed", optimizer=recording(OPTIMIZERS[optimizer], rates_by_hand),
        scaler=scaler, epochs=2, window=window, clip=norm_of(CLIP), schedule=decay,
    )  # fmt: skip
    assert [o.skipped for o in recorder.outcomes] == by_hand.skipped
    assert sum(by_hand.skipped) == 2 * 3
    assert [o.scale for o in recorder.outcomes] == by_hand.scales
    assert [o.next_scale for o in recorder.outcomes] == by_hand.next_scales
    assert len(set(by_hand.scales)) > 3  # it fell and grew
    torch.testing.assert_close(
        [o.grad_norm.item() for o in recorder.outcomes], by_hand.norms, rtol=0, atol=0, equal_nan=True
    )
    assert rates == rates_by_hand
    last = len(batches) - 1
    closing = [i % len(batches) in (last, *range(window - 1, last, window)) for i in range(2 * len(batches))]
    after_updates = [weights for weights, closes in zip(by_hand.weights, closing, strict=True) if closes]
    assert len(recorder.weights) == len(after_updates)
    for update, (ours, theirs) in enumerate(zip(recorder.weights, after_updates, strict=True)):
        assert all(map(torch.equal, ours, theirs)), f"weights differ after update {update}"
    for ours, theirs in zip(trainer.lightning_module.net.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())
    assert trainer.scaler.get_scale() == scaler.get_scale()
    assert trainer.scaler._get_growth_tracker() == scaler._get_growth_tracker()
    assert trainer.skipped_steps == sum(by_hand.skipped)
    if asks:
        assert recorder.rates_after_asking == by_hand.rates


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["momentum-fused", "adamw-fused"])
def test_overflow_at_the_very_first_step_leaves_no_trace(tmp_path, optimizer):
    batches = make_batches(6, gains={0: INF})
    poison = [torch.full_like(p, torch.nan, device="cuda") for p in make_net().parameters() for _ in range(8)]
    del poison  # uninitialized allocations from here on are likely to contain NaN
    recorder, rates, rates_by_hand = Recorder(), [], []
    fit(tmp_path, optimizer, batches, recorder, rates)
    net = make_net().to("cuda")
    by_hand = train_by_hand(
        net, on_cuda(batches[1:]), precision="16-mixed", schedule=decay,
        optimizer=recording(OPTIMIZERS[optimizer], rates_by_hand),
        scaler=torch.amp.GradScaler("cuda", INIT_SCALE / 2, growth_interval=3),
    )  # fmt: skip
    assert [o.skipped for o in recorder.outcomes] == [True, *[False] * 5]
    assert rates[1:] == rates_by_hand
    for ours, theirs in zip(recorder.weights[1:], by_hand.weights, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.gpu
def test_outcome_arrives_between_the_next_backward_and_step(tmp_path):
    recorder = Recorder()
    fit(tmp_path, "adamw-fused", make_batches(3), recorder, [], max_epochs=2)
    epoch = ["backward", "step", "backward", "outcome", "step", "backward", "outcome", "step", "outcome"]
    assert recorder.order == 2 * epoch
