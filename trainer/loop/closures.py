"""The path of a batch if the optimizer, or the module's own ``optimizer_step``, evaluates the loss through a closure.

It replaces ``FitLoop.train_batch`` if the module overrides ``optimizer_step``, if the optimizer evaluates the loss
itself (LBFGS), or if the optimizer comes from another library and may do so (SAM); see :func:`takes_closure`.

The rules for the scaler are those of the fit loop: gradients are unscaled once per step, the scale is constant during a
batch, and ``update`` runs once at the end of the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.common.module_tree import parameters_of
from trainer.common.session import Session
from trainer.errors import ConfigurationError, warn
from trainer.loop.accumulation import WeightedMean, outputs_of
from trainer.loop.fit import FitLoop

Closure = Callable[[], Any]


class ClosureOptimization:
    """Runs forward and backward as a closure that the module's ``optimizer_step``, or the optimizer, calls.

    An optimizer that requires a closure (LBFGS) moves the weights between two evaluations. Therefore each of its
    evaluations covers the whole accumulation window: the earlier batches are kept and run again with the last one. If
    the closure is optional (SAM), each evaluation covers the last batch only, as in Lightning.

    Args:
        loop: the fit loop that these batches belong to.
        optimizer_step: ``LightningModule.optimizer_step(epoch, batch_idx, optimizer, closure)``, which calls
            :meth:`step`.
        wrapped: returns the optimizers that the module sees (Lightning's wrappers).

    Attributes:
        evaluates_again: whether an optimizer requires a closure, and may evaluate the loss several times per step.

    Raises:
        ConfigurationError: if an optimizer requires a closure and the loss is scaled, because an overflow in one of
            several evaluations could not be undone.
    """

    def __init__(self, loop: FitLoop, optimizer_step: Callable[..., Any], wrapped: Callable[[], list[Any]]) -> None:
        self._loop = loop
        self._optimizer_step = optimizer_step
        self._wrapped = wrapped
        self.evaluates_again = any(needs_closure(optimizer) for optimizer in loop.optimizers)
        self._earlier: list[_Pass] = []
        refuse_scaled_closures(loop)

    def train_batch(self, batch: Any, batch_idx: int, is_last: bool) -> None:
        """Evaluate the loss inside a window; at its end, pass the closure to ``optimizer_step``."""
        loop = self._loop
        batch = loop.start_batch(batch, batch_idx, is_last)
        if loop.progress.skips_epoch:
            return
        loop.finish_steps()  # steps taken in a hook
        current = _Pass(batch, batch_idx, copy(loop.mean))
        if loop.window.is_first:
            self._earlier.clear()
        if loop.window.is_last and (batch is not None or loop.mean.backwards):
            self._update(current)
        else:
            with loop.engine.gradient_sync(loop.window.is_last):
                self._evaluate(current)
            if self.evaluates_again:
                self._earlier.append(current)
        outputs, current.outputs = current.outputs, None  # a kept pass must not hold a graph
        loop.end_batch(outputs, batch, batch_idx)

    def close_window(self) -> None:
        """Step the optimizers on the batches of an open window, because no other batch follows."""
        loop = self._loop
        if loop.mean.backwards or loop.engine.data_parallel_size > 1:
            self._update(_Pass(None, loop.progress.batch_idx, copy(loop.mean)))

    def _update(self, last: _Pass) -> None:
        """Call ``optimizer_step`` for each optimizer, with a closure that ends with the window's last batch."""
        loop = self._loop
        loop.update.freezes_scale = True
        try:
            with loop.engine.gradient_sync(True):
                for optimizer in self._wrapped():
                    closure = partial(self._close_window, last)
                    self._optimizer_step(loop.progress.epoch, last.batch_idx, optimizer, closure)
                    # once per call, however often the optimizer steps in it, as in Lightning
                    loop.progress.optimizer_steps += 1
        finally:
            loop.update.freezes_scale = False
        if not loop.update.stepped:  # `optimizer_step` left the step out
            for optimizer in loop.optimizers:
                loop.gradients.unscale_(optimizer)  # checks sharded gradients, which are still scaled
        unused = loop.gradients.scale_again()
        if not loop.update.stepped:
            lower_scale_after(loop, [factor for _, factor in unused])
        loop.finish_steps()
        self._earlier.clear()  # not evaluated again

    def _evaluate(self, current: _Pass) -> Tensor | None:
        """Run forward and backward of one batch. Return its share of the window's mean loss."""
        loop = self._loop
        loop.mean.rewind(current.mark)
        output = loop.run_training_step(current.batch, current.batch_idx)
        if loop.window.is_first:
            loop.clear_gradients()
        loss = loop.share_of(output)
        if loss is not None:
            loop.path.add_gradients(loss)
            current.share = loss.detach()
        else:
            loop.gradients.backward_without_loss(syncs_gradients=loop.window.is_last)
        if loop.window.is_last:
            loop.mean.close(loop.optimizers)
        current.outputs = outputs_of(loss, output)
        return loss

    def _close_window(self, last: _Pass) -> Tensor | None:
        """Evaluate the last batch. From the second call on, first evaluate the kept batches at the changed weights.

        Returns:
            The mean loss of the window, or the last batch's share of it if no earlier batches are kept. None if there
            is no loss, but 0 if an optimizer requires a closure.
        """
        if last.is_evaluated:
            with self._loop.engine.gradient_sync(False):
                for earlier in self._earlier:
                    self._evaluate(earlier)
        last.is_evaluated = True
        loss = self._evaluate(last)
        corrected = self._loop.mean.corrected
        loss = None if loss is None else corrected(loss)
        shares = [corrected(previous.share) for previous in self._earlier if previous.share is not None]
        if not shares and not (loss is None and self.evaluates_again):
            return loss
        zero = torch.zeros((), device=self._loop.engine.device)  # optimizers that evaluate the loss need a number
        return sum(shares, zero if loss is None else loss)

    def step(self, optimizer: Optimizer, closure: Closure, **kwargs: Any) -> Any:
        """Run ``optimizer.step(closure)`` for one optimizer. Return the closure's result."""
        return step_with_closure(self._loop, optimizer, closure, **kwargs)


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's ``step`` requires a closure, to evaluate the loss several times (LBFGS)."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def takes_closure(optimizer: Optimizer) -> bool:
    """Return whether to pass the optimizer a closure that trains: its ``step`` accepts one, and is not torch's own.

    An optimizer of another library may evaluate the loss twice with it (SAM), pass it on (Lookahead), or require it.
    """
    step = type(optimizer).step
    parameters = inspect.signature(step).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    is_known = step.__module__.startswith(("torch.", "lightning."))  # the defining module, even if inherited
    return needs_closure(optimizer) or (not is_known and ("closure" in parameters or takes_any))


def refuse_scaled_closures(loop: FitLoop) -> None:
    """Refuse an optimizer that requires a closure if the loss is scaled."""
    refused = [type(o).__name__ for o in loop.optimizers if needs_closure(o)]
    if refused and loop.gradients.scaler.is_enabled():
        raise ConfigurationError(
            f"Got the optimizer {refused[0]} with precision={loop.engine.precision.name!r}, expected one that"
            " evaluates the loss once per step: an overflow in one of several evaluations could not be undone. Use"
            " precision='bf16-mixed' or '32-true'."
        )


def is_of_run(loop: FitLoop, optimizer: Optimizer) -> bool:
    """Return whether ``configure_optimizers`` returned the optimizer, or a parameter of the module is in it."""
    if any(optimizer is known for known in loop.optimizers):
        return True
    parameters = {id(parameter) for parameter in loop.engine.module.parameters()}
    return any(id(parameter) in parameters for parameter in parameters_of(optimizer))


def refuse_bare_steps(loop: FitLoop, session: Session) -> None:
    """Refuse steps of an optimizer of the run without its wrapper, while losses are scaled, until ``session`` closes.

    Such a step uses scaled gradients, and is not skipped after an overflow. If no loss was scaled, the module may scale
    its losses itself, so the first such step with gradients only causes a warning.
    """
    scaler, precision = loop.gradients.scaler, f"precision={loop.engine.precision.name!r}"
    warned = False

    def check(optimizer: Optimizer, *_: Any) -> None:
        nonlocal warned
        if loop.engine.module_calls.clip is None or not is_of_run(loop, optimizer):  # a replay, with unscaled gradients
            return
        name = type(optimizer).__name__
        if not scaler.may_step(optimizer):
            raise ConfigurationError(
                f"Got a step of the torch optimizer {name} with scaled gradients ({precision}), expected a step of its"
                " wrapper, which unscales them and skips the step after an overflow. Return it from"
                " `configure_optimizers`. In manual optimization, call"
                " self.optimizers().step(), without use_pl_optimizer=False; in an overridden `optimizer_step`, call"
                " optimizer.step(closure)."
            )
        if not (warned or scaler.has_scaled) and scaler.gradients_of(optimizer):
            warned = True
            warn(
                f"Got a step of the torch optimizer {name} with gradients of a loss that the Trainer did not scale"
                f" ({precision}): small gradients underflow to 0 in float16, and no step is skipped after an overflow."
                " In manual optimization, call self.manual_backward(loss) instead of loss.backward(), and"
                " self.optimizers().step() without use_pl_optimizer=False. Ignore this warning if the module has its"
                " own GradScaler."
            )

    session.watch_steps(before=check)


def step_with_closure(loop: FitLoop, optimizer: Optimizer, closure: Closure, **kwargs: Any) -> Any:
    """Evaluate the closure, run the hooks on its gradients, and step. A scaler skips the step after an overflow.

    ``FitLoop.finish_steps`` updates the scale later, once for several steps.
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
    loop.update.stepped.append(optimizer)
    return result


def lower_scale_after(loop: FitLoop, unused: list[Tensor]) -> None:
    """Lower the loss scale after an overflow in gradients that the module cleared instead of stepping on them.

    Otherwise, a module that steps only if the norm of its gradients is finite would never step again.

    Args:
        loop: the fit loop.
        unused: a number for each optimizer with such gradients. One that is not finite stands for an overflow.
    """
    scaler = loop.gradients.scaler
    if not unused or not scaler.is_enabled():
        return
    overflowed = (~torch.stack(unused).isfinite()).any().float()
    if scaler.all_reduce_flag is not None:
        scaler.all_reduce_flag(overflowed)
    if overflowed.item():  # host-device synchronization
        loop.resolve_outcome()
        waiting = [optimizer for optimizer in loop.optimizers if not loop.gradients.are_used(optimizer)]
        loop.gradients.multiply_(waiting, scaler.back_off())


@dataclass(eq=False, slots=True)
class _Pass:
    """One batch of a window, which may be evaluated several times.

    Args:
        batch, batch_idx: the arguments of ``training_step``.
        mark: the window's mean before the batch.

    Attributes:
        share: the last evaluated share of the window's mean loss; None if the batch had no loss.
        outputs: the argument of ``on_train_batch_end``.
        is_evaluated: whether the closure has evaluated it.
    """

    batch: Any
    batch_idx: int
    mark: WeightedMean
    share: Tensor | None = None
    outputs: dict[str, Any] | None = field(default_factory=dict)
    is_evaluated: bool = False
