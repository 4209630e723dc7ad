"""Another way through a batch: in parts, where memory does not suffice for the whole of it.

``SplitBatches`` replaces ``FitLoop.train_batch`` when a run is set up
(:class:`~trainer.callbacks.HalveOnOutOfMemory`). A run without it is not affected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from trainer.diagnosis import add_note, let_go
from trainer.engine.memory import free_memory
from trainer.errors import is_out_of_memory
from trainer.loops.fit import FitLoop
from trainer.loops.step_output import NOTHING, loss_in, outputs_of

Split = Callable[[Any, int, int], Any]
"""(batch, start, stop): the samples of a batch from ``start`` to ``stop``."""


@dataclass(eq=False)
class SplitBatches:
    """Runs a batch in parts of at most ``limit`` samples, and halves the limit when memory runs out.

    The loss of a part counts as many samples as the part has, so the sum of the gradients is that of the whole batch's
    loss, if that is a mean over samples; with a ``"weight"`` beside the loss, whatever it is a mean over.

    On several processes each runs as many parts as it needs, without exchanging anything but what their first batch
    weighs; gradients are averaged after the window's last part, by a backward pass that adds zeros. So one process that
    splits does not keep the others waiting.

    Args:
        loop: the fit loop whose batches these are.
        limit: samples in a part at most; None for no limit yet.
        measure: the number of samples in a batch; raises ValueError where it cannot be split.
        split: takes a part of it.
        announce: told what was done about memory, once for each batch in which it ran out.
    """

    loop: FitLoop
    limit: int | None
    measure: Callable[[Any], int]
    split: Split
    announce: Callable[[int, int], None]
    _is_cleared: bool = False  # of the gradients from before the window

    def train_batch(self, batch: Any, batch_idx: int, is_last: bool) -> None:
        """Forward and backward of each part, and where the batch closes a window, the weight update."""
        loop, window = self.loop, self.loop.window
        batch = loop.start_batch(batch, batch_idx, is_last)
        if loop.skips_epoch:
            return
        if window.is_first:
            self._is_cleared = False
        before = self.limit
        loss, output = self._run(batch, batch_idx)
        updates = window.is_last and self._close_window()
        if self.limit is not None and self.limit != before:
            self.announce(self.measure(batch), self.limit)
        if updates:
            loop.update_weights()
        elif window.is_last and batch is not None:
            loop.progress.optimizer_steps += len(loop.optimizers)
        loop.metrics.begin_batch(batch)
        loop.end_batch(outputs_of(loss, output), batch, batch_idx)

    def _run(self, batch: Any, batch_idx: int) -> tuple[Tensor | None, Any]:
        """All parts of a batch. Returns its share of the window's mean loss, and what the last part's step returned."""
        size = 1 if batch is None or self.limit is None else self.measure(batch)
        waiting = deque([(0, size)] if self.limit is None else _ranges(0, size, self.limit))
        total: Tensor | None = None
        output: Any = None
        while waiting:
            start, stop = waiting[0]
            part = batch if stop - start == size else self.split(batch, start, stop)
            output = None  # it may be large
            try:
                loss, output = self._run_part(part, batch_idx, (stop - start) / size)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                size, pieces = self._halve(error, batch, (start, stop) if self.limit is not None else None)
                waiting = deque([*pieces, *(piece for one in list(waiting)[1:] for piece in _ranges(*one, self.limit))])
                continue
            finally:
                del part
            waiting.popleft()
            if loss is not None:
                total = loss if total is None else total + loss
        if total is None:
            self.loop.window.find_unit(False, None, self.loop.engine)
        return total, output

    def _run_part(self, part: Any, batch_idx: int, fraction: float) -> tuple[Tensor | None, Any]:
        """Forward and backward of one part; returns its loss as it counts. Where it raises, gradients are as before."""
        loop, window = self.loop, self.loop.window
        with loop.engine.gradient_sync(False):
            if fraction != 1.0:
                loop.metrics.begin_batch(part)
            loop.hooks.scope.enter("training_step")
            with loop.forward_context():
                output = NOTHING if part is None else loop.training_step(part, batch_idx)
            loop.hooks.scope.enter(None)
            self._clear()
            loss, weight = loss_in(output)
            if loss is None or window.batch_weight == 0:
                return None, output
            if window.batch_weight is not None and weight is None:
                weight = window.batch_weight * fraction
            window.find_unit(True, weight, loop.engine)
            loss = window.share(loss if weight is not None or fraction == 1.0 else loss * fraction, weight)
            scaled = loop.gradients.scale(loss)
            loop.hooks.on_before_backward(scaled)
            with loop.gradients.undone_on_error(loop.engine.model.parameters()):
                if loop.backward is None:
                    loop.gradients.backward(scaled)
                else:
                    loop.backward(scaled)
            loop.hooks.on_after_backward()
        if weight is not None:
            window.next_part()  # those of parts add up
        return loss.detach(), output

    def _halve(self, error: Exception, batch: Any, bounds: tuple[int, int] | None) -> tuple[int, list[tuple[int, int]]]:
        """Make room, and lower the limit. Returns the number of samples in the batch, and the parts of what failed.

        Raises:
            Exception: ``error``, where there is nothing left to halve.
        """
        loop = self.loop
        loop.hooks.scope.enter(None)
        try:
            size = self.measure(batch)
        except ValueError as problem:
            add_note(error, f"HalveOnOutOfMemory could not split the batch: {problem}")
            raise error from None
        start, stop = bounds or (0, size)
        if stop - start < 2:
            add_note(error, "HalveOnOutOfMemory has nothing left to halve: a single sample does not fit.")
            raise error
        let_go(error)
        self.limit = (stop - start + 1) // 2
        self._clear()  # the last step's gradients: they take room, too
        loop.engine.abandon_forward()
        free_memory(loop.engine.device)
        return size, _ranges(start, stop, self.limit)

    def _clear(self) -> None:
        """Drop the gradients of the last window, once."""
        if self.loop.window.is_first and not self._is_cleared:
            self._is_cleared = True
            self.loop.clear_gradients()

    def _close_window(self) -> bool:
        """Make the window's gradients the mean over what it holds, over all processes. False for none."""
        loop = self.loop
        with loop.engine.gradient_sync(True):
            loop.gradients.backward_without_loss(exchanges=True)  # averages what the parts have accumulated
        return loop.window.close(loop.optimizers, loop.engine)


def _ranges(start: int, stop: int, limit: int | None) -> list[tuple[int, int]]:
    """``start`` to ``stop`` in pieces of at most ``limit``, as equal as they can be."""
    size = stop - start
    if limit is None or size <= limit:
        return [(start, stop)]
    number = -(-size // limit)
    edges = [start + size * i // number for i in range(number + 1)]
    return list(pairwise(edges))
