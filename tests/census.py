"""A census of the state of a run: every value that is reachable from the Trainer, by path.

:func:`take` walks attributes (also ``__slots__``), containers, tensors, arrays and random generators, and returns plain
values by path. :func:`differences` compares the census of an uninterrupted run with that of a resumed run. Paths that
may differ are listed, each with a reason, in ``NOT_COMPARED``.
"""

import hashlib
import io
import logging
import random
import re
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Set
from datetime import date, timedelta
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainer.distributed.sharding.wrap import ReplacedParameter
from trainer.state import random_states

Census = dict[str, Any]

NOT_COMPARED: dict[str, str] = {
    r"root_dir$|\._dir\b|dirpath$|ckpt_path$|run_dir\b|folder\b|_save_dir$": "each run has its own folder",
    r"checkpoint_io\.(_good|_own|_saver)": "the files that this run has written",
    r"(^|[._'])loggers?\b": "rows that were sent are in the files of the first run",
    r"loaders\._resumed|_loaders\[\d+\]\._finished": "the state that the run was resumed from",
    r"eval_loops\[[^]]*\]\.predictions": "empty in a fit",
    r"eval_loops\[[^]]*\]\.progress\.has_run$": "only read by Lightning's own loops, which do not run",
    r"loop.*metrics\.entries": "values of the epoch are compared below; the others are empty",
    r"\.(_first|_given|_paths|_inside|_outside|_tensors|_memory)\b": "identities of objects",
    r"hooks\._known|'ScaleMonitor'\]\._names": "identities of objects",
    r"\.validated_at|\w_time$|\w_at$|'Timer'\]\._(offset|start)": "times",
    r"plan\.resumes|_is_chosen|_first_batch": "that the run was resumed, and when",
    r"batches\.first\b": "that the run was resumed, and when",
    r"eval_loops.*_loaders\[\d+\]\.(_begun|_started|_sampler|epoch)\b": "set when a validation begins",
    r"_before_validation|\._training_modes|\._limits\b|limits\._decided|cast_cache": "written before it is read",
    r"_forward_cache|scaler\.(_inverse|readback|_accepts_scaler)|\._reduce\b": "written before it is read",
    r"\.(first_options|initial_states)": "written before it is read",
    r"loaders\._epoch\b|_loaders\[\d+\]\._batches": "written before it is read",
    r"scaler\._init_": "read before the first loss is scaled",
    r"batches\._has_batches|_opt_called$": "only read before the first step of a process",
    r"(training_step|'NonFiniteGuard'\]\._recorder)\.(_resolved|_update)$": "counts the batches of a process",
    r"eval_loops.*progress\.(epoch|total_done|total_batches)$": "Lightning's counters, set when a validation begins",
    r"eval_loops.*progress\.batches_by_loader\[": "counts of a pass, which start at 0 when a pass begins",
    r"eval_loops.*(metrics\.shared_hooks(\[\d\])?|sampler\.(epoch|shift))$": "set when a validation begins",
    r"'OverflowReport'\]\._|\.wrappers\[|\.Evidence\.|scaler\.before_unscale\[": "evidence, which no step reads",
    r"'StochasticWeightAveraging'\]\._(init_n_averaged|scheduler_state)\b": "read when it begins to average",
    r"'LearningRateMonitor'\]\.(lrs|last)": "stock callback without a state",
    r"collectives\._reductions$": "number of collectives so far in this process",
    r"_async_max\._(sent|work|batches|batches_to_skip)\b|_runner\.stalls\._key$": "paced by time; of one process",
    r"strategy\._model\._(has_rebuilt_buckets|lazy_init_ran)$": "whether DDP has run a backward pass in this process",
    r"strategy\._model\.training$": "DDP only reads that of its module, which is compared",
    r"^module\.forward$|\._state\['forward'\]$": "set by Lightning's redirection of the first forward pass",
    r"checkpoint_io\.maps_files$|collectives\._groups\['saves'\]": "set by the first checkpoint read or written",
    r"idle\._known\['validation_step'\]": "recorded by the first validation step of a process",
    r"_handles?(\[#?\d+\])?\.id$|_orig_(param_)?uid$": "numbers of hooks and parameters in this process",
    r"_iterator\b|_loaders\[\d+\]\._(worker|running|received)\b": "processes; their states are compared below",
}
"""Regular expressions of paths, and why they may differ."""

_NUMBERS = (
    bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.Size, date, timedelta,
)  # fmt: skip
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, property)
_CONTAINERS = (dict, list, tuple, set, frozenset, Tensor)
_OPAQUE = (io.IOBase, logging.Logger, threading.Thread, types.GeneratorType, types.FrameType, ReplacedParameter)


def take(roots: Mapping[str, Any], without: tuple[type, ...] = ()) -> Census:
    """Return the values that are reachable from objects, by the shortest path.

    Args:
        roots: the objects, by the first part of the path. The global generators are added.
        without: classes of objects to leave out, in addition to the paths in ``NOT_COMPARED``.
    """
    walker = _Walker(without)
    walker.queue.extend((root, name) for name, root in roots.items())
    while walker.queue:
        walker.visit(*walker.queue.popleft())
    for name, state in random_states.capture().items():
        walker.found[f"global.{name}"] = _digest(repr(state).encode())
    return walker.found


def differences(one: Census, other: Census) -> list[str]:
    """Return the paths with different values, each with both values."""
    pairs = {path: (one.get(path, "(missing)"), other.get(path, "(missing)")) for path in one.keys() | other.keys()}
    return [f"{path}: {a!r} != {b!r}" for path, (a, b) in sorted(pairs.items()) if not _is_same(a, b)]


def _is_same(one: Any, other: Any) -> bool:
    return bool(type(one) is type(other) and (one == other or (one != one and other != other)))


class _Walker:
    def __init__(self, without: tuple[type, ...]) -> None:
        self.without = without
        self.skip = re.compile("|".join(f"(?:{pattern})" for pattern in NOT_COMPARED))
        self.found: Census = {}
        self.seen: dict[int, str] = {}
        self.kept: list[Any] = []  # so that no id is used twice
        self.queue: deque[tuple[Any, str]] = deque()

    def visit(self, thing: Any, path: str) -> None:
        if self.skip.search(path):
            return
        if isinstance(thing, _NUMBERS):
            self.found[path] = thing
        elif isinstance(thing, (PurePath, DeviceMesh)):
            self.found[path] = str(thing)
        elif isinstance(thing, _CODE):
            self.found[path] = getattr(thing, "__qualname__", type(thing).__name__)
        elif isinstance(thing, (*_OPAQUE, *self.without)):
            self.found[path] = type(thing).__qualname__
        elif id(thing) in self.seen:
            self.found[path] = f"-> {self.seen[id(thing)]}"
        else:
            if not isinstance(thing, _CONTAINERS):  # others are values: compared at each of their paths
                self.seen[id(thing)] = path
            self.kept.append(thing)
            self._enter(thing, path)

    def _enter(self, thing: Any, path: str) -> None:
        if isinstance(thing, Tensor):
            self._tensor(thing, path)
        elif isinstance(thing, (np.ndarray, np.generic)):
            array = np.asarray(thing)
            self.found[path] = f"array {array.dtype} {array.shape} {_digest(array.tobytes())}"
        elif isinstance(thing, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
            self.found[path] = f"generator {_digest(repr(random_states.state_of(thing)).encode())}"
        else:
            self.found[path] = type(thing).__qualname__
            self.queue.extend((child, f"{path}{name}") for name, child in _children(thing))

    def _tensor(self, tensor: Tensor, path: str) -> None:
        local = getattr(tensor, "_local_tensor", tensor).detach()
        numbers = b""
        if local.numel() and local.untyped_storage().nbytes():  # FSDP frees the storage of gathered parameters
            copied = local.cpu().clone(memory_format=torch.contiguous_format)  # NumPy fixes the size of a storage
            numbers = copied.view(-1).view(torch.uint8).numpy().tobytes()
        self.found[path] = f"tensor {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad} {_digest(numbers)}"
        if tensor.is_leaf and tensor.grad is not None:
            self.queue.append((tensor.grad, f"{path}.grad"))
        self.queue.extend((child, f"{path}.{name}") for name, child in vars(tensor).items())


def _children(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, types.MethodType):
        yield f".{thing.__func__.__qualname__}.self", thing.__self__
    elif isinstance(thing, partial):
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    elif isinstance(thing, Mapping):
        for index, (key, value) in enumerate(list(thing.items())):
            is_hook = isinstance(thing, OrderedDict) and isinstance(key, int)  # numbered over all modules
            is_named = isinstance(key, (str, int, float, tuple)) and not is_hook
            yield f"[{key!r}]" if is_named else f"[#{index}]", value
    elif isinstance(thing, (list, tuple, deque)):
        yield from ((f"[{index}]", value) for index, value in enumerate(thing))
    elif isinstance(thing, Set):
        yield from ((f"[{index}]", value) for index, value in enumerate(sorted(thing, key=repr)))
    for name in _attributes(thing):
        try:
            value = object.__getattribute__(thing, name)
        except AttributeError:
            continue
        yield f".{name}", value


def _attributes(thing: Any) -> list[str]:
    slots = [name for kind in type(thing).__mro__ for name in _listed(vars(kind).get("__slots__", ()))]
    own = getattr(thing, "__dict__", {})
    names = [*(own if isinstance(own, dict) else ()), *slots]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _digest(numbers: bytes) -> str:
    return hashlib.sha256(numbers).hexdigest()[:12]
