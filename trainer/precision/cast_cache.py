"""Keeps autocast from reusing casts made without gradients where gradients are needed: a workaround for torch 2.10.

Autocast keeps the 16-bit copy of a weight until the outermost autocast ends, so that a weight used twice is cast
once. torch 2.10 keeps also a copy made without gradients (under ``no_grad`` or ``inference_mode``, or inside the
``forward`` of an ``autograd.Function``) and hands it to a later forward with gradients. The weight then gets no
gradient, or a wrong one, without an error (torch #65766, #112583, #120483). torch 2.11 casts with a graph in either
case.

:func:`with_trusted_cache` keeps the cache enabled. On a torch with the bug, a torch function mode inspects every
operation of the forward: the first one with gradients after one without clears the cache. Unlike hooks on modules, it
also sees weights that are used directly, and custom functions. It costs some microseconds an operation there, and
nothing elsewhere.
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
    """``autocast`` itself where torch's cache is correct, else a wrapper that clears it; reusable like it."""
    return _ForgetsCastsWithoutGraph(autocast) if loses_gradients() else autocast


@cache
def loses_gradients() -> bool:
    """Whether this torch reuses casts made without gradients. Tested once a process, on one weight."""
    with torch.inference_mode(False), torch.autocast("cpu", dtype=torch.bfloat16):
        weight = torch.ones(1, 1, requires_grad=True)
        with torch.no_grad():
            torch.mm(weight, weight)
        with torch.enable_grad():
            return not torch.mm(weight, weight).requires_grad


class _ForgetsCastsWithoutGraph(TorchFunctionMode):
    """Autocast that inspects each operation under it."""

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
