"""Times at which the outcome of a step is read: late with a fused optimizer on a GPU, without a synchronization.

The GPU is simulated: the scaler treats the result of a fused optimizer on the CPU as not available yet.
"""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from tests.loop.test_manual_optimization import Outcomes
from tests.loop.test_schedules import SCHEDULES, RatesOfUpdates
from tests.parity import RecordingLogger, assert_same_weights
from tests.support import (
    OPTIMIZERS,
    Regression,
    Watch,
    assert_same,
    loader_of,
    make_batches,
    make_net,
    make_trainer,
    norm_of,
    plugin_of,
    scaler_of,
    train_by_hand,
)
from trainer.callbacks import GradientClipping, ScaleMonitor

POISON = {0: 1e30, 4: 1e30, 5: float("nan"), 9: 1e30, 19: 1e30}


def fit(folder, module, batches, *callbacks, **options):
    """Fit in 16-mixed, without rows for the loggers, which would read the outcome."""
    options = {"precision": plugin_of("16-mixed"), "log_every_n_steps": 0, "callbacks": list(callbacks), **options}
    trainer = make_trainer(folder, **options)
    trainer.fit(module, loader_of(batches))
    return trainer


def scheduled():
    return Regression(optimizer=OPTIMIZERS["sgd-fused"], schedule=SCHEDULES["linear"], interval="step")


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # torch's own, of SequentialLR
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("optimizer", ["adam-fused", "momentum-fused", "sgd"])
def test_everything_but_the_moment_is_the_same(tmp_path, late, optimizer, window, schedule):
    """Weights, norms, scales and learning rates equal those of a loop that reads each outcome immediately."""
    make = OPTIMIZERS[optimizer]
    poison = {i: gain for i, gain in POISON.items() if i > 2 or optimizer != "momentum-fused"}
    batches = make_batches(20, gains=poison)
    watch, module = RatesOfUpdates(), Regression(make_net(), make, SCHEDULES[schedule], interval="step")
    clipping = GradientClipping(max_norm=0.5, log_norm=False)
    trainer = fit(tmp_path, module, batches, watch, clipping, accumulate_grad_batches=window, max_epochs=2)

    used = []

    def remember(made):
        used.append((made.param_groups[0]["lr"], made.param_groups[0].get("momentum")))

    scaler = scaler_of("16-mixed")
    options = {"scaler": scaler, "optimizer": make, "window": window, "clip": norm_of(0.5), "before_step": remember}
    options |= {"precision": "16-mixed", "epochs": 2, "schedule": SCHEDULES[schedule]}
    expected = train_by_hand(make_net(), batches, **options)
    assert [*zip(watch.rates, watch.momenta, strict=True)] == used
    trace = watch.trace
    trace.rates, expected.rates = [], []  # those between a skipped update and the next are tentative
    assert_same(trace, expected)
    assert trainer.skipped_steps == sum(expected.skipped)
    assert trainer.progress.schedule_steps == expected.skipped.count(False)
    assert trainer.scaler.get_scale() == trainer.scaler.current_scale == scaler.get_scale()
    assert bool(late) is (optimizer != "sgd")


# --- who waits, and when --------------------------------------------------------------------------------------------


def test_host_waits_for_a_step_after_queuing_the_next_backward_pass(tmp_path, late):
    module = Regression(optimizer=OPTIMIZERS["adamw-fused"])
    module.on_after_backward = lambda: late.append("backward")
    module.on_before_optimizer_step = lambda optimizer: late.append("update")
    fit(tmp_path, module, make_batches(8), GradientClipping(max_norm=0.5), ScaleMonitor(), accumulate_grad_batches=2)
    steady = ["backward", "backward", "wait", "update"]
    assert late == ["backward", "backward", "update", *steady * 3, "wait"]  # at the epoch's end


ASK = {
    "outcome": lambda trainer: trainer.step_outcome,
    "skips": lambda trainer: trainer.skipped_steps,
    "save": lambda trainer: trainer.save_checkpoint(f"{trainer.default_root_dir}/now.ckpt"),
}


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
def test_readers_get_the_outcome_immediately(tmp_path, late, ask):
    seen = []

    class Ask(Watch):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.is_last_batch:  # settled already
                return
            assert late == []
            newest = trainer.settled_outcome
            ask(trainer)
            seen.append((newest, trainer.settled_outcome.skipped, len(self.trace.skipped)))
            late.clear()

    trainer = fit(tmp_path, scheduled(), make_batches(4, gains={1: 1e30}), Ask())
    assert [(skipped, told) for _, skipped, told in seen] == [(False, 1), (True, 2), (False, 3)]
    assert seen[0][0] is None
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3


def test_checkpoint_has_the_rates_of_the_next_step(tmp_path, late):
    """Saved after a skipped update, by a callback, in ``on_train_batch_end``."""
    every = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    fit(tmp_path, scheduled(), make_batches(3, gains={1: 1e30}), every, enable_checkpointing=None)
    states = [torch.load(tmp_path / f"step={step}.ckpt", weights_only=True) for step in (1, 2, 3)]
    assert [state["lr_schedulers"][0]["last_epoch"] for state in states] == [1, 1, 2]
    rates = [state["optimizer_states"][0]["param_groups"][0]["lr"] for state in states]
    assert rates[0] == rates[1] < rates[2]
    assert [state["loops"]["amp_trainer"]["progress"]["skipped_steps"] for state in states] == [0, 1, 1]


def test_rows_of_loggers_belong_to_their_step(tmp_path, late):
    rows = []
    for optimizer in ("sgd-fused", "sgd"):  # the outcome of a plain optimizer arrives at once
        logger, callbacks = RecordingLogger(), [ScaleMonitor(), GradientClipping(max_norm=0.5)]
        module, options = Regression(optimizer=OPTIMIZERS[optimizer]), {"logger": logger, "log_every_n_steps": 2}
        fit(tmp_path, module, make_batches(7, gains={3: 1e30}), *callbacks, **options)
        rows.append(logger.rows)
    assert str(rows[0]) == str(rows[1])  # nan is nan
    assert 256.0 in [row.get("amp/scale") for _, row in rows[0]]


# --- several schedules ----------------------------------------------------------------------------------------------


class TwoOfEach(Regression):
    """Two optimizers with a schedule each; one net's gradients overflow in some batches."""

    def training_step(self, batch, batch_idx):
        x, y, gain = batch
        hidden = self.net[:4](x)
        # the gain reaches the gradients of the first net only
        return torch.nn.functional.mse_loss(self.net[4](hidden), y) + (hidden * (gain - 1)).sum()

    def configure_optimizers(self):
        optimizers = [self.make_optimizer(part.parameters()) for part in (self.net[:4], self.net[4])]
        return optimizers, [{"scheduler": lr_scheduler.StepLR(one, 1, 0.5), **self.how} for one in optimizers]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("frequency", [1, 2])
def test_only_the_schedule_of_the_skipped_optimizer_waits(tmp_path, late, fused, frequency):
    make, watch = partial(torch.optim.SGD, lr=1e-3, fused=fused), Outcomes()
    module = TwoOfEach(optimizer=make, interval="step", frequency=frequency)
    trainer = fit(tmp_path, module, make_batches(5, gains={1: float("inf"), 3: float("inf")}), watch)
    assert [o.skipped_optimizers for o in watch.outcomes] == [(), (0,), (), (0,), ()]
    rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]
    assert rates == [1e-3 / 2 ** (steps // frequency) for steps in (3, 5)]


# --- weight averaging -----------------------------------------------------------------------------------------------


class Averaging(Watch):
    """Update an average with torch's class, as a user would."""

    def on_fit_start(self, trainer, module):
        self.average = AveragedModel(module.net, avg_fn=get_ema_avg_fn(0.8))

    def on_after_optimizer_step(self, trainer, module, optimizer, outcome):
        if not outcome.skipped:
            self.average.update_parameters(module.net)


def average_by_hand(optimizer, batches, window, make):
    net = make_net()
    average = make(net)
    options = {"scaler": scaler_of("16-mixed"), "optimizer": optimizer, "window": window}
    trace = train_by_hand(net, batches, precision="16-mixed", epochs=2, **options)
    closing = [i for i in range(16) if (i % 8 + 1) % window == 0 or i % 8 == 7]
    model = make_net()
    for skipped, i in zip(trace.skipped, closing, strict=True):
        if not skipped:
            model.load_state_dict(dict(zip(model.state_dict(), trace.weights[i], strict=True)))
            average.update_parameters(model)
    return average


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adam-fused"])
@pytest.mark.parametrize("kind", ["mean", "ema", "own"])
def test_averages_leave_skipped_steps_out(tmp_path, late, kind, optimizer, window):
    """Lightning's callbacks, unmodified, and torch's class in a custom one."""
    kinds = {"mean": WeightAveraging, "ema": partial(EMAWeightAveraging, decay=0.8), "own": Averaging}
    callback = kinds[kind]()
    average = {} if kind == "mean" else {"avg_fn": get_ema_avg_fn(0.8)}
    batches = make_batches(8, gains={0: 1e30, 4: 1e30, 7: 1e30})
    module = Regression(optimizer=OPTIMIZERS[optimizer])
    trainer = fit(tmp_path, module, batches, callback, accumulate_grad_batches=window, max_epochs=2)
    assert trainer.skipped_steps > 2
    expected = average_by_hand(OPTIMIZERS[optimizer], batches, window, partial(AveragedModel, **average))
    result = callback.average.module if kind == "own" else module.net  # Lightning's leaves the average in the module
    assert_same_weights(result, expected.module)
    if kind == "own":
        assert callback.average.n_averaged == expected.n_averaged
    else:
        assert not {"on_after_optimizer_step", "should_update"} & vars(callback).keys()


# --- readers inside a step --------------------------------------------------------------------------------------------


def test_interrupted_run_is_settled(tmp_path, late):
    """A save after an interruption has the outcome, and skipped steps are counted."""

    def interrupt(batch, batch_idx):
        if batch_idx == 3:
            raise KeyboardInterrupt

    module = scheduled()
    module.on_train_batch_start = interrupt
    with pytest.raises(SystemExit):
        fit(tmp_path, module, make_batches(6, gains={2: 1e30}), ScaleMonitor())
    trainer = module.trainer
    assert trainer.skipped_steps == 1
    trainer.save_checkpoint(tmp_path / "now.ckpt")
    saved = torch.load(tmp_path / "now.ckpt", weights_only=True)
    assert saved["lr_schedulers"][0]["last_epoch"] == 2
    assert saved["loops"]["amp_trainer"]["progress"]["batch_idx"] == 2  # the last that was trained


@pytest.mark.parametrize("fused", [False, True])
def test_values_set_by_the_user_in_groups_are_not_rolled_back(tmp_path, late, fused):
    used = []

    class WarmUp(Watch):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.01 * batch_idx

        def on_before_optimizer_step(self, trainer, module, optimizer):
            used.append((optimizer.param_groups[0]["weight_decay"], optimizer.param_groups[0]["lr"]))

    make = partial(torch.optim.SGD, lr=0.1, fused=fused)
    module = Regression(optimizer=make, schedule=partial(lr_scheduler.ExponentialLR, gamma=0.5), interval="step")
    fit(tmp_path, module, make_batches(5, gains={2: 1e30}), WarmUp())
    assert used == [(0.01 * i, rate) for i, rate in enumerate([0.1, 0.05, 0.025, 0.025, 0.0125])]


class Counting(lr_scheduler.LRScheduler):
    """Keeps its own list, updated in place."""

    def __init__(self, optimizer):
        self.steps = []
        super().__init__(optimizer)

    def get_lr(self):
        self.steps.append(1)
        return [0.1 / len(self.steps) for _ in self.optimizer.param_groups]


class OwnStep(Regression):
    """Counts steps of its schedule itself."""

    calls = 0

    def lr_scheduler_step(self, scheduler, metric):
        self.calls += 1
        self.optimizers().param_groups[0]["lr"] = 0.01 * (1 + self.calls)


@pytest.mark.parametrize("kind", [Regression, OwnStep])
def test_state_that_a_snapshot_would_miss(tmp_path, late, kind):
    rates = []
    for fused in (False, True):
        watch = RatesOfUpdates()
        module = kind(optimizer=partial(torch.optim.SGD, lr=0.1, fused=fused), schedule=Counting, interval="step")
        fit(tmp_path, module, make_batches(6, gains={2: 1e30}), watch)
        rates.append(watch.rates)
    assert rates[0] == rates[1]
    assert rates[0][2] == rates[0][3]
