"""A CUDA device that is not there: tensors that say ``cuda:0`` and keep their values on the CPU.

To torch they are CUDA's: what autocast does, which implementation an optimizer chooses, how a result gets to the host,
is what it would be on a GPU. Arithmetic is the CPU's. Every operation that would make the host wait for the device is
recorded with the line that asked for it, and so is every kernel.

What counts as a kernel: an operator that computes, fills or copies on the device, once, however many launches CUDA
makes of it (a ``_foreach`` operator is one). What only makes a view, or allocates, is none. Copies between host and
device are on a list of their own.

What is taken for a wait: reading a value (``item``, ``nonzero``, indexing by a mask, ...), a blocking copy between host
and device, a non-blocking one into memory that is not pinned, and to synchronize with a device, stream or event.

What it cannot tell: time, memory, streams that overlap, random numbers of CUDA, and whatever asks for a tensor's
address (custom kernels, compilation, CUDA graphs).

A process that has called :func:`prepare` is a simulation to its end: see ``child.py``. Facts about torch that this is
built on were found by running torch 2.15; :func:`probe` says whether they hold.
"""

from __future__ import annotations

import ctypes
import linecache
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CUDA = torch.device("cuda", 0)
GIBIBYTE = 2**30
ROOT = Path(__file__).parents[2]

_CONTEXT_SLOT = 4
"""Of CUDA's hooks: behind two destructors, ``isBuilt`` and ``isAvailable`` there is ``hasPrimaryContext``."""

_NO_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_"),
    *("detach", "lift_fresh", "_unsafe_view", "_reshape_alias", "is_same_size", "record_stream"),
}
"""Operators that compute nothing, beside those that make views."""

_READS = {
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount", "repeat_interleave"),
    *("_unique2", "unique_dim", "unique_consecutive", "_linalg_check_errors"),
}
"""Operators whose result, or its shape, the host needs to know."""

_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}

_keep_alive: list[object] = []


class Wait(NamedTuple):
    """The host waits for the device.

    Attributes:
        what: it asked for.
        where: the line of this project, or of who else is not torch.
    """

    what: str
    where: str


class Seen:
    """What was seen while somebody watched.

    Attributes:
        waits: of the host.
        kernels: the names of the operators.
        to_host: the sizes in bytes of what was copied from the device.
        to_device: the sizes in bytes of what was copied from the host.
    """

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self.kernels: list[str] = []
        self.to_host: list[int] = []
        self.to_device: list[int] = []


class Device:
    """The device's state.

    Attributes:
        seen: where what happens is noted; None where nobody watches.
        sync_debug_mode: as ``torch.cuda.set_sync_debug_mode`` has set it.
        issued: pieces of long work that the device was given (``torch.cuda._sleep``).
        done: how many of them the host knows to be done, because it has waited.
    """

    def __init__(self) -> None:
        self.seen: Seen | None = None
        self.sync_debug_mode = "default"
        self.issued = self.done = 0
        self.pinned: dict[int, torch.UntypedStorage] = {}

    @contextmanager
    def watch(self) -> Iterator[Seen]:
        """A context in which what happens is noted."""
        outer, self.seen = self.seen, Seen()
        try:
            yield self.seen
        finally:
            self.seen = outer

    def wait(self, what: str, *, debugged: bool = True) -> None:
        """Note that the host waits for all that the device was given.

        Args:
            what: for.
            debugged: whether torch's synchronization debug mode knows of it.
        """
        self.done = self.issued
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


DEVICE = Device()


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

    def __repr__(self, **options: Any) -> str:
        DEVICE.wait("repr")
        return f"{self.held!r} on cuda:0"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.cpu().__reduce_ex__(protocol)


class _Everywhere(TorchDispatchMode):
    """Sees also what has no tensor of the device among its arguments: what makes one."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # saves seconds of imports

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operator: on the CPU, noted as on the device."""
    device = kwargs.get("device")
    is_for = None if device is None else torch.device(device).type
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
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
    if name == "record_stream":
        return None
    if device is None and name not in _INDEXING:
        _check_devices(name, tensors)
    if name in _READS and not (name == "repeat_interleave" and kwargs.get("output_size") is not None):
        DEVICE.wait(name.removeprefix("_"))
    elif name in _INDEXING:
        _note_indexing(args[1])
    if DEVICE.seen is not None and name != "_local_scalar_dense" and name not in _NO_KERNEL and not func.is_view:
        DEVICE.seen.kernels.append(name)
    return _computed(func, args, kwargs, simulated)


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], simulated: list[Simulated]) -> Any:
    """The result, on the device; what was written to is what was given."""
    given = {id(tensor.held): tensor for tensor in simulated}

    def on_device(tensor: Tensor) -> Simulated:
        return given[id(tensor)] if id(tensor) in given else Simulated(tensor)

    real_args, real_kwargs = tree_map_only(Simulated, lambda tensor: tensor.held, (args, kwargs))
    result = func(*real_args, **real_kwargs)
    return tree_map_only(Tensor, on_device, result)


def _copy(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_for: str | None) -> Any:
    """A copy, perhaps between host and device."""
    if name == "copy_":
        target, source = args[:2]
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        to_device, lands_pinned = isinstance(target, Simulated), DEVICE.is_pinned(target)
    else:
        source, non_blocking = args[0], kwargs.get("non_blocking", False)
        to_device = is_for == "cuda" or (is_for is None and isinstance(source, Simulated))
        lands_pinned = True  # torch allocates it so, where it shall not wait
    from_device = isinstance(source, Simulated)
    if from_device and not to_device:
        if DEVICE.seen is not None:
            DEVICE.seen.to_host.append(source.nbytes)
        if not (non_blocking and lands_pinned):
            DEVICE.wait("a copy to the host", debugged=not non_blocking)
    elif to_device and not from_device:
        if DEVICE.seen is not None:
            DEVICE.seen.to_device.append(source.nbytes)
        if not non_blocking:
            DEVICE.wait("a copy from the host")
    elif DEVICE.seen is not None:
        DEVICE.seen.kernels.append(name)
    real_args, real_kwargs = tree_map_only(Simulated, lambda tensor: tensor.held, (args, kwargs))
    result = func(*real_args, **real_kwargs)
    if name == "copy_":
        return args[0]
    return Simulated(result) if to_device else result


def _check_devices(name: str, tensors: list[Tensor]) -> None:
    """Refuse what CUDA refuses: tensors of the CPU among its own, unless they are a number."""
    for tensor in tensors:
        if not isinstance(tensor, Simulated) and tensor.dim() > 0:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {name} got some of cuda:0 and some of the cpu"
            )


def _note_indexing(indices: Any) -> None:
    for index in indices or ():
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
            DEVICE.wait("indexing by a mask")
        elif isinstance(index, Tensor) and not isinstance(index, Simulated) and index.dim() > 0:
            DEVICE.wait("a copy from the host")


def _who_asks(frame: FrameType | None) -> str:
    """The innermost line that is neither torch's nor of this file, with its text."""
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
        self.mark = 0
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.mark, self.time = DEVICE.issued, time.perf_counter()

    def synchronize(self) -> None:
        done = DEVICE.done
        DEVICE.wait("an event", debugged=False)
        DEVICE.done = max(done, self.mark)  # and not for what came behind it

    def query(self) -> bool:
        return DEVICE.done >= self.mark

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return (end.time - self.time) * 1e3


class Stream:
    """As ``torch.cuda.Stream``."""

    cuda_stream = 0
    device = CUDA

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def synchronize(self) -> None:
        DEVICE.wait("a stream")

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return DEVICE.done >= DEVICE.issued


_PROPERTIES = SimpleNamespace(
    name="Simulated H100", total_memory=80 * GIBIBYTE, major=9, minor=0, multi_processor_count=132
)


def _sleep(cycles: int) -> None:
    DEVICE.issued += 1


def _set_sync_debug_mode(mode: int | str) -> None:
    DEVICE.sync_debug_mode = ("default", "warn", "error")[mode] if isinstance(mode, int) else mode


class _KnowsAll(type(torch.Generator)):  # type: ignore[misc]
    """Takes torch's own generators for its instances."""

    def __instancecheck__(cls, instance: Any, generator: type = torch.Generator) -> bool:
        return isinstance(instance, generator)


class _Generator(torch.Generator, metaclass=_KnowsAll):
    """Of the CPU, whatever device is named."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu")


_CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "init": lambda: None,
    "_lazy_init": lambda: None,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "_exchange_device": lambda device: 0,
    "_maybe_exchange_device": lambda device: 0,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: _PROPERTIES.name,
    "get_device_properties": lambda device=None: _PROPERTIES,
    "get_arch_list": lambda: ["sm_90"],
    "is_bf16_supported": lambda including_emulation=True: True,
    "synchronize": lambda device=None: DEVICE.wait("the device"),
    "empty_cache": lambda: None,
    "memory_stats": lambda device=None: {},
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "max_memory_reserved": lambda device=None: 0,
    "mem_get_info": lambda device=None: (_PROPERTIES.total_memory, _PROPERTIES.total_memory),
    "reset_peak_memory_stats": lambda device=None: None,
    "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
    "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
    "set_rng_state": lambda state, device="cuda": None,
    "set_rng_state_all": lambda states: None,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "is_current_stream_capturing": lambda: False,
    "Event": Event,
    "Stream": Stream,
    "current_stream": lambda device=None: Stream(),
    "default_stream": lambda device=None: Stream(),
    "stream": lambda stream: nullcontext(),
    "_sleep": _sleep,
    "set_sync_debug_mode": _set_sync_debug_mode,
}


@contextmanager
def simulated_cuda() -> Iterator[Device]:
    """A context in which torch has one CUDA device. The process must be prepared."""
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
    """Make this process one that may simulate: CUDA gets a device guard that does nothing, and a context.

    It puts a copy of a C++ table of functions in the place of the table of CUDA's hooks, with one entry changed, for
    torch has no other way. Where torch is another, this may end the process.
    """
    torch._C._ensureCUDADeviceGuardSet()
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    get_hooks = library._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.c_void_p
    hooks = get_hooks()
    before, size = 2, 64  # the entries in front of the first function, and more functions than there are
    word = ctypes.sizeof(ctypes.c_void_p)
    table = (ctypes.c_void_p * (before + size))()
    ctypes.memmove(table, ctypes.c_void_p.from_address(hooks).value - before * word, (before + size) * word)
    has_context = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda this, index: True)
    table[before + _CONTEXT_SLOT] = ctypes.cast(has_context, ctypes.c_void_p).value
    _keep_alive.extend((table, has_context))
    ctypes.c_void_p.from_address(hooks).value = ctypes.addressof(table) + before * word


def is_prepared() -> bool:
    """Whether this process may simulate."""
    return bool(_keep_alive)


def probe() -> None:
    """Prove the simulation, in a prepared process: raises AssertionError, or whatever torch raises."""
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
        (lambda: bool(tensor.sum() > 0), 1),
        (lambda: tensor[tensor > 0], 1),
        (lambda: tensor.cpu(), 1),
        (lambda: tensor.tolist(), 1),
        (lambda: tensor.to("cpu", non_blocking=True), 0),
        (lambda: torch.empty(3).copy_(tensor, non_blocking=True), 1),
        (lambda: torch.empty(3, pin_memory=True).copy_(tensor, non_blocking=True), 0),
        (lambda: torch.ones(3).to("cuda"), 1),
        (lambda: torch.ones(3).to("cuda", non_blocking=True), 0),
        (lambda: torch.tensor([1.0, 2.0], device="cuda"), 1),
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
        (lambda: tensor.mul_(1.0), ["mul_"]),
        (lambda: tensor + tensor, ["add"]),
        (lambda: tensor.clone(), ["clone"]),
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
