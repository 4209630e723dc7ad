"""Validate, test, predict, and the sanity check: forward passes under autocast, without gradients or a scaler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.batches import EndOfPass, Loaders
from trainer.data.unpadded import Span
from trainer.errors import warn
from trainer.loop.batch_path import NO_PATH, BatchPath
from trainer.loop.distributed_pass import DistributedPass
from trainer.loop.engine_protocol import Engine
from trainer.loop.hooks import NO_HOOKS, Hooks
from trainer.metrics.metric_objects import metric_objects_in, update_counts, updates_of
from trainer.metrics.metrics import MetricStore, PublishedMetrics
from trainer.state.progress import EvalProgress, FitProgress

Metrics = dict[str, Tensor]


class EvalLoop:
    """One pass over the validation, test or prediction data.

    Args:
        stage: ``"validation"``, ``"test"`` or ``"predict"``: the prefix of its hooks and of its step function.
        engine: devices and processes.
        published: the metrics that callbacks, progress bars and loggers read.
        fit_progress: the counters of training, which determine the step of logged metrics.
        counts_once: whether logged values are reduced over all samples of all processes, each counted once. If False,
            they are reduced as in Lightning, which pads all processes to equal numbers of samples. Default: True.

    Attributes:
        verbose: whether the Trainer prints the logged values. Default: True.
        keep_predictions: whether to collect the outputs of ``predict_step``. Default: False.
        predictions: these outputs, a list for each dataloader.
        check_signals: called before each batch to handle a signal that has arrived; may raise. Default: None.
        paths: the functions that a batch of each dataloader passes through.
    """

    def __init__(
        self,
        stage: str,
        *,
        engine: Engine,
        published: PublishedMetrics,
        fit_progress: FitProgress,
        counts_once: bool = True,
    ) -> None:
        self.stage = stage
        self.step_name = f"{stage}_step"
        self.engine = engine
        self.published = published
        self.fit_progress = fit_progress
        self.progress = EvalProgress()
        self.metrics = MetricStore(training=False)
        self.sanity_checking = False
        self.verbose = True
        self.keep_predictions = False
        self.has_warned = False
        self.predictions: list[list[Any]] = []
        self.check_signals: Callable[[], None] | None = None
        self.counts_once = counts_once
        self.distributed_pass: DistributedPass | None = None
        self.loaders: Loaders | None = None
        self.prepare(hooks=NO_HOOKS, module=nn.Module(), paths=(NO_PATH,), loaders=None, inference_mode=False)

    def prepare(
        self,
        *,
        hooks: Hooks,
        module: nn.Module,
        paths: Sequence[BatchPath],
        loaders: Loaders | None,
        inference_mode: bool,
    ) -> None:
        """Set the parts that belong to one run.

        Args:
            hooks: the hooks of callbacks and of the module.
            module: the LightningModule; each pass restores the train and eval modes of its submodules.
            paths: the functions that a batch passes through, for each dataloader.
            loaders: the data. None if there is no data.
            inference_mode: whether to run in ``torch.inference_mode``, with tensors that can never take part in
                training, instead of ``torch.no_grad``.
        """
        self.hooks = hooks
        self.module = module
        self.metric_objects = metric_objects_in(module)
        self.paths = paths
        if loaders is not None and self.loaders is not None and len(loaders.limits) != len(self.loaders.limits):
            self.published.drop(self.metrics.names())  # values of other dataloaders would never be replaced
            self.metrics.clear()
        self.loaders = loaders
        self.inference_mode = inference_mode
        self.progress.seen_batches.clear()
        self.updates_before: dict[int, int] = {}  # update counts of metric objects before the current dataloader

    def use(self, paths: Sequence[BatchPath]) -> None:
        """Replace the paths of batches, because the hooks have changed."""
        self.paths = paths

    def run(self, limit: float = float("inf")) -> list[Metrics]:
        """Run one pass. Return the logged metrics, one dict for each dataloader; [] if no dataloader has a batch.

        As in Lightning, a dataloader without a batch has no dict, unless it is the first.

        Args:
            limit: the largest number of batches of each dataloader, for the sanity check. Default: no limit.
        """
        loaders = self.loaders
        if loaders is None or not any(span.most for span in self.spans(loaders, limit)):
            return []
        self.progress.begin_pass()
        self.predictions = [[] for _ in loaders.limits]
        without_gradients = torch.inference_mode if self.inference_mode else torch.no_grad
        with without_gradients(), self.engine.collectives.equal_shapes(self.module):
            batches = self.begin(loaders, limit)  # before the hooks, because it draws random numbers, as in Lightning
            with self.eval_mode():
                self.hooks.of(f"on_{self.stage}_start")()
                self.hooks.of(f"on_{self.stage}_epoch_start")()
                if self.loaders is not None and self.loaders is not loaders:  # BatchSizeFinder replaces them in a hook
                    loaders = self.loaders
                    batches = self.begin(loaders, limit)
                self.updates_before = updates_before = update_counts(self.metric_objects)
                logged = self.evaluate(batches, loaders, limit)
                self.hooks.of(f"on_{self.stage}_epoch_end")()
                self.metrics.refuse_shared_metrics(updates_before)
                if self.is_shared:
                    self.metrics.current()  # first, because a hook of one process may have begun these reductions
                    self.metrics.take_first(self.engine.collectives.broadcast)
                at_the_end = self.publish()
                for metrics in logged:
                    metrics.update(at_the_end)
                if not self.sanity_checking:
                    self.published.send(
                        {k: v for metrics in reversed(logged) for k, v in metrics.items()}, self.fit_progress.updates
                    )
                self.fit_progress.end_validation()
                self.hooks.of(f"on_{self.stage}_end")()
        self.metrics.reset()
        self.updates_before = {}
        if self.sanity_checking:
            self.progress.forget_pass()
        return logged

    def begin(self, loaders: Loaders, limit: float) -> Iterator[tuple[Any, int, int]]:
        """Begin a pass over the data."""
        loaders.start_epoch(self.fit_progress.epochs_trained, shift=self.fit_progress.batches)
        return loaders.batches(limit)

    def spans(self, loaders: Loaders, limit: float) -> list[Span]:
        """Return the smallest and largest number of batches per process for each dataloader.

        A single span if the dataloaders are combined.
        """
        limits = loaders.limits if loaders.is_sequential else [loaders.num_batches()]
        spans = loaders.plan.spans or [Span(number, number) for number in limits]
        if self.paths[0].draws:
            spans = [Span(0, float("inf") if span.most else 0) for span in spans]
        return [Span(min(span.fewest, limit), min(span.most, limit)) for span in spans]

    @property
    def is_shared(self) -> bool:
        """Whether the samples are divided among several processes, so that metrics are reduced over the processes."""
        return self.counts_once and self.stage != "predict" and self.engine.world_size > 1

    @property
    def all_have_batch(self) -> bool:
        """Whether all processes are known to have the current batch."""
        return self.distributed_pass is None or self.distributed_pass.all_have_batch

    def evaluate(self, batches: Iterator[tuple[Any, int, int]], loaders: Loaders, limit: float) -> list[Metrics]:
        """Evaluate all batches. Return the logged metrics as :meth:`run` does."""
        several = loaders.is_sequential and len(loaders.limits) > 1
        spans, logged, current = self.spans(loaders, limit), [], 0
        if self.engine.world_size > 1:
            hooks = {self.step_name, f"on_{self.stage}_batch_start", f"on_{self.stage}_batch_end"}
            self.metrics.shared_hooks = hooks if self.is_shared else ()
            self.metrics.share_steps(True)
            self.distributed_pass = DistributedPass(
                self.engine, self.module, self.metrics, self.stage, self.is_shared, spans,
                self.spans(loaders, float("inf")),
            )  # fmt: skip

        def close_until(dataloader_idx: int) -> None:
            """Close the dataloaders before ``dataloader_idx``, even empty ones that have batches in other processes."""
            nonlocal current
            for idx in range(current, dataloader_idx):
                if idx == current or (self.distributed_pass is not None and spans[idx].most):
                    logged.append(self.close_dataloader(idx, several))
            current = dataloader_idx

        with suppress(EndOfPass):
            for batch, batch_idx, dataloader_idx in batches:
                if dataloader_idx != current:
                    close_until(dataloader_idx)
                passed_idx = dataloader_idx if several else None
                if self.distributed_pass is None:
                    self.evaluate_batch(batch, batch_idx, passed_idx)
                else:
                    self.distributed_pass.run(
                        dataloader_idx, partial(self.evaluate_batch, batch, batch_idx, passed_idx)
                    )
        self.progress.is_last_batch = True
        close_until(current + 1 if self.distributed_pass is None else len(spans))
        self.metrics.dataloader_idx, self.distributed_pass = None, None
        return logged

    def evaluate_batch(self, batch: Any, batch_idx: int, dataloader_idx: int | None) -> None:
        """Run one forward pass and its hooks. ``dataloader_idx`` is None if there is only one dataloader."""
        if self.check_signals is not None:
            self.check_signals()
        progress, path = self.progress, self.paths[dataloader_idx or 0]
        batch = path.transfer(batch)
        progress.batches += 1
        progress.batches_by_loader[dataloader_idx or 0] += 1
        progress.total_batches += 1
        self.metrics.begin_batch(batch, dataloader_idx)
        path.on_batch_start(batch, batch_idx)
        outer = self.hooks.scope.enter(self.step_name)
        with path.forward_context():
            output = path.step(batch, batch_idx)
        self.hooks.scope.enter(outer)
        if batch_idx == 0:
            self.note_resets()
        if output is None and self.stage == "predict" and not self.has_warned:
            self.has_warned = True
            if self.engine.global_rank == 0:
                warn("predict returned None. If this was on purpose, ignore this warning.")
        if self.keep_predictions:
            self.predictions[dataloader_idx or 0].append(output)
        path.on_batch_end(output, batch, batch_idx)
        self.metrics.end_batch()
        progress.batches_done += 1
        progress.total_done += 1
        if not self.sanity_checking:
            progress.has_run = True
            seen = progress.seen_batches
            if self.published.loggers:
                self.published.send(self.metrics.current().logger, seen[dataloader_idx or 0], exact_step=True)
            seen[dataloader_idx or 0] += 1

    def note_resets(self) -> None:
        """Discard the earlier updates of metric objects that the first batch of a dataloader has reset."""
        for metric in self.metric_objects:
            if updates_of(metric) <= self.updates_before.get(id(metric), 0):
                self.updates_before[id(metric)] = 0

    def close_dataloader(self, dataloader_idx: int, several: bool) -> Metrics:
        """Close a dataloader after its last batch, or if it had none: publish its metrics of the epoch."""
        self.metrics.dataloader_idx = dataloader_idx if several else None
        self.published.take(self.metrics.current(on_step=True))  # before the metrics of the epoch replace them
        self.metrics.end_epoch()
        self.metrics.refuse_shared_metrics(self.updates_before)
        self.updates_before = update_counts(self.metric_objects)
        if self.distributed_pass is not None:
            self.distributed_pass.finish(dataloader_idx)
            if self.is_shared:
                self.distributed_pass.reduce_logged()
        return self.publish()

    def publish(self) -> Metrics:
        """Publish the metrics of the epoch to callbacks and progress bars. Return those for the loggers."""
        metrics = self.metrics.current()
        self.published.take(metrics)
        return dict(metrics.logger)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Put the module into eval mode, and restore the mode of each submodule afterwards."""
        modes = {submodule: submodule.training for submodule in self.module.modules()}
        self.hooks.of_module(f"on_{self.stage}_model_eval")()
        try:
            yield
        except BaseException:  # the caller may catch the error and train the module
            _restore_modes(modes)
            raise
        restore_modes = self.hooks.override_of(f"on_{self.stage}_model_train")
        if restore_modes is not None:
            restore_modes()
        else:
            _restore_modes(modes)


def _restore_modes(modes: dict[nn.Module, bool]) -> None:
    for submodule, training in modes.items():
        submodule.training = training
