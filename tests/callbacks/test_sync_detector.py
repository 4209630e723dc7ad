from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from tests.support import Regression, adamw, fit_and_watch, loader_of, make_batches, make_trainer, native_fp16
from trainer.callbacks import SyncDetector
from trainer.callbacks.sync_detector import HostWaits
from trainer.errors import ConfigurationError

STEPS = 4


def line_of(function: Any, mark: str) -> int:
    """The number of the line that has this comment."""
    lines, start = inspect.getsourcelines(function)
    (found,) = [start + i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}")]
    return found


def found_in(folder: Any, module: Any, batches: int = STEPS + 2, callbacks: Any = (), **arguments: Any) -> SyncDetector:
    detector = SyncDetector(batches=STEPS, after=1)
    trainer = make_trainer(folder, callbacks=[detector, *callbacks], **arguments)
    trainer.fit(module, loader_of(make_batches(batches)))
    return detector


class Planted(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
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
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        float(outputs["loss"])  # callback


PLANTED = {
    "if": ("__bool__", "torch.where(condition, a, b)"),
    "item": ("item", "self.log takes it as it is"),
    "print": ("__repr__", "every n-th step"),
    "tolist": ("tolist", "at the end of the epoch"),
    "cpu": ("cpu", "non_blocking=True"),
    "nonzero": ("nonzero", "keeps the shape"),
    "mask": ("__getitem__", "keeps the shape"),
    "made": ("tensor", "device=self.device"),
    "sent": ("to", "pin_memory()"),
}


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_planted_lines_are_found_and_counted(tmp_path, caplog, capsys, precision):
    caplog.set_level("INFO", "lightning.pytorch.advice")
    detector = found_in(tmp_path, Planted(), callbacks=[AtTheEnd()], precision=precision)
    found = {wait.line: wait for wait in detector.waits}
    lines = {line_of(Planted.training_step, mark): mark for mark in PLANTED}
    at_end = line_of(AtTheEnd, "callback")
    assert set(found) == {*lines, at_end}
    assert {wait.count for wait in detector.waits} == {STEPS}
    for line, mark in lines.items():
        what, instead = PLANTED[mark]
        assert found[line].what == what
        assert instead in found[line].instead
        assert found[line].code.endswith(f"# {mark}")
    assert (found[at_end].what, found[at_end].file) == ("__float__", __file__)
    (record,) = [one for one in caplog.records if one.name == "lightning.pytorch.advice"]
    assert record.message.startswith(f"These lines make the host wait for the GPU; in {STEPS} steps:")
    number = line_of(Planted.training_step, "item")
    assert (
        f"test_sync_detector.py:{number}: self.seen = loss.item()  # item (4 times); keep the tensor" in record.message
    )
    assert [fact["line"] for fact in detector.run_facts()["host_waits"]] == [wait.line for wait in detector.waits]


class Clean(Regression):
    """Logs, makes things on the host, and reads those: nobody waits for a GPU."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=4)
        self.log("constant", 0.5, batch_size=4)
        lengths = torch.arange(3) + 1
        torch.zeros(3, device=self.device)
        return loss * torch.ones((), device=self.device) + 0.0 * lengths.sum().item()


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("optimizer", [adamw, torch.optim.SGD])
def test_a_clean_step_is_left_alone(tmp_path, precision, optimizer):
    module = Clean(None, lambda parameters: optimizer(parameters, lr=0.01))
    assert found_in(tmp_path, module, precision=precision, gradient_clip_val=0.5).waits == []


def test_nothing_changes(tmp_path):
    def losses(callbacks: list[Any]) -> tuple[list[float], list[Tensor]]:
        module = Planted()
        _, trace = fit_and_watch(tmp_path, module, make_batches(8), precision=native_fp16(), callbacks=callbacks)
        return trace.losses, trace.weights[-1]

    with_it, without = losses([SyncDetector(batches=3)]), losses([])
    assert with_it[0] == without[0]
    assert all(map(torch.equal, with_it[1], without[1]))
    assert torch.overrides._get_current_function_mode() is None


def test_a_short_fit_and_a_validation_in_between(tmp_path):
    detector = SyncDetector(batches=100, after=0)

    class Reading(Clean):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            loss.item()  # reads
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx).item()

    trainer = make_trainer(tmp_path, callbacks=[detector], val_check_interval=2, num_sanity_val_steps=0)
    trainer.fit(Reading(), loader_of(make_batches(6)), loader_of(make_batches(2)))
    ((line, count),) = [(wait.line, wait.count) for wait in detector.waits]
    assert (line, count) == (line_of(Reading, "reads"), 6)


def test_an_error_ends_the_watch(tmp_path):
    class Failing(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise ValueError("mine")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="mine"):
        found_in(tmp_path, Failing())
    assert torch.overrides._get_current_function_mode() is None


def test_on_cuda_torchs_warnings_become_lines(monkeypatch):
    """A stand-in for a GPU: the warning that torch gives in its sync debug mode, at the line that waited."""
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr("trainer.callbacks.sync_detector._LOOPS", ("_pytest",))
    shown = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: shown.append(str(message)))
    found: dict[Any, Any] = {}

    def wait() -> None:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp:1.)", stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with HostWaits("cuda", found):
            for _ in range(3):
                wait()
            warnings.warn("another", stacklevel=1)
    assert modes == ["warn", 0]
    assert shown == ["another"]
    assert [(one.line, one.count) for one in found.values()] == [(line_of_warning(), 3)]


def line_of_warning() -> int:
    lines, start = inspect.getsourcelines(test_on_cuda_torchs_warnings_become_lines)
    return start + next(i for i, line in enumerate(lines) if "called a synchronizing" in line)


@pytest.mark.gpu(simulated=False)  # torch's sync debug mode is the driver's
def test_on_a_gpu_the_same_lines(tmp_path, capsys):
    detector = found_in(tmp_path, Planted(), callbacks=[AtTheEnd()], accelerator="gpu", devices=1)
    lines = {line_of(Planted.training_step, mark) for mark in PLANTED} | {line_of(AtTheEnd, "callback")}
    assert {wait.line for wait in detector.waits} == lines


@pytest.mark.parametrize("arguments", [{"batches": 0}, {"after": -1}])
def test_what_is_refused(arguments):
    with pytest.raises(ConfigurationError, match="expected at least 1 and 0"):
        SyncDetector(**arguments)
