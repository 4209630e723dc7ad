"""CUDA's autocast lists on a CPU: compared to torch's own, operation by operation, and in a run."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests.support import TORCH, Regression, assert_same, fit_and_watch, make_batches, make_net, sgd, train_by_hand
from trainer.errors import PrecisionError
from trainer.precision import MixedPrecision, autocast_ops, cuda_autocast_ops
from trainer.precision.autocast_ops import ops_that_differ

HALF, FLOAT, BFLOAT = torch.float16, torch.float32, torch.bfloat16
HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
OF_CUDA_ALONE = {"_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_scaled_dot_product_flash_attention"}
aten = torch.ops.aten


def rand(*shape, dtype=HALF):
    return (torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) * 0.5 + 0.25).to(dtype)


def arguments(dtype):
    """Return floating-point arguments of this dtype for operations of each of CUDA's lists."""

    def r(*shape):
        return rand(*shape, dtype=dtype)

    x, y, m = r(4, 6), r(4, 6), r(6, 6)
    target = torch.tensor([0, 1, 2, 3])
    return {
        "conv1d": (r(2, 3, 8), r(4, 3, 3)),
        "prelu": (x, r(1)),
        "einsum": ("ij,ij->ij", [x, y]),
        "linalg_vecdot": (x, y),
        "chain_matmul": ([x, m, m],),
        "lstm_cell": (r(4, 6), [r(4, 5), r(4, 5)], r(20, 6), r(20, 5), r(20), r(20)),
        "exp": (x,),
        "pow.Scalar": (2, x),
        "native_layer_norm": (x, [6], r(6), r(6), 1e-5),
        "frobenius_norm.dim": (x, [1]),
        "nll_loss": (x, target),
        "cdist": (x, y),
        "upsample_bilinear2d": (r(2, 3, 8, 8), [4, 4], False),
        "prod.dim_int": (x, 1),
        "sum": (x,),
        "linalg_matrix_norm.str_ord": (x,),
        "norm.Scalar": (x, 2),
        "norm.ScalarOpt_dim": (x, None, [1]),
        "addcmul": (x, y, y),
        "grid_sampler": (r(2, 3, 8, 8), r(2, 4, 4, 2), 0, 0, False),
        "index_put": (x, [target[:2]], y[:2]),
        "tensordot": (x, m, [1], [0]),
        "binary_cross_entropy": (x, y),
    }


def left_alone(dtype):
    """Operations in the CPU's list only, which CUDA's autocast does not cast."""

    def r(*shape):
        return rand(*shape, dtype=dtype)

    im, vol, x = r(2, 3, 8, 8), r(2, 3, 4, 8, 8), r(4, 4)
    return {
        "adaptive_avg_pool3d": (vol, [2, 2, 2]),
        "avg_pool3d": (vol, [2, 2, 2]),
        "max_pool3d": (vol, [2, 2, 2]),
        "reflection_pad2d": (im, [1, 1, 1, 1]),
        "replication_pad2d": (im, [1, 1, 1, 1]),
        "cross_entropy_loss": (x, torch.tensor([0, 1, 2, 3])),
        "cat": ([x, x],),
        "stack": ([x, x],),
        "trace": (x,),
        "grid_sampler_2d": (im, r(2, 4, 4, 2), 0, 0, False),
    }


ARGUMENTS = tuple(arguments(HALF))


@contextmanager
def cuda_autocast(dtype):
    """Autocast for CUDA, which `torch.autocast` does not enable on a machine without it."""
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", HALF)


def overload(name):
    packet, _, which = name.partition(".")
    return getattr(getattr(aten, packet), which or "default")


def dtype_of(name, args):
    """Return the dtype of the result, or the error."""
    try:
        result = overload(name)(*args)
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    return (result if isinstance(result, Tensor) else result[0]).dtype


def each(value, change):
    if isinstance(value, (list, tuple)):
        return type(value)(each(one, change) for one in value)
    return change(value) if isinstance(value, Tensor) else value


def on_cuda(name, args, dtype):
    """Return the same for torch's CUDA autocast kernels, with tensors without values and without a GPU."""
    with FakeTensorMode(), cuda_autocast(dtype):
        found = dtype_of(name, each(args, lambda one: torch.empty(one.shape, dtype=one.dtype, device="cuda")))
    if str(found).startswith("Found no NVIDIA driver"):
        pytest.skip("torch 2.10 asks a GPU for this, also for tensors without values")
    return found


@pytest.mark.filterwarnings("ignore:.*is deprecated", "ignore:.*cross without specifying")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_operations_of_cudas_lists(name):
    for low in (HALF, BFLOAT):
        for given in (low, FLOAT):
            args = arguments(given)[name]
            with cuda_autocast_ops(), torch.autocast("cpu", low):
                result = dtype_of(name, args)
            assert result == on_cuda(name, args, low), (low, given)


@pytest.mark.parametrize("name", left_alone(HALF))
def test_operations_outside_cudas_lists_are_not_cast(name):
    args = left_alone(HALF)[name]
    with cuda_autocast_ops(), torch.autocast("cpu", HALF):
        result = dtype_of(name, args)
    if name == "trace" and TORCH in ((2, 10), (2, 11)):
        pytest.skip("torch 2.10 and 2.11 have no trace in float16 on a CPU")
    assert result == on_cuda(name, args, HALF)
    assert result is (FLOAT if name == "cross_entropy_loss" else HALF)


@pytest.mark.skipif(not HEADER.exists(), reason="torch was installed without its headers")
def test_lists_are_those_of_torchs_header():
    """torch 2.10 still has operations for named tensors, a removed prototype."""
    theirs, text = {}, HEADER.read_text().replace("\\\n", " ")
    for macro, body in re.findall(r"#define AT_FORALL_(\w+)\(_\)(.*)", text):
        pairs = re.findall(r"_\(\s*(\w+)(?:,\s*(\w+))?\s*\)", body)
        theirs[macro] = {".".join(filter(None, pair)) for pair in pairs} | set(re.findall(r'"([\w.]+)"', body))
    assert set(autocast_ops._IN_16_BITS.split()) == theirs["LOWER_PRECISION_FP"] - OF_CUDA_ALONE
    assert set(autocast_ops._IN_FLOAT32.split()) >= theirs["FP32"]
    to_float32 = theirs["FP32_SET_OPT_DTYPE"] | theirs["DIFFERENT_REDISPATCH_SIGNATURE"]
    to_float32 = {name for name in to_float32 if "names" not in name and "dimname" not in name.lower()}
    assert set(autocast_ops._TO_FLOAT32.split()) >= to_float32
    assert set(autocast_ops._IN_THE_WIDEST.split()) == theirs["PROMOTE"]


@pytest.mark.parametrize("name", ["addcmul", "tensordot"])
def test_mixture_becomes_float32(name):
    halves, floats = arguments(HALF)[name], arguments(FLOAT)[name]
    args = (halves[0], *floats[1:])
    with cuda_autocast_ops(), torch.autocast("cpu", HALF):
        result = overload(name)(*args)
    assert result.dtype is FLOAT
    assert torch.equal(result, overload(name)(*each(args, Tensor.float)))


x16 = rand(8, 16)
VALUES = {
    "sum": (lambda x: x.sum(), lambda x: x.sum(dtype=FLOAT)),
    "layer_norm": (lambda x: F.layer_norm(x, (16,)), lambda x: F.layer_norm(x.float(), (16,))),
    "norm": (lambda x: x.norm(dim=1), lambda x: x.norm(dim=1, dtype=FLOAT)),
    "a dtype said": (lambda x: x.softmax(1, dtype=HALF), lambda x: x.softmax(1, dtype=HALF)),
    "in place": (lambda x: x.clone().exp_(), lambda x: x.clone().exp_()),
    "float64": (lambda x: x.double().cumsum(0), lambda x: x.double().cumsum(0)),
    "integers": (lambda x: (x * 8).long().sum(), lambda x: (x * 8).long().sum()),
    "einsum": (lambda x: torch.einsum("ij,ij->ij", x.float(), x), lambda x: x * x),
    "gru": (lambda x: GRU(x.float()), lambda x: torch.func.functional_call(GRU, HALF_WEIGHTS, (x,))),
}
GRU = nn.GRUCell(16, 4)
HALF_WEIGHTS = {name: weight.detach().half() for name, weight in GRU.named_parameters()}


@pytest.mark.parametrize("name", VALUES)
def test_values_equal_those_of_explicit_casts(name):
    with_lists, by_hand = VALUES[name]
    with cuda_autocast_ops(), torch.autocast("cpu", HALF):
        result = with_lists(x16)
    expected = by_hand(x16)
    assert result.dtype is expected.dtype
    assert torch.equal(result, expected)


def test_in_force_inside_the_context_and_under_autocast_only():
    def dtypes():
        return [x16.exp().dtype, x16.sum().dtype, F.layer_norm(x16, (16,)).dtype, torch.cat([x16, x16.float()]).dtype]

    autocast, native = torch.autocast("cpu", HALF), [HALF, HALF, HALF, FLOAT]
    with cuda_autocast_ops():
        assert dtypes() == native
        with cuda_autocast_ops(), autocast:
            assert dtypes() == [FLOAT] * 4
        with autocast:
            assert dtypes() == [FLOAT] * 4
    with autocast:
        assert dtypes() == native


def loss_of_weight(weight):
    return F.layer_norm((weight @ weight).softmax(1), (16,)).exp()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_changes_no_bit(use_reentrant):
    weight = rand(16, 16, dtype=FLOAT).requires_grad_()

    def gradient(run):
        weight.grad = None
        with torch.autocast("cpu", HALF):
            loss = run(weight).sum()
        loss.backward()
        return weight.grad

    with cuda_autocast_ops():
        plain = gradient(loss_of_weight)
        again = gradient(lambda w: checkpoint(loss_of_weight, w, use_reentrant=use_reentrant))
    assert torch.equal(plain, again)
    assert not torch.equal(plain, gradient(loss_of_weight))


def test_double_backward_vmap_and_a_compiled_graph():
    weight = (rand(16, 16, dtype=FLOAT) / 16).requires_grad_()
    with cuda_autocast_ops():
        with torch.autocast("cpu", HALF):
            loss = loss_of_weight(weight).sum()
            rows = torch.vmap(lambda row: row.softmax(0).exp().sum())(x16)
            by_row = torch.stack([row.softmax(0).exp().sum() for row in x16])
        (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
        (curve,) = torch.autograd.grad(slope.pow(2).sum(), weight)
        compiled = torch.compile(loss_of_weight, backend="aot_eager")
        with torch.autocast("cpu", HALF):
            fast, slow = compiled(weight), loss_of_weight(weight)
    assert curve.isfinite().all()
    assert curve.abs().sum() > 0
    assert rows.dtype is by_row.dtype is FLOAT
    assert torch.allclose(rows, by_row)
    assert torch.equal(fast, slow)
    assert fast.dtype is FLOAT


def test_differences_are_named():
    with ops_that_differ() as found, torch.autocast("cpu", HALF):
        (x16 @ x16.T).relu().pow(2).mean()
        x16.log_softmax(1)
        F.cross_entropy(x16, torch.zeros(8, dtype=torch.int64))  # float32 on both
        F.interpolate(rand(1, 3, 8, 8), scale_factor=2)
        x16.norm()
        F.adaptive_avg_pool3d(rand(1, 1, 4, 4, 4), 1)
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(x16, x16)
    up = ("float16", "float32")
    assert found == {
        "pow": up,
        "log_softmax": up,
        "upsample_nearest2d": up,
        "linalg_vector_norm": up,
        "adaptive_avg_pool3d": ("float32", "float16"),
        "binary_cross_entropy": ("float32", "an error"),
    }


def test_every_thread_sees_them():
    for context, dtype in ((cuda_autocast_ops(), FLOAT), (torch.enable_grad(), HALF)):
        with context, ThreadPoolExecutor(1) as thread:
            assert thread.submit(torch.autocast("cpu", HALF)(x16.exp)).result().dtype is dtype


# --- in a run ------------------------------------------------------------------------------------------------


class Squares(nn.Module):
    """A net with a custom loss: in 16 bits on a CPU, in float32 on CUDA."""

    def __init__(self):
        super().__init__()
        self.net = make_net()

    def forward(self, x):
        out = self.net(x)
        return out.pow(2).cumsum(1) + out.softmax(1)


def plugin(**options):
    return MixedPrecision("float16", autocast_ops="cuda", cpu_kernels="native", **options)


def test_run_equals_a_hand_written_loop(tmp_path):
    batches = make_batches(6)
    _, ours = fit_and_watch(tmp_path, Regression(Squares()), batches, precision=plugin())
    with cuda_autocast_ops():
        theirs = train_by_hand(Squares(), batches, precision="16-mixed", optimizer=sgd)
    assert_same(ours, theirs)
    native = train_by_hand(Squares(), batches, precision="16-mixed", optimizer=sgd)
    assert any(not torch.equal(a, b) for a, b in zip(ours.weights[-1], native.weights[-1], strict=True))


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_devices_that_cannot(device):
    with pytest.raises(PrecisionError, match=rf"autocast_ops='cuda' on a device of type '{device}', expected cpu"):
        MixedPrecision("bfloat16", autocast_ops="cuda").check(torch.device(device))


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_lists_change_nothing_on_cuda():
    cuda = plugin()
    with cuda.session(nn.Linear(2, 2), torch.device("cuda")):
        assert not autocast_ops._replacement.users
    with cuda.session(nn.Linear(2, 2), torch.device("cpu")):
        assert autocast_ops._replacement.users == 1
