"""Modules that run in float32 inside a model that otherwise runs in float16 or bfloat16.

During a run, each chosen module has its own ``forward``, which wraps that of its class. Four implementations were
compared; tests/precision/test_fp32_modules.py has the cases that decided:

- A pair of forward hooks, one entering and one leaving a context. ``torch.compile`` ignores hooks that are registered
  after its first call (``skip_nnmodule_hook_guards``), so the module silently runs in 16 bits. With earlier hooks it
  fails, because it cannot trace a context that one function enters and another leaves.
- A generated subclass (``module.__class__ = ...``). It is silently lost in a compiled model on torch 2.10; a module of
  such a class cannot be pickled, and ``type(module) is nn.Linear`` is no longer true.
- ``module.forward = partial(around, module.forward)``. torch.compile detects it, whether the model, a part of it or the
  module itself is compiled, before the replacement or after it. But it guards each partial by identity, so blocks that
  could share a graph are compiled one by one, and from the ninth on not at all.
- ``module.forward = MethodType(forward, module)``, which was chosen. torch.compile detects it, too, and compiles one
  graph for all blocks. A copy of the module, such as for weight averaging, gets its own method, while a closure would
  use the original's weights.

The settings are an attribute of the module. Without that attribute, the method calls the ``forward`` of the class.
Therefore other code may wrap the method during a run and keep its wrapper after the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from trainer.common.module_tree import all_modules, has_forward, modules_by_name
from trainer.common.session import Session
from trainer.errors import PrecisionError, did_you_mean, join_first
from trainer.precision.dtypes import DefaultDtype, cast, widen

_MAX_NAMES = 12  # names in an error message
_SETTING = "_in_float32"
"""Attribute of a chosen module during a run: the device type to disable autocast for, and the dtype of the outputs."""


def check_patterns(patterns: str | Iterable[str], argument: str = "fp32_modules") -> tuple[str, ...]:
    """Return the patterns as a tuple; a single string is one pattern.

    Raises:
        PrecisionError: if a pattern is not a string, or is empty.
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
    """Return the modules with matching names, each once, outer modules first.

    Args:
        root: the model. It does not match itself, so ``"*"`` matches all of its modules.
        patterns: names as in ``root.named_modules()``, or patterns of them as in ``fnmatch``: ``*`` matches any text,
            including dots, so ``"*.norm"`` matches every nested ``norm``, and ``"*norm"`` also one at the top level.
            The wrappers of ``torch.compile`` and activation checkpointing are not part of a name. A container without a
            forward (``nn.ModuleList``) is replaced by its modules.

    Raises:
        PrecisionError: if a pattern matches no module, only modules that are never called, or a ``ScriptModule``.
    """
    named = modules_by_name(root)
    named.pop("")
    chosen: dict[nn.Module, None] = {}
    for pattern in patterns:
        names = [name for name in named if fnmatchcase(name, pattern)]
        if not names:
            raise PrecisionError(_no_match(pattern, root, named))
        modules = [module for name in names for module in _called(name, named)]
        if not modules:
            raise PrecisionError(
                f"fp32_modules: {pattern!r} is {names[0]}, a {type(named[names[0]]).__name__} that is never called."
                " Name the module that uses it."
            )
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                raise PrecisionError(
                    f"fp32_modules: {pattern!r} matches {names[0]}, which torch.jit has compiled, so its forward"
                    " cannot be replaced. Disable autocast in its Python code before compiling."
                )
        chosen.update(dict.fromkeys(modules))
    _refuse_attention_projections(named, chosen)
    return [module for module in dict.fromkeys(named.values()) if module in chosen]


@contextmanager
def in_float32(modules: Iterable[nn.Module], device_type: str, back_to: torch.dtype | None = None) -> Iterator[None]:
    """Run the forward of each module in float32 while the context is open.

    Autocast is disabled, floating-point inputs are cast to float32 (also inside of lists, tuples, dicts and
    dataclasses; float64 is kept), and new tensors are float32.

    Args:
        modules: from :func:`find_modules`. They may contain each other.
        device_type: device type to disable autocast for.
        back_to: dtype to cast floating-point outputs to, for models with weights of that dtype, because the next layer
            expects it. Default: None, outputs are not cast, because autocast casts them.
    """
    modules = list(modules)
    inner = {submodule for module in modules for submodule in module.modules() if submodule is not module}
    with Session() as session:
        if modules:
            # In evaluation, torch's transformer layers use the weights of their submodules without calling them.
            session.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
        for module in modules:
            earlier: Any = vars(module).get("forward")  # its own forward, as compiled LightningModules have
            session.callback(_restore_setting, module, vars(module).get(_SETTING))
            plain = earlier is None or getattr(earlier, "__func__", None) is forward
            setattr(module, _SETTING, (device_type, None if module in inner else back_to))
            own_forward = MethodType(forward, module) if plain else partial(_run, module, earlier, ())
            session.replace(module, "forward", own_forward)
        yield


def running_in_float32(root: nn.Module) -> set[nn.Module]:
    """Return the modules of ``root`` that run in float32 because of ``fp32_modules``, including their submodules."""
    return all_modules(*(module for module in root.modules() if _SETTING in vars(module)))


def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Replace ``forward`` of a chosen module. One function for all modules; pickle requires this name."""
    return _run(self, type(self).forward, (self,), *args, **kwargs)


def _run(module: nn.Module, inner: Callable[..., Any], first: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> Any:
    setting: tuple[str, torch.dtype | None] | None = getattr(module, _SETTING, None)
    if setting is None:  # the run is over
        return inner(*first, *args, **kwargs)
    device_type, output_dtype = setting
    with torch.autocast(device_type, enabled=False), DefaultDtype(torch.float32):
        output = inner(*first, *map(widen, args), **{name: widen(value) for name, value in kwargs.items()})
    return output if output_dtype is None else cast(output, output_dtype)


def _restore_setting(module: nn.Module, earlier: Any) -> None:
    if earlier is None:
        delattr(module, _SETTING)
    else:
        setattr(module, _SETTING, earlier)


def _called(name: str, named: dict[str, nn.Module]) -> list[nn.Module]:
    """Return the module of this name; if it is a container without a forward, the modules in it."""
    if has_forward(named[name]):
        return [named[name]]
    return [module for inside, module in named.items() if inside.startswith(f"{name}.") and has_forward(module)]


def _refuse_attention_projections(named: dict[str, nn.Module], chosen: dict[nn.Module, None]) -> None:
    covered = {submodule for module in chosen for submodule in module.modules() if submodule is not module}
    for name, module in named.items():
        if isinstance(module, nn.MultiheadAttention) and module.out_proj in chosen and module.out_proj not in covered:
            raise PrecisionError(
                f"fp32_modules: {name}.out_proj is never called; nn.MultiheadAttention reads its weights. Name the"
                f" attention: {name!r}."
            )


def _no_match(pattern: str, root: nn.Module, named: dict[str, nn.Module]) -> str:
    deeper = {f"*.{name.rpartition('.')[2]}" for name in named if "." in name}
    names = list(named)
    return (
        f"fp32_modules: {pattern!r} matches no module of {type(root).__name__}."
        f"{did_you_mean(pattern, [*names, *sorted(deeper)])} Its modules: {join_first(names, _MAX_NAMES) or 'none'}."
    )
