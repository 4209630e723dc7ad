from dataclasses import dataclass

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from tests.support import FakeTrainer, Regression, loader_of, make_batches, make_trainer, nested_tensor
from trainer.callbacks import Throughput
from trainer.callbacks.throughput import checksums
from trainer.record.flops import FlopCounter


def fit(clock, callback, epochs, fetch=0.0, validate_after=(3,), **options):
    """Run the hooks of a fit. Epochs are lists of the seconds of batches; fetching one takes ``fetch``."""
    trainer = FakeTrainer(callback, clock=clock, batches=len(epochs[0]), sanity_checking=True, **options)
    trainer.evaluate(batches=1, seconds=500.0)
    trainer.sanity_checking = False
    trainer.hook("on_train_start")
    for epoch in epochs:
        trainer.hook("on_train_epoch_start")
        for batch_idx, seconds in enumerate(epoch):
            clock.now += fetch
            trainer.train_batch(batch_idx, [torch.full((8, 2), float(batch_idx)), torch.arange(8)], seconds=seconds)
            if batch_idx in validate_after:
                trainer.evaluate(batches=1, seconds=500.0)
                clock.now += 1000.0  # a checkpoint is written
        trainer.end_epoch()


def test_rate_counts_training_time_only(clock):
    callback = Throughput(warmup_batches=0)
    assert (callback.samples_per_second, callback.waiting) == (None, None)
    fit(clock, callback, [[1.0] * 4, [0.5] * 4, [2.0] * 4], world_size=2, validate_after=(0, 1, 3))
    assert (callback.rates, callback.samples_per_second) == ([16.0, 32.0, 8.0], 16.0)  # the median, not the mean
    assert (callback.train_seconds, callback.measured_batches, callback.waiting) == (14.0, 12, 0.0)


@pytest.mark.parametrize(("warmup", "rates", "measured"), [(0, [3.2, 8.0], 8), (1, [8.0, 8.0], 7), (50, [8.0, 8.0], 6)])
def test_first_batches_do_not_count(clock, warmup, rates, measured):
    callback = Throughput(warmup)
    fit(clock, callback, [[7.0, 1.0, 1.0, 1.0], [1.0] * 4])
    assert (callback.rates, callback.measured_batches) == (rates, measured)
    assert callback.train_seconds == 14.0  # this has it all


def test_waiting_for_batches_is_part_of_the_time(clock):
    callback = Throughput(warmup_batches=0)
    fit(clock, callback, [[1.0] * 4], fetch=3.0)
    assert (callback.rates, callback.waiting) == ([2.0], 0.75)


def test_gpu_is_waited_for_at_the_ends_only(clock, monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    for batches in (4, 40):
        waits.clear()
        fit(clock, Throughput(warmup_batches=2), [[1.0] * batches] * 2, validate_after=(), device="cuda:1")
        # epoch start, around the first batch's checksum, epoch end; around the end of the warm-up
        assert waits == [torch.device("cuda:1")] * (2 * 4 + 2)


def test_evaluation_rates_leave_the_first_batch_out(clock):
    callback = Throughput()
    trainer = FakeTrainer(callback, clock=clock, world_size=2)
    batch = torch.zeros(8, 2)
    for stage, fn, seconds, rate in (
        ("validation", "validate", [9.0, 1.0, 1.0], 16.0),
        ("test", "test", [2.0], 8.0),
        ("predict", "predict", [9.0, 4.0], 4.0),
    ):
        trainer.state.fn = TrainerFn(fn)
        trainer.hook(f"on_{stage}_start")
        for batch_idx, taken in enumerate(seconds):
            clock.now += taken
            trainer.hook(f"on_{stage}_batch_end", None, batch, batch_idx, 0)
        trainer.hook(f"on_{stage}_end")
        assert callback.run_facts()["throughput"][fn] == rate


@dataclass
class Pair:
    name: str
    inputs: Tensor


def test_checksums():
    inputs, labels = torch.randn(4, 3), torch.arange(4)
    same = checksums([inputs, labels])
    assert checksums((inputs.clone(), labels.clone())) == checksums({"x": inputs, "more": [labels]}) == same
    assert checksums([inputs.double(), labels]) == same  # the batch in 64-true
    assert checksums([inputs.T.contiguous().T, labels]) == same
    assert checksums([inputs.flip(0), labels])[0] != same[0]
    assert checksums([inputs, labels.flip(0)]) == (same[0], checksums(labels.flip(0))[1])
    assert checksums([inputs.bfloat16(), labels]) == (None, same[1])  # bf16-true
    assert checksums(Pair("a", inputs)) == (same[0], 0)
    assert checksums(["text", None, inputs.to_sparse(), nested_tensor()]) == (0, 0)
    assert checksums(torch.tensor(True)) != checksums(torch.tensor(False))


@pytest.fixture
def h100(cuda, monkeypatch):
    """A simulated GPU with a known peak."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")


FLOPS = 2 * 6 * 16 * 2 + 2 * 16 * 3 * 3
"""FLOPs per sample: two products of the first layer, with an input without gradient, and three of the second."""


@pytest.mark.parametrize(("precision", "peak", "given"), [("bf16-mixed", 989.4e12, None), ("32-true", 66.9e12, 1e6)])
def test_share_of_the_peak(h100, tmp_path, precision, peak, given):
    callback, flops = Throughput(warmup_batches=1, flops_per_sample=given), given or FLOPS
    trainer = make_trainer(tmp_path, accelerator="gpu", precision=precision, max_epochs=2, callbacks=[callback])
    trainer.fit(Regression(), loader_of(make_batches(4)))
    assert callback.mfu == pytest.approx(flops * callback.samples_per_second / peak)
    throughput = callback.run_facts()["throughput"]
    assert (throughput["mfu"], throughput["flops_per_sample"]) == (callback.mfu, flops)


def test_only_the_first_batch_is_counted(h100, tmp_path, monkeypatch):
    batches = []

    def look(loss, batch_idx):
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        batches.append(any(isinstance(mode, FlopCounter) for mode in modes))
        return loss

    trainer = make_trainer(tmp_path, callbacks=[Throughput()], accelerator="gpu", max_epochs=2)
    trainer.fit(Regression(change=look), loader_of(make_batches(4)))
    assert batches == [True, *[False] * 7]


def test_flops_are_not_counted_if_the_peak_is_unknown(cuda, tmp_path):
    callback = Throughput()
    make_trainer(tmp_path, accelerator="gpu", callbacks=[callback]).fit(Regression(), loader_of(make_batches(4)))
    assert (callback.flops_per_sample, callback.mfu) == (None, None)
