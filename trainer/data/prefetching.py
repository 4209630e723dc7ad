"""Batches go to a GPU while the step before them runs there.

The host does nothing earlier or in another order for it. It is ahead of the device: when it has issued a step and takes
the next batch, the device is still at that step. A copy on the usual stream would wait for it. Here the copy goes by a
stream of its own, and waits for the step before that one only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Call = Callable[..., Any]

WORTHWHILE = 2**18
"""Bytes. What is smaller is copied in 10 microseconds (at 25 GB/s, of PCIe 4), which it takes to use another stream."""

_COPIES = frozenset({Tensor.to, Tensor.cuda})


class Prefetching(TorchFunctionMode):
    """A context in which tensors are copied from host memory to a GPU by a stream of their own.

    It is for one batch, between two steps. ``Tensor.to`` and ``Tensor.cuda`` are sent that way, whoever calls them.
    The usual stream waits for each copy; everything else runs where it ran, and the host waits for nothing new.

    Memory that was allocated on a stream is given, once it is free, to what that stream does next. So a copy must not
    begin before the device is done with whatever had its place, and it begins when the device has done all that was
    issued before the step that runs. Nothing may become free during this step, then: what was copied is held until the
    next batch has been copied. Who holds it longer frees it at a time that nobody knows; for him the memory waits for
    the device (``record_stream``). So the device has two batches at most, however far the host is ahead.

    Args:
        device: a CUDA device.

    Attributes:
        from_pinned: whether the first tensor that was sent was in pinned memory; None where none has been sent.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.from_pinned: bool | None = None
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of whatever is waited for next
        self._held: list[Tensor] = []  # of the batch whose step runs
        self._sent: list[Tensor] = []
        self.let_go()

    def around(self, call: Call) -> Call:
        """``call``, whose first argument is a batch, in this context. A batch that shows to be small needs none."""
        return partial(self._run, call)

    def _run(self, call: Call, batch: Any, *args: Any) -> Any:
        if _is_small(batch):
            return call(batch, *args)
        with self:
            return call(batch, *args)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.let_go()
        self._held, self._sent = self._sent, []

    def let_go(self) -> None:
        """Let go of the last batch, whose step has been issued. The next copy waits for that step."""
        usual = torch.cuda.current_stream(self._device)
        self._release(usual)
        self._stream.wait_event(usual.record_event(self._event))

    def close(self) -> None:
        """Let go of the last batch. There is no next copy."""
        self._release(torch.cuda.current_stream(self._device))

    def _release(self, usual: torch.cuda.Stream) -> None:
        while self._held:
            tensor = self._held.pop()
            if _has_other_holders(tensor):
                tensor.record_stream(usual)

    def __torch_function__(self, func: Call, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in _COPIES or not _is_worthwhile(args[0]):
            return func(*args, **kwargs or {})
        if self.from_pinned is None:
            self.from_pinned = args[0].is_pinned()
        usual = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copy = func(*args, **kwargs or {})
        usual.wait_event(self._stream.record_event(self._event))
        if copy.device == self._device:
            self._sent.append(copy.detach())  # an object of our own: nobody can count who else holds that one
        return copy


def _is_small(batch: Any) -> bool:
    """Whether a batch of the commonest kinds (a tensor; a list, tuple or dict of them) has only small tensors."""
    kind = type(batch)
    for part in batch if kind in (list, tuple) else batch.values() if kind is dict else (batch,):
        if type(part) is not Tensor or part.nbytes >= WORTHWHILE:
            return False
    return True


def _is_worthwhile(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a plain one, in host memory, and large."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.nbytes >= WORTHWHILE
    )


def _has_other_holders(tensor: Tensor) -> bool:
    """Whether somebody else holds the memory of ``tensor``, an object that only we have; True if torch cannot tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)  # noqa: SLF001 - nothing public counts them
    storage = tensor.untyped_storage()
    return count is None or count(storage._cdata) > 2  # noqa: SLF001 - two are the tensor, and `storage`
