"""The loss scaler: torch's ``GradScaler`` with four additions for a Trainer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from ctypes import c_float
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.autograd.function import BackwardCFunction
from torch.optim import SGD, Optimizer

from trainer.errors import PrecisionError, expect, is_count
from trainer.precision.dtypes import real_view
from trainer.precision.readback import Readback


class UpdateOutcome(NamedTuple):
    """The outcome of one ``update`` and of the steps before it.

    Attributes:
        skipped: the optimizers that skipped a step, each once.
        scale: the scale that the steps were computed with.
        next_scale: the scale after the update.
        nonfinite_loss: whether a loss in this process was not finite. Losses are read only after a skipped step;
            otherwise this is False.
    """

    skipped: tuple[Optimizer, ...]
    scale: float
    next_scale: float
    nonfinite_loss: bool = False


_UNSCALED = UpdateOutcome((), 1.0, 1.0)


def snapshot_loss(loss: Tensor) -> Tensor:
    """Return a detached loss to read later. It is a copy if the replay of a CUDA graph may overwrite its memory.

    Of a ``DTensor``, as in ``loss_parallel``, it is the whole tensor; this may be a collective.
    """
    detached = loss.detach()
    if type(detached) is not Tensor and hasattr(detached, "full_tensor"):
        detached = detached.full_tensor()
    if not loss.is_cuda:
        return detached
    is_view = loss._is_view()  # noqa: SLF001 - no public API reports it
    return detached.clone() if is_view or isinstance(loss.grad_fn, BackwardCFunction) else detached


class LossScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` with the same arguments and methods, and four additions:

    1. After ``update``, :meth:`resolve_outcome` returns the optimizers that skipped their step. torch's ``step``
       returns None whether or not it skips. With a fused optimizer the outcome is computed on the device; ``update``
       starts to copy it to the host without waiting, and ``resolve_outcome`` may be called much later.
    2. Optimizers that have no gradients (frozen, idle in this batch) are ignored; torch raises.
    3. An optimizer may step several times before one ``update`` (an n-critic GAN); torch raises. The overflows of all
       steps count in this update.
    4. The scale has a lower and an upper limit. Its value is also kept on the host: :attr:`current_scale` waits only
       for the outcome of the last ``update``.

    Args:
        device: device type of the gradients, such as ``"cuda"`` or ``"cpu"``.
        enabled: whether to scale. A disabled scaler does nothing: ``scale`` returns its input, ``step`` steps.
        init_scale: initial scale; finite and positive.
        growth_factor: factor after ``growth_interval`` steps without overflow; above 1.
        backoff_factor: factor after an overflow; between 0 and 1.
        growth_interval: steps without overflow before the scale grows; at least 1.
        min_scale: lower limit of the scale. Default: 1.
        max_scale: upper limit of the scale. Default: None, no limit.

    Attributes:
        before_unscale: functions called with an optimizer when its gradients are complete and still scaled.
        gradients_of: returns an optimizer's gradients; with a sharded engine, their parts in this process.
        losses: the tensors that :meth:`scale` returned since the last ``update``, detached.
        unscales: whether gradients that were not checked yet are scaled. In manual optimization they are not:
            ``manual_backward`` unscales its own, and others come from ``loss.backward()`` or ``torch.autograd.grad``.
        all_reduce_flag: called with a tensor that is above 0 if a gradient of this process is not finite. It must
            replace the tensor in place by its maximum over all processes. Default: None, which requires the same
            gradients on all processes.

    Raises:
        PrecisionError: if a factor is out of range, or the scaler is enabled for CUDA on a machine without it (torch
            would warn and train unscaled).
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 1.0,
        max_scale: float | None = None,
    ) -> None:
        ceiling = float("inf") if max_scale is None else max_scale
        expect(growth_factor > 1.0, "a number above 1", PrecisionError, growth_factor=growth_factor)
        expect(0.0 < backoff_factor < 1.0, "a number between 0 and 1", PrecisionError, backoff_factor=backoff_factor)
        steps, below = "a whole number of steps, at least 1", f"above 0 and at most max_scale={max_scale}"
        expect(is_count(growth_interval), steps, PrecisionError, growth_interval=growth_interval)
        expect(0.0 < min_scale <= ceiling, below, PrecisionError, min_scale=min_scale)
        limits = f"from {min_scale} to {max_scale or 'any finite number'}"
        is_within = min_scale <= init_scale <= ceiling and init_scale != float("inf")
        expect(is_within, limits, PrecisionError, init_scale=init_scale)
        if enabled and device == "cuda" and not torch.cuda.is_available():
            raise PrecisionError(
                "Got an enabled loss scaler for 'cuda', but CUDA is not available here. Use accelerator='cpu',"
                " or precision='bf16-mixed' or '32-true'."
            )
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.min_scale = min_scale
        self.max_scale = ceiling
        self.readback = Readback(device)
        self.before_unscale: list[Callable[[Optimizer], None]] = []
        self.gradients_of: Callable[[Optimizer], list[Tensor]] = gradients_of
        self.all_reduce_flag: Callable[[Tensor], None] | None = None
        self._host_scale = float(init_scale) if enabled else 1.0
        self._host_tracker = 0
        self._checks: list[Check] = []
        self._unchecked: set[int] = set()  # ids of optimizers with a check that `forget_unused` dropped before a step
        self._unresolved: list[Check] = []
        self.losses: list[Tensor] = []
        self.unscales = True
        self._unresolved_losses: list[Tensor] = []
        self._outcome: UpdateOutcome | None = None
        self._accepts_scaler: dict[type, bool] = {}
        self._inverse = (0.0, torch.zeros(()))
        self._with_momentum: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    @property
    def skips_steps(self) -> bool:
        """Whether a step may be skipped because a gradient is not finite."""
        return self._enabled

    @property
    def current_scale(self) -> float:
        """The current scale (1 if disabled), as a host number.

        Reading it waits for the outcome of the last update, and keeps the outcome for `resolve_outcome`.
        """
        self._resolve()
        return self._host_scale

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor or a collection of tensors by the scale. A single tensor is also added to ``losses``."""
        if not self._enabled:
            return outputs
        scaled, self.unscales = super().scale(outputs), True
        if isinstance(scaled, Tensor):
            self.losses.append(snapshot_loss(scaled))
        return scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, in place. No-op if that was done since the last ``step``."""
        if not self._enabled:
            return
        if "_on_before_step" in (attributes := vars(optimizer)):  # a LightningOptimizer
            optimizer = attributes["_optimizer"]
        state = self._per_optimizer_states[id(optimizer)]
        # if the stage is STEPPED, this is another step before the update; _checks keeps the check of the first
        if state["stage"] is not OptState.UNSCALED and self.has_scaled:
            found_inf = self._check_gradients(optimizer, unscales=self.unscales)
            state["found_inf_per_device"] = found_inf
            if found_inf:
                state["stage"] = OptState.UNSCALED
                self._checks.append(Check(optimizer, list(found_inf.values())))

    def _check_gradients(self, optimizer: Optimizer, *, unscales: bool) -> dict[torch.device, Tensor]:
        """Return a flag on each device with gradients: above 0 if one of them is not finite. May unscale them, too."""
        assert self._scale is not None
        if unscales:
            for look in self.before_unscale:
                look(optimizer)
        factor = self._inverse_scale(self._scale) if unscales else torch.ones_like(self._scale)
        found_inf = torch.zeros((), dtype=torch.float32, device=self._scale.device)
        return self._unscale_grads_(optimizer, factor, found_inf, False)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call ``optimizer.step()``, unless one of its gradients is not finite, or it has no gradients.

        Raises:
            RuntimeError: if a ``closure`` was passed while the loss is scaled, as in torch, because the gradients that
                it computes would not be unscaled.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]
        if "closure" in kwargs:
            raise RuntimeError(
                f"Got a closure for {type(optimizer).__name__} while the loss is scaled, expected none: the gradients"
                " that it evaluates would not be unscaled. Use precision='bf16-mixed' or '32-true', which do not"
                " scale the loss."
            )
        self.unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if not state["found_inf_per_device"]:
            self._expect_no_gradients(optimizer)
            del self._per_optimizer_states[id(optimizer)]  # it may have gradients the next time
            return None
        if id(optimizer) in self._unchecked:  # the module may have set gradients again that it had cleared (PCGrad)
            self._unchecked.remove(id(optimizer))
            for device, flag in self._check_gradients(optimizer, unscales=False).items():
                state["found_inf_per_device"].setdefault(device, flag).clamp_(min=flag)
        if self.all_reduce_flag is not None:  # not in `unscale_`, which some processes may not call
            for flag in state["found_inf_per_device"].values():
                self.all_reduce_flag(flag)
        state["stage"] = OptState.STEPPED
        check = next(check for check in reversed(self._checks) if check.optimizer is optimizer)
        check.stepped = True
        if getattr(optimizer, "_step_supports_amp_scaling", False) and not self._requests_scaler(optimizer):
            return self._step_fused(optimizer, check, args, kwargs)
        if check.read():  # host-device synchronization on a GPU: the host decides whether to step
            return None
        return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]

    @property
    def has_scaled(self) -> bool:
        """Whether a loss has ever been scaled, or scaled gradients have been restored."""
        return self._scale is not None

    def may_step(self, optimizer: Optimizer) -> bool:
        """Return whether ``optimizer.step()`` may run now: if :meth:`step` calls it, or no gradients are scaled."""
        state = self._per_optimizer_states.get(id(optimizer))
        steps = state is not None and state["stage"] is OptState.STEPPED
        return steps or self._scale is None or not self.gradients_of(optimizer)

    def skipped_last_step(self) -> bool:
        """Return whether the last ``step`` since ``update`` was skipped.

        This is a host-device synchronization if the optimizer is fused.
        """
        check = next((check for check in reversed(self._checks) if check.stepped), None)
        if check is None:
            return False
        return check.read() if check.overflowed is None else check.overflowed

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adjust the scale, once for all gradients unscaled since the last ``update``. No-op without any.

        This happens on the device. Outcomes that the host does not know yet are copied; see :meth:`resolve_outcome`.

        Args:
            new_scale: the new scale, within the limits, used even if there were no steps. If it is passed,
                :meth:`resolve_outcome` returns no skipped steps. Default: None, to compute it from the overflows.
        """
        if not self._enabled:
            return
        checks = self._close_update()
        if new_scale is not None:
            self._set_scale(float(new_scale))
            return
        if not checks:
            return
        self._send(checks)
        scale, tracker = self._check_scale_growth_tracker("update")
        found_inf = _any_of([number for check in checks for number in check.found_inf], scale.device)
        factors = self._growth_factor, self._backoff_factor, self._growth_interval
        torch._amp_update_scale_(scale, tracker, found_inf, *factors)
        fallen, grown = self._host_scale * self._backoff_factor, self._host_scale * self._growth_factor
        if fallen < self.min_scale or grown > self.max_scale:
            scale.clamp_(self.min_scale, self.max_scale)
        self._unresolved = checks

    def back_off(self) -> float:
        """Lower the scale as after a skipped step. Return the new scale divided by the old one."""
        before = self.current_scale
        self.update(before * self._backoff_factor)
        self._check_scale_growth_tracker("back_off")[1].zero_()
        self._host_tracker = 0
        return self._host_scale / before

    def _close_update(self) -> list[Check]:
        """Resolve the outcome of the last update, if that was not done yet. Return the checks since that update."""
        self.resolve_outcome()
        checks, self._checks = self._checks, []
        self._unresolved_losses, self.losses = self.losses, []
        self._per_optimizer_states.clear()
        return checks

    def update_and_compare(self) -> float | Tensor:
        """Call :meth:`update`. Return the new scale divided by the old one.

        The result is a 0-dim tensor if the outcome of a step is not on the host yet.
        """
        if not self.is_enabled() or self._scale is None:
            self.update()
            return 1.0
        if self.readback.arrives_at_once or all(check.overflowed is not None for check in self._checks):
            before = self.current_scale
            self.update()
            return self.current_scale / before
        before_on_device = self._scale.clone()
        self.update()
        return self._scale / before_on_device

    def forget_unused(self) -> list[tuple[Optimizer, Tensor]]:
        """Revert the state of :meth:`unscale_` for optimizers that have not stepped since.

        Returns:
            Each such optimizer with the 0-dim tensor to multiply its gradients by. It is the scale, or inf if a
            gradient was not finite, so that the next :meth:`unscale_` detects this again, even after clipping.
        """
        unused = [check for check in self._checks if not check.stepped]
        self.unscales |= bool(unused)
        for check in unused:
            self._checks.remove(check)
            del self._per_optimizer_states[id(check.optimizer)]
            self._unchecked.add(id(check.optimizer))
        return [
            (check.optimizer, (1.0 if self._scale is None else self._scale) / (1.0 - _any_of(check.found_inf)))
            for check in unused
        ]

    def _send(self, checks: list[Check]) -> None:
        """Start to copy the outcomes that are not on the host yet."""
        unread = [number for check in checks if check.overflowed is None for number in check.found_inf]
        if unread:
            self.readback.start(unread)

    @property
    def outcome_is_on_host(self) -> bool:
        """Whether :meth:`resolve_outcome` returns without a host-device synchronization."""
        return self.readback.arrives_at_once or all(check.overflowed is not None for check in self._unresolved)

    def resolve_outcome(self) -> UpdateOutcome:
        """Return the outcome of the last ``update``, once. A second call returns an outcome without skipped steps.

        For an ordinary optimizer, the outcome is already on the host, because ``step`` read it to decide whether to
        skip. For a fused one, ``update`` started a copy; this method waits for it if it is not complete.
        """
        if not self._enabled:
            return _UNSCALED
        self._resolve()
        outcome, self._outcome = self._outcome, None
        return outcome or UpdateOutcome((), self._host_scale, self._host_scale)

    def _resolve(self) -> None:
        """Read the outcome that the last ``update`` copied, unless done, and keep it for :meth:`resolve_outcome`."""
        checks, self._unresolved = self._unresolved, []
        losses, self._unresolved_losses = self._unresolved_losses, []
        if not checks:
            return
        unread = [check for check in checks if check.overflowed is None]
        if unread:
            numbers = iter(self.readback.wait())
            for check in unread:
                check.overflowed = sum(next(numbers) for _ in check.found_inf) > 0
        scale = self._host_scale
        self._follow(any(check.overflowed for check in checks))
        skipped = {id(check.optimizer): check.optimizer for check in checks if check.stepped and check.overflowed}
        # a host-device synchronization, but only after a skipped step
        nonfinite_loss = bool(skipped) and not all(bool(loss.isfinite().all()) for loss in losses)
        self._outcome = UpdateOutcome(tuple(skipped.values()), scale, self._host_scale, nonfinite_loss)

    def forget_steps(self) -> None:
        """Discard steps that an interrupted run left between ``unscale_`` and ``update``. Keeps scale and tracker."""
        if not self._enabled:
            return
        self.resolve_outcome()
        self._per_optimizer_states.clear()
        self._checks, self.losses = [], []
        self._unchecked.clear()
        self._with_momentum.clear()

    def expect_scaled(self, device: torch.device) -> None:
        """Initialize the scale before a loss is scaled, because a checkpoint has restored scaled gradients."""
        self.unscales = True
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(device)

    def __getstate__(self) -> dict[str, Any]:
        self._resolve()
        unset = {"before_unscale": [], "gradients_of": gradients_of, "all_reduce_flag": None, "losses": []}
        state = {**super().__getstate__(), **unset}
        del state["_with_momentum"]  # depends on the existing optimizers
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_with_momentum": WeakKeyDictionary()})

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state with ``min_scale`` and ``max_scale``; {} if disabled."""
        state = super().state_dict()
        return {**state, "min_scale": self.min_scale, "max_scale": self.max_scale} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore scale and growth tracker. The settings (factors, interval, limits) of this scaler do not change.

        A tracker at or past the interval would never trigger growth again (the kernel tests for equality), so it is
        limited to the interval minus 1.

        Raises:
            ValueError: if the state is that of a disabled scaler and this one is enabled.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise ValueError(
                "Got the empty state of a disabled scaler, expected the keys 'scale' and '_growth_tracker'."
                " It was saved by a run without loss scaling."
            )
        tracker = min(int(state_dict["_growth_tracker"]), self._growth_interval - 1)
        scale = self._within_limits(float(state_dict["scale"]))
        settings = {
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
        }
        self.forget_steps()
        super().load_state_dict({"scale": scale, "_growth_tracker": tracker, **settings})
        self._host_scale, self._host_tracker = scale, tracker

    def _inverse_scale(self, scale: Tensor) -> Tensor:
        """Return 1 / scale, computed in double precision and rounded, as in torch; cached until the scale changes."""
        if scale.device.type == "mps":  # MPS has no double precision
            return scale.reciprocal()
        if self._unresolved:  # the host does not know whether the scale has changed
            return scale.double().reciprocal().float()
        if self._inverse[0] != self._host_scale or self._inverse[1].device != scale.device:
            self._inverse = self._host_scale, scale.double().reciprocal().float()
        return self._inverse[1]

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale like torch, with a faster path for common gradients: dense, float32, on the scale's device.

        Complex gradients are unscaled as real tensors, because torch has no kernel for them.
        """
        gradients, holder = self.gradients_of(optimizer), optimizer
        usual = {(torch.float32, found_inf.device, torch.strided)}
        kinds = {(g.dtype, g.device, g.layout) for g in gradients}
        if kinds != usual and any(dtype.is_complex for dtype, *_ in kinds):
            gradients = [real_view(gradient) for gradient in gradients]
            kinds = {(g.dtype, g.device, g.layout) for g in gradients}
            holder = cast(Optimizer, SimpleNamespace(param_groups=[{"params": list(map(_holder_of, gradients))}]))
        if kinds == usual:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
            return {found_inf.device: found_inf}
        return super()._unscale_grads_(holder, inv_scale, found_inf, allow_fp16)

    def _step_fused(
        self, optimizer: Optimizer, check: Check, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> float | None:
        """Step an optimizer with a kernel that reads ``found_inf`` itself, on the device."""
        fused: Any = optimizer
        starting = self._momentum_starting(optimizer) if isinstance(optimizer, SGD) else []
        fused.grad_scale = None  # the gradients are unscaled
        fused.found_inf = _any_of(check.found_inf)
        try:
            result: float | None = optimizer.step(*args, **kwargs)
        finally:
            del fused.grad_scale, fused.found_inf
        if starting and check.read():
            # A fused SGD allocates its momentum uninitialized, to be filled by its kernel. A kernel that skips does not
            # fill it, and the next step would use uninitialized memory. check.read() synchronizes host and device, but
            # only until the first step that is not skipped.
            for parameter in starting:
                optimizer.state[parameter].pop("momentum_buffer", None)
        return result

    def _requests_scaler(self, optimizer: Optimizer) -> bool:
        """Return whether ``step`` has torch's deprecated argument ``grad_scaler``, as apex's ``FusedAdam`` does.

        Such an optimizer is stepped without this argument, like one that is not fused. With the argument, it would
        unscale the gradients again.
        """
        class_ = type(optimizer)
        if class_ not in self._accepts_scaler:  # torch inspects the signature at each step
            self._accepts_scaler[class_] = "grad_scaler" in inspect.signature(optimizer.step).parameters
        return self._accepts_scaler[class_]

    def _momentum_starting(self, optimizer: SGD) -> list[Tensor]:
        """Return the parameters that will get momentum in the next step. Does not search once all of them have it."""
        groups = [group for group in optimizer.param_groups if group["momentum"]]
        number = sum(len(group["params"]) for group in groups)
        state = optimizer.state  # a defaultdict: a lookup would create an entry
        if self._with_momentum.get(optimizer) == number <= len(state):  # the module may have cleared the state
            return []
        without_momentum = [
            p for group in groups for p in group["params"] if p not in state or "momentum_buffer" not in state[p]
        ]
        if not without_momentum:
            self._with_momentum[optimizer] = number
        return [p for p in without_momentum if p.grad is not None]

    def _expect_no_gradients(self, optimizer: Optimizer) -> None:
        if self.gradients_of(optimizer):
            raise RuntimeError(
                f"Got gradients for {type(optimizer).__name__}, but no loss was scaled. In manual optimization, call"
                " self.manual_backward(loss) instead of loss.backward()."
            )

    def _follow(self, overflowed: bool) -> None:
        """Update the host's copy of scale and tracker, by the rule that torch's kernel applies on the device.

        The kernel multiplies in double precision, rounds to float32, and does not grow beyond the largest float32.
        """
        scale = self._host_scale
        if overflowed:
            scale, self._host_tracker = c_float(scale * self._backoff_factor).value, 0
        else:
            self._host_tracker += 1
            if self._host_tracker == self._growth_interval:
                grown = c_float(scale * self._growth_factor).value
                scale, self._host_tracker = grown if math.isfinite(grown) else scale, 0
        self._host_scale = self._within_limits(scale)

    def _within_limits(self, scale: float) -> float:
        return min(max(scale, c_float(self.min_scale).value), c_float(self.max_scale).value)

    def _set_scale(self, scale: float) -> None:
        self._host_scale = self._within_limits(scale)
        if self._scale is None:
            self._init_scale = self._host_scale  # torch creates the tensor with the first loss
        else:
            self._scale.fill_(self._host_scale)


def _holder_of(gradient: Tensor) -> Tensor:
    """Return a tensor with ``gradient`` as its ``grad``. torch's scaler reads only ``grad`` of a parameter."""
    holder = gradient.detach()
    holder.grad = gradient
    return holder


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients that the parameters of an optimizer have."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


@dataclass(eq=False, slots=True)
class Check:
    """A check of one optimizer's gradients for infinity and NaN, for one step.

    Attributes:
        found_inf: one tensor for each device that has gradients, on that device; above 0 if one of them is not finite.
        overflowed: the result, once it is on the host; None before.
        stepped: whether the step was attempted.
    """

    optimizer: Optimizer
    found_inf: list[Tensor]
    overflowed: bool | None = None
    stepped: bool = False

    def read(self) -> bool:
        """Return the result. A host-device synchronization on a GPU."""
        self.overflowed = any(number.item() for number in self.found_inf)
        return self.overflowed


def _any_of(found_inf: list[Tensor], device: torch.device | None = None) -> Tensor:
    """Return 1 if any of the tensors is above 0, else 0. Not a sum, because torch's fused kernels skip at exactly 1."""
    device = found_inf[0].device if device is None else device
    if len(found_inf) == 1:
        return found_inf[0]
    return torch.stack([number.to(device, non_blocking=True).reshape(()) for number in found_inf]).amax()
