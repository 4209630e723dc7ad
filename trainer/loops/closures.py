"""The path of a batch whose loss is evaluated by the optimizer, or inside the module's own ``optimizer_step``.

It takes the place of ``FitLoop.train_batch`` where the module overrides ``optimizer_step``, where the optimizer
evaluates the loss itself (LBFGS), and where it is another library's and may do so (SAM):
``trainer.engine.optimizer_calls.takes_closure``.

The scaler's rules are those of the loop: gradients are unscaled once for each step, the scale is the same
throughout a batch, and ``update`` runs once, at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from trainer.engine.optimizer_calls import needs_closure
from trainer.errors import ConfigurationError, ResumeError, warn
from trainer.loops.fit import FitLoop
from trainer.loops.step_output import outputs_of

Closure = Callable[[], Any]


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
        self.evaluates_again = any(needs_closure(optimizer) for optimizer in loop.optimizers)
        self._earlier: list[_Pass] = []
        refuse_scaled_closures(loop)

    def train_batch(self, batch: Any, batch_idx: int, is_last: bool) -> None:
        """Inside a window evaluate the loss; at its end hand the closure that does to ``optimizer_step``."""
        loop = self._loop
        batch = loop.start_batch(batch, batch_idx, is_last)
        if loop.skips_epoch:
            return
        loop.finish_steps()  # those that a hook has taken
        this = _Pass(batch, batch_idx, loop.window.mark())
        if loop.window.is_first:
            self._earlier.clear()
        if loop.window.is_last and (batch is not None or loop.window.backwards):
            self._update(this)
        else:
            with loop.engine.gradient_sync(loop.window.is_last):
                self._evaluate(this)
            if self.evaluates_again:
                self._earlier.append(this)
        outputs, this.outputs = this.outputs, None  # a pass that is kept holds no graph
        loop.end_batch(outputs, batch, batch_idx)

    def close_window(self) -> None:
        """Step on the batches of a window that ends without another one."""
        loop = self._loop
        if loop.window.backwards or loop.engine.data_parallel_size > 1:
            self._update(_Pass(None, loop.progress.batch_idx, loop.window.mark()))

    def _update(self, last: _Pass) -> None:
        """Have ``optimizer_step`` step each optimizer, with a closure that ends with the window's last batch."""
        loop = self._loop
        loop.holds_scale = True
        try:
            with loop.engine.gradient_sync(True):
                for optimizer in self._wrapped():
                    closure = partial(self._close_window, last)
                    self._optimizer_step(loop.progress.epoch, last.batch_idx, optimizer, closure)
                    loop.progress.optimizer_steps += 1  # however often it has really stepped, as Lightning counts
        finally:
            loop.holds_scale = False
        loop.finish_steps()
        self._earlier.clear()  # they are not evaluated again

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
            ResumeError: it could not return them, and ``exact`` is set. Otherwise the window continues without them.
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
            warn(f"{reason} The window continues without them.")
        kept = tree_map_only(Tensor, lambda tensor: tensor.to(device), state["batches"] or [])
        for batch, batch_idx, mark, share in kept:
            self._earlier.append(_Pass(batch, batch_idx, mark, share))

    def _evaluate(self, this: _Pass) -> Tensor | None:
        """Forward and backward of one batch. Returns its share of the window's mean loss."""
        loop = self._loop
        loop.window.go_back(this.mark)
        output = loop.run_training_step(this.batch, this.batch_idx)
        if loop.window.is_first:
            loop.clear_gradients()
        loss = loop.share_of(output)
        if loss is not None:
            loop.path.add_gradients(loss)
            this.share = loss.detach()
        else:
            loop.gradients.backward_without_loss(exchanges=loop.window.is_last)
        if loop.window.is_last:
            loop.window.close(loop.optimizers, loop.engine)
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
        corrected = self._loop.window.corrected
        loss = None if loss is None else corrected(loss)
        shares = [corrected(one.share) for one in self._earlier if one.share is not None]
        if not shares and not (loss is None and self.evaluates_again):
            return loss
        zero = torch.zeros((), device=self._loop.engine.device)  # what there is nothing to learn from is no number
        return sum(shares, zero if loss is None else loss)

    def step(self, optimizer: Optimizer, closure: Closure, **kwargs: Any) -> Any:
        """``optimizer.step(closure)`` of one optimizer. Returns what the closure returned."""
        return step_with_closure(self._loop, optimizer, closure, **kwargs)


def refuse_scaled_closures(loop: FitLoop) -> None:
    """Refuse an optimizer that evaluates the loss several times a step, where the loss is scaled."""
    refused = [type(o).__name__ for o in loop.optimizers if needs_closure(o)]
    if refused and loop.gradients.scaler.is_enabled():
        raise ConfigurationError(
            f"Got the optimizer {refused[0]} with precision={loop.precision.name!r}, expected one that takes a"
            " single gradient: it evaluates the loss itself, several times a step, which loss scaling cannot"
            " follow. Use precision='bf16-mixed' or '32-true'."
        )


def step_with_closure(loop: FitLoop, optimizer: Optimizer, closure: Closure, **kwargs: Any) -> Any:
    """Evaluate the closure, let the hooks see the gradients, step; with a scaler, unless they overflowed.

    ``FitLoop.finish_steps`` adjusts the scale later, once for several steps.
    """
    loop.begin_step()

    def evaluate() -> Any:
        with torch.enable_grad():
            result = closure()
        loop.gradients.unscale_(optimizer)
        loop.expose_gradients(optimizer)
        return result

    if loop.gradients.scaler.skips_steps:
        result = evaluate()
        loop.gradients.step(optimizer, **kwargs)
    else:
        result = optimizer.step(closure=evaluate, **kwargs)
    loop.gradients.mark_used(optimizer)
    loop.stepped.append(optimizer)
    return result


@dataclass(eq=False, slots=True)
class _Pass:
    """One batch of a window, as often as it is evaluated.

    Args:
        batch, batch_idx: what ``training_step`` is given.
        mark: the state of the window before it.

    Attributes:
        share: its loss's share of the window's mean loss, when it was evaluated last; None where it had none.
        outputs: what ``on_train_batch_end`` is given.
        is_evaluated: whether the closure has been called for it.
    """

    batch: Any
    batch_idx: int
    mark: dict[str, Any]
    share: Tensor | None = None
    outputs: dict[str, Any] | None = field(default_factory=dict)
    is_evaluated: bool = False


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) in (str, int) and _is_plain(one) for key, one in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (Tensor, str, bytes, bool, int, float)
