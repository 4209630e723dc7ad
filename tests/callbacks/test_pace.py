"""Time and memory over the steps of a training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trainer.callbacks import pace as module
from trainer.callbacks.pace import Pace


def fake_trainer(step=0, device="cpu", accumulate=2):
    strategy = SimpleNamespace(root_device=torch.device(device))
    return SimpleNamespace(global_step=step, strategy=strategy, accumulate_grad_batches=accumulate, world_size=3)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def paced(clock, **more):
    pace = Pace(max_points=8)
    pace._clock = clock
    pace.start(fake_trainer(**more))
    return pace


def note(pace, clock, step, seconds):
    clock.now += seconds
    pace.note(fake_trainer(step), torch.zeros(5, 2))


def test_time_without_validations(clock):
    pace = paced(clock)
    note(pace, clock, 1, 0.5)
    pace.pause()
    clock.now += 60
    pace.go_on()
    note(pace, clock, 2, 0.25)
    assert (pace.seconds.steps, pace.seconds.read()) == ([1, 2], [0.5, 0.75])
    assert pace.samples_per_step == 5 * 2 * 3


def test_memory_is_read_once_a_second(clock, monkeypatch):
    readings = iter([7, 8, 9])
    monkeypatch.setattr(module, "_reader", lambda device: lambda: next(readings))
    pace = paced(clock)
    for step, seconds in enumerate((0.1, 0.4, 0.4, 0.4, 0.4, 0.4), start=1):
        note(pace, clock, step, seconds)
    assert (pace.memory.steps, pace.memory.read()) == ([1, 4], [7, 8])


def test_a_process_knows_its_size():
    read = module._reader(torch.device("cpu"))
    if read is not None:
        assert 2**24 < read() < 2**40


def test_memory_of_a_gpu(clock, monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 if device.index == 1 else 6)
    pace = paced(clock, device="cuda:1")
    note(pace, clock, 1, 0.1)
    assert pace.on_gpu
    assert pace.memory.read() == [5]


def test_a_resumed_training_goes_on(clock):
    before = paced(clock)
    for step in (1, 2, 3):
        note(before, clock, step, 1.0)
    after = Pace(max_points=8)
    after._clock = clock
    after.load_state_dict(before.state_dict())
    clock.now += 3600
    after.start(fake_trainer(step=2))
    note(after, clock, 3, 0.5)
    assert (after.seconds.steps, after.seconds.read()) == ([1, 2, 3], [1.0, 2.0, 2.5])


def test_batches_of_unknown_size(clock):
    pace = paced(clock)
    pace.note(fake_trainer(1), "text")
    assert pace.samples_per_step is None
    assert pace.state_dict()["samples_per_step"] is None
