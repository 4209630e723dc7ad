"""Steps that draw their own batches, such as ``training_step(self, dataloader_iter)``, in training and evaluation.

The functions here wrap any path of a batch, and replace the source of the batch.

A step that draws its own batches runs in the ordinary loop, over an iterator that yields one placeholder per step.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

from trainer.data.batches import EndOfPass, identity
from trainer.errors import ConfigurationError
from trainer.loop.batch_path import BatchPath, TrainingPath
from trainer.loop.fit import FitLoop
from trainer.loop.hooks import HookScope


def draw_in_fit(loop: FitLoop, ends_epoch: bool, path: TrainingPath) -> TrainingPath:
    """Return a path with a ``training_step`` that draws its own batches. The loop counts steps, not batches.

    Args:
        loop: the loop that runs the path, with the dataloaders to draw from.
        ends_epoch: whether a StopIteration that leaves the step ends the epoch, as in automatic optimization. If False,
            it ends the step only, as in manual optimization.
        path: the path of a batch.
    """

    def loaders() -> Any:
        return loop.batches.loaders  # may be created again before an epoch

    def train_batch(batch: Any, batch_idx: int, is_last: bool) -> None:
        mark = copy(loop.mean)
        try:
            path.train_batch(batch, batch_idx, is_last)
        except StopIteration:
            loop.hooks.scope.enter(None)
            loop.mean.rewind(mark)
            loop.progress.skips_epoch = True
            loop.progress.discard_batch()
            loop.batches.discard_batch()

    def step(batch: Any, batch_idx: int) -> Any:
        output = None
        try:
            output = path.step(loaders().iterator(), batch_idx)
        except StopIteration as end:
            if ends_epoch and not loop.progress.batches:
                raise ConfigurationError(
                    f"The first training_step drew all {loaders().fetcher.fetched} batches of the epoch, and needs"
                    " more: no step could be trained. Expected at least as many batches as one step draws: raise"
                    " limit_train_batches, or draw fewer."
                ) from end
            if ends_epoch:
                raise
        loop.progress.is_last_batch = loaders().is_done
        return output

    def on_batch_start(batch: Any, batch_idx: int) -> Any:
        return path.on_batch_start(*loaders().last[:2])  # the batch that the previous step drew

    def on_batch_end(outputs: Any, batch: Any, batch_idx: int) -> None:
        path.on_batch_end(outputs, *loaders().last[:2])

    return replace(
        path, transfer=identity, on_batch_start=on_batch_start, step=step, on_batch_end=on_batch_end, draws=True,
        train_batch=train_batch,
    )  # fmt: skip


def draw_in_evaluation(scope: HookScope, loaders: Any, path: BatchPath) -> BatchPath:
    """Return a path with a ``validation_step`` (and so on) that draws its own batches.

    A StopIteration that leaves the step ends the pass.

    Args:
        scope: the scope of hooks.
        loaders: the dataloaders to draw from: a ``trainer.lightning.loaders.DrawnLoaderSet``.
        path: the path of a batch.
    """

    def step(batch: Any, batch_idx: int, *_: int) -> Any:
        try:
            return path.step(loaders.iterator(), batch_idx)
        except StopIteration as end:
            scope.enter(None)
            raise EndOfPass from end

    def on_batch_end(output: Any, batch: Any, *indices: int) -> None:
        batch, *drawn_indices = loaders.last
        path.on_batch_end(output, batch, *drawn_indices[: len(indices)])

    return replace(path, transfer=identity, step=step, on_batch_end=on_batch_end, draws=True)
