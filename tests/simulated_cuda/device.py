"""A simulated CUDA device: tensors that report ``cuda:0`` and keep their values on the CPU.

torch treats them as CUDA tensors: autocast, the implementation of an optimizer, and copies to the host are those of a
GPU. Arithmetic runs on the CPU. Every operation that would synchronize host and device is recorded with its line, and
so is every kernel.

Kernels are operators that compute, fill or copy on the device. Each counts once, regardless of the number of launches
on CUDA (a ``_foreach`` operator counts as one). Views and allocations do not count. Copies between host and device are
recorded separately.

Synchronizations are: reading a value (``item``, ``nonzero``, indexing by a mask, ...), a blocking copy between host and
device, a non-blocking one into memory that is not pinned, and synchronizing with a device, stream or event.

Streams have CUDA's order: an operation comes after earlier ones of its stream, and after those of other streams that
this stream has waited for. It is an error to read data that another stream may not have written yet, to write data that
another stream may still read, and to allocate memory that another stream may still use for its earlier content: free
memory is assumed to be reused by the next allocation on its stream, regardless of the size.

Not simulated: time, memory, CUDA's random numbers, and all uses of a tensor's address (custom kernels, compilation,
CUDA graphs).

A process that has called :func:`prepare` is a simulation until its end: see ``child.py``. The implementation relies on
internals of torch 2.15; :func:`probe` checks them.
"""

from __future__ import annotations

import ctypes
import linecache
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.cuda.amp.common as cuda_amp
import torch.nn.utils.clip_grad as clip_grad
import torch.optim.optimizer as optimizers
import torch.utils._foreach_utils as foreach_utils
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda", 0)
GIBIBYTE = 2**30
ROOT = Path(__file__).parents[2]

_CONTEXT_SLOT = 4
"""Index in CUDA's hooks: ``hasPrimaryContext`` follows two destructors, ``isBuilt`` and ``isAvailable``.

"""

_NO_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_"),
    *("detach", "lift_fresh", "_unsafe_view", "_reshape_alias", "is_same_size", "is_set_to", "record_stream"),
}
"""Operators that compute nothing, in addition to views."""

_READS = {
    *("_local_scalar_dense", "is_nonzero", "equal", "allclose", "nonzero", "masked_select", "bincount"),
    *("repeat_interleave", "_unique2", "unique_dim", "unique_consecutive", "_linalg_check_errors"),
}
"""Operators with a result, or a shape, that the host must read."""

_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}

_keep_alive: list[object] = []


class Wait(NamedTuple):
    """A host-device synchronization.

    Attributes:
        what: the operation.
        where: the line of this project, or of other code outside torch.
    """

    what: str
    where: str


class Copy(NamedTuple):
    """A copy from the host.

    Attributes:
        nbytes: size.
        stream: number of the copying stream; 0 is the default stream.
        after: recorded kernels of the default stream that precede it.
        alive: bytes of this stream's allocations that cannot be reused after this copy was allocated.
    """

    nbytes: int
    stream: int
    after: int
    alive: int


class Seen:
    """Recorded operations.

    Attributes:
        waits: synchronizations of the host.
        kernels: names of the operators.
        to_host: bytes of each copy from the device.
        to_device: bytes of each copy from the host.
        copies: the copies from the host, with their earliest start.
    """

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self.kernels: list[str] = []
        self.to_host: list[int] = []
        self.to_device: list[int] = []
        self.copies: list[Copy] = []
        self.numbers: list[int] = []  # of the kernels of the default stream


Order = dict[int, int]
"""By the number of a stream: how many of its operations precede."""


def _join(order: Order, other: Order) -> None:
    for stream, number in other.items():
        order[stream] = max(order.get(stream, 0), number)


def _comes_after(order: Order, other: Order) -> bool:
    return all(order.get(stream, 0) >= number for stream, number in other.items())


class Block:
    """The memory of a tensor on the device.

    Attributes:
        stream: stream that allocated it.
        written: last operation that wrote to it.
        used: last operation of each stream that used it.
        recorded: streams that must complete before it is reused.
    """

    __slots__ = ("_storage", "nbytes", "recorded", "stream", "used", "written")

    def __init__(self, stream: int, number: int) -> None:
        self.stream = stream
        self.written: Order = {stream: number}
        self.used: Order = {stream: number}
        self.recorded: set[int] = set()
        self.nbytes = 0
        self._storage: StorageWeakRef | None = None

    def watch(self, storage: torch.UntypedStorage) -> None:
        """Record from now on whether the memory is free."""
        self.nbytes, self._storage = storage.nbytes(), StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    @property
    def is_watched(self) -> bool:
        return self._storage is not None

    def is_taken(self, done: Order) -> bool:
        """Return whether the memory cannot be reused, as far as the host knows.

        Args:
            done: operations that the host knows to be completed.
        """
        recorded = {stream: number for stream, number in self.used.items() if stream in self.recorded}
        return not self._storage.expired() or not _comes_after(done, recorded)  # type: ignore[union-attr]


class Device:
    """The device's state.

    Attributes:
        seen: record of operations; None if nothing is recorded.
        sync_debug_mode: value set by ``torch.cuda.set_sync_debug_mode``.
        stream: current stream.
        streams: number of streams.
        orders: operations that precede the next one of each stream.
        long: numbers of the long operations of each stream (``torch.cuda._sleep``); others take no time.
        done: operations that the host knows to be completed, because it synchronized.
        blocks: memory by the address of its storage, which may have been reused.
        watched: memory used by several streams, or by another stream than the default.
    """

    def __init__(self) -> None:
        self.seen: Seen | None = None
        self.sync_debug_mode = "default"
        self.streams = 0
        self.orders: dict[int, Order] = {}
        self.long: dict[int, list[int]] = {}
        self.done: Order = {}
        self.blocks: dict[int, Block] = {}
        self.watched: list[Block] = []
        self.stream = Stream()
        self.default_stream = self.stream
        self.pinned: dict[int, torch.UntypedStorage] = {}

    def issue(
        self, name: str, reads: Iterable[Simulated] = (), writes: Iterable[Simulated] = (), *, long: bool = False
    ) -> int:
        """Add an operation to the current stream. Returns its number.

        Args:
            name: name of the operation.
            reads: tensors that it reads.
            writes: existing tensors that it writes.
            long: whether it takes long.
        """
        stream = self.stream.number
        order = self.orders[stream]
        number = order[stream] = order.get(stream, 0) + 1
        for tensor in reads:
            block = self.block_of(tensor)
            if not _comes_after(order, block.written):
                raise RuntimeError(f"{name} on stream {stream} reads what is not written yet, of {block.written}")
            block.used[stream] = number
        for tensor in writes:
            block = self.block_of(tensor)
            if not _comes_after(order, block.used):
                raise RuntimeError(f"{name} on stream {stream} writes to what is still used, by {block.used}")
            block.used[stream], block.written = number, {stream: number}
        if long:
            self.long.setdefault(stream, []).append(number)
        return number

    def block_of(self, tensor: Simulated) -> Block:
        storage, stream = tensor.held.untyped_storage(), self.stream.number
        block = self.blocks.get(storage._cdata)
        if block is None:
            block = self.blocks[storage._cdata] = Block(stream, 0)
        if block.stream != stream and not block.is_watched:
            block.watch(storage)
            self.watched.append(block)
        return block

    def allocate(self, tensor: Simulated, number: int) -> None:
        """Record that operation ``number`` of the current stream returned a tensor in newly allocated memory."""
        stream = self.stream.number
        order = self.orders[stream]
        for block in [block for block in self.watched if block.stream == stream and not block.is_taken(self.done)]:
            uses = {other: last for other, last in block.used.items() if other not in block.recorded}
            if not _comes_after(order, uses):
                raise RuntimeError(f"stream {stream} allocates memory that is free and may still be used, by {uses}")
            self.watched.remove(block)
        storage = tensor.held.untyped_storage()
        block = self.blocks[storage._cdata] = Block(stream, number)
        if stream:
            block.watch(storage)
            self.watched.append(block)

    def is_done(self, order: Order) -> bool:
        """Return whether the host knows that all long operations before ``order`` are completed."""
        return all(
            number <= self.done.get(stream, 0)
            for stream, numbers in self.long.items()
            for number in numbers
            if number <= order.get(stream, 0)
        )

    @contextmanager
    def watch(self) -> Iterator[Seen]:
        """Return a context that records operations."""
        outer, self.seen = self.seen, Seen()
        try:
            yield self.seen
        finally:
            self.seen = outer

    def wait(self, what: str, *, order: Order | None = None, debugged: bool = True) -> None:
        """Record a synchronization of the host.

        Args:
            what: the operation.
            order: the operations to wait for; None for all operations of the current stream.
            debugged: whether torch's synchronization debug mode reports it.
        """
        _join(self.done, self.orders[self.stream.number] if order is None else order)
        if self.seen is not None:
            self.seen.waits.append(Wait(what, _who_asks(sys._getframe(1))))
        if debugged and self.sync_debug_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.pinned

    def pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.pinned[storage._cdata] = storage
        return tensor


class Simulated(Tensor):
    """A tensor on the device."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, real: Tensor) -> Simulated:
        tensor = Tensor._make_wrapper_subclass(
            cls, real.shape, strides=real.stride(), storage_offset=real.storage_offset(), dtype=real.dtype,
            layout=real.layout, device=CUDA,
        )  # fmt: skip
        tensor.held = real
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()  # which views share

    def record_stream(self, stream: Any) -> None:
        DEVICE.block_of(self).recorded.add(stream.number)

    def __repr__(self, **options: Any) -> str:
        DEVICE.wait("repr")
        return f"{self.held!r} on cuda:0"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.cpu().__reduce_ex__(protocol)


class _Everywhere(TorchDispatchMode):
    """Intercepts operators without a tensor of the device among their arguments, such as factories."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # saves seconds of imports

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Return the tensors in an operator's argument: a value, a list, a tuple or a dict."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Replace the tensors in an operator's arguments or results. `torch.utils._pytree` would take half of the time."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)([mapped(function, part) for part in value])
    if type(value) is dict:
        return {name: mapped(function, part) for name, part in value.items()}
    return value


def _held(tensor: Tensor) -> Tensor:
    return tensor.held if isinstance(tensor, Simulated) else tensor


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator on the CPU, recorded as on the device."""
    if torch.is_inference_mode_enabled():  # without autograd, which would have decomposed it
        with _Everywhere():
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    device = kwargs.get("device")
    is_for = None if device is None else torch.device(device).type
    tensors = [*tensors_in(args), *tensors_in(kwargs)]
    simulated = [tensor for tensor in tensors if isinstance(tensor, Simulated)]
    if kwargs.pop("pin_memory", None):
        return DEVICE.pin(func(*args, **kwargs))
    if not simulated and is_for != "cuda":
        return func(*args, **kwargs)
    name = func._schema.name.removeprefix("aten::")
    if is_for == "cuda":
        kwargs = {**kwargs, "device": "cpu"}
    if name in ("_to_copy", "copy_"):
        return _copy(func, name, args, kwargs, is_for)
    if device is None and name not in _INDEXING:
        _check_devices(name, tensors)
    if name in _READS and not (name == "repeat_interleave" and kwargs.get("output_size") is not None):
        DEVICE.wait(name.removeprefix("_"))
    elif name in _INDEXING and not _fills(args):
        _note_indexing(args[1])
    elif name in ("masked_fill", "masked_fill_") and isinstance(args[2], Simulated):
        DEVICE.wait("a value to fill with")  # its kernel takes a number
    if func.is_view or name in _NO_KERNEL:
        return _computed(func, args, kwargs, simulated)
    number = _issue(func, name, args, kwargs, simulated)
    if DEVICE.seen is not None and name != "_local_scalar_dense":
        _note_kernel(name, number)
    return _computed(func, args, kwargs, simulated, number)


def _issue(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], simulated: list[Simulated]) -> int:
    """Add an operator to the current stream. Its schema lists the tensors that it writes."""
    writes: dict[int, Simulated] = {}
    if func._schema.is_mutable:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                writes |= {id(one): one for one in tensors_in(value) if isinstance(one, Simulated)}
    return DEVICE.issue(name, [one for one in simulated if id(one) not in writes], list(writes.values()))


def _note_kernel(name: str, number: int) -> None:
    DEVICE.seen.kernels.append(name)
    if DEVICE.stream is DEVICE.default_stream:
        DEVICE.seen.numbers.append(number)


def _computed(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], simulated: list[Simulated], number: int = 0
) -> Any:
    """Return the result on the device; tensors that were written are those passed in.

    Args:
        func, args, kwargs: the operator.
        simulated: the tensors among its arguments.
        number: number of the operation; 0 if it is not a kernel.
    """
    given = {id(tensor.held): tensor for tensor in simulated}
    before = {tensor.held.untyped_storage()._cdata for tensor in simulated}

    def on_device(tensor: Tensor) -> Simulated:
        if id(tensor) in given:
            return given[id(tensor)]
        made = Simulated(tensor)
        if tensor.untyped_storage()._cdata not in before:
            DEVICE.allocate(made, number)
        return made

    real_args, real_kwargs = mapped(_held, args), mapped(_held, kwargs)
    result = func(*real_args, **real_kwargs)
    return mapped(on_device, result)


def _copy(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_for: str | None) -> Any:
    """Copy a tensor, possibly between host and device."""
    if name == "copy_":
        target, source = args[:2]
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        to_device, lands_pinned = isinstance(target, Simulated), DEVICE.is_pinned(target)
    else:
        source, non_blocking = args[0], kwargs.get("non_blocking", False)
        to_device = is_for == "cuda" or (is_for is None and isinstance(source, Simulated))
        lands_pinned = True  # torch allocates pinned memory for non-blocking copies
    from_device = isinstance(source, Simulated)
    if not from_device and not to_device:
        return func(*args, **kwargs)
    writes = [target] if name == "copy_" and to_device else []
    number = DEVICE.issue(name, [source] if from_device else [], writes)
    if from_device and not to_device:
        if DEVICE.seen is not None:
            DEVICE.seen.to_host.append(source.nbytes)
        if not (non_blocking and lands_pinned):
            DEVICE.wait("a copy to the host", debugged=not non_blocking)
    elif to_device and not from_device:
        if not non_blocking:
            DEVICE.wait("a copy from the host")
    elif DEVICE.seen is not None:
        _note_kernel(name, number)
    real_args, real_kwargs = mapped(_held, args), mapped(_held, kwargs)
    result = func(*real_args, **real_kwargs)
    if name != "copy_" and to_device:
        result = Simulated(result)
        DEVICE.allocate(result, number)
    if to_device and not from_device and DEVICE.seen is not None:
        _note_copy(source.nbytes)
    return args[0] if name == "copy_" else result


def _note_copy(nbytes: int) -> None:
    seen, stream = DEVICE.seen, DEVICE.stream.number
    known = DEVICE.orders[stream].get(0, 0)
    alive = sum(b.nbytes for b in DEVICE.watched if b.stream == stream and b.is_taken(DEVICE.done))
    seen.to_device.append(nbytes)
    seen.copies.append(Copy(nbytes, stream, sum(number <= known for number in seen.numbers), alive))


def _check_devices(name: str, tensors: list[Tensor]) -> None:
    """Raise CUDA's error for tensors of the CPU among its own, unless they are scalars."""
    for tensor in tensors:
        if not isinstance(tensor, Simulated) and tensor.dim() > 0:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {name} got some of cuda:0 and some of the cpu"
            )


def _fills(args: tuple[Any, ...]) -> bool:
    """Return whether this sets a scalar of the host at a mask, which needs no indices."""
    masks = [index for index in args[1] or () if index is not None]
    if len(masks) != 1 or masks[0].dtype not in (torch.bool, torch.uint8) or len(args) < 3:
        return False
    return bool(args[2].numel() == 1 and not isinstance(args[2], Simulated))


def _note_indexing(indices: Any) -> None:
    for index in indices or ():
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
            DEVICE.wait("indexing by a mask")
        elif isinstance(index, Tensor) and not isinstance(index, Simulated) and index.dim() > 0:
            DEVICE.wait("a copy from the host")


def _who_asks(frame: FrameType | None) -> str:
    """Return the innermost line outside torch and this file, with its text."""
    torchs, here = str(Path(torch.__file__).parent), __file__
    while frame is not None and (frame.f_code.co_filename.startswith(torchs) or frame.f_code.co_filename == here):
        frame = frame.f_back
    if frame is None:
        return "?"
    name = frame.f_code.co_filename
    shown = Path(name).relative_to(ROOT) if Path(name).is_relative_to(ROOT) else Path(name).name
    return f"{shown}:{frame.f_lineno}: {linecache.getline(name, frame.f_lineno).strip()}"


class Event:
    """As ``torch.cuda.Event``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.order: Order = {}
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.order, self.time = dict(DEVICE.orders[(stream or DEVICE.stream).number]), time.perf_counter()

    def synchronize(self) -> None:
        DEVICE.wait("an event", order=self.order, debugged=False)

    def query(self) -> bool:
        return DEVICE.is_done(self.order)

    def wait(self, stream: Any = None) -> None:
        (stream or DEVICE.stream).wait_event(self)

    def elapsed_time(self, end: Event) -> float:
        return (end.time - self.time) * 1e3


class Stream:
    """As ``torch.cuda.Stream``. Each one is a new stream."""

    device = CUDA

    def __init__(self, *args: Any, **options: Any) -> None:
        self.number = self.cuda_stream = DEVICE.streams
        DEVICE.streams += 1
        DEVICE.orders[self.number] = {}

    def synchronize(self) -> None:
        DEVICE.wait("a stream", order=DEVICE.orders[self.number])

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Any) -> None:
        _join(DEVICE.orders[self.number], event.order)

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return DEVICE.is_done(DEVICE.orders[self.number])


@contextmanager
def _in_stream(stream: Stream | None) -> Iterator[None]:
    """As ``torch.cuda.stream``."""
    outer = DEVICE.stream
    DEVICE.stream = stream or outer
    try:
        yield
    finally:
        DEVICE.stream = outer


def _synchronize(device: Any = None) -> None:
    everything: Order = {}
    for order in DEVICE.orders.values():
        _join(everything, order)
    DEVICE.wait("the device", order=everything)


DEVICE: Device = Device.__new__(Device)
DEVICE.__init__()  # type: ignore[misc]  # a stream asks for it


_PROPERTIES = SimpleNamespace(
    name="Simulated H100", total_memory=80 * GIBIBYTE, major=9, minor=0, multi_processor_count=132
)


def _sleep(cycles: int) -> None:
    DEVICE.issue("_sleep", long=True)


def _set_sync_debug_mode(mode: int | str) -> None:
    DEVICE.sync_debug_mode = ("default", "warn", "error")[mode] if isinstance(mode, int) else mode


class _KnowsAll(type(torch.Generator)):  # type: ignore[misc]
    """Accepts torch's own generators as instances."""

    def __instancecheck__(cls, instance: Any, generator: type = torch.Generator) -> bool:
        return isinstance(instance, generator)


class _Generator(torch.Generator, metaclass=_KnowsAll):
    """A generator of the CPU for any device."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu")


_CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_lazy_init": lambda: None,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: _PROPERTIES.name,
    "get_device_properties": lambda device=None: _PROPERTIES,
    "is_bf16_supported": lambda including_emulation=True: True,
    "synchronize": _synchronize,
    "empty_cache": lambda: None,
    "max_memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "max_memory_reserved": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
    "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
    "set_rng_state": lambda state, device="cuda": None,
    "set_rng_state_all": lambda states: None,
    "manual_seed_all": lambda seed: None,
    "Event": Event,
    "Stream": Stream,
    "current_stream": lambda device=None: DEVICE.stream,
    "default_stream": lambda device=None: DEVICE.default_stream,
    "stream": _in_stream,
    "_sleep": _sleep,
    "set_sync_debug_mode": _set_sync_debug_mode,
}


@contextmanager
def simulated_cuda() -> Iterator[Device]:
    """Return a context with one CUDA device in torch. The process must be prepared."""
    foreach_types = [*optimizers._foreach_supported_types, Simulated]
    replaced: list[tuple[Any, str, Any]] = [
        *((torch.cuda, name, value) for name, value in _CUDA.items()),
        (cuda_amp, "amp_definitely_not_available", lambda: False),
        (optimizers, "_foreach_supported_types", foreach_types),
        (clip_grad, "_has_foreach_support", lambda tensors, device: True),
        (foreach_utils, "_has_foreach_support", lambda tensors, device: True),
        (torch.accelerator, "is_available", lambda: True),
        (torch.accelerator, "device_count", lambda: 1),
        (torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch, "Generator", _Generator),
        (Tensor, "is_pinned", lambda tensor, device=None: DEVICE.is_pinned(tensor)),
        (Tensor, "pin_memory", lambda tensor, device=None: DEVICE.pin(tensor.clone())),
    ]
    DEVICE.__init__()  # type: ignore[misc]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(_Everywhere())
        yield DEVICE


def prepare() -> None:
    """Prepare this process for the simulation: CUDA gets a no-op device guard, and a context.

    Replaces the C++ table of CUDA's hooks with a copy with one changed entry, because torch has no API for it. With
    another version of torch, this may crash the process.
    """
    torch._C._ensureCUDADeviceGuardSet()
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    get_hooks = library._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.c_void_p
    hooks = get_hooks()
    before, size = 2, 64  # number of entries before the first function, and an upper bound of the number of functions
    word = ctypes.sizeof(ctypes.c_void_p)
    table = (ctypes.c_void_p * (before + size))()
    ctypes.memmove(table, ctypes.c_void_p.from_address(hooks).value - before * word, (before + size) * word)
    has_context = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda this, index: True)
    table[before + _CONTEXT_SLOT] = ctypes.cast(has_context, ctypes.c_void_p).value
    _keep_alive.extend((table, has_context))
    ctypes.c_void_p.from_address(hooks).value = ctypes.addressof(table) + before * word


def is_prepared() -> bool:
    """Return whether this process is prepared for the simulation."""
    return bool(_keep_alive)


def probe() -> None:
    """Check the simulation in a prepared process. Raises AssertionError, or an error of torch."""
    with simulated_cuda() as device:
        weight = torch.ones(3, device="cuda").requires_grad_()
        optimizer = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0, fused=True)
        with device.watch() as seen:
            with torch.autocast("cuda", dtype=torch.float16):
                product = weight @ torch.full((3,), 2.0, device="cuda")
            product.backward()
            optimizer.step()
        _expect(product.dtype is torch.float16, "autocast")
        _expect(weight.grad is not None and weight.grad.device == CUDA, "the device of a gradient")
        _expect(weight.grad.tolist() == [2.0] * 3, "a gradient")
        torch.testing.assert_close(weight.tolist(), [0.5] * 3)
        _expect(not seen.waits, "no wait where nobody waits")
        _expect(seen.kernels.count("_fused_adamw_") == 1, "a fused optimizer")
        _finds_waits(device)
        _counts_kernels(device)


def _finds_waits(device: Device) -> None:
    tensor = torch.ones(3, device="cuda")
    planted: list[tuple[Callable[[], Any], int]] = [
        (lambda: tensor.sum().item(), 1),
        (lambda: tensor[tensor > 0], 1),
        (lambda: tensor.cpu(), 1),
        (lambda: tensor.to("cpu", non_blocking=True), 0),
        (lambda: torch.empty(3).copy_(tensor, non_blocking=True), 1),
        (lambda: torch.empty(3, pin_memory=True).copy_(tensor, non_blocking=True), 0),
        (lambda: torch.ones(3).to("cuda"), 1),
        (lambda: torch.ones(3).to("cuda", non_blocking=True), 0),
        (lambda: tensor + 1.0, 0),
        (torch.cuda.synchronize, 1),
    ]
    for number, (ask, waits) in enumerate(planted):
        with device.watch() as seen:
            ask()
        _expect(len(seen.waits) == waits, f"{waits} waits in planted case {number}, not {seen.waits}")


def _counts_kernels(device: Device) -> None:
    tensor = torch.ones(2, 3, device="cuda")
    planted: list[tuple[Callable[[], Any], list[str]]] = [
        (lambda: tensor.view(3, 2).t()[0].detach(), []),
        (lambda: torch.empty_like(tensor), []),
        (lambda: tensor + tensor, ["add"]),
        (lambda: tensor.half(), ["_to_copy"]),
        (lambda: torch.zeros((), device="cuda"), ["zeros"]),
        (lambda: torch._foreach_add_([tensor, tensor], 0.0), ["_foreach_add_"]),
    ]
    for ask, kernels in planted:
        with device.watch() as seen:
            ask()
        _expect(seen.kernels == kernels, f"the kernels {kernels}, not {seen.kernels}")


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"The simulated device fails its probe: expected {what}.")
