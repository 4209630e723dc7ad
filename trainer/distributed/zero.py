"""A module run by DeepSpeed: ZeRO shards optimizer states, gradients and parameters over processes.

DeepSpeed computes the backward pass, the mean over the processes, the loss scale, clipping and the step. The code here
calls DeepSpeed in the methods of :class:`~trainer.loop.gradients.Gradients`, in the order of the loop, and reads the
outcome of the step: whether it was skipped, the scale before and after, the norm.

ZeRO keeps the float32 weights that the optimizer steps, and the optimizer's states, in flat tensors; each process has a
part of them. :class:`ZeroModule` finds a parameter in them, and gathers or sets it. DeepSpeed is imported when the
first ``ZeroModule`` is created.

DeepSpeed gets a copy of the optimizer, and replaces the parameters in this copy by flat tensors. The module's own
optimizer keeps its parameters, for schedules, hooks and checkpoints; its settings are copied at each step. One rule,
the same at all stages, gives the position of a parameter in the flat tensors, because some of DeepSpeed's own functions
need a first step, or fail at stage 3 for uneven sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint.optimizer_states import SavedDtypes, dtype_to_load
from trainer.common.module_tree import parameters_of
from trainer.errors import UnsupportedError, warn
from trainer.loop.gradients import Gradients
from trainer.precision.scaler import LossScaler, UpdateOutcome

_EXTRA_STATE = "_extra_state"
"""The last part of torch's key for the result of ``get_extra_state``."""


class Part(NamedTuple):
    """The part of a parameter that this process steps.

    Attributes:
        flat: the tensor that contains it, a parameter of the optimizer that DeepSpeed steps.
        start: its offset in ``flat``.
        offset: its offset in the flattened parameter.
        numel: number of elements; 0 if this process has no part.
    """

    flat: Tensor
    start: int
    offset: int
    numel: int


class ZeroModule:
    """A module that DeepSpeed runs, with its optimizer if it is trained.

    Args:
        module: the module, not sharded.
        optimizer: the optimizer of its parameters. It stays unchanged, because DeepSpeed gets a copy. None for
            evaluation.
        config: complete configuration of DeepSpeed.
        device: the device of this process.

    Attributes:
        engine: DeepSpeed's engine, a module that wraps the module; the module itself if DeepSpeed is not needed.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer | None, config: dict[str, Any], device: torch.device
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.stage: int = config["zero_optimization"]["stage"]
        self._device = device
        self._attributes = [(parameter, dict(vars(parameter))) for parameter in module.parameters()]
        # DeepSpeed converts all parameters to 16 bits, and keeps a float32 copy only of the trained ones
        self._frozen = [(p, p.detach().cpu()) for p in module.parameters() if not (p.requires_grad and optimizer)]
        self._dtypes = {parameter: parameter.dtype for parameter in module.parameters()}
        self.engine: Any = (
            self._begin(config) if optimizer is not None or self.stage == 3 else self._convert_without_deepspeed(config)
        )
        self._parts = dict(self._find_parts()) if optimizer is not None else {}

    def _begin(self, config: dict[str, Any]) -> Any:
        """Initialize DeepSpeed with the module."""
        import argparse

        import deepspeed

        optimizer: Any = None
        if self.optimizer is not None:
            optimizer = copy.copy(self.optimizer)
            optimizer.param_groups = [dict(group, params=list(group["params"])) for group in optimizer.param_groups]
            optimizer.state = copy.copy(self.optimizer.state)
        engine, *_ = deepspeed.initialize(
            args=argparse.Namespace(**{} if self._device.index is None else {"device_rank": self._device.index}),
            model=self.module,
            model_parameters=[p for p in self.module.parameters() if p.requires_grad] if optimizer is not None else [],
            optimizer=optimizer,
            config=config,
            dist_init_required=False,
        )
        return engine

    def _convert_without_deepspeed(self, config: dict[str, Any]) -> nn.Module:
        """Convert the module to DeepSpeed's dtype, because evaluation with whole weights does not need DeepSpeed."""
        for block, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            if config.get(block, {}).get("enabled"):
                for parameter in self.module.parameters():
                    parameter.data = parameter.data.to(dtype)
        return self.module.to(self._device)

    # --- an optimizer step ------------------------------------------------------------------------------------

    def step(self) -> None:
        """Run DeepSpeed's step with the current settings, such as learning rates, of the module's optimizer."""
        assert self.optimizer is not None
        groups = [group for group in self.optimizer.param_groups if group["params"]]
        for module_group, base_group in zip(groups, self.engine.basic_optimizer.param_groups, strict=True):
            base_group.update({key: value for key, value in module_group.items() if key != "params"})
        with self._delay_scale_update():
            self.engine.step()

    @contextmanager
    def _delay_scale_update(self) -> Iterator[None]:
        """Delay changes of the loss scale until after the step. A context manager.

        DeepSpeed (0.19.8) changes the scale before dividing the gradients by the scale. In each step that doubles the
        scale, the gradients would have half of their value.
        """
        scaler = self.loss_scaler
        if scaler is None:
            yield
            return
        updates: list[bool] = []
        scaler.update_scale = updates.append
        try:
            yield
        finally:
            del scaler.update_scale
        for overflow in updates:
            scaler.update_scale(overflow)

    @property
    def loss_scaler(self) -> Any:
        """DeepSpeed's loss scaler, or None if it has none."""
        return getattr(self.engine.optimizer, "loss_scaler", None)

    # --- gather and set whole tensors -------------------------------------------------------------------------

    def _find_parts(self) -> Iterator[tuple[nn.Parameter, Part]]:
        zero = self.engine.optimizer
        rank = torch.distributed.get_rank()
        if self.stage == 3:
            for group in zero.fp16_groups:
                for parameter in group:
                    index, start, size = zero.grad_position[zero.get_param_id(parameter)]
                    left = min(size, parameter.ds_numel - rank * size)
                    yield parameter, Part(zero.fp32_partitioned_groups_flat[index], start, rank * size, max(left, 0))
            return
        for group, flat in zip(zero.bit16_groups, self.engine.basic_optimizer.param_groups, strict=True):
            for parameter in group:
                mapping, (whole,) = parameter._hp_mapping, flat["params"]
                if mapping is None:
                    yield parameter, Part(whole, 0, 0, 0)
                else:
                    full_address, half_address = mapping.hp_fragment_address, mapping.lp_fragment_address
                    yield parameter, Part(whole, full_address.start, half_address.start, full_address.numel)

    def whole(self, parameter: nn.Parameter, key: str | None = None) -> Tensor:
        """Return a whole parameter in float32, or its optimizer state ``key``. All processes must call it together."""
        part = self._parts.get(parameter)
        # whether the parameter itself is whole; a callback may have changed it
        is_here = key is None and self.stage != 3 and parameter.dtype is torch.float32
        if part is None or is_here:
            with self.gathered([parameter]):
                return parameter.detach().clone()
        source = part.flat.detach() if key is None else self.engine.basic_optimizer.state[part.flat][key]
        shape = getattr(parameter, "ds_shape", parameter.shape)
        whole = torch.zeros(shape.numel(), dtype=source.dtype, device=self._device)
        whole[part.offset : part.offset + part.numel] = source[part.start : part.start + part.numel]
        torch.distributed.all_reduce(whole)  # the other processes have zeros there
        return whole.view(shape)

    def set(self, parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
        """Set a parameter, or its optimizer state ``key``, from a whole tensor. Communicates only for a parameter."""
        part = self._parts.get(parameter)
        if key is None:
            with self.gathered([parameter]), torch.no_grad():
                parameter.copy_(value)
        if part is None:
            return
        target = part.flat.detach() if key is None else self.engine.basic_optimizer.state[part.flat][key]
        shard = value.reshape(-1)[part.offset : part.offset + part.numel]
        target[part.start : part.start + part.numel] = shard.to(target)

    def gathered(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
        """Gather parameters in this context. Changes by rank 0 are kept."""
        if self.stage != 3:
            return nullcontext()
        import deepspeed

        context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0)
        return context

    def module_state(self, keep: bool) -> dict[str, Any]:
        """Return the module's state dict with whole tensors in host memory, or with empty ones if not ``keep``.

        Trained parameters are in float32. All processes must call it together.
        """
        state = self.module.state_dict(keep_vars=True)
        done: dict[nn.Parameter, Tensor] = {}  # two names may refer to one parameter
        for name, value in state.items():
            if isinstance(value, nn.Parameter):
                if value not in done:
                    done[value] = _copy_or_empty(self.whole(value), keep)
                state[name] = done[value]
            elif isinstance(value, Tensor):
                state[name] = _copy_or_empty(value.detach(), keep)
        return state

    def load_module_state(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load a state dict of whole tensors, which all processes have.

        Raises:
            RuntimeError: if a shape differs or, if ``strict``, names are missing or unexpected.
        """
        targets = self.module.state_dict(keep_vars=True)
        missing, unknown = targets.keys() - state.keys(), state.keys() - targets.keys()
        if strict and (missing or unknown):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self.module).__name__}: missing keys {sorted(missing)},"
                f" unexpected keys {sorted(unknown)}."
            )
        for name, target in targets.items():
            if name not in state:
                continue
            owner, _, last = name.rpartition(".")
            if last == _EXTRA_STATE:
                self.module.get_submodule(owner).set_extra_state(state[name])
                continue
            shape = getattr(target, "ds_shape", target.shape)
            if state[name].shape != shape:
                raise RuntimeError(
                    f"size mismatch for {name}: got {tuple(state[name].shape)}, expected {tuple(shape)}."
                )
            if isinstance(target, nn.Parameter):
                self.set(target, state[name].to(self._device))
            else:
                target.copy_(state[name])

    def optimizer_state(self, keep: bool) -> dict[str, Any]:
        """Return the optimizer's state dict in torch's format: whole or empty tensors, as in :meth:`module_state`."""
        assert self.optimizer is not None
        states: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(parameters_of(self.optimizer)):
            if (part := self._parts.get(parameter)) is None:
                continue
            gathered = {
                key: _copy_or_empty(self.whole(parameter, key), keep)
                if isinstance(value, Tensor) and value.shape == part.flat.shape  # sharded like the flat tensor
                else copy.deepcopy(value)
                for key, value in self.engine.basic_optimizer.state.get(part.flat, {}).items()
            }
            if gathered:
                states[number] = gathered
        return {"state": states, "param_groups": self.optimizer.state_dict()["param_groups"]}

    def load_optimizer_state(self, state: Mapping[str, Any], saved_dtypes: SavedDtypes) -> None:
        """Load a state dict in torch's format with whole tensors, which all processes have, or with settings only.

        Args:
            state: the state dict.
            saved_dtypes: the dtype of each parameter when it was saved.
        """
        assert self.optimizer is not None
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for number, parameter in enumerate(parameters_of(self.optimizer)):
            part, saved = self._parts.get(parameter), state["state"].get(number, {})
            if part is None:
                continue
            flat_states = self.engine.basic_optimizer.state[part.flat]
            for key, value in saved.items():
                if isinstance(value, Tensor) and value.dim():
                    if key not in flat_states:
                        dtype = dtype_to_load(value, saved_dtypes.get(parameter), part.flat.dtype)
                        flat_states[key] = torch.zeros_like(part.flat, dtype=dtype)
                    self.set(parameter, value.to(self._device), key)
                else:
                    flat_states[key] = copy.deepcopy(value)

    # --- the end ----------------------------------------------------------------------------------------------

    def restore_module(self) -> None:
        """Restore the module on the CPU: whole, with its own parameters in their own dtypes, without DeepSpeed's hooks.

        All processes must call it together.
        """
        frozen = dict(self._frozen)
        values = {
            p: frozen[p] if p in frozen else self.whole(p).to("cpu", self._dtypes[p]) for p, _ in self._attributes
        }
        if self.engine is not self.module:
            self.engine.destroy()
        nn.Module.zero_grad(self.module)
        for parameter, attributes in self._attributes:
            vars(parameter).clear()
            vars(parameter).update(attributes)
            parameter.data = values[parameter]
        for module in self.module.modules():
            _remove_deepspeed_state(module)
        self.module.cpu()  # moves the buffers


def _copy_or_empty(tensor: Tensor, keep: bool) -> Tensor:
    return tensor.cpu() if keep else tensor.new_empty(0, device="cpu")


_DEEPSPEED_PREFIXES = (
    "ds_", "_ds_", "_external_params", "_original_parameters", "all_parameters", "applied_pre_backward_ref_cnt",
    "pre_bwd_fn", "post_bwd_fn",
)  # fmt: skip
"""Prefixes of the attributes that DeepSpeed adds to modules."""


def _remove_deepspeed_state(module: nn.Module) -> None:
    """Remove the attributes and hooks that DeepSpeed has left in a module."""
    attributes = vars(module)
    if type(attributes["_parameters"]) is not dict:
        attributes["_parameters"] = dict(attributes["_parameters"])
    hook_dicts = [hooks for name, hooks in attributes.items() if "_hooks" in name and isinstance(hooks, dict)]
    deepspeed_keys = {
        key
        for hooks in hook_dicts
        for key, hook in hooks.items()
        if getattr(hook, "__module__", "").startswith("deepspeed")
    }
    for hooks in hook_dicts:  # some of these dicts hold options of the hooks in other dicts
        for key in deepspeed_keys & hooks.keys():
            del hooks[key]
    for name in [name for name in attributes if name.startswith(_DEEPSPEED_PREFIXES)]:
        del attributes[name]


class ZeroScaler(LossScaler):
    """DeepSpeed's loss scale with the interface of a Trainer's scaler, to read, save and restore it.

    It does not scale losses or skip steps itself: DeepSpeed does.

    Args:
        device: device type.
        enabled: whether DeepSpeed scales losses.
        init_scale: initial scale.
        window: number of steps without overflow before the scale grows.
        min_scale: smallest scale.
    """

    def __init__(self, device: str, enabled: bool, init_scale: float, window: int, min_scale: float) -> None:
        self._get_scaler: Any = None  # DeepSpeed's scaler during a run
        self._saved_state: dict[str, Any] = {}  # its state between runs
        super().__init__(
            device, init_scale, growth_interval=window, enabled=enabled, min_scale=min(min_scale, init_scale)
        )

    def follow(self, get_scaler: Callable[[], Any] | None) -> None:
        """Use the loss scaler that ``get_scaler`` returns. None, at the end of a run, keeps that scaler's state."""
        if get_scaler is None:
            self._saved_state, self._get_scaler = self.state_dict(), None
            return
        self._get_scaler = get_scaler
        if self._saved_state:
            self.load_state_dict(self._saved_state)

    @property
    def skips_steps(self) -> bool:
        """True, because DeepSpeed skips steps in every precision."""
        return True

    @property
    def current_scale(self) -> float:
        """The current scale."""
        if self._get_scaler is not None and self.is_enabled():
            self._host_scale = float(self._get_scaler().cur_scale)
        return self._host_scale

    def get_scale(self) -> float:
        """Return the current scale."""
        return self.current_scale

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs`` unchanged, because DeepSpeed's backward pass scales the loss."""
        return outputs

    def unscale_(self, optimizer: Optimizer) -> None:
        """No-op, because DeepSpeed's step unscales."""

    def forget_steps(self) -> None:
        """No-op: an interrupted run leaves no state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format, with ``min_scale``, ``max_scale`` and ``hysteresis``.

        DeepSpeed's hysteresis is the number of overflows before the scale falls.
        """
        if not self.is_enabled():
            return {}
        if self._get_scaler is None and self._saved_state:
            return dict(self._saved_state)
        state = {
            "scale": self.current_scale, "growth_factor": 2.0, "backoff_factor": 0.5,
            "growth_interval": self.get_growth_interval(), "_growth_tracker": 0,
            "min_scale": self.min_scale, "max_scale": self.max_scale,
        }  # fmt: skip
        scaler = None if self._get_scaler is None else self._get_scaler()
        if scaler is not None and scaler.dynamic:
            good = scaler.cur_iter - scaler.last_overflow_iter - 1  # the scale grows at multiples of the window
            state["_growth_tracker"] = good and (good - 1) % scaler.scale_window + 1
            state["hysteresis"] = scaler.cur_hysteresis
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the scale and the growth tracker of DeepSpeed's scaler, also from a state of torch's scaler."""
        if not self.is_enabled() or not state_dict:
            return
        if self._get_scaler is None:
            self._saved_state = dict(state_dict)
            self._host_scale = float(state_dict["scale"])
            return
        scaler = self._get_scaler()
        scaler.cur_scale = float(state_dict["scale"])
        if scaler.dynamic:
            scaler.last_overflow_iter, scaler.cur_iter = -1, int(state_dict["_growth_tracker"])
            scaler.cur_hysteresis = int(state_dict.get("hysteresis", scaler.delayed_shift))


_GRADIENTS_KEY = "gradients of DeepSpeed's"
"""Key that replaces the gradients in a checkpoint."""


class ZeroGradients(Gradients):
    """DeepSpeed's gradients. They are not accessible: no process has them whole, and they are scaled until the step.

    Args:
        scaler: DeepSpeed's loss scale.
        zero: returns the module that DeepSpeed runs.
        stage: stage of ZeRO.
        drop_window: discards the open accumulation window.
    """

    scaler: ZeroScaler

    def __init__(
        self,
        scaler: ZeroScaler,
        zero: Callable[[], ZeroModule],
        stage: int,
        drop_window: Callable[[], None],
    ) -> None:
        super().__init__(scaler)
        self.are_parts = stage == 3
        self._zero = zero
        self._drop_window = drop_window
        self._has_unused = False  # whether gradients exist that no step has used
        self._norm: Tensor | None = None
        self._outcome: UpdateOutcome | None = None

    def clear(self, optimizer: Optimizer) -> None:
        """Drop the gradients of an interrupted window. DeepSpeed's step drops those that it used."""
        if self._has_unused:
            self._zero().engine.optimizer.zero_grad()
            self._has_unused = False

    def backward(self, loss: Tensor) -> None:
        """Run DeepSpeed's backward pass, which scales the loss and averages gradients over the processes."""
        self._has_unused = True
        self._zero().engine.backward(loss, scale_wrt_gas=False)

    def forward_without_loss(self, has_run: bool) -> None:
        """Raise if there are several processes, because their collectives depend on the order of the gradients.

        Raises:
            UnsupportedError: if there are several processes.
        """
        if torch.distributed.get_world_size() > 1:
            raise UnsupportedError(
                "Got a batch without a loss with strategy='deepspeed', which reduces the gradients of every batch."
                " Return a loss of 0 times the output of the forward pass, or use strategy='ddp' or 'fsdp'."
            )

    def multiply_(self, optimizers: Iterable[Optimizer], factor: float | Tensor) -> None:
        """Raise, because DeepSpeed's gradients cannot be weighted.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "Got batches with different weights in an accumulation window with strategy='deepspeed', which cannot"
            " weight gradients afterwards. Return no 'weight' from `training_step`, set accumulate_grad_batches=1, or"
            " use strategy='ddp' or 'fsdp'."
        )

    def unscale_(self, optimizer: Optimizer) -> None:
        """No-op, because DeepSpeed's step unscales."""

    def norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor | None:
        """Return the tensor that DeepSpeed's step fills with the norm of all gradients; NaN until then."""
        if self._norm is None:
            self._norm = torch.full((), torch.nan)
        return self._norm

    def clip_(
        self, optimizer: Optimizer, limit: float, algorithm: str, norm_type: float = 2.0, *, measure: bool = True
    ) -> Tensor | None:
        """Clip in the next step. Returns the norm, as :meth:`norm` does."""
        self._zero().engine.optimizer.clip_grad = limit
        return self.norm(optimizer)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Run DeepSpeed's step and record its outcome.

        Raises:
            UnsupportedError: if the optimizer is not the one that DeepSpeed was initialized with.
        """
        zero = self._zero()
        if optimizer is not zero.optimizer:
            raise UnsupportedError(
                f"Got another optimizer ({type(optimizer).__name__}) in the middle of a fit with strategy='deepspeed',"
                " which keeps the one that it began with. Exchange it between two fits."
            )
        scale = self.scaler.current_scale
        zero.step()
        self._has_unused = False
        skipped = (optimizer,) if getattr(zero.engine.optimizer, "overflow", False) else ()
        self._outcome = UpdateOutcome(skipped, scale, self.scaler.current_scale)
        pending, self._norm = self._norm, None
        norm = zero.engine.get_global_grad_norm()
        if pending is not None and norm is not None:
            pending.fill_(float(norm))

    def update(self, accumulating: Sequence[Optimizer] = ()) -> UpdateOutcome:
        """Return the outcome of the last step, once. DeepSpeed has already adjusted the scale."""
        outcome, self._outcome = self._outcome, None
        scale = self.scaler.current_scale
        return outcome or UpdateOutcome((), scale, scale)

    def local(self, optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
        """Return [], because DeepSpeed's gradients are not accessible."""
        return []

    def part(self, tensor: Tensor) -> Tensor:
        """Return the part of a parameter in this process."""
        part: Tensor = getattr(tensor, "ds_tensor", tensor)
        return part

    def state_dict(
        self, parameters: Iterable[tuple[str, Tensor]], optimizers: Iterable[Optimizer]
    ) -> dict[str, Tensor]:
        """Return a marker if a window is open, because DeepSpeed does not expose its gradients; otherwise {}."""
        return {_GRADIENTS_KEY: torch.zeros(())} if list(optimizers) else {}

    def can_load(self, parameters: Iterable[tuple[str, Tensor]], state: Mapping[str, Tensor]) -> bool:
        """Return True: :meth:`load_state_dict` discards gradients with a warning."""
        return True

    def load_state_dict(self, parameters: Iterable[tuple[str, Tensor]], state: Mapping[str, Tensor]) -> None:
        """Discard the open window and begin another, because gradients cannot be loaded into DeepSpeed."""
        if state:
            warn(
                "The checkpoint was written inside of an accumulation window. DeepSpeed does not expose gradients:"
                " those of the window's first batches are lost, and the next batch starts another window.",
            )
            self._drop_window()
