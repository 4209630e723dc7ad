"""Optimizers of other libraries get a closure that trains, with the results of Lightning's Trainer bit for bit."""

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from tests.parity import Learner, data, ours, run_both, weights
from trainer.errors import ConfigurationError


@contextmanager
def moved(optimizer, direction):
    """Move the parameters along their gradients, and back."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    offsets = [0.05 * direction(p.grad) for p in parameters]
    for p, offset in zip(parameters, offsets, strict=True):
        p.data.add_(offset)
    yield
    for p, offset in zip(parameters, offsets, strict=True):
        p.data.sub_(offset)


class SharpnessAware(SGD):
    """Sharpness-aware minimization: steps with the gradients of a nearby point, where it evaluates the loss again."""

    def step(self, closure=None):
        loss = closure()
        with moved(self, torch.sign):
            closure()
        super().step()
        return loss


class Perturbing(SGD):
    """Moves along the existing gradients first, and evaluates once."""

    def step(self, closure=None):
        with moved(self, torch.clone):
            loss = closure()
        super().step()
        return loss


class Insisting(Adam):
    """Requires a closure."""

    def step(self, closure):
        return super().step(closure)


class Usual(SGD):
    """Calls the closure once, and first, as most libraries do."""

    def step(self, closure=None):
        return super().step(closure)


class Wrapper(Optimizer):
    """Calls another optimizer, and averages afterwards (Lookahead)."""

    def __init__(self, params, lr):
        self.inner = SharpnessAware(params, lr=lr)
        super().__init__(self.inner.param_groups, {"lr": lr})

    def step(self, *args, **kwargs):
        loss = self.inner.step(*args, **kwargs)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(0.999)
        return loss


class Other(Learner):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.evaluations = kind, 0

    def training_step(self, batch, batch_idx):
        self.evaluations += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = self.kind(self.parameters(), lr=0.1)
        return [optimizer], [StepLR(optimizer, 1, 0.9)]


KINDS = [SharpnessAware, Perturbing, Insisting, Usual, Wrapper]


@pytest.mark.parametrize("arguments", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 3}], ids=str)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_of_another_library_equals_lightnings(kind, precision, arguments):
    def train(make):
        module = Other(kind)
        trainer = make(precision=precision, max_epochs=2, **arguments)
        trainer.fit(module, data(12))
        return weights(module), module.evaluations, trainer.global_step

    (theirs, *their_counts), (mine, *my_counts) = run_both(train)
    assert my_counts == their_counts
    assert all(map(torch.equal, theirs, mine))


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_custom_optimizer_gets_no_closure_with_others_or_a_scaler(precision):
    class Several(Other):
        def configure_optimizers(self):
            if precision == "16-mixed":
                return Usual(self.parameters(), lr=0.1)
            return [Usual(self.net[0].parameters(), lr=0.1), SGD(self.net[2].parameters(), lr=0.1)]

    module, before = Several(Usual), weights(Several(Usual))
    trainer = ours(max_epochs=1, precision=precision)
    trainer.fit(module, data(6))
    assert trainer.loop.path.train_batch == trainer.loop.train_batch
    assert module.evaluations == 3
    assert not any(map(torch.equal, weights(module), before))


def test_with_a_scaler_one_that_insists_is_refused():
    with pytest.raises(ConfigurationError, match="Got the optimizer Insisting with precision='16-mixed'"):
        ours(max_epochs=1, precision="16-mixed").fit(Other(Insisting), data(6))


class StepsItself(Learner):
    """Steps the torch optimizer, in place of its wrapper."""

    scales = True

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        (self.manual_backward if self.scales else Tensor.backward)(loss)
        return optimizer.step()

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer_closure()
        optimizer.optimizer.step()


@pytest.mark.parametrize("automatic", [True, False])
def test_step_of_the_bare_optimizer_with_scaled_gradients_is_refused(automatic):
    module = StepsItself()
    module.automatic_optimization = automatic
    before = weights(module)
    trainer = ours(precision="16-mixed", max_epochs=1)
    with pytest.raises(ConfigurationError, match=r"torch optimizer \w+ with scaled gradients .*16-mixed"):
        trainer.fit(module, data(4))
    assert all(map(torch.equal, weights(module), before))
    trainer.optimizers[0].step()  # after the run, nothing is refused


def test_step_of_the_bare_optimizer_with_unscaled_gradients_is_a_warning():
    module = StepsItself()
    module.automatic_optimization = module.scales = False
    before = weights(module)
    with pytest.warns(UserWarning, match=r"did not scale .*16-mixed.*self\.manual_backward\(loss\)") as caught:
        ours(precision="16-mixed", max_epochs=1).fit(module, data(4))
    assert len([one for one in caught if "did not scale" in str(one.message)]) == 1
    assert not all(map(torch.equal, weights(module), before))
    ours(precision="bf16-mixed", max_epochs=1).fit(module, data(4))  # scales no losses: no warning
