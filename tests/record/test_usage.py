"""How busy the machine is: what is measured, by whom, for how long, and what is left of it."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Dataset

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.callbacks.run_recorder import RunRecorder
from trainer.record import usage
from trainer.record.reader import RunRecord
from trainer.record.usage import Usage

CPU = torch.device("cpu")
BEFORE: list[threading.Thread] = []
"""Of other tests, whose fits do not end: these threads are gone soon."""


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "trainer-usage" and one not in BEFORE]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "_INTERVAL", 0.01)
    BEFORE[:] = [one for one in threading.enumerate() if one.name == "trainer-usage"]


class Waits(Callback):
    """Gives the thread time for some samples in each batch; may fail."""

    def __init__(self, fails: bool = False) -> None:
        self.seen: list[int] = []
        self.fails = fails

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        (recorder,) = (callback for callback in trainer.callbacks if isinstance(callback, RunRecorder))
        had = len(recorder.usage.state_dict()["seconds"])
        end = time.monotonic() + 60
        while len(recorder.usage.state_dict()["seconds"]) < had + 2 and time.monotonic() < end:
            time.sleep(0.005)
        self.seen.append(len(threads()))
        if self.fails:
            raise RuntimeError("asked to")


def written(folder: Path) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = json.loads((folder / "run.json").read_text())["curves"]["usage"]
    return samples


def test_a_fit_is_watched_by_one_thread_which_ends_with_it(tmp_path, quick):
    waits = Waits()
    trainer = make_trainer(tmp_path, callbacks=[waits, RunRecorder(dirpath=tmp_path)])
    trainer.fit(Regression(), loader_of(make_batches(3)))
    assert waits.seen == [1, 1, 1]
    assert threads() == []
    samples = written(tmp_path)
    assert len(samples["seconds"]) >= 6
    assert samples["seconds"] == sorted(samples["seconds"])
    assert {len(values) for values in samples.values()} == {len(samples["seconds"])}
    assert all(0 <= value <= (os.cpu_count() or 1) + 1 for value in samples["process"])
    assert ("machine" in samples) is (sys.platform == "linux")


def test_it_ends_with_a_fit_that_fails(tmp_path, quick):
    trainer = make_trainer(tmp_path, callbacks=[Waits(fails=True), RunRecorder(dirpath=tmp_path)])
    with pytest.raises(RuntimeError, match="asked to"):
        trainer.fit(Regression(), loader_of(make_batches(3)))
    assert threads() == []
    assert len(written(tmp_path)["seconds"]) >= 2


def test_nobody_looks_where_no_record_is_written(tmp_path, quick):
    class Look(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            assert threads() == []

    make_trainer(tmp_path, callbacks=[Look(), RunRecorder(writes=False)]).fit(Regression(), loader_of(make_batches(1)))


class Threads(Dataset[Any]):
    """Batches, of which each says how many such threads there are where it is made."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        x, y, gain = make_batches(1)[0]
        return x, y, gain + len(threads())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_have_none_of_it(tmp_path, quick, method):
    if method == "fork" and sys.platform != "linux":
        pytest.skip("no fork")
    gains = []

    class Module(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            gains.append(batch[2].item())
            return super().training_step(batch, batch_idx)

    waits = Waits()
    trainer = make_trainer(tmp_path, callbacks=[waits, RunRecorder(dirpath=tmp_path)], max_epochs=2)
    trainer.fit(
        Module(), DataLoader(Threads(), None, num_workers=1, persistent_workers=True, multiprocessing_context=method)
    )
    assert gains == [1.0] * 4
    assert waits.seen == [1] * 4


def test_a_run_that_is_resumed_in_its_folder_goes_on_behind(tmp_path, quick):
    first = make_trainer(tmp_path, callbacks=[Waits(), RunRecorder(dirpath=tmp_path)], max_epochs=1)
    first.fit(Regression(), loader_of(make_batches(2)))
    first.save_checkpoint(tmp_path / "one.ckpt")
    before = written(tmp_path)
    second = make_trainer(tmp_path, callbacks=[Waits(), RunRecorder(dirpath=tmp_path)], max_epochs=2)
    second.fit(Regression(), loader_of(make_batches(2)), ckpt_path=tmp_path / "one.ckpt")
    after = written(tmp_path)
    assert after["seconds"][: len(before["seconds"])] == before["seconds"]
    assert after["seconds"][-1] >= before["seconds"][-1]
    assert len(after["seconds"]) >= len(before["seconds"]) + 4
    assert "usage" not in str(torch.load(tmp_path / "one.ckpt", weights_only=False)["callbacks"])


@pytest.mark.parametrize(
    "told", [3, {"seconds": 3}, {"process": [1.0]}, {"seconds": [1.0], "gpu": []}, {"seconds": ["a"]}]
)
def test_what_another_program_has_written_is_left(told):
    assert Usage(CPU, told).state_dict() == {"seconds": []}


def test_a_copy_does_not_look(quick):
    one = Usage(CPU)
    one.start()
    try:
        for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            other.stop()
            assert "seconds" in other.state_dict()
    finally:
        one.stop()
    one.stop()
    assert threads() == []


def test_it_ends_when_nobody_knows_of_it(quick):
    one = Usage(CPU)
    one.start()
    (thread,) = threads()
    del one
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_many_samples_become_fewer(monkeypatch, quick):
    monkeypatch.setattr(usage, "_MOST", 4)
    ticks = iter(range(1, 100))
    one = Usage(CPU)
    one._measures = {"process": lambda: float(next(ticks))}
    one._samples = {"seconds": [0.0] * 3, "machine": [1.0, 3.0, 5.0]}
    assert one.sample() == 0.02
    samples = one.state_dict()
    assert len(samples["seconds"]) == 2
    assert samples["machine"][0] == 2.0
    assert str(samples["process"]) == "[nan, nan]"


def test_busy_cores_are_those_of_this_process(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    monkeypatch.setattr(usage, "_STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2}, raising=False)
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(usage, "monotonic", lambda: next(clock))
    ticks = os.sysconf("SC_CLK_TCK")

    def write(busy: int, other: int) -> None:
        rows = {"cpu0": busy, "cpu1": other, "cpu2": 2 * busy}
        lines = [f"{name} {b * ticks} 0 0 {7 * ticks} {3 * ticks} 0 0 0 {99 * ticks} 0" for name, b in rows.items()]
        stat.write_text("\n".join(["cpu  1 1 1 1 1 1 1 1 1 1", *lines, "intr 1 2 3", ""]))

    write(1, 1)
    measure = usage._measures(CPU)["machine"]
    assert str(measure()) == "nan"
    write(6, 100)
    assert measure() == 1.5  # (5 + 10) seconds of two cores in 10 seconds
    stat.unlink()
    assert set(usage._measures(CPU)) == {"process"}


def test_a_gpu_is_asked_by_nvml_where_that_is_there(monkeypatch):
    asked = []
    module: Any = types.ModuleType("pynvml")
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = lambda uuid: asked.append(uuid) or "handle"
    module.nvmlDeviceGetUtilizationRates = lambda handle: types.SimpleNamespace(gpu=87, memory=3)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="12-34"))
    assert usage._measures(torch.device("cuda", 0))["gpu"]() == 0.87
    assert asked == ["GPU-12-34"]
    module.nvmlDeviceGetUtilizationRates = lambda handle: 1 / 0  # as of a part of a GPU
    assert "gpu" not in usage._measures(torch.device("cuda", 0))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "gpu" not in usage._measures(torch.device("cuda", 0))


def test_the_reader_has_it_over_the_minutes():
    nan = float("nan")
    told = {"seconds": [60.0, 90.0, 120.0], "process": [1.0, 1.5, 2.0], "gpu": [nan, 0.5, 0.25], "machine": [nan] * 3}
    found = RunRecord({"curves": {"usage": told}}, Path()).usage
    assert {name: (list(c.steps), list(c.values)) for name, c in found.items()} == {
        "process": ([1.0, 1.5, 2.0], [1.0, 1.5, 2.0]),
        "gpu": ([1.5, 2.0], [0.5, 0.25]),
    }
    for odd in (None, [], {"process": [1.0]}, {"seconds": [1.0], "process": 3}):
        assert RunRecord({"curves": {"usage": odd}}, Path()).usage == {}
