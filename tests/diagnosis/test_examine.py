import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.layers import Amplifier, Huge, sequential
from tests.diagnosis.test_recording import Recording
from tests.support import Regression, loader_of, make_batches, make_net, make_trainer, native_fp16
from trainer.diagnosis.examine import examine, largest_power
from trainer.diagnosis.replay import UNCHANGED, Variant


def examined(folder, module, batches, scale=2.0**16, window=1, variant=UNCHANGED):
    """The finding on the first window of a fit, looked into right after its update."""
    findings = []

    class Examine(Recording):
        def on_after_optimizer_step(self, trainer, pl_module, optimizer, outcome):
            findings.append(examine(trainer.run_state, self.recorder.closed, scale, variant))

    arguments = {"precision": native_fp16(init_scale=scale), "accumulate_grad_batches": window}
    make_trainer(folder, max_steps=1, callbacks=[Examine()], **arguments).fit(module, loader_of(batches))
    return findings[0]


@pytest.mark.parametrize("largest", [2.0**-127, 1024.0, 2.0**127, 0.0])
def test_largest_power_is_found_in_eight_tries(largest):
    tries = []

    def fits(scale):
        tries.append(scale)
        return scale <= largest

    assert largest_power(fits) == largest
    assert len(tries) == 8


def by_hand(net, batch, scale):
    """Return whether all gradients are finite at this scale, with a hand-written loop."""
    x, y, gain = batch
    net.zero_grad()
    torch.manual_seed(7)
    with torch.autocast("cpu", torch.float16):
        loss = F.mse_loss(net(x), y) * gain
    (loss * scale).backward()
    return all(p.grad.isfinite().all() for p in net.parameters())


def test_largest_scale_equals_that_of_an_exhaustive_search(tmp_path):
    net = make_net()
    batch = make_batches(1, gains={0: 50.0})[0]
    expected = max(e for e in range(-20, 40) if by_hand(net, batch, 2.0**e))
    assert not by_hand(net, batch, 2.0 ** (expected + 1))
    net.zero_grad()
    finding = examined(tmp_path, Regression(net), [batch], scale=2.0**24)
    assert (finding.fails, finding.scale, finding.largest_scale) == (True, 2.0**24, 2.0**expected)
    assert finding.origin is not None


def test_step_that_does_not_fail(tmp_path):
    finding = examined(tmp_path, Regression(), make_batches(1), scale=1.0)
    assert not finding.fails
    assert (finding.origin, finding.parameters) == (None, [])
    assert 1.0 < finding.largest_scale < 2.0**40
    assert math.isfinite(finding.loss)


def test_scale_with_vanishing_gradients_does_not_fit(tmp_path):
    thrice = nn.Sequential(*(Amplifier(6e4) for _ in range(3)))  # 2e14: even the smallest float16 overflows
    finding = examined(tmp_path, Regression(sequential(thrice, 5)), make_batches(1))
    assert (finding.fails, finding.largest_scale) == (True, 0.0)


def test_batch_of_a_window_that_fails(tmp_path):
    finding = examined(tmp_path, Regression(), make_batches(3, gains={1: 1e30}), window=3)
    assert (finding.batch_idx, finding.position, finding.window) == (1, 1, 3)
    assert finding.fails
    assert finding.loss > 1e28 / 3


def test_window_with_divided_losses(tmp_path):
    """At a scale that overflows with undivided losses, four batches with a quarter each do not."""
    batches = make_batches(4)
    alone = examined(tmp_path, Regression(), batches[:1], scale=1.0).largest_scale
    together = examined(tmp_path, Regression(), batches[:1] * 4, scale=1.0, window=4).largest_scale
    assert together == 4 * alone


def test_values_that_were_not_finite_before(tmp_path):
    (batch,) = make_batches(1, gains={0: math.nan})
    batch[0][0, 0] = math.nan
    module = Regression(sequential())
    with torch.no_grad():
        module.net[4].bias[0] = math.nan
    finding = examined(tmp_path, module, [batch])
    assert finding.broken_batch == {"batch[0]": [0], "batch[2]": [0, 1, 2, 3]}  # a value without samples is of all
    assert finding.broken_weights == ["net.4.bias"]


class OwnLoss(Regression):
    """A loss in float16 on a CPU, with an infinite gradient at a scale of 65536; in float32 on CUDA."""

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1].half()).pow(2).mean() / 16


def overflowing():
    return Regression(sequential(Huge(), 3))


@pytest.mark.parametrize(
    ("make", "value", "variant", "fails"),
    [
        (Regression, math.inf, Variant(), True),
        (Regression, math.inf, Variant(dtype=torch.float32), True),  # the batch itself has an inf
        (Regression, math.inf, Variant(without=(1,)), False),
        (Regression, math.inf, Variant(without=tuple(range(8))), False),  # zeros in their place
        (overflowing, 1.0, Variant(torch.bfloat16), False),
        (overflowing, 1.0, Variant(modules=("net",)), False),
        (OwnLoss, 1.0, Variant(), True),
        (OwnLoss, 1.0, Variant(cuda=True), False),
    ],
)
def test_replays(tmp_path, make, value, variant, fails):
    """Without samples, in another precision, and with the operations of CUDA."""
    (batch,) = make_batches(1)
    batch[0][1, 2] = value
    finding = examined(tmp_path, make(), [batch], scale=2.0**16 if make is OwnLoss else 1.0, variant=variant)
    assert (finding.fails, math.isfinite(finding.loss)) == (fails, make is OwnLoss or not fails)


def test_sparse_gradients(tmp_path):
    class Words(Regression):
        def __init__(self):
            super().__init__(nn.Embedding(5, 3, sparse=True))

        def training_step(self, batch, batch_idx):
            return (self.net(torch.tensor([1, 1, 2])) * 1e30).sum()

    finding = examined(tmp_path, Words(), make_batches(1), scale=2.0**40)
    assert finding.parameters == ["net.weight"]
    assert finding.largest_scale == 2.0 ** math.floor(math.log2(torch.finfo(torch.float32).max / 2e30))
