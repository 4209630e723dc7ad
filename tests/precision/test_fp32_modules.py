"""Modules in float32 inside a 16-bit model: bitwise equal to hand-written casts, and restored afterwards."""

import copy
import io
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from tests.support import (
    Regression,
    adam,
    assert_same,
    fit_and_watch,
    loader_of,
    make_batches,
    make_net,
    make_trainer,
    train_by_hand,
)
from trainer.callbacks import ActivationCheckpointing
from trainer.common.module_tree import plain_name
from trainer.errors import PrecisionError
from trainer.precision import HalfPrecision, MixedPrecision, cpu_fp16
from trainer.precision.fp32_modules import find_modules, in_float32, running_in_float32

CPU = torch.device("cpu")
BOTH = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class ByHand(nn.Sequential):
    """``make_net`` with some layers in float32, written by hand; with ``dtype``, the others have it."""

    def __init__(self, chosen, dtype=None):
        super().__init__(*(part if i in chosen else part.to(dtype) for i, part in enumerate(make_net())))
        self.chosen, self.dtype = chosen, dtype

    def forward(self, x):
        for i, layer in enumerate(self):
            if i in self.chosen:
                with torch.autocast("cpu", enabled=False):
                    x = layer(x.float()).to(self.dtype or torch.float32)
            else:
                x = layer(x)
        return x


@contextmanager
def session(net, *patterns, dtype=torch.bfloat16):
    """Enter a run's session and one forward's autocast."""
    plugin = MixedPrecision(dtype, fp32_modules=patterns, cpu_kernels="native")
    with plugin.session(net, CPU), plugin.autocast():
        yield plugin


class Look(nn.Linear):
    """A linear layer that records its input, and returns its output unchanged."""

    def __init__(self):
        super().__init__(4, 4)
        self.seen = []

    def forward(self, *args, **kwargs):
        self.seen.append((args, kwargs, torch.is_autocast_enabled("cpu"), torch.zeros(1).dtype))
        return super().forward(args[0])


class Net(nn.Module):
    """Three layers; returns the output, and the output of ``head``."""

    def __init__(self, head=None):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.head, self.after = nn.Linear(4, 4), head or nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        inside = self.head(self.before(x))
        return self.after(inside), inside


def head_dtype(net):
    return net(torch.ones(2, 4))[1].dtype


# --- computation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("patterns", "chosen"), [(("net.0", "*.1"), (0, 1)), (("net",), (0, 1, 2, 3, 4))], ids=str)
@pytest.mark.parametrize("kernels", ["bf16", "native", "fast"])
def test_weights_equal_a_hand_written_loop(tmp_path, kernels, patterns, chosen):
    name, dtype = ("bf16-mixed", "bfloat16") if kernels == "bf16" else ("16-mixed", "float16")
    plugin = MixedPrecision(dtype, fp32_modules=patterns, cpu_kernels="native" if kernels == "bf16" else kernels)
    batches = make_batches(6, gains={3: 1e9} if name == "16-mixed" else None)  # an overflow
    _, ours = fit_and_watch(tmp_path, Regression(optimizer=adam), batches, precision=plugin)
    by_hand = partial(train_by_hand, precision=name, optimizer=adam)
    fast = cpu_fp16.fast_fp16_kernels if kernels == "fast" else torch.enable_grad  # the latter changes nothing
    with fast():
        theirs = by_hand(ByHand(chosen), batches)
        plain = by_hand(make_net(), batches)
    assert_same(ours, theirs)
    assert ours.losses != plain.losses  # it made a difference


@pytest.mark.parametrize("precision", BOTH)
def test_inside_everything_is_float32(precision):
    net = nn.Sequential(nn.Linear(4, 4), Look())
    with session(net, "1", dtype=BOTH[precision]):
        output = net(torch.randn(2, 4))
        net[1](x := torch.ones(2, 4, dtype=BOTH[precision]), key=[x, (x, "a")])
    ((x,), _, autocast, made), (_, kwargs, *_) = net[1].seen
    assert (x.dtype, output.dtype, autocast, made) == (torch.float32, torch.float32, False, torch.float32)
    first, (second, text) = kwargs["key"]
    assert (first.dtype, second.dtype, text) == (torch.float32, torch.float32, "a")
    assert net[0](torch.randn(2, 4)).dtype is torch.float32  # and afterwards nothing is cast


def test_packed_sequences():
    lstm = nn.LSTM(4, 3, batch_first=True)
    packed = pack_padded_sequence(torch.randn(2, 5, 4), torch.tensor([5, 2]), batch_first=True)
    expected, _ = lstm(PackedSequence(packed.data.bfloat16().float(), packed.batch_sizes))
    with session(nn.ModuleDict({"lstm": lstm}), "lstm"):
        output, (hidden, _) = lstm(PackedSequence(packed.data.bfloat16(), packed.batch_sizes))
    assert (output.data.dtype, hidden.dtype) == (torch.float32, torch.float32)
    assert torch.equal(output.data, expected.data)


# --- a run, its ends, and its stages -------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_run_leaves_nothing_behind(tmp_path, fails):
    def look(loss, batch_idx):
        assert "forward" in vars(module.net[4])
        if fails:
            raise KeyError("in the forward")
        return loss

    module = Regression(change=look)
    before = [set(vars(part)) for part in module.net.modules()]
    trainer = make_trainer(tmp_path, precision=MixedPrecision("bfloat16", fp32_modules=["net.*"]))
    fastpath = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(KeyError) if fails else nullcontext():
        trainer.fit(module, loader_of(make_batches(2)))
    assert [set(vars(part)) for part in module.net.modules()] == before
    assert torch.backends.mha.get_fastpath_enabled() is fastpath is True


def test_forward_replaced_during_the_run_is_kept():
    net = nn.Sequential(nn.Linear(4, 4))
    with session(net, "0"):
        ours = net[0].forward
        theirs = net[0].forward = lambda x: ours(x)
    assert net[0].forward is theirs


def test_modules_that_the_strategy_replaces_are_chosen_after_that(tmp_path):
    """As ``sync_batchnorm`` does, on GPUs only."""

    class Replacing(SingleDeviceStrategy):
        def setup(self, trainer):
            self.model.net[1] = nn.LayerNorm(16)  # with the weights that the old one had
            super().setup(trainer)

    batches, chosen = make_batches(3), MixedPrecision("bfloat16", fp32_modules=["net.1"])
    trainer = partial(fit_and_watch, tmp_path, batches=batches, precision=chosen)
    _, ours = trainer(Regression(), accelerator="auto", strategy=Replacing(CPU))
    assert_same(ours, train_by_hand(ByHand((1,)), batches, precision="bf16-mixed"))


# --- copies --------------------------------------------------------------------------------------------------------


def test_copy_made_during_a_run_has_its_own_weights():
    net, file, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), io.BytesIO(), torch.ones(1, 4)
    with session(net, "1"):
        twin = copy.deepcopy(net)
        with torch.no_grad():
            twin[1].weight.zero_()
            twin[1].bias.fill_(7.0)
        assert torch.equal(twin(x), torch.full((1, 4), 7.0))  # float32
        assert not torch.equal(net(x), torch.full((1, 4), 7.0))
        torch.save(net, file)
        assert list(net.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert torch.equal(twin(x), torch.full((1, 4), 7.0))  # and works outside
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), net(x))  # a module like any other


# --- torch's wrappers of modules -------------------------------------------------------------------------------------


COMPILER_LOOKS = "ignore:The .grad attribute of a Tensor that is not a leaf"
"""Warnings that torch.compile causes when it inspects its inputs."""


@pytest.mark.parametrize("precision", BOTH)
@pytest.mark.parametrize("recomputed", [["net"], ["net.0", "net.4"]], ids=str)
def test_callback_that_recomputes(tmp_path, precision, recomputed):
    """It wraps our forward in its own."""
    batches, module = make_batches(4), Regression()
    plugin = MixedPrecision(BOTH[precision], fp32_modules=["net.4", "net.1"], cpu_kernels="native")
    callback = ActivationCheckpointing(recomputed)
    _, ours = fit_and_watch(tmp_path, module, batches, precision=plugin, callbacks=[callback])
    assert_same(ours, train_by_hand(ByHand((1, 4)), batches, precision=precision))
    assert all("forward" not in vars(part) for part in module.modules())
    with torch.autocast("cpu", torch.bfloat16):
        assert module.net(batches[0][0]).dtype is torch.bfloat16


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings(COMPILER_LOOKS)
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("has_hook", [False, True])
@pytest.mark.parametrize(
    ("part", "in_place"),
    [
        (False, False),
        (False, True),
        (True, False),
        # before torch 2.13, Dynamo does not trace Python kernels, which an earlier test has installed
        pytest.param(True, True, marks=pytest.mark.skipif(torch.__version__ < "2.13", reason="of torch 2.13")),
    ],
)
def test_compiled_modules(part, in_place, has_hook, warm):
    """Modules are in float32 in graphs traced before the run, and no longer after it."""
    run = net = Net()
    if has_hook:
        net.head.register_forward_hook(lambda module, args, output: None)
    compiled, options = net.head if part else net, {"backend": "aot_eager", "fullgraph": True}
    if in_place:
        compiled.compile(**options)
    elif part:
        net.head = torch.compile(compiled, **options)
    else:
        run = torch.compile(compiled, **options)
    autocast = torch.autocast("cpu", torch.bfloat16)
    if warm:
        with autocast:
            assert head_dtype(run) is torch.bfloat16
    with session(net, "head"):
        assert head_dtype(run) is torch.float32
        inside = run(torch.ones(2, 4))[1]
    inside.sum().backward()  # outside of autocast, as in a run
    with autocast:
        assert head_dtype(run) is torch.bfloat16
    eager = Net()
    with session(eager, "head"):
        expected = eager(torch.ones(2, 4))[1]
    expected.sum().backward()
    assert torch.equal(inside, expected)
    assert torch.equal(net.before.weight.grad, eager.before.weight.grad)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings(COMPILER_LOOKS)
@pytest.mark.parametrize("patterns", [[], ["*.norm"], ["*.norm", "*.linear"]], ids=str)
def test_compiled_blocks_share_a_graph(patterns):
    """torch stops compiling a function after eight graphs."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(self.norm(x))

    net = nn.Sequential(*(Block() for _ in range(12)))
    for block in net:
        block.compile(backend=backend)
    with session(net, *patterns):
        net(torch.ones(2, 4))
    assert len(graphs) <= 2  # the first block's input is no result of another's


def test_short_cuts_of_transformer_layers_are_off(tmp_path):
    """In evaluation, torch's transformer layer bypasses its submodules."""
    called = []

    class Norm(nn.LayerNorm):
        def forward(self, x):
            called.append(x.dtype)
            return super().forward(x)

    layer, data = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), loader_of([torch.randn(2, 3, 8)])
    module, layer.norm1 = Regression(layer), Norm(8)
    module.predict_step = lambda batch, batch_idx: layer(batch)
    make_trainer(tmp_path, precision="bf16-mixed").predict(module, data)
    assert called == []
    make_trainer(tmp_path, precision=MixedPrecision("bfloat16", fp32_modules=["*.norm1"])).predict(module, data)
    assert called == [torch.float32]


# --- names and patterns --------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(4), "attention": nn.MultiheadAttention(4, 2)}) for _ in range(2)
        )
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(1))])
        self.end = nn.Identity()


def found(model, *patterns):
    names = {module: plain_name(name) for name, module in model.named_modules()}
    return [names[module] for module in find_modules(model, patterns)]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("*.norm",), ["blocks.0.norm", "blocks.1.norm"]),
        (("head", "norm", "he*"), ["norm", "head"]),
        (("blocks.[0].norm",), ["blocks.0.norm"]),
        (("blocks.0",), ["blocks.0.norm", "blocks.0.attention", "blocks.0.attention.out_proj"]),
        ((), []),
    ],
)
def test_matching_modules(patterns, expected):
    assert found(Model(), *patterns) == expected


def test_prefixes_of_wrappers_are_ignored_in_names():
    net = Net(head=nn.Sequential(nn.Linear(4, 4)))
    head = net.head
    net.head = torch.compile(head, backend="eager")
    assert find_modules(net, ["head"]) == [head]
    assert find_modules(net, ["head.0"]) == [head[0]]
    assert find_modules(torch.compile(net, backend="eager"), ["head.*"]) == [head[0]]
    assert plain_name("net._orig_mod.block._checkpoint_wrapped_module.norm") == "net.block.norm"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("haed", r"'haed' matches no module of Model\. Did you mean 'head'\? Its modules: blocks, blocks\.0, "),
        ("attention", r"Did you mean '\*\.attention'\?"),
        ("zzz", r"matches no module of Model\. Its modules: .* and 1 more\."),
        ("scales", r"'scales' is scales, a ParameterList that is never called.* Name the module that uses it"),
        ("*.out_proj", r"blocks\.0\.attention\.out_proj is never called.* Name the attention: 'blocks\.0\.attention'"),
    ],
)
def test_patterns_that_cannot_be(pattern, message):
    with pytest.raises(PrecisionError, match=message):
        find_modules(Model(), ["head", pattern])


@pytest.mark.parametrize("kind", [MixedPrecision, HalfPrecision])
@pytest.mark.parametrize("given", [[""], ["head", 3]])
def test_invalid_patterns(kind, given):
    assert kind("bfloat16", fp32_modules="head").fp32_modules == ("head",)
    with pytest.raises(PrecisionError, match=r"fp32_modules with .* expected names of modules or patterns"):
        kind("bfloat16", fp32_modules=given)


@pytest.mark.parametrize("stage", ["fit", "validate"])
@pytest.mark.parametrize("kind", [MixedPrecision, HalfPrecision])
def test_pattern_without_a_match_ends_a_run_before_its_first_batch(tmp_path, kind, stage):
    trainer, module = make_trainer(tmp_path, precision=kind("bfloat16", fp32_modules=["net.0", "net.9"])), Regression()
    module.training_step = lambda *_: pytest.fail("it has begun")
    if stage == "validate":
        module.validation_step = module.training_step
    with pytest.raises(PrecisionError, match=r"'net\.9' matches no module of Regression.*Did you mean 'net\.[0-4]'"):
        getattr(trainer, stage)(module, loader_of(make_batches(1)))
    assert all("forward" not in vars(part) for part in module.net.modules())


def test_scripted_modules_are_refused(recwarn):
    net = nn.ModuleDict({"script": torch.jit.script(nn.Linear(1, 1)), "head": nn.Linear(1, 1)})
    with pytest.raises(PrecisionError, match=r"'scr\*' matches script, which torch\.jit has compiled"):
        find_modules(net, ["scr*"])
    assert find_modules(net, ["head"]) == [net["head"]]


def test_modules_that_run_in_float32():
    net = Net(head=nn.Sequential(nn.Linear(4, 4)))
    with in_float32(find_modules(net, ["head"]), "cpu"):
        assert running_in_float32(net) == {net.head, net.head[0]}
    assert running_in_float32(net) == set()
