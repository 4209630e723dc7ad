"""Measure the share of gradients that is lost at the lower end of float16."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.common.module_tree import is_dense
from trainer.precision.readback import Readback

SMALLEST_NORMAL = torch.finfo(torch.float16).smallest_normal
"""2**-14. Smaller float16 numbers are subnormal: they have fewer than 11 significant bits. The smallest is 2**-24."""


_LARGEST_SUBNORMAL = SMALLEST_NORMAL * (1 - 2**-24)
"""The largest float32 number below ``SMALLEST_NORMAL``."""


_PART = 2**22
"""Maximum number of elements to count together, because counting takes three times their memory."""


_SMALL = 2**14
"""Maximum number of elements of a gradient that is copied to be counted with others, which takes fewer kernels."""


class Underflow(NamedTuple):
    """Underflow in the gradients of one parameter, or of all.

    Attributes:
        name: name of the parameter; "" for all.
        zeros: share of the elements that are exactly 0, from 0 to 1. Not conclusive: embedding rows that the batch did
            not use are zero.
        subnormal: share of the other elements that are smaller than float16's smallest normal number.
    """

    name: str
    zeros: float
    subnormal: float


class UnderflowProbe:
    """Counts underflow on the device. The host reads the counts in :meth:`finish`.

    Args:
        device: device type of the gradients.
    """

    def __init__(self, device: str) -> None:
        self._readback = Readback(device)
        self._names: list[str] = []
        self._sizes: list[int] = []
        self._counts: list[Tensor] = []

    def start(
        self, gradients: Iterable[tuple[str, int, Tensor]], total: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Start counting in these gradients, which must be as the backward pass left them: still scaled.

        Args:
            gradients: (name, number of elements, gradient) for each; the gradient may be this process's part.
            total: sums a tensor over the processes: the counts, of shape (gradients, 2). Default: None, no sum.
        """
        numbers: list[Tensor] = []
        for name, elements, gradient in gradients:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            self._names.append(name)
            self._sizes.append(elements)
            chunks = _parts(values)
            numbers += [_nonzero(chunks), _nonzero(F.hardshrink(chunk, _LARGEST_SUBNORMAL) for chunk in chunks)]
        if not numbers:
            return
        counts = torch.stack(numbers).reshape(-1, 2)
        if total is not None:
            counts = total(counts)
        self._counts += list(counts.float().flatten())
        self._readback.start(self._counts)

    def finish(self) -> list[Underflow]:
        """Return the result for all gradients, then for each parameter, the worst first; [] if nothing was counted."""
        counts = self._readback.wait() if self._names else []
        numbers = zip(self._names, self._sizes, counts[::2], counts[1::2], strict=True)
        triples = [(name, size, size - nonzero, nonzero - normal) for name, size, nonzero, normal in numbers]
        self._names, self._sizes, self._counts = [], [], []
        if not triples:
            return []
        each = [_shares(*triple) for triple in triples]
        totals = (sum(column) for column in list(zip(*triples, strict=True))[1:])
        return [_shares("", *totals), *sorted(each, key=lambda underflow: underflow.subnormal, reverse=True)]


def joined(gradients: Iterable[tuple[int, Tensor]]) -> list[tuple[str, int, Tensor]]:
    """Return the arguments of :meth:`UnderflowProbe.start` that count all gradients in few kernels, with the name "".

    Small dense gradients on the same device are concatenated.

    Args:
        gradients: (number of elements, gradient) for each. The gradient is whole, and may be sparse.
    """
    large: list[tuple[str, int, Tensor]] = []
    small: dict[torch.device, list[Tensor]] = defaultdict(list)
    for elements, gradient in gradients:
        if elements <= _SMALL and is_dense(gradient):
            small[gradient.device].append(gradient.reshape(-1))
        else:
            large.append(("", elements, gradient))
    return [*large, *(("", tensor.numel(), tensor) for tensor in map(torch.cat, small.values()))]


def _parts(values: Tensor) -> Sequence[Tensor]:
    """Return views of at most ``_PART`` elements each, or of one row each."""
    if values.numel() <= _PART:
        return [values]
    rows = max(1, _PART * len(values) // values.numel())
    return list(torch.split(values, rows))


def _nonzero(chunks: Iterable[Tensor]) -> Tensor:
    """Return the number of nonzero elements of all parts; exact, and 0-dim."""
    numbers = [
        torch.count_nonzero(chunk)
        if chunk.device.type == "mps"  # has no double precision
        else torch.linalg.vector_norm(chunk, 0, dtype=torch.float64)
        for chunk in chunks
    ]
    return numbers[0] if len(numbers) == 1 else torch.stack(numbers).sum()


def _shares(name: str, size: float, zeros: float, subnormal: float) -> Underflow:
    return Underflow(name, zeros / max(size, 1), subnormal / max(size - zeros, 1))
