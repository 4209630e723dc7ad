import warnings

import pytest
import torch

from tests.support import Regression, loader_of, make_batches, make_net, make_trainer, native_fp16
from trainer.callbacks import ScalerCheckpoint
from trainer.callbacks.scaler_checkpoint import KEY

SAVED = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7}


def callbacks_of(trainer):
    return [callback for callback in trainer.callbacks if isinstance(callback, ScalerCheckpoint)]


def test_on_by_default_and_not_doubled(tmp_path):
    """Also without loss scaling, because it warns about an unused state in the checkpoint."""
    assert len(callbacks_of(make_trainer(tmp_path, precision="32-true"))) == 1
    own = ScalerCheckpoint()
    assert callbacks_of(make_trainer(tmp_path, precision="16-mixed", callbacks=[own])) == [own]


def fit_and_save(tmp_path, precision):
    trainer = make_trainer(tmp_path, precision=precision)
    trainer.fit(Regression(make_net()), loader_of(make_batches(5, gains={1: 1e30})))
    path = tmp_path / "saved.ckpt"
    trainer.save_checkpoint(path)
    return trainer, path


def resume(tmp_path, precision, path, epochs=1):
    """Return the messages of a run that starts from ``path``, and its Trainer."""
    trainer = make_trainer(tmp_path, precision=precision, max_epochs=epochs)
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.fit(Regression(make_net()), loader_of(make_batches(5)), ckpt_path=path)
    return [str(w.message) for w in caught if "scaler" in str(w.message)], trainer


def test_scale_and_tracker_are_saved_and_restored(tmp_path):
    trainer, path = fit_and_save(tmp_path, native_fp16(init_scale=256.0, growth_interval=100))
    assert torch.load(path, weights_only=True)[KEY] == trainer.scaler.state_dict() == {
        "scale": 128.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 100, "_growth_tracker": 3,
        "min_scale": 1.0, "max_scale": float("inf"),
    }  # fmt: skip
    messages, resumed = resume(tmp_path, native_fp16(init_scale=64.0, growth_interval=5), path, epochs=2)
    assert messages == []
    # tracker 3, then five more steps; the interval is the new run's: it grows at its fifth
    assert (resumed.scaler.get_scale(), resumed.scaler._get_growth_tracker()) == (256.0, 3)
    assert resumed.skipped_steps == trainer.skipped_steps == 1


@pytest.mark.parametrize(
    "key", [KEY, "FSDPPrecision", "MixedPrecisionPlugin", "NativeMixedPrecisionPlugin", "native_amp_scaling_state"]
)
def test_lightnings_checkpoints_of_any_age(tmp_path, key):
    trainer = make_trainer(tmp_path, precision="16-mixed")
    trainer.training = True
    ScalerCheckpoint().on_load_checkpoint(trainer, None, {key: SAVED})
    assert trainer.scaler.get_scale() == trainer.scaler.current_scale == 1024.0
    assert trainer.scaler._init_growth_tracker == 7


def test_16_mixed_to_others_and_back(tmp_path):
    """Each reports once that it does not need the scaler's state, and passes it on."""
    trainer, path = fit_and_save(tmp_path, native_fp16(init_scale=256.0, growth_interval=100))
    state = trainer.scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (128.0, 3)
    for epochs, precision in ((2, "bf16-mixed"), (3, "32-true")):
        (message,), other = resume(tmp_path, precision, path, epochs=epochs)
        assert f"has a loss-scaler state (scale 128), but precision={precision!r} does not scale the loss." in message
        assert other.global_step == 5 * epochs
        other.save_checkpoint(path)
    assert torch.load(path, weights_only=True)[KEY] == state
    messages, back = resume(tmp_path, native_fp16(init_scale=512.0, growth_interval=100), path, epochs=4)
    assert messages == []
    assert (back.scaler.get_scale(), back.scaler._get_growth_tracker()) == (128.0, 3 + 5)


def test_from_a_run_without_a_scaler(tmp_path):
    fp32, path = make_trainer(tmp_path), tmp_path / "fp32.ckpt"
    fp32.fit(Regression(make_net()), loader_of(make_batches(2)))
    fp32.save_checkpoint(path)
    (message,), resumed = resume(tmp_path, native_fp16(init_scale=512.0), path, epochs=2)
    assert "has no loss-scaler state" in message
    assert "precision='16-mixed' scales the loss. The scale starts again at 512" in message
    assert resumed.scaler.get_scale() == 512.0
