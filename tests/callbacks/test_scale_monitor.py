from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback

from tests.support import Regression, fit_and_watch, make_batches, make_net, native_fp16
from trainer.callbacks import ScaleMonitor
from trainer.errors import ConfigurationError
from trainer.optimization import StepOutcome


class Steps:
    """Feeds a monitor one outcome after the other, and keeps what it logs and says."""

    def __init__(self, monitor, enabled=True):
        self.monitor, self.logged, self.said, self.skips = monitor, [], [], 0
        self.optimizers = [object(), object()]
        self.enabled = enabled

    def log(self, name, value):
        self.logged.append((name, value))

    def __call__(self, *scales, skipped=False, optimizers=(0,)):
        for scale in scales:
            self.skips += skipped
            outcome = StepOutcome(skipped, scale * 2 if skipped else scale, scale, None, optimizers)
            trainer = SimpleNamespace(
                scaler=SimpleNamespace(is_enabled=lambda: self.enabled),
                optimizers=self.optimizers,
                skipped_steps=self.skips,
            )
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for index in optimizers:
                    self.monitor.on_after_optimizer_step(trainer, self, self.optimizers[index], outcome)
            self.said += [str(w.message) for w in caught]
        return self


def test_what_is_logged_with_each_step():
    steps = Steps(ScaleMonitor(window=4))
    steps(4096.0)
    steps(2048.0, skipped=True)
    steps(2048.0)
    assert steps.logged == [
        ("amp/scale", 4096.0), ("amp/skipped_steps", 0.0), ("amp/skip_rate", 0.0),
        ("amp/scale", 4096.0), ("amp/skipped_steps", 1.0), ("amp/skip_rate", 1 / 2),
        ("amp/scale", 2048.0), ("amp/skipped_steps", 1.0), ("amp/skip_rate", 1 / 3),
    ]  # fmt: skip


def test_the_skip_rate_looks_back_on_a_window():
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


def test_nothing_where_the_loss_is_not_scaled():
    steps = Steps(ScaleMonitor(), enabled=False)(1.0)
    assert (steps.logged, steps.said) == ([], [])


def test_the_alarm_rings_once_at_once_with_number_threshold_and_advice():
    steps = Steps(ScaleMonitor(window=10))
    steps(2048.0, 1024.0)
    steps(128.0, 64.0, 32.0, skipped=True)
    assert steps.said == [
        "The loss scale fell to 64, below 100: gradients overflow often (50% of the last 4 steps were skipped)."
        " Lower the learning rate, clip gradients, or use precision='bf16-mixed'."
    ]
    steps(4096.0, 16.0)
    assert len(steps.said) == 1


def test_the_alarm_has_its_own_threshold():
    assert Steps(ScaleMonitor(alarm=10.0))(100.0, 10.0).said == []
    assert "fell to 9.5, below 10:" in Steps(ScaleMonitor(alarm=10.0))(9.5).said[0]
    assert Steps(ScaleMonitor())(100.0).said == []


def test_a_low_scale_for_long():
    steps = Steps(ScaleMonitor(patience=3))
    steps(512.0, 512.0, 1000.0)  # back inside: the count starts anew
    steps(512.0, 512.0)
    assert steps.said == []
    steps(512.0)
    assert steps.said == [
        "The loss scale has been outside [1000, 100000] for 3 steps, now 512: small gradients may vanish in float16."
        " Lower the learning rate, or use precision='bf16-mixed'."
    ]
    steps(512.0, 512.0, 4096.0, 512.0, 512.0, 512.0)
    assert len(steps.said) == 1


def test_a_high_scale_for_long():
    steps = Steps(ScaleMonitor(healthy=(200.0, 5000.0), patience=2))
    steps(5000.0, 5000.0, 8192.0)
    assert steps.said == []
    steps(8192.0, 16384.0)
    assert steps.said == [
        "The loss scale has been outside [200, 5000] for 2 steps, now 8192: gradients are very small. Check that the"
        " loss is not averaged twice; set max_scale to cap it."
    ]


def test_each_warning_is_its_own():
    steps = Steps(ScaleMonitor(patience=2))
    steps(2.0**17, 2.0**17)
    steps(512.0, 512.0)
    steps(50.0)
    assert [text.split(":")[0].split(",")[0] for text in steps.said] == [
        "The loss scale has been outside [1000",
        "The loss scale has been outside [1000",
        "The loss scale fell to 50",
    ]


def test_in_a_fit(tmp_path):
    logged = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, *_):
            logged.append({k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("amp/")})

    with pytest.warns(UserWarning, match=r"fell to 64, below 100") as said:
        trainer, trace = fit_and_watch(
            tmp_path,
            Regression(make_net()),
            make_batches(6, gains={1: 1e30, 2: 1e30, 4: 1e30}),
            precision=native_fp16(init_scale=256.0),
            callbacks=[ScaleMonitor(window=3), Look()],
        )
    assert len(said) == 1
    assert [row["amp/scale"] for row in logged] == trace.scales == [256.0, 256.0, 128.0, 64.0, 64.0, 32.0]
    assert [row["amp/skipped_steps"] for row in logged] == [0, 1, 2, 2, 3, 3]
    assert [row["amp/skip_rate"] for row in logged] == pytest.approx([0, 1 / 2, 2 / 3, 2 / 3, 2 / 3, 1 / 3])
    assert trainer.skipped_steps == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"healthy": (5.0, 4.0), "alarm": 1.0}, r"healthy=\(5.0, 4.0\), expected 0 < alarm <= healthy"),
        ({"alarm": 0.0}, r"alarm=0.0"),
        ({"alarm": 2000.0}, r"alarm=2000.0"),
        ({"patience": 0}, r"patience=0.*at least 1"),
        ({"window": 0}, r"window=0.*at least 1"),
    ],
)
def test_impossible_arguments(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        ScaleMonitor(**arguments)
