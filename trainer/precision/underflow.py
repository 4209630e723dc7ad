"""How much of the gradients is lost at the lower end of float16."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.precision.readback import Readback

SMALLEST_NORMAL = torch.finfo(torch.float16).smallest_normal
"""2**-14. Below it float16 is subnormal: it has fewer than its 11 significant bits, and none below 2**-24."""


_LARGEST_SUBNORMAL = SMALLEST_NORMAL * (1 - 2**-24)
"""As float32 has it: the number below that."""


class Underflow(NamedTuple):
    """What was found in the gradients of one parameter, or of all.

    Attributes:
        name: the parameter's; "" for all.
        zeros: share of the elements that are exactly 0, from 0 to 1. Says little: an embedding's rows that the batch
            did not use are zeros.
        subnormal: share of the other elements that are smaller than float16's smallest normal number.
    """

    name: str
    zeros: float
    subnormal: float


class UnderflowProbe:
    """Counts on the device; the host reads the counts when it asks for them.

    Args:
        device: the type of the device that the gradients are on.
    """

    def __init__(self, device: str) -> None:
        self._readback = Readback(device)
        self._names: list[str] = []
        self._sizes: list[int] = []
        self._counts: list[Tensor] = []

    def start(
        self, gradients: Iterable[tuple[str, int, Tensor]], total: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Count in these gradients. They are as the backward pass left them: still scaled.

        Args:
            gradients: each with its name and the number of its elements; or as much of it as this process holds.
            total: adds up what the processes have counted in their parts, a tensor of shape (gradients, 2).
        """
        found: list[Tensor] = []
        for name, elements, gradient in gradients:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            self._names.append(name)
            self._sizes.append(elements)
            found += [_nonzero(values), _nonzero(F.hardshrink(values, _LARGEST_SUBNORMAL))]
        if not found:
            return
        counts = torch.stack(found).reshape(-1, 2)
        if total is not None:
            counts = total(counts)
        self._counts += list(counts.float().flatten())
        self._readback.start(self._counts)

    def finish(self) -> list[Underflow]:
        """All together, then each parameter, the worst first. Empty if nothing was counted."""
        counts = self._readback.wait() if self._names else []
        numbers = zip(self._names, self._sizes, counts[::2], counts[1::2], strict=True)
        triples = [(name, size, size - nonzero, nonzero - normal) for name, size, nonzero, normal in numbers]
        self._names, self._sizes, self._counts = [], [], []
        if not triples:
            return []
        each = [_shares(*triple) for triple in triples]
        totals = (sum(column) for column in list(zip(*triples, strict=True))[1:])
        return [_shares("", *totals), *sorted(each, key=lambda one: one.subnormal, reverse=True)]


def _nonzero(values: Tensor) -> Tensor:
    """How many elements are not 0, counted without a tensor of their size; exact, and 0-dim."""
    if values.device.type == "mps":  # has no double precision
        return torch.count_nonzero(values)
    number: Tensor = torch.linalg.vector_norm(values, 0, dtype=torch.float64)
    return number


def _shares(name: str, size: float, zeros: float, subnormal: float) -> Underflow:
    return Underflow(name, zeros / max(size, 1), subnormal / max(size - zeros, 1))
