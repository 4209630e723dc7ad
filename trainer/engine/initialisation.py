"""Modules that were made on the meta device: they get memory, and values, where they are to run.

``configure_model`` may make its modules inside of ``with torch.device("meta")``: without memory. On every engine they
are filled in the same way, so that each starts from the same weights: by ``init_weights()`` of the LightningModule, if
it has that method, which is to fill every parameter and buffer; otherwise by each module's own ``reset_parameters()``,
in the order of ``modules()``, and by ``_init_weights(module)`` of a module around it (Hugging Face's models have one).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainer.engine.parts import local
from trainer.errors import ConfigurationError, some
from trainer.walks import owned_tensors


def is_on_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer has no memory yet."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def initialise(root: nn.Module, device: torch.device, finish: Callable[[Tensor, Tensor], None] | None = None) -> None:
    """Give memory and values to all that has none.

    Args:
        root: the LightningModule.
        device: where.
        finish: where parameters are sharded, called with (the whole of one, which has been initialised; the sharded
            one, which has memory). All processes come here. None where they are whole.

    Raises:
        ConfigurationError: nobody has filled a parameter or buffer, which is named.
    """
    if not is_on_meta(root):
        return
    empty = [(one.owner, one.name, one.path) for one in owned_tensors(root) if one.tensor.is_meta]
    unfilled: list[str] = []
    if callable(fill := getattr(root, "init_weights", None)):
        _give_memory(root, device, sharded=finish is not None)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*DTensor random operators may not have complete support.*")
            try:
                fill()
            except UserWarning as problem:
                raise ConfigurationError(
                    f"{type(root).__name__}.init_weights() draws random numbers for parameters that are sharded over"
                    " CPUs, where torch would give each process the same ones. Draw them by the parameter's name from"
                    " a generator, or leave it to each module's reset_parameters() and name the method differently."
                ) from problem
        found = [(part, name, outer, getattr(part, name)) for part, name, outer in empty]
        unfilled = [_named(part, name, outer) for part, name, outer, tensor in found if _is_empty(tensor)]
    else:
        _give_memory(root, device, sharded=finish is not None)
        unfilled = list(_fill_each(root, empty, device, finish))
    if unfilled:
        raise ConfigurationError(
            f"Got parameters or buffers on the meta device that nobody has given values: {some(unfilled, 8)}."
            " Expected a method reset_parameters() of the modules that own them, or init_weights() of the"
            " LightningModule, which fills all. Or make them outside of torch.device('meta')."
        )


def _fill_each(
    root: nn.Module,
    empty: list[tuple[nn.Module, str, str]],
    device: torch.device,
    finish: Callable[[Tensor, Tensor], None] | None,
) -> Iterator[str]:
    """Fill each module by its own means. Yields the names of what that has left out."""
    by_part: dict[nn.Module, list[tuple[str, str]]] = {}
    for part, name, outer in empty:
        by_part.setdefault(part, []).append((name, outer))
    around = _around(root)
    for part, members in by_part.items():
        sharded: dict[str, nn.Parameter] = {}
        if finish is not None:
            sharded = {name: one for name, _ in members if (one := part._parameters.get(name)) is not None}
            part._parameters.update({name: _with_memory(one, device) for name, one in sharded.items()})
        fillers = [getattr(part, "reset_parameters", None), getattr(around.get(part), "_init_weights", None)]
        with torch.no_grad():
            if callable(fillers[0]):
                fillers[0]()
            if callable(fillers[1]):
                fillers[1](part)
        for name, outer in members:
            tensor = getattr(part, name)
            if _is_empty(tensor) or not (tensor.is_floating_point() or any(map(callable, fillers))):
                yield _named(part, name, outer)
            if finish is not None and name in sharded:
                finish(tensor.detach(), sharded[name])
                part._parameters[name] = sharded[name]


def _around(root: nn.Module) -> dict[nn.Module, nn.Module]:
    """For each module the innermost one around it, or itself, that has an ``_init_weights`` for its parts."""
    found: dict[nn.Module, nn.Module] = {}
    for outer in root.modules():
        if callable(getattr(outer, "_init_weights", None)):
            found.update(dict.fromkeys(outer.modules(), outer))
    return found


def _give_memory(root: nn.Module, device: torch.device, *, sharded: bool) -> None:
    """Memory for all that has none, filled with NaN: what stays so was left out."""
    if sharded:
        apply: Any = root._apply  # as `to_empty` does; FSDP takes its new shards from here
        apply(lambda tensor: _blank_part(tensor, device) if tensor.is_meta else tensor)
        return
    made: dict[int, nn.Parameter] = {}  # what several modules share stays shared
    for _, part, name, tensor in owned_tensors(root):
        if tensor.is_meta and isinstance(tensor, nn.Parameter):
            if id(tensor) not in made:
                made[id(tensor)] = _with_memory(tensor, device)
            part._parameters[name] = made[id(tensor)]
        elif tensor.is_meta:
            part._buffers[name] = _blank(tensor, device)


def _with_memory(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """The parameter, with memory and its attributes."""
    made = nn.Parameter(_blank(parameter, device), requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made


def _blank(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for the whole of ``tensor``: NaN, or 0 where there is no NaN."""
    value = torch.nan if tensor.is_floating_point() else 0
    return torch.full(tensor.shape, value, dtype=tensor.dtype, device=device)


def _blank_part(tensor: Tensor, device: torch.device) -> Tensor:
    """The same for this process's part of it."""
    blank = torch.empty_like(tensor, device=device)
    with torch.no_grad():
        local(blank).fill_(torch.nan if tensor.is_floating_point() else 0)
    return blank


def _is_empty(tensor: Any) -> bool:
    part = local(tensor).detach()
    return bool(part.is_meta or (part.is_floating_point() and part.isnan().any()))


def _named(part: nn.Module, name: str, outer: str) -> str:
    return f"{outer}.{name} ({type(part).__name__})" if outer else name
