"""Measure the share of gradients that is lost at the lower end of float16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

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
"""Maximum number of elements of a gradient that is joined with others: to copy them takes less time than a kernel."""


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
    """Return (name, number of elements, gradient) for :meth:`UnderflowProbe.start`, to count all with few kernels.

    Small gradients on the same device are concatenated, so all names are "".

    Args:
        gradients: (number of elements, gradient) for each; the gradient may be sparse.
    """
    groups: dict[Any, list[tuple[int, Tensor]]] = {}
    for elements, gradient in gradients:
        is_small = elements <= _SMALL and is_dense(gradient)
        groups.setdefault(gradient.device if is_small else len(groups), []).append((elements, gradient))
    sizes = [sum(elements for elements, _ in group) for group in groups.values()]
    tensors = [
        torch.cat([gradient.reshape(-1) for _, gradient in group]) if len(group) > 1 else group[0][1]
        for group in groups.values()
    ]
    return [("", size, tensor) for size, tensor in zip(sizes, tensors, strict=True)]


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
