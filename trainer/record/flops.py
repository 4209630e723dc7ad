"""Count the floating-point operations of a batch, and look up the peak rate of a device.

Lightning's ``get_available_flops`` is not used: it has rates with sparsity (H200) or for a pair of cards (H100 NVL),
and lacks the GB200 and GPUs of AMD. Operations are counted in a custom mode, because ``FlopCounterMode`` also counts
recomputation of activation checkpointing.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from trainer.precision.compilation import CompiledForward


class Peak(NamedTuple):
    """Peak rates of a device for dense matrix products, in 10^12 floating-point operations per second.

    Args:
        float32: rate without TensorFloat-32.
        tf32: rate in TensorFloat-32, or None if the device does not support it.
        float16: rate in float16 with accumulation in float32, as in PyTorch.
        bfloat16: rate in bfloat16 with accumulation in float32, or None if the device does not support it.
    """

    float32: float
    tf32: float | None
    float16: float
    bfloat16: float | None


PEAKS: dict[str, Peak] = {
    # NVIDIA Tesla V100 and V100S data sheets
    r"Tesla V100-SXM\d-.*": Peak(15.7, None, 125.0, None),
    r"Tesla V100-PCIE-.*": Peak(14.0, None, 112.0, None),
    r"Tesla V100S-PCIE-.*": Peak(16.4, None, 130.0, None),
    # NVIDIA T4 data sheet
    r"Tesla T4": Peak(8.1, None, 65.0, None),
    # Data sheets of NVIDIA A100, A30, A40 and A10, without sparsity
    r"NVIDIA A100\b(?!.*MIG).*": Peak(19.5, 156.0, 312.0, 312.0),
    r"NVIDIA A30": Peak(10.3, 82.0, 165.0, 165.0),
    r"NVIDIA A40": Peak(37.4, 74.8, 149.7, 149.7),
    r"NVIDIA A10": Peak(31.2, 62.5, 125.0, 125.0),
    # NVIDIA Ampere GA102 GPU Architecture white paper, v2.1, appendices. GeForce cards accumulate in float32 at
    # half the rate, here and below.
    r"NVIDIA RTX A6000": Peak(38.7, 77.4, 154.8, 154.8),
    r"NVIDIA GeForce RTX 3090": Peak(35.6, 35.6, 71.0, 71.0),
    # Data sheets of NVIDIA L4, L40 and L40S: half of the rates with sparsity
    r"NVIDIA L4": Peak(30.3, 60.0, 121.0, 121.0),
    r"NVIDIA L40": Peak(90.5, 90.5, 181.0, 181.0),
    r"NVIDIA L40S": Peak(91.6, 183.0, 362.0, 362.0),
    # NVIDIA Ada GPU Architecture white paper, v2.1, appendices
    r"NVIDIA RTX 6000 Ada Generation": Peak(91.1, 182.1, 364.2, 364.2),
    r"NVIDIA GeForce RTX 4090": Peak(82.6, 82.6, 165.2, 165.2),
    # NVIDIA H100 data sheet: half of the rates with sparsity
    r"NVIDIA H100 80GB HBM3|NVIDIA H100 SXM.*": Peak(66.9, 494.7, 989.4, 989.4),
    r"NVIDIA H100 PCIe": Peak(51.2, 378.0, 756.0, 756.0),
    r"NVIDIA H100 NVL": Peak(60.0, 417.5, 835.5, 835.5),
    # NVIDIA H200 and GH200 data sheets: half of the rates with sparsity
    r"NVIDIA H200": Peak(67.0, 494.5, 989.5, 989.5),
    r"NVIDIA H200 NVL": Peak(60.0, 417.5, 835.5, 835.5),
    r"NVIDIA GH200( \d+GB)?": Peak(67.0, 494.5, 989.5, 989.5),
    # NVIDIA Blackwell data sheet (HGX B200, GB200 NVL72), per GPU: half of the rates with sparsity
    r"NVIDIA B200": Peak(75.0, 1100.0, 2250.0, 2250.0),
    r"NVIDIA GB200": Peak(80.0, 1250.0, 2500.0, 2500.0),
    # NVIDIA RTX Blackwell GPU Architecture white paper, appendix
    r"NVIDIA GeForce RTX 5090": Peak(104.8, 104.8, 209.5, 209.5),
    # AMD Instinct MI250X data sheet (matrix): a device is one of its two dies; AMD Instinct MI300X data sheet
    r"AMD Instinct MI250X.*": Peak(47.9, None, 191.5, 191.5),
    r"AMD Instinct MI300X.*": Peak(163.4, 653.7, 1307.4, 1307.4),
}
"""Peak rates by a regular expression for torch's name of a device. Parts of a device (MIG) are not listed."""

_FIELDS = {"16": "float16", "bf16": "bfloat16", "32": "float32"}


def peak_flops(name: str, precision: str, tf32: bool) -> float | None:
    """Return the peak floating-point operations per second of a device, or None if they are unknown.

    Args:
        name: name of the device (``torch.cuda.get_device_name``).
        precision: name of a precision, such as ``"bf16-mixed"``. The rates of 8 and 64 bits are unknown.
        tf32: whether float32 matrix products use TensorFloat-32.
    """
    peak = next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, name)), None)
    field = _FIELDS.get(precision.partition("-")[0])
    if peak is None or field is None:
        return None
    rate: float | None = getattr(peak, "tf32" if field == "float32" and tf32 and peak.tf32 else field)
    return None if rate is None else rate * 1e12


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the floating-point operations of matrix products, convolutions and attention, with torch's formulas.

    Operations that activation checkpointing repeats are counted once. Compiled operations are not counted, and neither
    are custom kernels without a formula (``torch.utils.flop_counter.register_flop_formula``).

    Attributes:
        total: number of operations; a multiplication and an addition count as two.
        convolutions: number of operations in convolutions.
        is_whole: False after a higher-order operator without a formula (``flex_attention``), because its operations are
            not counted. Custom kernels do not change it.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.convolutions = 0
        self.is_whole = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, because the compiler refuses to run inside other dispatch modes."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count it."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        packet = getattr(function, "overloadpacket", None)
        formula = flop_registry.get(packet)
        if formula is not None and not _recomputes():
            operations = formula(*args, **kwargs, out_val=result)
            self.total += operations
            self.convolutions += operations if "conv" in str(packet) else 0
        elif isinstance(function, HigherOrderOperator):
            self.is_whole = False
        return result


def _recomputes() -> bool:
    """Return whether activation checkpointing repeats the current operation in the backward pass."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename == checkpoint.__file__:
            if code.co_name == "unpack_hook":
                return True
            if code.co_name == "backward":
                # with use_reentrant=True, this function also runs the backward pass, but with gradients disabled
                return torch.is_grad_enabled()
        frame = frame.f_back
    return False


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a part of a module is compiled, so that its operations are not counted."""
    return any(
        hasattr(submodule, "_orig_mod")
        or getattr(submodule, "_compiled_call_impl", None) is not None
        or isinstance(vars(submodule).get("forward"), CompiledForward)
        for submodule in module.modules()
    )
