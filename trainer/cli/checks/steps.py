"""Run a few training steps on one batch to measure the layers and the time of a step. The modules are discarded.

The Trainer runs them, so that a step is the same as in a fit, including hooks, transfers and several optimizers. Random
generators, environment variables and warnings of the process are restored afterwards.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch

from trainer.cli.checks import Findings, Recipe
from trainer.cli.execution import assemble
from trainer.cli.processes import environment
from trainer.cli.rehearsal import Clock, RehearsalDone, rehearse
from trainer.common.machine import readable
from trainer.data.samples import batch_size, samples_of
from trainer.errors import join_first
from trainer.precision.float8 import Float8Precision
from trainer.record.measures import device_of
from trainer.state import random_states

_SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
_OPERATIONS = 1e11  # maximum number of operations of all steps on a CPU: a few seconds
_STEPS = 5  # maximum number of steps; the first one warms up
_SECONDS = 1.5  # time limit of the steps


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


def time_step(found: Findings, recipe: Recipe, batch: Any) -> dict[str, Any]:
    """Run a few steps in the precision of the run, and return a row with the time of a step on the whole batch.

    Args:
        found: gets a remark about the layers that compute in float8 with ``fp8-mixed``.
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
        found.remark(f"{len(chosen)} of {len(chosen) + len(others)} Linear layers compute in float8: {names}.{rest}")
    about = f"{trainer.precision} on {device_of(trainer)}, measured with {taken} samples"
    return {"measured": "a step", "seconds": seconds * (samples or 1) / (taken or 1), "about": about}


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
