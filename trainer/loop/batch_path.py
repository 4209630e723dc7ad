"""The path of a batch: the functions that it passes through, chosen once per run.

``Preparation`` in ``trainer/preparation.py`` builds the path of each loop. Everything that changes how a batch is run
(a profiler, a step that draws its own batches, a recorder of batches) is a wrapper: a function that takes a path and
returns another one, mostly by ``dataclasses.replace``. Nothing else changes a path, and a path without wrappers has no
branch for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from trainer.data.batches import identity
from trainer.state.outcome import StepOutcome

Clip = Callable[[Optimizer], Tensor | None]
"""Clips the gradients of one optimizer in place. Returns their norm before clipping, or None if it is not computed."""
TrainingWrapper = Callable[["TrainingPath"], "TrainingPath"]


@dataclass(frozen=True, slots=True)
class BatchPath:
    """The functions that a batch passes through in an evaluation, in this order.

    Attributes:
        transfer: moves the batch to the device through the user's transfer hooks: ``(batch, dataloader_idx=0)``.
        on_batch_start: runs the hooks before the step: ``(batch, batch_idx)``, and ``dataloader_idx`` if there are
            several dataloaders.
        forward_context: returns the context of the step: autocast, or a no-op if the step enters autocast itself.
        step: calls the module's step, with the arguments of ``on_batch_start``.
        on_batch_end: runs the hooks after the step: ``(outputs, batch, batch_idx)``, and ``dataloader_idx`` if there
            are several dataloaders.
        draws: whether the step draws its own batches, so that the number of steps is unknown. Default: False.
    """

    transfer: Callable[..., Any]
    on_batch_start: Callable[..., Any]
    forward_context: Callable[[], AbstractContextManager[object]]
    step: Callable[..., Any]
    on_batch_end: Callable[..., Any]
    draws: bool = False

    def of_dataloader(self, index: int) -> BatchPath:
        """Return the path of one of several dataloaders, which passes its index to the step and to the hooks."""
        return replace(
            self,
            transfer=lambda batch: self.transfer(batch, index),
            on_batch_start=lambda *args: self.on_batch_start(*args, index),
            step=lambda *args: self.step(*args, index),
            on_batch_end=lambda *args: self.on_batch_end(*args, index),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPath(BatchPath):
    """The functions that a batch passes through in a fit.

    Attributes:
        train_batch: runs one batch, and calls the others: ``(batch, batch_idx, is_last)``. It belongs to
            ``FitLoop``, ``ManualOptimization`` or ``ClosureOptimization``.
        close_window: updates the weights with the batches of an open window if no other batch follows.
        clears_before_forward: whether gradients are cleared before the forward pass, because no hook overrides
            ``zero_grad``.
        zero_grad: the module's own ``optimizer_zero_grad(epoch, batch_idx, optimizer)``. None for the usual one.
        add_gradients: runs the hooks and the backward pass of a loss, which is not scaled yet.
        scale: multiplies a loss by the loss scale. A no-op without optimizers, because nothing would unscale
            the gradients.
        backward: runs the backward pass of a scaled loss.
        after_backward: runs ``on_after_backward``, on unscaled gradients.
        clip: clips the gradients of one optimizer after ``on_before_optimizer_step``. None for no clipping.
        norm_type: the order of the norms that ``clip`` returns.
        update_weights: steps all optimizers at the end of an accumulation window.
        follow_outcome: called with the outcome of each update when it is known, after the hooks. Default: a no-op.
        wrappers: the wrappers that callbacks have added around the path during the run. Default: none.
        inner: the path without these wrappers. Default: None, this one.
    """

    train_batch: Callable[[Any, int, bool], None]
    close_window: Callable[[], None]
    clears_before_forward: bool
    zero_grad: Callable[..., Any] | None
    add_gradients: Callable[[Tensor], Any]
    scale: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor], Any]
    after_backward: Callable[[], Any]
    clip: Clip | None
    norm_type: float
    update_weights: Callable[[], None]
    follow_outcome: Callable[[StepOutcome], Any] = identity
    wrappers: tuple[TrainingWrapper, ...] = ()
    inner: TrainingPath | None = None

    def with_wrappers(self, wrappers: tuple[TrainingWrapper, ...]) -> TrainingPath:
        """Return the path with these wrappers, the innermost first, instead of its ``wrappers``."""
        inner = self.inner or self
        return replace(wrapped(inner, wrappers), wrappers=wrappers, inner=inner)


class ModuleCalls(NamedTuple):
    """Functions that handle the calls that a module makes itself during a fit.

    If a function is None, ``trainer.distributed.precision_plugin.PrecisionAdapter`` handles the call.

    Attributes:
        backward: handles ``LightningModule.manual_backward``. Gets (loss, function that runs the module's ``backward``
            on the scaled loss).
        step: handles ``optimizer.step`` of the optimizers from ``self.optimizers()``. Gets (optimizer, closure, other
            arguments by name).
        clip: handles ``LightningModule.clip_gradients``. Gets (optimizer, limit, ``"norm"`` or ``"value"``).
    """

    backward: Callable[[Tensor, Callable[[Tensor], None]], None] | None = None
    step: Callable[..., Any] | None = None
    clip: Callable[[Optimizer, float, str], None] | None = None


Path = TypeVar("Path", bound=BatchPath)

NO_PATH = TrainingPath(
    identity, identity, nullcontext, identity, identity, train_batch=identity, close_window=identity,
    clears_before_forward=False, zero_grad=None, add_gradients=identity, scale=identity,
    backward=identity, after_backward=identity, clip=None, norm_type=2.0, update_weights=identity,
)  # fmt: skip
"""The path of a loop that no run has prepared yet."""


def wrapped(path: Path, wrappers: Iterable[Callable[[Path], Path]]) -> Path:
    """Apply wrappers to a path, the innermost first."""
    for wrap in wrappers:
        path = wrap(path)
    return path
