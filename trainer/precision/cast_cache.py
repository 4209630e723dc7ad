"""What autocast cast where gradients were off is not reused where they are on: a remedy for torch 2.10.

Autocast keeps the 16-bit copy of a weight until the outermost autocast ends, so that a weight used twice is cast
once. torch 2.10 keeps also a copy made without gradients (under ``no_grad`` or ``inference_mode``, or inside the
``forward`` of an ``autograd.Function``) and hands it to a later forward with gradients. The weight then gets no
gradient, or the wrong one, without a word (torch #65766, #112583, #120483). torch 2.11 casts with a graph in either
case.

:func:`with_trusted_cache` leaves the cache on, and torch as it is. On a torch with the mistake it lets a torch
function mode look at every operation of the forward: the first one with gradients after one without empties the
cache. That sees also what hooks on modules would not: weights used directly, custom functions. It costs about five
microseconds an operation there (a net of 24 small layers on a CPU: 0.14 ms a step), and nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["loses_gradients", "with_trusted_cache"]


def with_trusted_cache(autocast: AbstractContextManager[object]) -> AbstractContextManager[object]:
    """``autocast`` itself where torch keeps its cache right; else one that does. Reusable if ``autocast`` is."""
    return _ForgetsCastsWithoutGraph(autocast) if loses_gradients() else autocast


@cache
def loses_gradients() -> bool:
    """Whether this torch reuses casts made without gradients. Tried out, once a process, on one weight."""
    with torch.inference_mode(False), torch.autocast("cpu", dtype=torch.bfloat16):
        weight = torch.ones(1, 1, requires_grad=True)
        with torch.no_grad():
            torch.mm(weight, weight)
        with torch.enable_grad():
            return not torch.mm(weight, weight).requires_grad


class _ForgetsCastsWithoutGraph(TorchFunctionMode):
    """Autocast, and a look at each operation under it."""

    def __init__(self, autocast: AbstractContextManager[object]) -> None:
        super().__init__()
        self._autocast = autocast
        self._may_hold_casts_without_graph = False

    def __enter__(self) -> _ForgetsCastsWithoutGraph:
        self._autocast.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._autocast.__exit__(kind, error, trace)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not torch.compiler.is_compiling():  # compiled graphs have their casts in them, and no cache
            if not torch.is_grad_enabled():
                self._may_hold_casts_without_graph = True
            elif self._may_hold_casts_without_graph:
                torch.clear_autocast_cache()
                self._may_hold_casts_without_graph = False
        return func(*args, **(kwargs or {}))
