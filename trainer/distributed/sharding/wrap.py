"""Shard a module over processes, and restore it.

A block is a module that FSDP2 gathers and frees as a unit: its parameters are whole while it computes, and sharded
otherwise. Parameters that belong to no block belong to the root, the module itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import chain
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.common.module_tree import all_modules, is_dense, owned_buffers, owned_parameters
from trainer.distributed.initialisation import initialise
from trainer.distributed.sharding.idle import IdlePasses, call_with_hooks, sharded_modules
from trainer.errors import ConfigurationError, UnsupportedError, did_you_mean, join_first

Blocks = Iterable[type[nn.Module] | str] | Callable[[nn.Module, DeviceMesh], Any] | None


_LISTS = (nn.ModuleList, nn.ModuleDict)
"""Containers without a forward."""
_CLASS = "_class_before_sharding"
"""Attribute of a ``ReplacedParameter`` that holds its original class."""
_SHARDED = "_sharded_module"
"""Attribute of a root that holds its ``ShardedModule`` while it is sharded."""
_BUCKET = 250 * 2**20
"""Bytes of buffers in one broadcast, as in DDP."""


@dataclass(frozen=True)
class Sharding:
    """Settings of sharding. See ``FSDP2Strategy``, which has them as arguments."""

    blocks: Blocks = None
    reshard_after_forward: bool | int | None = None
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    cpu_offload: bool = False
    sync_each_batch: bool = True


class ReplacedParameter(nn.Parameter):
    """An original parameter while its module is sharded: it has no elements, and using it raises an error."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise an error instead of computing with no elements."""
        raise RuntimeError(
            "Got a parameter that FSDP has replaced by shards. Read parameters from the module when they are used"
            " (`self.net.parameters()`), instead of from a list that was created before the fit."
        )


class ShardedModule:
    """A module that is sharded until :meth:`restore_module`.

    All processes must create it together, with modules that have the same parameters. Rank 0's values are broadcast
    first, so that every process starts from the same weights, as with DDP. Parameters on the meta device are sharded
    there, and initialized afterwards.

    Args:
        module: a whole module, or one partly sharded by its own ``configure_model``; it stays the same object.
        mesh: device mesh with one dimension to shard over, or two: (replicas, shards).
        device: device for computation.
        settings: settings of sharding.
        in_float32: modules that keep their weights in float32 and compute in it, regardless of the policy. Default:
            none.

    Attributes:
        root: the module.
        blocks: number of blocks.
        idle: takes part in the other processes' passes if this process has no batch.
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
        self._owners: list[tuple[nn.Module, str, Any]] = []  # of the parameters before sharding
        self._of_root: dict[nn.Module, list[Any]] = {}  # FSDP parameters of the root, by owning module
        self.handles: list[Any] = []
        self._in_float32: set[nn.Module] = set()
        _refuse_unsupported(module)
        blocks: set[nn.Module] = set()
        if callable(settings.blocks):
            self._materialize(module)
            settings.blocks(module, mesh)
            self._free_originals()
        else:
            float32_blocks = self._keep_float32(in_float32)
            if settings.policy.param_dtype is not None:
                float32_blocks += [child for child in module.children() if not isinstance(child, _LISTS)]
            blocks = set(find_blocks(module, settings.blocks, float32_blocks))
        self._shard(module, blocks, set())
        self._refuse_ignored()
        self._refuse_mixed_dtypes()
        module.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # for batches without a loss
        enter_once(module)
        initialise(module, torch.device("cpu") if settings.cpu_offload else device, self._fill_shard)
        self._free_originals()
        self.blocks = len(sharded_modules(module)) - 1
        buffers = {owned.tensor: (owned.owner, owned.name) for owned in owned_buffers(module)}
        self._buffers = [place for buffer, place in buffers.items() if not isinstance(buffer, DTensor)]
        self.idle = IdlePasses(module, self.before_forward)
        vars(module)[_SHARDED] = self

    def _shard(self, module: nn.Module, blocks: set[nn.Module], seen: set[nn.Module]) -> None:
        """Shard the blocks, inner ones first, so that only one of them is whole on the device at a time."""
        if module in seen:
            return
        seen.add(module)
        for child in module.children():
            self._shard(child, blocks, seen)
        is_root = module is self.root
        if isinstance(module, FSDPModule) or not (is_root or module in blocks):
            return
        self._materialize(module)
        settings = self.settings
        pins = self._device.type != "cpu"
        # the root's inputs are not cast: they are the batch, with targets that must keep their dtype
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
        self._free_originals()

    def _keep_float32(self, chosen: Iterable[nn.Module]) -> list[nn.Module]:
        """Return the modules that must be blocks to stay in float32, because a block has only one dtype."""
        if self.settings.policy.param_dtype is None and len({p.dtype for p in self.root.parameters()}) == 1:
            return []
        blocks = list(chosen)
        self._in_float32 = all_modules(*blocks)
        return blocks

    def _materialize(self, module: nn.Module) -> None:
        """Move the unsharded tensors of ``module`` to the device, broadcast them from rank 0, and record them."""
        owned = [parameter for parameter in owned_parameters(module) if not isinstance(parameter.tensor, DTensor)]
        self._owners += [(entry.owner, entry.name, entry.tensor) for entry in owned]
        tensors = dict.fromkeys(entry.tensor for entry in (*owned, *owned_buffers(module)))
        whole = [tensor for tensor in tensors if not tensor.is_meta and not isinstance(tensor, DTensor)]
        for tensor in whole:
            tensor.data = tensor.data.to(self._device).contiguous()
        _broadcast(whole)

    def _free_originals(self) -> None:
        """Free the original tensors that have been copied into shards, and copy their Python attributes."""
        for owner, name, parameter in self._owners:
            sharded: Any = owner._parameters.get(name)
            if isinstance(sharded, DTensor) and not isinstance(parameter, ReplacedParameter):
                marks = {key: value for key, value in vars(parameter).items() if not key.startswith("_fsdp_")}
                vars(sharded).update(marks)  # for `configure_optimizers`, for example
                if not parameter.is_meta:
                    parameter.data = parameter.data.new_empty(0)
                    vars(parameter)[_CLASS], parameter.__class__ = type(parameter), ReplacedParameter

    def _fill_shard(self, whole: Tensor, sharded: Any) -> None:
        """Broadcast an initialized parameter from rank 0, and copy each process's part into its shard."""
        on_device = whole.to(self._device).contiguous()
        _broadcast([on_device])
        if isinstance(sharded, DTensor):
            shard = distribute_tensor(on_device, sharded.device_mesh, sharded.placements, src_data_rank=None)
            sharded._local_tensor.data.copy_(shard._local_tensor)
        else:
            sharded.data.copy_(on_device)

    def _refuse_ignored(self) -> None:
        if names := [name for name, parameter in self.root.named_parameters() if not hasattr(parameter, "device_mesh")]:
            self._restore()
            raise UnsupportedError(
                f"Got fully_shard(..., ignored_params=...) with {', '.join(names[:8])} left out, expected all"
                " parameters: their gradients would not be averaged over the processes. Remove that argument."
            )

    def _refuse_mixed_dtypes(self) -> None:
        names = {id(parameter): name for name, parameter in self.root.named_parameters()}
        for group in chain(*(module._get_fsdp_state()._fsdp_param_groups for module in sharded_modules(self.root))):
            by_dtype: dict[torch.dtype, str] = {}
            for parameter in (p.sharded_param for p in group.fsdp_params if p.sharded_param.requires_grad):
                by_dtype.setdefault(parameter.dtype, names[id(parameter)])
            if len(by_dtype) > 1:
                self._restore()
                mixed = " and ".join(f"{name} ({str(dtype)[6:]})" for dtype, name in by_dtype.items())
                raise UnsupportedError(
                    f"Got trained parameters of different dtypes in one block, expected one dtype: {mixed}. Convert"
                    " them to one dtype, make their modules blocks (FSDP2Strategy(blocks=...)), or use strategy='ddp'."
                )

    def before_forward(self) -> None:
        """Broadcast the buffers from rank 0, as DDP does before each forward: running means, for example."""
        buffers = (getattr(owner, name, None) for owner, name in self._buffers)  # SWA replaces buffers
        _broadcast([buffer for buffer in buffers if buffer is not None])

    def prepare_manual(self) -> Callable[..., None]:
        """Prepare for manual optimization: ``training_step`` is not the root's forward, and runs several passes.

        The root's parameters are gathered when a module that owns some of them is called, freed in each backward pass,
        and gathered again for the next. Parameters that the root itself owns are gathered from the beginning.

        Returns:
            The function to call after each optimizer step.
        """
        if self._of_root:
            return self._renew_root
        call_with_hooks(self.root, lambda: None)  # lets FSDP determine the root
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
        """Return the context for one ``training_step`` of manual optimization."""
        self._open_root()
        try:
            yield
        finally:
            self.reshard_root()

    @contextmanager
    def backward_inside(self, loss: Tensor) -> Iterator[Tensor]:
        """Return the context for a backward pass in ``training_step``. The pass must start from the yielded tensor."""
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

    def refuse_changes(self) -> None:
        """Raise an error if gathered parameters of the root were changed in place. The shards would not change.

        Raises:
            UnsupportedError: with the names of the changed parameters.
        """
        root: Any = self.root
        names, changed = {id(parameter): name for name, parameter in root.named_parameters()}, []
        for group in (group for group in root._get_fsdp_state()._fsdp_param_groups if group.is_unsharded):
            for parameter in group.fsdp_params:
                whole, sharded = parameter.unsharded_param, parameter.sharded_param
                if isinstance(whole, DTensor) or not whole.data_ptr():  # with tensor parallelism, or without values
                    continue
                placed = distribute_tensor(whole.detach(), sharded.device_mesh, sharded.placements, src_data_rank=None)
                shard = sharded.to_local().detach().to(whole.device, whole.dtype)
                if not torch.allclose(placed.to_local(), shard, rtol=0, atol=0, equal_nan=True):
                    changed.append(names[id(whole)])
        if changed:
            raise UnsupportedError(
                f"training_step has changed {join_first(changed, 8)} in place. Under FSDP, this changes a gathered copy"
                " and is lost. Change weights in on_train_batch_end instead, or use strategy='ddp'."
            )

    def _renew_root(self, *_: Any) -> None:
        self.reshard_root()
        self._open_root()

    def end_forward(self) -> None:
        """Free the root and clear FSDP's prefetching order, after a forward without a backward pass."""
        self.reshard_root()
        self.idle.forget_order()

    def reshard_root(self) -> None:
        """Free the root's parameters, which FSDP keeps whole after a forward because a backward pass may follow.

        Without a backward pass they would be used again, even if the shards have changed in the meantime.
        """
        self.root.reshard()  # type: ignore[operator]

    def restore_module(self) -> None:
        """Gather the parameters on all processes, and restore the module: the same objects, on the CPU."""
        self.idle.close()
        for handle in self.handles:
            handle.remove()
        for module in sharded_modules(self.root):
            module.reshard()
        self._restore()
        del vars(self.root)[_SHARDED]

    def _restore(self) -> None:
        restore_sharded(self.root, {(owner, name): parameter for owner, name, parameter in self._owners})


def _refuse_unsupported(root: nn.Module) -> None:
    """Raise an error if torch cannot shard a parameter, or would silently lose its hooks, ties or in-place changes."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in _problems(root):
        names_by_reason.setdefault(reason, []).append(name)
    for reason, names in names_by_reason.items():
        raise UnsupportedError(f"FSDP cannot shard {join_first(names, 8)}: {reason}")


def _problems(root: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of unsupported modules and parameters, with the reason and the remedy."""
    for reasons, named in ((_PARTS, root.named_modules()), (_PARAMETERS, root.named_parameters())):
        for name, value in named:
            yield from ((name, reason) for reason, applies in reasons.items() if applies(value))
    owners: dict[int, str] = {}  # parameters by their address in memory
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        address = 0 if isinstance(tensor, DTensor) or not is_dense(tensor) else tensor.data_ptr()
        if not address:  # also of tensors without values
            continue
        other = owners.setdefault(address, name if isinstance(tensor, nn.Parameter) else "")
        if other not in ("", name):
            yield name, f"it shares memory with {other}, but would become a separate copy. {_TIE}"


_TIE = "Assign the same parameter to both modules (decoder.weight = encoder.weight), or use strategy='ddp'."
_PARTS: dict[str, Callable[[Any], bool]] = {
    "torch's fully_shard does not support scripted modules. Use the original module.": (
        lambda module: isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters())
    ),
    "sparse gradients cannot be reduced to shards. Use sparse=False, or strategy='ddp'.": (
        lambda module: isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    ),
    "max_norm changes the weight in the forward pass, and the change would be lost. Use torch.renorm on the output.": (
        lambda module: isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    ),
}
"""Reasons to refuse a module, with the condition."""
_PARAMETERS: dict[str, Callable[[Any], bool]] = {
    "expected a dense parameter with values. Initialize lazy modules with one batch before the fit.": (
        lambda parameter: not is_dense(parameter)
    ),
    "torch's fully_shard needs a dimension. Use torch.ones(1) instead of torch.tensor(1.0).": (
        lambda parameter: is_dense(parameter) and not parameter.ndim
    ),
    "torch's fully_shard does not support complex parameters. Use strategy='ddp', or make each a real parameter of"
    " shape (..., 2) and call torch.view_as_complex on it in the forward pass.": torch.is_complex,
    "torch cannot reduce a gradient without elements. Call requires_grad_(False) on it.": (
        lambda parameter: is_dense(parameter) and parameter.requires_grad and not parameter.numel()
    ),
    "hooks on the gradient of a parameter (register_hook) would not be called, because FSDP computes with gathered"
    " copies. Change gradients in on_before_optimizer_step, or use strategy='ddp'.": (
        lambda parameter: bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
    ),
}
"""Reasons to refuse a parameter, with the condition."""


def restore_sharded(root: nn.Module, before: dict[tuple[nn.Module, str], nn.Parameter]) -> None:
    """Gather the parameters and remove sharding from the modules.

    Args:
        root: the module.
        before: the original parameters, by their owner and name.
    """
    done: dict[int, nn.Parameter] = {}  # by id, so that shared parameters stay shared
    for _, owner, name, sharded in owned_parameters(root):
        if hasattr(sharded, "device_mesh"):
            if id(sharded) not in done:
                done[id(sharded)] = _gathered(sharded, before.get((owner, name)))
            owner._parameters[name] = done[id(sharded)]
    for owner in root.modules():
        for hooks in (owner._forward_pre_hooks, owner._forward_hooks):  # hooks of tensor parallelism
            for key, hook in list(hooks.items()):
                if getattr(hook, "__module__", "").startswith("torch.distributed.tensor"):
                    del hooks[key]
    for module in sharded_modules(root):
        _unwrap(module)


def _gathered(sharded: Any, before: nn.Parameter | None) -> nn.Parameter:
    """Return the whole parameter on the CPU, in the original object unless that is on the meta device."""
    whole = sharded.full_tensor().detach().cpu()
    if isinstance(before, ReplacedParameter):
        before.__class__ = vars(before).pop(_CLASS)
    if before is None or before.is_meta:
        return nn.Parameter(whole, requires_grad=sharded.requires_grad)
    before.data = whole
    before.requires_grad_(sharded.requires_grad)
    return before


def restore_module(module: nn.Module) -> None:
    """Restore a module that a failed run has left sharded. All processes must call it."""
    if (sharded := vars(module).get(_SHARDED)) is not None:
        sharded.restore_module()


def enter_once(root: Any) -> None:
    """Run FSDP's hooks of the root only on its outermost forward.

    ``training_step`` runs as the root's forward, and may call ``self(batch)``. The hooks would treat this as a second
    forward inside the first and free the parameters at its end, so each backward pass would gather them again. A call
    after a backward pass (manual optimization) is a separate forward, because the backward pass has freed the
    parameters.
    """
    state = root._get_fsdp_state()
    calls: list[bool] = []  # for each running call, whether it is inside another

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
    """Return the modules that are sharded as blocks.

    Args:
        module: the root, which is not included.
        classes: classes, or names of classes, of the blocks. None for the outermost members of ``ModuleList`` and
            ``Sequential``. A member that holds most of the parameters and contains such lists is not a block; the
            search continues inside it.
        more: additional modules that must be blocks. Default: none.
    """
    if classes is not None:
        blocks = _blocks_of_classes(module, list(classes))
    else:
        most = sum(parameter.numel() for parameter in module.parameters()) / 2
        blocks = list(_list_members(module, most))
    blocks += [block for block in more if block not in blocks]
    uses = Counter(owned.tensor for owned in owned_parameters(module))
    return [block for block in blocks if _owns_parameters(block, uses)]


def _blocks_of_classes(module: nn.Module, classes: list[type[nn.Module] | str]) -> list[nn.Module]:
    blocks: dict[nn.Module, None] = {}
    for class_ in classes:
        matching = [submodule for submodule in module.modules() if submodule is not module and _is_a(submodule, class_)]
        if not matching:
            named = sorted({type(submodule).__name__ for submodule in module.modules() if submodule is not module})
            name = class_ if isinstance(class_, str) else class_.__name__
            raise ConfigurationError(
                f"Got FSDP2Strategy(blocks=[{name}]), which {type(module).__name__} does not contain, expected classes"
                f" of its modules.{did_you_mean(name, named)} They are: {', '.join(named[:12])}."
            )
        blocks.update(dict.fromkeys(matching))
    return [submodule for submodule in module.modules() if submodule in blocks]


def _is_a(module: nn.Module, class_: type[nn.Module] | str) -> bool:
    if isinstance(class_, str):
        return any(base.__name__ == class_ for base in type(module).__mro__)
    return isinstance(module, class_)


def _list_members(module: nn.Module, most: float) -> Iterator[nn.Module]:
    for child in module.children():
        is_member = isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(child, _LISTS)
        if is_member and sum(parameter.numel() for parameter in child.parameters()) <= most:
            yield child
        else:
            inner = list(_list_members(child, most))
            yield from inner or ([child] if is_member else [])


def _owns_parameters(block: nn.Module, uses: Mapping[Tensor, int]) -> bool:
    """Return whether a block has parameters, and shares none with outer modules, which torch does not support."""
    inside = Counter(owned.tensor for owned in owned_parameters(block))
    return bool(inside) and all(uses[parameter] == number for parameter, number in inside.items())


def _broadcast(tensors: list[Tensor]) -> None:
    """Broadcast tensors from rank 0, in place."""
    if tensors:
        broadcast: Any = distributed._broadcast_coalesced  # type: ignore[attr-defined]
        broadcast(distributed.group.WORLD, [tensor.detach() for tensor in tensors], _BUCKET, 0)


def _unwrap(module: Any) -> None:
    """Remove ``fully_shard`` from a module: its class, hooks and state. torch has no function for this."""
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
    for submodule in module.modules():
        for key in (STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            submodule.__dict__.pop(key, None)
