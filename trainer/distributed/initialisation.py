"""Materialize and initialize modules that were created on the meta device.

``configure_model`` may create its modules inside ``with torch.device("meta")``, without memory. Every engine
initializes them in the same way, so that each starts from the same weights. If the LightningModule has a method
``init_weights()``, that is called, and must fill every parameter and buffer. Otherwise, the modules are initialized in
the order of ``modules()``: each with its own ``reset_parameters()``, then with ``_init_weights(module)`` of an
enclosing module (which Hugging Face's models have).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainer.common.module_tree import owned_tensors
from trainer.common.parts import local
from trainer.errors import ConfigurationError, join_first

_INTEGERS = (torch.int16, torch.int32, torch.int64)
"""Dtypes with a smallest integer that no buffer contains."""


def initialise(root: nn.Module, device: torch.device, finish: Callable[[Tensor, Tensor], None] | None = None) -> None:
    """Allocate and initialize all parameters and buffers on the meta device.

    Args:
        root: the LightningModule.
        device: the target device.
        finish: if parameters are sharded, called with (a whole initialized parameter, the sharded parameter with
            memory). All processes call it. None if parameters are not sharded. Default: None.

    Raises:
        ConfigurationError: if a parameter or buffer was not initialized. The message names it. Booleans and integers of
            8 bits are checked only if no method initializes their module.
    """
    empty = [(owned.owner, owned.name, owned.path) for owned in owned_tensors(root) if owned.tensor.is_meta]
    if not empty:
        return
    _allocate(root, device, sharded=finish is not None)
    if callable(fill := getattr(root, "init_weights", None)):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*DTensor random operators may not have complete support.*")
            try:
                fill()
            except UserWarning as problem:
                raise ConfigurationError(
                    f"{type(root).__name__}.init_weights() draws random numbers for parameters that are sharded over"
                    " CPUs, for which torch would draw the same numbers in each process. Draw them from a generator"
                    " seeded by the parameter's name, or use the reset_parameters() of the modules and rename this"
                    " method."
                ) from problem
        tensors = [(owner, name, outer, getattr(owner, name)) for owner, name, outer in empty]
        unfilled = [_named(owner, name, outer) for owner, name, outer, tensor in tensors if _is_empty(tensor)]
    else:
        unfilled = list(_fill_each(root, empty, device, finish))
    if unfilled:
        raise ConfigurationError(
            f"Got parameters or buffers on the meta device without values: {join_first(unfilled, 8)}. Expected a method"
            " reset_parameters() of the modules that own them, or init_weights() of the LightningModule, which"
            " initializes all. Or create them outside of torch.device('meta')."
        )


def _fill_each(
    root: nn.Module,
    empty: list[tuple[nn.Module, str, str]],
    device: torch.device,
    finish: Callable[[Tensor, Tensor], None] | None,
) -> Iterator[str]:
    """Initialize each module with its own methods. Yields the names of tensors that they did not fill."""
    by_part: dict[nn.Module, list[tuple[str, str]]] = {}
    for owner, name, outer in empty:
        by_part.setdefault(owner, []).append((name, outer))
    around = _initializers(root)
    for owner, members in by_part.items():
        sharded: dict[str, nn.Parameter] = {}
        if finish is not None:
            sharded = {name: parameter for name, _ in members if (parameter := owner._parameters.get(name)) is not None}
            owner._parameters.update({name: _allocated_parameter(empty, device) for name, empty in sharded.items()})
        fillers = [getattr(owner, "reset_parameters", None), getattr(around.get(owner), "_init_weights", None)]
        with torch.no_grad():
            if callable(fillers[0]):
                fillers[0]()
            if callable(fillers[1]):
                fillers[1](owner)
        for name, outer in members:
            tensor = getattr(owner, name)
            if _is_empty(tensor) or not (tensor.is_floating_point() or any(map(callable, fillers))):
                yield _named(owner, name, outer)
            if finish is not None and name in sharded:
                finish(tensor.detach(), sharded[name])
                owner._parameters[name] = sharded[name]


def _initializers(root: nn.Module) -> dict[nn.Module, nn.Module]:
    """Map each module to the innermost enclosing module, or itself, that has ``_init_weights``."""
    initializers: dict[nn.Module, nn.Module] = {}
    for outer in root.modules():
        if callable(getattr(outer, "_init_weights", None)):
            initializers.update(dict.fromkeys(outer.modules(), outer))
    return initializers


def _allocate(root: nn.Module, device: torch.device, *, sharded: bool) -> None:
    """Allocate the tensors on the meta device and mark them, to detect those that stay uninitialized."""
    if sharded:
        apply: Any = root._apply  # as `to_empty` does; FSDP takes its new shards from here
        apply(lambda tensor: _allocated_shard(tensor, device) if tensor.is_meta else tensor)
        return
    allocated: dict[int, nn.Parameter] = {}  # by id, so that shared parameters stay shared
    for _, owner, name, tensor in owned_tensors(root):
        if tensor.is_meta and isinstance(tensor, nn.Parameter):
            if id(tensor) not in allocated:
                allocated[id(tensor)] = _allocated_parameter(tensor, device)
            owner._parameters[name] = allocated[id(tensor)]
        elif tensor.is_meta:
            owner._buffers[name] = _allocated(tensor, device)


def _allocated_parameter(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a parameter with allocated memory, and with the attributes of ``parameter``."""
    allocated = nn.Parameter(_allocated(parameter, device), requires_grad=parameter.requires_grad)
    vars(allocated).update(vars(parameter))
    return allocated


def _allocated(tensor: Tensor, device: torch.device) -> Tensor:
    """Return memory for the whole of ``tensor``, filled with its :func:`_mark`."""
    return torch.full(tensor.shape, _mark(tensor), dtype=tensor.dtype, device=device)


def _allocated_shard(tensor: Tensor, device: torch.device) -> Tensor:
    """Return memory for this process's part of ``tensor``, filled with its :func:`_mark`."""
    blank = torch.empty_like(tensor, device=device)
    with torch.no_grad():
        local(blank).fill_(_mark(tensor))
    return blank


def _mark(tensor: Tensor) -> float:
    """Return the value of an uninitialized element: NaN, the smallest integer, or 0 for other dtypes."""
    if tensor.is_floating_point():
        return torch.nan
    return torch.iinfo(tensor.dtype).min if tensor.dtype in _INTEGERS else 0


def _is_empty(tensor: Any) -> bool:
    shard = local(tensor).detach()
    if shard.is_meta or shard.dtype in _INTEGERS:
        return bool(shard.is_meta or (shard == _mark(shard)).any())
    return bool(shard.is_floating_point() and shard.isnan().any())


def _named(owner: nn.Module, name: str, outer: str) -> str:
    return f"{outer}.{name} ({type(owner).__name__})" if outer else name
