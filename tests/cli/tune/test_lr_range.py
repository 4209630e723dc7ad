"""The range test inside a fit: rates, losses, disabled features and refusals."""

import math

import lightning as L
import pytest
import torch

from tests.support import loader_of, make_trainer
from trainer.cli.tune import suggest
from trainer.cli.tune.attempt import LearningRateSweep
from trainer.errors import ConfigurationError


class Quadratic(L.LightningModule):
    """The loss is ``2 * w ** 2`` for each batch: after a step of SGD w is (1 - 4 * lr) w.

    ``change`` changes the loss of a step and a batch.
    """

    def __init__(self, configure=None, change=lambda loss, step, batch: loss):
        super().__init__()
        self.change = change
        self.w = torch.nn.Parameter(torch.tensor([3.0]))
        self.other = torch.nn.Parameter(torch.tensor([1.0]))
        self.configure = configure or (lambda module: torch.optim.SGD([module.w], lr=0.1))

    def training_step(self, batch, batch_idx):
        return self.change((2 * self.w**2 + 0.0 * self.other).sum(), self.trainer.global_step, batch_idx)

    def configure_optimizers(self):
        return self.configure(self)


BATCHES = loader_of(torch.zeros(8, 1))


def sweep(module, *arguments, **options):
    callback = LearningRateSweep(*arguments)
    make_trainer(None, callbacks=[callback], max_epochs=1000, **options).fit(module, BATCHES)
    return callback


def known(first, last, steps):
    w, curve = 3.0, []
    for step in range(steps):
        rate = first * (last / first) ** (step / (steps - 1))
        w *= 1 - 4 * rate
        curve.append((rate, 2 * w**2))
    return curve


def test_curve_of_a_quadratic():
    found = sweep(Quadratic(), 1e-4, 0.4, 40)
    expected = known(1e-4, 0.4, 40)
    assert [rate for rate, _ in found.points] == pytest.approx([rate for rate, _ in expected])
    assert [loss for _, loss in found.points] == pytest.approx([loss for _, loss in expected], rel=1e-3)
    assert (found.first_loss, found.ended_by) == (18.0, "the last rate")
    falls = {rate: before - after for (rate, after), (_, before) in zip(expected[1:], expected, strict=False)}
    assert suggest(found.points)[0] == pytest.approx(max(falls, key=falls.__getitem__), rel=0.35)


def test_range_test_ends_when_the_loss_diverges():
    """SGD on a quadratic diverges above 0.5."""
    found = sweep(Quadratic(), 0.3, 300.0, 100)
    assert found.ended_by == "divergence"
    assert len(found.points) < 60
    assert found.points[-1][0] > 0.5
    assert found.points[-1][1] > found.first_loss


def test_loss_that_is_not_finite_is_divergence():
    found = sweep(Quadratic(change=lambda loss, step, _: loss * math.nan if step == 5 else loss), 1e-4, 0.4, 40)
    assert (found.ended_by, len(found.points)) == ("divergence", 4)


def test_window_is_one_point():
    varies = Quadratic(change=lambda loss, step, batch: loss + batch % 2)
    found = sweep(varies, 1e-4, 0.4, 10, accumulate_grad_batches=2)
    expected = [loss + 0.5 for _, loss in known(1e-4, 0.4, 10)]
    assert [loss for _, loss in found.points] == pytest.approx(expected, rel=1e-3)


def overflowing(loss):
    loss.register_hook(lambda gradient: gradient * math.inf)
    return loss


def test_skipped_steps_are_not_points_and_their_rate_is_repeated():
    overflows = Quadratic(change=lambda loss, step, batch: overflowing(loss) if step in (3, 4) else loss)
    found = sweep(overflows, 1e-4, 0.4, 20, precision="16-mixed")
    expected = known(1e-4, 0.4, 20)
    assert [rate for rate, _ in found.points] == pytest.approx([rate for rate, _ in expected])
    assert [loss for _, loss in found.points] == pytest.approx([loss for _, loss in expected], rel=1e-2)
    assert found.found()["skipped"] == 2


def test_only_overflows():
    found = LearningRateSweep(1e-4, 0.4, 20)
    trainer = make_trainer(None, precision="16-mixed", max_epochs=1000)
    trainer.callbacks = [found]  # without callbacks that end such a run
    trainer.fit(Quadratic(change=lambda loss, step, batch: overflowing(loss)), BATCHES)
    assert (found.ended_by, found.points) == ("overflows", [])


def test_groups_keep_their_proportions_and_schedules_are_gone():
    rates = []

    def configure(module):
        optimizer = torch.optim.SGD([{"params": [module.w], "lr": 0.01}, {"params": [module.other]}], lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 5)  # begins at 0
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Watches(Quadratic):
        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
            rates.append([group["lr"] for group in optimizer.param_groups])

    found = sweep(Watches(configure=configure), 1e-3, 1e-1, 10)
    assert [pair[1] for pair in rates][:10] == pytest.approx([rate for rate, _ in found.points])
    assert all(slow == pytest.approx(fast / 10) for slow, fast in rates)


def test_rate_in_a_tensor():
    configure = lambda module: torch.optim.Adam([module.w], lr=torch.tensor(0.1), foreach=False)  # noqa: E731
    found = sweep(Quadratic(configure=configure), 1e-3, 1e-1, 10)
    assert len(found.points) == 10
    assert found.points[-1][1] < found.points[0][1]


def test_modules_without_a_single_rate_are_refused():
    configure = lambda module: [torch.optim.SGD([module.w], lr=0.1), torch.optim.SGD([module.other], lr=0.1)]  # noqa: E731
    module = Quadratic(configure=configure)
    with pytest.raises(ConfigurationError, match="2 optimizers, expected automatic optimization of one"):
        sweep(module, 1e-3, 1e-1, 10)
    module.automatic_optimization = False
    with pytest.raises(ConfigurationError, match="manual optimization"):
        sweep(module, 1e-3, 1e-1, 10)
