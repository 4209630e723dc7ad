"""Optimizers with states of many dtypes, as mixed-precision and 8-bit ones have, and a wrapper around optimizers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class MixedStates(Optimizer):
    """Descent on float32 master weights, with every kind of state that an optimizer may keep.

    Args:
        params: The parameters, of any dtype.
        lr: The learning rate.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])
        return loss

    def _update(self, parameter: Tensor, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            state["master"] = parameter.detach().float().clone()
            state["average"] = torch.zeros_like(parameter)
            state["double"] = torch.zeros_like(parameter, dtype=torch.float64)
            state["codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
            state["sign"] = torch.zeros_like(parameter, dtype=torch.bool)
            state["count"], state["step"] = torch.tensor(2**40, dtype=torch.int64), 0
            state["past"] = [torch.zeros_like(parameter, dtype=torch.float32)]
            state["nested"] = {"scale": torch.tensor(0.1)}
            state["ratio"], state["is_warm"], state["nothing"] = 0.5, True, None
        gradient = parameter.grad
        assert gradient is not None
        state["average"].lerp_(gradient.to(state["average"].dtype), 0.1)
        state["double"].add_(gradient.double())
        state["codes"].add_(37)
        state["sign"].copy_(gradient > 0)
        state["count"] += 1
        state["step"] += 1
        state["past"] = [state["past"][-1] * 0.9 + gradient.float(), state["past"][-1]]
        state["nested"]["scale"] *= 1.01
        change = state["average"].float() + state["double"].float() * 0.01 + state["past"][0] * 0.1
        change = change * (1 + state["codes"].float() / 255) + state["sign"].float() * 1e-4
        state["master"].sub_(change, alpha=lr * state["nested"]["scale"].item())
        parameter.copy_(state["master"])


class WithoutClosure(MixedStates):
    """The same, with a ``step`` that takes no closure, so that the loss may be scaled."""

    def step(self) -> None:  # type: ignore[override]
        super().step()


class Wrapper(Optimizer):
    """Forwards everything to another optimizer, as Lookahead does.

    Args:
        params: The parameters.
        inner: Makes the other optimizer.
    """

    def __init__(self, params: Iterable[Any], inner: Any) -> None:
        self.inner = inner(params)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"wrapped": self.inner.state_dict(), "param_groups": self.inner.state_dict()["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["wrapped"])
        self.param_groups = self.inner.param_groups


class LoadsItself(MixedStates):
    """Loads its states by itself, and casts floating-point ones to the dtype of the parameter, as bitsandbytes does."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, state in state_dict["state"].items():
            parameter = parameters[number]
            self.state[parameter] = {
                key: value.to(parameter.dtype) if torch.is_tensor(value) and value.is_floating_point() else value
                for key, value in state.items()
            }
