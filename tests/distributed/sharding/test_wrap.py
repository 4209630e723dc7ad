"""Selection of the modules to shard, and restoring a module."""

import pytest
import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests import census
from tests.support import needs_fsdp2
from trainer.distributed.sharding import wrap
from trainer.distributed.sharding.wrap import ShardedModule, Sharding, find_blocks, restore_module
from trainer.errors import ConfigurationError, UnsupportedError

pytestmark = needs_fsdp2


class Part(nn.Module):
    """A block with a list in it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x):
        return x + self.inner(x)


class Model(nn.Module):
    """Blocks in a list; a head that shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(4, 4, bias=False)
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


@pytest.fixture
def one_process(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def names(module, blocks):
    return {name for name, part in module.named_modules() if part in blocks}


PARTS = {"parts.0", "parts.1", "parts.2"}


@pytest.mark.parametrize(
    ("model", "blocks", "expected"),
    [
        (Model(), None, PARTS),  # the outermost members of lists
        (nn.Sequential(Model(), nn.Linear(4, 2)), None, {*(f"0.{part}" for part in PARTS), "1"}),
        (Model(), [Part], PARTS),
        (Model(), ["Part"], PARTS),
        (Model(), [nn.Linear], {f"{part}.inner.{i}" for part in PARTS for i in (0, 2)}),  # without shared parameters
    ],
)
def test_selected_blocks(model, blocks, expected):
    assert names(model, find_blocks(model, blocks)) == expected


def test_misspelt_class_is_refused():
    with pytest.raises(ConfigurationError, match=r"blocks=\[Prt\].*does not contain.*Did you mean 'Part'.*Linear"):
        find_blocks(Model(), ["Prt"])


@pytest.mark.usefixtures("one_process")
def test_restore_returns_the_original_module():
    model = Model()
    model.parts[0].requires_grad_(False)
    parameters, before = dict(model.named_parameters()), census.take({"model": model})
    expected = model(torch.ones(2, 4))
    for _ in range(2):
        shard(model)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        with torch._C.DisableTorchFunctionSubclass():
            assert not any(parameter.numel() for parameter in parameters.values())
        model(torch.ones(2, 4)).sum().backward()
        restore_module(model)
        assert census.differences(before, census.take({"model": model})) == []
        assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
        assert model.head.weight is model.embedding.weight
    assert torch.equal(model(torch.ones(2, 4)), expected)
    restore_module(model)  # nothing to do


@pytest.mark.usefixtures("one_process")
def test_current_buffers_are_broadcast(monkeypatch):
    model, sent = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), []
    model[0].register_buffer("scale", torch.ones(1), persistent=False)
    sharded = shard(model)
    model[1].running_mean = torch.full((4,), 7.0)  # as StochasticWeightAveraging does
    model[1].running_var = None
    monkeypatch.setattr(wrap, "_broadcast", sent.extend)
    sharded.before_forward()
    expected = [model[0].scale, model[1].running_mean, model[1].num_batches_tracked]
    assert [*map(id, sent)] == [*map(id, expected)]


def shard(model):
    return ShardedModule(model, init_device_mesh("cpu", (1,)), torch.device("cpu"), Sharding())


def with_hook():
    parameter = nn.Parameter(torch.ones(4))
    parameter.register_hook(lambda gradient: gradient * 2)
    return parameter


def tied_by_memory(model):
    head = nn.Linear(4, 4)
    head.weight.data = model.embedding.weight.data
    return head


UNSUPPORTED = {
    r"part: .*torch\.ones\(1\)": lambda _: nn.Parameter(torch.tensor(1.0)),
    r"part: .*complex parameters.*strategy='ddp'": lambda _: nn.Parameter(torch.ones(2, dtype=torch.complex64)),
    r"part: .*without elements": lambda _: nn.Parameter(torch.ones(0)),
    r"part: .*register_hook.*on_before_optimizer_step": lambda _: with_hook(),
    r"part: expected a dense parameter": lambda _: nn.Parameter(torch.eye(3).to_sparse()),
    r"part\.weight: .*shares memory with embedding\.weight": tied_by_memory,
    r"part: .*sparse=False": lambda _: nn.Embedding(4, 4, sparse=True),
    r"part: max_norm": lambda _: nn.Embedding(4, 4, max_norm=1.0),
    r"one dtype: embedding\.weight \(float32\) and part\.weight \(float64\)": lambda _: nn.Linear(4, 4).double(),
    r"part: .*the original module": lambda _: torch.jit.script(nn.Linear(4, 4)),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("message", UNSUPPORTED)
def test_unsupported_parameters_are_refused_by_name(message):
    model = Model()
    model.part = UNSUPPORTED[message](model)
    parameters = list(model.parameters())
    with pytest.raises(UnsupportedError, match=message):
        shard(model)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))


@pytest.mark.usefixtures("one_process")
def test_shards_have_the_attributes_of_the_original_parameters():
    model = Model()
    model.head.bias.decays = False
    sharded = shard(model)
    assert model.head.bias.decays is False
    sharded.restore_module()
    assert model.head.bias.decays is False
    assert wrap._CLASS not in vars(model.head.bias)


@pytest.mark.usefixtures("one_process")
def test_use_of_a_parameter_from_before_the_sharding_is_an_error():
    model = Model()
    model.embedding.weight.__class__ = type("Own", (nn.Parameter,), {})
    weight, bias = model.head.weight, model.head.bias
    sharded = shard(model)
    with pytest.raises(RuntimeError, match=r"replaced by shards.*self\.net\.parameters"):
        weight.square().sum()
    sharded.restore_module()
    assert (type(weight).__name__, type(bias)) == ("Own", nn.Parameter)
    assert weight is model.head.weight
