"""The processes of ``tune``, run in this one: measurements, unchanged settings, and failures."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from tests.cli.conftest import write
from tests.support import stream_of
from trainer.cli import tune
from trainer.cli.parsing import read
from trainer.cli.tune import attempt
from trainer.cli.tune.attempt import Meter, train, watch_memory
from trainer.common import machine


@pytest.fixture
def settings(project, monkeypatch):
    monkeypatch.setattr(attempt, "watch_memory", lambda budget, report: None)  # its thread would outlive the test

    def compose(*words):
        config, _ = tune.composed(read(["tune", "batch_size", "+recipe=line", *words]))
        return tune.plain(config, Path("run"))

    return compose


def tried(settings, memory=None):
    messages = []
    train(messages.append, Path("scratch"), settings, limits={"steps": 3, "memory": memory})
    (message,) = messages
    json.dumps(message)
    return message


def test_try(settings):
    message = tried(settings("data.batch_size=8", "optimizer=adam"))
    assert message["status"] == "ok"
    assert (message["batch"], message["samples"], message["skipped"]) == (8, 16, 0)
    assert message["precision"] == "32-true"
    assert message["samples_per_second"] > 0
    assert message["memory"] > 2**26
    assert not any(Path().rglob("*.ckpt"))
    assert not Path("outputs").exists()


BROKEN = """
    import math
    import torch
    from line_fit import Line

    class OutOfMemory(Line):
        def training_step(self, batch, batch_idx):
            raise torch.OutOfMemoryError("CUDA out of memory")

    class Overflows(Line):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if self.global_step < 5:
                loss.register_hook(lambda gradient: gradient * math.inf)
            return loss
"""


def test_out_of_memory_errors_are_distinguished(settings, capsys):
    write(Path(), {"broken.py": BROKEN})
    message = tried(settings("model._target_=broken.OutOfMemory"))
    assert message["status"] == "out of memory"
    assert message["error"].startswith("OutOfMemoryError: CUDA out of memory")
    message = tried(settings("model.fail_at=0"))
    error = "RuntimeError: asked to fail"
    assert message == {"status": "failed", "error": error, "is_usage": False, "is_precision": False}
    assert 'raise RuntimeError("asked to fail")' in capsys.readouterr().err  # the traceback is in the log


def test_config_that_cannot_be_built_is_the_users(settings):
    made = settings()
    made["data"]["batch_sise"] = 4
    message = tried(made)
    assert (message["status"], message["is_usage"]) == ("failed", True)
    assert "batch_sise" in message["error"]


def test_peak_beyond_the_budget_is_out_of_memory(settings):
    message = tried(settings(), memory=2**20)
    assert (message["status"], message["error"]) == ("out of memory", "the process exceeded the budget")
    assert message["memory"] > 2**26


def test_default_budget_of_a_cpu_is_its_free_memory(settings, monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(2**40, 2**20))
    assert tried(settings())["status"] == "out of memory"


def test_watch_ends_the_process_while_it_grows(monkeypatch):
    peaks, messages = iter([10, 50, 200]), []
    monkeypatch.setattr(machine, "peak_memory", lambda: next(peaks))
    watch_memory(100, messages.append)  # reporting ends the process
    assert [(message["status"], message["memory"]) for message in messages] == [("out of memory", 200)]


def test_budget_of_a_gpu_is_its_allocators(monkeypatch):
    given = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: given.append(share))
    before = threading.active_count()
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda", 0)))
    for memory in (20 * 2**30, 200 * 2**30, None):
        Meter(given.append, 3, memory).setup(trainer, None, "fit")
    assert given == [0.25, 1.0]
    assert threading.active_count() == before


def test_fp16_continues_until_two_completed_steps(settings):
    write(Path(), {"broken.py": BROKEN})
    message = tried(settings("model._target_=broken.Overflows", "precision=16"))
    assert (message["status"], message["skipped"]) == ("ok", 5)


def test_rates_exclude_the_first_step_and_waiting_time():
    ticks = iter([0, 9, 20, 22, 30, 34, 50, 51])  # the start and the end of four batches
    meter = Meter(print, 4)
    meter.clock = lambda: next(ticks)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(global_step=0, skipped_steps=0, should_stop=False, strategy=strategy)
    for _ in range(4):
        assert not trainer.should_stop
        meter.on_train_batch_start(trainer, None, torch.zeros(8, 2), 0)
        trainer.global_step += 1
        meter.on_train_batch_end(trainer, None, None, torch.zeros(8, 2), 0)
    assert trainer.should_stop
    assert meter.found()["samples_per_second"] == 24 / (2 + 4 + 1)


DATA = TensorDataset(torch.zeros(20, 1))


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        (DataLoader(DATA, batch_size=6, drop_last=True), 20),
        (DataLoader(DATA, sampler=WeightedRandomSampler(torch.ones(20), 7)), 7),
        (stream_of(range(3)), None),
        ({"a": DataLoader(DATA)}, None),
    ],
)
def test_number_of_samples_in_the_training_set(loader, samples):
    meter = Meter(print, 4)
    meter.on_train_start(SimpleNamespace(train_dataloader=loader), None)
    assert meter.found()["samples"] == samples
