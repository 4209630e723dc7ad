"""``torch.compile``: in place, with backward passes outside of autocast; code left out of graphs; records.

``nn.Module.compile`` compiles a module's call and leaves the rest unchanged: the module's class, the names of its
parameters, and the keys of its ``state_dict``. The module can still be copied. A replaced ``forward`` and added hooks
are compiled too, whether they are set before or after compiling. There is no public way to undo it, and torch 2.10
compiles nothing of a module with a ``forward`` from torch (``nn.Sequential``). Therefore torch's private attribute is
set here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch._functorch import config

from trainer.common.session import OwnForward, Session

_IN_PLACE = "_compiled_call_impl"
_AUTOCAST = "backward_pass_autocast"
"""The setting of torch for autocast in compiled backward passes."""
_GRAPHS = ("reduce-overhead", "max-autotune")
"""Inductor modes that use CUDA graphs."""
_WITHOUT_GRAPHS = ("inductor", "eager", "aot_eager", "aot_eager_decomp_partition")
"""Backends known not to reuse the memory of their outputs, unless the mode selects CUDA graphs."""
_CODES: WeakValueDictionary[str, CodeType] = WeakValueDictionary()
"""Compiled code of torch's containers, by their structure: see :func:`_call_of`."""


def keep_out_of_graphs(function: Any) -> None:
    """Make ``torch.compile`` call ``function`` between two graphs instead of tracing it.

    A traced call would be guarded by counters that change at every step, and recompiled. ``torch.compiler.disable`` has
    the same effect through a wrapper that costs 0.3 microseconds per call even without compilation; this costs nothing.
    """
    with suppress(AttributeError):  # private names of torch; without them, only compilation takes longer
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, skip)
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = f"{function.__qualname__} is not part of a graph"


def without_backward_autocast() -> AbstractContextManager[object]:
    """Return a context that compiles backward passes without autocast, unless the user has changed torch's setting.

    The compiler traces the backward pass together with the forward pass. By default, it keeps the forward's autocast
    enabled in the backward pass. Modules in float32 (``fp32_modules``, ``torch.autocast(..., enabled=False)``) then get
    gradients with products computed in 16 bits, which may overflow or underflow.
    """
    if getattr(config, _AUTOCAST, None) != "same_as_forward":
        return nullcontext()
    return cast(AbstractContextManager[object], config.patch(**{_AUTOCAST: "off"}))


def is_compiled(module: nn.Module) -> bool:
    """Return whether the module's call is compiled in place."""
    return getattr(module, _IN_PLACE, None) is not None


def compile_in_place(session: Session, module: nn.Module, settings: Mapping[str, Any], *, reuses_memory: bool) -> None:
    """Compile calls of ``module`` until ``session`` closes.

    Args:
        session: restores the module.
        module: a module that is not compiled yet.
        settings: the arguments of ``torch.compile``.
        reuses_memory: whether the next call overwrites the output of the previous one: see :class:`CopiedOutputs`.
    """
    is_torchs = type(module).forward.__module__.startswith("torch.")
    call = _call_of(module) if is_torchs else module._call_impl
    compiled = torch.compile(call, **settings)
    session.replace(module, _IN_PLACE, CopiedOutputs(compiled) if reuses_memory else compiled)


class CompiledForward(OwnForward):
    """A compiled ``forward``, for modules with a ``__call__`` that runs more than ``forward``.

    For example, DDP calls the LightningModule to run its ``training_step``.

    Args:
        module: the module to compile.
        settings, reuses_memory: as in :func:`compile_in_place`.
    """

    def __init__(self, module: nn.Module, settings: Mapping[str, Any], *, reuses_memory: bool) -> None:
        super().__init__(module)
        compiled = torch.compile(self._forward, **settings)
        self._compiled: Callable[..., Any] = CopiedOutputs(compiled) if reuses_memory else compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward."""
        return self._compiled(*args, **kwargs)


class CopiedOutputs:
    """Call a compiled function that overwrites its outputs in the next step, and copy the outputs that are kept.

    In a forward pass with gradients, only tensors with one element are copied (a loss, a weight, a logged sum).
    Activations and the output of a network are consumed by the backward pass, and copying them would cost memory and
    time. Without gradients all outputs are copied: predictions, inputs of metrics, values that a module keeps until the
    end of the epoch.

    Args:
        function: the return value of ``torch.compile``.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function and copy the outputs that are kept."""
        output = self._function(*args, **kwargs)
        if torch.compiler.is_compiling():  # part of a larger graph, which is copied as a whole
            return output
        trains = torch.is_grad_enabled()
        return apply_to_collection(
            output,
            Tensor,
            lambda tensor: tensor.clone() if tensor.numel() == 1 or not trains else tensor,
            allow_frozen=True,
        )


def reuses_memory(settings: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether a function compiled with these settings may write its outputs to the same memory at each call.

    CUDA graphs do this: those of inductor, if its mode or an option selects them, and those of the backend
    ``cudagraphs``. Backends that are not torch's are assumed to do it, too.
    """
    backend, options = settings.get("backend") or "inductor", settings.get("options") or {}
    if backend not in (*_WITHOUT_GRAPHS, "cudagraphs"):
        return True
    if device.type != "cuda":
        return False
    return backend == "cudagraphs" or settings.get("mode") in _GRAPHS or bool(options.get("triton.cudagraphs"))


def begin_step() -> None:
    """Mark the outputs of the previous step as free for CUDA graphs, even if some of them had no backward pass."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Compilation:
    """One compilation of a function.

    Attributes:
        function: its name, with the file name and the line.
        reason: the guard on its arguments that failed, if it had been compiled before; otherwise "".
        seconds: duration, including the compilation of the forward graph.
    """

    function: str
    reason: str
    seconds: float


class Compilations:
    """Record the compilations of ``torch.compile`` in this process from :meth:`start` to :meth:`stop`.

    Costs nothing if nothing is compiled. If torch's private records do not exist, nothing is recorded.

    Attributes:
        done: the compilations so far, in order; see :meth:`read`.
        graph_breaks: number of graph breaks.
    """

    def __init__(self) -> None:
        self.done: list[Compilation] = []
        self.graph_breaks = 0
        self._has_news = False
        self._until = 0.0  # start time of the last compilation that was read
        self._breaks_before = 0
        self._is_registered = False

    def start(self) -> None:
        """Start recording."""
        self.done, self.graph_breaks, self._has_news = [], 0, False
        self._until = max((record.start_time for record in _records()), default=0.0)
        self._breaks_before = _graph_breaks()
        try:
            from torch._dynamo.callback import callback_handler

            callback_handler.register_end_callback(self._note_compilation)
        except (ImportError, AttributeError):
            return
        self._is_registered = True

    def stop(self) -> None:
        """Stop recording. Can be called twice."""
        self.read()
        if self._is_registered:
            self._is_registered = False
            with suppress(ImportError, AttributeError, ValueError):  # `torch.compiler.reset` has removed it
                from torch._dynamo.callback import callback_handler

                callback_handler.remove_end_callback(self._note_compilation)

    def read(self) -> bool:
        """Read the compilations since the last call. Returns whether there were any."""
        if not self._has_news:
            return False
        self._has_news = False
        news = [record for record in _records() if record.start_time > self._until]  # torch keeps the last 64
        self.done += [_compilation_of(record) for record in news]
        self._until = max((record.start_time for record in news), default=self._until)
        self.graph_breaks = _graph_breaks() - self._breaks_before
        return True

    def _note_compilation(self, event: Any) -> None:
        self._has_news = True  # torch writes the record later


def ever_compiled() -> bool:
    """Return whether a graph has been compiled in this process; True if torch does not report it."""
    try:
        from torch._dynamo.utils import counters
    except ImportError:
        return True
    return bool(counters["stats"]["unique_graphs"])


def _records() -> list[Any]:
    try:
        from torch._dynamo.utils import get_compilation_metrics
    except ImportError:
        return []
    records = get_compilation_metrics()
    return [record for record in records if record.co_filename is not None and record.start_time is not None]


def _graph_breaks() -> int:
    try:
        from torch._dynamo.utils import counters
    except ImportError:
        return 0
    return sum(counters["graph_break"].values())


def _compilation_of(record: Any) -> Compilation:
    reason = (record.recompile_reason or "").partition("\n")[0].partition("  #")[0]
    return Compilation(
        f"{record.co_name} ({Path(record.co_filename).name}:{record.co_firstlineno})",
        reason.partition(": ")[2].strip(),
        record.entire_frame_compile_time_s or 0.0,
    )


def _call_of(module: nn.Module) -> Callable[..., Any]:
    """Return the function to compile, with shared code for modules of the same structure.

    The compiler limits the number of graphs per code object.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    code = _CODES.setdefault(repr(module), call.__code__.replace())
    return FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)
