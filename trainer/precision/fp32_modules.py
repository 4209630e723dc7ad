"""Modules that run in float32 inside a model that otherwise runs in float16 or bfloat16.

While a run lasts, each chosen module has a ``forward`` of its own that wraps the one of its class.
Four ways were compared; tests/precision/test_fp32_modules.py has the cases that decided:

- A pair of forward hooks, one entering and one leaving a context. ``torch.compile`` ignores hooks that are
  registered after its first call (``skip_nnmodule_hook_guards``): the module then silently runs in 16 bits. Otherwise
  it cannot trace a context that one function enters and another leaves.
- A generated subclass (``module.__class__ = ...``). Silently lost in a compiled model on torch 2.10; a
  module of such a class cannot be pickled, and ``type(module) is nn.Linear`` is no longer true.
- ``module.forward = partial(around, module.forward)``. Noticed by torch.compile, whether the model, a part of it or
  the module itself was compiled, before or after; but it guards each partial by identity, so that blocks that share a
  graph otherwise are compiled one by one, and from the ninth on not at all.
- ``module.forward = MethodType(forward, module)``, which was chosen: noticed too, and one graph for all blocks. A copy
  of the module, such as weight averaging makes, gets a method of its own, where a closure would use the original's
  weights.

The settings are an attribute of the module. Without that attribute the method calls the class's, so a wrapper that was
put around it during a run may stay in place when the run is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from trainer.errors import PrecisionError, did_you_mean, some
from trainer.precision.dtypes import DefaultDtype, cast, widen
from trainer.walks import has_forward, parts_by_name, parts_of

_SHOWN = 12  # names in an error message
_HOW = "_in_float32"
"""The attribute of a chosen module while a run lasts: whose autocast is off, and the dtype of what comes out."""


def check_patterns(patterns: str | Iterable[str], argument: str = "fp32_modules") -> tuple[str, ...]:
    """The patterns as a tuple; a single string is one pattern.

    Raises:
        PrecisionError: something else than strings, or an empty one.
    """
    given = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in given:
        if not isinstance(pattern, str) or not pattern:
            raise PrecisionError(
                f"Got {argument} with {pattern!r} in it, expected names of modules or patterns of names, such as"
                " ['head', '*.norm']."
            )
    return given


def find_modules(root: nn.Module, patterns: Iterable[str]) -> list[nn.Module]:
    """The modules whose names match, each once, outer ones first.

    Args:
        root: the model. It does not match itself, so ``"*"`` means all of its modules.
        patterns: names as in ``root.named_modules()``, or patterns of them as in ``fnmatch``: ``*`` stands for any
            text, dots included, so ``"*.norm"`` finds every ``norm`` inside of something, and ``"*norm"`` one at the
            top as well. What ``torch.compile`` and activation checkpointing wrap around a module is not part of its
            name. A container without a forward (``nn.ModuleList``) stands for what it contains.

    Raises:
        PrecisionError: a pattern that matches no module, none that is ever called, or a ``ScriptModule``.
    """
    named = parts_by_name(root)
    named.pop("")
    found: dict[nn.Module, None] = {}
    for pattern in patterns:
        names = [name for name in named if fnmatchcase(name, pattern)]
        if not names:
            raise PrecisionError(_no_match(pattern, root, named))
        parts = [part for name in names for part in _called(name, named)]
        if not parts:
            raise PrecisionError(
                f"fp32_modules: {pattern!r} is {names[0]}, a {type(named[names[0]]).__name__} that nobody calls, and"
                " nothing in it is called. Name the module that uses it."
            )
        for part in parts:
            if isinstance(part, torch.jit.ScriptModule):
                raise PrecisionError(
                    f"fp32_modules: {pattern!r} matches {names[0]}, whose forward torch.jit has compiled; it cannot be"
                    " given another. Switch autocast off in its Python code, before it is compiled."
                )
        found.update(dict.fromkeys(parts))
    _refuse_attention_projections(named, found)
    return [module for module in dict.fromkeys(named.values()) if module in found]


@contextmanager
def in_float32(modules: Iterable[nn.Module], device_type: str, back_to: torch.dtype | None = None) -> Iterator[None]:
    """Run the forward of each module in float32 while the context is open.

    Without autocast, with its floating-point inputs as float32 (also those inside of lists, tuples, dicts and
    dataclasses; float64 stays), and with float32 for the tensors it makes.

    Args:
        modules: from :func:`find_modules`. One inside of another is fine.
        device_type: of the device whose autocast is switched off.
        back_to: what floating-point outputs are cast to, for models with weights of that dtype, in which the next
            layer expects it; None leaves them as they are, for autocast to cast.
    """
    modules = list(modules)
    inner = {part for module in modules for part in module.modules() if part is not module}
    with ExitStack() as stack:
        if modules:
            # In evaluation, torch's transformer layers compute from their parts' weights without calling them.
            stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
        for module in modules:
            earlier: Any = vars(module).get("forward")  # one of its own, as compiled LightningModules have
            earlier_how = vars(module).get(_HOW)
            plain = earlier is None or getattr(earlier, "__func__", None) is forward
            setattr(module, _HOW, (device_type, None if module in inner else back_to))
            module.forward = MethodType(forward, module) if plain else partial(_run, module, earlier, ())
            stack.callback(_restore, module, module.forward, earlier, earlier_how)
        yield


def running_in_float32(root: nn.Module) -> set[nn.Module]:
    """The modules of ``root`` that run in float32 because a run's ``fp32_modules`` says so, their parts included."""
    return parts_of(*(module for module in root.modules() if _HOW in vars(module)))


def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """The ``forward`` of a chosen module. One function for all of them, and of this name for the sake of pickle."""
    return _run(self, type(self).forward, (self,), *args, **kwargs)


def _run(module: nn.Module, own: Callable[..., Any], first: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> Any:
    how: tuple[str, torch.dtype | None] | None = getattr(module, _HOW, None)
    if how is None:  # the run is over
        return own(*first, *args, **kwargs)
    device_type, back_to = how
    with torch.autocast(device_type, enabled=False), DefaultDtype(torch.float32):
        output = own(*first, *map(widen, args), **{name: widen(value) for name, value in kwargs.items()})
    return output if back_to is None else cast(output, back_to)


def _restore(module: nn.Module, ours: Any, earlier: Any, earlier_how: Any) -> None:
    _put_back(module, _HOW, earlier_how)
    if vars(module).get("forward") is ours:  # nobody has put another around it meanwhile
        _put_back(module, "forward", earlier)


def _put_back(module: nn.Module, name: str, value: Any) -> None:
    if value is None:
        delattr(module, name)
    else:
        setattr(module, name, value)


def _called(name: str, named: dict[str, nn.Module]) -> list[nn.Module]:
    """The module of that name; what it contains where it is a mere container, which nobody calls."""
    if has_forward(named[name]):
        return [named[name]]
    return [module for inside, module in named.items() if inside.startswith(f"{name}.") and has_forward(module)]


def _refuse_attention_projections(named: dict[str, nn.Module], found: dict[nn.Module, None]) -> None:
    covered = {part for module in found for part in module.modules() if part is not module}
    for name, module in named.items():
        if isinstance(module, nn.MultiheadAttention) and module.out_proj in found and module.out_proj not in covered:
            raise PrecisionError(
                f"fp32_modules: {name}.out_proj is never called, nn.MultiheadAttention reads its weights. Name the"
                f" attention: {name!r}."
            )


def _no_match(pattern: str, root: nn.Module, named: dict[str, nn.Module]) -> str:
    deeper = {f"*.{name.rpartition('.')[2]}" for name in named if "." in name}
    names = list(named)
    return (
        f"fp32_modules: {pattern!r} matches no module of {type(root).__name__}."
        f"{did_you_mean(pattern, [*names, *sorted(deeper)])} Its modules: {some(names, _SHOWN) or 'none'}."
    )
