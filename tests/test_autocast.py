"""Autocast in every precision, compared to hand-written torch.

The reference is the loop of torch's AMP examples (``by_hand``); results are bitwise equal.
"""

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
from lightning.pytorch import Callback
from packaging.version import Version
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.parity import assert_same_weights, looks_in
from tests.support import Regression, loader_of, make_batches, make_net, make_trainer
from trainer.precision import MixedPrecision
from trainer.precision.cast_cache import loses_gradients
from trainer.precision.cpu_fp16 import fast_fp16_kernels

SCALE = 2.0**9  # does not overflow by itself
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "16-mixed-fast")
DTYPES = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "16-mixed-fast": torch.float16}

every_precision = pytest.mark.parametrize("precision", PRECISIONS)


def ours(name):
    """Arguments of ``Trainer(precision=...)``; float16 with torch's own kernels, and with the fast ones."""
    if not str(name).startswith("16"):
        return name
    return MixedPrecision("float16", init_scale=SCALE, cpu_kernels="fast" if name.endswith("fast") else "native")


@contextmanager
def session(name, device="cpu"):
    """Return the factory of an autocast context, and a scaler, for the hand-written loop."""
    dtype, scaled = DTYPES[name], name.startswith("16")
    scaler = torch.amp.GradScaler(device, init_scale=SCALE, enabled=scaled)
    with fast_fp16_kernels() if name.endswith("fast") else nullcontext():
        yield lambda: torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None), scaler


def by_hand(net, loss_of, batches, name, window=1, device="cpu"):
    """Train ``net`` on ``loss_of(net, batch)``."""
    optimizer = torch.optim.SGD(net.to(device).parameters(), lr=0.1)
    with session(name, device) as (autocast, scaler):
        for index, batch in enumerate(loader_of(batches)):
            with autocast():
                loss = loss_of(net, [tensor.to(device) for tensor in batch])
            scaler.scale(loss / window if window > 1 else loss).backward()
            if (index + 1) % window == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()


class Stepping(Regression):
    """Trains on ``loss_of(net, batch)``."""

    def __init__(self, net, loss_of):
        super().__init__(net)
        self.loss_of = loss_of

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self.loss_of(self.net, batch)


def make(build):
    """Return two equal nets."""
    torch.manual_seed(0)
    net = build()
    return net, copy.deepcopy(net)


def error_of(net, batch):
    return F.mse_loss(net(batch[0]), batch[1])


def assert_equal(mine, theirs, start=None):
    """Compare weights and buffers bit for bit, and check that they differ from ``start``."""
    assert_same_weights(mine, theirs)
    if start is not None:
        for (name, a), b in zip(mine.named_parameters(), start.parameters(), strict=True):
            assert not torch.equal(a, b), f"{name} has not been trained"


def fit(folder, module, batches, name, **arguments):
    trainer = make_trainer(folder, precision=ours(name), **arguments)
    torch.manual_seed(5)
    trainer.fit(module, loader_of(batches))
    assert trainer.skipped_steps == 0
    return trainer


# --- range of autocast ------------------------------------------------------------------------------------------------


class Probe(torch.autograd.Function):
    """Records whether autocast is enabled in its forward and backward pass."""

    seen: dict[str, bool] = {}

    @staticmethod
    def forward(ctx, x):
        Probe.seen["forward"] = torch.is_autocast_enabled("cpu")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Probe.seen["backward"] = torch.is_autocast_enabled("cpu")
        return gradient


OUTSIDE = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_after_optimizer_step", "on_train_batch_end",
)  # fmt: skip


@looks_in(*OUTSIDE)
class Look(Callback):
    def look(self, hook, trainer):
        Probe.seen[hook] = torch.is_autocast_enabled("cpu")


def test_autocast_covers_the_step_function_and_nothing_else(tmp_path):
    def loss_of(net, batch):
        assert net(batch[0]).dtype is torch.bfloat16
        return Probe.apply(error_of(net, batch))

    Probe.seen.clear()
    trainer = make_trainer(tmp_path, precision="bf16-mixed", callbacks=[Look()])
    trainer.fit(Stepping(make_net(), loss_of), loader_of(make_batches(1)))
    assert Probe.seen == {"forward": True, "backward": False, **dict.fromkeys(OUTSIDE, False)}


@pytest.mark.parametrize(
    ("stage", "precision"),
    [("validate", "32-true"), ("test", "bf16-mixed"), ("predict", "16-mixed"), ("validate", "16-mixed-fast")],
)
def test_evaluation_runs_under_autocast_without_the_scaler(tmp_path, precision, stage):
    class Evaluating(Stepping):
        def validation_step(self, batch, batch_idx):
            outputs.append(self.net(batch[0]))
            return outputs[-1]

        test_step = predict_step = validation_step

    outputs, batches = [], make_batches(3)
    mine, theirs = make(make_net)
    trainer = make_trainer(tmp_path, precision=ours(precision))
    before = trainer.scaler.state_dict()
    getattr(trainer, stage)(Evaluating(mine, error_of), loader_of(batches))
    assert trainer.scaler.state_dict() == before
    with session(precision) as (autocast, _), torch.inference_mode(), autocast():
        expected = [theirs.eval()(x) for x, _, _ in batches]
    assert [output.dtype for output in outputs] == [DTYPES[precision] or torch.float32] * 3
    assert all(map(torch.equal, outputs, expected))


# --- the weight cache -----------------------------------------------------------------------------------------------


class Casts(TorchDispatchMode):
    """Counts the casts of a tensor."""

    def __init__(self, tensor):
        super().__init__()
        self.tensor, self.count = tensor, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() == self.tensor.data_ptr():
            self.count += 1
        return func(*args, **(kwargs or {}))


@every_precision
def test_weight_used_three_times_is_cast_once_a_forward(tmp_path, precision):
    """The cache is enabled, and cleared between forwards, so that each uses the weights of the current step."""
    counts = []

    def tied(net, batch):
        with Casts(net.weight) as casts:
            x = net(torch.tanh(net(torch.tanh(net(batch[0])))))
        counts.append(casts.count)
        return F.mse_loss(x, batch[0])

    mine, theirs = make(lambda: nn.Linear(6, 6))
    start, _ = make(lambda: nn.Linear(6, 6))
    batches = make_batches(6)
    fit(tmp_path, Stepping(mine, tied), batches, precision, accumulate_grad_batches=2)
    assert counts == [0 if precision == "32-true" else 1] * 6
    by_hand(theirs, tied, batches, precision, window=2)
    assert_equal(mine, theirs, start)


def casts_of_its_own(context, function):
    """Run ``function()`` in ``context`` without leftovers in autocast's cache, as the reference."""
    torch.clear_autocast_cache()
    with context:
        result = function()
    torch.clear_autocast_cache()
    return result


def as_it_comes(context, function):
    with context:
        return function()


def cube(cast_inputs=None):
    """A custom function as in torch's AMP guide, and the dtypes in it."""
    seen = []

    class Cube(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx, x, weight):
            seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
            ctx.save_for_backward(x, weight)
            return F.linear(x, weight).pow(3)

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            inner = gradient * 3 * F.linear(x, weight).pow(2)
            seen.append((torch.is_autocast_enabled("cpu"), (inner @ weight).dtype))
            return inner @ weight, inner.T @ x

    return Cube.apply, seen


def self_distillation(net, batch, run, off):
    target = run(off(), lambda: net(batch[0])).float()
    return F.mse_loss(net(batch[0] * 0.9), target.clone())


def refinement(net, batch, run, off):
    x = batch[0]
    for _ in range(2):
        x = run(off(), lambda x=x: x + net(x).mean()).clone()
    return F.mse_loss(net(x), batch[1])


def weight_used_directly(net, batch, run, off):
    codes = run(off(), lambda: F.linear(batch[0], net[0].weight).argmax(1)).clone()
    return F.linear(batch[0], net[0].weight).float().pow(2).mean() + F.cross_entropy(
        F.linear(batch[0], net[0].weight, net[0].bias).float(), codes
    )


def gradients_before_and_after(net, batch, run, off):
    first = net(batch[0])
    run(off(), lambda: net(batch[0]))
    return F.mse_loss(first, batch[1]) + F.mse_loss(net(-batch[0]), batch[1])


NO_GRADIENTS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize(
    ("pattern", "precision", "off"),
    [
        (self_distillation, "bf16-mixed", "no_grad"),
        (self_distillation, "16-mixed-fast", "inference_mode"),
        (refinement, "16-mixed", "no_grad"),
        (weight_used_directly, "bf16-mixed", "inference_mode"),
        (gradients_before_and_after, "16-mixed", "inference_mode"),
    ],
)
def test_forward_without_gradients_before_one_with_them(tmp_path, precision, pattern, off):
    """torch #65766, #112583, #120483: torch 2.10 loses gradients here."""
    mine, theirs = make(make_net)
    batches, off = make_batches(4), NO_GRADIENTS[off]
    # two forwards with gradients share their casts, and sum their gradients in 16 bits, as in torch
    shares = pattern is gradients_before_and_after and not loses_gradients()
    right = as_it_comes if shares else casts_of_its_own
    fit(tmp_path, Stepping(mine, lambda net, batch: pattern(net, batch, as_it_comes, off)), batches, precision)
    by_hand(theirs, lambda net, batch: pattern(net, batch, right, off), batches, precision)
    assert_equal(mine, theirs)


@every_precision
def test_weight_in_a_custom_function_and_outside_of_it(tmp_path, precision):
    apply, _ = cube()

    def tied(net, batch):
        return F.mse_loss(net(torch.tanh(apply(batch[0], net.weight))), batch[0])

    def apart(net, batch):
        hidden = casts_of_its_own(nullcontext(), lambda: apply(batch[0], net.weight))
        return F.mse_loss(net(torch.tanh(hidden)), batch[0])

    mine, theirs = make(lambda: nn.Linear(6, 6))
    start, _ = make(lambda: nn.Linear(6, 6))
    fit(tmp_path, Stepping(mine, tied), make_batches(4), precision)
    by_hand(theirs, apart, make_batches(4), precision)
    assert_equal(mine, theirs, start)


@pytest.mark.parametrize(
    ("precision", "cast_inputs"),
    [("32-true", None), ("bf16-mixed", None), ("16-mixed", torch.float32), ("16-mixed-fast", None)],
)
def test_custom_functions(tmp_path, precision, cast_inputs):
    apply, seen = cube(cast_inputs)

    def loss_of(net, batch):
        return apply(net[0](batch[0]), net[1].weight).float().pow(2).mean()

    mine, theirs = make(lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3, bias=False)))
    fit(tmp_path, Stepping(mine, loss_of), make_batches(4), precision)
    is_mixed = precision != "32-true" and cast_inputs is None  # or else an island of float32
    dtype = DTYPES[precision] if is_mixed else torch.float32
    assert seen == [(dtype, is_mixed), (is_mixed, dtype)] * 4  # also in backward, outside of the Trainer's context
    by_hand(theirs, loss_of, make_batches(4), precision)
    assert_equal(mine, theirs)


# --- activation checkpointing ---------------------------------------------------------------------------------------


@every_precision
def test_activation_checkpointing_changes_no_bit(tmp_path, precision):
    """The recomputation uses the forward's autocast and random numbers, although backward runs outside of both."""

    def checkpointed(net, batch):
        return error_of(lambda x: checkpoint(net, x, use_reentrant=False), batch)

    seen = []
    mine, theirs = make(lambda: make_net(dropout=0.5))
    mine[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    fit(tmp_path, Stepping(mine, checkpointed), make_batches(6), precision)
    assert seen == [DTYPES[precision] or torch.float32] * 12
    torch.manual_seed(5)
    by_hand(theirs, error_of, make_batches(6), precision)
    assert_equal(mine, theirs)


# --- gradient penalty -----------------------------------------------------------------------------------------------


def penalized(net, batch, scaled, scale):
    """https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-penalty"""
    loss = error_of(net, batch)
    with torch.autocast("cpu", enabled=False):  # backward passes run outside of autocast
        gradients = torch.autograd.grad(scaled(loss), list(net.parameters()), create_graph=True)
    return loss + sum((g / scale).pow(2).sum() for g in gradients).sqrt()


@every_precision
def test_gradient_penalty(tmp_path, precision):
    def loss_of(net, batch):
        scaler = module.trainer.scaler
        return penalized(net, batch, scaler.scale, scaler.current_scale)

    mine, theirs = make(make_net)
    without, start = make(make_net)
    module = Stepping(mine, loss_of)
    fit(tmp_path, module, make_batches(6), precision)
    scale = SCALE if precision.startswith("16") else 1.0
    by_hand(
        theirs, lambda net, batch: penalized(net, batch, lambda loss: loss * scale, scale), make_batches(6), precision
    )
    assert_equal(mine, theirs, start)
    by_hand(without, error_of, make_batches(6), precision)
    assert not torch.equal(mine[0].weight, without[0].weight)


# --- torch.compile --------------------------------------------------------------------------------------------------


def in_place(module, backend):
    module.compile(backend=backend)  # called by `self(x)`
    module.loss_of = lambda net, batch: error_of(module, batch)
    return module


def a_part(module, backend):
    module.net = torch.compile(module.net, backend=backend)
    return module


def a_part_in_place(module, backend):
    module.net.compile(backend=backend)
    return module


@pytest.mark.parametrize(
    ("way", "precision", "backend"),
    [
        (torch.compile, "bf16-mixed", "aot_eager"),
        (in_place, "16-mixed-fast", "aot_eager"),
        (a_part, "16-mixed", "eager"),
        (a_part_in_place, "32-true", "eager"),
    ],
)
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_modules(tmp_path, precision, way, backend):
    if way is a_part_in_place and Version(torch.__version__) < Version("2.13"):
        pytest.skip("torch 2.10 does not compile a LightningModule's parts in place")
    mine, theirs = make(make_net)
    counter = CompileCounterWithBackend(backend)
    fit(tmp_path, way(Stepping(mine, error_of), backend=counter), make_batches(4), precision)
    assert counter.frame_count
    by_hand(theirs, error_of, make_batches(4), precision)
    assert_equal(mine, theirs)
