"""Several optimizers in automatic optimization, which Lightning refuses."""

import pytest
import torch

from tests.parity import assert_same_weights
from tests.support import (
    Regression,
    adam,
    forward_context,
    loader_of,
    loss_of,
    make_batches,
    make_net,
    make_trainer,
    plugin_of,
    scaler_of,
    sgd,
)
from trainer.errors import ConfigurationError
from trainer.loop.optimizers import MultipleOptimizersError


def halves(net):
    return [sgd(net[:2].parameters()), adam(net[2:].parameters())]


class Halves(Regression):
    """One optimizer for the first layers, another for the rest."""

    def configure_optimizers(self):
        return halves(self.net)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_each_steps_on_the_gradients_of_the_one_loss(tmp_path, precision):
    ours, theirs, batches = make_net(), make_net(), make_batches(6)
    trainer = make_trainer(tmp_path, precision=plugin_of(precision), accumulate_grad_batches=2)
    trainer.fit(Halves(ours), loader_of(batches))
    assert trainer.global_step == 2 * 3
    optimizers, scaler = halves(theirs), scaler_of(precision)
    for i, batch in enumerate(batches):
        if i % 2 == 0:
            theirs.zero_grad()
        with forward_context(precision):
            loss = loss_of(theirs, batch)
        scaler.scale(loss / 2).backward()
        if i % 2:
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert_same_weights(ours, theirs)


def module_with(make):
    """Return a module with the optimizers that ``make`` returns for its net."""
    module = Regression()
    module.configure_optimizers = lambda: make(module.net)
    return module


@pytest.mark.parametrize(
    ("make", "closure", "message"),
    [
        (lambda net: [sgd(net.parameters()), adam(net[4].parameters())], False, "'net.4.weight' in optimizers 0 and 1"),
        (halves, True, "Got 2 optimizers, with an `optimizer_step`"),
        (lambda net: [*halves(net)[:1], torch.optim.LBFGS(net[2:].parameters())], False, "evaluates the loss itself"),
    ],
)
def test_settings_unsupported_with_several_optimizers(tmp_path, make, closure, message):
    module = module_with(make)
    if closure:
        module.optimizer_step = lambda epoch, batch_idx, optimizer, closure: optimizer.step(closure)
    message = f"^Training with multiple optimizers is only supported with manual.*{message}"
    with pytest.raises(MultipleOptimizersError, match=message) as raised:
        make_trainer(tmp_path).fit(module, loader_of(make_batches(1)))
    assert isinstance(raised.value, RuntimeError)


def test_automatic_optimization_needs_an_optimizer(tmp_path):
    with pytest.raises(ConfigurationError, match=r"from Regression.configure_optimizers, expected at least one"):
        make_trainer(tmp_path).fit(module_with(lambda net: []), loader_of(make_batches(1)))


def test_optimizer_idx_argument_is_refused(tmp_path):
    class Old(Halves):
        def training_step(self, batch, batch_idx, optimizer_idx):
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="Remove the `optimizer_idx` argument"):
        make_trainer(tmp_path).fit(Old(), loader_of(make_batches(1)))
