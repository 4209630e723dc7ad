import _thread
import inspect
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback

from tests.support import Regression, adamw, loader_of, make_batches, make_trainer, sgd
from trainer.callbacks import SyncDetector
from trainer.diagnosis.sync_detector import SyncWatch

STEPS = 4


def line_of(function, mark):
    """The number of the line that has this comment."""
    lines, start = inspect.getsourcelines(function)
    (found,) = [start + i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}")]
    return found


def found_in(folder, module, callbacks=(), **arguments):
    detector = SyncDetector(batches=STEPS, after=1)
    make_trainer(folder, callbacks=[detector, *callbacks], **arguments).fit(module, loader_of(make_batches(STEPS + 2)))
    return detector


class Planted(Regression):
    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        out = self.net(x)
        mask = out > 0
        if mask.any():  # if
            out = out * 1.0
        loss = (out - y).square().mean()
        self.seen = loss.item()  # item
        print(loss)  # print
        self.numbers = out[0].detach().tolist()  # tolist
        self.kept = loss.detach().cpu()  # cpu
        mask.nonzero()  # nonzero
        out[mask]  # mask
        torch.tensor([1.0, 2.0], device=self.device)  # made
        torch.zeros(3).to(self.device)  # sent
        return loss


class AtTheEnd(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        float(outputs["loss"])  # callback


PLANTED = {
    "if": ("__bool__", "torch.where(condition, a, b)"),
    "item": ("item", "self.log accepts tensors"),
    "print": ("__repr__", "every n-th step"),
    "tolist": ("tolist", "at the end of the epoch"),
    "cpu": ("cpu", "non_blocking=True"),
    "nonzero": ("nonzero", "keeps the shape"),
    "mask": ("__getitem__", "keeps the shape"),
    "made": ("tensor", "device=self.device"),
    "sent": ("to", "pin_memory()"),
}


def test_planted_lines_are_found_and_counted(tmp_path, caplog, capsys):
    caplog.set_level("INFO", "lightning.pytorch.advice")
    detector = found_in(tmp_path, Planted(), callbacks=[AtTheEnd()], precision="16-mixed")
    found = {one.line: one for one in detector.synchronizations}
    lines = {line_of(Planted.training_step, mark): mark for mark in PLANTED}
    at_end = line_of(AtTheEnd, "callback")
    assert set(found) == {*lines, at_end}
    assert {one.count for one in detector.synchronizations} == {detector.watched} == {STEPS}
    for line, mark in lines.items():
        cause, instead = PLANTED[mark]
        assert found[line].cause == cause
        assert instead in found[line].instead
        assert found[line].code.endswith(f"# {mark}")
    assert (found[at_end].cause, found[at_end].file) == ("__float__", __file__)
    (record,) = [one for one in caplog.records if one.name == "lightning.pytorch.advice"]
    assert record.message.startswith(f"These lines synchronize host and GPU (counts in {STEPS} steps):")
    number = line_of(Planted.training_step, "item")
    assert f"{number}: self.seen = loss.item()  # item (4 times); keep the tensor" in record.message
    assert {fact["line"] for fact in detector.run_facts()["synchronizations"]} == set(found)


# Synchronizations of lines on a GPU, by `SyncWatch` on a CPU, and by the simulated device with torch's kernels.
SYNCHRONIZING = {
    # a size or a number that the host reads
    "torch.where(x > 0)": "nonzero",
    "torch.repeat_interleave(x, labels + 1, dim=0)": "repeat_interleave",
    "torch.linalg.cholesky(square)": "_linalg_check_errors",
    "F.one_hot(labels)": "one_hot",
    "0.5 in x": "__contains__",
    "x[labels[0]]": "__getitem__",
    "x[x > 0]": "__getitem__",
    "x.clone().__setitem__(x > 0, x[0, :1])": "__setitem__",
    # copies of host data to the device
    "x[[0, 1]]": "an index on the host",
    "x[torch.arange(4), labels % 3]": "an index on the host",
    "torch.as_tensor(torch.ones(2), device=x.device)": "as_tensor",
    "torch.from_numpy(np.ones(3)).to(x.device)": "to",
    # and from there
    "f'{x}'": "__format__",
    "x.to('cpu')": "cpu",
}
QUIET = [
    "F.one_hot(labels, num_classes=5)",
    "torch.repeat_interleave(x, labels + 1, dim=0, output_size=8)",
    "x.masked_fill(x > 0, torch.tensor(0.0))",
    "x.clone().__setitem__((slice(1, None), x[0] > 0), 0.0)",
    "x[labels]",
    "x[torch.arange(4, device=x.device), labels % 3]",
    "x[np.int64(1)]",
    "torch.ones(4)[[0, 1]]",
    "torch.ones(3).to(x, non_blocking=True)",
    "x.to(x.device).to(torch.float64).type_as(x)",
    "torch.empty(3).copy_(torch.from_numpy(np.ones(3))).to('cpu').tolist()",
]


def names_of(device):
    tensors = {
        "x": torch.linspace(-1, 1, 12).view(4, 3),
        "labels": torch.tensor([0, 1, 2, 1]),
        "square": 2 * torch.eye(3),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()} | {"torch": torch, "np": np, "F": F}


@pytest.mark.parametrize(("line", "cause"), [*SYNCHRONIZING.items(), *((line, None) for line in QUIET)])
def test_synchronizing_lines(monkeypatch, line, cause):
    monkeypatch.setattr("trainer.diagnosis.sync_detector._LOOPS", ("_pytest",))
    found, names, from_numpy = {}, names_of("cpu"), torch.from_numpy
    with SyncWatch("cpu", found):
        eval(line, names | {"__name__": "mine"})
    assert [(one.cause, one.count) for one in found.values()] == ([] if cause is None else [(cause, 1)])
    assert all("move it out of the step" not in one.instead for one in found.values())
    assert torch.from_numpy is from_numpy


def test_lines_equal_those_of_the_simulated_device(cuda):
    names = names_of("cuda")
    for line in [*SYNCHRONIZING, *QUIET]:
        with cuda.watch() as seen:
            eval(line, names)
        assert bool(seen.waits) is (line in SYNCHRONIZING), (line, seen.waits)


def test_backward_pass_in_a_thread_of_autograds(monkeypatch):
    """It runs in a thread on a GPU, but not on a CPU. Other threads do not belong to the step."""
    for name in ("get_sync_debug_mode", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    found, done = {}, threading.Event()

    def backward():
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        done.set()

    with SyncWatch("cuda", found):
        _thread.start_new_thread(backward, ())
        done.wait()
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    (one,) = found.values()
    assert (one.count, one.code) == (1, 'warnings.warn("called a synchronizing CUDA operation", stacklevel=1)')


class Clean(Regression):
    """Logs, and creates and reads tensors on the host, without synchronization."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=4)
        self.log("constant", 0.5, batch_size=4)
        lengths = torch.arange(3) + 1
        torch.zeros(3, device=self.device)
        return loss * torch.ones((), device=self.device) + 0.0 * lengths.sum().item()


@pytest.mark.parametrize(("precision", "optimizer"), [("16-mixed", adamw), ("bf16-mixed", sgd)])
def test_step_without_synchronization_reports_nothing(tmp_path, precision, optimizer):
    module = Clean(optimizer=optimizer)
    assert found_in(tmp_path, module, precision=precision, gradient_clip_val=0.5).synchronizations == []


def test_short_fit_and_a_validation_in_between(tmp_path):
    class Reading(Clean):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            loss.item()  # reads
            return loss

        def validation_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx).item()

    detector = SyncDetector(batches=100, after=0)
    trainer = make_trainer(tmp_path, callbacks=[detector], val_check_interval=2, num_sanity_val_steps=0)
    trainer.fit(Reading(), loader_of(make_batches(6)), loader_of(make_batches(2)))
    assert [(one.line, one.count) for one in detector.synchronizations] == [(line_of(Reading, "reads"), 6)]
    assert detector.watched == 6


def test_error_ends_the_watch(tmp_path):
    with pytest.raises(ZeroDivisionError):
        found_in(tmp_path, Regression(change=lambda loss, batch_idx: loss * (1 / (2 - batch_idx))))
    assert torch.overrides._get_current_function_mode() is None


def test_on_cuda_torchs_warnings_become_lines(monkeypatch):
    """With torch's warnings in its sync debug mode at the synchronizing line, as a stand-in for a GPU."""
    modes, shown, found = [], [], {}
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr("trainer.diagnosis.sync_detector._LOOPS", ("_pytest",))
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: shown.append(str(message)))
    with warnings.catch_warnings(action="always"), SyncWatch("cuda", found):
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)  # here
        warnings.warn("another", stacklevel=1)
    assert (modes, shown) == (["warn", 0], ["another"])
    line = line_of(test_on_cuda_torchs_warnings_become_lines, "here")
    assert [(one.line, one.count) for one in found.values()] == [(line, 3)]


@pytest.mark.gpu(simulated=False)  # the driver owns torch's sync debug mode
def test_on_a_gpu_the_same_lines(tmp_path, capsys):
    detector = found_in(tmp_path, Planted(), callbacks=[AtTheEnd()], accelerator="gpu", devices=1)
    lines = {line_of(Planted.training_step, mark) for mark in PLANTED} | {line_of(AtTheEnd, "callback")}
    assert {one.line for one in detector.synchronizations} == lines
