from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.errors import PrecisionError
from trainer.precision import MixedPrecision, cpu_fp16

CPU = torch.device("cpu")


def test_defaults_are_torchs():
    ours, theirs = MixedPrecision().build_scaler(CPU), torch.amp.GradScaler("cpu")
    assert theirs.state_dict().items() <= ours.state_dict().items()
    assert (ours.min_scale, ours.max_scale) == (1.0, float("inf"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float8"}, r"Got dtype='float8', expected 'float16' or 'bfloat16'"),
        ({"dtype": torch.float32}, r"Got dtype=torch.float32"),
        ({"cpu_kernels": "slow"}, r"Got cpu_kernels='slow', expected 'auto', 'fast' or 'native'"),
        ({"autocast_ops": "gpu"}, r"Got autocast_ops='gpu', expected 'native' or 'cuda'"),
        ({"dtype": "bfloat16", "backoff_factor": 2.0}, r"backoff_factor=2.0"),
    ],
)
def test_impossible_arguments(arguments, message):
    with pytest.raises(PrecisionError, match=message):
        MixedPrecision(**arguments)


def test_devices_that_cannot():
    with pytest.raises(PrecisionError, match=r"MPS.*GradScaler.*loss_scaling=False"):
        MixedPrecision("float16").check(torch.device("mps"))
    with pytest.raises(PrecisionError, match=r"MixedPrecision\('bfloat16', loss_scaling=False\)"):
        MixedPrecision("bfloat16", loss_scaling=True).check(torch.device("mps"))
    MixedPrecision("float16", loss_scaling=False).check(torch.device("mps"))
    with pytest.raises(PrecisionError, match="type 'meta', expected cpu, cuda, mps or xpu"):
        MixedPrecision("bfloat16").check(torch.device("meta"))


def test_float16_on_mps_requires_torchs_scaler_kernels(monkeypatch):
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

    def on_a_mac(name, key):
        return (name, key) == ("aten::_amp_update_scale_", "MPS") or has_kernel(name, key)

    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", on_a_mac)
    plugin = MixedPrecision("float16")
    plugin.check(torch.device("mps"))
    assert plugin.build_scaler(torch.device("mps")).is_enabled()


@pytest.mark.parametrize(("capability", "emulated"), [((7, 5), True), ((8, 0), False)])
def test_emulated_bf16_is_a_warning(monkeypatch, capability, emulated):
    asked = []

    def capability_of(device):
        asked.append(device)
        return capability

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability_of)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GeForce 2080")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MixedPrecision("bfloat16").check(torch.device("cuda:1"))
        MixedPrecision("float16").check(torch.device("cuda:1"))
    assert asked == [torch.device("cuda:1")]
    assert ["GeForce 2080 has no bfloat16 units" in str(w.message) for w in caught] == [True] * emulated


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_is_one_object_valid_inside_the_session(dtype):
    plugin, net = MixedPrecision(dtype), nn.Linear(2, 2)
    with plugin.session(net, CPU):
        context = plugin.autocast()
        assert plugin.autocast() is context
        for _ in range(2):
            with context:
                assert torch.is_autocast_enabled("cpu")
                assert torch.get_autocast_dtype("cpu") is dtype
                assert net(torch.ones(1, 2)).dtype is dtype
            assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(AssertionError, match="inside session"):
        plugin.autocast()


def test_fp16_on_a_cpu_is_fp16_and_never_bf16(tmp_path):
    """Lightning replaces 16-mixed with bf16-mixed there. The kernels are restored, also after an error."""
    seen = []

    class Looking(Regression):
        def training_step(self, batch, batch_idx):
            seen.append((self.net[0](batch[0]).dtype, cpu_fp16._replacement.users))
            raise KeyError("in the forward")

    for kernels in ("fast", "native"):
        trainer = make_trainer(tmp_path, precision=MixedPrecision("float16", cpu_kernels=kernels))
        with pytest.raises(KeyError):
            trainer.fit(Looking(), loader_of(make_batches(1)))
        assert cpu_fp16._replacement.users == 0
    assert seen == [(torch.float16, 1), (torch.float16, 0)]
