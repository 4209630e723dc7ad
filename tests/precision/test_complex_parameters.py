"""Complex parameters, compared to the same network with pairs of real parameters, trained by a hand-written loop."""

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

from tests.parity import assert_same_weights
from tests.support import (
    OPTIMIZERS,
    Regression,
    fit_and_watch,
    loader_of,
    make_batches,
    make_trainer,
    norm_of,
    plugin_of,
    scaler_of,
    train_by_hand,
    value_of,
)
from trainer.callbacks import LayerNorms, NonFiniteGuard, OverflowReport, ScaleMonitor
from trainer.precision.guard import StepGuard
from trainer.precision.scaler import LossScaler

PRECISIONS = ["32-true", "bf16-mixed", "16-mixed"]


class SpectralNet(nn.Module):
    """Multiplies a Fourier transform by weights, complex ones or, if ``pairs``, pairs of real ones."""

    def __init__(self, *, pairs=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(5, 3)
        weights, bias = torch.randn(8, 5, dtype=torch.complex64) * 0.3, torch.full((5,), 0.1, dtype=torch.complex64)
        self.weights = nn.Parameter(torch.view_as_real(weights) if pairs else weights)
        self.bias = nn.Parameter(torch.view_as_real(bias) if pairs else bias)

    def forward(self, x):
        hidden = self.first(x).float()
        weights, bias = (p if p.is_complex() else torch.view_as_complex(p) for p in (self.weights, self.bias))
        with torch.autocast(x.device.type, enabled=False):
            found = torch.fft.fft(hidden) @ weights + bias
        return self.last(found.abs())


def as_pairs(net):
    return [torch.view_as_real(p) if p.is_complex() else p for p in net.parameters()]


@pytest.mark.parametrize(
    ("clip", "algorithm", "by_hand"), [(None, None, None), (0.5, "norm", norm_of(0.5)), (0.05, "value", value_of(0.05))]
)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_is_that_of_pairs_of_real_parameters(tmp_path, precision, optimizer, clip, algorithm, by_hand):
    """With overflows, accumulation and clipping. By value, real and imaginary parts are clipped separately."""
    ours, theirs, make = SpectralNet(), SpectralNet(pairs=True), OPTIMIZERS[optimizer]
    batches = make_batches(9, gains={2: 1e30, 6: float("nan")} if precision == "16-mixed" else {})
    clipping = {} if clip is None else {"gradient_clip_val": clip, "gradient_clip_algorithm": algorithm}
    module, options = Regression(ours, make), {"accumulate_grad_batches": 2, **clipping}
    trainer, trace = fit_and_watch(tmp_path, module, batches, precision=plugin_of(precision), **options)
    options = {"scaler": scaler_of(precision), "window": 2, "clip": by_hand}
    expected = train_by_hand(theirs, batches, precision=precision, optimizer=make, **options)
    assert trace.skipped == expected.skipped
    assert trace.scales == expected.scales
    assert trace.norms == pytest.approx(expected.norms, rel=1e-5, nan_ok=True)
    for mine, other in zip(as_pairs(ours), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert trainer.skipped_steps == sum(expected.skipped)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_callbacks_that_read_gradients_support_complex_ones(tmp_path, precision):
    """Monitors, reports, guards, averages and checkpoints; the weights are those of a run without them."""
    nets = []
    for callbacks in (
        [],
        [ScaleMonitor(every_n_steps=1), LayerNorms(every_n_steps=1), EMAWeightAveraging(decay=0.0)],
        [OverflowReport(at_step=2), NonFiniteGuard("skip")],
    ):
        module = Regression(SpectralNet(), OPTIMIZERS["adam"])
        trainer = make_trainer(tmp_path, precision=plugin_of(precision), callbacks=callbacks)
        trainer.fit(module, loader_of(make_batches(5)))
        trainer.save_checkpoint(tmp_path / "saved.ckpt")
        saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
        assert torch.equal(saved["state_dict"]["net.weights"], module.net.weights)
        nets.append(module.net)
    for other in nets[1:]:
        assert_same_weights(nets[0], other)
    norms = LayerNorms(every_n_steps=1), ScaleMonitor(every_n_steps=1)
    module = Regression(SpectralNet(), OPTIMIZERS["sgd"])
    trainer = make_trainer(tmp_path, precision=plugin_of(precision), callbacks=list(norms))
    trainer.fit(module, loader_of(make_batches(1)))
    own = [p.grad for p in (module.net.weights, module.net.bias)]
    assert norms[0].norms["net"] == pytest.approx(nn.utils.get_total_norm(own).item(), rel=1e-5)


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
@pytest.mark.parametrize(("part", "dtype"), [(0, torch.complex64), (1, torch.complex64), (1, torch.complex128)])
@pytest.mark.parametrize("make", [lambda: LossScaler("cpu", init_scale=8.0), lambda: StepGuard("cpu")])
def test_element_that_is_not_finite_skips_the_step(make, dtype, part, value):
    scaler, p, real = make(), nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p, real], lr=1.0)
    for gradient, moves in ((value, False), (1.0, True)):
        scaler.scale(torch.zeros(()))
        scale = scaler.current_scale
        p.grad, real.grad = torch.ones_like(p) * scale, torch.ones_like(real) * scale
        torch.view_as_real(p.grad)[1, part] = gradient * scale
        scaler.step(optimizer)
        scaler.update()
        assert bool(scaler.resolve_outcome().skipped) is not moves
        assert torch.equal(p.detach()[0], torch.tensor(0.0 if moves else 1.0, dtype=dtype))
        assert torch.equal(real.detach(), torch.full((2,), 0.0 if moves else 1.0))


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_complex_parameters_on_a_simulated_gpu(cuda, tmp_path, precision):
    module = Regression(SpectralNet(), OPTIMIZERS["adam"])
    trainer = make_trainer(tmp_path, accelerator="gpu", devices=1, precision=precision, gradient_clip_val=0.5)
    trainer.fit(module, loader_of(make_batches(4)))
    assert trainer.global_step == 4
    assert all(p.isfinite().all() for p in module.net.cpu().parameters())
