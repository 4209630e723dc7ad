"""A run that is continued with another length: schedules that span the run get the new length."""

import pytest
import torch
from torch.optim import lr_scheduler as LR

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.errors import ConfigurationError

BATCHES = 4


class Factor:
    """Falls to 0 at the end of the run."""

    def __init__(self, length):
        self.length = length

    def __call__(self, step):
        return max(0.0, 1 - step / self.length)


class Polynomial(LR.LRScheduler):
    """A schedule of another package."""

    def __init__(self, optimizer, max_iters):
        self.max_iters = max_iters
        super().__init__(optimizer)

    def get_lr(self):
        return [base * (1 - self.last_epoch / self.max_iters) ** 2 for base in self.base_lrs]


def warm_up(optimizer, steps):
    parts = [LR.LinearLR(optimizer, 0.1, total_iters=2), LR.CosineAnnealingLR(optimizer, steps - 2)]
    return LR.SequentialLR(optimizer, parts, [2])


SCHEDULES = {
    "onecycle": lambda optimizer, steps: LR.OneCycleLR(optimizer, 0.1, total_steps=steps),
    "cosine": lambda optimizer, steps: LR.CosineAnnealingLR(optimizer, steps),
    "object": lambda optimizer, steps: LR.LambdaLR(optimizer, Factor(steps)),
    "closure": lambda optimizer, steps: LR.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps)),
    "steps": lambda optimizer, steps: LR.StepLR(optimizer, steps // 2),
    "other package": Polynomial,
    "sequence": warm_up,
    "chain": lambda o, steps: LR.ChainedScheduler([LR.CosineAnnealingLR(o, steps), LR.StepLR(o, 3, 0.5)]),
}


class Scheduled(Regression):
    """Records the learning rate, and the momentum, of each step.

    Args:
        make: builds the schedule, from the optimizer and the number of steps of the run.
        lr: of the optimizer.
    """

    def __init__(self, make, lr=0.1):
        super().__init__()
        self.make, self.lr, self.seen = make, lr, []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        schedule = self.make(optimizer, int(self.trainer.estimated_stepping_batches))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_batch_start(self, batch, batch_idx):
        (group,) = self.trainer.optimizers[0].param_groups
        self.seen.append((float(group["lr"]), group["momentum"]))


def fit(folder, module, epochs, ckpt_path=None):
    trainer = make_trainer(folder, max_epochs=epochs)
    trainer.fit(module, loader_of(make_batches(BATCHES)), ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / "last.ckpt")
    return trainer


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_of_a_longer_run_continues_at_its_position(tmp_path, name, caplog):
    """With the rate of the checkpoint, which a finder may have found."""
    whole, first, second = (Scheduled(SCHEDULES[name], lr) for lr in (0.2, 0.2, 0.1))
    fit(tmp_path, whole, 3)
    fit(tmp_path, first, 2)
    caplog.clear()
    fit(tmp_path, second, 3, tmp_path / "last.ckpt")
    rates = [torch.tensor(module.seen[2 * BATCHES :]) for module in (second, whole)]
    torch.testing.assert_close(*rates)
    (message,) = [one.getMessage() for one in caplog.records if "another length" in one.getMessage()]
    assert f"continues at step {2 * BATCHES}" in message
    assert f"{rates[0][0, 0]:.4g} now" in message


@pytest.mark.parametrize("name", SCHEDULES)
def test_run_of_the_same_length_restores_the_saved_schedule(tmp_path, name, caplog):
    whole, first, second = (Scheduled(SCHEDULES[name]) for _ in range(3))
    first.on_train_epoch_end = lambda: setattr(first.trainer, "should_stop", True)
    fit(tmp_path, whole, 2)
    fit(tmp_path, first, 2)
    caplog.clear()
    fit(tmp_path, second, 2, tmp_path / "last.ckpt")
    assert second.seen == whole.seen
    assert not any("another length" in one.getMessage() for one in caplog.records)


def test_horizon_that_the_user_has_fixed_stays(tmp_path):
    for make in (lambda o, _: LR.CosineAnnealingLR(o, 5), lambda o, _: LR.StepLR(o, 3, 0.5)):
        whole, first, second = (Scheduled(make) for _ in range(3))
        fit(tmp_path, whole, 3)
        fit(tmp_path, first, 2)
        fit(tmp_path, second, 3, tmp_path / "last.ckpt")
        assert second.seen == whole.seen


def test_rate_of_another_kind_of_schedule_is_restored(tmp_path):
    """Finetuning-scheduler sets another schedule in the middle of a run."""
    second = Scheduled(lambda o, _: LR.ExponentialLR(o, 0.9))
    fit(tmp_path, Scheduled(lambda o, _: LR.StepLR(o, 1, 0.7)), 1)
    fit(tmp_path, second, 2, tmp_path / "last.ckpt")
    assert second.seen[BATCHES][0] == pytest.approx(0.1 * 0.7**BATCHES)


def test_fixed_number_of_epochs_that_torch_cannot_exceed_is_refused(tmp_path):
    class ByEpoch(Scheduled):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
            return [optimizer], [LR.OneCycleLR(optimizer, 0.1, total_steps=2)]

    fit(tmp_path, ByEpoch(LR.CosineAnnealingLR), 2)
    with pytest.raises(ConfigurationError, match=r"run of 3 epochs and OneCycleLR\(total_steps=2\).*weights="):
        fit(tmp_path, ByEpoch(LR.CosineAnnealingLR), 3, tmp_path / "last.ckpt")
