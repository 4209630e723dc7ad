import json
import os
import re
import signal
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.support import Regression, adam, loader_of, make_batches, make_trainer
from trainer.callbacks import RunRecorder
from trainer.diagnosis.explanation import explain
from trainer.errors import ConfigurationError, DataLoaderError, is_out_of_memory


class Numbers(Dataset[Tensor]):
    """Twelve samples, with a function called before the seventh."""

    def __init__(self, happens):
        self.happens = happens

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 6:
            self.happens()
        return [torch.ones(6), torch.ones(3), torch.tensor(1.0)]


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def raise_mistake():
    raise ArithmeticError("in the dataset")


class Module(Regression):
    def training_step(self, batch, batch_idx):
        time.sleep(0.02)  # workers may also die between batches
        x, y, gain = batch
        return super().training_step([x, y, gain.mean()], batch_idx)

    validation_step = training_step


def loader(happens, **options):
    # one batch ahead of the one that is trained
    return DataLoader(Numbers(happens), batch_size=2, **{"num_workers": 1, "prefetch_factor": 1} | options)


@pytest.fixture
def trainer(tmp_path):
    return make_trainer(tmp_path, num_sanity_val_steps=0)


@pytest.mark.parametrize(
    ("happens", "stage", "message", "workers"),
    [
        (kill, "train", r"\(pid \d+\) is killed by signal: Killed: at batch_idx [123] of epoch 0", 1),
        (lambda: os._exit(3), "val", r"exited unexpectedly.*batch_idx \d of epoch 0", 1),
        (lambda: time.sleep(60), "train", "have sent nothing for 1 seconds: at batch_idx 3 of epoch 0", 0),
    ],
)
def test_workers_that_die_or_hang(tmp_path, happens, stage, message, workers):
    trainer = make_trainer(tmp_path, num_sanity_val_steps=0, dataloader_timeout=1)
    data = {name: DataLoader(Numbers(dict), 2) for name in ("train", "val")} | {stage: loader(happens)}
    with pytest.raises(DataLoaderError, match=message) as caught:
        trainer.fit(Module(), data["train"], data["val"])
    assert (caught.value.stage, len(caught.value.pids)) == (stage, workers)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value.__cause__, RuntimeError)
    remedies = (
        ["num_workers=0", "/dev/shm"] if happens is kill else ["num_workers=0"] if workers else ["dataloader_tim"]
    )
    assert all(part in str(caught.value) for part in (f"({stage}_dataloader)", *remedies))
    assert trainer.state.status == "interrupted"


def test_error_about_shapes_before_there_was_a_batch_blames_none(trainer):
    refuse = Mock(side_effect=ValueError("this parameter has the wrong shape"))
    with pytest.raises(ValueError, match="wrong shape") as caught:
        trainer.fit(Regression(optimizer=refuse), loader_of(make_batches(2)))
    assert not hasattr(caught.value, "__notes__")


class Caches(Regression):
    """Keeps a factor of the loss since its first step. ``uses`` it in training."""

    def __init__(self, uses):
        super().__init__()
        self.uses = uses

    def factor(self):
        if not hasattr(self, "kept"):
            self.kept = torch.ones(()) * 2
        return self.kept

    def validation_step(self, batch, batch_idx):
        self.factor()

    def training_step(self, batch, batch_idx):
        return self.uses(self, super().training_step(batch, batch_idx))


@pytest.mark.parametrize("uses", [
    lambda module, loss: loss * module.factor(), lambda module, loss: module.factor().add_(1) + loss,
    lambda module, loss: module.factor().requires_grad_() * loss,
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_tensor_of_inference_mode_that_is_kept_is_explained(tmp_path, uses):
    batches = loader_of(make_batches(2))
    for inference_mode in (True, False):
        trainer, module = make_trainer(tmp_path, inference_mode=inference_mode), Caches(uses)
        trainer.validate(module, batches, verbose=False)
        if inference_mode:
            with pytest.raises(RuntimeError, match=r"[Ii]nference tensor") as caught:
                trainer.fit(module, batches)
            assert "Use Trainer(inference_mode=False)" in caught.value.__notes__[0]
        else:
            trainer.fit(module, batches)


@pytest.mark.parametrize(
    ("returned", "note"),
    [
        (lambda _, loss: loss.detach(), r"Regression\.training_step` returned a tensor of shape \[\] .*a graph"),
        (lambda _, loss: {"loss": (loss > 0).float()}, "without a graph.*comparisons"),
        (lambda _, loss: loss.repeat(3), r"of shape \[3\] and dtype float32, expected a scalar.*loss\.mean\(\)"),
        (lambda module, loss: module.manual_backward(loss.detach()), "passed to `manual_backward` a tensor .*graph"),
        (lambda _, loss: loss.backward() or loss, "remove these calls, .*automatic_optimization = False.*detach"),
        (lambda module, loss: [module.manual_backward(loss) for _ in "ab"], "passed to `manual_backward` a .*freed"),
        (lambda module, _: module.net.requires_grad_(False)(torch.ones(1, 6)).sum(), "no parameter .*requires_grad_"),
    ],
)
def test_loss_without_a_gradient_is_explained(trainer, returned, note):
    module = Regression(change=lambda loss, _: returned(module, loss))
    module.automatic_optimization = "manual" not in note
    with pytest.raises(RuntimeError, match="grad") as caught:
        trainer.fit(module, loader_of(make_batches(2)))
    assert re.search(note, "".join(caught.value.__notes__))


def test_errors_of_a_dataset_are_not_changed(trainer):
    with pytest.raises(ArithmeticError) as caught:
        trainer.fit(Module(), loader(raise_mistake), DataLoader(Numbers(dict), 2))
    assert caught.value.__notes__ == ["It was raised while batch_idx 3 of epoch 0 (train_dataloader) was loaded."]


@pytest.mark.parametrize("given", [-1, "1h"])
def test_invalid_time(tmp_path, given):
    with pytest.raises(ConfigurationError, match="dataloader_timeout"):
        make_trainer(tmp_path, dataloader_timeout=given)


def cuda_error():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def cpu_error():
    try:
        torch.empty(2**62, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError


def fail(*_):
    raise cuda_error()


def in_backward(module, loss):
    loss.register_hook(fail)
    return loss


def in_step(module, loss):
    module.trainer.engine.optimizers[0].register_step_pre_hook(fail)
    return loss


def failing(fail):
    """Return a module that runs out of memory in its third batch."""
    module = Regression(optimizer=adam, change=lambda loss, i: fail(module, loss) if i == 2 else loss)
    return module


@pytest.mark.parametrize(
    ("make_error", "samples", "smaller"), [(cuda_error, 4, "batches of 2 with {}=2"), (cpu_error, 3, "1 with {}=3")]
)
def test_memory_that_runs_out(trainer, make_error, samples, smaller, no_gc):
    def in_forward(module, loss):
        activations = loss * torch.ones(3)
        held.append(weakref.ref(activations))
        raise make_error()

    held = []
    try:
        batches = [[x[:samples], y[:samples], gain] for x, y, gain in make_batches(4)]
        trainer.fit(failing(in_forward), loader_of(batches))
    except type(make_error()) as error:
        (told,) = error.__notes__
        assert [one() for one in held] == [None]  # while the exception is kept, as a notebook keeps it
    assert f"at batch_idx 2 of epoch 0 (train_dataloader), which has {samples} samples, on cpu (at the peak" in told
    assert smaller.format("accumulate_grad_batches") in told
    assert "bf16-mixed" in told
    assert "ActivationCheckpointing" in told
    assert trainer.loop.metrics.batch is None

    trainer.fit(Regression(), loader_of(make_batches(4)))
    assert trainer.global_step == 6


@pytest.mark.parametrize(
    ("fail", "moment", "gradients"), [(in_backward, "the backward pass", 0), (in_step, "the optimizer's step", 780)]
)
def test_report_has_the_phase(trainer, fail, moment, gradients):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit(failing(fail), loader_of(make_batches(4)))
    assert f", in {moment}.\n" in caught.value.__notes__[0]
    kinds = caught.value.memory.kinds
    assert kinds == {"weights": 780, "gradients": gradients, "optimizer": 2 * 780 + 6 * 4, "buffers": 0, "batch": 148}


GIBIBYTE = 2**30


@pytest.fixture
def full(cuda, monkeypatch):
    """A simulated GPU with little free memory."""
    for name, size in (("memory_allocated", 60), ("memory_reserved", 76), ("max_memory_allocated", 70)):
        monkeypatch.setattr(torch.cuda, name, lambda device=None, size=size: size * GIBIBYTE)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (GIBIBYTE, 80 * GIBIBYTE))
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda name: Path(name).write_text("blocks"))


def fail_on_gpu(folder, **options):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        make_trainer(folder, accelerator="gpu", **options).fit(failing(in_step), loader_of(make_batches(4)))
    return caught.value


def test_report_on_a_gpu_has_live_memory_and_a_snapshot(full, tmp_path):
    error = fail_on_gpu(tmp_path, logger=True, callbacks=[RunRecorder()])
    folder = tmp_path / "lightning_logs" / "version_0"
    first, alive, snapshot, advice = error.__notes__[0].splitlines()
    assert "on cuda:0 (at the peak, tensors took 70.0 GiB of 80.0 GiB), in the optimizer's step." in first
    for part in (
        "weights 780 bytes, gradients 780 bytes, the optimizer's states 2 KiB, the batch 148 bytes",
        "activations and other tensors 60.0 GiB",
        "reserved by torch, but unused 16.0 GiB, taken outside of torch (CUDA itself, other processes) 3.0 GiB",
        "The batch is [Tensor[4, 6] float32, Tensor[4, 3] float32, Tensor[] float32].",
    ):
        assert part in alive
    assert snapshot.startswith(f"The allocated blocks are in {folder / 'memory_snapshot.pickle'}: open it at ")
    assert advice.startswith("Try PYTORCH_ALLOC_CONF=expandable_segments:True in the environment")
    assert (folder / "memory_snapshot.pickle").read_text() == "blocks"
    told = json.loads((folder / "run.json").read_text())["out_of_memory"]
    assert told == error.memory.facts()
    assert (told["gradients"], told["unused"], told["total"]) == (780, 16 * GIBIBYTE, 80 * GIBIBYTE)


@pytest.mark.parametrize("is_given", [True, False])
def test_snapshot_without_logger_goes_to_a_given_default_root_dir(full, tmp_path, monkeypatch, is_given):
    monkeypatch.chdir(tmp_path)
    error = fail_on_gpu(tmp_path, default_root_dir=tmp_path if is_given else None)
    assert ("memory_viz" in error.__notes__[0]) == is_given
    assert len(list(tmp_path.rglob("*.pickle"))) == is_given


def test_missing_figures_raise_nothing(full, tmp_path, monkeypatch):
    for owner, name in ((torch.cuda, "mem_get_info"), (torch.cuda.memory, "_dump_snapshot")):
        monkeypatch.setattr(owner, name, fail)
    error = fail_on_gpu(tmp_path, logger=True)
    first, snapshot, advice = error.__notes__[0].splitlines()
    assert first.startswith("Memory ran out at batch_idx 2 of epoch 0 (train_dataloader), which has 4 samples, on cuda")
    assert snapshot.startswith("A snapshot of the memory could not be written: CUDA out of memory")
    assert advice.startswith("Try batches of 2")
    assert not hasattr(error, "memory")


@pytest.mark.parametrize("taken", [63, 62])
def test_advice_for_large_states_is_sharding(full, tmp_path, monkeypatch, taken):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, taken * 100))
    assert ("Try strategy='fsdp'" in fail_on_gpu(tmp_path).__notes__[0]) == (taken * 50 < 780 + 780 + 1584)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (cuda_error(), True),
        (cpu_error(), True),
        (MemoryError(), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 17.6 GB)"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("FIND was unable to find an engine to execute this computation"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_about_memory(error, expected):
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize(
    ("stage", "is_uneven", "message"),
    [
        (RunningStage.VALIDATING, True, "[gloo/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation"),
        (RunningStage.VALIDATING, False, "Application timeout caused pair closure"),
        (RunningStage.TRAINING, True, "Application timeout caused pair closure"),
    ],
)
def test_collective_that_times_out(trainer, stage, is_uneven, message):
    error = RuntimeError(message)
    trainer.state.fn, trainer.state.stage = TrainerFn.VALIDATING, stage
    trainer.eval_loops[RunningStage.VALIDATING].distributed_pass = SimpleNamespace(is_uneven=is_uneven)
    assert explain(error, trainer.run_state, stall=lambda: "Rank 3 has not come.") is None
    notes = " ".join(getattr(error, "__notes__", ()))
    assert notes.endswith("Rank 3 has not come.")
    assert ("Trainer(pad_evaluation=True)" in notes) == (is_uneven and stage is RunningStage.VALIDATING)
