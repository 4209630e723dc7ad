"""CUDA's autocast lists on a CPU: compared to torch's own, operation by operation, and in a run."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
HALF, FLOAT, BFLOAT = torch.float16, torch.float32, torch.bfloat16
OF_CUDA_ALONE = {"_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_scaled_dot_product_flash_attention"}
aten = torch.ops.aten


def rand(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) * 0.5 + 0.25).to(dtype)


def arguments(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Return floating-point arguments of this dtype for each operation of CUDA's lists."""

    def r(*shape: int) -> Tensor:
        return rand(*shape, dtype=dtype)

    x, y, v, m = r(4, 6), r(4, 6), r(6), r(6, 6)
    signs, b3, s3, im, vol = r(4, 6).sign(), r(2, 4, 4), r(2, 3, 8), r(2, 3, 8, 8), r(2, 3, 4, 8, 8)
    target = torch.tensor([0, 1, 2, 3])
    conv = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    cell = r(4, 5), r(15, 6), r(15, 5), r(15), r(15)
    rnn = r(4, 6), r(4, 5), r(5, 6), r(5, 5), r(5), r(5)
    unary = [
        "acos",
        "asin",
        "cosh",
        "erfinv",
        "exp",
        "expm1",
        "log",
        "log10",
        "log2",
        "log1p",
        "reciprocal",
        "rsqrt",
        "sinh",
        "tan",
        "softplus",
        "pdist",
        "prod",
        "sum",
        "nuclear_norm",
        "linalg_vector_norm",
        "norm.Scalar",
    ]
    losses = [
        "poisson_nll_loss",
        "hinge_embedding_loss",
        "kl_div",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "mse_loss",
        "soft_margin_loss",
        "binary_cross_entropy_with_logits",
        "cosine_similarity",
        "dist",
        "cdist",
        "atan2",
    ]
    more = {"poisson_nll_loss": (True, False, 1e-8, 1), "hinge_embedding_loss": (), "norm.Scalar": (2,)}
    return {
        **{name: (x, *more.get(name, ())) for name in unary},
        **{name: (x, y, *more.get(name, ())) for name in losses},
        "_convolution": (im, r(4, 3, 3, 3), None, *conv, False, False, True, True),
        "_convolution.deprecated": (im, r(4, 3, 3, 3), None, *conv, False, False, True),
        "convolution": (im, r(4, 3, 3, 3), None, *conv),
        "conv1d": (s3, r(4, 3, 3)),
        "conv2d": (im, r(4, 3, 3, 3)),
        "conv3d": (vol, r(4, 3, 3, 3, 3)),
        "conv_tbc": (r(8, 2, 3), r(3, 3, 4), r(4)),
        "conv_transpose1d": (s3, r(3, 4, 3)),
        "conv_transpose2d.input": (im, r(3, 4, 3, 3)),
        "conv_transpose3d.input": (vol, r(3, 4, 3, 3, 3)),
        "prelu": (x, r(1)),
        "addmm": (v, x, m),
        "addmv": (r(4), x, v),
        "addr": (x, r(4), v),
        "matmul": (x, m),
        "einsum": ("ij,ij->ij", [x, y]),
        "mm": (x, m),
        "mv": (x, v),
        "linalg_vecdot": (x, y),
        "linear": (x, m),
        "addbmm": (r(4, 4), b3, b3),
        "baddbmm": (b3, b3, b3),
        "bmm": (b3, b3),
        "chain_matmul": ([x, m, m],),
        "linalg_multi_dot": ([x, m, m],),
        "lstm_cell": (r(4, 6), [r(4, 5), r(4, 5)], r(20, 6), r(20, 5), r(20), r(20)),
        "gru_cell": (r(4, 6), *cell),
        "rnn_tanh_cell": rnn,
        "rnn_relu_cell": rnn,
        "scaled_dot_product_attention": (r(2, 2, 4, 8), r(2, 2, 4, 8), r(2, 2, 4, 8)),
        "pow.Tensor_Scalar": (x, 2),
        "pow.Tensor_Tensor": (x, y),
        "pow.Scalar": (2, x),
        "layer_norm": (x, [6]),
        "native_layer_norm": (x, [6], v, v, 1e-5),
        "rms_norm": (x, [6]),
        "group_norm": (im, 3),
        "frobenius_norm.dim": (x, [1]),
        "nuclear_norm.dim": (x, [0, 1]),
        "cosine_embedding_loss": (x, y, signs[:, 0]),
        "nll_loss": (x, target),
        "nll_loss2d": (im, torch.zeros(2, 8, 8, dtype=torch.int64)),
        "margin_ranking_loss": (v, v, v),
        "multilabel_margin_loss": (x, torch.zeros(4, 6, dtype=torch.int64)),
        "multi_margin_loss": (x, target),
        "triplet_margin_loss": (x, y, y),
        "renorm": (x, 2, 0, 1.0),
        "logsumexp": (x, [1]),
        "upsample_nearest1d": (s3, [4]),
        "_upsample_nearest_exact1d": (s3, [4]),
        "upsample_nearest2d": (im, [4, 4]),
        "_upsample_nearest_exact2d": (im, [4, 4]),
        "upsample_nearest3d": (vol, [2, 4, 4]),
        "_upsample_nearest_exact3d": (vol, [2, 4, 4]),
        "upsample_linear1d": (s3, [4], False),
        "upsample_bilinear2d": (im, [4, 4], False),
        "_upsample_bilinear2d_aa": (im, [4, 4], False),
        "upsample_trilinear3d": (vol, [2, 4, 4], False),
        "upsample_bicubic2d": (im, [4, 4], False),
        "_upsample_bicubic2d_aa": (im, [4, 4], False),
        "prod.dim_int": (x, 1),
        "softmax.int": (x, 1),
        "log_softmax.int": (x, 1),
        "cumprod": (x, 0),
        "cumsum": (x, 0),
        "linalg_matrix_norm": (x, 2),
        "linalg_matrix_norm.str_ord": (x,),
        "sum.dim_IntList": (x, [1]),
        "norm.ScalarOpt_dim": (x, None, [1]),
        "addcdiv": (x, y, y),
        "addcmul": (x, y, y),
        "bilinear": (x, y, r(3, 6, 6), None),
        "cross": (r(4, 3), r(4, 3)),
        "dot": (v, v),
        "vdot": (v, v),
        "grid_sampler": (im, r(2, 4, 4, 2), 0, 0, False),
        "index_put": (x, [target[:2]], y[:2]),
        "tensordot": (x, m, [1], [0]),
        "scatter_add": (x, 0, target[:1, None].expand(1, 6), y[:1]),
        "binary_cross_entropy": (x, y),
    }


def left_alone(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Operations in the CPU's list only, which CUDA's autocast does not cast."""

    def r(*shape: int) -> Tensor:
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
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """Autocast for CUDA, which `torch.autocast` does not enable on a machine without it."""
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", HALF)


def overload(name: str) -> Any:
    packet, _, which = name.partition(".")
    return getattr(getattr(aten, packet), which or "default")


def dtype_of(name: str, args: tuple[Any, ...]) -> torch.dtype | str:
    """Return the dtype of the result, or the error."""
    try:
        result = overload(name)(*args)
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    return (result if isinstance(result, Tensor) else result[0]).dtype


def each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(each(one, change) for one in value)
    return change(value) if isinstance(value, Tensor) else value


def on_cuda(name: str, args: tuple[Any, ...], dtype: torch.dtype) -> torch.dtype | str:
    """Return the same for torch's CUDA autocast kernels, with tensors without values and without a GPU."""
    with FakeTensorMode(), cuda_autocast(dtype):
        found = dtype_of(name, each(args, lambda one: torch.empty(one.shape, dtype=one.dtype, device="cuda")))
    if str(found).startswith("Found no NVIDIA driver"):
        pytest.skip("torch 2.10 asks a GPU for this, also for tensors without values")
    return found


@pytest.mark.filterwarnings("ignore:.*is deprecated", "ignore:.*cross without specifying")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_operation_of_cudas_lists(name):
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


def lists_of_torch() -> dict[str, set[str]]:
    found = {}
    text = HEADER.read_text().replace("\\\n", " ")
    for macro, body in re.findall(r"#define AT_FORALL_(\w+)\(_\)(.*)", text):
        pairs = re.findall(r"_\(\s*(\w+)(?:,\s*(\w+))?\s*\)", body)
        found[macro] = {".".join(filter(None, pair)) for pair in pairs}
        found[macro] |= set(re.findall(r'"([\w.]+)"', body))
    return found


@pytest.mark.skipif(not HEADER.exists(), reason="torch was installed without its headers")
def is_of_named_dimensions(name: str) -> bool:
    """torch 2.10 still has operators for named tensors, a removed prototype."""
    return "names" in name or "dimname" in name.lower()


def test_lists_are_those_of_torchs_header():
    theirs = lists_of_torch()
    assert set(autocast_ops._IN_16_BITS.split()) == theirs["LOWER_PRECISION_FP"] - OF_CUDA_ALONE
    assert set(autocast_ops._IN_FLOAT32.split()) >= theirs["FP32"]
    to_float32 = theirs["FP32_SET_OPT_DTYPE"] | theirs["DIFFERENT_REDISPATCH_SIGNATURE"]
    assert set(autocast_ops._TO_FLOAT32.split()) >= {name for name in to_float32 if not is_of_named_dimensions(name)}
    assert set(autocast_ops._IN_THE_WIDEST.split()) == theirs["PROMOTE"]


def test_all_operations_of_the_lists_are_tested():
    """torch lists the operations with a CUDA autocast kernel; our lists omit those of cuDNN, and of CPUs only."""
    tested = set(ARGUMENTS) | {"linalg_matrix_sqrth"}  # the last: in 16 bits on both
    cudnn = {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"}
    ours = {name for name in autocast_ops._registered("AutocastCUDA") if not is_of_named_dimensions(name)}
    assert ours - cudnn - OF_CUDA_ALONE <= tested


MIXED = {"addcmul": 3, "atan2": 2, "dot": 2, "tensordot": 2}


@pytest.mark.parametrize("name", MIXED)
def test_mixture_becomes_float32(name):
    halves, floats = arguments(HALF)[name], arguments(FLOAT)[name]
    args = (halves[0], *floats[1:])
    with cuda_autocast_ops(), torch.autocast("cpu", HALF):
        result = overload(name)(*args)
    assert result.dtype is FLOAT
    assert torch.equal(result, overload(name)(*each(args, Tensor.float)))


x16 = rand(8, 16)
VALUES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "pow": (lambda x: x.pow(2), lambda x: x.float().pow(2)),
    "sum": (lambda x: x.sum(), lambda x: x.sum(dtype=FLOAT)),
    "softmax": (lambda x: x.softmax(1), lambda x: x.softmax(1, dtype=FLOAT)),
    "layer_norm": (lambda x: F.layer_norm(x, (16,)), lambda x: F.layer_norm(x.float(), (16,))),
    "norm": (lambda x: x.norm(dim=1), lambda x: x.norm(dim=1, dtype=FLOAT)),
    "logsumexp": (lambda x: x.logsumexp(1), lambda x: x.float().logsumexp(1)),
    "mean": (lambda x: x.mean(), lambda x: x.mean()),
    "a dtype said": (lambda x: x.softmax(1, dtype=HALF), lambda x: x.softmax(1, dtype=HALF)),
    "a sum in 16 bits": (lambda x: x.sum(1, dtype=HALF), lambda x: x.sum(1, dtype=HALF)),
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
    def dtypes() -> list[torch.dtype]:
        return [x16.exp().dtype, x16.sum().dtype, F.layer_norm(x16, (16,)).dtype, torch.cat([x16, x16.float()]).dtype]

    autocast = torch.autocast("cpu", HALF)
    with autocast:
        before = dtypes()
        before_bce = F.binary_cross_entropy(x16, x16)
    with cuda_autocast_ops():
        assert dtypes() == [HALF, HALF, HALF, FLOAT]
        with cuda_autocast_ops(), autocast:
            assert dtypes() == [FLOAT] * 4
        with autocast:
            assert dtypes() == [FLOAT] * 4
    with autocast:
        assert dtypes() == before == [HALF, HALF, HALF, FLOAT]
        assert torch.equal(F.binary_cross_entropy(x16, x16), before_bce)


def loss_of_weight(weight: Tensor) -> Tensor:
    return F.layer_norm((weight @ weight).softmax(1), (16,)).exp()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_changes_no_bit(use_reentrant):
    weight = rand(16, 16, dtype=FLOAT).requires_grad_()

    def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.autocast("cpu", HALF):
            loss = run(weight).sum()
        (found,) = torch.autograd.grad(loss, weight) if run is loss_of_weight else (backward(loss),)
        return found

    def backward(loss: Tensor) -> Tensor:
        weight.grad = None
        loss.backward()
        return weight.grad.clone()

    with cuda_autocast_ops():
        plain = gradient(loss_of_weight)
        again = gradient(lambda w: checkpoint(loss_of_weight, w, use_reentrant=use_reentrant))
    assert torch.equal(plain, again)
    with torch.autocast("cpu", HALF):
        native = loss_of_weight(weight).sum()
    assert not torch.equal(torch.autograd.grad(native, weight)[0], plain)


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
    seen = []

    def compute() -> None:
        with torch.autocast("cpu", HALF):
            seen.append(x16.exp().dtype)

    for context in (cuda_autocast_ops(), torch.enable_grad()):
        with context:
            thread = threading.Thread(target=compute)
            thread.start()
            thread.join()
    assert seen == [FLOAT, HALF]


# --- in a run ------------------------------------------------------------------------------------------------


class Squares(nn.Module):
    """A net with a custom loss: in 16 bits on a CPU, in float32 on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        return out.pow(2).cumsum(1) + out.softmax(1)


def plugin(**options: Any) -> MixedPrecision:
    return MixedPrecision("float16", autocast_ops="cuda", cpu_kernels="native", **options)


def test_run_equals_a_hand_written_loop(tmp_path):
    batches = make_batches(6)
    _, ours = fit_and_watch(tmp_path, Regression(Squares()), batches, precision=plugin())
    with cuda_autocast_ops():
        theirs = train_by_hand(Squares(), batches, precision="16-mixed", optimizer=sgd)
    assert_same(ours, theirs)
    native = train_by_hand(Squares(), batches, precision="16-mixed", optimizer=sgd)
    assert any(not torch.equal(a, b) for a, b in zip(ours.weights[-1], native.weights[-1], strict=True))


def test_first_step_is_not_skipped_for_no_reason(tmp_path):
    class OwnLoss(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.net(batch[0]) - batch[1].half()).pow(2).mean() / 16

    native, _ = fit_and_watch(tmp_path, OwnLoss(), make_batches(1), precision=MixedPrecision("float16"))
    rehearsed, _ = fit_and_watch(tmp_path, OwnLoss(), make_batches(1), precision=plugin())
    assert (native.skipped_steps, rehearsed.skipped_steps) == (1, 0)
    with torch.autocast("cpu", HALF):
        assert x16.exp().dtype is HALF  # and the run has given them back


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
