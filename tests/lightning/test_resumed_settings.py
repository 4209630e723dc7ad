"""A resume with other settings of schedules and optimizers in the code, or with another length of the run."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import lr_scheduler as LR

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.errors import ConfigurationError, ResumeError

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
    (message,) = [one.getMessage() for one in caplog.records if "of the schedule" in one.getMessage()]
    assert f"of the code at step {2 * BATCHES} of the schedule" in message
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
    assert not any("of the schedule" in one.getMessage() for one in caplog.records)


def test_horizon_that_the_user_has_fixed_stays(tmp_path):
    for make in (lambda o, _: LR.CosineAnnealingLR(o, 5), lambda o, _: LR.StepLR(o, 3, 0.5)):
        whole, first, second = (Scheduled(make) for _ in range(3))
        fit(tmp_path, whole, 3)
        fit(tmp_path, first, 2)
        fit(tmp_path, second, 3, tmp_path / "last.ckpt")
        assert second.seen == whole.seen


CHANGED = {
    "eta_min": (lambda o, _, value: LR.CosineAnnealingLR(o, 9, eta_min=value), 0.0, 0.04),
    "T_mult": (lambda o, _, value: LR.CosineAnnealingWarmRestarts(o, 2, value), 1, 2),
    "end_factor": (lambda o, _, value: LR.LinearLR(o, 0.1, value, 9), 1.0, 0.5),
    "power": (lambda o, _, value: LR.PolynomialLR(o, 9, value), 1.0, 2.0),
    "factor": (lambda o, _, value: LR.ConstantLR(o, value, 6), 0.5, 0.25),
    "gamma": (lambda o, _, value: LR.ExponentialLR(o, value), 0.9, 0.8),
    "mode": (lambda o, _, value: LR.CyclicLR(o, 0.1, 0.2, 2, mode=value), "triangular", "triangular2"),
    "_milestones": (
        lambda o, _, value: LR.SequentialLR(o, [LR.ConstantLR(o, 0.5, 9), LR.ExponentialLR(o, 0.9)], [value]), 3, 2
    ),
}  # fmt: skip
"""By setting: a function that makes the schedule, and the values of the saved and of the resumed run."""


def messages(caplog, text):
    return [one.getMessage() for one in caplog.records if text in one.getMessage()]


@pytest.mark.parametrize("name", CHANGED)
def test_setting_of_a_schedule_is_that_of_the_code(tmp_path, name, caplog):
    """The rates are those of a run that had it from the beginning."""
    make, saved, new = CHANGED[name]
    whole, first, second = (Scheduled(partial(make, value=value)) for value in (new, saved, new))
    fit(tmp_path, whole, 2)
    fit(tmp_path, first, 1)
    fit(tmp_path, second, 2, tmp_path / "last.ckpt")
    torch.testing.assert_close(*[torch.tensor(module.seen[BATCHES:]) for module in (second, whole)][:2])
    (message,) = messages(caplog, "of the code at step 4")
    assert f"{name}=" in message


def test_setting_of_a_plateau_schedule_is_that_of_the_code(tmp_path, caplog):
    """Its patience is over after one further epoch."""

    class Waits(Regression):
        def __init__(self, **settings):
            super().__init__()
            self.settings = settings

        def training_step(self, batch, batch_idx):
            self.log("score", 1.0)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = LR.ReduceLROnPlateau(optimizer, **self.settings)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "score"}}

    fit(tmp_path, Waits(patience=9), 2)
    resumed = fit(tmp_path, Waits(patience=1, factor=0.5), 3, tmp_path / "last.ckpt")
    assert resumed.optimizers[0].param_groups[0]["lr"] == 0.05
    (message,) = messages(caplog, "ReduceLROnPlateau continues")
    assert "factor=0.5, patience=1 of the code; the checkpoint has factor=0.1, patience=9" in message


class Other(Scheduled):
    """Like Scheduled, with settings of the optimizer."""

    def __init__(self, make=LR.ConstantLR, kind=torch.optim.SGD, **settings):
        super().__init__(make)
        self.kind, self.settings = kind, settings

    def configure_optimizers(self):
        optimizer = self.kind(self.parameters(), **{"lr": 0.1, **self.settings})
        return [optimizer], [self.make(optimizer)]

    def on_train_batch_start(self, batch, batch_idx):
        pass


@pytest.mark.parametrize(
    ("saved", "new", "key", "value"),
    [
        ({"momentum": 0.9}, {"momentum": 0.5, "dampening": 0.1}, "momentum=0.9", 0.9),
        ({"kind": torch.optim.AdamW}, {"kind": torch.optim.AdamW, "betas": (0.8, 0.9)}, "betas=[0.9, 0.999]", None),
        (
            {"make": lambda o: LR.CyclicLR(o, 0.1, 0.2), "momentum": 0.9},
            {"make": lambda o: LR.CyclicLR(o, 0.1, 0.3), "momentum": 0.9},
            "max_lrs=[0.2]",
            None,
        ),
    ],
)
def test_setting_of_an_optimizer_and_rates_are_those_of_the_checkpoint(tmp_path, caplog, saved, new, key, value):
    fit(tmp_path, Other(**saved), 1)
    resumed = fit(tmp_path, Other(**new), 2, tmp_path / "last.ckpt")
    (message,) = messages(caplog, "has no effect")
    assert f"continues with {key}" in message
    assert value is None or resumed.optimizers[0].param_groups[0]["momentum"] == value


@pytest.mark.parametrize(
    ("saved", "new", "text"),
    [
        ({"make": lambda o: LR.StepLR(o, 1, 0.5)}, {"make": lambda o: LR.ExponentialLR(o, 0.9)}, "StepLR"),
        (
            {"make": lambda o: LR.ChainedScheduler([LR.StepLR(o, 1)])},
            {"make": lambda o: LR.ChainedScheduler([LR.ExponentialLR(o, 0.9)])},
            "ChainedScheduler of StepLR",
        ),
        ({"kind": torch.optim.Adam}, {"kind": torch.optim.AdamW}, "Adam"),
    ],
)
def test_another_class_is_refused_or_starts_with_a_new_state(tmp_path, saved, new, text):
    fit(tmp_path, Other(**saved), 2)
    match = rf"of a run with {text}\. .*weights=.*exact_resume=False"
    with pytest.raises(ResumeError, match=match):
        fit(tmp_path, Other(**new), 3, tmp_path / "last.ckpt")
    trainer = make_trainer(tmp_path, max_epochs=3, exact_resume=False)
    with pytest.warns(UserWarning, match=f"of a run with {text}"):
        trainer.fit(Other(**new), loader_of(make_batches(BATCHES)), ckpt_path=tmp_path / "last.ckpt")
    (optimizer,) = trainer.optimizers
    if "kind" in new:
        assert {float(state["step"]) for state in optimizer.state.values()} == {BATCHES}
    else:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.09)


def test_classes_of_a_checkpoint_without_a_record_of_them_are_not_compared(tmp_path):
    """Such as those of Lightning."""
    fit(tmp_path, Other(lambda o: LR.StepLR(o, 1, 0.5)), 1)
    checkpoint = torch.load(tmp_path / "last.ckpt")
    del checkpoint["loops"]["amp_trainer"]["kinds"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    resumed = fit(tmp_path, Other(lambda o: LR.ExponentialLR(o, 0.9)), 2, tmp_path / "old.ckpt")
    assert resumed.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.025)


def test_schedule_that_a_callback_has_set_during_the_run_is_restored(tmp_path):
    """As finetuning-scheduler does; the classes are those that the code returns."""

    class Exchanges(Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 0:
                trainer.lr_scheduler_configs[0].scheduler = LR.StepLR(trainer.optimizers[0], 1, 0.7)

    module = Other(lambda o: LR.ExponentialLR(o, 0.9))
    trainer = make_trainer(tmp_path, max_epochs=1, callbacks=[Exchanges()])
    trainer.fit(module, loader_of(make_batches(BATCHES)))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = fit(tmp_path, Other(lambda o: LR.ExponentialLR(o, 0.9)), 2, tmp_path / "last.ckpt")
    assert resumed.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.7 * 0.7)


def test_fixed_number_of_epochs_that_torch_cannot_exceed_is_refused(tmp_path):
    class ByEpoch(Scheduled):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
            return [optimizer], [LR.OneCycleLR(optimizer, 0.1, total_steps=2)]

    fit(tmp_path, ByEpoch(LR.CosineAnnealingLR), 2)
    with pytest.raises(ConfigurationError, match=r"run of 3 epochs and OneCycleLR\(total_steps=2\).*weights="):
        fit(tmp_path, ByEpoch(LR.CosineAnnealingLR), 3, tmp_path / "last.ckpt")
