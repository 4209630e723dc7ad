import pytest
import torch
from torch import nn

from tests.support import Regression, loader_of, make_batches, make_trainer, on_machine, replaced_kernels
from trainer.errors import PrecisionError
from trainer.precision import HalfPrecision, MixedPrecision, cpu_fp16
from trainer.precision.cpu_fp16 import FAMILIES
from trainer.record.measures import facts_of

CPU = torch.device("cpu")
BOTH = [MixedPrecision, HalfPrecision]


@pytest.mark.parametrize(
    ("kinds", "arguments", "message"),
    [
        (BOTH, {"dtype": "float8"}, r"Got dtype='float8', expected 'float16' or 'bfloat16'"),
        (BOTH, {"dtype": torch.float32}, r"Got dtype=torch.float32"),
        (BOTH, {"cpu_kernels": "slow"}, r"Got cpu_kernels='slow', expected 'auto', 'fast' or 'native'"),
        ([MixedPrecision], {"autocast_ops": "gpu"}, r"Got autocast_ops='gpu', expected 'native' or 'cuda'"),
        ([MixedPrecision], {"dtype": "bfloat16", "backoff_factor": 2.0}, r"backoff_factor=2.0"),
    ],
)
def test_impossible_arguments(kinds, arguments, message):
    for kind in kinds:
        with pytest.raises(PrecisionError, match=message):
            kind(**arguments)


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
            seen.append((self.net[0](batch[0]).dtype, len(replaced_kernels())))
            raise KeyError("in the forward")

    for kernels in ("fast", "native"):
        trainer = make_trainer(tmp_path, precision=MixedPrecision("float16", cpu_kernels=kernels))
        with pytest.raises(KeyError):
            trainer.fit(Looking(), loader_of(make_batches(1)))
        assert replaced_kernels() == []
    assert seen == [(torch.float16, len(FAMILIES)), (torch.float16, 0)]


@pytest.mark.filterwarnings("ignore:precision='16-true' keeps")
@pytest.mark.parametrize("options", [{}, {"autocast_cache": True}, None])
def test_resumed_run_uses_the_kernels_of_the_saved_run(tmp_path, monkeypatch, options):
    """In 16-mixed, also if autocast's cache has no state, and in 16-true. The run's record has the kernels."""
    used = []

    class Looking(Regression):
        def training_step(self, batch, batch_idx):
            used.append(replaced_kernels())
            return super().training_step(batch, batch_idx)

    def fit(epochs, ratios, ckpt_path=None, **kernels):
        on_machine(monkeypatch, ratios)
        plugin = HalfPrecision("float16") if options is None else MixedPrecision("float16", **options, **kernels)
        trainer = make_trainer(tmp_path, precision=plugin, max_epochs=epochs)
        trainer.fit(Looking(), loader_of(make_batches(1)), ckpt_path=ckpt_path)
        return trainer

    monkeypatch.setattr(cpu_fp16, "is_faster", lambda module: True)
    first = fit(1, {"attention": 7.3, "recurrent": 9.0})
    measured = {"attention": {"kernels": "fast", "ratio": 7.3}, "matrix product": {"kernels": "native", "ratio": 1.0}}
    assert facts_of(first)["float16_kernels"] == measured
    first.save_checkpoint(path := tmp_path / "one.ckpt")
    second = fit(2, {}, path)
    assert facts_of(second)["float16_kernels"]["attention"] == {"kernels": "fast", "ratio": 1.0}
    second.save_checkpoint(path)
    third = fit(3, {}, path)
    monkeypatch.setattr(cpu_fp16.Float16Kernels, "state_dict", lambda self: {})  # as in older versions
    third.save_checkpoint(path)
    fit(4, {"matrix product": float("inf")}, path)
    assert used == [["attention"]] * 3 + [["matrix product"]]
    assert replaced_kernels() == []


def test_float16_weights_cannot_be_trained_with_loss_scaling(tmp_path):
    """The common case of a pretrained model in float16 (transformers #23165, peft #341). Frozen weights may stay so."""
    module = Regression()
    module.half()
    batches = loader_of(make_batches(1))
    with pytest.raises(PrecisionError, match=r"6 trained weights in float16 \(net.0.weight, net.0.bias and 4 more\)"):
        make_trainer(tmp_path, precision="16-mixed").fit(module, batches)
    make_trainer(tmp_path, precision=MixedPrecision("float16", loss_scaling=False)).fit(module, batches)
    module.net[0].requires_grad_(False)
    for p in module.parameters():  # as the message advises
        p.data = p.data.float() if p.requires_grad else p.data
    trainer = make_trainer(tmp_path, precision="16-mixed")
    trainer.fit(module, batches)
    assert (trainer.skipped_steps, module.net[0].weight.dtype) == (0, torch.float16)
