"""The memory predicted by ``checks``, compared to arithmetic and to FSDP2."""

import json
from functools import partial

import pytest
import torch
from torch import nn

from recipes.language_model import LanguageModel
from tests.loop.test_schedule_free import ScheduleFree
from tests.support import Regression, make_batches, needs_fsdp2
from trainer.cli import main
from trainer.cli.checks.fake_step import LiveMemory, look, measure
from trainer.cli.checks.memory import verdict
from trainer.cli.fused import fused_on_cuda
from trainer.precision import MixedPrecision, Precision

BF16 = MixedPrecision(dtype=torch.bfloat16, loss_scaling=False)
SIZES = {"context": 1024, "vocabulary": 32_000, "width": 2048, "heads": 16, "layers": 2}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def gpt(kind=LanguageModel, **sizes):
    return kind(partial(torch.optim.AdamW, lr=1e-3, fused=True), tokenizer="none is needed", **SIZES | sizes)


def tokens(batch, length):
    return torch.zeros(batch, length, dtype=torch.int64), torch.zeros(batch, length, dtype=torch.int64)


def parameters(**sizes):
    with torch.device("meta"):
        module = gpt(**sizes)
        module.configure_model()
    return sum(parameter.numel() for parameter in module.parameters())


def nothing(module):
    """Do nothing."""


def test_peak_on_one_device():
    single = measure(gpt, tokens(1, 1024), BF16, nothing, None)
    assert single.after == pytest.approx(16 * parameters(), rel=1e-3)
    # The peak is the optimizer's step: the forward pass has the memory of the gradients (scripts/benchmark_memory).
    assert single.peak == pytest.approx(single.after, rel=0.005)


def test_schedule_free_optimizer():
    """Weights, gradients and one state of the same size."""
    (batch,) = make_batches(1)
    step = measure(partial(Regression, optimizer=ScheduleFree), batch, Precision(), nothing, None)
    assert step.after == 3 * sum(4 * parameter.numel() for parameter in Regression().parameters())


READS = {"on_before_zero_grad": lambda self, optimizer: None}  # gradients before they are cleared


@pytest.mark.whole
def test_gradients_read_by_the_module_are_alive_during_the_forward():
    sizes = {"width": 256, "heads": 4, "vocabulary": 256, "context": 64}
    makers = (partial(gpt, kind, **sizes) for kind in (LanguageModel, type("Reads", (LanguageModel,), READS)))
    early, late = (measure(make, tokens(8, 64), Precision(), nothing, None) for make in makers)
    assert late.after == early.after
    assert 0.5 < (late.peak - early.peak) / (4 * parameters(**sizes)) <= 1


@pytest.mark.whole
def test_recomputed_activations_take_no_memory():
    sizes = {"width": 64, "heads": 4, "layers": 4, "vocabulary": 256}
    from trainer.callbacks import ActivationCheckpointing

    def prepare(module):
        callback = ActivationCheckpointing("Block")
        callback.on_fit_start(None, module)
        callback.on_train_start(None, module)

    plain = measure(lambda: gpt(**sizes), tokens(16, 1024), Precision(), nothing, None)
    again = measure(lambda: gpt(**sizes), tokens(16, 1024), Precision(), prepare, None)
    assert again.after == plain.after
    assert again.peak < 0.5 * plain.peak
    hidden = 16 * 1024 * 64 * 4
    assert plain.peak - plain.after > 4 * 10 * hidden  # each of 4 blocks keeps more than ten tensors of this size


def test_counted_tensors():
    with LiveMemory() as living:
        first = torch.zeros(1000)
        second = first + 1
        view = second[:10]
        assert living.current == 8000
        del second
        assert living.current == 8000  # the view keeps it
        del view
        assert (living.current, living.peak) == (4000, 8000)
        first.untyped_storage().resize_(0)
        assert living.current == 0


class Synchronizing(Regression):
    """Reads its custom loss."""

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).pow(2).mean()
        if loss > 1:
            self.seen = loss.item()
        return loss


@pytest.mark.parametrize("precision", [BF16, MixedPrecision("float16")])
def test_differences_of_a_step_on_a_gpu(precision):
    (batch,) = make_batches(1)
    found = {}
    here = str(precision.dtype).removeprefix("torch.")
    assert look(Synchronizing, batch, precision, found) == {"layer_norm": (here, "float32"), "pow": (here, "float32")}
    assert {(one.file, one.code, one.cause, one.count) for one in found.values()} == {
        (__file__, "if loss > 1:", "__bool__", 1),
        (__file__, "self.seen = loss.item()", "item", 1),
    }
    assert look(Synchronizing, batch, Precision(), {}) == {}  # no autocast, no lists
    assert measure(Synchronizing, batch, precision, nothing, None).peak > 0  # a value that is read is 1


NO_STEPS = "checks.steps=false"  # their messages are in test_first_look.py
TINY = ["+recipe=gpt", "model.layers=1", "data.context=32", "precision=bf16-mixed", "callbacks=none", NO_STEPS]


@pytest.mark.whole
@needs_fsdp2
def test_command(capsys, monkeypatch):
    monkeypatch.setattr("trainer.cli.checks.memory.COMPARED_PRECISIONS", ())
    assert main(["checks", "json", *TINY, "checks.gpu_memory=1040MiB", "checks.devices=4"]) == 0
    facts = json.loads(capsys.readouterr().out)
    single, ddp, fsdp = needs = facts["memory"]
    assert [(need["strategy"], need["devices"]) for need in needs] == [("single", 1), ("ddp", 4), ("fsdp", 4)]
    assert all(need["fits"] for need in needs)
    gradients = single["after"] / 4  # AdamW takes 16 bytes per parameter
    assert ddp["peak"] == pytest.approx(single["peak"] + gradients, rel=0.01)
    assert fsdp["after"] == pytest.approx(single["after"] / 4, rel=0.05)
    assert facts["verdict"].startswith("Fits into 1.0 GiB (with 1.0 GiB reserved for CUDA): one device, trainer=ddp")
    assert facts["synchronizations"] == []
    assert all((row["here"], row["on CUDA"]) == ("bfloat16", "float32") for row in facts["autocast_ops"])
    assert list(facts["machine"]) == ["versions", "devices"]  # only the required facts of the machine are read

    assert main(["checks", *TINY, "checks.gpu_memory=1GiB"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("fsdp 8 ") and line.endswith(" no") for line in lines)
    assert "Note: DDP and FSDP use 8 devices. Set checks.devices for another number." in lines
    assert lines[-1].startswith("No strategy fits into 1.0 GiB (with 1.0 GiB reserved for CUDA). Try a smaller")


@pytest.fixture
def alone(monkeypatch):
    """Predict the memory of one precision without FSDP, which takes a fifth of the time."""
    monkeypatch.setattr("trainer.distributed.sharding.settings.IS_SUPPORTED", False)
    monkeypatch.setattr("trainer.cli.checks.memory.COMPARED_PRECISIONS", ())


@pytest.mark.whole
def test_modules_that_torch_cannot_shard_are_left_out(capsys, alone):
    assert main(["checks", "json", *TINY]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [need["strategy"] for need in facts["memory"]] == ["single", "ddp"]
    assert f"FSDP needs torch 2.13 or newer; this is {torch.__version__}." in facts["remarks"]


@pytest.mark.whole
@needs_fsdp2
def test_step_is_fused_if_that_of_fit_is():
    """A step with foreach has temporary copies. torch has no fused SGD of sharded parameters."""

    def peak(kind, shards, **options):
        make = fused_on_cuda(partial(kind, lr=0.1, weight_decay=0.1, **options), "cpu")
        batch = [torch.zeros(1, 64), torch.zeros(1, 64), torch.tensor(1.0)]

        def build():
            return Regression(nn.Sequential(*(nn.Linear(64, 64) for _ in range(10))), make)

        return measure(build, batch, Precision(), nothing, shards).peak

    for kind, shards in ((torch.optim.AdamW, None), (torch.optim.AdamW, 2), (torch.optim.SGD, None)):
        assert peak(kind, shards) < peak(kind, shards, foreach=True)
    assert peak(torch.optim.SGD, 2) == peak(torch.optim.SGD, 2, foreach=True)


@pytest.mark.whole
def test_unused_settings_of_a_run(capsys, monkeypatch, alone):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    scenes = ["data.train_size=32", "data.val_size=1", "data.test_size=1"]
    unet = ["+recipe=unet", "model.net.width=4", "model.net.depth=1", *scenes, "checks.gpu_memory=8GiB", NO_STEPS]
    settings = ["precision=32", "tuning=fast", "callbacks.fast_settings.tf32=false"]
    assert main(["checks", "json", *unet, *settings]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts["missed"]) == ["TF32"]
    (remark,) = [remark for remark in facts["remarks"] if "Faster settings on a GPU" in remark]
    assert "TF32 (" in remark
    assert remark.endswith("tuning=fast enables the safe ones.")


class Counting(Regression):
    """Reads counters of the Trainer. Its step takes no index."""

    def training_step(self, batch):
        if self.trainer.is_global_zero and self.logger is None and self.local_rank == 0:
            self.print("a step")
        return super().training_step(batch, 0) * (1 + self.global_step + self.current_epoch)


def test_training_step_that_reads_counters():
    (batch,) = make_batches(1)
    assert measure(Counting, batch, Precision(), nothing, None).peak > 0
    assert look(Counting, batch, Precision(), {}) == {}


def test_verdict():
    needs = [{"strategy": "single", "fits": False}, {"strategy": "fsdp", "fits": True}]
    assert "checks.gpu_memory=80GiB" in verdict(None, needs)
    assert verdict(2**31, needs).endswith(" reserved for CUDA): trainer=fsdp.")
    assert verdict(2**31, needs[:1]).startswith("No strategy fits into 2.0 GiB")
