"""fp16 products on the CPU: bitwise values and gradients, unchanged behavior of torch, and use in a run."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import on_machine, replaced_kernels
from trainer.precision import cpu_fp16
from trainer.precision.cpu_fp16 import FAMILIES, Float16Kernels, fast_fp16_kernels, is_faster, measured_ratio


def rand(*shape):
    return torch.randn(*shape, requires_grad=True)


def autocast(dtype=torch.float16, enabled=True):
    return torch.autocast("cpu", dtype, enabled=enabled)


def rounded(op):
    """The definition: inputs rounded to fp16, ``op`` in fp32, output rounded to fp16; autograd rounds the gradients."""
    return lambda *inputs: op(*(tensor.half().float() for tensor in inputs)).half()


def under_autocast(op):
    def run(*inputs):
        with autocast():
            return op(*inputs)

    return run


def values_and_gradients(op, inputs):
    output = op(*inputs)
    torch.manual_seed(1)
    return [output.detach(), *torch.autograd.grad(output, inputs, torch.randn(output.shape).to(output.dtype))]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def fast():
    with fast_fp16_kernels():
        yield


# Factors are powers of two, so that the order of scaling and rounding does not show.
OPS = {
    "linear": (F.linear, [(7, 33), (17, 33)]),
    "linear_bias": (F.linear, [(2, 7, 33), (17, 33), (17,)]),
    "mm_strided": (lambda a, b: torch.mm(a[::2], b.t()), [(14, 33), (17, 33)]),
    "bmm_empty": (torch.bmm, [(0, 7, 33), (0, 33, 17)]),
    "matmul": (torch.matmul, [(2, 3, 7, 33), (33, 17)]),
    "matmul_vector": (torch.matmul, [(7, 33), (33,)]),
    "matmul_vectors": (torch.matmul, [(33,), (33,)]),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=-2), [(7, 17), (7, 33), (33, 17)]),
    "addbmm": (lambda c, a, b: torch.addbmm(c, a, b, beta=2), [(7, 17), (3, 7, 33), (3, 33, 17)]),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=4), [(7, 1), (3, 7, 33), (3, 33, 17)]),
    "conv1d_same": (lambda x, w: F.conv1d(x, w, padding="same", dilation=2), [(2, 4, 19), (6, 4, 3)]),
    "conv2d": (F.conv2d, [(2, 4, 9, 9), (6, 4, 3, 3), (6,)]),
    "conv2d_grouped": (
        lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), padding=(0, 1), dilation=2, groups=2),
        [(2, 4, 9, 9), (6, 2, 3, 3), (6,)],
    ),
    "conv3d": (lambda x, w, b: F.conv3d(x, w, b, padding=1), [(2, 3, 5, 6, 7), (4, 3, 3, 3, 3), (4,)]),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1, groups=2),
        [(2, 4, 6, 6), (4, 3, 3, 3), (6,)],
    ),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), [(3, 7, 33), (3, 17, 33)]),
}


@pytest.mark.parametrize("name", OPS)
def test_products_equal_their_definition(fast, name):
    op, shapes = OPS[name]
    inputs = [rand(*shape) for shape in shapes]
    got = values_and_gradients(under_autocast(op), inputs)
    assert got[0].dtype is torch.float16
    for mine, definition in zip(got, values_and_gradients(rounded(op), inputs), strict=True):
        assert mine.dtype is definition.dtype
        assert torch.equal(mine, definition)


@pytest.mark.parametrize("name", ["addmm", "addmv", "addbmm", "baddbmm"])
def test_products_in_place(fast, name):
    batches = ((7, 33), (33, 17)), ((3, 7, 33), (3, 33, 17))
    left, right = ((7, 33), (33,)) if name == "addmv" else batches["b" in name]
    a, b = torch.randn(left).half(), torch.randn(right).half()
    c = torch.randn((a[0] @ b[0] if name == "addbmm" else a @ b).shape).half()
    expected = getattr(c.float(), f"{name}_")(a.float(), b.float(), beta=0.3, alpha=1.7).half()
    assert getattr(c, f"{name}_")(a, b, beta=0.3, alpha=1.7) is c
    assert torch.equal(c, expected)


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm"])
def test_products_with_out(fast, name):
    # Long sums, so that torch's own fp16 kernels, which add in another order, would differ in some bit.
    batch = (2,) if "b" in name else ()
    shapes = [(*batch, 64, 64)] * name.count("add") + [(*batch, 64, 1999), (*batch, 1999, 64)]
    inputs = [torch.randn(shape).half() for shape in shapes]
    op = getattr(torch, name)
    expected = op(*(tensor.float() for tensor in inputs)).half()
    resized, transposed = torch.empty(0).half(), torch.zeros_like(expected).transpose(-1, -2)
    assert op(*inputs, out=resized) is resized
    assert torch.equal(resized, expected)
    op(*inputs, out=transposed)
    assert torch.equal(transposed, expected)
    with pytest.raises(RuntimeError, match="dtype"):
        op(*inputs, out=torch.empty(expected.shape))


def test_tensors_that_are_fp16_already(fast):
    inputs = [torch.randn(7, 33).half().requires_grad_(), torch.randn(17, 33).half().requires_grad_()]
    expected = values_and_gradients(rounded(F.linear), inputs)
    for op in (F.linear, under_autocast(F.linear)):
        assert all(map(torch.equal, values_and_gradients(op, inputs), expected))


CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool_mask": {"attn_mask": torch.arange(12)[:, None] >= torch.arange(12)},
    "float_mask": {"attn_mask": torch.linspace(-2, 2, 144).view(12, 12)},
    "gqa": {"enable_gqa": True},
}


@pytest.mark.parametrize("name", CASES)
def test_attention_is_fp32_attention_of_rounded_inputs(fast, name):
    arguments = CASES[name]
    heads = 2 if name == "gqa" else 4
    inputs = [rand(2, 4, 12, 16), rand(2, heads, 12, 16), rand(2, heads, 12, 16)]

    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, **arguments)

    def definition(*tensors):
        halves = [tensor.half().float() for tensor in tensors]
        mask = arguments.get("attn_mask")
        if isinstance(mask, Tensor) and mask.is_floating_point():
            return F.scaled_dot_product_attention(*halves, attn_mask=mask.half().float()).half()
        return attend(*halves).half()

    got = values_and_gradients(under_autocast(attend), inputs)
    expected = values_and_gradients(definition, inputs)
    assert got[0].dtype is torch.float16
    assert torch.equal(got[0], expected[0])
    for mine, reference in zip(got[1:], expected[1:], strict=True):
        # The backward reads the rounded output.
        torch.testing.assert_close(mine, reference, rtol=2e-3, atol=1e-3)


def test_dropout_in_attention(fast):
    q = rand(2, 4, 12, 16)
    with autocast():
        without, dropped = (F.scaled_dot_product_attention(q, q, q, dropout_p=p) for p in (0.0, 0.5))
    dropped.sum().backward()
    assert not torch.allclose(dropped, without)
    assert torch.isfinite(q.grad).all()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(fast, kind):
    layer = kind(8, 16, num_layers=2, bidirectional=True)
    reference = copy.deepcopy(layer)
    x = torch.randn(5, 3, 8)
    with autocast():
        y, _ = layer(x)
    expected, _ = reference(x)
    y.float().square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=2e-3)
    for (name, got), wanted in zip(layer.named_parameters(), reference.parameters(), strict=True):
        assert got.grad is not None, name
        torch.testing.assert_close(got.grad, wanted.grad, rtol=2e-2, atol=2e-2)


def test_gradient_penalty_equals_the_definition():
    conv, linear = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 1)
    x = rand(2, 3, 8, 8)
    parameters = [conv.weight, conv.bias, linear.weight]

    def penalty(convolve, apply):
        y = apply(torch.tanh(convolve(x, conv.weight, conv.bias)).flatten(1), linear.weight)
        (slope,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
        return list(torch.autograd.grad((slope.flatten(1).norm(dim=1) - 1).square().sum(), parameters[::2]))

    with fast_fp16_kernels():
        got = penalty(under_autocast(F.conv2d), under_autocast(F.linear))
    expected = penalty(rounded(F.conv2d), rounded(F.linear))
    for mine, definition, fp32 in zip(got, expected, penalty(F.conv2d, F.linear), strict=True):
        assert mine.abs().max() > 1e-3
        torch.testing.assert_close(mine, definition, rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(mine, fp32, rtol=5e-2, atol=2e-3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # forward mode imports it
def test_vmap_and_forward_mode(fast):
    x, w, tangent = (torch.randn(4, 8).half(), torch.randn(8, 5).half(), torch.randn(4, 8).half())
    assert torch.equal(torch.vmap(lambda row: row @ w)(x), (x.float() @ w.float()).half())
    _, slope = torch.func.jvp(lambda x: x @ w, (x,), (tangent,))
    assert torch.equal(slope, (tangent.float() @ w.float()).half())


@pytest.mark.parametrize(("dtype", "enabled"), [(torch.bfloat16, True), (torch.float16, False)], ids=["bf16", "fp32"])
def test_other_precisions_keep_their_bits(dtype, enabled):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 5))
    inputs = [rand(4, 3, 8, 8), rand(2, 4, 12, 16)]

    def forward():
        x, q = inputs
        with autocast(dtype, enabled):
            return net(x).float().square().sum() + F.scaled_dot_product_attention(q, q, q).float().square().sum()

    def values(output):
        return [output.detach(), *torch.autograd.grad(output, [*inputs, *net.parameters()])]

    expected = values(forward())
    with fast_fp16_kernels():
        with autocast():
            nested = forward()
        found = [values(forward()), values(nested)]
    for one in found:
        assert all(map(torch.equal, one, expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_dtypes_that_autocast_does_not_cast(fast, dtype):
    a, b = torch.arange(12).view(3, 4).to(dtype), torch.arange(20).view(4, 5).to(dtype)
    with autocast():
        product = a @ b
    assert product.dtype is dtype
    assert torch.equal(product, a @ b)


@pytest.mark.parametrize("op", [torch.mm, lambda a, b: torch.mv(a, b[0]), torch.dot])
def test_errors_name_the_given_dtypes(op):
    inputs = [torch.randn(2, 2).half(), torch.ones(2, 2, dtype=torch.int64)]
    if op is torch.dot:
        inputs = [tensor[0] for tensor in inputs]
    with pytest.raises(RuntimeError) as without:
        op(*inputs)
    with fast_fp16_kernels(), pytest.raises(RuntimeError) as within:
        op(*inputs)
    assert str(within.value) == str(without.value)
    assert "Half" in str(within.value)


def kernels_are_fast():
    """Return whether fp16 products use our kernels: torch's own add in another order, visible in long sums."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 1999, generator=generator).half() for _ in range(2))
    return torch.equal(a @ b.t(), (a.float() @ b.t().float()).half())


def test_restores_torchs_kernels_after_the_outermost_context():
    a, b = torch.randn(64, 999).half(), torch.randn(999, 64).half()
    x, w = torch.randn(2, 16, 9, 9).half(), torch.randn(16, 16, 3, 3).half()

    def native():
        return [a @ b, F.conv2d(x, w), a[0] @ a[1], torch.addmm(a[:, :64], a, b)]

    before = native()
    with fast_fp16_kernels():
        with pytest.raises(ValueError, match="mine"), fast_fp16_kernels():
            raise ValueError("mine")
        assert kernels_are_fast()
    assert not kernels_are_fast()
    assert all(map(torch.equal, native(), before))


def test_overlaps_across_threads():
    with ThreadPoolExecutor(1) as pool:
        context = fast_fp16_kernels()
        with fast_fp16_kernels():
            pool.submit(context.__enter__).result()
        assert kernels_are_fast()
        pool.submit(context.__exit__, None, None, None).result()
    assert not kernels_are_fast()


def test_opens_and_closes_while_another_thread_computes():
    a, b = torch.randn(16, 1999).half(), torch.randn(1999, 16).half()
    native = a @ b
    with fast_fp16_kernels():
        fast = a @ b
    stop = threading.Event()

    def compute():
        while not stop.is_set():
            product = a @ b
            if not (torch.equal(product, native) or torch.equal(product, fast)):
                return False
        return True

    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(compute)
        for _ in range(300):
            with fast_fp16_kernels():
                assert torch.equal(a @ b, fast)
        stop.set()
    assert others.result()
    assert torch.equal(a @ b, native)


def mlp(*widths):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: mlp(64, 64, 64, 10), False),
        (lambda: nn.Conv2d(1, 4, 3), False),
        (lambda: nn.Embedding(10_000, 64), False),
        (lambda: nn.Sequential(nn.LazyLinear(512)), False),
        (lambda: nn.GRU(32, 32), False),
        (lambda: mlp(784, 128, 10), True),
        (lambda: nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 64, 3)), True),
        (lambda: nn.MultiheadAttention(256, 4), True),
        (lambda: nn.LSTM(4, 4), True),  # torch cannot train it on most CPUs
    ],
)
def test_models_that_are_faster(build, expected):
    assert is_faster(build()) is expected


def test_each_family_is_replaced_alone(monkeypatch):
    seen, widen = [], cpu_fp16._widen
    monkeypatch.setattr(cpu_fp16, "_widen", lambda value: seen.append(value) or widen(value))

    def replaced(family):
        seen.clear()
        with suppress(RuntimeError):  # torch may have no kernel
            cpu_fp16._sample(family)(lambda name, *args: getattr(torch.ops.aten, name)(*args))
        return bool(seen)

    for chosen in FAMILIES:
        with fast_fp16_kernels([chosen]):
            assert replaced_kernels() == [chosen]
            assert [family for family in FAMILIES if replaced(family)] == [chosen]
    with fast_fp16_kernels(["attention"]), fast_fp16_kernels(["attention", "convolution"]):
        assert replaced_kernels() == ["attention", "convolution"]
    assert [family for family in FAMILIES if replaced(family)] == replaced_kernels() == []


MEASURED_FIRST = """
import torch
from trainer.precision import cpu_fp16

for family in cpu_fp16.FAMILIES:
    cpu_fp16.measured_ratio(family)
widened, widen = [], cpu_fp16._widen
cpu_fp16._widen = lambda value: widened.append(value) or widen(value)
with cpu_fp16.fast_fp16_kernels():
    for family in cpu_fp16.FAMILIES:
        widened.clear()
        cpu_fp16._sample(family)(lambda name, *args: getattr(torch.ops.aten, name)(*args))
        assert widened, family
"""


def test_families_of_one_operation_are_replaced_together_after_a_measurement(python):
    """Convolutions and transposed ones share an operation: the second replacement calls the first."""
    assert python.run("-c", MEASURED_FIRST).returncode == 0


class Stopwatch:
    """A clock, and kernels that take the given times at their calls."""

    def __init__(self, monkeypatch, torchs, ours=1.0):
        self.now, self.torchs, self.conditions = 0.0, iter(torchs), set()
        kernels = {"convolution": cpu_fp16.Replaced(self.torch, lambda *_: self.wait(ours))}
        monkeypatch.setattr(cpu_fp16._replacements["convolution"], "_registered", kernels)
        monkeypatch.setattr(cpu_fp16, "_clock", lambda: self.now)

    def wait(self, seconds):
        if isinstance(seconds, Exception):
            raise seconds
        self.conditions.add((torch.get_num_threads(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        self.now += seconds

    def torch(self, *_):
        self.wait(next(self.torchs))


@pytest.mark.parametrize(
    ("torchs", "ratio"),
    [
        ([1.9], 1.9),
        ([60.0, 1.2], 1.2),  # the first call compiled a kernel
        ([60.0, 2.5, 2.1, 0.5], 0.5),
        ([9.0, 40.0], 9.0),
        ([60.0, 5.0, 4.0, 4.5], 4.0),
        ([RuntimeError("could not create a primitive descriptor")], float("inf")),
    ],
)
def test_ratio_is_measured_until_it_is_clear(monkeypatch, torchs, ratio):
    threads = torch.get_num_threads()
    watch = Stopwatch(monkeypatch, torchs)
    with autocast(), torch.inference_mode():
        assert measured_ratio.__wrapped__("convolution") == pytest.approx(ratio)
    assert list(watch.torchs) == []
    assert watch.conditions <= {(1, True, False)}
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("family", FAMILIES)
def test_both_kernels_of_a_family_are_measured(family):
    """On this machine: the sample fits the operations, and ours always work."""
    calls = []

    def call(name, *args):
        calls.append(name)
        return getattr(torch.ops.aten, name)(*map(cpu_fp16._widen, args))

    cpu_fp16._sample(family)(call)
    assert set(calls) <= cpu_fp16._replacements[family].kernels.keys()
    draws = torch.get_rng_state()
    assert measured_ratio(family) > 0
    assert torch.equal(torch.get_rng_state(), draws)


WITHOUT_FLOAT16, WITH_FLOAT16, RAISING = (
    dict.fromkeys(FAMILIES, 20.0),
    {"convolution backward": 30.0, "transposed convolution backward": 25.0, "attention": 1.9, "matrix product": 1.4},
    {"recurrent": float("inf"), "attention": 2.0},
)


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.projection = nn.Parameter(torch.ones(4, 4, 3)), nn.Linear(256, 256)


ALWAYS = ["matrix product", "attention"]
CONVOLUTION = ["convolution", "convolution backward"]
TRANSPOSED = ["transposed convolution", "transposed convolution backward"]


@pytest.mark.parametrize(
    ("choice", "build", "machine", "measured", "fast"),
    [
        ("auto", lambda: nn.Conv2d(64, 64, 3), WITHOUT_FLOAT16, [*ALWAYS, *CONVOLUTION], [*ALWAYS, *CONVOLUTION]),
        ("auto", lambda: nn.Conv2d(64, 64, 3), WITH_FLOAT16, [*ALWAYS, *CONVOLUTION], ["convolution backward"]),
        (
            "auto", lambda: nn.ConvTranspose1d(64, 64, 3), WITH_FLOAT16, [*ALWAYS, *CONVOLUTION, *TRANSPOSED],
            ["convolution backward", "transposed convolution backward"],
        ),
        ("auto", Functional, WITH_FLOAT16, [*ALWAYS, *CONVOLUTION], ["convolution backward"]),
        ("auto", lambda: nn.LSTM(4, 4), RAISING, [*ALWAYS, "recurrent"], ["attention", "recurrent"]),
        ("auto", lambda: nn.LSTM(4, 4), {}, [*ALWAYS, "recurrent"], []),
        ("auto", lambda: mlp(64, 64), WITHOUT_FLOAT16, [], []),
        ("fast", lambda: mlp(64, 64), WITH_FLOAT16, [], FAMILIES),
        ("native", lambda: nn.LSTM(4, 4), RAISING, [], []),
    ],
)  # fmt: skip
def test_kernels_of_a_run(monkeypatch, choice, build, machine, measured, fast):
    """Only families that the module may use are measured, and nothing if the choice needs no measurement."""
    seen = on_machine(monkeypatch, machine)
    kernels = Float16Kernels(choice, build())
    assert (seen, list(kernels.ratios)) == (measured, measured)
    with kernels:
        assert replaced_kernels() == list(kernels.fast) == list(fast)
    assert replaced_kernels() == []


def test_saved_choice_is_used_instead_of_the_measured_one(monkeypatch):
    on_machine(monkeypatch, WITH_FLOAT16)
    net = nn.Conv2d(64, 64, 3)
    saved = Float16Kernels("auto", net).state_dict()
    assert saved == {"fast_kernels": ["convolution backward"]}
    on_machine(monkeypatch, WITHOUT_FLOAT16)
    with Float16Kernels("auto", net) as kernels:
        with pytest.warns(UserWarning, match="for matrix product, attention, convolution, as .* slow on this CPU"):
            kernels.load_state_dict(saved)
        assert replaced_kernels() == ["convolution backward"]
        assert (kernels.state_dict(), copy.deepcopy(kernels).fast) == (saved, ("convolution backward",))
    on_machine(monkeypatch, {})
    with Float16Kernels("auto", net) as kernels:
        kernels.load_state_dict(saved)  # keeps the speed, so there is no warning
        assert replaced_kernels() == ["convolution backward"]
        kernels.load_state_dict({})  # of an older version
        assert replaced_kernels() == ["convolution backward"]
    for choice, fast in (("native", []), ("fast", [*FAMILIES])):
        with Float16Kernels(choice, net) as kernels:
            kernels.load_state_dict(saved)
            assert (replaced_kernels(), kernels.state_dict()) == (fast, {})
    assert replaced_kernels() == []


PARALLEL = """
import faulthandler, torch
from trainer.precision import cpu_fp16

faulthandler.dump_traceback_later(60, exit=True)
torch.set_num_threads(2)
with cpu_fp16.fast_fp16_kernels():
    pass
net = torch.nn.Sequential(torch.nn.Linear(4, 392), torch.nn.Unflatten(1, (8, 7, 7)), torch.nn.ConvTranspose2d(8, 8, 4))
with torch.autograd.set_detect_anomaly(True):
    for _ in range(15):
        with torch.autocast("cpu", torch.float16):
            loss = net(torch.randn(64, 4)).float().sum()
        loss.backward()
"""


def test_parallel_kernels_do_not_wait_for_each_other_in_anomaly_detection(python):
    assert python.run("-c", PARALLEL).returncode == 0
