from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from tests.support import FakeTrainer, loader_of, make_batches, make_trainer, native_fp16, plugin_of
from trainer.callbacks import ScaleMonitor, scale_monitor
from trainer.precision.underflow import Underflow
from trainer.state.outcome import StepOutcome


class Steps:
    """Feeds a monitor one outcome after the other, and keeps what it logs."""

    def __init__(self, monitor, **values):
        self.monitor, self.logged = monitor, []
        log = lambda *value: self.logged.append(value)  # noqa: E731
        self.trainer = FakeTrainer(optimizers=[0, 1], engine=None, log_metric=log, **values)

    def __call__(self, scale, skipped=False, optimizers=(0,)):
        self.trainer.progress.skipped_steps += skipped
        outcome = StepOutcome(skipped, scale * 2 if skipped else scale, scale, None, optimizers)
        for optimizer in optimizers:
            self.monitor.on_after_optimizer_step(self.trainer, None, optimizer, outcome)
        return self


def test_skip_rate_covers_a_window():
    monitor = ScaleMonitor(window=4)
    assert monitor.skip_rate == 0.0
    steps, rates = Steps(monitor), []
    for skipped in (True, True, False, False, False, False, False, True):
        steps(4096.0, skipped=skipped)
        rates.append(monitor.skip_rate)
    assert rates == [1.0, 1.0, 2 / 3, 2 / 4, 1 / 4, 0.0, 0.0, 1 / 4]


def test_several_optimizers_are_one_step():
    steps = Steps(ScaleMonitor())(4096.0, optimizers=(0, 1))
    steps(4096.0, optimizers=(1,))
    assert [name for name, _ in steps.logged] == ["amp/scale", "amp/skipped_steps", "amp/skip_rate"] * 2
    assert len(steps.monitor._recent) == 2


def test_monitor_logs_nothing_without_loss_scaling():
    assert Steps(ScaleMonitor(), scale=None)(1.0).logged == []


# --- underflow ------------------------------------------------------------------------------------------------------

SMALLEST_NORMAL, SMALLEST = 2.0**-14, 2.0**-24


class Slopes(LightningModule):
    """Parameters with given gradients."""

    learning_rate = 0.0

    def __init__(self, **slopes):
        super().__init__()
        self.slopes = {name: torch.tensor(values) for name, values in slopes.items()}
        self.weights = nn.ParameterDict({name: torch.zeros(len(values)) for name, values in slopes.items()})

    def training_step(self, batch, batch_idx):
        return sum((self.weights[name] * slopes).sum() for name, slopes in self.slopes.items()) * batch[2]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


TINY = SMALLEST_NORMAL * 0.99


def look_at(folder, module, monitor, number=4, gains=None, **arguments):
    precision = native_fp16(init_scale=arguments.pop("init_scale", 1.0))
    arguments = {"precision": precision, "callbacks": [monitor], "log_every_n_steps": 1} | arguments
    trainer = make_trainer(folder, **arguments)
    trainer.fit(module, loader_of(make_batches(number, gains=gains)))
    return trainer


def monitor_of(**arguments):
    return ScaleMonitor(**{"every_n_steps": 1} | arguments)


def test_zeros_and_subnormal_elements_are_two_numbers(tmp_path):
    module = Slopes(a=[0.0, 0.0, 0.0, TINY, SMALLEST, 1.0, -TINY, -1.0], b=[1.0, SMALLEST_NORMAL])
    monitor = monitor_of()
    trainer = look_at(tmp_path, module, monitor)
    assert monitor.underflow == [
        Underflow("", 3 / 10, 3 / 7), Underflow("weights.a", 3 / 8, 3 / 5), Underflow("weights.b", 0.0, 0.0)
    ]  # fmt: skip
    assert trainer.callback_metrics["amp/underflow"].item() == pytest.approx(3 / 7)
    assert trainer.callback_metrics["amp/zeros"].item() == pytest.approx(3 / 10)
    assert trainer.scaler.before_unscale == []


def test_underflow_is_counted_in_scaled_gradients(tmp_path):
    """With clipping and accumulation; gradients that the scale lifts out of the subnormal range do not count."""
    module, monitor = Slopes(a=[TINY / 2, TINY / 512, TINY / 4096, 2.0]), monitor_of()
    look_at(tmp_path, module, monitor, init_scale=1024.0, accumulate_grad_batches=2, gradient_clip_val=1e-3)
    assert monitor.underflow[0] == Underflow("", 0.0, 1 / 4)


def test_worst_layers_go_to_the_loggers_one_by_one(tmp_path):
    slopes = {"a": [1.0, 1.0], "b": [TINY, 1.0], "c": [TINY, TINY], "d": [TINY, 1.0, 1.0, 0.0]}
    monitor, logger = monitor_of(every_n_steps=2, worst_layers=2), CSVLogger(tmp_path)
    look_at(tmp_path, Slopes(**slopes), monitor, 5, logger=logger)
    lines = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    header = lines[0].split(",")
    rows = [dict(zip(header, line.split(","), strict=True)) for line in lines[1:]]
    own = [row for row in rows if row["amp/underflow/weights.c"]]
    assert [(row["step"], row["amp/underflow/weights.c"], row["amp/underflow/weights.b"]) for row in own] == [
        ("1", "1.0", "0.5"), ("3", "1.0", "0.5")
    ]  # fmt: skip
    assert not any("weights.a" in name or "weights.d" in name for name in header)
    total = {row["step"]: row["amp/underflow"] for row in rows if row["amp/underflow"]}
    assert float(total["1"]) == pytest.approx(4 / 9)


def test_skipped_step_says_nothing_about_small_gradients(tmp_path):
    module, monitor = Slopes(a=[TINY, 1.0]), monitor_of(every_n_steps=2)
    look_at(tmp_path, module, monitor, gains={1: float("inf"), 3: float("inf")})
    assert monitor.underflow == []


def test_zeros_are_no_underflow(tmp_path):
    """A healthy embedding has almost nothing else; sparse gradients leave them out."""

    class Embedded(Slopes):
        def __init__(self):
            super().__init__(a=[1.0])
            self.embedding = nn.Embedding(100, 2, sparse=True)

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + self.embedding(torch.tensor([3, 3])).sum()

    monitor = monitor_of()
    look_at(tmp_path, Embedded(), monitor)
    assert monitor.underflow[0] == Underflow("", 198 / 201, 0.0)


@pytest.mark.parametrize("arguments", [{"every_n_steps": 0}, {"every_n_steps": 50}])
def test_looking_costs_nothing_where_nobody_looks(tmp_path, monkeypatch, arguments):
    monkeypatch.setattr(scale_monitor, "UnderflowProbe", lambda device: SimpleNamespace(start=None, finish=list))
    look_at(tmp_path, Slopes(a=[1.0]), monitor_of(**arguments))


# --- the norm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "gain", "seen"), [("32-true", 7.0, [10, 35, 15]), ("16-mixed", float("inf"), [10, 10, 15])]
)
def test_norm_of_completed_steps(tmp_path, precision, gain, seen):
    norms = []
    look = LambdaCallback(on_train_batch_end=lambda run, *_: norms.append(run.callback_metrics["grad_norm"].item()))
    options = {"precision": plugin_of(precision), "callbacks": [monitor_of(), look]}
    trainer = look_at(tmp_path, Slopes(a=[3.0], b=[4.0]), None, 3, gains={0: 2.0, 1: gain, 2: 3.0}, **options)
    assert norms == seen
    assert trainer.callback_metrics["grad_norm_epoch"].item() == (12.5 if precision == "16-mixed" else 20.0)


def test_clipping_logs_the_norm_itself(tmp_path, monkeypatch):
    measure = Mock(wraps=torch.nn.utils.get_total_norm)
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", measure)
    trainer = look_at(tmp_path, Slopes(a=[3.0], b=[4.0]), monitor_of(), gradient_clip_val=1.0)
    assert (trainer.callback_metrics["grad_norm_step"].item(), measure.call_count) == (5.0, 0)


def test_a_resumed_run_goes_on_counting():
    whole, first, second = (Steps(ScaleMonitor(window=4, every_n_steps=0)) for _ in range(3))
    outcomes = [(4096.0, False), (2048.0, True), (2048.0, False), (1024.0, True), (1024.0, True), (1024.0, False)] * 3
    for i, outcome in enumerate(outcomes):
        whole(*outcome)
        if i == 7:
            second.monitor.load_state_dict(first.monitor.state_dict())
            second.monitor.on_train_start(second.trainer, None)
            second.trainer.progress.skipped_steps = first.trainer.progress.skipped_steps
        (first if i < 7 else second)(*outcome)
    assert first.logged + second.logged == whole.logged
    second.monitor.on_train_start(second.trainer, None)
    assert second.monitor.skip_rate == 0.0  # another fit
