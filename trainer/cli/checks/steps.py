"""Run a few training steps on one batch to measure the layers and the time of a step. The modules are discarded.

The Trainer runs them, so that a step is the same as in a fit, including hooks, transfers and several optimizers. Random
generators, environment variables and warnings of the process are restored afterwards.
"""

from __future__ import annotations

import copy
import math
import os
import statistics
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from trainer.cli.checks import Findings, Recipe
from trainer.cli.checks.batch import classes_of, labels_out_of_range
from trainer.cli.execution import assemble
from trainer.cli.processes import environment
from trainer.cli.rehearsal import Clock, RehearsalDone, rehearse
from trainer.common.machine import readable
from trainer.common.module_tree import plain_class
from trainer.data.samples import batch_size, samples_of, tensors_in
from trainer.diagnosis.trace import measure
from trainer.errors import join_first
from trainer.precision.float8 import Float8Precision
from trainer.record.measures import device_of
from trainer.state import random_states

_SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
_OPERATIONS = 1e11  # maximum number of operations of all steps on a CPU: a few seconds
_STEPS = 5  # maximum number of steps; the first one warms up
_SECONDS = 1.5  # time limit of the steps
_MANY_GROUPS = 10  # fewer parameter groups are not worth a remark

MERGE = """groups = {}
for group in optimizer.param_groups:
    settings = repr(sorted((name, value) for name, value in group.items() if name != "params"))
    groups.setdefault(settings, {**group, "params": []})["params"].extend(group["params"])
optimizer.param_groups = list(groups.values())"""
"""Merges the parameter groups that have equal settings."""


def part_for(recipe: Recipe, device: torch.device, free: int) -> tuple[Any, str]:
    """Return the part of the recipe's batch that a quick check can run, and the reason if it is not the whole batch.

    Args:
        recipe: the recipe with its batch.
        device: device of the steps.
        free: free memory of the device, in bytes.

    Returns:
        The batch, a part of it, or None; and a sentence with the reason, "" for the whole batch.
    """
    assert recipe.loaded is not None
    batch = recipe.loaded.batch
    samples = batch_size(batch)
    if recipe.peak is not None and recipe.peak > free:
        return None, f"No step was run: it needs {readable(recipe.peak)}, and {readable(free)} are free here."
    if device.type != "cpu" or recipe.operations is None:
        return batch, ""
    all_steps = 3 * recipe.operations * (_STEPS + 1)  # a backward pass takes twice the operations of a forward pass
    taken = int(samples * _OPERATIONS / max(all_steps, 1))
    if taken >= samples:
        return batch, ""
    if taken < 1:
        return None, f"No step was run: {all_steps / 1e12:,.1f} TFLOP are too many for a quick check on a CPU."
    reason = f"The steps were run with {taken} of the batch's {samples} samples to save time on the CPU."
    return samples_of(batch, range(taken)), reason


def time_step(findings: Findings, recipe: Recipe, batch: Any) -> dict[str, Any]:
    """Run a few steps in the precision of the run, and return a row with the time of a step on the whole batch.

    Args:
        findings: gets a remark about the layers that compute in float8 with ``fp8-mixed``, and about parameter groups
            that could be merged.
        recipe: the recipe.
        batch: the batch, or a part of it.
    """
    assert recipe.loaded is not None
    observer = _Clock()
    trainer = fit(recipe, batch, observer)
    taken, samples = batch_size(batch), batch_size(recipe.loaded.batch)  # 0 without a tensor
    seconds = statistics.median(observer.seconds[1:] or observer.seconds)
    precision = trainer.engine.precision
    if isinstance(precision, Float8Precision):
        chosen, others = precision.layers(trainer.lightning_module)
        reasons = join_first((f"{name!r} {reason}" for name, reason in others.items()), 6, "; ")
        rest, names = f" The others do not: {reasons}." if others else "", join_first(map(repr, chosen), 6)
        findings.remark(f"{len(chosen)} of {len(chosen) + len(others)} Linear layers compute in float8: {names}.{rest}")
    for optimizer in trainer.optimizers:
        if (remark := describe_groups(optimizer)) is not None:
            findings.remark(remark)
    about = f"{trainer.precision} on {device_of(trainer)}, measured with {taken} samples"
    return {"measured": "a step", "seconds": seconds * (samples or 1) / (taken or 1), "about": about}


def describe_groups(optimizer: Optimizer) -> str | None:
    """Return advice to merge parameter groups with equal settings. None if there are few."""
    groups = optimizer.param_groups
    different = {repr(sorted((name, value) for name, value in g.items() if name != "params")) for g in groups}
    if len(groups) - len(different) < _MANY_GROUPS:
        return None
    indented = MERGE.replace("\n", "\n    ")
    return (
        f"{type(optimizer).__name__} has {len(groups)} parameter groups with {len(different)} different settings, and"
        " updates one group after the other. Merge those with equal settings: add these lines to configure_optimizers,"
        f" before a schedule is created:\n    {indented}"
    )


class _Clock(Clock):
    """Measure some steps, then end the fit."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop the clock."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if len(self.seconds) >= _STEPS or sum(self.seconds) > _SECONDS:
            raise RehearsalDone


class _RepeatBatch:
    """A dataloader that returns copies of one batch, because a step may change its batch."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 1000  # schedulers may use it

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield copy.deepcopy(self._batch)


def fit(recipe: Recipe, batch: Any, observer: pl.Callback, **changes: Any) -> Any:
    """Train a module of the recipe on one batch until ``observer`` ends the run. Return the Trainer.

    Args:
        recipe: the recipe.
        batch: the batch, or a part of it.
        observer: a callback.
        changes: other nodes for the config, such as ``precision``.
    """
    trainer_node = recipe.settings["trainer"] | {"_target_": "trainer.Trainer"}
    settings = recipe.settings | {"callbacks": {}, "data": None, "trainer": trainer_node} | changes
    data: dict[str, Any] = {"train_dataloaders": _RepeatBatch(batch)}
    if recipe.settings["data"] is not None:  # the data module is set up already; its batch hooks are used
        recipe.data.prepare_data = recipe.data.setup = recipe.data.teardown = lambda *_, **__: None
        recipe.data.train_dataloader = lambda: _RepeatBatch(batch)
        data = {"datamodule": recipe.data}
    with TemporaryDirectory() as folder:
        module, _, trainer = assemble(settings, Path(folder))
        trainer.callbacks = []
        rehearse(trainer, module, observer, weights=settings["weights"], **data)
    return trainer


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Ignore warnings and redirect stdout to stderr inside; restore random states and environment variables on exit."""
    state = random_states.capture(device)
    with environment({name: os.environ.get(name) for name in _SEEDS}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with redirect_stdout(sys.stderr):
                yield
        finally:
            random_states.restore(state, device)


# --- the layers of a step ----------------------------------------------------------------------------------------

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
        for name, submodule in pl_module.named_modules():
            layer_parameters = list(submodule.parameters(recurse=False))
            is_layer = bool(layer_parameters) or not any(True for _ in submodule.children())
            if not name or not is_layer or isinstance(submodule, (Metric, torch.jit.ScriptModule)):
                continue
            layer = Layer(
                name, plain_class(submodule).__name__, sum(parameter.numel() for parameter in layer_parameters)
            )
            self.layers.append(layer)
            owners |= {id(parameter): layer for parameter in layer_parameters if id(parameter) not in owners}
            self._handles.append(submodule.register_forward_hook(partial(self._take_output, layer)))
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
        if (magnitude := measure(tensors)) is None:  # such as a scalar loss
            return
        layer.outputs += 4 * magnitude.elements
        layer.activation = max(layer.activation, magnitude.largest)
        layer.not_finite += magnitude.not_finite
        for tensor in tensors:
            if tensor.requires_grad:
                self._handles.append(tensor.register_hook(partial(self._take_gradient, layer, None)))  # type: ignore[no-untyped-call]

    def _take_gradient(self, layer: Layer, name: str | None, gradient: Tensor) -> None:
        if name is not None:
            self._seen.add(name)
        if (magnitude := measure([gradient])) is None:
            return
        layer.gradient = max(layer.gradient or 0.0, magnitude.largest)
        layer.not_finite += magnitude.not_finite
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
