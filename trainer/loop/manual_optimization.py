"""Manual optimization: the path of a batch if the module runs backward passes and optimizer steps itself.

It replaces ``FitLoop.train_batch`` if the module sets ``automatic_optimization = False``. The module calls
``manual_backward`` and ``optimizer.step()`` for any number of optimizers, any number of times.

The rules for the scaler are those of the fit loop: the scale is constant during ``training_step``, and ``update`` runs
once at its end. Gradients are unscaled after each backward pass, because the module may change them before its step.
Gradients that no step has used yet are scaled again before the next backward pass and at the end of the batch; if
``update`` changes the scale, they are multiplied to match it.

Steps that are taken in a hook have their own update at the end of ``on_train_batch_end`` or of the epoch. It runs
earlier if a backward pass begins, or if the state is read or saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.common.session import Session
from trainer.errors import ConfigurationError, warn
from trainer.loop.closures import Closure, is_of_run, lower_scale_after, refuse_scaled_closures, step_with_closure
from trainer.loop.fit import FitLoop
from trainer.precision.cast_cache import forget_casts
from trainer.precision.compilation import keep_out_of_graphs


class ManualOptimization:
    """Runs batches if the module takes backward passes and steps in its ``training_step``.

    Args:
        loop: the fit loop that these batches belong to.

    Raises:
        ConfigurationError: if an optimizer requires a closure and the loss is scaled.
    """

    def __init__(self, loop: FitLoop) -> None:
        self._loop = loop
        self._waiting: list[tuple[Optimizer, Any, Tensor]] = []
        refuse_scaled_closures(loop)

    def train_batch(self, batch: Any, batch_idx: int, is_last: bool) -> None:
        """Run ``training_step``, which takes all steps; then update the scale once for all of them."""
        loop, has_waiting = self._loop, self._loop.gradients.scaler.is_enabled() and not self._loop.update.has_run
        batch = loop.start_batch(batch, batch_idx, is_last)
        if loop.progress.skips_epoch:
            return
        loop.finish_steps()  # steps taken in a hook
        loop.update.stepping = None  # a step of the previous batch may have raised an error
        self._waiting = self._unused_gradients() if has_waiting else []
        loop.update.freezes_scale = True
        try:
            output = loop.run_training_step(batch, batch_idx, nothing=None)
        finally:
            loop.update.freezes_scale = False
        unused = loop.gradients.scale_again()  # gradients that the next batch adds to
        if not loop.update.stepped:
            lower_scale_after(loop, [factor for optimizer, factor in unused if _mark_of(loop, optimizer) is None])
        loop.finish_steps()
        loop.end_batch(None if batch is None else self.outputs_of(output), batch, batch_idx)

    def backward(self, loss: Tensor, run: Callable[[Tensor], None]) -> None:
        """Run ``manual_backward``: call ``run`` on the scaled loss, outside the training step's autocast context."""
        loop = self._loop
        loop.finish_steps()  # steps taken in a hook
        loop.gradients.scale_again()
        waiting, self._waiting = self._waiting, []
        if waiting and not loop.update.stepped:
            lower_scale_after(loop, [value for optimizer, mark, value in waiting if _mark_of(loop, optimizer) != mark])
        with _without_autocast(loop):
            loop.run_backward(loss, partial(loop.gradients.backward_by, run))
        loop.gradients.scaler.unscales = False

    def _unused_gradients(self) -> list[tuple[Optimizer, Any, Tensor]]:
        """Return each optimizer with gradients that no step has used, their mark, and one element of them."""
        unused = []
        for optimizer in self._loop.optimizers:
            first = self._loop.gradients.first(optimizer)
            if first is not None and not first.is_sparse and not self._loop.gradients.are_used(optimizer):
                unused.append((optimizer, _mark_of(self._loop, optimizer), first.reshape(-1)[:1].sum()))
        return unused

    def step(self, optimizer: Optimizer, closure: Closure, **kwargs: Any) -> Any:
        """Run ``optimizer.step(closure)`` for one optimizer. Return the closure's result."""
        device = self._loop.engine.device.type
        around = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

        def forward() -> Any:
            # autocast has cached casts of the weights in the training step, and a step changes the weights
            forget_casts()
            with around:
                return closure()

        self._loop.update.stepping = self  # this method counts the step, and not the watcher of bare steps
        with _without_autocast(self._loop):
            result = step_with_closure(self._loop, optimizer, forward, **kwargs)
        self._loop.update.stepping = None
        self._loop.progress.optimizer_steps += self._loop.engine.counts_steps_of(optimizer)
        return result

    @staticmethod
    def outputs_of(output: Any) -> Any:
        """Return the outputs that ``on_train_batch_end`` receives.

        As in Lightning, only ``"loss"`` is detached. A mutable mapping (``ModelOutput`` of transformers)
        keeps its class.

        Args:
            output: a tensor, a mapping, or None.

        Raises:
            ConfigurationError: if ``output`` is anything else.
        """
        if output is None:
            return {}
        if isinstance(output, Mapping):
            outputs = copy(output) if isinstance(output, MutableMapping) else dict(output)
            if isinstance(loss := output.get("loss"), Tensor):
                outputs["loss"] = loss.detach()
            return outputs
        if isinstance(output, Tensor):
            return {"loss": output.detach()}
        raise ConfigurationError(
            "In manual optimization, `training_step` must either return a Tensor or have no return. Got"
            f" {type(output).__name__}; a dict is also accepted, and its items are passed to `on_train_batch_end`."
        )


def count_bare_steps(loop: FitLoop, session: Session, *, counts_kept: bool) -> None:
    """Count the steps that a module takes without the wrappers of its optimizers, until ``session`` closes.

    The first step of an optimizer that is not of the run (:func:`is_of_run`) causes a warning.

    Args:
        loop: the fit loop.
        session: the session of the run.
        counts_kept: whether steps of optimizers count that the module keeps itself. If ``configure_optimizers``
            returned an optimizer, they do not: Pyro's modules step one per parameter, and a returned one once for all.
    """
    belongs: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
    warned = False

    def begin(optimizer: Optimizer, *_: Any) -> None:
        if loop.update.stepping is None:  # otherwise, this step is a part of another one
            loop.update.stepping = optimizer

    def end(optimizer: Optimizer, *_: Any) -> None:
        nonlocal warned
        forget_casts()  # a training step may enter autocast itself
        if loop.update.stepping is not optimizer:
            return
        loop.update.stepping = None
        if loop.engine.module_calls.clip is None:  # a replay
            return
        if optimizer not in belongs:
            belongs[optimizer] = is_of_run(loop, optimizer)
        if belongs[optimizer] and (counts_kept or any(optimizer is known for known in loop.optimizers)):
            loop.gradients.mark_used(optimizer)
            loop.update.stepped.append(optimizer)
            loop.progress.count_bare_step()
        elif not warned and not belongs[optimizer]:
            warned = True
            warn(
                f"Got a step of {type(optimizer).__name__}, which `configure_optimizers` did not return, and which has"
                " no parameter of the module: such steps do not count in `trainer.global_step`."
            )

    session.watch_steps(before=begin, after=end)


def _mark_of(loop: FitLoop, optimizer: Optimizer) -> Any:
    """Return a value that changes if gradients are cleared or replaced. None without gradients."""
    first = loop.gradients.first(optimizer)
    return None if first is None else (id(first), first._version)  # noqa: SLF001 - counts in-place changes


def _without_autocast(loop: FitLoop) -> AbstractContextManager[object]:
    """Disable autocast: backward operations run in the dtype of their forward."""
    return torch.autocast(loop.engine.device.type, enabled=False)


for _call in (ManualOptimization.backward, ManualOptimization.step, FitLoop.clip_for_module):
    keep_out_of_graphs(_call)
