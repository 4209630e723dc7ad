"""Decide whether autocast caches the 16-bit casts of weights, so that no forward pass uses an outdated cast.

Autocast keeps the 16-bit copy of a weight until the outermost autocast ends, so that a weight used twice is cast once.
This is wrong in two cases.

**Weights that change in between.** The cache is keyed by tensor and ignores its version. If a training step swaps in
averaged weights for one forward pass, or negates a weight, it therefore gets the results of the old weights.
:class:`CastCache` clears the cache when an optimizer has stepped and when a state dict has been loaded. Other changes
have no event, so it runs the first training steps under :class:`WeightWatch`. This detects weights that a step uses
several times, and weights that change in between. The cache is then kept only if steps use a weight several times.
Steps that use each weight once have bit-identical results and the same speed without the cache.

**Casts without a graph.** torch 2.10 also keeps a copy made without gradients (under ``no_grad`` or ``inference_mode``,
or inside the ``forward`` of an ``autograd.Function``) and reuses it in a later forward with gradients. The weight then
gets no gradient, or a wrong one, without an error (torch #65766, #112583, #120483). On such a torch, the cache is
always disabled. Since torch 2.11, the copy has a graph even if it is made without gradients.

Other ways to detect changed weights fail: version counters and checksums miss weights that are swapped in and back, a
``TorchDispatchMode`` does not see ``weight.data = other`` and disables ``torch.compile``, and a repeated step would
repeat its side effects. The decision is part of a checkpoint, because gradients depend on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import cache
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainer.common.session import Session
from trainer.errors import PrecisionError

__all__ = ["CastCache", "WeightWatch", "forget_casts", "loses_gradients", "unwatched"]

WATCHED_STEPS = 16
"""Number of training steps that are watched before the decision."""

_NEVER_CAST = {"__get__", "__set__", "clone", "detach"}
"""Functions whose arguments autocast does not cast. It does not cast those of in-place operations either."""

_watches: list[WeightWatch] = []
"""Active watches, innermost last."""


class CastCache:
    """Decides whether training steps run with autocast's weight cache.

    With ``enabled=None`` the first training steps are watched. If a step changes a weight between two uses, the watch
    clears the cache at the second use, so the step is computed correctly. The cache is then disabled for the rest of
    the run. Otherwise it stays enabled if a step used a weight several times, and such a run is checked again when
    :meth:`watch` is called. Modules with compiled or scripted parts, which the watch cannot inspect, train without the
    cache. Evaluation runs without it. This changes no result, because as long as weights do not change, the cache
    affects only gradients, which evaluation does not compute.

    Args:
        device_type: device type of the weights.
        dtype: 16-bit dtype that autocast computes in.
        module: module to train.
        enabled: whether to use the cache, in training and evaluation; None decides as above. With torch 2.10, it is
            never used.
        advice: how to disable the cache, for the error message.

    Attributes:
        training: context of the next training step.
        evaluation: context of evaluation steps.
        enabled: the decision; None while the first steps are watched.
    """

    def __init__(
        self, device_type: str, dtype: torch.dtype, module: nn.Module, enabled: bool | None, advice: str
    ) -> None:
        if loses_gradients():
            enabled = False
        self._cached = torch.autocast(device_type, dtype=dtype)
        self._uncached = torch.autocast(device_type, dtype=dtype, cache_enabled=False)
        self._watch = WeightWatch(self._cached, self._finish_step)
        self.module = module
        self._advice = advice
        self._decides = enabled is None
        self._steps_left = WATCHED_STEPS
        self._reuses_weights = False
        self._hooks = Session()
        self.enabled: bool | None = enabled
        self.training: AbstractContextManager[object] = self._cached
        self.evaluation: AbstractContextManager[object] = self._cached if enabled else self._uncached
        self._decide(enabled)

    def watch(self) -> None:
        """Watch the next training step, unless the cache is disabled or was enabled by the user."""
        if not self._decides or self.enabled is False:
            return
        if _hides_operations(self.module):
            self._decide(False)
        else:
            self.training = self._watch

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the decision and the progress towards it; {} if the user decided."""
        if not self._decides:
            return {}
        return {"enabled": self.enabled, "steps_left": self._steps_left, "reuses_weights": self._reuses_weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned, unless the user decides in this run or the saved run."""
        if self._decides and "enabled" in state:
            self._steps_left, self._reuses_weights = state["steps_left"], state["reuses_weights"]
            self._decide(state["enabled"])

    def _decide(self, enabled: bool | None) -> None:
        self.enabled = enabled
        self.training = self._uncached if enabled is False else self._cached
        self._hooks.close()
        if enabled is not False:
            self._hooks.watch_steps(after=forget_casts)
        if enabled:
            for submodule in self.module.modules():
                handle = submodule.register_load_state_dict_post_hook(forget_casts)  # type: ignore[no-untyped-call]
                self._hooks.callback(handle.remove)
        if enabled is None:
            self.training = self._watch

    def _finish_step(self, reuses_weights: bool, changes_weights: bool) -> None:
        """Decide after a watched step.

        Raises:
            PrecisionError: if the step changed weights between two uses, and earlier steps were not watched.
        """
        if self.enabled and changes_weights:
            raise PrecisionError(
                "A step of this module changes weights between two forward passes that use them. Autocast's weight"
                f" cache hides such changes; it was enabled because the first {WATCHED_STEPS} training steps made"
                " none, and steps since the last check may have used outdated weights. Disable the cache, with"
                f" {self._advice}, and restart, or resume from a checkpoint before the first change."
            )
        if self.enabled:
            self.training = self._cached
            return
        self._steps_left -= 1
        self._reuses_weights |= reuses_weights
        if changes_weights:
            self._decide(False)
        elif self._steps_left <= 0:
            self._decide(self._reuses_weights)


class WeightWatch(TorchFunctionMode):
    """Autocast that detects weights that are used several times, and weights that change in between.

    It inspects every operation. Reusable, but not re-entrant.

    A weight is a leaf tensor that requires a gradient. It has changed if one of these is not the same as at its last
    use: its version, its memory, or the number of in-place operations on other tensors with the same memory
    (``weight.data``). The cache is then cleared before the weight is used again, so the step is computed as if there
    were no cache. No kernel is launched, and there is no host-device synchronization.

    Args:
        autocast: autocast with an enabled cache.
        finish: called at the end of a step that raised no error. The arguments are whether the step used a weight
            several times, and whether it used one that had changed since its last use.
    """

    def __init__(self, autocast: AbstractContextManager[object], finish: Callable[[bool, bool], None]) -> None:
        super().__init__()
        self._autocast = autocast
        self._finish = finish
        self._reuses = self._changes = False
        self._used: dict[int, tuple[Tensor, object]] = {}  # weights that may be in the cache, and their last state
        self._writes: Counter[object] = Counter()  # in-place operations by memory

    def __enter__(self) -> Self:
        self._reuses = self._changes = False
        self._autocast.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        _watches.append(self)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _watches.remove(self)
        super().__exit__(error_type, error, trace)  # type: ignore[no-untyped-call]
        self._autocast.__exit__(error_type, error, trace)
        self.forget()
        self._writes.clear()
        if error is None:
            self._finish(self._reuses, self._changes)

    def __deepcopy__(self, memo: dict[int, Any]) -> AbstractContextManager[object]:
        return deepcopy(self._autocast, memo)  # `trainer.diagnosis` copies it to replay a batch, which is not watched

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # compiled graphs contain their casts, and use no cache
        if torch.compiler.is_compiling() or self not in _watches:
            return func(*args, **kwargs)
        tensors = _leaf_tensors(args, kwargs)
        versions = list(map(_version_of, tensors))
        weights = [tensor for tensor in tensors if tensor.requires_grad]
        changed = [weight for weight in weights if self._has_changed(weight)]
        if changed:
            torch.clear_autocast_cache()
        result = func(*args, **kwargs)
        written = [tensor for tensor, version in zip(tensors, versions, strict=True) if _version_of(tensor) != version]
        self._writes.update(map(_memory_of, written))
        if _may_cast(func) and isinstance(result, (Tensor, list, tuple)):
            self._changes |= bool(changed)
            for weight in weights:
                self._reuses |= id(weight) in self._used
                self._used[id(weight)] = weight, self._state_of(weight)
        return result

    def forget(self) -> None:
        """Forget which weights were used, because the cache has been cleared."""
        self._used.clear()

    def _has_changed(self, weight: Tensor) -> bool:
        return id(weight) in self._used and self._used[id(weight)][1] != self._state_of(weight)

    def _state_of(self, weight: Tensor) -> object:
        memory = _memory_of(weight)
        return _version_of(weight), memory, self._writes[memory], self._writes[None]


def forget_casts(*_: Any) -> None:
    """Clear autocast's cache after weights have changed. Can be used as a hook."""
    torch.clear_autocast_cache()
    for watch in _watches:
        watch.forget()


@contextmanager
def unwatched() -> Iterator[None]:
    """Hide operations that do not belong to the running training step, such as a replay, from its watch.

    The cache is cleared afterwards.
    """
    watches = _watches[:]
    _watches.clear()
    try:
        yield
    finally:
        _watches[:] = watches
        forget_casts()


def _leaf_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors without a graph among the arguments and in lists of them."""
    leaves = []
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Tensor) and item.is_leaf and not item.is_inference():
                leaves.append(item)
    return leaves


def _version_of(tensor: Tensor) -> int:
    return tensor._version  # noqa: SLF001 - in-place operations; nothing public counts them


def _memory_of(tensor: Tensor) -> object:
    """Return a key that is equal for tensors that share memory; None for a DTensor, which may share any memory."""
    if hasattr(tensor, "_local_tensor"):
        return None
    try:
        return tensor.untyped_storage()._cdata  # noqa: SLF001 - stays the same when FSDP frees and allocates it
    except (RuntimeError, NotImplementedError):  # sparse tensors have no storage
        return id(tensor)


def _may_cast(func: Callable[..., Any]) -> bool:
    """Return whether autocast may cast the arguments of a function."""
    name = getattr(func, "__name__", "")
    return name not in _NEVER_CAST and (not name.endswith("_") or name.endswith("__"))


def _hides_operations(module: nn.Module) -> bool:
    """Return whether a part of the module runs without Python, so that a torch function mode does not see it."""
    if getattr(module, "_compiler_ctx", None) is not None:
        return True
    for submodule in module.modules():
        if hasattr(submodule, "_orig_mod") or getattr(submodule, "_compiled_call_impl", None) is not None:
            return True
        forward = vars(submodule).get("forward")
        if hasattr(forward, "_torchdynamo_orig_callable") or hasattr(forward, "_compiled"):
            return True
        if isinstance(submodule, torch.jit.ScriptModule):
            return True
    return False


@cache
def loses_gradients() -> bool:
    """Return whether this torch reuses casts made without gradients. Tested once per process, on one weight."""
    with torch.inference_mode(False), torch.autocast("cpu", dtype=torch.bfloat16):
        weight = torch.ones(1, 1, requires_grad=True)
        with torch.no_grad():
            torch.mm(weight, weight)
        with torch.enable_grad():
            return not torch.mm(weight, weight).requires_grad
