"""ActivationCheckpointing keeps results bit for bit in every precision, and restores the module after a run."""

import copy
import pickle
import random
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._pytree import tree_leaves

from tests.parity import assert_same_weights
from tests.support import TORCH, Regression, assert_same, fit_and_watch, loader_of, make_batches, make_trainer
from tests.test_autocast import ours as autocast_plugin
from trainer.callbacks import ActivationCheckpointing
from trainer.callbacks.activation_checkpointing import _CheckpointedForward
from trainer.errors import ConfigurationError


class Block(nn.Module):
    """A block with dropout, running statistics, and power iterations, which a second forward must not change."""

    def __init__(self, spectral=True):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        if spectral:
            spectral_norm(self.inner)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.4)
        self.forwards = 0

    def forward(self, x, *, slope=1.0):
        if not torch.compiler.is_compiling():
            self.forwards += 1
        return x + self.drop(F.relu(self.norm(self.inner(x)) * slope))


class Net(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.blocks = nn.ModuleList(Block(**how) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, slope=1.5)
        return self.head(x)


def make(**how):
    torch.manual_seed(0)
    return Net(**how)


def fit(folder, module, *callbacks, batches=6, seed=5, **arguments):
    torch.manual_seed(seed)
    arguments["precision"] = autocast_plugin(arguments.get("precision", "32-true"))
    return fit_and_watch(folder, module, make_batches(batches), callbacks=list(callbacks), **arguments)


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "modules"),
    [
        ("32-true", "net.blocks.*"),
        ("bf16-mixed", [Block]),
        ("16-mixed", ["net.blocks.0", "net.blocks.2", "net.head"]),
        ("16-mixed-fast", ["Block"]),
    ],
)
def test_not_a_bit_changes(tmp_path, precision, modules):
    mine, theirs = make(), make()
    arguments = {"precision": precision, "accumulate_grad_batches": 2, "max_epochs": 2}
    _, trace = fit(tmp_path, Regression(mine), ActivationCheckpointing(modules), **arguments)
    _, expected = fit(tmp_path, Regression(theirs), **arguments)
    assert_same(trace, expected)
    assert_same_weights(mine, theirs)  # running statistics and singular vectors too
    assert mine.blocks[0].norm.num_batches_tracked == 12
    chosen = 2 if modules[-1] == "net.head" else 3
    assert [block.forwards for block in theirs.blocks] == [12] * 3
    assert sum(block.forwards for block in mine.blocks) == 12 * (3 + chosen)


DRAWS = {
    "python": lambda block: random.random(),
    "numpy": lambda block: np.random.rand(),
    "torch": lambda block: torch.rand((), generator=block.of_torch).item(),
    "an attribute": lambda block: block.of_numpy.random(),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_second_forward_draws_the_same_numbers_from_any_generator(tmp_path, kind):
    """The numbers after it are those of a run without checkpointing."""

    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.of_torch, self.of_numpy = torch.Generator().manual_seed(3), np.random.default_rng(3)

        def forward(self, x):
            return self.layer(x * DRAWS[kind](self)).tanh()

    weights = []
    for callbacks in ([], [ActivationCheckpointing(Draws)]):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        module = Regression(nn.Sequential(Draws(), nn.ReLU(), Draws(), nn.Linear(6, 3)))
        make_trainer(tmp_path, callbacks=callbacks).fit(module, loader_of(make_batches(4)))
        weights.append(module)
    assert_same_weights(*weights)


def test_graph_that_is_used_twice_is_computed_the_same_each_time(tmp_path):
    """For second derivatives or retain_graph, each backward pass recomputes from the same buffers."""
    traces, modules = [], [Regression(make()) for _ in range(2)]
    for module, callbacks in zip(modules, ([], [ActivationCheckpointing(Block)]), strict=True):

        def penalized(loss, batch_idx, net=module.net):
            gradients = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
            return loss + torch.cat([g.flatten() for g in gradients]).norm()

        module.change = penalized
        traces.append(fit(tmp_path, module, *callbacks, batches=3)[1])
    assert_same(*traces)
    assert_same_weights(*modules)


def test_activations_are_not_kept(tmp_path):
    class Counting(Regression):
        def training_step(self, batch, batch_idx):
            kept = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
                loss = super().training_step(batch, batch_idx)
            counts.append(len(kept))
            return loss

    counts = []
    fit(tmp_path, Counting(make()), batches=1)
    fit(tmp_path, Counting(make()), ActivationCheckpointing("net.blocks.*"), batches=1)
    assert counts[1] < counts[0] / 3


@dataclass
class Opaque:
    tensor: Tensor


@pytest.mark.parametrize("hand_over", ["by position", "by keyword", "in an object"])
def test_random_states_of_the_devices_are_kept(monkeypatch, hand_over):
    """torch only finds devices in positional arguments; otherwise the second forward drops other units on a GPU."""
    devices = set()

    class Drops(nn.Linear):
        def forward(self, hidden):
            return F.dropout(super().forward(hidden.tensor if isinstance(hidden, Opaque) else hidden), 0.5)

    def states(*args):
        devices.update(leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        return [], []

    gpu = SimpleNamespace(_initialized=True, _is_in_bad_fork=False)
    monkeypatch.setattr(torch.utils.checkpoint, "_get_device_module", lambda device="cuda": gpu)
    monkeypatch.setattr(torch.utils.checkpoint, "get_device_states", states)
    module, x = Drops(4, 4), torch.randn(2, 4)
    module.forward = _CheckpointedForward(module)
    if hand_over == "by position":
        module(x)
    else:
        module(hidden=x if hand_over == "by keyword" else Opaque(x))
    assert devices == {torch.device("cpu")}


# --- torch.compile --------------------------------------------------------------------------------------------------


def whole(module, backend):
    return torch.compile(module, backend=backend)


def the_blocks(module, backend):
    for i, block in enumerate(module.net.blocks):
        module.net.blocks[i] = torch.compile(block, backend=backend)
    return module


def the_blocks_in_place(module, backend):
    for block in module.net.blocks:
        block.compile(backend=backend)
    return module


@pytest.mark.whole
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's own
@pytest.mark.parametrize(
    ("way", "precision"),
    [
        (whole, "16-mixed-fast"),
        pytest.param(the_blocks, "bf16-mixed", marks=pytest.mark.representative),
        pytest.param(
            the_blocks_in_place, "bf16-mixed", marks=pytest.mark.skipif(TORCH < (2, 13), reason="not in torch 2.10")
        ),
    ],
)
def test_compiled_modules(tmp_path, way, precision):
    """Compared with compiled modules without checkpointing, because torch's compiled BatchNorm differs in 16 bits."""
    graphs, traces, modules = [], [], [Regression(make(spectral=False)) for _ in range(2)]

    def backend(graph, inputs):
        graphs.append(any("checkpoint" in str(node.target) for node in graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for module, callbacks in zip(modules, ([], [ActivationCheckpointing("net.blocks.*")]), strict=True):
        graphs.clear()
        torch._dynamo.reset()
        traces.append(fit(tmp_path, way(module, backend), *callbacks, batches=3, precision=precision)[1])
        # part of the graph; with compiled blocks, around the compiled function
        assert any(graphs) == (bool(callbacks) and way is not the_blocks)
        assert graphs
    assert_same(*traces)
    assert_same_weights(*modules)


# --- restoring --------------------------------------------------------------------------------------------------------


def test_keys_copies_and_weights_are_the_modules_own(tmp_path):
    class Looking(Regression):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert list(self.net.state_dict()) == keys
            assert [type(block) for block in self.net.blocks] == [Block] * 3
            duplicate, unpickled = copy.deepcopy(self.net), pickle.loads(pickle.dumps(self.net))
            for other in (duplicate, copy.deepcopy(duplicate), unpickled):
                assert_same_weights(other, self.net)
                before = self.net.blocks[0].forwards
                with torch.no_grad():
                    other.blocks[0].inner.weight.mul_(2)
                other(batch[0]).sum().backward()
                assert other.blocks[0].forwards == before + 1  # their own forward, once
                assert self.net.blocks[0].forwards == before
            copies.append(duplicate)

    copies = []
    keys = list(make(spectral=False).state_dict())
    fit(tmp_path, Looking(make(spectral=False)), ActivationCheckpointing(Block), batches=2)
    assert len(copies) == 2


@pytest.mark.filterwarnings("ignore:Nothing to do")
@pytest.mark.parametrize("fails", [False, True])
def test_modules_are_restored(tmp_path, fails):
    def change(loss, batch_idx):
        assert "forward" in vars(net.blocks[0])
        if fails:
            raise KeyError("in the step")
        return loss

    net = make()
    theirs = net.blocks[1].forward = lambda x, slope: Block.forward(net.blocks[1], x, slope=slope)
    trainer = make_trainer(tmp_path, callbacks=[ActivationCheckpointing(Block)])
    for _ in range(2):  # and again
        with pytest.raises(KeyError) if fails else nullcontext():
            trainer.fit(Regression(net, change=change), loader_of(make_batches(1)))
        assert ["forward" in vars(block) for block in net.blocks] == [False, True, False]
        assert net.blocks[1].forward is theirs


# --- selection of modules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ("net.block.*", r"Got 'net.block.\*' .* a module in Regression.* Did you mean 'net.blocks"),
        (["net.head", "Blok"], r"Got 'Blok' .* or of its class. Did you mean 'Block'\?"),
        (nn.Conv2d, "Got 'Conv2d' among the modules of ActivationCheckpointing"),
    ],
)
def test_patterns_without_a_match(tmp_path, modules, message):
    trainer = make_trainer(tmp_path, callbacks=[ActivationCheckpointing(modules)])
    with pytest.raises(ConfigurationError, match=message):
        trainer.fit(Regression(make()), loader_of(make_batches(1)))
