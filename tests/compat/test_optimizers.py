"""Several optimizers in automatic optimization, which Lightning refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from tests.parity import assert_same_weights
from tests.support import Regression, loader_of, loss_of, make_batches, make_net, make_trainer, native_fp16
from trainer.compat.optimizers import MultipleOptimizersError
from trainer.errors import ConfigurationError

sgd = partial(torch.optim.SGD, lr=0.05)
adam = partial(torch.optim.Adam, lr=0.01)


class Halves(Regression):
    """One optimizer for the first layers, another for the rest."""

    def configure_optimizers(self) -> Any:
        return [sgd(self.net[:2].parameters()), adam(self.net[2:].parameters())]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_each_steps_on_the_gradients_of_the_one_loss(tmp_path, precision):
    ours, theirs, batches = make_net(), make_net(), make_batches(6)
    plugin = native_fp16(init_scale=2.0**9) if precision == "16-mixed" else precision
    trainer = make_trainer(tmp_path, precision=plugin, accumulate_grad_batches=2)
    trainer.fit(Halves(ours), loader_of(batches))
    assert trainer.global_step == 2 * 3
    optimizers = [sgd(theirs[:2].parameters()), adam(theirs[2:].parameters())]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, enabled=precision == "16-mixed")
    for i, batch in enumerate(batches):
        if i % 2 == 0:
            theirs.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=precision == "16-mixed"):
            loss = loss_of(theirs, batch)
        scaler.scale(loss / 2).backward()
        if i % 2:
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert_same_weights(ours, theirs)


def test_norm_is_that_of_all_of_them(tmp_path):
    norms = []

    class Norms(Callback):
        def on_after_optimizer_step(self, trainer: Any, module: Any, optimizer: Any, outcome: Any) -> None:
            norms.append(outcome.grad_norm.item())

    ours, theirs, batches = make_net(), make_net(), make_batches(1)
    trainer = make_trainer(tmp_path, gradient_clip_val=100.0, callbacks=[Norms()])
    trainer.fit(Halves(ours), loader_of(batches))
    loss_of(theirs, batches[0]).backward()
    total = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()]).item()
    assert norms == [pytest.approx(total)] * 2


class Overlapping(Regression):
    def configure_optimizers(self) -> Any:
        return [sgd(self.net.parameters()), adam(self.net[4].parameters())]


class WithClosure(Halves):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure)


class OneIsLBFGS(Regression):
    def configure_optimizers(self) -> Any:
        return [sgd(self.net[:2].parameters()), torch.optim.LBFGS(self.net[2:].parameters())]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Overlapping, r"Got 'net.4.weight' in optimizers 0 and 1, expected each parameter in one of them"),
        (WithClosure, r"Got 2 optimizers, with an `optimizer_step`"),
        (OneIsLBFGS, r"or an optimizer that evaluates the loss itself, expected one"),
    ],
)
def test_settings_unsupported_with_several_optimizers(tmp_path, kind, message):
    assert issubclass(MultipleOptimizersError, RuntimeError)
    with pytest.raises(
        MultipleOptimizersError, match=rf"^Training with multiple optimizers is only supported with manual.*{message}"
    ):
        make_trainer(tmp_path).fit(kind(), loader_of(make_batches(1)))


def test_automatic_optimization_needs_an_optimizer(tmp_path):
    class Without(Regression):
        def configure_optimizers(self) -> Any:
            return []

    with pytest.raises(ConfigurationError, match=r"from Without.configure_optimizers, expected at least one"):
        make_trainer(tmp_path).fit(Without(), loader_of(make_batches(1)))


def test_optimizer_idx_argument_is_refused(tmp_path):
    class Old(Halves):
        def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any:
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="Remove the `optimizer_idx` argument"):
        make_trainer(tmp_path).fit(Old(), loader_of(make_batches(1)))
