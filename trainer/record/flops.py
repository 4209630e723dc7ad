"""How many floating-point operations a batch takes, and how many a second a device could do at most."""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Peak(NamedTuple):
    """What a device can do at most: 10^12 floating-point operations a second, of dense matrices.

    Args:
        float32: without TensorFloat-32.
        tf32: with it; None for a device that has none. Likewise:
        float16: products of float16, added up in float32, as PyTorch's are.
        bfloat16: likewise.
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
    # Data sheets of NVIDIA A100, A30, A40 and A10, where a second number is that with sparsity
    r"NVIDIA A100\b(?!.*MIG).*": Peak(19.5, 156.0, 312.0, 312.0),
    r"NVIDIA A30": Peak(10.3, 82.0, 165.0, 165.0),
    r"NVIDIA A40": Peak(37.4, 74.8, 149.7, 149.7),
    r"NVIDIA A10": Peak(31.2, 62.5, 125.0, 125.0),
    # NVIDIA Ampere GA102 GPU Architecture white paper, v2.1, appendices. GeForce cards add up in float32 at half the
    # rate, here and below.
    r"NVIDIA RTX A6000": Peak(38.7, 77.4, 154.8, 154.8),
    r"NVIDIA GeForce RTX 3090": Peak(35.6, 35.6, 71.0, 71.0),
    # Data sheets of NVIDIA L4, L40 and L40S: half of what they say with sparsity
    r"NVIDIA L4": Peak(30.3, 60.0, 121.0, 121.0),
    r"NVIDIA L40": Peak(90.5, 90.5, 181.0, 181.0),
    r"NVIDIA L40S": Peak(91.6, 183.0, 362.0, 362.0),
    # NVIDIA Ada GPU Architecture white paper, v2.1, appendices
    r"NVIDIA RTX 6000 Ada Generation": Peak(91.1, 182.1, 364.2, 364.2),
    r"NVIDIA GeForce RTX 4090": Peak(82.6, 82.6, 165.2, 165.2),
    # NVIDIA H100 data sheet: half of what it says with sparsity
    r"NVIDIA H100 80GB HBM3|NVIDIA H100 SXM.*": Peak(66.9, 494.7, 989.4, 989.4),
    r"NVIDIA H100 PCIe": Peak(51.2, 378.0, 756.0, 756.0),
    r"NVIDIA H100 NVL": Peak(60.0, 417.5, 835.5, 835.5),
    # NVIDIA H200 and GH200 data sheets: likewise
    r"NVIDIA H200": Peak(67.0, 494.5, 989.5, 989.5),
    r"NVIDIA H200 NVL": Peak(60.0, 417.5, 835.5, 835.5),
    r"NVIDIA GH200( \d+GB)?": Peak(67.0, 494.5, 989.5, 989.5),
    # NVIDIA Blackwell data sheet (HGX B200, GB200 NVL72), of each GPU: likewise
    r"NVIDIA B200": Peak(75.0, 1100.0, 2250.0, 2250.0),
    r"NVIDIA GB200": Peak(80.0, 1250.0, 2500.0, 2500.0),
    # NVIDIA RTX Blackwell GPU Architecture white paper, appendix
    r"NVIDIA GeForce RTX 5090": Peak(104.8, 104.8, 209.5, 209.5),
    # AMD Instinct MI250X data sheet (matrix): a device is one of its two dies; AMD Instinct MI300X data sheet
    r"AMD Instinct MI250X.*": Peak(47.9, None, 191.5, 191.5),
    r"AMD Instinct MI300X.*": Peak(163.4, 653.7, 1307.4, 1307.4),
}
"""By the name that torch has for a device (a regular expression for all of it). Parts of one (MIG) are not known."""

_FIELDS = {"16": "float16", "bf16": "bfloat16", "32": "float32"}


def peak_flops(name: str, precision: str, tf32: bool) -> float | None:
    """Floating-point operations a second that a device does at most; None where that is not known.

    Args:
        name: of the device (``torch.cuda.get_device_name``).
        precision: such as ``"bf16-mixed"``. 8 and 64 bits are not known.
        tf32: whether float32 is multiplied in TensorFloat-32.
    """
    peak = next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, name)), None)
    field = _FIELDS.get(precision.partition("-")[0])
    if peak is None or field is None:
        return None
    found: float | None = getattr(peak, "tf32" if field == "float32" and tf32 and peak.tf32 else field)
    return None if found is None else found * 1e12


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the floating-point operations of products, convolutions and attention within, by torch's formulas.

    What activation checkpointing computes a second time does not count: the model does not need it. What is compiled
    is not seen; nor are kernels of one's own without a formula (``torch.utils.flop_counter.register_flop_formula``).

    Attributes:
        total: a multiplication and an addition are two.
        convolutions: of these, what convolutions took.
        is_whole: False once an operation came that has no formula, and whose parts are not seen (``flex_attention``).
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.convolutions = 0
        self.is_whole = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let functions be compiled within: their compiler refuses to run inside of other modes."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what is to be done, and count it."""
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
    """Whether the operation is one that a checkpoint repeats in the backward pass."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename == checkpoint.__file__:
            if code.co_name == "unpack_hook":
                return True
            if code.co_name == "backward":  # use_reentrant=True: the backward pass itself is within, without gradients
                return torch.is_grad_enabled()
        frame = frame.f_back
    return False


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a part of a module is compiled, so that its operations are not seen."""
    return any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None
        for part in module.modules()
    )
