import copy
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from tests.parity import assert_same_weights
from tests.support import (
    OPTIMIZERS,
    Regression,
    adam,
    fit_and_watch,
    loader_of,
    make_batches,
    make_net,
    make_trainer,
    manual_step,
    momentum,
    native_fp16,
    train_by_hand,
)
from trainer import Trainer
from trainer.callbacks import NonFiniteGuard
from trainer.errors import ConfigurationError, NonFiniteError

NAN = float("nan")
BAD = 3
STEPPED = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)


def with_a_bad_one(gain=NAN):
    return make_batches(6, gains={BAD: gain})


def without_it():
    return make_batches(BAD) + make_batches(6)[BAD + 1 :]


@pytest.mark.parametrize(
    ("precision", "optimizer", "gain"),
    [("32-true", "momentum-fused", NAN), ("bf16-mixed", "adamw-fused", float("inf")), ("64-true", "adam", NAN)],
)
def test_skipped_batch_changes_nothing(tmp_path, precision, optimizer, gain):
    make, dtype = OPTIMIZERS[optimizer], torch.float64 if precision == "64-true" else torch.float32
    module, net = Regression(make_net().to(dtype), make, STEPPED, interval="step"), make_net().to(dtype)
    options = {"precision": precision, "callbacks": [NonFiniteGuard("skip")]}
    with pytest.warns(UserWarning, match=r"Optimizer step 3 of epoch 0 was skipped"):
        trainer, trace = fit_and_watch(tmp_path, module, with_a_bad_one(gain=gain), **options)
    batches = [[part.to(dtype) for part in batch] for batch in without_it()]
    oracle = train_by_hand(net, batches, precision=precision, optimizer=make, schedule=STEPPED)
    assert trace.skipped == [False] * 3 + [True] + [False] * 2
    assert [trace.rates[i] for i in (0, 1, 2, 4, 5)] == oracle.rates
    assert_same_weights(module.net, net)
    assert (trainer.skipped_steps, trainer.global_step) == (1, 6)
    assert trace.scales == trace.next_scales == [1.0] * 6


@pytest.mark.parametrize(("precision", "optimizer"), [("32-true", "momentum"), ("bf16-mixed", "adam-fused")])
def test_stopping_keeps_the_last_good_weights(tmp_path, precision, optimizer):
    module = Regression(make_net(), OPTIMIZERS[optimizer])
    trainer = make_trainer(tmp_path, precision=precision, callbacks=[NonFiniteGuard()])
    scaler = trainer.scaler
    with pytest.raises(NonFiniteError, match=r"(?s)at optimizer step 3 of epoch 0.*batch\[2\].nan_to_num_") as caught:
        trainer.fit(module, loader_of(with_a_bad_one()))
    train_by_hand(net := make_net(), make_batches(3), precision=precision, optimizer=OPTIMIZERS[optimizer])
    assert_same_weights(module.net, net)
    assert (caught.value.step, caught.value.batch_idx) == (3, 3)
    assert "Verdict: data: the batch is the cause (step 3, batch 3)" in str(caught.value)
    assert trainer.skipped_steps == 1
    assert trainer.scaler is scaler


def test_batch_of_a_window_is_named(tmp_path):
    trainer = make_trainer(tmp_path, accumulate_grad_batches=3, callbacks=[NonFiniteGuard()])
    with pytest.raises(NonFiniteError, match=r"step 1 of epoch 0.\nVerdict: data: .* \(step 1, batch 3\)") as caught:
        trainer.fit(Regression(), loader_of(with_a_bad_one()))
    assert ("batch", "batch_idx 3, number 1 of 3 in its window, rank 0") in caught.value.report.rows()
    assert (caught.value.step, caught.value.batch_idx) == (1, 3)


def test_unguarded_steps_read_no_gradients(tmp_path):
    module = Regression()
    trainer, trace = fit_and_watch(tmp_path, module, with_a_bad_one(), callbacks=[NonFiniteGuard("continue")])
    assert trace.skipped == [False] * 6
    assert not trainer.scaler.skips_steps
    assert all(p.isnan().any() for p in module.net.parameters())
    trainer.save_checkpoint(tmp_path / "broken.ckpt")


@pytest.mark.parametrize("window", [1, 2])
def test_skipping_puts_spoilt_buffers_back(tmp_path, window):
    torch.manual_seed(0)
    module = Regression(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), momentum)
    without, batches = copy.deepcopy(module), make_batches(6)
    batches[BAD][0][0, 0] = NAN
    with pytest.warns(UserWarning, match="was skipped"):
        fit_and_watch(tmp_path, module, batches, accumulate_grad_batches=window, callbacks=[NonFiniteGuard("skip")])
    used = [batch for i, batch in enumerate(batches) if i // window != BAD // window]
    fit_and_watch(tmp_path, without, used, accumulate_grad_batches=window)
    for name, value in without.state_dict().items():
        assert "num_batches" in name or torch.equal(module.state_dict()[name], value), name


def test_skipping_ends_after_consecutive_skips(tmp_path):
    gains = dict.fromkeys([0, *range(2, 9)], NAN)
    trainer = make_trainer(tmp_path, callbacks=[NonFiniteGuard("skip", max_in_a_row=4)])
    with (
        pytest.warns(UserWarning, match="step 0 of epoch 0 was skipped"),
        pytest.raises(NonFiniteError, match="4 optimizer steps in a row, up to step 5"),
    ):
        trainer.fit(Regression(), loader_of(make_batches(9, gains=gains)))


@pytest.mark.parametrize("manual", [True, False])
def test_modules_that_step_by_themselves(tmp_path, manual):
    module = Regression(change=lambda loss, _: manual_step(module, loss) if manual else loss)
    module.automatic_optimization = not manual
    module.optimizer_step = lambda epoch, batch_idx, optimizer, closure: optimizer.step(closure)
    with pytest.warns(UserWarning, match="was skipped"):
        trainer, _ = fit_and_watch(tmp_path, module, with_a_bad_one(), callbacks=[NonFiniteGuard("skip")])
    train_by_hand(net := make_net(), without_it())
    assert_same_weights(module.net, net)
    assert trainer.skipped_steps == 1


def test_optimizers_that_evaluate_the_loss_are_refused_at_every_step_only(tmp_path):
    module, batches = Regression(optimizer=torch.optim.LBFGS), loader_of(make_batches(2))
    make_trainer(tmp_path).fit(module, batches)
    with pytest.raises(ConfigurationError, match="LBFGS"):
        make_trainer(tmp_path, callbacks=[NonFiniteGuard()]).fit(module, batches)


# --- with loss scaling --------------------------------------------------------------------------------------------


def test_only_a_loss_that_is_not_finite_stops_a_scaled_run(tmp_path):
    trainer = make_trainer(tmp_path, precision=native_fp16(init_scale=2.0**24), callbacks=[NonFiniteGuard()])
    with pytest.raises(NonFiniteError, match=r"Verdict: data: .* \(step 3, batch 3\)"):
        trainer.fit(Regression(), loader_of(with_a_bad_one()))
    assert trainer.skipped_steps > 1  # overflows do not stop it


# --- checkpoints ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights_only", [False, True])
def test_weights_that_are_not_finite_do_not_replace_good_ones(tmp_path, weights_only):
    saving = ModelCheckpoint(tmp_path, save_weights_only=weights_only, save_last=True, every_n_train_steps=2)
    trainer = make_trainer(tmp_path, enable_checkpointing=True, callbacks=[saving])
    with pytest.raises(NonFiniteError, match=r"so they were not saved(?s:.*)net.0.weight") as caught:
        trainer.fit(Regression(optimizer=adam), loader_of(with_a_bad_one()))
    assert caught.value.step == 4
    files = {path.name: torch.load(path, weights_only=True) for path in tmp_path.glob("*.ckpt")}
    assert sorted(files) == ["epoch=0-step=2.ckpt", "last.ckpt"]
    for checkpoint in files.values():
        assert checkpoint["global_step"] == 2
        assert all(tensor.isfinite().all() for tensor in checkpoint["state_dict"].values())


def test_large_weights_are_finite(tmp_path):
    module = Regression()
    module.large = nn.Parameter(torch.full((3,), 1e30))
    saving = ModelCheckpoint(tmp_path, save_last=True)
    make_trainer(tmp_path, enable_checkpointing=True, callbacks=[saving]).fit(module, loader_of(make_batches(2)))
    assert (tmp_path / "last.ckpt").exists()


# --- the rest -------------------------------------------------------------------------------------------------


def test_only_checkpoints_are_checked_by_default(tmp_path):
    for given, expected in ((None, ("stop", False)), (NonFiniteGuard("skip"), ("skip", True))):
        trainer = make_trainer(tmp_path, callbacks=given)
        (guard,) = (one for one in trainer.callbacks if isinstance(one, NonFiniteGuard))
        assert (guard.policy, guard.every_step) == expected
    assert not any(isinstance(one, NonFiniteGuard) for one in Trainer(accelerator="cpu", barebones=True).callbacks)


def test_go_on_is_a_deprecated_name_of_continue():
    with pytest.warns(FutureWarning, match=r"NonFiniteGuard\('continue'\)"):
        guard = NonFiniteGuard("go_on")
    assert (guard.policy, guard.every_step) == ("continue", False)
