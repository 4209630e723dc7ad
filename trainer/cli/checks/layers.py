"""Measure the outputs and gradients of each layer in one float32 step, and predict overflow or underflow in float16."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from trainer.cli.checks.batch import classes_of, labels_out_of_range
from trainer.cli.rehearsal import RehearsalDone
from trainer.common.module_tree import plain_class
from trainer.data.samples import tensors_in
from trainer.diagnosis.trace import measure

LARGEST = torch.finfo(torch.float16).max
"""65,504."""
SMALLEST = 2.0**-24
"""The smallest positive number in float16: 6e-8."""
SCALE = 2.0**16
"""The initial loss scale of 16-mixed."""


@dataclass
class Layer:
    """Statistics of a layer, which is a module with its own parameters or without submodules.

    Args:
        name: as in ``named_modules()``.
        kind: name of its class.
        parameters: number of elements of its parameters.
        outputs: size of its outputs in float32, in bytes.
        activation: largest absolute value of its outputs.
        gradient: largest absolute value of the gradients of its outputs and parameters; None without gradients.
        not_finite: number of elements of its outputs and gradients that are inf or NaN.
        nonzero: number of elements of its gradients that are not 0.
        vanishing: number of these that are below `SMALLEST`.
        vanishing_scaled: number of these that are below `SMALLEST` after a multiplication by `SCALE`.
    """

    name: str
    kind: str
    parameters: int
    outputs: int = 0
    activation: float = 0.0
    gradient: float | None = None
    not_finite: int = 0
    nonzero: int = 0
    vanishing: int = 0
    vanishing_scaled: int = 0

    @property
    def largest(self) -> float:
        """Return the largest absolute value of the activations and gradients."""
        return max(self.activation, self.gradient or 0.0)

    @property
    def share(self) -> float:
        """Return the share of nonzero gradient elements that underflow in float16 without a loss scale."""
        return self.vanishing / self.nonzero if self.nonzero else 0.0


class Layers(pl.Callback):
    """Collect statistics of the layers in one training step, and end the fit.

    Args:
        batch: the batch of that step, as returned by the dataloader.

    Attributes:
        layers: in the order of the module.
        loss: loss of the batch; None if ``training_step`` does not return it.
        parameters: number of parameter elements of the module.
        trained: number of these that require gradients.
        without_gradient: names of trained parameters without a gradient.
        labels: error message about the labels, or "". With an error, no step is run.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._handles: list[Any] = []
        self._trained: list[str] = []
        self._seen: set[str] = set()
        self.layers: list[Layer] = []
        self.loss: float | None = None
        self.parameters = self.trained = 0
        self.without_gradient: list[str] = []
        self.labels = ""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Register hooks on the layers."""
        self.labels = labels_out_of_range(self._batch, classes_of(pl_module))
        if self.labels:
            raise RehearsalDone
        parameters = list(pl_module.parameters())
        self.parameters = sum(parameter.numel() for parameter in parameters)
        self.trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        owners: dict[int, Layer] = {}
        for name, part in pl_module.named_modules():
            own = list(part.parameters(recurse=False))
            is_layer = bool(own) or not any(True for _ in part.children())
            if not name or not is_layer or isinstance(part, (Metric, torch.jit.ScriptModule)):
                continue
            layer = Layer(name, plain_class(part).__name__, sum(parameter.numel() for parameter in own))
            self.layers.append(layer)
            owners |= {id(parameter): layer for parameter in own if id(parameter) not in owners}
            self._handles.append(part.register_forward_hook(partial(self._take_output, layer)))
        root = Layer("", plain_class(pl_module).__name__, 0)
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad:
                layer = owners.get(id(parameter), root)
                self._trained.append(name)
                self._handles.append(parameter.register_hook(partial(self._take_gradient, layer, name)))
        self.layers.insert(0, root)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Store the loss, and end the fit."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.loss = float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else None
        self.without_gradient = [name for name in self._trained if name not in self._seen]
        self.layers = [layer for layer in self.layers if layer.outputs or layer.gradient is not None]
        raise RehearsalDone

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _take_output(self, layer: Layer, module: nn.Module, args: Any, output: Any) -> None:
        tensors = [tensor for tensor in tensors_in(output) if tensor.dim() and tensor.is_floating_point()]
        if (found := measure(tensors)) is None:  # such as a scalar loss
            return
        layer.outputs += 4 * found.elements
        layer.activation = max(layer.activation, found.largest)
        layer.not_finite += found.not_finite
        for tensor in tensors:
            if tensor.requires_grad:
                self._handles.append(tensor.register_hook(partial(self._take_gradient, layer, None)))  # type: ignore[no-untyped-call]

    def _take_gradient(self, layer: Layer, name: str | None, gradient: Tensor) -> None:
        if name is not None:
            self._seen.add(name)
        if (found := measure([gradient])) is None:
            return
        layer.gradient = max(layer.gradient or 0.0, found.largest)
        layer.not_finite += found.not_finite
        size = gradient.detach().abs()
        nonzero = size > 0
        counts = torch.stack(
            [nonzero.sum(), *(((size < limit) & nonzero).sum() for limit in (SMALLEST, SMALLEST / SCALE))]
        )
        seen, vanishing, scaled = counts.tolist()  # host-device synchronization
        layer.nonzero += seen
        layer.vanishing += vanishing
        layer.vanishing_scaled += scaled


def largest_scale(layers: Iterable[Layer]) -> float | None:
    """Return the largest loss scale up to `SCALE` at which the gradients fit into float16; None without gradients."""
    most = max((layer.gradient or 0.0 for layer in layers), default=0.0)
    return min(SCALE, 2.0 ** math.floor(math.log2(LARGEST / most))) if most else None
