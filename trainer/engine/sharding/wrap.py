"""Sharding a module over processes, and putting it back.

A block is what FSDP2 gathers and frees at a time: its parameters are whole while it computes, and sharded otherwise.
What belongs to no block belongs to the root, the module itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.engine.sharding.idle import IdlePasses, sharded_modules

Blocks = Iterable[type[nn.Module]] | Callable[[nn.Module, DeviceMesh], Any] | None


_BUCKET = 250 * 2**20
"""Bytes of buffers that are sent at a time, as in DDP."""


@dataclass(frozen=True)
class Sharding:
    """What is sharded, and how. See ``FSDP2Strategy``, whose arguments these are."""

    blocks: Blocks = None
    reshard_after_forward: bool | int | None = None
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    cpu_offload: bool = False


class ShardedModule:
    """A module that is sharded, until :meth:`put_back`.

    All processes come here together, with modules of the same parameters: rank 0's values are sent to all first, so
    that every process starts from what DDP starts from.

    Args:
        module: whole; it stays the same object.
        mesh: of the processes, one dimension to shard over; or two, (replicas, shards).
        device: where to compute.
        settings: what is sharded, and how.

    Attributes:
        root: the module.
        idle: takes part in the other processes' passes, where this one has no batch.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, device: torch.device, settings: Sharding) -> None:
        self.root = module
        self.mesh = mesh
        self._owners = _owners(module)
        self._device = device
        self._settings = settings
        self._blocks = set() if callable(settings.blocks) else set(find_blocks(module, settings.blocks))
        self._visit(module, set())
        self._buffers = _persistent_buffers(module)
        self.idle = IdlePasses(module, self.before_forward)

    def _visit(self, module: nn.Module, seen: set[nn.Module]) -> None:
        """Shard the blocks, inner ones first: no more than one of them is whole on the device at a time."""
        if module in seen:
            return
        seen.add(module)
        for child in module.children():
            self._visit(child, seen)
        if module is self.root or module in self._blocks:
            self._shard(module)

    def _shard(self, module: nn.Module) -> None:
        settings, is_root = self._settings, module is self.root
        _send_from_first(module, self._device)
        policy = (
            replace(settings.policy, cast_forward_inputs=False) if is_root else settings.policy
        )  # targets are in it
        fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=settings.reshard_after_forward,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy() if settings.cpu_offload else OffloadPolicy(),
        )
        if is_root:
            module.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # of batches without a loss
        for owner, name, parameter in self._owners:  # what was copied into shards takes memory no more
            if isinstance(owner._parameters[name], DTensor) and parameter.numel():
                parameter.data = parameter.data.new_empty(0)

    def before_forward(self) -> None:
        """Make the buffers what rank 0 has, as DDP does before each forward: running means, for instance."""
        if self._buffers:
            broadcast: Any = distributed._broadcast_coalesced  # type: ignore[attr-defined]
            broadcast(distributed.group.WORLD, self._buffers, _BUCKET, 0)

    def reshard_root(self) -> None:
        """Free the root's parameters, which FSDP keeps whole after a forward: a backward pass may follow.

        Where none does they would be used again, whatever has become of the shards meanwhile.
        """
        self.root.reshard()  # type: ignore[operator]

    def put_back(self) -> None:
        """Gather the parameters, on all processes, and make the module what it was: the same objects, on the CPU."""
        self.idle.close()
        for module in sharded_modules(self.root):
            module.reshard()
        for owner, name, parameter in self._owners:
            sharded: Any = owner._parameters.get(name)
            if isinstance(sharded, DTensor):
                if not parameter.numel():  # once, where modules share it
                    whole: Tensor = sharded.full_tensor()
                    parameter.data = whole.detach().cpu()
                parameter.requires_grad_(sharded.requires_grad)
                owner._parameters[name] = parameter
        for module in sharded_modules(self.root):
            _unwrap(module)


def find_blocks(module: nn.Module, classes: Iterable[type[nn.Module]] | None) -> list[nn.Module]:
    """The modules that are sharded one by one.

    Args:
        module: the root; it is none of them.
        classes: modules of these classes. None for the outermost members of ``ModuleList`` and ``Sequential``. One that
            holds most of the parameters, and lists of its own, is no block: they are looked for in it.
    """
    if classes is not None:
        kinds = tuple(classes)
        found = [part for part in module.modules() if part is not module and isinstance(part, kinds)]
    else:
        most = sum(parameter.numel() for parameter in module.parameters()) / 2
        found = list(_members(module, most))
    uses: dict[nn.Parameter, int] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                uses[parameter] = uses.get(parameter, 0) + 1
    return [block for block in found if _owns_parameters(block, uses)]


def _members(module: nn.Module, most: float) -> Iterator[nn.Module]:
    for child in module.children():
        is_member = isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(
            child, (nn.ModuleList, nn.Sequential)
        )
        if is_member and sum(parameter.numel() for parameter in child.parameters()) <= most:
            yield child
        else:
            inner = list(_members(child, most))
            yield from inner or ([child] if is_member else [])


def _owns_parameters(block: nn.Module, uses: dict[nn.Parameter, int]) -> bool:
    """Whether it has parameters, and shares none with what is outside of it (tied embeddings): torch refuses that."""
    inside: dict[nn.Parameter, int] = {}
    for part in block.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                inside[parameter] = inside.get(parameter, 0) + 1
    return bool(inside) and all(uses[parameter] == number for parameter, number in inside.items())


def _persistent_buffers(module: nn.Module) -> list[Tensor]:
    found = {
        buffer: None
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set and not isinstance(buffer, DTensor)
    }
    return list(found)


def _owners(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    return [
        (part, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]


def _send_from_first(module: nn.Module, device: torch.device) -> None:
    """Move what is whole in ``module`` to the device, and make it what rank 0 has."""
    whole: list[Tensor] = [p for p in module.parameters() if not isinstance(p, DTensor)]
    whole += [buffer for buffer in module.buffers() if not isinstance(buffer, DTensor)]
    for tensor in whole:
        if tensor.device != device:
            tensor.data = tensor.data.to(device)
        distributed.broadcast(tensor.detach(), 0)


def _unwrap(module: Any) -> None:
    """Take ``fully_shard`` off a module: its class, hooks and state. torch has no function for that."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping

    state = module._get_fsdp_state()
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        handle.remove()
    for group in state._fsdp_param_groups:
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            for handle in handles.values():
                handle.remove()
        for parameter in group.fsdp_params:
            parameter._post_load_hook_handle.remove()
    module.__class__ = type(module).__mro__[module._orig_cls_mro_index]
    _module_state_mapping.pop(module, None)
    for part in module.modules():
        for key in (STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            part.__dict__.pop(key, None)
