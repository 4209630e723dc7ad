"""Find the lines of the user's code that cause a host-device synchronization in a training step."""

from __future__ import annotations

import inspect
import linecache
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.common.module_tree import is_dense
from trainer.common.packages import is_frameworks_file
from trainer.common.run_callback import RunCallback
from trainer.common.session import Session
from trainer.errors import counted, expect
from trainer.record.measures import device_of

log = logging.getLogger("lightning.pytorch.advice")
"""A child of Lightning's logger, so Lightning prints the advice; on the command line, the config
``hydra/job_logging: trainer`` prints it."""

_HOST_INDEX = "an index on the host"
_SIZE = "the size of the result depends on values: torch.where, or a product with the mask, keeps the shape"
_ADVICE = {
    "keep the tensor: self.log accepts tensors, and reads them only when it writes a row":
        ("item", "__float__", "__int__", "__index__", "_local_scalar_dense"),
    "collect tensors and copy them once, at the end of the epoch; or .to('cpu', non_blocking=True)":
        ("tolist", "cpu", "numpy", "__array__"),
    "print it every n-th step, or log it": ("__repr__", "__str__", "__format__"),
    "no `if` on a tensor: torch.where(condition, a, b), or multiply by the condition":
        ("__bool__", "__contains__", "is_nonzero"),
    _SIZE: ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"),
    f"{_SIZE}; for a number as an index, x[i[None]]":
        ("__getitem__", "__setitem__", "index", "index_put", "index_put_", "repeat_interleave"),
    "create it on the device (torch.zeros(..., device=self.device)), register it as a buffer, or copy it from pinned"
    " memory: .pin_memory().to(device, non_blocking=True)": ("tensor", "as_tensor", "asarray", "to", "cuda"),
    "pass the number of classes: F.one_hot(labels, num_classes)": ("one_hot",),
    "use torch.linalg.inv_ex, cholesky_ex or solve_ex: the host does not read whether they succeeded":
        ("_linalg_check_errors",),
    "create the index on the device: torch.randperm(n, device=self.device); or register it as a buffer": (_HOST_INDEX,),
}  # fmt: skip
_ADVICE_BY_FUNCTION = {function: advice for advice, functions in _ADVICE.items() for function in functions}
_SIZES_FROM_VALUES = frozenset(
    ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal",
     "allclose", "bincount", "repeat_interleave", "_linalg_check_errors")
)  # fmt: skip
"""Operations with a result, or a result's size, that the host reads from the device."""
_BY_MASK = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))
_COPIES = frozenset(("tolist", "cpu", "numpy", "__array__", "__repr__", "__format__"))
"""Functions that copy from the device to the host. On a CPU they are no-ops, or no mode intercepts them."""

_LOOPS = ("trainer.loop", "trainer.run", "trainer.cli", "lightning.pytorch.loops", "lightning.pytorch.trainer")
_OWN_WORK = (
    "torch.optim", "trainer.callbacks", "trainer.data", "trainer.distributed", "trainer.diagnosis", "trainer.metrics",
    "trainer.precision", "trainer.record", "trainer.state", "lightning.pytorch.callbacks", "lightning.pytorch.loggers",
)  # fmt: skip
"""Modules with synchronizations that are not reported, because the user's code does not cause them."""
_HOST = "_made_on_the_host"


@dataclass
class Synchronization:
    """A line that causes a host-device synchronization.

    Attributes:
        file, line: the file and the line number.
        code: the text of the line.
        cause: the function that synchronizes, as Python names it (``item``, ``__bool__``), or the kind of argument.
        count: the number of synchronizations in all watched steps.
    """

    file: str
    line: int
    code: str
    cause: str
    count: int = 0

    @property
    def instead(self) -> str:
        """Advice on how to avoid the synchronization."""
        return _ADVICE_BY_FUNCTION.get(self.cause, "it synchronizes host and GPU: move it out of the step")


class SyncDetector(RunCallback):
    """Log the lines of the module and of callbacks that synchronize host and device in each step, with advice.

    A GPU works asynchronously while the host prepares the next operations. ``loss.item()``, ``if mask.any()``,
    ``print(tensor)``, ``.tolist()``, ``.cpu()``, ``nonzero``, indexing with a mask and copies from pageable memory
    block the host until the GPU has completed all of its work. The callback watches some batches, and then logs the
    lines, once per fit. The logged line is the innermost one outside torch, Lightning and this package. These packages'
    own synchronizations, and those of optimizers and dataloaders, are not logged.

    On CUDA, torch's sync debug mode reports synchronizations. A CPU does not synchronize; on a CPU, the callback finds
    the operations that would synchronize on a GPU, except copies by ``copy_``, ``type_as`` and ``new_tensor``. It finds
    the same lines if it can determine which tensors would be on the host in a run on a GPU: those created without
    ``device=``, and results computed only from these. Several synchronizations in one call (``print``) count once.
    Compiled modules run eagerly in the watched batches; results do not change.

    Args:
        batches: the number of batches to watch, at least 1. Default: 10.
        after: the number of batches to skip before these, because they initialize. Default: 2.

    Attributes:
        synchronizations: the lines (:class:`Synchronization`), most frequent first.
        watched: the number of watched batches so far.

    Raises:
        ConfigurationError: if a number is out of range.
    """

    reset_in_copies: ClassVar = {"_watch": None}

    def __init__(self, batches: int = 10, after: int = 2) -> None:
        expect(batches >= 1, "at least 1 batch", batches=batches)
        expect(after >= 0, "at least 0 batches", after=after)
        self.batches, self.after = batches, after
        self.synchronizations: list[Synchronization] = []
        self.watched = self._seen = 0
        self._watch: SyncWatch | None = None
        self._found: dict[tuple[str, int, str], Synchronization] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Drop the results of an earlier fit."""
        self.synchronizations, self._found = [], {}
        self.watched = self._seen = 0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start or end watching."""
        self._seen += 1
        if self._seen == self.after + self.batches + 1:
            self._report(trainer)
        elif self.after < self._seen <= self.after + self.batches:
            self.watched += 1
            self._watch = self._watch or SyncWatch(device_of(trainer).type, self._found).__enter__()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Stop watching, because a validation is not part of a step."""
        self._clean_up(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Log the results if the fit ended before all batches were watched."""
        if self.watched and self._seen <= self.after + self.batches:
            self._report(trainer)

    def run_facts(self) -> dict[str, Any]:
        """Return the entries for the record of the run."""
        return {"synchronizations": [vars(sync) for sync in self.synchronizations]} if self.synchronizations else {}

    def _clean_up(self, trainer: pl.Trainer) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _report(self, trainer: pl.Trainer) -> None:
        self._clean_up(trainer)
        self.synchronizations = sorted(self._found.values(), key=lambda sync: -sync.count)
        if self.synchronizations and trainer.is_global_zero:
            heading = f"These lines synchronize host and GPU (counts in {counted(self.watched, 'step')}):"
            log.info("\n  ".join([heading, *format_synchronizations(self.synchronizations)]))


def format_synchronizations(synchronizations: Iterable[Synchronization]) -> list[str]:
    """Return one line of text for each: file and line, code, count, advice."""
    return [
        f"{Path(sync.file).name}:{sync.line}: {sync.code} ({'once' if sync.count == 1 else f'{sync.count} times'});"
        f" {sync.instead}"
        for sync in synchronizations
    ]


class SyncWatch(Session):
    """A context that finds host-device synchronizations.

    Args:
        device: the type of the device that the steps run on.
        results: filled with the synchronizations, by file, line and function.
    """

    def __init__(self, device: str, results: dict[tuple[str, int, str], Synchronization]) -> None:
        super().__init__()
        self.is_cuda = device == "cuda"
        self._found = results
        self.marked: dict[tuple[str, int], str] | None = None  # causes by line, during a call of a torch function

    def __enter__(self) -> SyncWatch:
        """Watch every call of a torch function."""
        if "torch._dynamo" in sys.modules:  # if not imported, nothing is compiled; importing it takes seconds
            self.enter_context(torch.compiler.set_stance("force_eager"))
        if self.is_cuda:
            self.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Synchronization debug mode")
            warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
            show = warnings.showwarning
            warnings.showwarning = lambda message, *args, **options: (
                self.mark("") if "synchronizing CUDA operation" in str(message) else show(message, *args, **options)
            )
            self.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("warn")
        else:
            self.enter_context(_Operations(self))
            for name in ("from_numpy", "frombuffer"):  # no mode intercepts them
                self.replace(torch, name, _tag_host_tensors(getattr(torch, name)))
        self.enter_context(_Functions(self))
        return self

    def mark(self, cause: str) -> None:
        """Record a synchronization at the current line."""
        if (line := user_line(inspect.currentframe())) is not None:
            add = self.add if self.marked is None else self.marked.setdefault
            add(line, cause)

    def add(self, line: tuple[str, int], cause: str) -> None:
        """Count a synchronization."""
        file, number = line
        code = linecache.getline(file, number).strip()
        self._found.setdefault((*line, cause), Synchronization(file, number, code, cause)).count += 1


class _Functions(TorchFunctionMode):
    """Intercepts each torch function that Python calls.

    Only the outermost call counts: several synchronizations inside it count once.
    """

    def __init__(self, watch: SyncWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watch, kwargs, name = self._watch, kwargs or {}, getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        from_host = bool(tensors) and all(map(_is_host, tensors))
        watch.marked, marked = {}, watch.marked
        try:
            copies = "" if watch.is_cuda else _no_op_copy(name, args, kwargs, from_host)
            if copies:
                watch.mark(copies)
            result = func(*args, **kwargs)
            if copies or not (from_host or _synchronizes_only_on_cpu(name, args, kwargs)):
                for line, cause in watch.marked.items():
                    watch.add(line, copies or (name if name in _ADVICE_BY_FUNCTION else cause))
        finally:
            watch.marked = marked
        if watch.is_cuda or not isinstance(result, Tensor) or not is_dense(result):
            return result
        if name in ("to", "cuda", "cpu"):
            result = result.view_as(result)  # on a CPU, the result may be the argument itself, which must not be tagged
            from_host = name == "cpu" or _is_on_cpu(_device_argument(args, kwargs))
        elif not tensors:
            from_host = kwargs.get("device") is None
        return _tag_host(result) if from_host else result


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts each operation, from any caller."""

    def __init__(self, watch: SyncWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        reads = name in _SIZES_FROM_VALUES and (kwargs or {}).get("output_size") is None
        if reads or (name in _BY_MASK and any(map(_is_mask, args[1]))):
            self._watch.mark(name)
        return func(*args, **(kwargs or {}))


def user_line(frame: FrameType | None) -> tuple[str, int] | None:
    """Return the file and the number of the innermost line of the user's code in a step, or None."""
    place, outermost = None, ""
    while frame is not None:
        module = outermost = str(frame.f_globals.get("__name__", ""))
        if module.startswith(_LOOPS):
            return place
        if module.startswith("torch.utils.data") or frame.f_code.co_name == "on_before_batch_transfer":
            return None
        is_of_mode = module == __name__ or frame.f_code.co_name == "__torch_function__"
        if place is None and not is_of_mode:
            if module.startswith(_OWN_WORK):
                return None
            if not is_frameworks_file(frame.f_code.co_filename):
                place = (frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    # on a GPU, autograd runs the backward pass in its own thread, which has no frame of a loop or of `threading`
    is_in_autograd = threading.get_ident() != threading.main_thread().ident and outermost != "threading"
    return place if is_in_autograd else None


def _no_op_copy(name: str, args: Any, kwargs: Any, of_host: bool) -> str:
    """Return the name of the copy that would synchronize on a GPU but is a no-op on a CPU, or ""."""
    if name in _COPIES:
        return "" if of_host else name
    if name in ("tensor", "as_tensor", "asarray"):
        is_from_host = not args or not isinstance(args[0], Tensor) or of_host
        return name if is_from_host and kwargs.get("device") is not None else ""
    if name in ("__getitem__", "__setitem__", "index_put", "index_put_"):
        return _HOST_INDEX if not _is_host(args[0]) and _is_on_host(args[1]) else ""
    is_asynchronous = kwargs.get("non_blocking") or any(arg is True for arg in args[2:4])
    device = _device_argument(args, kwargs)
    has_device = name == "cuda" or (name == "to" and isinstance(device, (str, torch.device, Tensor)))
    if is_asynchronous or not has_device or _is_host(args[0]) is _is_on_cpu(device):
        return ""
    return "cpu" if _is_on_cpu(device) else name


def _is_on_host(index: Any) -> bool:
    """Return whether a part of the index must be copied to the device: a host tensor, an array or a list of numbers."""
    for part in index if type(index) is tuple else (index,):
        if isinstance(part, Tensor):
            if _is_host(part) and part.dim() > 0:
                return True
        elif isinstance(part, (list, tuple, range)) or getattr(part, "ndim", 0) > 0:
            return not any(isinstance(leaf, Tensor) and not _is_host(leaf) for leaf in tree_leaves(part))
    return False


def _synchronizes_only_on_cpu(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether the function reads a value on a CPU but not on a GPU.

    ``one_hot`` with a number of classes checks the labels only on a CPU; assigning a number under a mask
    (``x[mask] = 0.0``) is a fill on a GPU.
    """
    if name == "one_hot":
        return bool(kwargs.get("num_classes", args[1] if len(args) > 1 else -1) >= 0)
    if name != "__setitem__" or not isinstance(args[2], (int, float, complex)):
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    tensors = [part for part in index if isinstance(part, Tensor)]
    return len(tensors) == 1 and _is_mask(tensors[0])


def _device_argument(args: Any, kwargs: Any) -> Any:
    return kwargs.get("device", kwargs.get("other", args[1] if len(args) > 1 else None))


def _is_on_cpu(device: Any) -> bool:
    """Return whether ``device`` is the host. A ``torch.device`` of the CPU counts as the module's device."""
    return _is_host(device) or (isinstance(device, str) and device == "cpu")


def _is_host(value: Any) -> bool:
    return isinstance(value, Tensor) and hasattr(value, _HOST)


def _tag_host(tensor: Tensor) -> Tensor:
    setattr(tensor, _HOST, True)
    return tensor


def _tag_host_tensors(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a function that creates tensors on the host, so that they are recognized later."""
    return lambda *args, **kwargs: _tag_host(make(*args, **kwargs))


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
