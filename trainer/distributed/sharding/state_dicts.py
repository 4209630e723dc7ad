"""State dicts of a sharded module and its optimizers, and of any other containers with ``DTensor``.

In memory they are sharded: each process has its part. For a file they are gathered on rank 0, tensor by tensor
(:func:`gathered`). When a file is loaded, every process memory-maps the whole file, and takes its part
(:func:`spread`). From a folder every process reads only its part, into the tensors that :func:`template` creates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from trainer.common.module_tree import parameters_of
from trainer.common.parts import spread
from trainer.state.containers import KeyPath, mapped


def gathered(value: Any, keep: bool) -> Any:
    """Return ``value`` with each ``DTensor`` in its containers replaced by a whole tensor in CPU memory.

    All processes must call it with the same ``DTensor`` in the same order. Only one whole tensor at a time is on a
    device.

    Args:
        value: containers, such as a checkpoint.
        keep: whether this process needs the whole tensors. Otherwise it gets empty ones.
    """

    def gather(_: KeyPath, tensor: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        mesh = tensor.device_mesh
        on_device = tensor.detach() if tensor.device.type == mesh.device_type else tensor.detach().to(mesh.device_type)
        whole: Tensor = on_device.full_tensor()  # type: ignore[attr-defined]
        return whole.cpu() if keep else whole.new_empty(0, device="cpu")

    return mapped(value, gather)


def template(module: nn.Module, place: KeyPath, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
    """Return an empty tensor, sharded as the parameter is, to read a tensor of a checkpoint into.

    Return None if no sharded parameter has this name and shape.

    Args:
        module: the sharded module.
        place: position of the tensor in the checkpoint, such as ``("state_dict", "net.0.weight")``.
        shape: its shape.
        dtype: its dtype.
    """
    for name in place:
        parameter = _parameter(module, name)
        if isinstance(parameter, DTensor) and parameter.shape == shape:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return None


def _parameter(module: nn.Module, name: str) -> Any:
    """Return the parameter of this name, or None. Averaged weights are saved with the prefix ``module.``."""
    for path in (name, name.removeprefix("module.")):
        owner, _, last = path.rpartition(".")
        try:
            return getattr(module.get_submodule(owner), last)
        except AttributeError:
            continue
    return None


def load_module_state(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load a state dict, whole or sharded, into a sharded module."""
    current = module.state_dict()
    module.load_state_dict({name: spread(value, current.get(name)) for name, value in state.items()}, strict=strict)


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state dict, whole or sharded, into an optimizer of sharded parameters."""
    parameters = parameters_of(optimizer)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    owners = dict(zip(numbers, parameters, strict=False))
    states = {n: mapped(value, partial(_state_like, owners.get(n))) for n, value in state["state"].items()}
    optimizer.load_state_dict({**state, "state": states})


def _state_like(like: Any, _: KeyPath, value: Tensor) -> Tensor:
    """Return this process's part of a state; a tensor of another shape, such as LBFGS's flat ones, is replicated."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor) or not value.ndim or value.shape == like.shape:
        spread_value: Tensor = spread(value, like)
        return spread_value
    mesh = like.device_mesh
    return DTensor.from_local(value.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)


def unreduced_gradients(root: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Return this process's whole gradients that have not been reduced yet, by their sharded parameters.

    They exist inside a window if gradients are reduced only at its end.
    """
    gradients = {}
    for parameter in _fsdp_parameters(root):
        gradient = parameter.unsharded_accumulated_grad
        if gradient is None and hasattr(parameter, "_unsharded_param"):
            gradient = parameter.unsharded_param.grad
        if gradient is not None:
            gradients[parameter.sharded_param] = gradient.detach()
    return gradients


def load_unreduced_gradients(root: nn.Module, gradients: Mapping[nn.Parameter, Tensor]) -> None:
    """Restore the result of :func:`unreduced_gradients`. All processes must call it, even with no gradients."""
    state: Any = root
    state._get_fsdp_state()._lazy_init()
    for module in root.modules():
        if isinstance(module, FSDPModule):  # creates the whole parameters, which own these gradients
            module.unshard()
            module.reshard()
    for parameter in _fsdp_parameters(root):
        if (gradient := gradients.get(parameter.sharded_param)) is not None:
            parameter.unsharded_param.grad = gradient.to(parameter.device)


def _fsdp_parameters(root: nn.Module) -> Iterator[Any]:
    for module in root.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params
