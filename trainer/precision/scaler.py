"""The loss scaler: torch's ``GradScaler`` plus the four things a Trainer needs of it.

1. What happened is known: :attr:`LossScaler.skipped` says, between ``step`` and ``update``, whether any optimizer
   skipped. torch's ``step`` returns None either way.
2. Optimizers that have no gradients (frozen, idle this batch) are left alone; torch raises.
3. An optimizer may step several times before one ``update`` (an n-critic GAN); torch raises. The overflows of all
   the steps count in the one update.
4. The scale has a floor and a ceiling, and its current value is known on the host without asking the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from trainer.errors import PrecisionError

_UNSCALED = (False, 1.0, 1.0)


class LossScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler``; its arguments and methods keep torch's meaning, except for the above.

    Args:
        device: the type of the device the gradients are on, ``"cuda"`` or ``"cpu"``.
        enabled: a disabled scaler does nothing: ``scale`` returns its input, ``step`` steps.
        init_scale: the first scale; finite and positive.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: steps without overflow before the scale grows; at least 1.
        min_scale: floor of the scale.
        max_scale: ceiling of the scale; None for none.

    Raises:
        PrecisionError: a factor out of range, or an enabled scaler for CUDA on a machine without it
            (torch would warn and train unscaled).
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
        _expect(growth_factor > 1.0, "growth_factor", growth_factor, "a number above 1")
        _expect(0.0 < backoff_factor < 1.0, "backoff_factor", backoff_factor, "a number between 0 and 1")
        whole = isinstance(growth_interval, int)
        _expect(
            whole and growth_interval >= 1, "growth_interval", growth_interval, "a whole number of steps, at least 1"
        )
        _expect(0.0 < min_scale <= ceiling, "min_scale", min_scale, f"above 0 and at most max_scale={max_scale}")
        _expect(
            min_scale <= init_scale <= ceiling and init_scale != float("inf"),
            "init_scale",
            init_scale,
            f"from {min_scale} to {max_scale or 'any finite number'}",
        )
        if enabled and device == "cuda" and not torch.cuda.is_available():
            raise PrecisionError(
                "Got an enabled loss scaler for 'cuda', but CUDA is not available here. Use accelerator='cpu',"
                " or precision='bf16-mixed' or '32-true'."
            )
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.min_scale = min_scale
        self.max_scale = ceiling
        self.skipped = False
        """Whether an optimizer has skipped a step since the last ``update``. On the host."""
        self._host_scale = float(init_scale) if enabled else 1.0
        self._host_tracker = 0
        self._fused_steps: list[_FusedStep] = []
        self._earlier_found_inf: list[torch.Tensor] = []

    @property
    def current_scale(self) -> float:
        """The scale in force (1 when disabled), from the host's own account of it: no synchronisation."""
        return self._host_scale

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, in place. Does nothing if that was done since the last ``step``."""
        if not self._enabled:
            return
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            self._begin_another_step(state)
        if state["stage"] is OptState.READY and self._scale is not None:
            super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """``optimizer.step()``, unless one of its gradients is not finite, or it has none at all."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]
        self.unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        found_inf = state["found_inf_per_device"]
        if not found_inf:
            self._expect_no_gradients(optimizer)
            del self._per_optimizer_states[id(optimizer)]  # it may have some the next time
            return None
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # the kernel decides, on the device
            self._fused_steps.append(_FusedStep(optimizer, list(found_inf.values()), len(optimizer.state)))
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adjust the scale, once, for all the steps since the last ``update``; nothing if there were none."""
        if not self._enabled:
            return
        if self._earlier_found_inf:
            # torch combines whatever stands in these states; the keys do not matter to it
            earlier = dict(enumerate(self._earlier_found_inf))
            self._per_optimizer_states[-1] = {"stage": OptState.STEPPED, "found_inf_per_device": earlier}
            self._earlier_found_inf = []
        if not any(state["found_inf_per_device"] for state in self._per_optimizer_states.values()):
            self._per_optimizer_states.clear()
            if new_scale is not None:
                self._set_scale(float(new_scale))
            return
        self.read_skipped()  # before torch adds the answers up in place
        super().update(new_scale)
        self._follow_update(new_scale)

    def settle(self) -> tuple[bool, float, float]:
        """End a weight update: find out whether it was skipped, and adjust the scale.

        Returns:
            Whether a step was skipped, the scale it was computed with, and the scale from now on.
        """
        if not self._enabled:
            return _UNSCALED
        skipped, scale = self.read_skipped(), self._host_scale
        self.update()
        return skipped, scale, self._host_scale

    def read_skipped(self) -> bool:
        """Whether any step since the last ``update`` was skipped.

        A plain optimizer's answer is on the host already: torch reads it to decide. A fused one's is on the
        device: reading it here is a host-device synchronisation.
        """
        for step in self._fused_steps:
            if any(found_inf.item() for found_inf in step.found_inf):
                self.skipped = True
                step.forget_new_momentum()
        self._fused_steps.clear()
        return self.skipped

    def forget_steps(self) -> None:
        """Forget what an interrupted run left between ``unscale_`` and ``update``. Scale and tracker stay."""
        if not self._enabled:
            return
        self._per_optimizer_states.clear()
        self._fused_steps.clear()
        self._earlier_found_inf = []
        self.skipped = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore scale and growth tracker. The settings (factors, interval) stay those of this scaler.

        A tracker at or past the interval would never trigger growth again (the kernel tests for equality),
        so it is restored to one below at most. An empty state, that of a disabled scaler, is refused.

        Raises:
            ValueError: the state is that of a disabled scaler and this one is enabled.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise ValueError(
                "Got the empty state of a disabled scaler, expected the keys 'scale' and '_growth_tracker'."
                " It was saved by a run without loss scaling."
            )
        tracker = min(int(state_dict["_growth_tracker"]), self._growth_interval - 1)
        scale = min(max(float(state_dict["scale"]), self.min_scale), self.max_scale)
        settings = {
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
        }
        super().load_state_dict({"scale": scale, "_growth_tracker": tracker, **settings})
        self._host_scale, self._host_tracker = scale, tracker

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        # torch's one read of found_inf for a plain optimizer (a host-device synchronisation on a GPU); it
        # serves us too.
        if any(found_inf.item() for found_inf in optimizer_state["found_inf_per_device"].values()):
            self.skipped = True
            return None
        return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]

    def _expect_no_gradients(self, optimizer: Optimizer) -> None:
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                f"Got gradients for {type(optimizer).__name__}, but no loss was scaled, expected scaled ones."
                " In manual optimization, call self.manual_backward(loss) in the place of loss.backward()."
            )

    def _begin_another_step(self, state: dict[str, Any]) -> None:
        self._earlier_found_inf += state["found_inf_per_device"].values()
        state["found_inf_per_device"] = {}
        state["stage"] = OptState.READY

    def _follow_update(self, new_scale: float | torch.Tensor | None) -> None:
        """Keep the host's account of scale and tracker, by the rule that torch's kernel applies on the device."""
        if new_scale is not None:
            self._set_scale(float(new_scale))
        elif self.skipped:
            self._replace_scale(self._host_scale * self._backoff_factor)
            self._host_tracker = 0
        else:
            self._host_tracker += 1
            if self._host_tracker == self._growth_interval:
                self._replace_scale(self._host_scale * self._growth_factor)
                self._host_tracker = 0
        self.skipped = False

    def _replace_scale(self, scale: float) -> None:
        """After torch has multiplied: keep to floor and ceiling."""
        assert self._scale is not None
        if scale < self.min_scale or scale > self.max_scale:
            self._set_scale(scale)
        else:
            # Read, not computed: torch multiplies in float32 and does not grow past its largest number.
            # A host-device synchronisation, but only on an overflow or once every growth_interval steps.
            self._host_scale = self._scale.item()

    def _set_scale(self, scale: float) -> None:
        self._host_scale = min(max(scale, self.min_scale), self.max_scale)
        if self._scale is None:
            self._init_scale = self._host_scale  # torch makes the tensor with the first loss
        else:
            self._scale.fill_(self._host_scale)


class _FusedStep(NamedTuple):
    """A step whose kernel decides by itself whether to skip."""

    optimizer: Optimizer
    found_inf: list[torch.Tensor]
    states_before: int

    def forget_new_momentum(self) -> None:
        """Drop the momentum that a skipped SGD step has started.

        A fused SGD allocates it uninitialised, for its kernel to fill; a kernel that skips does not, and the next
        step would use whatever lay in memory. What is new stands last: a dict keeps the order of insertion.
        """
        if isinstance(self.optimizer, torch.optim.SGD):
            for parameter in list(self.optimizer.state)[self.states_before :]:
                del self.optimizer.state[parameter]


def _expect(holds: bool, name: str, given: object, expected: str) -> None:
    if not holds:
        raise PrecisionError(f"Got {name}={given!r}, expected {expected}.")
