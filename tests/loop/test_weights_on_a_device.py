"""A weight of 0 that ``training_step`` returns as a tensor on a device, compared to one on the host.

The loss of such a batch is a masked mean over nothing. Its gradients are 0 * inf = NaN.
"""

import pytest
import torch

from tests.parity import assert_same_weights
from tests.simulated_cuda.device import DEVICE, Seen
from tests.support import (
    OPTIMIZERS,
    Regression,
    Skipping,
    adam,
    fit_and_watch,
    loader_of,
    make_batches,
    make_net,
    make_trainer,
    plugin_of,
)
from trainer.errors import ConfigurationError

WEIGHTS = [3.0, 0.0, 1.0, 2.0, 0.0, 0.0, 4.0, 1.0, 0.0]
"""Of nine batches. Windows of two and three include one with only zeros, and zeros at each place."""


class Masked(Regression):
    """The mean over the unmasked rows of a batch, and their number as its weight: on the device or as a float."""

    def __init__(self, optimizer, kind):
        super().__init__(make_net(), optimizer, lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.9), interval="step")
        self.kind, self.outputs = kind, []

    def training_step(self, batch, batch_idx):
        x, y, rows = batch
        mask = torch.arange(len(x), device=x.device) < rows
        loss = ((self.net(x) - y).square().mean(1) * mask).sum() / mask.sum()
        loss = loss + (1.0 / mask.sum() - 1.0 / mask.sum().clamp(min=1)) * self.net(x).sum()
        weight = mask.sum() if self.kind == "tensor" else WEIGHTS[batch_idx]
        return {"loss": loss, "weight": weight}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.outputs.append({key: float(value) for key, value in outputs.items()})


def fit(folder, kind, precision, optimizer, window):
    module = Masked(OPTIMIZERS[optimizer], kind)
    data = [[x, y, torch.tensor(weight)] for (x, y, _), weight in zip(make_batches(9), WEIGHTS, strict=True)]
    options = {"precision": plugin_of(precision, growth_interval=3), "accumulate_grad_batches": window}
    options |= {"accelerator": "gpu", "devices": 1, "max_epochs": 2, "gradient_clip_val": 0.5}
    trainer, trace = fit_and_watch(folder, module, data, **options)
    state = {
        "weights": [p.cpu().tolist() for p in module.net.parameters()],
        "outputs": [sorted(outputs) for outputs in module.outputs],
        "outcomes": [*zip(trace.skipped, trace.scales, trace.next_scales, strict=True)],
        "scale": trainer.scaler.current_scale,
        "steps": (trainer.global_step, trainer.skipped_steps),
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "loss": {key: float(value) for key, value in trainer.callback_metrics.items()},
    }
    assert all(torch.tensor(weight).isfinite().all() for weight in state["weights"])
    return state


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize(
    ("precision", "optimizer"), [("32-true", "sgd"), ("bf16-mixed", "adam-fused"), ("16-mixed", "momentum-fused")]
)
def test_weight_on_a_device_equals_one_on_the_host(cuda, tmp_path, precision, optimizer, window):
    on_host = fit(tmp_path, "float", precision, optimizer, window)
    on_device = fit(tmp_path, "tensor", precision, optimizer, window)
    assert on_device == on_host
    assert len(on_host["outcomes"]) == {1: 10, 2: 6, 3: 6}[window]
    assert on_host["steps"][1] == 0


class Weighted(Regression):
    """Returns a weight on the device, without reading anything."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "weight": batch[2] * 2}


@pytest.mark.parametrize(("precision", "window", "waits"), [
    ("32-true", 1, ["an event"]), ("16-mixed", 1, ["an event", "an event"]), ("32-true", 2, ["local_scalar_dense"]),
])  # fmt: skip
def test_how_a_weight_on_a_device_is_read(cuda, tmp_path, precision, window, waits):
    """With an event that is recorded before the backward pass, or at the next backward pass if batches accumulate."""
    module, found = Weighted(make_net(), OPTIMIZERS["adam-fused"]), []

    def look(batch, batch_idx):
        if DEVICE.seen is not None:
            found.append([wait.what for wait in DEVICE.seen.waits])
        DEVICE.seen = Seen()

    module.on_train_batch_start = look
    module.on_train_end = lambda: setattr(DEVICE, "seen", None)
    options = {"precision": plugin_of(precision), "log_every_n_steps": 0, "accumulate_grad_batches": window}
    trainer = make_trainer(tmp_path, accelerator="gpu", devices=1, **options)
    trainer.fit(module, loader_of([[x.cuda() for x in batch] for batch in make_batches(8)]))
    assert found[1:] == [waits] * 6


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_impossible_weight_on_a_device_is_refused(cuda, tmp_path, weight, window):
    data = [[x, y, torch.tensor(weight)] for x, y, _ in make_batches(2)]
    trainer = make_trainer(tmp_path, accelerator="gpu", devices=1, accumulate_grad_batches=window)
    with pytest.raises(ConfigurationError, match=r"Got 'weight': .*expected one number, at least 0"):
        trainer.fit(Weighted(make_net(), OPTIMIZERS["sgd"]), loader_of(data))


def test_batch_that_an_elastic_order_leaves_out_contributes_nothing(tmp_path, monkeypatch):
    """Its weight is 0 for any result of ``training_step``, and its gradients may be NaN."""
    nets, data = [make_net(), make_net()], loader_of(make_batches(4, gains={1: float("inf")}))
    with pytest.warns(UserWarning, match="returned `None`"):
        make_trainer(tmp_path, accumulate_grad_batches=2).fit(Skipping(nets[0], adam, none_in=(1,)), data)
    trainer = make_trainer(tmp_path, accumulate_grad_batches=2)
    mean, begin_batch = trainer.loop.mean, trainer.loop.mean.begin_batch

    def weigh():
        begin_batch()
        mean.batch_weight = float(trainer.progress.batch_idx != 1)

    monkeypatch.setattr(mean, "begin_batch", weigh)
    trainer.fit(Regression(nets[1], adam), data)
    assert_same_weights(*nets)
