"""After a loss spike the run equals one without the batches since the checkpoint."""

import json
import math
import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torchmetrics import MeanMetric

from tests.parity import assert_same_weights
from tests.support import (
    Regression,
    adamw,
    loader_of,
    loss_of,
    make_batches,
    make_net,
    make_trainer,
    momentum,
    plugin_of,
    scaler_of,
    train_by_hand,
)
from trainer.callbacks import RollBackOnLossSpike, RunRecorder
from trainer.errors import ConfigurationError, LossSpikeError

NUMBER, SPIKE = 24, 17
STEPPED = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.9)
SPIKES = {SPIKE: 50.0}
ROLLED_BACK = "The loss of step .* is .*, more than 5 times .*, the median of the last 4"


def callbacks_of(folder, every, **options):
    return [
        RollBackOnLossSpike(**{"threshold": 5.0, "window": 4} | options),
        ModelCheckpoint(folder / "checkpoints", every_n_train_steps=every, save_top_k=-1, filename="{step}"),
    ]


def fit(folder, module, batches, callbacks, path=None, **arguments):
    trainer = make_trainer(folder, callbacks=callbacks, **{"enable_checkpointing": True} | arguments)
    trainer.fit(module, loader_of(batches) if isinstance(batches, list) else batches, ckpt_path=path)
    return trainer


@pytest.mark.parametrize(("precision", "window", "optimizer"), [
    ("32-true", 3, adamw), ("16-mixed", 1, momentum),
])  # fmt: skip
def test_run_equals_one_without_these_batches(tmp_path, precision, window, optimizer):
    """With checkpoints every 3 steps: the spike is in step 18, or with windows of 3 batches in step 6."""
    scaling = {"init_scale": 256.0, "growth_interval": 3}
    batches, callbacks = make_batches(NUMBER, gains=SPIKES), callbacks_of(tmp_path, 3)
    module = Regression(make_net(), optimizer, STEPPED, interval="step")
    given = {"precision": plugin_of(precision, **scaling), "accumulate_grad_batches": window}
    with pytest.warns(UserWarning, match=ROLLED_BACK):
        trainer = fit(tmp_path, module, batches, callbacks, **given)
    first = {1: 15, 3: 9}[window]
    (done,) = callbacks[0].rollbacks
    assert (done["first"], done["last"]) == ([0, first], [0, SPIKE])
    assert (done["step"], done["to_step"]) == (SPIKE // window, first // window)
    left, scaler = batches[:first] + batches[SPIKE + 1 :], scaler_of(precision, **scaling)
    oracle = train_by_hand(
        net := make_net(), left, precision=precision, optimizer=optimizer, scaler=scaler, window=window,
        schedule=STEPPED,
    )  # fmt: skip
    assert_same_weights(module.net, net)
    assert trainer.global_step == trainer.progress.updates == len(left) // window
    assert trainer.optimizers[0].param_groups[0]["lr"] == oracle.rates[-1]
    assert trainer.scaler.get_scale() == scaler.get_scale()
    assert trainer.progress.batches_started == NUMBER


class Noisy(Regression):
    """Draws random numbers, has a buffer that depends on the data, and logs."""

    def __init__(self):
        torch.manual_seed(0)
        layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3)
        super().__init__(nn.Sequential(*layers), momentum)
        self.late = MeanMetric()  # empty in the checkpoint, and not logged

    def training_step(self, batch, batch_idx):
        loss = loss_of(self.net, batch)
        self.log("loss", loss, on_epoch=True, batch_size=4)
        if self.global_step >= 15:
            self.late.update(loss.detach())
        return loss


def noisy(folder, batches, path=None):
    torch.manual_seed(1)
    average, module = EMAWeightAveraging(decay=0.7), Noisy()
    return fit(folder, module, batches, [average, *callbacks_of(folder, 3)], path), module, average


def test_random_numbers_buffers_averages_and_metrics_are_those_of_the_checkpoint(tmp_path):
    """A run that is resumed from a checkpoint after the spike ends in the same way."""
    batches = make_batches(NUMBER, gains=SPIKES)
    with pytest.warns(UserWarning, match=ROLLED_BACK):
        trainer, module, average = noisy(tmp_path, batches)
    other, without, its = noisy(tmp_path / "without", batches[:15] + batches[18:])
    assert_same_weights(module, without)
    assert_same_weights(average._average_model, its._average_model)
    assert trainer.callback_metrics["loss_epoch"] == other.callback_metrics["loss_epoch"]
    assert module.late.compute() == without.late.compute()
    with warnings.catch_warnings(action="ignore"):
        warnings.filterwarnings("error", ROLLED_BACK)
        trainer, resumed, _ = noisy(tmp_path, batches, path=tmp_path / "checkpoints" / "step=18.ckpt")
    assert_same_weights(resumed, module)
    assert trainer.global_step == 21
    assert len(next(one for one in trainer.callbacks if isinstance(one, RollBackOnLossSpike)).rollbacks) == 1


def test_epochs_that_have_ended_since_are_counted(tmp_path):
    """The loss, which spikes in one batch of the second epoch, is logged by name, and with a metric object."""

    def log(loss, batch_idx):
        loss = loss * (50.0 if (module.current_epoch, batch_idx) == (1, 2) else 1.0)
        module.mean(loss)
        module.log("object", module.mean, on_epoch=True, on_step=False)
        module.log("loss", loss, on_epoch=True, on_step=False, batch_size=4)
        return loss

    schedule, batches = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5), make_batches(6)
    module = Regression(make_net(), momentum, schedule, log, interval="epoch")
    module.mean = MeanMetric()
    with pytest.warns(UserWarning, match="from batch_idx 5 of epoch 0 to batch_idx 2 of epoch 1"):
        trainer = fit(tmp_path, module, batches, callbacks_of(tmp_path, 5), max_epochs=2)
    optimizer = momentum((net := make_net()).parameters())
    train_by_hand(net, batches[:5], optimizer=lambda _: optimizer)
    optimizer.param_groups[0]["lr"] *= 0.5
    losses = train_by_hand(net, batches[3:], optimizer=lambda _: optimizer).losses
    assert_same_weights(module.net, net)
    for name in ("loss", "object"):
        assert trainer.callback_metrics[name].item() == pytest.approx(sum(losses) / 3)
    assert (trainer.current_epoch, trainer.global_step) == (2, 8)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.05 * 0.5**2


def test_first_skipped_batch_may_be_the_first_of_an_epoch(tmp_path):
    callbacks = callbacks_of(tmp_path, 6)
    with pytest.warns(UserWarning, match="from batch_idx 0 of epoch 1 to batch_idx 1 of epoch 1"):
        fit(tmp_path, Regression(), make_batches(6, gains={1: 50.0}), callbacks, max_epochs=2)
    assert callbacks[0].rollbacks[0]["first"] == [1, 0]


def test_number_and_distance_of_roll_backs_are_configurable(tmp_path):
    callbacks = callbacks_of(tmp_path, 3, margin=3, max_rollbacks=1)
    with (
        pytest.warns(UserWarning, match=ROLLED_BACK),
        pytest.raises(LossSpikeError, match=r"The loss of step 11 .* reached the limit of .*max_rollbacks=1"),
    ):
        fit(tmp_path, Regression(), make_batches(NUMBER, gains={10: 50.0, 16: 50.0}), [*callbacks, RunRecorder()])
    assert [(one["step"], one["to_step"]) for one in callbacks[0].rollbacks] == [(10, 6)]
    record = json.loads(next(tmp_path.rglob("run.json")).read_text())
    assert record["rollbacks"] == json.loads(json.dumps(callbacks[0].rollbacks))
    assert record["rollbacks"][0]["checkpoint"].endswith("step=6.ckpt")


def test_loss_that_is_not_finite_is_a_spike(tmp_path):
    module, batches = Regression(), make_batches(NUMBER, gains={SPIKE: float("nan")})
    with pytest.warns(UserWarning, match="The loss of step 17 is nan"):
        fit(tmp_path, module, batches, callbacks_of(tmp_path, 3))
    train_by_hand(net := make_net(), batches[:15] + batches[18:])
    assert_same_weights(module.net, net)


def test_newer_checkpoints_with_weights_only_are_passed_over(tmp_path):
    weights = ModelCheckpoint(tmp_path / "weights", every_n_train_steps=1, save_top_k=-1, save_weights_only=True)
    callbacks = [*callbacks_of(tmp_path, 3), weights]
    with pytest.warns(UserWarning, match=ROLLED_BACK):
        fit(tmp_path, Regression(), make_batches(NUMBER, gains=SPIKES), callbacks)
    assert [one["to_step"] for one in callbacks[0].rollbacks] == [15]


@pytest.mark.parametrize("gain", [50.0, math.nan])
def test_run_without_an_earlier_checkpoint_continues(tmp_path, gain):
    """The median ignores losses that are not finite."""
    module, batches, callbacks = Regression(), make_batches(8, gains={6: gain}), callbacks_of(tmp_path, 100)
    with pytest.warns(UserWarning, match="The loss of step . is .* The run continues without a rollback"):
        fit(tmp_path, module, batches, callbacks)
    train_by_hand(net := make_net(), batches)
    for mine, theirs in zip(module.parameters(), net.parameters(), strict=True):
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())
    assert all(map(math.isfinite, callbacks[0].state_dict()["losses"]))


def test_loss_on_a_gpu_is_read_one_step_later(cuda, tmp_path):
    callbacks = callbacks_of(tmp_path, 3)
    with pytest.warns(UserWarning, match=ROLLED_BACK):
        trainer = fit(tmp_path, Regression(), make_batches(NUMBER, gains=SPIKES), callbacks, accelerator="gpu")
    (done,) = callbacks[0].rollbacks
    assert (done["step"], done["to_step"], done["last"]) == (SPIKE, 15, [0, SPIKE + 1])
    assert trainer.global_step == NUMBER - 4


def test_roll_back_requires_a_checkpoint(tmp_path):
    with pytest.raises(ConfigurationError, match="without a ModelCheckpoint"):
        fit(tmp_path, Regression(), make_batches(2), [RollBackOnLossSpike()], enable_checkpointing=False)
