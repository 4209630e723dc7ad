"""Autocast on a CPU with CUDA's lists of operations.

For each type of device, autocast has lists of the operations that it runs in 16 bits, runs in float32, or rejects. A
CPU's lists leave many operations in 16 bits that CUDA's run in float32: sums, powers, exponentials, norms, softmax. So
a loss like ``x.pow(2).mean()`` overflows in float16 on a CPU, but not on a GPU. Inside :func:`cuda_autocast_ops`,
autocast on a CPU follows CUDA's lists.

The lists are those of torch's ``ATen/autocast_mode.h``, which the tests compare them with. They are implemented by
kernels at the dispatch key ``AutocastCPU``, for the operations that differ on a CPU. Therefore autograd, activation
checkpointing, ``torch.compile``, ``torch.func`` and the like record the casts as they record those of torch's own
kernels. A call costs 4 to 8 microseconds more under autocast, and nothing outside of it.

These stay as on a CPU: arithmetic (accumulation, order of sums); Fourier transforms, which a CPU cannot compute in 16
bits; recurrent layers, which have device-specific kernels. The weights of recurrent cells (``nn.GRUCell``) are cast
again at each time step, so that their gradients are summed in float32. A function that ``torch.compile`` compiled
outside of the context keeps the casts that it was compiled with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trainer.precision.kernels import Kernel, Replaced, Replacement, own_kernel

__all__ = ["cuda_autocast_ops", "ops_that_differ"]

_IN_16_BITS = """
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention
"""
_IN_FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
"""
_TO_FLOAT32 = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim
"""
"""Called with ``dtype=float32``, unless the caller passes another dtype."""
_IN_THE_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
_REFUSED = "binary_cross_entropy"

_CPU_ONLY = """
    _addmm_activation _native_multi_head_attention mkldnn_rnn_layer _grid_sampler_2d_cpu_fallback conv1d.padding
    conv2d.padding conv3d.padding
"""
"""Operations that are only in a CPU's list, and correct there: they are variants of operations in CUDA's list."""
_FOURIER = ("fft_", "stft")
_ROUNDED = "avg_pool3d"
"""The operation runs in 16 bits on CUDA. A CPU has no 16-bit kernel for it."""

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_BELOW_AUTOCAST = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)
_WITH_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}

Policy = Callable[[str], Kernel]
"""Creates the kernel of the operation with this name."""


def cuda_autocast_ops() -> AbstractContextManager[None]:
    """Use CUDA's lists of operations in autocast on a CPU while this context is open, in all threads.

    A hand-written loop inside of it, under ``torch.autocast("cpu", dtype=torch.float16)``, gives the same bits as
    ``MixedPrecision(autocast_ops="cuda")``: in ``(net(x) - y).pow(2).mean()``, the power and the mean are computed in
    float32, as on a GPU.

    Raises:
        RuntimeError: in the context, for operations that autocast rejects on CUDA (``binary_cross_entropy``). Also for
            operations without a 16-bit kernel, if autocast does not cast them on CUDA (``torch.linalg.inv``).
    """
    return _replacement.used()


@contextmanager
def ops_that_differ() -> Iterator[dict[str, tuple[str, str]]]:
    """Run :func:`cuda_autocast_ops`, and record the operations that a CPU's lists would have run differently.

    Each operation is computed both ways. Use it in only one thread at a time.

    Yields:
        For each operation (by name, such as ``pow``) with different output dtypes: the dtype with the CPU's lists and
        the one with CUDA's; "an error" if CUDA rejects it.
    """
    global _record
    differing: dict[str, tuple[str, str]] = {}
    _record = differing
    try:
        with cuda_autocast_ops():
            yield differing
    finally:
        _record = None


_record: dict[str, tuple[str, str]] | None = None
_runs_own_kernel = False  # while an operation is computed with the CPU's lists, for the record


def _replaced() -> dict[str, Replaced]:
    """Return an entry for each operation that CUDA's autocast runs differently from a CPU's."""
    cpu_ops, cuda_ops = _registered("AutocastCPU"), _registered("AutocastCUDA")
    cpu_only_ops = {name for name in cpu_ops - cuda_ops if not name.startswith(_FOURIER)} - set(_CPU_ONLY.split())
    policies: dict[str, Policy] = {
        **dict.fromkeys(set(_IN_16_BITS.split()) - cpu_ops, _casting(_lowest)),
        **dict.fromkeys(set(_IN_FLOAT32.split()) - cpu_ops, _casting(_float32)),
        **dict.fromkeys(_TO_FLOAT32.split(), _passing_float32),
        **dict.fromkeys(_IN_THE_WIDEST.split(), _casting(_widest)),
        **dict.fromkeys(cpu_only_ops, _passing),
        _ROUNDED: _rounding,
        _REFUSED: lambda name: own_kernel(name, "AutocastCUDA"),  # raises an error that names another operation
    }
    replaced = {}
    for name, policy in policies.items():
        if name in cuda_ops | cpu_ops:  # an older torch has shorter lists
            original = own_kernel(name, "AutocastCPU") if name in cpu_ops else _passing(name)
            replaced[name] = Replaced(original, _recorded(name, original, policy(name)))
    return replaced


_replacement = Replacement("AutocastCPU", _replaced)


def _registered(key: str) -> set[str]:
    """Return the aten operations that torch has registered a kernel for at this dispatch key."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _recorded(name: str, original: Kernel, replacement: Kernel) -> Kernel:
    short = name.partition(".")[0]

    def kernel(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        global _record, _runs_own_kernel
        if _runs_own_kernel:
            return original(keys, *args, **kwargs)
        if _record is None:
            return replacement(keys, *args, **kwargs)
        record, _record = _record, None  # operations that this one calls are not recorded
        original_dtype = dtype = "an error"
        try:
            _runs_own_kernel = True
            original_dtype = _dtype_of(original(keys, *args, **kwargs))
            _runs_own_kernel = False
            result = replacement(keys, *args, **kwargs)
            dtype = _dtype_of(result)
            return result
        finally:
            _runs_own_kernel = False
            if dtype != original_dtype:
                record[short] = original_dtype, dtype
            _record = record

    return kernel


def _dtype_of(result: Any) -> str:
    first = next((leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)), None)
    return "" if first is None else str(first.dtype).removeprefix("torch.")


# --- kernels of the operations ------------------------------------------------------------------------------


def _passing(name: str) -> Kernel:
    """Return a kernel without casts, as for an operation in no list. Operations that it calls use their own entries."""
    op = _overload(name)

    def kernel(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        return op.redispatch(keys & _BELOW_AUTOCAST, *args, **kwargs)

    return kernel


def _casting(to: Callable[[tuple[Any, ...]], torch.dtype]) -> Policy:
    """Return a policy that casts floating-point arguments, except float64, to the dtype that ``to`` returns."""

    def policy(name: str) -> Kernel:
        op = _overload(name)

        def kernel(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            dtype = to(args)
            args = tuple(_cast(value, dtype) for value in args)
            with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
                return op(*args, **kwargs)

        return kernel

    return policy


def _passing_float32(name: str) -> Kernel:
    """Return a kernel that adds ``dtype=float32`` if the first argument is eligible and the caller sets no dtype."""
    op, with_dtype = _overload(name), _overload(_WITH_DTYPE.get(name, name))
    by_place = [argument for argument in op._schema.arguments if not argument.kwarg_only and argument.name != "dtype"]

    def kernel(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        dtype = args[len(by_place)] if len(args) > len(by_place) else kwargs.get("dtype")
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            if dtype is not None or not _is_eligible(args[0]):
                return op(*args, **kwargs)
            left_out = (argument.default_value for argument in by_place[len(args) :])
            return with_dtype(*args[: len(by_place)], *left_out, **kwargs | {"dtype": torch.float32})

    return kernel


def _rounding(name: str) -> Kernel:
    """Return a kernel that computes in float32, as on a CPU, and rounds to the dtype of the input, as CUDA does."""
    in_float32 = own_kernel(name, "AutocastCPU")

    def kernel(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        return in_float32(keys, *args, **kwargs).to(args[0].dtype)

    return kernel


def _is_eligible(value: Any) -> bool:
    """Return whether autocast casts the value."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64 and value.is_cpu


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return an argument, or a list of them, with eligible tensors cast to ``dtype``."""
    if isinstance(value, list):
        return [_cast(item, dtype) for item in value]
    return value.to(dtype) if _is_eligible(value) else value


def _lowest(args: tuple[Any, ...]) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _float32(args: tuple[Any, ...]) -> torch.dtype:
    return torch.float32


def _widest(args: tuple[Any, ...]) -> torch.dtype:
    any_float32 = any(isinstance(arg, Tensor) and arg.dtype is torch.float32 for arg in args)
    return torch.float32 if any_float32 else _lowest(args)
