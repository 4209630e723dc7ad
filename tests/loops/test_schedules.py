from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.support import (
    OPTIMIZERS,
    Regression,
    assert_same,
    fit_and_watch,
    loader_of,
    make_batches,
    make_net,
    make_trainer,
    native_fp16,
    train_by_hand,
)
from trainer.errors import ConfigurationError
from trainer.loops.schedules import Schedules

SMALL = {"init_scale": 2.0**9, "growth_interval": 5}
POISON = {0: 1e30, 4: 1e30, 5: float("nan")}


def parameters_with(*gradients):
    parameters = []
    for gradient in gradients:
        p = nn.Parameter(torch.zeros(len(gradient) if gradient is not None else 2))
        p.grad = None if gradient is None else torch.tensor(gradient)
        parameters.append(p)
    return parameters


# --- schedules ------------------------------------------------------------------------------------------------------


def schedule_of(name, interval="step", frequency=1, plateau=False, monitor=None, strict=True):
    return SimpleNamespace(
        scheduler=name,
        interval=interval,
        frequency=frequency,
        reduce_on_plateau=plateau,
        monitor=monitor,
        strict=strict,
    )


def test_whose_turn_it_is():
    stepped = []
    configs = [
        schedule_of("each step"),
        schedule_of("every third step", frequency=3),
        schedule_of("each epoch", interval="epoch"),
        schedule_of("every second epoch", interval="epoch", frequency=2),
        schedule_of("step plateau", plateau=True, monitor="loss"),
        schedule_of("epoch plateau", interval="epoch", plateau=True, monitor="acc"),
    ]
    schedules = Schedules(configs, lambda *args: stepped.append(args), lambda: {"loss": 1, "acc": 2})
    assert schedules

    def advance(*args, **options):
        stepped.clear()
        schedules.advance(*args, **options)
        return list(stepped)

    assert advance("step", 1) == [("each step", None)]
    assert advance("step", 3) == [("each step", None), ("every third step", None)]
    assert advance("epoch", 1) == [("each epoch", None)]
    assert advance("epoch", 2) == [("each epoch", None), ("every second epoch", None)]
    assert advance("step", 3, on_plateau=True) == [("step plateau", 1)]
    assert advance("epoch", 3, on_plateau=True) == [("epoch plateau", 2)]
    configs.clear()  # a live list
    assert not schedules.stepped
    assert advance("step", 1) == []


@pytest.mark.parametrize("strict", [True, False])
def test_a_metric_that_nobody_logged(strict):
    stepped = []
    config = schedule_of("plateau", interval="epoch", plateau=True, monitor="val_loss", strict=strict)
    schedules = Schedules([config], lambda *args: stepped.append(args), lambda: {"train_loss": 1})
    if strict:
        with pytest.raises(ConfigurationError, match=r"metric val_loss which is not available.*\['train_loss'\]"):
            schedules.advance("epoch", 1, on_plateau=True)
    else:
        with pytest.warns(RuntimeWarning, match="val_loss which is not available but strict is set to `False`"):
            schedules.advance("epoch", 1, on_plateau=True)
    assert stepped == []


SCHEDULES = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=40),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 10)], [3]
    ),
}


@pytest.mark.filterwarnings("ignore:A `OneCycleLR` scheduler is using 'interval'. 'epoch':RuntimeWarning")
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw-fused"])
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_rates_are_those_of_a_hand_written_loop(tmp_path, precision, schedule, interval, optimizer, window):
    """A skipped step advances no schedule; an overflow in the very first does not make torch warn."""
    make, scaled = OPTIMIZERS[optimizer], precision == "16-mixed"
    batches = make_batches(10, gains=POISON if scaled else {})
    ours, theirs = make_net(), make_net()
    _, trace = fit_and_watch(
        tmp_path,
        Regression(ours, make, SCHEDULES[schedule], interval=interval),
        batches,
        precision=native_fp16(**SMALL) if scaled else precision,
        accumulate_grad_batches=window,
        max_epochs=2,
    )
    expected = train_by_hand(
        theirs,
        batches,
        precision=precision,
        optimizer=make,
        scaler=torch.amp.GradScaler("cpu", enabled=scaled, **SMALL),
        window=window,
        epochs=2,
        schedule=SCHEDULES[schedule],
        interval=interval,
    )
    assert_same(trace, expected)
    assert sum(trace.skipped) == ((6 if window == 1 else 4) if scaled else 0)
    assert len(set(trace.rates)) > 1


def test_frequency_counts_batches_as_lightning_does(tmp_path):
    module = Regression(
        make_net(), schedule=lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5), interval="step", frequency=2
    )
    _, trace = fit_and_watch(tmp_path, module, make_batches(5), max_epochs=2)
    assert trace.rates == [0.1, 0.05, 0.05, 0.025, 0.025, 0.025, 0.0125, 0.0125, 0.00625, 0.00625]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("frequency", "expected"), [(1, [4, 3, 2, 1, 0.5]), (2, [8, 4, 4, 2, 2])])
def test_a_schedule_may_count_batches(tmp_path, frequency, expected):
    """``"step"`` counts updates: inside a window it waits; ``"batch"`` does not."""
    halve = partial(lr_scheduler.LambdaLR, lr_lambda=lambda n: [80, 40, 30, 20, 10, 5][n])
    if frequency == 2:
        halve = partial(lr_scheduler.LambdaLR, lr_lambda=lambda n: [80, 40, 20][n])
    module = Regression(make_net(), schedule=halve, interval="batch", frequency=frequency)
    _, trace = fit_and_watch(tmp_path, module, make_batches(5), accumulate_grad_batches=2)
    assert trace.rates == pytest.approx(expected)


class Plateau(Regression):
    """Logs a value that stops falling, which a plateau schedule watches."""

    def __init__(self, values, monitor="value", **how):
        super().__init__(make_net(), schedule=self.plateau, monitor=monitor, **how)
        self.values = iter(values)

    @staticmethod
    def plateau(optimizer):
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    def on_train_epoch_end(self):
        if self.how["interval"] == "epoch":
            self.log("value", next(self.values), batch_size=4)

    def training_step(self, batch, batch_idx):
        if self.how["interval"] == "step":
            self.log("value", next(self.values), batch_size=4)
        return super().training_step(batch, batch_idx)


def test_a_plateau_schedule_by_epochs(tmp_path):
    module = Plateau([3.0, 2.0, 2.5, 1.0, 1.5], interval="epoch")
    _, trace = fit_and_watch(tmp_path, module, make_batches(2), max_epochs=5)
    assert trace.rates == [0.1] * 6 + [0.05] * 4
    assert module.lr_schedulers is not None


def test_a_plateau_schedule_watches_validation(tmp_path):
    class Validated(Plateau):
        def on_train_epoch_end(self):
            pass

        def validation_step(self, batch, batch_idx):
            self.log("value", next(self.values), batch_size=4)

    module = Validated([3.0, 3.5, 2.0, 2.5], interval="epoch")
    rates = []
    trainer = make_trainer(tmp_path, max_epochs=4, num_sanity_val_steps=0)
    module.on_train_epoch_start = lambda: rates.append(trainer.optimizers[0].param_groups[0]["lr"])
    trainer.fit(module, loader_of(make_batches(2)), loader_of(make_batches(1)))
    assert rates == [0.1, 0.1, 0.05, 0.05]


def test_a_plateau_schedule_by_steps_does_not_judge_a_skipped_one(tmp_path):
    module = Plateau([3.0, 4.0, 9.0, 2.0, 2.5], interval="step")
    _, trace = fit_and_watch(tmp_path, module, make_batches(5, gains={2: 1e30}), precision=native_fp16(**SMALL))
    rates = trace.rates  # recorded in on_train_batch_end: before the batch's own plateau step
    assert trace.skipped == [False, False, True, False, False]
    assert rates == [0.1, 0.1, 0.05, 0.05, 0.05]


def test_a_plateau_schedule_without_its_metric(tmp_path):
    module = Plateau([1.0] * 3, interval="epoch", monitor="nothing")
    with pytest.raises(ConfigurationError, match="ReduceLROnPlateau conditioned on metric nothing"):
        make_trainer(tmp_path).fit(module, loader_of(make_batches(1)))
