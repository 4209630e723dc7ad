"""Steps that draw their own batches: ``training_step(self, dataloader_iter)``, and likewise in evaluation.

These work with any of the other paths through a batch: what they replace is where the batch comes from.
"""

from __future__ import annotations

from typing import Any

from trainer.data.batches import DrawnLoaders, EndOfPass, as_it_is
from trainer.loops.evaluation import EvalLoop
from trainer.loops.fit import FitLoop
from trainer.loops.hooks import Hook


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
        window = loop.window.mark()
        try:
            train(batch, batch_idx, is_last)
        except StopIteration:
            hooks.scope.enter(None)
            loop.window.go_back(window)
            loop.skips_epoch = True
            if loaders.num_batches() == float("inf"):
                loop.progress.is_last_batch = True  # without a validation, as in Lightning
            else:  # fewer batches than the length
                loop.progress.give_up_batch()
                loop.batches.give_up_batch()

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

    loop.train, loop.training_step, loop.transfer = train_batch, training_step, as_it_is
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

    loop.step, loop.transfer, loop.draws = draw, as_it_is, True
    loop.on_batch_end = Hook(announce_end.name, loop.hooks.scope, module=on_batch_end)
