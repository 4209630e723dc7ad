"""Ways through a batch for modules that take the optimizer into their own hands.

Each stands in the place of ``FitLoop.train_batch`` and is chosen once, when a run starts:

``ManualOptimization``   the module sets ``automatic_optimization = False`` and calls ``manual_backward`` and
                         ``optimizer.step()`` itself, for as many optimizers and as often as it likes.
``ClosureOptimization``  the module overrides ``optimizer_step``, or the optimizer evaluates the loss itself (LBFGS), or
                         is of another library and may do so (SAM): ``optimization.takes_closure``.
``ForwardOnly``          a callback wants batches to be seen, and no weight to change (SWA, for its batch norm).

Another door is about data: ``draw_in_fit`` and ``draw_in_evaluation`` are for steps that draw their own batches
(``training_step(self, dataloader_iter)``). They go around whatever else was chosen.

The scaler's rules stay those of the loop: gradients are unscaled once for each step, the scale is the same
throughout a batch, and ``update`` runs once, at its end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.data.batches import DrawnLoaders, EndOfPass
from trainer.engine.optimization import needs_closure
from trainer.errors import ConfigurationError, ResumeError
from trainer.loops.evaluation import EvalLoop
from trainer.loops.fit import FitLoop
from trainer.loops.hooks import Hook
from trainer.loops.step_output import NOTHING, loss_in, outputs_of

Closure = Callable[[], Any]


class ManualOptimization:
    """The module does backward passes and steps in its ``training_step``.

    Args:
        loop: the fit loop whose batches these are.

    Raises:
        ConfigurationError: an optimizer evaluates the loss itself and the loss is scaled; see below.
    """

    def __init__(self, loop: FitLoop) -> None:
        self._loop = loop
        self._stepped: list[Optimizer] = []
        _refuse_impossible_closures(loop)

    def train_batch(self, batch: Any, batch_idx: int, is_last: bool) -> None:
        """``training_step`` does everything; then the scale is adjusted once for all the steps it took."""
        loop = self._loop
        batch = loop.start_batch(batch, batch_idx, is_last)
        if loop.skips_epoch:
            return
        output = _forward(loop, batch, batch_idx, nothing=None)
        _finish_update(loop, self._stepped)
        loop.end_batch(None if batch is None else self.outputs_of(output), batch, batch_idx)

    def backward(self, loss: Tensor, run: Callable[[Tensor], None]) -> None:
        """``manual_backward``: ``run`` on the scaled loss, outside of the training step's autocast."""
        loop = self._loop
        with _without_autocast(loop):
            scaled = loop.scaler.scale(loss)
            loop.hooks.on_before_backward(scaled)
            run(scaled)
            loop.hooks.on_after_backward()

    def step(self, optimizer: Optimizer, closure: Closure, **kwargs: Any) -> Any:
        """``optimizer.step(closure)`` of one optimizer. Returns what the closure returned."""
        device = self._loop.engine.device.type
        around = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

        def forward() -> Any:
            # the training step's autocast has kept casts of the weights, and a step changes those
            torch.clear_autocast_cache()
            with around:
                return closure()

        with _without_autocast(self._loop):
            result = _step(self._loop, optimizer, forward, **kwargs)
        torch.clear_autocast_cache()
        self._loop.progress.optimizer_steps += 1
        self._stepped.append(optimizer)
        return result

    @staticmethod
    def outputs_of(output: Any) -> dict[str, Any]:
        """What ``on_train_batch_end`` is given."""
        if output is None:
            return {}
        if isinstance(output, Mapping):
            return {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
        if isinstance(output, Tensor):
            return {"loss": output.detach()}
        raise ConfigurationError(
            "In manual optimization, `training_step` must either return a Tensor or have no return. Got"
            f" {type(output).__name__}; a dict, whose items go to `on_train_batch_end`, is welcome, too."
        )


class ClosureOptimization:
    """The forward and backward pass are a closure that the module's ``optimizer_step``, or the optimizer, calls.

    An optimizer that evaluates the loss itself moves the weights between two evaluations. So each is one of the whole
    accumulation window: the earlier batches are kept until then, and run again with the last one.

    Args:
        loop: the fit loop whose batches these are.
        optimizer_step: ``LightningModule.optimizer_step(epoch, batch_idx, optimizer, closure)``; it ends up in
            :meth:`step`.
        wrapped: returns the optimizers in the form the module knows them in (Lightning's wrappers).

    Attributes:
        evaluates_again: whether an optimizer does, several times a step.

    Raises:
        ConfigurationError: an optimizer evaluates the loss several times a step, and the loss is scaled: an overflow
            in one of the evaluations could not be undone.
    """

    def __init__(self, loop: FitLoop, optimizer_step: Callable[..., Any], wrapped: Callable[[], list[Any]]) -> None:
        self._loop = loop
        self._optimizer_step = optimizer_step
        self._wrapped = wrapped
        self._stepped: list[Optimizer] = []
        self.evaluates_again = any(needs_closure(optimizer) for optimizer in loop.optimizers)
        self._earlier: list[_Pass] = []
        _refuse_impossible_closures(loop)

    def train_batch(self, batch: Any, batch_idx: int, is_last: bool) -> None:
        """Inside a window evaluate the loss; at its end hand the closure that does to ``optimizer_step``."""
        loop = self._loop
        batch = loop.start_batch(batch, batch_idx, is_last)
        if loop.skips_epoch:
            return
        this = _Pass(batch, batch_idx, loop.window.mark())
        if loop.window.is_first:
            self._earlier.clear()
        with loop.engine.gradient_sync(loop.window.is_last):
            if loop.window.is_last and (batch is not None or loop.window.backwards):
                for optimizer in self._wrapped():
                    self._optimizer_step(loop.progress.epoch, batch_idx, optimizer, partial(self._close_window, this))
                    loop.progress.optimizer_steps += 1  # however often it has really stepped, as Lightning counts
                self._earlier.clear()  # nobody will want them again
            else:
                self._evaluate(this)
                if self.evaluates_again:
                    self._earlier.append(this)
        _finish_update(loop, self._stepped)
        loop.end_batch(this.outputs, batch, batch_idx)

    def state_dict(self) -> dict[str, Any]:
        """The batches that are kept, for a checkpoint inside a window.

        They are None where ``torch.load(weights_only=True)`` would not read them: where there is more in them than
        tensors, numbers, strings and plain containers of those.
        """
        if not all(_is_plain(one.batch) for one in self._earlier):
            return {"batches": None}
        return {"batches": [[one.batch, one.batch_idx, one.mark, one.share] for one in self._earlier]}

    def load_state_dict(self, state: dict[str, Any], device: torch.device, *, exact: bool) -> None:
        """Keep the batches that :meth:`state_dict` returned.

        Raises:
            ResumeError: it could not return them, and ``exact`` is set. Otherwise the window goes on without them.
        """
        if state["batches"] is None:
            reason = (
                "The checkpoint was written inside an accumulation window whose batches the optimizer evaluates again,"
                " and it could not keep them: they hold more than tensors, numbers, strings and plain containers."
            )
            if exact:
                raise ResumeError(
                    f"{reason} Resume from one that was written between two windows, or go on without these batches:"
                    " Trainer(exact_resume=False)."
                )
            warnings.warn(f"{reason} The window goes on without them.", stacklevel=2)
        for batch, batch_idx, mark, share in _moved(state["batches"] or [], device):
            self._earlier.append(one := _Pass(batch, batch_idx, mark))
            one.share = share

    def _evaluate(self, this: _Pass) -> Tensor | None:
        """Forward and backward of one batch. Returns its share of the window's mean loss."""
        loop = self._loop
        loop.window.go_back(this.mark)
        output = _forward(loop, this.batch, this.batch_idx)
        if loop.window.is_first:
            loop.clear_gradients()
        loss = loop.share_of(output)
        if loss is not None:
            loop.run_backward(loop.scaler.scale(loss))
            this.share = loss.detach()
        this.outputs = outputs_of(loss, output)
        return loss

    def _close_window(self, last: _Pass) -> Tensor | None:
        """The closure: evaluates the last batch, and once the weights have moved the earlier ones before it.

        Returns:
            The window's mean loss, or as much of it as was evaluated.
        """
        if last.is_evaluated:
            with self._loop.engine.gradient_sync(False):
                for one in self._earlier:
                    self._evaluate(one)
        last.is_evaluated = True
        loss = self._evaluate(last)
        shares = [one.share * self._loop.window.correction for one in self._earlier if one.share is not None]
        if not shares and not (loss is None and self.evaluates_again):
            return loss
        zero = torch.zeros((), device=self._loop.engine.device)  # what there is nothing to learn from is no number
        return sum(shares, zero if loss is None else loss)

    def step(self, optimizer: Optimizer, closure: Closure, **kwargs: Any) -> Any:
        """``optimizer.step(closure)`` of one optimizer. Returns what the closure returned."""
        result = _step(self._loop, optimizer, closure, **kwargs)
        self._stepped.append(optimizer)
        return result


class ForwardOnly:
    """``training_step`` and nothing after it: for buffers that follow the data.

    Unlike the others it is opened, and closed again, by callbacks, between epochs.

    Args:
        loop: the fit loop whose batches these are.
    """

    def __init__(self, loop: FitLoop) -> None:
        self._loop = loop
        self._usual = loop.train

    def close(self) -> None:
        """Let batches take the way that they took before."""
        self._loop.train = self._usual

    def train_batch(self, batch: Any, batch_idx: int, is_last: bool) -> None:
        """The forward pass and its hooks."""
        loop = self._loop
        batch = loop.start_batch(batch, batch_idx, is_last)
        if loop.skips_epoch:
            return
        loss, _ = loss_in(output := _forward(loop, batch, batch_idx))
        loop.end_batch(outputs_of(loss, output), batch, batch_idx)


def draw_in_fit(loop: FitLoop, loaders: DrawnLoaders, ends_epoch: bool) -> None:
    """Have ``training_step`` draw its own batches.

    Args:
        loop: prepared, its ``train`` chosen. It counts steps, not batches.
        loaders: what to draw from.
        ends_epoch: whether a StopIteration that leaves the step ends the epoch, as in automatic optimization; or the
            step only, as in manual optimization.
    """
    train, step, hooks = loop.train, loop.training_step, loop.hooks
    announce_start, announce_end = hooks.on_train_batch_start, hooks.on_train_batch_end

    def train_batch(batch: Any, batch_idx: int, is_last: bool) -> None:
        try:
            train(batch, batch_idx, is_last)
        except StopIteration:
            hooks.scope.enter(None)
            loop.skips_epoch = loop.progress.is_last_batch = True

    def training_step(batch: Any, batch_idx: int) -> Any:
        output = None
        try:
            output = step(loaders.iterator(), batch_idx)
        except StopIteration:
            if ends_epoch:
                raise
        loop.progress.is_last_batch = loaders.is_done
        return output

    def on_train_batch_start(batch: Any, batch_idx: int) -> Any:
        return announce_start(*loaders.last[:2])  # what the step before drew

    def on_train_batch_end(outputs: Any, batch: Any, batch_idx: int) -> None:
        announce_end(outputs, *loaders.last[:2])

    loop.train, loop.training_step, loop.transfer = train_batch, training_step, _untouched
    hooks.on_train_batch_start = Hook(announce_start.name, hooks.scope, module=on_train_batch_start)
    hooks.on_train_batch_end = Hook(announce_end.name, hooks.scope, module=on_train_batch_end)


def draw_in_evaluation(loop: EvalLoop, loaders: DrawnLoaders) -> None:
    """Have ``validation_step`` (and so on) draw its own batches. A StopIteration that leaves it ends the pass.

    Args:
        loop: prepared.
        loaders: what to draw from.
    """
    step, announce_end = loop.step, loop.on_batch_end

    def draw(batch: Any, batch_idx: int, *_: int) -> Any:
        try:
            return step(loaders.iterator(), batch_idx)
        except StopIteration as end:
            loop.hooks.scope.enter(None)
            raise EndOfPass from end

    def on_batch_end(output: Any, batch: Any, *where: int) -> None:
        batch, *drawn_where = loaders.last
        announce_end(output, batch, *drawn_where[: len(where)])

    loop.step, loop.transfer = draw, _untouched
    loop.on_batch_end = Hook(announce_end.name, loop.hooks.scope, module=on_batch_end)


def _untouched(batch: Any, *_: Any) -> Any:
    return batch


def _refuse_impossible_closures(loop: FitLoop) -> None:
    greedy = [type(o).__name__ for o in loop.optimizers if needs_closure(o)]
    if greedy and loop.scaler.is_enabled():
        raise ConfigurationError(
            f"Got the optimizer {greedy[0]} with precision={loop.precision.name!r}, expected one that takes a"
            " single gradient: it evaluates the loss itself, several times a step, which loss scaling cannot"
            " follow. Use precision='bf16-mixed' or '32-true'."
        )


class _Pass:
    """One batch of a window, as often as it is evaluated.

    Args:
        batch, batch_idx: what ``training_step`` is given.
        mark: where the window stands when it is.

    Attributes:
        share: its loss's share of the window's mean loss, when it was evaluated last; None where it had none.
        outputs: what ``on_train_batch_end`` is given.
        is_evaluated: whether the closure has been called for it.
    """

    __slots__ = ("batch", "batch_idx", "is_evaluated", "mark", "outputs", "share")

    def __init__(self, batch: Any, batch_idx: int, mark: dict[str, Any]) -> None:
        self.batch = batch
        self.batch_idx = batch_idx
        self.mark = mark
        self.share: Tensor | None = None
        self.outputs: dict[str, Any] | None = {}
        self.is_evaluated = False


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) in (str, int) and _is_plain(one) for key, one in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (Tensor, str, bytes, bool, int, float)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(one, device) for key, one in value.items()}
    return type(value)(_moved(one, device) for one in value) if isinstance(value, (list, tuple)) else value


def _forward(loop: FitLoop, batch: Any, batch_idx: int, nothing: Any = NOTHING) -> Any:
    """``training_step`` under autocast; ``nothing`` where the batch is None."""
    outer = loop.hooks.scope.enter("training_step")  # from `optimizer_step`, perhaps
    with loop.precision.autocast():
        output = nothing if batch is None else loop.training_step(batch, batch_idx)
    loop.hooks.scope.enter(outer)
    return output


def _step(loop: FitLoop, optimizer: Optimizer, closure: Closure, **kwargs: Any) -> Any:
    """Evaluate the closure, let the hooks see the gradients, step; with a scaler, unless they overflowed."""
    loop.settle()  # the last batch's update

    def evaluate() -> Any:
        with torch.enable_grad():
            result = closure()
        loop.scaler.unscale_(optimizer)
        loop.expose_gradients(optimizer)
        return result

    if loop.scaler.skips_steps:
        result = evaluate()
        loop.scaler.step(optimizer, **kwargs)
    else:
        result = optimizer.step(closure=evaluate, **kwargs)
    return result


def _finish_update(loop: FitLoop, stepped: list[Optimizer]) -> None:
    """One scale adjustment for all the steps of a batch, however many there were of each optimizer."""
    if stepped:
        loop.finish_update(
            tuple(i for i, optimizer in enumerate(loop.optimizers) if any(optimizer is s for s in stepped))
        )
        stepped.clear()


def _without_autocast(loop: FitLoop) -> AbstractContextManager[object]:
    """Backward operations run in the dtype of their forward; nothing in them is to be cast again."""
    return torch.autocast(loop.engine.device.type, enabled=False)
