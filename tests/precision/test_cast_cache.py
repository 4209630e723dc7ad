"""The remedy for casts that torch 2.10 keeps without a graph. What it is good for is in tests/test_autocast.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.nn import functional as F

from trainer.precision import MixedPrecision, cast_cache
from trainer.precision.cast_cache import loses_gradients, with_trusted_cache


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.fixture
def clearings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a torch that needs the remedy; grows with each clearing of the cache."""
    monkeypatch.setattr(cast_cache, "loses_gradients", lambda: True)
    counted: list[int] = []
    clear = torch.clear_autocast_cache
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: (counted.append(1), clear()))
    return counted


def test_torch_2_10_needs_it_and_torch_2_11_does_not():
    loses_gradients.cache_clear()
    with torch.inference_mode():  # asked from wherever
        assert loses_gradients() is (Version(torch.__version__) < Version("2.11"))


@pytest.mark.skipif(Version(torch.__version__) < Version("2.11"), reason="needs the remedy")
def test_where_torch_is_right_nothing_is_added():
    context = autocast()
    assert with_trusted_cache(context) is context
    plugin = MixedPrecision("bfloat16")
    with plugin.session(nn.Linear(1, 1), torch.device("cpu")):
        assert type(plugin.autocast()) is torch.autocast


def test_the_cache_is_emptied_where_gradients_come_back(clearings):
    x, weight = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    context = with_trusted_cache(autocast())
    for _ in range(2):  # one object, used again and again
        clearings.clear()
        with context:
            assert torch.is_autocast_enabled("cpu")
            F.linear(x, weight)
            F.linear(x, weight)
            with torch.no_grad():
                F.linear(x, weight)
                F.linear(x, weight)
            assert clearings == []
            F.linear(x, weight)
            F.linear(x, weight)
            assert clearings == [1]
            with torch.inference_mode():
                F.linear(x, weight)
            assert F.linear(x, weight).requires_grad
            assert clearings == [1, 1]
        assert not torch.is_autocast_enabled("cpu")


def test_it_ends_with_an_error(clearings):
    with pytest.raises(KeyError), with_trusted_cache(autocast()):
        raise KeyError
    assert not torch.is_autocast_enabled("cpu")
    assert clearings == [1]  # autocast's own, where it ends
    with torch.no_grad():
        torch.ones(1) + 1
    torch.ones(1) + 1
    assert clearings == [1]


def test_compiled_code_does_not_see_it(clearings):
    torch._dynamo.reset()
    net, graphs = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(net, backend=backend, fullgraph=True)
    with with_trusted_cache(autocast()):
        with torch.no_grad():
            compiled(torch.ones(1, 2))
        compiled(torch.ones(1, 2)).sum().backward()
    assert len(graphs) == 2  # without gradients, and with
    assert net[0].weight.grad is not None
    torch._dynamo.reset()
