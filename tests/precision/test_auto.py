"""The precision selected for the device's hardware, and its message."""

import logging

import pytest
import torch

from tests.support import Regression, loader_of, make_batches, make_net, make_trainer
from trainer.errors import PrecisionError
from trainer.precision import AutoPrecision, FullPrecision, MixedPrecision, auto

CPU = torch.device("cpu")
LOGGER = "lightning.pytorch.utilities.rank_zero"


@pytest.fixture
def hardware(monkeypatch):
    """Simulate a device with bfloat16, Tensor Cores, both or neither."""

    def give(bfloat16, cores):
        monkeypatch.setattr(auto, "native_bfloat16", lambda device: bfloat16)
        monkeypatch.setattr(auto, "tensor_cores", lambda device: cores)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")

    return give


@pytest.mark.parametrize(
    ("device", "bfloat16", "cores", "name", "reason"),
    [
        ("cuda", True, True, "bf16-mixed", "Some GPU computes in bfloat16 natively"),
        ("cuda", False, True, "16-mixed", "Some GPU has Tensor Cores, but no bfloat16 units"),
        ("cuda", False, False, "32-true", "Some GPU has neither bfloat16 units nor Tensor Cores"),
        ("cpu", True, False, "bf16-mixed", "this CPU computes in bfloat16 natively"),
        ("cpu", False, False, "32-true", "this CPU has no bfloat16 instructions that torch uses"),
        ("xpu", True, False, "bf16-mixed", "this XPU computes in bfloat16 natively"),
        ("mps", False, False, "32-true", "torch does not report whether this MPS device computes in bfloat16 natively"),
    ],
)
def test_selection_and_its_reason(hardware, device, bfloat16, cores, name, reason):
    hardware(bfloat16, cores)
    plugin, why = AutoPrecision().choose(torch.device(device))
    assert (plugin.name, why) == (name, reason)


@pytest.mark.filterwarnings("ignore:Nothing to do")
def test_trainer_logs_the_selected_name_once(tmp_path, hardware, caplog):
    hardware(True, False)
    with caplog.at_level(logging.INFO, LOGGER):
        trainer = make_trainer(tmp_path, precision="auto")
        for _ in range(2):
            trainer.fit(Regression(), loader_of(make_batches(2)))
    messages = [record.getMessage() for record in caplog.records if "auto" in record.getMessage()]
    assert len(messages) == 1
    assert messages[0].startswith("precision='auto' is bf16-mixed here: this CPU ")
    assert trainer.precision == trainer.engine.precision.name == "bf16-mixed"


def test_only_rank_zero_logs(hardware, caplog, monkeypatch):
    hardware(True, True)
    monkeypatch.setattr(auto.rank_zero.rank_zero_only, "rank", 1, raising=False)
    with caplog.at_level(logging.INFO):
        assert AutoPrecision().for_device(CPU).name == "bf16-mixed"
    assert caplog.records == []


@pytest.mark.parametrize(("cores", "dtype"), [(True, torch.float16), (False, torch.float32)])
def test_settings_reach_the_selected_precision(hardware, cores, dtype):
    hardware(False, cores)
    settings = {"init_scale": 8.0, "growth_interval": 5, "fp32_modules": ["4"], "cpu_kernels": "native"}
    plugin = AutoPrecision(**settings).for_device(CPU)
    scaler = plugin.build_scaler(CPU)
    if cores:
        assert isinstance(plugin, MixedPrecision)
        assert (scaler.get_scale(), scaler.get_growth_interval(), plugin.fp32_modules) == (8.0, 5, ("4",))
        with plugin.session(make_net(), CPU), plugin.autocast():
            assert torch.get_autocast_dtype("cpu") is dtype
    else:
        assert type(plugin) is FullPrecision
        assert not scaler.is_enabled()


def test_settings_that_nothing_could_take():
    with pytest.raises(PrecisionError, match=r"growth_factor=0\.5"):
        AutoPrecision(growth_factor=0.5)
    with pytest.raises(TypeError, match="init_scal"):
        AutoPrecision(init_scal=1.0)


@pytest.mark.gpu
def test_on_this_gpu(tmp_path):
    trainer = make_trainer(tmp_path, accelerator="gpu", devices=1, precision="auto")
    expected = "bf16-mixed" if torch.cuda.get_device_capability() >= (8, 0) else "16-mixed"
    assert trainer.precision == expected
    trainer.fit(Regression(), loader_of(make_batches(2)))
