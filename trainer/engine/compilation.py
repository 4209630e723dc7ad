"""``torch.compile`` in place: what is private to torch in it, and what its compiler tells of its work.

``nn.Module.compile`` compiles a module's call and leaves the module what it is: its class, its names, the keys of its
``state_dict``, its copies. Whoever replaces the module's ``forward`` or adds hooks, before or after, is inside of what
is compiled. There is no public way back, and torch 2.10 compiles nothing of a module whose ``forward`` is torch's own
(``nn.Sequential``); so torch's attribute is set here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakValueDictionary

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from trainer.engine.forwards import OwnForward

_IN_PLACE = "_compiled_call_impl"
_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of inductor that use CUDA graphs."""
_WITHOUT_GRAPHS = ("inductor", "eager", "aot_eager", "aot_eager_decomp_partition")
"""Backends of which it is known that they give memory away for good, where no mode says otherwise."""
_CODES: WeakValueDictionary[str, CodeType] = WeakValueDictionary()
"""What is compiled of torch's containers, by their structure: see :func:`_call_of`."""


def is_compiled(module: nn.Module) -> bool:
    """Whether the module's call is compiled in place."""
    return getattr(module, _IN_PLACE, None) is not None


def compile_in_place(module: nn.Module, settings: Mapping[str, Any], *, reuses_memory: bool) -> Callable[[], None]:
    """Have calls of ``module`` compiled. Returns what undoes it.

    Args:
        module: not compiled yet.
        settings: of ``torch.compile``.
        reuses_memory: whether the next call overwrites what this one returns: see :class:`Kept`.
    """
    if type(module).forward.__module__.startswith("torch."):
        compiled: Any = torch.compile(_call_of(module), **settings)
    else:
        module.compile(**settings)
        compiled = getattr(module, _IN_PLACE)
    setattr(module, _IN_PLACE, Kept(compiled) if reuses_memory else compiled)

    def undo() -> None:
        vars(module).pop(_IN_PLACE, None)

    return undo


class CompiledForward(OwnForward):
    """A compiled ``forward``, where the module's call may be more than that: a LightningModule's is its step under DDP.

    Args:
        module: whose forward.
        settings, reuses_memory: as in :func:`compile_in_place`.
    """

    def __init__(self, module: nn.Module, settings: Mapping[str, Any], *, reuses_memory: bool) -> None:
        super().__init__(module)
        compiled = torch.compile(self._forward, **settings)
        self._compiled: Callable[..., Any] = Kept(compiled) if reuses_memory else compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward."""
        return self._compiled(*args, **kwargs)


class Kept:
    """Calls a compiled function that overwrites its results in the next step, and copies those that are kept.

    In a forward pass with gradients these are single numbers (a loss, a weight, a sum that is logged): the activations
    and the output of a network are used up by the backward pass, and a copy of them would cost memory and time. Without
    gradients all of it: what is predicted, what metrics collect, what a module keeps for the end of the epoch.

    Args:
        function: what ``torch.compile`` returned.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        output = self._function(*args, **kwargs)
        if torch.compiler.is_compiling():  # part of a larger graph, which is kept as a whole
            return output
        trains = torch.is_grad_enabled()
        return apply_to_collection(
            output,
            Tensor,
            lambda tensor: tensor.clone() if tensor.numel() == 1 or not trains else tensor,
            allow_frozen=True,
        )


def reuses_memory(settings: Mapping[str, Any], device: torch.device) -> bool:
    """Whether what is compiled with these settings may write its results to the same memory at each call.

    CUDA graphs do: inductor's by its mode or an option, and the backend ``cudagraphs``. Of a backend that is not
    torch's nobody knows.
    """
    backend, options = settings.get("backend") or "inductor", settings.get("options") or {}
    if backend not in (*_WITHOUT_GRAPHS, "cudagraphs"):
        return True
    if device.type != "cuda":
        return False
    return backend == "cudagraphs" or settings.get("mode") in _GRAPHS or bool(options.get("triton.cudagraphs"))


def begin_step() -> None:
    """Tell CUDA graphs that what the step before has computed is over, whether or not all of it had a backward pass."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Compilation:
    """A function that was compiled.

    Attributes:
        function: its name, with the name of its file, and the line.
        reason: which assumption about its arguments no longer held, where it had been compiled before; else "".
        seconds: how long it took, the forward graph's compilation included.
    """

    function: str
    reason: str
    seconds: float


class Compilations:
    """What ``torch.compile`` has compiled in this process from :meth:`start` to :meth:`stop`.

    It costs nothing where nothing is compiled. Where torch does not tell (its records are private), nothing is known.

    Attributes:
        done: so far, in their order; see :meth:`read`.
        graph_breaks: how many there were.
    """

    def __init__(self) -> None:
        self.done: list[Compilation] = []
        self.graph_breaks = 0
        self._has_news = False
        self._until = 0.0  # when the last compilation began that has been taken up
        self._breaks_before = 0
        self._listens = False

    def start(self) -> None:
        """Listen."""
        self.done, self._has_news = [], False
        self._until = max((one.start_time for one in _records()), default=0.0)
        self._breaks_before = _graph_breaks()
        try:
            from torch._dynamo.callback import callback_handler

            callback_handler.register_end_callback(self._hear)
        except (ImportError, AttributeError):
            return
        self._listens = True

    def stop(self) -> None:
        """Listen no more. Safe to call twice."""
        self.read()
        if self._listens:
            self._listens = False
            with suppress(ImportError, AttributeError, ValueError):  # `torch.compiler.reset` has removed it
                from torch._dynamo.callback import callback_handler

                callback_handler.remove_end_callback(self._hear)

    def read(self) -> bool:
        """Take up what has been compiled since the last time. Returns whether there was anything."""
        if not self._has_news:
            return False
        self._has_news = False
        news = [one for one in _records() if one.start_time > self._until]  # torch keeps the last 64
        self.done += [_compilation_of(one) for one in news]
        self._until = max((one.start_time for one in news), default=self._until)
        self.graph_breaks = _graph_breaks() - self._breaks_before
        return True

    def _hear(self, event: Any) -> None:
        self._has_news = True  # what is known of it is recorded later


def ever_compiled() -> bool:
    """Whether a graph has been compiled in this process; True where torch does not tell."""
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
    return [one for one in get_compilation_metrics() if one.co_filename is not None and one.start_time is not None]


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
    """What is compiled. Modules of one structure share its code: of one code the compiler makes a few graphs only."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # noqa: SLF001 - not what is compiled

    code = _CODES.setdefault(repr(module), call.__code__.replace())
    return FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)
