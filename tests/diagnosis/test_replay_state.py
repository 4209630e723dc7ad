import random
from collections import OrderedDict, deque

import numpy as np
import torch
from torch import nn
from torchmetrics import MeanMetric

from tests import census
from tests.support import Irrep
from trainer.diagnosis.replay_state import BufferState, ObjectState


class Replays:
    """An object of the user's class."""

    def __init__(self):
        self.count, self.rng, self.buffer = 0, random.Random(2), {"rewards": [[0.5]]}


class Holder(nn.Module):
    """An object with every kind of state."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("queue", torch.zeros(3), persistent=False)
        self.average = torch.zeros(3)  # not a buffer
        self.generator = torch.Generator().manual_seed(3)
        self.rngs = np.random.default_rng(1), np.random.RandomState(1)
        self.parts = {"replays": Irrep([Replays()])}
        self.count, self.note = 1, "before"
        self.outputs, self.seen, self.recent = [1], {1}, deque([1], maxlen=2)
        self.table = OrderedDict(b=1, a=2)
        self.metrics = {"train": MeanMetric()}  # hidden from modules()
        self.hidden = [nn.BatchNorm1d(2)]
        weight = nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([weight], lr=torch.tensor(0.1), momentum=0.9)
        self.step_optimizer()
        self.schedules = [torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)]
        self.scaler = torch.amp.GradScaler("cpu")
        self.scaler.scale(torch.ones(()))

    def step_optimizer(self):
        (weight,) = self.optimizer.param_groups[0]["params"]
        weight.grad = torch.ones(2)
        self.optimizer.step()

    def disturb(self):
        self.queue += 1
        self.norm(torch.randn(4, 2))
        self.hidden[0](torch.randn(4, 2))
        self.average.add_(1)
        torch.rand((), generator=self.generator)
        for rng in self.rngs:
            rng.uniform()
        (replays,) = self.parts["replays"]
        replays.count, _ = 1, replays.rng.random()
        replays.buffer["rewards"][0].append(1.5)
        self.step_optimizer()
        self.schedules[0].step()
        self.scaler.load_state_dict(self.scaler.state_dict() | {"scale": 8.0, "_growth_tracker": 3})
        self.count += 1
        self.note = "after"
        self.new = 1
        self.outputs.append(torch.ones(()))
        self.seen.add(2)
        self.table.move_to_end("b")
        self.table["c"] = 3
        self.recent.append(2)
        self.metrics["train"].update(3.0)
        self.eval()
        self.hidden[0].eval()
        self.layer.register_forward_hook(print)
        self.average = torch.ones(5)
        self.extra = nn.Linear(1, 1)
        self.layer.weight.requires_grad_(False)


def census_of(holder):
    """Return every value in the object, by path."""
    values = {path: value for path, value in census.take({"holder": holder}).items() if path.startswith("holder")}
    return values | {"order": list(holder.table)}


def test_state_of_a_module_is_restored():
    holder = Holder()
    identities = {name: id(value) for name, value in vars(holder).items() if name != "count"}
    before, state = census_of(holder), ObjectState([holder])
    holder.disturb()
    assert len(census.differences(before, census_of(holder))) > 40
    for _ in range(2):
        state.restore()
        assert census.differences(before, census_of(holder)) == []
        assert {name: id(value) for name, value in vars(holder).items() if name != "count"} == identities


def test_restoring_parameters_does_not_disturb_a_graph():
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    state, weight = ObjectState([layer]), layer.weight.detach().clone()
    layer.weight.data.add_(1)
    loss = layer(layer(x)).sum()
    state.restore()
    loss.backward()  # a tensor saved for it that seems to have changed would raise
    assert torch.equal(layer.weight, weight)


def test_schedules_and_parameter_groups():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [parameter], "lr": torch.tensor(0.1)}], lr=0.1)
    inner = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _ in range(2)]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, milestones=[2])
    optimizer.step()
    before = str(schedule.state_dict()), str(optimizer.param_groups)
    state = ObjectState([schedule, *optimizer.param_groups])
    for _ in range(3):
        schedule.step()
    assert str(optimizer.param_groups) != before[1]
    state.restore()
    assert (str(schedule.state_dict()), str(optimizer.param_groups)) == before
    assert optimizer.param_groups[0]["params"][0] is parameter


def test_expanded_tensors_are_restored():
    """Elements that share memory cannot be written to as a whole."""
    holder = nn.Module()
    holder.register_buffer("expanded", torch.ones(2, 1).expand(2, 3))
    holder.plain = torch.zeros(()).expand(4)
    state, buffers = ObjectState([holder]), BufferState([holder.expanded])
    for restored in (state, buffers):
        holder.expanded[0, :1] = 7
        assert holder.expanded.sum() == 24
        restored.restore()
        assert holder.expanded.equal(torch.ones(2, 3))
    assert holder.plain.equal(torch.zeros(4))
