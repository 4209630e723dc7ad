from collections import UserList
from functools import partial

import pytest
from torch.optim import lr_scheduler

from tests.parity import lightning
from tests.support import (
    OPTIMIZERS,
    Regression,
    SavesEverywhere,
    Watch,
    assert_same,
    fit_and_watch,
    loader_of,
    make_batches,
    make_net,
    make_trainer,
    plugin_of,
    scaler_of,
    train_by_hand,
)
from trainer.errors import ConfigurationError

POISON = {0: 1e30, 4: 1e30, 5: float("nan")}


SCHEDULES = {
    "linear": partial(lr_scheduler.LinearLR, start_factor=0.1, total_iters=15),
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(  # changes the momentum too
        optimizer, 0.1, total_steps=80, cycle_momentum=optimizer.defaults.get("momentum") != 0
    ),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 30)],
        milestones=[4],
    ),
    "restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
}


@pytest.mark.filterwarnings("ignore:A `OneCycleLR` scheduler is using 'interval'. 'epoch':RuntimeWarning")
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw-fused"])
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_rates_are_those_of_a_hand_written_loop(tmp_path, precision, schedule, interval, optimizer, window):
    """A skipped step does not advance schedules; torch does not warn about an overflow in the first step."""
    make, scaled = OPTIMIZERS[optimizer], precision == "16-mixed"
    batches = make_batches(10, gains=POISON if scaled else {})
    module = Regression(make_net(), make, SCHEDULES[schedule], interval=interval)
    options = {"precision": plugin_of(precision), "accumulate_grad_batches": window}
    _, trace = fit_and_watch(tmp_path, module, batches, max_epochs=2, **options)
    options = {"optimizer": make, "scaler": scaler_of(precision), "window": window, "interval": interval}
    schedules = {"schedule": SCHEDULES[schedule], "epochs": 2}
    assert_same(trace, train_by_hand(make_net(), batches, precision=precision, **schedules, **options))
    assert sum(trace.skipped) == ((6 if window == 1 else 4) if scaled else 0)
    assert len(set(trace.rates)) > 1


halve = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)


class RatesOfUpdates(Watch):
    """Record the learning rate, and the momentum if there is one, that each weight update uses."""

    def __init__(self):
        super().__init__()
        self.rates, self.momenta = UserList(), UserList()  # not restored, because this class is not the user's

    def on_before_optimizer_step(self, trainer, module, optimizer):
        (group,) = optimizer.param_groups
        self.rates.append(group["lr"])
        self.momenta.append(group.get("momentum"))


class OwnOptimizerStep(Regression):
    """Take the path through ``ClosureOptimization``."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)


class OwnScheduleStep(Regression):
    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()


def factors_with(frequency, skipped):
    """Return the factor of each update if a schedule halves it after every ``frequency`` completed updates."""
    completed = [sum(not one for one in skipped[:i]) for i in range(len(skipped))]
    return [0.5 ** (count // frequency) for count in completed]


FREQUENCIES = [
    # batches of an epoch, epochs, batches of a window, frequency, optimizer, module, gains of batches
    (8, 2, 4, 2, "sgd", Regression, {}),
    (5, 3, 1, 2, "momentum", OwnOptimizerStep, {3: 1e30}),
    (6, 3, 1, 2, "sgd-fused", Regression, {1: 1e30, 4: float("nan")}),
    (7, 3, 3, 3, "adam-fused", Regression, {6: 1e30}),
    (6, 2, 1, 3, "adamw-fused", OwnScheduleStep, {2: 1e30}),
]


@pytest.mark.parametrize(("batches", "epochs", "window", "frequency", "optimizer", "kind", "gains"), FREQUENCIES)
def test_frequency_counts_completed_updates_across_epochs(
    tmp_path, late, batches, epochs, window, frequency, optimizer, kind, gains
):
    """Lightning counts the batches of the current epoch, in contrast to its documentation."""
    module = kind(make_net(), OPTIMIZERS[optimizer], halve, interval="step", frequency=frequency)
    watch = RatesOfUpdates()
    plugin = plugin_of("16-mixed") if gains or optimizer.endswith("fused") else "32-true"
    options = {"accumulate_grad_batches": window, "max_epochs": epochs, "log_every_n_steps": 0}
    trainer = make_trainer(tmp_path, precision=plugin, callbacks=[watch], **options)
    trainer.fit(module, loader_of(make_batches(batches, gains=gains)))
    skipped = watch.trace.skipped
    assert len(skipped) == -(-batches // window) * epochs
    assert sum(skipped) == epochs * len(gains)
    assert [rate / watch.rates[0] for rate in watch.rates] == factors_with(frequency, skipped)
    assert len(set(watch.rates)) > 1


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("interval", "frequency"), [("step", 3), ("epoch", 2), ("batch", 2)])
def test_frequency_counts_across_a_resume(tmp_path, interval, frequency):
    """From each batch and each epoch end, to the bit the rates of the uninterrupted run."""

    def fit(*savers, ckpt_path=None):
        watch, module = RatesOfUpdates(), Regression(schedule=halve, interval=interval, frequency=frequency)
        options = {"callbacks": [watch, *savers], "enable_checkpointing": bool(savers), "log_every_n_steps": 0}
        options |= {"precision": plugin_of("16-mixed"), "max_epochs": 3, "accumulate_grad_batches": 2}
        trainer = make_trainer(tmp_path, **options)
        trainer.fit(module, loader_of(make_batches(3, gains={2: 1e30})), ckpt_path=ckpt_path)
        return [*watch.rates, trainer.optimizers[0].param_groups[0]["lr"]]

    saver = SavesEverywhere(tmp_path)
    expected = fit(saver)
    assert len(saver.files) == 12
    assert len(set(expected)) > 1
    for number, file in enumerate(saver.files):
        updates = number // 4 * 2 + (0, 1, 2, 2)[number % 4]  # windows of 2 and 1; the epoch's end
        assert fit(ckpt_path=file) == expected[updates:], file.name


def test_frequency_continues_from_a_checkpoint_of_lightning(tmp_path):
    """The steps that the checkpoint counts, less those known to be skipped, count as completed."""

    def module():
        return Regression(make_net(), schedule=halve, interval="step", frequency=3)

    path, batches = tmp_path / "it.ckpt", make_batches(4)
    trainer = lightning(default_root_dir=tmp_path, max_epochs=1)
    trainer.fit(module(), loader_of(batches))
    trainer.save_checkpoint(path)
    watch = RatesOfUpdates()
    make_trainer(tmp_path, callbacks=[watch], max_epochs=3).fit(module(), loader_of(batches), ckpt_path=path)
    assert watch.rates == [0.05, 0.05, 0.025, 0.025, 0.025, 0.0125, 0.0125, 0.0125]


def test_plateau_schedule_with_a_frequency_reads_every_validation(tmp_path):
    """One validation for every two updates, with windows of two batches and three batches an epoch."""
    read, logged = [], []

    class Validated(Regression):
        def validation_step(self, batch, batch_idx):
            logged.append(float(len(logged)))
            self.log("value", logged[-1], batch_size=1)

        def lr_scheduler_step(self, scheduler, metric):
            read.append(float(metric))
            scheduler.step(metric)

    plateau = partial(lr_scheduler.ReduceLROnPlateau, patience=0)
    module = Validated(schedule=plateau, monitor="value", interval="step", frequency=2)
    options = {"val_check_interval": 3, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
    trainer = make_trainer(tmp_path, max_epochs=6, accumulate_grad_batches=2, **options)
    trainer.fit(module, loader_of(make_batches(3)), loader_of(make_batches(1)))
    assert read == logged == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("frequency", "expected"), [(1, [4, 3, 2, 1, 0.5]), (2, [8, 4, 4, 2, 2])])
def test_schedule_may_count_batches(tmp_path, frequency, expected):
    """``"step"`` counts optimizer steps, and ``"batch"`` batches."""
    factors = [80, 40, 30, 20, 10, 5] if frequency == 1 else [80, 40, 20]
    schedule = partial(lr_scheduler.LambdaLR, lr_lambda=factors.__getitem__)
    module = Regression(make_net(), schedule=schedule, interval="batch", frequency=frequency)
    _, trace = fit_and_watch(tmp_path, module, make_batches(5), accumulate_grad_batches=2)
    assert trace.rates == pytest.approx(expected)


class Plateau(Regression):
    """Logs a value that stops falling, monitored by a plateau schedule."""

    def __init__(self, values, **how):
        plateau = partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0)
        super().__init__(schedule=plateau, monitor="value", **how)
        self.values = values

    def training_step(self, batch, batch_idx):
        self.log("value", self.values[batch_idx], batch_size=4)
        return super().training_step(batch, batch_idx)


def test_plateau_schedule_by_steps_ignores_a_skipped_step(tmp_path):
    module = Plateau([3.0, 4.0, 9.0, 2.0, 2.5], interval="step")
    _, trace = fit_and_watch(tmp_path, module, make_batches(5, gains={2: 1e30}), precision=plugin_of("16-mixed"))
    assert trace.skipped == [False, False, True, False, False]
    assert trace.rates == [0.1, 0.1, 0.05, 0.05, 0.05]  # before the batch's own plateau step


def test_plateau_schedule_that_counts_batches_is_refused(tmp_path):
    message = "'interval': 'batch' for the schedule ReduceLROnPlateau, expected 'step'"
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(tmp_path).fit(Plateau([1.0], interval="batch"), loader_of(make_batches(1)))


@pytest.mark.parametrize("frequency", [0, -1, 1.5, None])
def test_frequency_that_is_no_count_is_refused(tmp_path, frequency):
    module = Regression(make_net(), schedule=halve, interval="step", frequency=frequency)
    with pytest.raises(ConfigurationError, match=rf"'frequency': {frequency} for the schedule StepLR, expected"):
        make_trainer(tmp_path).fit(module, loader_of(make_batches(1)))
