"""Skip steps with gradients that are not finite if the loss is not scaled: in float32 and bfloat16.

It is a loss scaler with a scale of 1, so that outcomes, schedules and weight averages treat its skipped steps like
those of float16.
"""

from __future__ import annotations

from collections import defaultdict
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.precision.scaler import LossScaler, snapshot_loss


class StepGuard(LossScaler):
    """Checks gradients and skips steps as a loss scaler does, with a scale of 1.

    Thus outcomes, schedules, averages and counters are processed as with loss scaling, and the host does not wait for
    the result of a fused optimizer. Code that checks whether the loss is scaled sees a disabled scaler: it has no
    state for checkpoints, and ``is_enabled`` is False. ``skips_steps`` is True.

    Args:
        device: device type of the gradients.
    """

    has_scaled = True  # gradients are checked even though no loss is scaled

    def __init__(self, device: str) -> None:
        super().__init__(device, init_scale=1.0, min_scale=1.0, max_scale=1.0)
        self._one = torch.ones(())

    def is_enabled(self) -> bool:
        """Return False, because the loss is not scaled."""
        return False

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs`` unchanged. A tensor counts as a loss of the next ``step``."""
        if isinstance(outputs, Tensor):
            self.losses.append(snapshot_loss(outputs))
        return outputs

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Start to copy the results of the checks to the host; see ``resolve_outcome``."""
        checks = self._close_update()
        self._send(checks)
        self._unresolved = checks

    def state_dict(self) -> dict[str, Any]:
        """Return {}, as a disabled scaler does."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """No-op, as for a disabled scaler."""

    def _follow(self, overflowed: bool) -> None:
        pass  # the scale stays 1

    def _check_gradients(self, optimizer: Optimizer, *, unscales: bool) -> dict[torch.device, Tensor]:
        """Return a float32 flag on each device with gradients: 1 if one of its gradients is not finite, else 0."""
        gradients = self.gradients_of(optimizer)
        if not gradients:
            return {}
        device = gradients[0].device
        if {(g.dtype, g.device, g.layout) for g in gradients} == {(torch.float32, device, torch.strided)}:
            if self._one.device != device:
                self._one = self._one.to(device)
            found_inf = torch.zeros((), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, self._one)  # times 1, which is exact
            return {device: found_inf}
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            values = gradient if gradient.layout is torch.strided else gradient.coalesce().values()
            if values.numel():
                by_device[gradient.device].append(values)
        return {device: _any_not_finite(values) for device, values in by_device.items()} or {device: _ZERO.to(device)}


_ZERO = torch.zeros(())


def _any_not_finite(gradients: list[Tensor]) -> Tensor:
    """Return 1 if an element is not finite, else 0, as a 0-dim float32 tensor on their device."""
    largest = list(torch._foreach_norm(gradients, torch.inf))  # NaN and inf propagate
    if len(dtypes := {norm.dtype for norm in largest}) > 1:
        widest = reduce(torch.promote_types, dtypes)
        largest = [norm.to(widest) for norm in largest]
    return (~torch.stack(largest).isfinite().all()).float()
