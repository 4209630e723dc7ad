from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer.common import machine
from trainer.record.memory_usage import Usage, expands_segments, measure, write_snapshot

CPU = torch.device("cpu")
GIBIBYTE = 2**30
FULL = Usage(
    {"weights": 4 * GIBIBYTE, "gradients": 4 * GIBIBYTE, "optimizer": 8 * GIBIBYTE, "buffers": 0, "batch": GIBIBYTE},
    allocated=70 * GIBIBYTE,
    unused=5 * GIBIBYTE,
    elsewhere=GIBIBYTE,
    peak=71 * GIBIBYTE,
    total=80 * GIBIBYTE,
)


def test_live_bytes_by_kind():
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    net[2].bias.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad])
    net(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    batch = torch.ones(4, 6)
    usage = measure(CPU, net, [optimizer], [batch, batch[:2], torch.ones(3, device="meta")])
    trained, frozen = 6 * 16 + 16 + 2 * 16 + 16 * 3, 3
    assert usage.kinds == {
        "weights": 4 * (trained + frozen),
        "gradients": 4 * trained,
        "optimizer": 2 * 4 * trained + 4 * 5,  # and a number of steps for each of five parameters
        "buffers": 4 * (16 + 16) + 8,
        "batch": 4 * 4 * 6,
    }
    assert usage.rest == usage.allocated - sum(usage.kinds.values())
    assert usage.total == machine.memory().most


def test_shared_tensors_count_once_and_detached_ones_are_included():
    net = nn.Linear(4, 4, bias=False)
    tied = nn.ModuleList([net, nn.Linear(4, 4, bias=False)])
    tied[1].weight = net.weight
    elsewhere = nn.Parameter(torch.zeros(5))
    elsewhere.grad = torch.zeros(5)
    usage = measure(CPU, tied, [torch.optim.SGD([net.weight, elsewhere])], [])
    assert (usage.kinds["weights"], usage.kinds["gradients"]) == (4 * 16 + 4 * 5, 4 * 5)
    assert measure(CPU, None, [], []).kinds["weights"] == 0


def test_derived_numbers():
    assert FULL.rest == 53 * GIBIBYTE
    assert not FULL.is_fragmented
    assert replace(FULL, unused=10 * GIBIBYTE).is_fragmented
    assert not replace(FULL, unused=None).is_fragmented
    assert not FULL.is_mostly_states
    assert replace(FULL, total=31 * GIBIBYTE).is_mostly_states
    assert not replace(FULL, total=None).is_mostly_states
    assert Usage(FULL.kinds).rest is None
    assert Usage(FULL.kinds, allocated=3).rest == 0
    facts = FULL.facts()
    names = ("rest", "allocated", "unused", "elsewhere", "peak", "total")
    assert facts == {**FULL.kinds, **{name: getattr(FULL, name) for name in names}}
    assert Usage({"weights": 1}).facts() == {"weights": 1}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_whether_segments_expand(monkeypatch, name):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert not expands_segments()
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    assert expands_segments()


def test_snapshot_is_torchs_own(tmp_path, monkeypatch):
    file = tmp_path / "run" / "memory.pickle"
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda name: Path(name).write_text("blocks"))
    assert not write_snapshot(CPU, file)
    assert write_snapshot(torch.device("cuda", 0), file)
    assert file.read_text() == "blocks"
    monkeypatch.delattr(torch.cuda.memory, "_dump_snapshot")
    assert not write_snapshot(torch.device("cuda", 0), file)
