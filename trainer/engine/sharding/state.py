"""Whole state dicts of a sharded module and its optimizers: gathered on rank 0, and spread when they are loaded.

All processes call these together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def module_state(module: nn.Module) -> dict[str, Any]:
    """The whole module's state dict, in the CPU's memory of rank 0; elsewhere its tensors are left out."""
    return {name: _gathered(value) for name, value in module.state_dict().items()}


def load_module_state(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load a whole state dict into a sharded module."""
    now = module.state_dict()
    spread = {name: _spread(value, now.get(name)) for name, value in state.items()}
    module.load_state_dict(spread, strict=strict)


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """One optimizer's whole state dict, in the CPU's memory of rank 0."""
    found: dict[str, Any] = _map(optimizer.state_dict(), _gathered)
    return found


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a whole state dict into an optimizer of sharded parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    spread = {
        index: {
            key: _spread(value, parameters[index])
            if isinstance(value, Tensor) and value.shape == parameters[index].shape
            else value
            for key, value in one.items()
        }
        for index, one in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": spread})


def _gathered(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    whole: Tensor = value.full_tensor().detach()
    return whole.cpu() if value.device_mesh.get_rank() == 0 else whole.new_empty(0)


def _spread(value: Any, like: Any) -> Any:
    """``value``, sharded as ``like`` is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _map(one, function) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map(one, function) for one in value)
    return function(value)
