"""A module in the hands of DeepSpeed, whose ZeRO spreads optimizer states, gradients and parameters over processes.

The backward pass, the mean over the processes, the loss scale, clipping and the step are DeepSpeed's own. What is here
calls them by the verbs of :class:`~trainer.engine.gradients.Gradients`, in the order of the loop, and reads what came
of it: whether the step was skipped, the scale before and after, the norm.

ZeRO has the weights that the optimizer steps in float32, in flat tensors, of which each process has a part; the same
for what the optimizer keeps of each weight. :class:`ZeroModule` finds a parameter in them, and gathers or sets it.
DeepSpeed is imported when the first of them is made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.engine.gradients import Gradients
from trainer.engine.optimizer_states import SavedDtypes, dtype_to_load
from trainer.errors import UnsupportedError, warn
from trainer.precision.scaler import LossScaler, UpdateOutcome
from trainer.walks import parameters_of


class Part(NamedTuple):
    """As much of a parameter as this process steps.

    Attributes:
        flat: the tensor that it is in, a parameter of the optimizer that DeepSpeed steps.
        start: where it begins there.
        offset: where it begins in the parameter, as a vector.
        numel: how long it is; 0 for nothing.
    """

    flat: Tensor
    start: int
    offset: int
    numel: int


class ZeroModule:
    """A module, and for a fit its optimizer, that DeepSpeed has taken.

    Args:
        module: the module, whole.
        optimizer: steps its parameters. It is left as it is: DeepSpeed gets a copy. None for evaluation.
        config: DeepSpeed's, complete.
        device: this process's.

    Attributes:
        engine: DeepSpeed's, which is a module around the module; the module itself where DeepSpeed is not needed.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer | None, config: dict[str, Any], device: torch.device
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.stage: int = config["zero_optimization"]["stage"]
        self._device = device
        self._attributes = [(parameter, dict(vars(parameter))) for parameter in module.parameters()]
        # in 16 bits from here on, and nobody has more of those that are not trained
        self._frozen = [(p, p.detach().cpu()) for p in module.parameters() if not (p.requires_grad and optimizer)]
        self._dtypes = {parameter: parameter.dtype for parameter in module.parameters()}
        self.engine: Any = self._begin(config) if optimizer is not None or self.stage == 3 else self._move(config)
        self._parts = dict(self._find_parts()) if optimizer is not None else {}

    def _begin(self, config: dict[str, Any]) -> Any:
        """Have DeepSpeed take the module."""
        import argparse

        import deepspeed

        theirs: Any = None
        if self.optimizer is not None:
            theirs = copy.copy(self.optimizer)
            theirs.param_groups = [dict(group, params=list(group["params"])) for group in theirs.param_groups]
            theirs.state = copy.copy(self.optimizer.state)
        engine, *_ = deepspeed.initialize(
            args=argparse.Namespace(**{} if self._device.index is None else {"device_rank": self._device.index}),
            model=self.module,
            model_parameters=[p for p in self.module.parameters() if p.requires_grad] if theirs is not None else [],
            optimizer=theirs,
            config=config,
            dist_init_required=False,
        )
        return engine

    def _move(self, config: dict[str, Any]) -> nn.Module:
        """Evaluation by whole weights needs nobody: the module, in the dtype that DeepSpeed would give it."""
        for block, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            if config.get(block, {}).get("enabled"):
                for parameter in self.module.parameters():
                    parameter.data = parameter.data.to(dtype)
        return self.module.to(self._device)

    # --- a weight update --------------------------------------------------------------------------------------

    def step(self) -> None:
        """A step of DeepSpeed's, with the learning rates and their like as the module's optimizer has them now."""
        assert self.optimizer is not None
        groups = [group for group in self.optimizer.param_groups if group["params"]]
        for mine, theirs in zip(groups, self._base.param_groups, strict=True):
            theirs.update({key: value for key, value in mine.items() if key != "params"})
        with self._scale_kept():
            self.engine.step()

    @contextmanager
    def _scale_kept(self) -> Iterator[None]:
        """A context for a step, after which the loss scale changes.

        DeepSpeed changes it before it divides the gradients by it: they would be half of what they are on each step on
        which the scale doubles (0.19.8).
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
    def overflowed(self) -> bool:
        """Whether the last step was skipped."""
        return bool(getattr(self.engine.optimizer, "overflow", False))

    @property
    def loss_scaler(self) -> Any:
        """DeepSpeed's; None where it has none."""
        return getattr(self.engine.optimizer, "loss_scaler", None)

    def limit_norm(self, limit: float) -> None:
        """Have the next step clip the gradients to this norm; 0 for no limit."""
        self.engine.optimizer.clip_grad = limit

    @property
    def _base(self) -> Any:
        """The optimizer that DeepSpeed steps."""
        return self.engine.basic_optimizer

    # --- whole tensors, and back ------------------------------------------------------------------------------

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
        for group, flat in zip(zero.bit16_groups, self._base.param_groups, strict=True):
            for parameter in group:
                found, (whole,) = parameter._hp_mapping, flat["params"]
                if found is None:
                    yield parameter, Part(whole, 0, 0, 0)
                else:
                    here, there = found.hp_fragment_address, found.lp_fragment_address
                    yield parameter, Part(whole, here.start, there.start, here.numel)

    def whole(self, parameter: nn.Parameter, key: str | None = None) -> Tensor:
        """A parameter in float32 or, with a ``key``, what the optimizer keeps of it. All processes call it together."""
        part = self._parts.get(parameter)
        is_here = key is None and self.stage != 3 and parameter.dtype is torch.float32  # also what a callback put there
        if part is None or is_here:
            with self.gathered([parameter]):
                return parameter.detach().clone()
        source = part.flat.detach() if key is None else self._base.state[part.flat][key]
        shape = getattr(parameter, "ds_shape", parameter.shape)
        whole = torch.zeros(shape.numel(), dtype=source.dtype, device=self._device)
        whole[part.offset : part.offset + part.numel] = source[part.start : part.start + part.numel]
        torch.distributed.all_reduce(whole)  # others have zeros there
        return whole.view(shape)

    def set(self, parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
        """The opposite of :meth:`whole`. With a ``key``, no other process is needed."""
        part = self._parts.get(parameter)
        if key is None:
            with self.gathered([parameter]), torch.no_grad():
                parameter.copy_(value)
        if part is None:
            return
        target = part.flat.detach() if key is None else self._base.state[part.flat][key]
        mine = value.reshape(-1)[part.offset : part.offset + part.numel]
        target[part.start : part.start + part.numel] = mine.to(target)

    def gathered(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
        """A context in which these are whole; what the first process changes in them stays."""
        if self.stage != 3:
            return nullcontext()
        import deepspeed

        context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0)
        return context

    def module_state(self, keep: bool) -> dict[str, Any]:
        """The module's state dict, of whole tensors in host memory: where ``keep`` is set, else of empty ones.

        Trained parameters are in float32. All processes call this together.
        """
        state = self.module.state_dict(keep_vars=True)
        done: dict[nn.Parameter, Tensor] = {}  # two names may stand for one
        for name, value in state.items():
            if isinstance(value, nn.Parameter):
                if value not in done:
                    done[value] = _kept(self.whole(value), keep)
                state[name] = done[value]
            elif isinstance(value, Tensor):
                state[name] = _kept(value.detach(), keep)
        return state

    def load_module_state(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load a state dict of whole tensors, which all processes have.

        Raises:
            RuntimeError: names that are missing, or that the module has not; if ``strict``.
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
            if isinstance(target, nn.Parameter):
                shape = getattr(target, "ds_shape", target.shape)
                if state[name].shape != shape:
                    raise RuntimeError(
                        f"size mismatch for {name}: got {tuple(state[name].shape)}, expected {tuple(shape)}."
                    )
                self.set(target, state[name].to(self._device))
            elif isinstance(target, Tensor):
                target.copy_(state[name])

    def optimizer_state(self, keep: bool) -> dict[str, Any]:
        """The optimizer's state dict, as torch has it: of whole tensors, or empty ones, as in :meth:`module_state`."""
        assert self.optimizer is not None
        states: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(parameters_of(self.optimizer)):
            part = self._parts.get(parameter)
            kept = {} if part is None else self._base.state.get(part.flat, {})
            found = {
                key: _kept(self.whole(parameter, key), keep) if _is_spread(value, part) else copy.deepcopy(value)
                for key, value in kept.items()
            }
            if found:
                states[number] = found
        return {"state": states, "param_groups": self.optimizer.state_dict()["param_groups"]}

    def load_optimizer_state(self, state: Mapping[str, Any], saved_dtypes: SavedDtypes) -> None:
        """Load a state dict as torch has it, of whole tensors, which all processes have; or settings alone.

        Args:
            state: The state dict.
            saved_dtypes: The dtype that each parameter had when it was saved.
        """
        assert self.optimizer is not None
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for number, parameter in enumerate(parameters_of(self.optimizer)):
            part, saved = self._parts.get(parameter), state["state"].get(number, {})
            if part is None:
                continue
            kept = self._base.state[part.flat]
            for key, value in saved.items():
                if isinstance(value, Tensor) and value.dim():
                    if key not in kept:
                        dtype = dtype_to_load(value, saved_dtypes.get(parameter), part.flat.dtype)
                        kept[key] = torch.zeros_like(part.flat, dtype=dtype)
                    self.set(parameter, value.to(self._device), key)
                else:
                    kept[key] = copy.deepcopy(value)

    # --- the end ----------------------------------------------------------------------------------------------

    def put_back(self) -> None:
        """Make the module what it was: whole, of its own parameters in their own dtype, on the CPU, without hooks.

        All processes call this together.
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
            _clean(module)
        self.module.cpu()  # buffers


def _kept(tensor: Tensor, keep: bool) -> Tensor:
    return tensor.cpu() if keep else tensor.new_empty(0, device="cpu")


def _is_spread(value: Any, part: Part | None) -> bool:
    """Whether what an optimizer keeps is as long as the tensor that it keeps it of."""
    return part is not None and isinstance(value, Tensor) and value.shape == part.flat.shape


_LEFT = (
    "ds_", "_ds_", "_external_params", "_original_parameters", "all_parameters", "applied_pre_backward_ref_cnt",
    "pre_bwd_fn", "post_bwd_fn",
)  # fmt: skip
"""How attributes begin that DeepSpeed gives to modules."""


def _clean(module: nn.Module) -> None:
    """Take away what DeepSpeed has left in a module."""
    own = vars(module)
    if type(own["_parameters"]) is not dict:
        own["_parameters"] = dict(own["_parameters"])
    every = [hooks for name, hooks in own.items() if "_hooks" in name and isinstance(hooks, dict)]
    theirs = {
        key for hooks in every for key, hook in hooks.items() if getattr(hook, "__module__", "").startswith("deepspeed")
    }
    for hooks in every:  # some of these dicts say of others' hooks how they are called
        for key in theirs & hooks.keys():
            del hooks[key]
    for name in [name for name in own if name.startswith(_LEFT)]:
        del own[name]


class ZeroScaler(LossScaler):
    """DeepSpeed's loss scale, in the shape of a Trainer's: to be read, saved and restored. It scales and skips nothing.

    Args:
        device: the type of the device.
        enabled: whether DeepSpeed scales losses.
        init_scale: what it begins with.
        window: steps without overflow before the scale grows.
        min_scale: the least scale.
    """

    def __init__(self, device: str, enabled: bool, init_scale: float, window: int, min_scale: float) -> None:
        self._theirs: Any = None  # DeepSpeed's, while there is a run
        self._kept: dict[str, Any] = {}  # its state, between runs
        super().__init__(
            device, init_scale, growth_interval=window, enabled=enabled, min_scale=min(min_scale, init_scale)
        )

    def follow(self, theirs: Callable[[], Any] | None) -> None:
        """Read the loss scaler that ``theirs`` returns; None at the end of a run."""
        if theirs is None:
            self._kept, self._theirs = self.state_dict(), None
            return
        self._theirs = theirs
        if self._kept:
            self.load_state_dict(self._kept)

    @property
    def skips_steps(self) -> bool:
        """True: DeepSpeed skips steps in every precision."""
        return True

    @property
    def current_scale(self) -> float:
        """The scale in force."""
        if self._theirs is not None and self.is_enabled():
            self._host_scale = float(self._theirs().cur_scale)
        return self._host_scale

    def get_scale(self) -> float:
        """The scale in force."""
        return self.current_scale

    def scale(self, outputs: Any) -> Any:
        """``outputs``: DeepSpeed's backward pass scales the loss."""
        return outputs

    def unscale_(self, optimizer: Optimizer) -> None:
        """Nothing: DeepSpeed's step does it."""

    def forget_steps(self) -> None:
        """Nothing is left of an interrupted run."""

    def state_dict(self) -> dict[str, Any]:
        """As torch has it, with ``min_scale``, and DeepSpeed's ``hysteresis``: overflows before the scale falls."""
        if not self.is_enabled():
            return {}
        if self._theirs is None and self._kept:
            return dict(self._kept)
        state = {
            "scale": self.current_scale, "growth_factor": 2.0, "backoff_factor": 0.5,
            "growth_interval": self.get_growth_interval(), "_growth_tracker": 0,
            "min_scale": self.min_scale, "max_scale": self.max_scale,
        }  # fmt: skip
        theirs = None if self._theirs is None else self._theirs()
        if theirs is not None and theirs.dynamic:
            good = theirs.cur_iter - theirs.last_overflow_iter - 1  # it grows where this is a multiple of the window
            state["_growth_tracker"] = good and (good - 1) % theirs.scale_window + 1
            state["hysteresis"] = theirs.cur_hysteresis
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give DeepSpeed's the scale and the growth tracker, also those of torch's."""
        if not self.is_enabled() or not state_dict:
            return
        if self._theirs is None:
            self._kept = dict(state_dict)
            self._host_scale = float(state_dict["scale"])
            return
        theirs = self._theirs()
        theirs.cur_scale = float(state_dict["scale"])
        if theirs.dynamic:
            theirs.last_overflow_iter, theirs.cur_iter = -1, int(state_dict["_growth_tracker"])
            theirs.cur_hysteresis = int(state_dict.get("hysteresis", theirs.delayed_shift))


_LOST = "gradients of DeepSpeed's"
"""Stands for them in a checkpoint."""


class ZeroGradients(Gradients):
    """DeepSpeed's gradients. They are nobody else's: no process has whole ones, or true ones before the step.

    Args:
        scaler: DeepSpeed's loss scale.
        zero: returns the module that DeepSpeed has, in a run.
        stage: of ZeRO.
        processes: returns how many there are.
        drop_window: forgets the accumulation window that is open.
    """

    scaler: ZeroScaler

    def __init__(
        self,
        scaler: ZeroScaler,
        zero: Callable[[], ZeroModule],
        stage: int,
        processes: Callable[[], int],
        drop_window: Callable[[], None],
    ) -> None:
        super().__init__(scaler)
        self.are_parts = stage == 3
        self._zero = zero
        self._processes = processes
        self._drop_window = drop_window
        self._waits = False  # gradients, for a step
        self._norm: Tensor | None = None
        self._outcome: UpdateOutcome | None = None

    def clear(self, optimizer: Optimizer) -> None:
        """Drop what an interrupted window has left. DeepSpeed's step drops its own."""
        if self._waits:
            self._zero().engine.optimizer.zero_grad()
            self._waits = False

    def backward(self, loss: Tensor) -> None:
        """DeepSpeed's, which scales the loss, and averages over the processes."""
        self._waits = True
        self._zero().engine.backward(loss, scale_wrt_gas=False)

    def forward_without_loss(self, has_run: bool) -> None:
        """Refuse: the other processes' exchanges depend on the order in which gradients come.

        Raises:
            UnsupportedError: on several processes.
        """
        if self._processes() > 1:
            raise UnsupportedError(
                "Got a batch without a loss with strategy='deepspeed', whose processes wait for each other's gradients"
                " of every batch. Return a loss of 0 times what the forward pass has computed, or use strategy='ddp' or"
                " 'fsdp'."
            )

    def multiply_(self, optimizers: Iterable[Optimizer], factor: float | Tensor) -> None:
        """Refuse.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "Got batches that count differently in one accumulation window with strategy='deepspeed', whose gradients"
            " cannot be weighted afterwards. Return no 'weight' from `training_step`, set accumulate_grad_batches=1, or"
            " use strategy='ddp' or 'fsdp'."
        )

    def unscale_(self, optimizer: Optimizer) -> None:
        """Nothing: DeepSpeed's step does it."""

    def norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor | None:
        """The norm of all gradients, as DeepSpeed's step measures it: the number is there after that."""
        if self._norm is None:
            self._norm = torch.full((), torch.nan)
        return self._norm

    def clip_(
        self, optimizer: Optimizer, limit: float, algorithm: str, norm_type: float = 2.0, *, measure: bool = True
    ) -> Tensor | None:
        """Have the step clip. Returns the norm, as :meth:`norm`."""
        self._zero().limit_norm(limit)
        return self.norm(optimizer)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """DeepSpeed's step, and what came of it.

        Raises:
            UnsupportedError: another optimizer than the one that DeepSpeed was given.
        """
        zero = self._zero()
        if optimizer is not zero.optimizer:
            raise UnsupportedError(
                f"Got another optimizer ({type(optimizer).__name__}) in the middle of a fit with strategy='deepspeed',"
                " which keeps the one that it began with. Exchange it between two fits."
            )
        scale = self.scaler.current_scale
        zero.step()
        self._waits = False
        skipped = (optimizer,) if zero.overflowed else ()
        self._outcome = UpdateOutcome(skipped, scale, self.scaler.current_scale)
        asked, self._norm = self._norm, None
        norm = zero.engine.get_global_grad_norm()
        if asked is not None and norm is not None:
            asked.fill_(float(norm))

    def update(self, accumulating: Sequence[Optimizer] = ()) -> UpdateOutcome:
        """Return the outcome of the last step, once. DeepSpeed has adjusted the scale."""
        outcome, self._outcome = self._outcome, None
        scale = self.scaler.current_scale
        return outcome or UpdateOutcome((), scale, scale)

    def local(self, optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
        """None."""
        return []

    def part(self, tensor: Tensor) -> Tensor:
        """As much of a parameter as this process holds."""
        part: Tensor = getattr(tensor, "ds_tensor", tensor)
        return part

    def state_dict(
        self, parameters: Iterable[tuple[str, Tensor]], optimizers: Iterable[Optimizer]
    ) -> dict[str, Tensor]:
        """None of a window that is open, only that there are some: DeepSpeed does not give them away."""
        return {_LOST: torch.zeros(())} if list(optimizers) else {}

    def load_state_dict(self, parameters: Iterable[tuple[str, Tensor]], state: Mapping[str, Tensor]) -> None:
        """Begin another window in the place of one that was open: its gradients cannot be given to DeepSpeed."""
        if state:
            warn(
                "The checkpoint was written inside of an accumulation window. DeepSpeed keeps gradients to itself:"
                " those of the window's first batches are lost, and the next batch begins another one.",
            )
            self._drop_window()
