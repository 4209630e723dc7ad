"""Layers that overflow in the forward or backward pass, and nets with such a layer at a given place."""

from typing import Any

import torch
from torch import Tensor, nn


class Huge(nn.Module):
    """Multiplies its input by 1e6, which overflows in float16."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1e6


class _Amplify(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Amplifier(nn.Module):
    """Multiplies the gradient only; by default by a factor that overflows in float16."""

    def __init__(self, factor: float = 1e30) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return _Amplify.apply(x, self.factor)  # type: ignore[no-any-return]


class Nan(nn.Module):
    """Returns NaN in the backward pass for any scale and dtype: the root of zero, times zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sqrt(x - x) * 0


class Residual(nn.Module):
    """Computes ``x + body(x)``: its input has two uses."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class OwnCode(nn.Module):
    """Overflows in its own code between its two layers, in the forward or backward pass."""

    def __init__(self, forward: bool) -> None:
        super().__init__()
        self.first, self.second, self.overflows_forward = nn.Linear(16, 16), nn.Linear(16, 16), forward

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x * 1e6 if self.overflows_forward else _Amplify.apply(x, 1e30)
        return self.second(x)  # type: ignore[no-any-return]


def sequential(layer: nn.Module | None = None, place: int = 0) -> nn.Sequential:
    """Return a net of 6 layers, or of 7 with ``layer`` at ``place``, from 1 (after the first) to 6 (after the last)."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(16, 16),
        nn.Linear(16, 3),
    ]  # fmt: skip
    if layer is not None:
        layers.insert(place, layer)
    return nn.Sequential(*layers)
