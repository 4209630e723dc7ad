"""DeepSpeed as a strategy, before processes start: accepted configs, and those that contradict the Trainer."""

import json
import sys

import pytest
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy as LightningDeepSpeedStrategy

from tests.parity import ours
from trainer import CheckpointFiles, DeepSpeedStrategy
from trainer.callbacks import GradientClipping, LayerNorms, OverflowReport, ScaleMonitor
from trainer.distributed.deepspeed_engine import DeepSpeedEngine
from trainer.distributed.zero import ZeroGradients, ZeroScaler
from trainer.errors import ConfigurationError, PrecisionError, UnsupportedError
from trainer.precision import MixedPrecision


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Stand in for the package, which is imported after processes start."""
    monkeypatch.setattr("trainer.common.packages.is_installed", lambda name: True)


def zero(trainer):
    return trainer.strategy.complete(trainer.precision, 1)["zero_optimization"]


@pytest.mark.parametrize(
    ("name", "stage", "optimizer", "parameters"),
    [
        ("deepspeed", 2, False, False),
        ("DeepSpeed_Stage_2_offload", 2, True, False),
        ("deepspeed_stage_3_offload", 3, True, True),
    ],
)
def test_names_are_lightnings(name, stage, optimizer, parameters):
    before = set(sys.modules)
    trainer = ours(strategy=name, devices=2)
    assert "deepspeed" not in set(sys.modules) - before
    assert (type(trainer.engine), type(trainer.strategy)) == (DeepSpeedEngine, DeepSpeedStrategy)
    assert isinstance(trainer.engine.gradients, ZeroGradients)
    assert trainer.strategy.zero_stage_3 is trainer.pad_evaluation is (stage == 3)
    config = zero(trainer)
    assert config["stage"] == stage
    assert ["offload_optimizer" in config, "offload_param" in config] == [optimizer, parameters]


def test_config_file_is_completed_by_the_trainer(tmp_path):
    given = {
        "train_batch_size": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "steps_per_print": 5,
        "fp16": {"enabled": "auto", "loss_scale_window": 7, "hysteresis": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000, "offload_param": None},
    }  # fmt: skip
    (tmp_path / "ds.json").write_text(json.dumps(given))
    trainer = ours(
        strategy=DeepSpeedStrategy(config=tmp_path / "ds.json", initial_scale_power=4), devices=2, precision="16-mixed",
        accumulate_grad_batches=2, gradient_clip_val=0.5,
    )  # fmt: skip
    config = trainer.strategy.complete("16-mixed", 2)
    assert config["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 1000}
    assert config["fp16"] == {
        "enabled": True, "loss_scale_window": 7, "initial_scale_power": 4, "hysteresis": 2, "min_loss_scale": 1,
        "loss_scale": 0,
    }  # fmt: skip
    assert (config["gradient_accumulation_steps"], config["steps_per_print"]) == (2, 5)
    assert "train_batch_size" not in config
    assert given["fp16"]["enabled"] == "auto"
    scaler = trainer.scaler
    assert isinstance(scaler, ZeroScaler)
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.get_growth_interval()) == (True, 16.0, 7)


def test_lightnings_strategy_is_accepted_with_its_settings():
    theirs = LightningDeepSpeedStrategy.__new__(LightningDeepSpeedStrategy)  # the object requires the package
    super(LightningDeepSpeedStrategy, theirs).__init__(process_group_backend="gloo")
    theirs.config = {"zero_optimization": {"stage": 1, "overlap_comm": True}, "zero_allow_untested_optimizer": True}
    theirs.loss_scale, theirs.initial_scale_power, theirs.loss_scale_window = 0, 12, 500
    theirs.hysteresis, theirs.min_loss_scale = 3, 2
    trainer = ours(strategy=theirs, devices=2, precision="16-mixed")
    assert trainer.strategy.process_group_backend == "gloo"
    assert zero(trainer) == {"stage": 1, "overlap_comm": True}
    assert trainer.strategy.scaling == {
        "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 2, "loss_scale": 0,
    }  # fmt: skip
    theirs.config = {"activation_checkpointing": {}}  # zero_optimization=False
    with pytest.raises(ConfigurationError, match=r"Got stage 0 .* strategy='ddp' does the same"):
        ours(strategy=theirs, devices=2)


def offloads(device):
    return {"config": {"zero_optimization": {"offload_optimizer": {"device": device}}}}


@pytest.mark.parametrize(
    ("strategy", "arguments", "message"),
    [
        ({"stage": 4}, {}, "Got stage 4 of DeepSpeed's ZeRO, expected 1, 2 or 3"),
        ({"stage": 1, "config": {"zero_optimization": {"stage": 2}}}, {}, r"\(stage=1\) and 'stage': 2 in its config"),
        ({"stage": 2, "offload_parameters": True}, {}, "parameters to offload at stage 2"),
        ({"offload_optimizer": False, **offloads("cpu")}, {}, r"\(offload_optimizer=False\) and .*device 'cpu'"),
        (offloads("nvme"), {}, "'offload_optimizer' with device 'nvme' for DeepSpeed, expected 'cpu' or 'none'"),
        ({"config": {"optimizer": {"type": "Adam"}}}, {}, "'optimizer' in a DeepSpeed config.*configure_optimizers"),
        ({"config": "nowhere.json"}, {}, "nowhere.json cannot be read: No such file"),
        ({"config": 3}, {}, "Got 3 as a DeepSpeed config"),
        ({"config": {"zero_optimization": True}}, {}, "Got 'zero_optimization': True in .*, expected a mapping"),
        ({"config": {"zero_optimization": {"offload_param": "cpu"}}}, {}, "Got 'offload_param': 'cpu' in .* a mapping"),
        ({"initial_scale_power": "x"}, {}, "initial_scale_power='x', expected a number of at least 0"),
        ({"config": {"gradient_clipping": 1.0}}, {}, r"Got 'gradient_clipping' in a .*Trainer\(gradient_clip_val="),
        ({"config": {"train_batch_size": 8}}, {}, "Got 'train_batch_size' in a .*the dataloader has the batch size"),
        ({"config": {"fp16": {"enabled": True}}}, {}, "precision='32-true', but the DeepSpeed config enables 'fp16'"),
        ({"initial_scale_power": 8, "config": {"fp16": {"initial_scale_power": 10}}}, {}, r"=8\) and .*_power': 10"),
    ],
)
def test_contradiction_is_an_error_with_both_values(strategy, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        ours(strategy=DeepSpeedStrategy(**strategy), devices=2, **arguments)


@pytest.mark.parametrize("precision", ["bf16-true", MixedPrecision(init_scale=8.0)])
def test_precisions_unsupported_by_deepspeed_are_refused(precision):
    with pytest.raises(PrecisionError, match="with strategy='deepspeed'"):
        ours(strategy="deepspeed", devices=2, precision=precision)


@pytest.mark.parametrize(
    "callback", [LayerNorms(), GradientClipping(1.0, norm_type=float("inf")), StochasticWeightAveraging(0.1)]
)
def test_callbacks_that_need_gradients_are_refused(callback):
    with pytest.raises(UnsupportedError, match=f"Got {type(callback).__name__} with strategy='deepspeed'. It "):
        ours(strategy="deepspeed", devices=2, precision="bf16-mixed", callbacks=[callback])


def test_callbacks_that_read_gradients_are_not_default(caplog):
    trainer = ours(strategy="deepspeed", devices=2, precision="16-mixed", callbacks=[ScaleMonitor()])
    assert not any(isinstance(callback, OverflowReport) for callback in trainer.callbacks)
    assert any(isinstance(callback, OverflowReport) for callback in ours(precision="16-mixed").callbacks)
    (message,) = [one.message for one in caplog.records if "ScaleMonitor" in one.message]
    assert message == "ScaleMonitor: strategy='deepspeed' does not expose gradients, so underflow is not measured."


def test_folders_are_written_synchronously():
    with pytest.raises(UnsupportedError, match="writes its files synchronously"):
        ours(strategy="deepspeed", devices=2, plugins=[CheckpointFiles(sharded=True, asynchronous=True)])


def test_error_without_the_package_has_the_install_command(monkeypatch):
    monkeypatch.setattr("trainer.common.packages.is_installed", lambda name: False)
    with pytest.raises(UnsupportedError, match="pip install deepspeed"):
        ours(strategy="deepspeed", devices=2)


class Dynamic:
    """The rule of DeepSpeed's dynamic loss scaler."""

    dynamic, scale_window, delayed_shift = True, 3, 2
    cur_scale, cur_iter, last_overflow_iter, cur_hysteresis = 16.0, 0, -1, 2

    def step(self):
        good = self.cur_iter - self.last_overflow_iter - 1
        if good > 0 and good % self.scale_window == 0:
            self.cur_scale *= 2
        self.cur_iter += 1


@pytest.mark.parametrize("steps", [0, 4, 7])
def test_scale_continues_from_a_state(steps):
    first, second = Dynamic(), Dynamic()
    for _ in range(steps):
        first.step()
    first.cur_hysteresis = 1
    scalers = [ZeroScaler("cpu", True, 16.0, 3, 1.0) for _ in range(2)]
    scalers[0].follow(lambda: first)
    scalers[1].load_state_dict(scalers[0].state_dict())  # before a run: kept for it
    assert scalers[1].get_scale() == first.cur_scale
    scalers[1].follow(lambda: second)
    assert second.cur_hysteresis == 1
    for _ in range(7):
        first.step()
        second.step()
        assert scalers[0].current_scale == scalers[1].current_scale == first.cur_scale
