"""Sharded gradients, as they are after the reduction at the end of a window's last backward pass.

Gradients are processed as plain tensors, shard by shard, because each operation on a DTensor takes the host much longer
than one on its shard. Norms are gathered, because gloo's maximum drops a NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from math import prod
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim import Optimizer

from trainer.common.module_tree import parameters_of
from trainer.common.parts import local
from trainer.distributed.sharding.state_dicts import load_unreduced_gradients, unreduced_gradients
from trainer.distributed.sharding.wrap import ShardedModule
from trainer.loop.gradients import Gradients, clamp_
from trainer.precision.dtypes import real_view
from trainer.precision.scaler import LossScaler, gradients_of

_WHOLE_PREFIX = "whole: "  # prefix of keys in a checkpoint


class ShardedGradients(Gradients):
    """Gradients under FSDP2, also combined with tensor parallelism.

    Operations that can be applied part by part use this process's parts, which are plain tensors. One collective checks
    whether a gradient is not finite, and one computes the norm. Multiplying, stepping and updating need no collective.

    Args:
        scaler: the loss scaler. It is set to read this process's parts, and to all-reduce the flags of overflows.
        sharded: returns the sharded module.
        device: device for collectives. The parts may be on the CPU instead.
    """

    are_parts = True

    def __init__(self, scaler: LossScaler, sharded: Callable[[], ShardedModule], device: torch.device) -> None:
        super().__init__(scaler)
        self._sharded = sharded
        self._device = device
        self._idle_loss: Tensor | None = None
        self.use_scaler(scaler)

    def use_scaler(self, scaler: LossScaler) -> LossScaler:
        """Replace the scaler, and set it to read this process's parts and to all-reduce the flags of overflows."""
        scaler.gradients_of = self._parts
        scaler.all_reduce_flag = self._all_reduce_max
        return super().use_scaler(scaler)

    # --- batches of an accumulation window ----------------------------------------------------------------------

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the loss scale. Also records that this batch's forward is complete."""
        self._sharded().idle.remember()
        return super().scale(loss)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scaled loss to those of the window's earlier batches."""
        try:
            super().backward(loss)
        except RuntimeError as error:
            if isinstance(loss, DTensor):
                error.add_note(
                    "The loss was computed from sharded weights outside of their module's forward, such as a penalty on"
                    " the weights. Call .full_tensor() on the penalty: it is a torch.distributed.tensor.DTensor."
                )
            raise
        self._sharded().idle.remember()

    def backward_by(self, run: Callable[[Tensor], None], loss: Tensor) -> None:
        """Run a backward pass that ``training_step`` requested. ``training_step`` is then not the root's forward."""
        with self._sharded().backward_inside(loss) as watched:
            run(watched)

    def forward_without_loss(self, has_run: bool) -> None:
        """Run the collectives of the other processes' forward pass that this batch did not run."""
        self.scaler.expect_scaled(self._device)
        self._idle_loss = self._sharded().idle.forward()

    def backward_without_loss(self, syncs_gradients: bool) -> None:
        """Run the collectives of the other processes' backward pass."""
        loss, self._idle_loss = self._idle_loss, None
        assert loss is not None
        loss.backward()  # type: ignore[no-untyped-call]

    def multiply_(self, optimizers: Iterable[Optimizer], factor: float | Tensor) -> None:
        """Multiply the parts in this process. The factor must be the same on all processes."""
        for shards in _by_device(shard for optimizer in optimizers for shard in self._parts(optimizer)):
            torch._foreach_mul_(shards, factor.to(shards[0].device) if isinstance(factor, Tensor) else factor)

    # --- one optimizer step -------------------------------------------------------------------------------------

    def norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor | None:
        """Return the norm of all parts of all processes, bit-identical on each of them.

        Each process sends the norm of its parts. A part that several processes hold counts once: the power of its norm
        is divided by their number. The norms are gathered and not reduced, because gloo's maximum drops a NaN.
        """
        gradients = gradients_of(optimizer)
        if not gradients:
            return None
        processes = distributed.get_world_size()
        groups: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in gradients:
            if (shard := real_view(local(gradient))).numel():
                groups.setdefault((_copies(gradient, processes), shard.device, shard.dtype), []).append(shard)
        norms = [torch.zeros((), device=self._device)]
        for (copies, _, dtype), shards in groups.items():
            wide = torch.promote_types(dtype, torch.float32)
            each = torch.stack(torch._foreach_norm(shards, norm_type, dtype=wide)).to(self._device)
            norms.append(torch.linalg.vector_norm(each, norm_type) * copies ** (-1 / norm_type))
        local_norm = norms[-1] if len(norms) <= 2 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
        # the same dtype on all processes, even if the parts of one are empty
        local_norm = local_norm.to(
            reduce(torch.promote_types, {gradient.dtype.to_real() for gradient in gradients}, torch.float32)
        )
        local_norms = local_norm.new_empty(processes)
        distributed.all_gather_into_tensor(local_norms, local_norm.reshape(1))
        total: Tensor = torch.linalg.vector_norm(local_norms, norm_type)
        return total

    def norms(self, optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
        """Return the norms of the whole gradients. One collective sums the squared norms of all parts in float64."""
        norms = super().norms(optimizer)
        if not norms:
            return []
        squares = torch.stack([norm.to(self._device, torch.float64) for _, norm in norms]).square()
        whole = self.total(squares.unsqueeze(1), [parameter for parameter, _ in norms]).sqrt().flatten()
        return [(p, total.to(norm.dtype)) for (p, norm), total in zip(norms, whole, strict=True)]

    def clip_(
        self, optimizer: Optimizer, limit: float, algorithm: str, norm_type: float = 2.0, *, measure: bool = True
    ) -> Tensor | None:
        """Clip the optimizer's gradients by their norm over all processes, or by value."""
        norm = self.norm(optimizer, norm_type) if measure or algorithm == "norm" else None
        if norm is not None and algorithm == "norm":
            self.multiply_([optimizer], (limit / (norm + 1e-6)).clamp(max=1.0))
        elif algorithm == "value":
            for parts in _by_device(map(real_view, self._parts(optimizer))):
                clamp_(parts, limit)
        return norm

    # --- inspection and checkpoints -----------------------------------------------------------------------------

    def part(self, tensor: Tensor) -> Tensor:
        """Return this process's part."""
        return local(tensor)

    def total(self, counts: Tensor, of: Sequence[Tensor]) -> Tensor:
        """Sum the counts with one collective. A part that several processes hold is divided by their number."""
        processes = distributed.get_world_size()
        copies = torch.tensor([_copies(parameter, processes) for parameter in of], dtype=torch.float64)
        sums = counts.to(self._device, torch.float64) / copies.to(self._device, non_blocking=True).unsqueeze(1)
        distributed.all_reduce(sums)
        return sums

    def leaves(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the whole parameters, as they are during a forward pass. Gathers each block once to find them."""
        self._sharded().reshard_root()
        parameters, whole_parameters = dict(module.named_parameters()), dict[str, Tensor]()
        for path, block in module.named_modules():
            if isinstance(block, FSDPModule):
                block.unshard()
                gathered = module.get_submodule(path).named_parameters(path)
                whole_parameters |= {name: whole for name, whole in gathered if whole is not parameters.get(name)}
                block.reshard()
        return {name: whole_parameters.get(name, parameter) for name, parameter in parameters.items()}

    def idle_loss(self) -> Tensor:
        """Run the collectives of the other processes' forward pass."""
        self._sharded().idle.forget()
        return self._sharded().idle.forward()

    def state_dict(
        self, parameters: Iterable[tuple[str, Tensor]], optimizers: Iterable[Optimizer]
    ) -> dict[str, Tensor]:
        """Return this process's parts of the gradients that no step has used, and whole gradients of an open window."""
        parameters, optimizers = list(parameters), list(optimizers)
        shards = {name: local(gradient) for name, gradient in super().state_dict(parameters, optimizers).items()}
        held = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
        whole = {id(parameter): gradient for parameter, gradient in unreduced_gradients(self._sharded().root).items()}
        return shards | {_WHOLE_PREFIX + name: whole[id(p)] for name, p in parameters if id(p) in held & whole.keys()}

    def can_load(self, parameters: Iterable[tuple[str, Tensor]], state: Mapping[str, Tensor]) -> bool:
        """Return whether all gradients are parts of this process, or whole gradients of an open window."""
        parts = {name: gradient for name, gradient in state.items() if not name.startswith(_WHOLE_PREFIX)}
        return super().can_load(parameters, parts)

    def load_state_dict(self, parameters: Iterable[tuple[str, Tensor]], state: Mapping[str, Tensor]) -> None:
        """Restore the gradients that :meth:`state_dict` returned, on the same number of processes."""
        parameters = list(parameters)
        parts = {name: _as_dtensor(state[name], parameter) for name, parameter in parameters if name in state}
        super().load_state_dict(parameters, parts)
        whole: dict[Any, Tensor] = {
            p: state[_WHOLE_PREFIX + name] for name, p in parameters if _WHOLE_PREFIX + name in state
        }
        has_any = torch.tensor(float(bool(whole)), device=self._device)
        # also called by a process that has no gradients because its batches had no loss
        self._all_reduce_max(has_any)
        if has_any:
            load_unreduced_gradients(self._sharded().root, whole)
            self.scaler.expect_scaled(self._device)

    def _parts(self, optimizer: Optimizer) -> list[Tensor]:
        return [local(gradient) for gradient in gradients_of(optimizer)]

    def _all_reduce_max(self, flag: Tensor) -> None:
        if flag.device.type == self._device.type:
            distributed.all_reduce(flag, distributed.ReduceOp.MAX)
        else:  # for gradients that are kept on the CPU
            distributed.all_reduce(device_flag := flag.to(self._device), distributed.ReduceOp.MAX)
            flag.copy_(device_flag)


def _copies(gradient: Tensor, processes: int) -> int:
    """Return the number of processes that hold the same part."""
    return (
        _copies_on(gradient.device_mesh, gradient.placements, processes) if isinstance(gradient, DTensor) else processes
    )


@lru_cache(maxsize=32)  # called for each gradient at each step
def _copies_on(mesh: DeviceMesh, placements: tuple[Placement, ...], processes: int) -> int:
    held = prod(mesh.size(i) for i, placement in enumerate(placements) if isinstance(placement, Replicate))
    return held * (processes // mesh.size())


def _as_dtensor(shard: Tensor, parameter: Any) -> Tensor:
    """Return the DTensor that has ``shard`` as this process's part, sharded as ``parameter`` is."""
    if not isinstance(parameter, DTensor):
        return shard
    whole: Tensor = DTensor.from_local(
        shard.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return whole


def _by_device(shards: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for shard in shards:
        groups.setdefault(shard.device, []).append(shard)
    return groups.values()
