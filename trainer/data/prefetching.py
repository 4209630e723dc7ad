"""Copy batches to a GPU while the previous step runs there.

The order of operations on the host does not change. The host is ahead of the device: when it has issued a step and
takes the next batch, the device still runs that step. A copy on the default stream would wait for it. Here the copy
uses a separate stream, and waits only for the step before the issued one. If the device has already completed the
issued step and waits for the host, the copy uses the default stream, which takes the host less time.

The next batch is not fetched during a step, as other prefetchers do: its random numbers would be drawn before those of
the step, and errors of the loader would be raised inside another batch. Copied tensors are held until their step has
run; with ``record_stream``, a host that is far ahead would fill the device with batches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Call = Callable[..., Any]

MIN_BYTES = 2**21
"""Size in bytes. Copying less takes at most 84 microseconds (at 25 GB/s, PCIe 4), and using another stream takes the
host about as long."""

_COPIES = frozenset({Tensor.to, Tensor.cuda})


class Prefetching(TorchFunctionMode):
    """A context that copies tensors from host memory to a GPU on a separate stream.

    Use it for one batch, between two steps. It redirects calls of ``Tensor.to`` and ``Tensor.cuda`` on dense tensors in
    host memory that have at least ``MIN_BYTES`` bytes and do not require gradients. The default stream waits
    for each copy; all other operations stay on their streams, and no host-device synchronization is added.

    The caching allocator reuses freed memory for later operations of the same stream. Thus a copy must not begin before
    the device has finished with the previous content of its memory: it begins when the device has completed everything
    that was issued before the running step. For the same reason, no copied memory may be freed during this step: each
    batch is held until the next one has been copied. If other code holds it for longer, ``record_stream`` delays the
    reuse of its memory. Thus, however far the host is ahead, the device holds at most two batches, plus the recent
    batches that ``OverflowReport`` keeps.

    Args:
        device: a CUDA device.

    Attributes:
        from_pinned: whether the first copied tensor was in pinned memory; None before the first copy.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.from_pinned: bool | None = None
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # reused for each operation to wait for
        self._held: list[Tensor] = []  # of the batch of the running step
        self._sent: list[Tensor] = []
        self.release_batch()

    def around(self, call: Call) -> Call:
        """Return a function that runs ``call(batch, ...)`` in this context if that saves time.

        It does not if the batch is small, or if the device is idle.
        """
        return partial(self._run, call)

    def _run(self, call: Call, batch: Any, *args: Any) -> Any:
        if _is_small(batch):
            return call(batch, *args)
        usual = torch.cuda.current_stream(self._device)
        if usual.query():
            self._release(usual)
            return call(batch, *args)
        with self:
            return call(batch, *args)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.release_batch()
        self._held, self._sent = self._sent, []

    def release_batch(self) -> None:
        """Release the last batch after its step was issued. The next copy waits for that step."""
        usual = torch.cuda.current_stream(self._device)
        self._release(usual)
        self._stream.wait_event(usual.record_event(self._event))

    def close(self) -> None:
        """Release the last batch, without a next copy."""
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
            self._sent.append(copy.detach())  # a separate object, so that other holders of the storage can be counted
        return copy


def _is_small(batch: Any) -> bool:
    """Return whether a batch (a tensor, or a list, tuple or dict of tensors) has only small dense tensors."""
    class_ = type(batch)
    for tensor in batch if class_ in (list, tuple) else batch.values() if class_ is dict else (batch,):
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.nbytes >= MIN_BYTES:
            return False
    return True


def _is_worthwhile(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a plain, large tensor in host memory."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.nbytes >= MIN_BYTES
    )


def _has_other_holders(tensor: Tensor) -> bool:
    """Return whether another object holds the storage of ``tensor``; True if torch cannot count them."""
    count = getattr(torch._C, "_storage_Use_Count", None)  # noqa: SLF001 - nothing public counts them
    storage = tensor.untyped_storage()
    return count is None or count(storage._cdata) > 2  # noqa: SLF001 - two are the tensor, and `storage`
