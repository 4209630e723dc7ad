"""Sharding a module over processes, and putting it back.

A block is what FSDP2 gathers and frees at a time: its parameters are whole while it computes, and sharded otherwise.
What belongs to no block belongs to the root, the module itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.engine.initialisation import initialise
from trainer.engine.sharding.idle import IdlePasses, call_with_hooks, sharded_modules
from trainer.errors import ConfigurationError, UnsupportedError, did_you_mean
from trainer.walks import owned_buffers, owned_parameters, parts_of

Blocks = Iterable[type[nn.Module] | str] | Callable[[nn.Module, DeviceMesh], Any] | None


_LISTS = (nn.ModuleList, nn.ModuleDict)
"""What has no forward of its own."""
_SHARDED = "_sharded_module"
"""The attribute of a root while it is sharded."""
_BUCKET = 250 * 2**20
"""Bytes of buffers that are sent at a time, as in DDP."""


@dataclass(frozen=True)
class Sharding:
    """What is sharded, and how. See ``FSDP2Strategy``, whose arguments these are."""

    blocks: Blocks = None
    reshard_after_forward: bool | int | None = None
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    cpu_offload: bool = False
    sync_each_batch: bool = True


class ShardedModule:
    """A module that is sharded, until :meth:`put_back`.

    All processes come here together, with modules of the same parameters: rank 0's values are sent to all first, so
    that every process starts from what DDP starts from. What is on the meta device is sharded there, and filled then.

    Args:
        module: whole, or partly sharded by its own ``configure_model``; it stays the same object.
        mesh: of the processes, one dimension to shard over; or two, (replicas, shards).
        device: where to compute.
        settings: what is sharded, and how.
        in_float32: modules that keep their weights in float32, and compute in it, whatever the policy says.

    Attributes:
        root: the module.
        blocks: how many are gathered one by one.
        idle: takes part in the other processes' passes, where this one has no batch.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        device: torch.device,
        settings: Sharding,
        in_float32: Iterable[nn.Module] = (),
    ) -> None:
        self.root = module
        self.mesh = mesh
        self.settings = settings
        self._device = device
        self._owners: list[tuple[nn.Module, str, Any]] = []  # of the parameters, as they were
        self._of_root: dict[nn.Module, list[Any]] = {}  # the parameters of the root's, by who owns them
        self.handles: list[Any] = []
        self._in_float32: set[nn.Module] = set()
        self._refuse_scalars()
        self._refuse_complex()
        blocks: set[nn.Module] = set()
        if callable(settings.blocks):
            self._send(module)
            settings.blocks(module, mesh)
            self._empty()
        else:
            more = self._keep_float32(in_float32)
            if settings.policy.param_dtype is not None:
                more += [child for child in module.children() if not isinstance(child, _LISTS)]
            blocks = set(find_blocks(module, settings.blocks, more))
        self._shard(module, blocks, set())
        self._refuse_ignored()
        module.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # of batches without a loss
        enter_once(module)
        initialise(module, torch.device("cpu") if settings.cpu_offload else device, self._spread)
        self._empty()
        self.blocks = len(sharded_modules(module)) - 1
        self._buffers = _persistent_buffers(module)
        self.idle = IdlePasses(module, self.before_forward)
        vars(module)[_SHARDED] = self

    def _shard(self, module: nn.Module, blocks: set[nn.Module], seen: set[nn.Module]) -> None:
        """Shard the blocks, inner ones first: no more than one of them is whole on the device at a time."""
        if module in seen:
            return
        seen.add(module)
        for child in module.children():
            self._shard(child, blocks, seen)
        is_root = module is self.root
        if isinstance(module, FSDPModule) or not (is_root or module in blocks):
            return
        self._send(module)
        settings = self.settings
        pins = self._device.type != "cpu"
        # the root's input is the batch, and its targets keep their dtype
        policy = replace(settings.policy, cast_forward_inputs=False) if is_root else settings.policy
        if module in self._in_float32:
            dtype = settings.policy.param_dtype
            full = None if dtype is None else torch.float32
            policy = MixedPrecisionPolicy(param_dtype=full, reduce_dtype=full, output_dtype=dtype)
        fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=settings.reshard_after_forward,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy(pin_memory=pins) if settings.cpu_offload else OffloadPolicy(),
        )
        self._empty()

    def _keep_float32(self, chosen: Iterable[nn.Module]) -> list[nn.Module]:
        """Which of these have to be blocks: what is gathered together has one dtype."""
        if self.settings.policy.param_dtype is None and len({p.dtype for p in self.root.parameters()}) == 1:
            return []
        found = list(chosen)
        self._in_float32 = parts_of(*found)
        return found

    def _send(self, module: nn.Module) -> None:
        """Move what is whole in ``module`` to the device, make it what rank 0 has, and note it for the end."""
        owned = [one for one in owned_parameters(module) if not isinstance(one.tensor, DTensor)]
        self._owners += [(one.owner, one.name, one.tensor) for one in owned]
        both = dict.fromkeys(one.tensor for one in (*owned, *owned_buffers(module)))
        whole = [one for one in both if not one.is_meta and not isinstance(one, DTensor)]
        for tensor in whole:
            tensor.data = tensor.data.to(self._device).contiguous()
        _broadcast(whole)

    def _empty(self) -> None:
        """Free what has been copied into shards."""
        for owner, name, parameter in self._owners:
            if isinstance(owner._parameters.get(name), DTensor) and parameter.numel() and not parameter.is_meta:
                parameter.data = parameter.data.new_empty(0)

    def _spread(self, whole: Tensor, sharded: Any) -> None:
        """Give each process its part of what has been initialised, as rank 0 has it."""
        there = whole.to(self._device).contiguous()
        _broadcast([there])
        if isinstance(sharded, DTensor):
            part = distribute_tensor(there, sharded.device_mesh, sharded.placements, src_data_rank=None)
            sharded._local_tensor.data.copy_(part._local_tensor)
        else:
            sharded.data.copy_(there)

    def _refuse_ignored(self) -> None:
        if names := [name for name, parameter in self.root.named_parameters() if not hasattr(parameter, "device_mesh")]:
            put_back_sharded(self.root, {})
            raise UnsupportedError(
                f"Got fully_shard(..., ignored_params=...) with {', '.join(names[:8])} left out, expected all"
                " parameters: nobody would average the gradients of these over the processes. Leave that argument away."
            )

    def _refuse_scalars(self) -> None:
        names = [name for name, parameter in self.root.named_parameters() if not parameter.ndim]
        if names:
            raise UnsupportedError(
                f"Got the parameter{'s' * (len(names) > 1)} {', '.join(names)} without a dimension, expected at least"
                " one to shard: torch's fully_shard takes no scalars. Make it torch.ones(1) in the place of"
                " torch.tensor(1.0)."
            )

    def _refuse_complex(self) -> None:
        names = [name for name, parameter in self.root.named_parameters() if parameter.is_complex()]
        if names:
            raise UnsupportedError(
                f"Got the complex parameter{'s' * (len(names) > 1)} {', '.join(names[:8])}, expected real ones:"
                " torch's fully_shard needs parameters of one dtype. Use strategy='ddp', or make each a real parameter"
                " of shape (..., 2) and call torch.view_as_complex on it in the forward pass."
            )

    def before_forward(self) -> None:
        """Make the buffers what rank 0 has, as DDP does before each forward: running means, for instance."""
        found = (owner._buffers.get(name) for owner, name in self._buffers)  # SWA puts others in their place
        _broadcast([buffer for buffer in found if buffer is not None])

    def prepare_manual(self) -> Callable[..., None]:
        """Prepare for forwards that are no forward of the root: ``training_step`` runs as it is then, and is many.

        The root's parameters are gathered when a module that owns some of them is called, freed in each backward pass,
        and gathered again for the next. What the root itself owns is there from the beginning.

        Returns:
            What to call after each optimizer step.
        """
        if self._of_root:
            return self._renew_root
        call_with_hooks(self.root, _nothing)  # FSDP finds out who the root is
        self.reshard_root()
        root: Any = self.root
        for group in root._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                info = parameter._module_info
                for owner in (info.module, *info.shared_modules):
                    self._of_root.setdefault(owner, []).append((group, parameter))
        for owner in self._of_root:
            if owner is not self.root:
                self.handles.append(owner.register_forward_pre_hook(torch.compiler.disable(self._gather_root)))  # type: ignore[no-untyped-call]
        return self._renew_root

    @contextmanager
    def manual_step(self) -> Iterator[None]:
        """A context for one ``training_step`` of manual optimization."""
        self._open_root()
        try:
            yield
        finally:
            self.reshard_root()

    @contextmanager
    def backward_inside(self, loss: Tensor) -> Iterator[Tensor]:
        """A context for a backward pass inside of it. It is to be that of the tensor that is returned."""
        yield call_with_hooks(self.root, lambda: loss)
        self._open_root()

    def _gather_root(self, module: nn.Module, args: Any) -> None:
        if not all(group.is_unsharded for group, _ in self._of_root[module]):
            self.root.unshard()  # type: ignore[operator]
        for _, parameter in self._of_root[module]:
            whole, needed = parameter._unsharded_param, parameter.sharded_param.requires_grad
            if whole.requires_grad is not needed:  # the module has toggled its optimizers
                whole.requires_grad_(needed)

    def _open_root(self) -> None:
        if self.root in self._of_root:
            self._gather_root(self.root, ())

    def _renew_root(self, *_: Any) -> None:
        self.reshard_root()
        self._open_root()

    def end_forward(self) -> None:
        """A forward is over that no backward pass follows: free the root, and forget what FSDP would look ahead to."""
        self.reshard_root()
        self.idle.forget_order()

    def reshard_root(self) -> None:
        """Free the root's parameters, which FSDP keeps whole after a forward: a backward pass may follow.

        Where none does they would be used again, whatever has become of the shards meanwhile.
        """
        self.root.reshard()  # type: ignore[operator]

    def put_back(self) -> None:
        """Gather the parameters, on all processes, and make the module what it was: the same objects, on the CPU."""
        self.idle.close()
        for handle in self.handles:
            handle.remove()
        for module in sharded_modules(self.root):
            module.reshard()
        put_back_sharded(self.root, {(owner, name): parameter for owner, name, parameter in self._owners})
        del vars(self.root)[_SHARDED]


def put_back_sharded(root: nn.Module, before: dict[tuple[nn.Module, str], nn.Parameter]) -> None:
    """Gather the parameters, and take the sharding off the modules.

    Args:
        root: the module.
        before: parameters as they were, by who owns them and their names.
    """
    done: dict[int, nn.Parameter] = {}  # what several modules share stays shared
    for _, owner, name, sharded in owned_parameters(root):
        if hasattr(sharded, "device_mesh"):
            if id(sharded) not in done:
                done[id(sharded)] = _gathered(sharded, before.get((owner, name)))
            owner._parameters[name] = done[id(sharded)]
    for owner in root.modules():
        for hooks in (owner._forward_pre_hooks, owner._forward_hooks):  # of tensor parallelism
            for key, hook in list(hooks.items()):
                if getattr(hook, "__module__", "").startswith("torch.distributed.tensor"):
                    del hooks[key]
    for module in sharded_modules(root):
        _unwrap(module)


def _gathered(sharded: Any, before: nn.Parameter | None) -> nn.Parameter:
    """The whole parameter on the CPU: in the object that it was before, if that had memory."""
    whole = sharded.full_tensor().detach().cpu()
    if before is None or before.is_meta:
        return nn.Parameter(whole, requires_grad=sharded.requires_grad)
    before.data = whole
    before.requires_grad_(sharded.requires_grad)
    return before


def put_back(module: nn.Module) -> None:
    """Put back a module that a run which failed has left sharded. All processes come here."""
    if (sharded := vars(module).get(_SHARDED)) is not None:
        sharded.put_back()


def enter_once(root: Any) -> None:
    """Have FSDP's hooks of the root act on its outermost forward only.

    ``training_step`` runs as the root's forward, and may call ``self(batch)``. To the hooks that would be a second
    forward inside of the first, whose end frees the parameters: each backward pass would gather them again. A call
    that comes after a backward pass (manual optimization) is a forward of its own: that has freed them.
    """
    state = root._get_fsdp_state()
    calls: list[bool] = []  # that are under way: whether each is inside of another

    def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        is_inside = bool(calls) and state._training_state is TrainingState.FORWARD
        calls.append(is_inside)
        return None if is_inside else state._pre_forward(module, args, kwargs)

    def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
        return None if calls[-1] else state._post_forward(module, args, output)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        calls.pop()

    root._forward_pre_hooks[state._pre_forward_hook_handle.id] = wraps(state._pre_forward)(pre_forward)
    root._forward_hooks[state._post_forward_hook_handle.id] = wraps(state._post_forward)(post_forward)
    state.nesting_hook_handle = root.register_forward_hook(wraps(state._post_forward)(end), always_call=True)


def find_blocks(
    module: nn.Module, classes: Iterable[type[nn.Module] | str] | None, more: Iterable[nn.Module] = ()
) -> list[nn.Module]:
    """The modules that are sharded one by one.

    Args:
        module: the root; it is none of them.
        classes: modules of these classes, or of classes of these names. None for the outermost members of
            ``ModuleList`` and ``Sequential``. One that holds most of the parameters, and lists of its own, is no block:
            they are looked for in it.
        more: modules that are to be blocks, too.
    """
    if classes is not None:
        found = _of_classes(module, list(classes))
    else:
        most = sum(parameter.numel() for parameter in module.parameters()) / 2
        found = list(_members(module, most))
    found += [block for block in more if block not in found]
    uses = Counter(one.tensor for one in owned_parameters(module))
    return [block for block in found if _owns_parameters(block, uses)]


def _of_classes(module: nn.Module, classes: list[type[nn.Module] | str]) -> list[nn.Module]:
    found: dict[nn.Module, None] = {}
    for one in classes:
        parts = [part for part in module.modules() if part is not module and _is_a(part, one)]
        if not parts:
            named = sorted({type(part).__name__ for part in module.modules() if part is not module})
            name = one if isinstance(one, str) else one.__name__
            raise ConfigurationError(
                f"Got FSDP2Strategy(blocks=[{name}]), of which {type(module).__name__} has none, expected classes of"
                f" its modules.{did_you_mean(name, named)} They are: {', '.join(named[:12])}."
            )
        found.update(dict.fromkeys(parts))
    return [part for part in module.modules() if part in found]


def _is_a(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    if isinstance(kind, str):
        return any(one.__name__ == kind for one in type(module).__mro__)
    return isinstance(module, kind)


def _members(module: nn.Module, most: float) -> Iterator[nn.Module]:
    for child in module.children():
        is_member = isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(child, _LISTS)
        if is_member and sum(parameter.numel() for parameter in child.parameters()) <= most:
            yield child
        else:
            inner = list(_members(child, most))
            yield from inner or ([child] if is_member else [])


def _owns_parameters(block: nn.Module, uses: Mapping[Tensor, int]) -> bool:
    """Whether it has parameters, and shares none with what is outside of it (tied embeddings): torch refuses that."""
    inside = Counter(one.tensor for one in owned_parameters(block))
    return bool(inside) and all(uses[parameter] == number for parameter, number in inside.items())


def _nothing() -> None:
    pass


def _persistent_buffers(module: nn.Module) -> list[tuple[nn.Module, str]]:
    found = {
        buffer: (part, name)
        for _, part, name, buffer in owned_buffers(module)
        if name not in part._non_persistent_buffers_set and not isinstance(buffer, DTensor)
    }
    return list(found.values())


def _broadcast(tensors: list[Tensor]) -> None:
    """Make them what rank 0 has."""
    if tensors:
        broadcast: Any = distributed._broadcast_coalesced  # type: ignore[attr-defined]
        broadcast(distributed.group.WORLD, [tensor.detach() for tensor in tensors], _BUCKET, 0)


def _unwrap(module: Any) -> None:
    """Take ``fully_shard`` off a module: its class, hooks and state. torch has no function for that."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping

    state = module._get_fsdp_state()
    for name in ("_pre_forward_hook_handle", "_post_forward_hook_handle", "nesting_hook_handle"):
        if (handle := getattr(state, name, None)) is not None:
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
