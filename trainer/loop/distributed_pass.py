"""Evaluation with uneven inputs: some processes have more batches than others, or none.

Logged values are reduced after the last batch: see ``MetricStore.complete``. A collective inside a batch would hang if
another process has no such batch.

Numbers of batches are exchanged when dataloaders are created. Processes synchronize before each batch only if a forward
runs collectives and the lengths are unknown. Evaluation is not padded, because the best checkpoint depends on its
metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from torch import nn

from trainer.data.unpadded import Span
from trainer.errors import ConfigurationError, warn
from trainer.loop.engine_protocol import Engine
from trainer.metrics.metric_objects import MetricObjects
from trainer.metrics.metrics import MetricStore

_REMEDY = (
    " Communicate after the last batch instead: with self.log(..., sync_dist=True), a torchmetrics object, or in"
    " on_{stage}_epoch_end. Or have all processes evaluate equally many batches, as Lightning does, which counts some"
    " samples twice: Trainer(pad_evaluation=True)."
)


class DistributedPass:
    """One pass of evaluation on several processes.

    Args:
        engine: the processes.
        module: the LightningModule.
        metrics: the logged values.
        stage: the prefix of the step function.
        is_shared: whether the samples are divided among the processes. If so, the pass looks for collectives in batches
            that some processes lack.
        spans: the smallest and largest number of batches per process in this pass, by dataloader.
        whole: the same for a full pass; a sanity check is shorter.

    Attributes:
        all_have_batch: whether all processes are known to have the current batch.

    Raises:
        ConfigurationError: if inputs are uneven, and each forward pass needs all processes. Also if inputs are uneven,
            samples are divided, and a metric object synchronizes at each batch.
    """

    def __init__(
        self,
        engine: Engine,
        module: nn.Module,
        metrics: MetricStore,
        stage: str,
        is_shared: bool,
        spans: Sequence[Span],
        whole: Sequence[Span],
    ) -> None:
        self._engine, self._module, self._metrics, self._stage = engine, module, metrics, stage
        self._spans, self._whole, self._watches = spans, whole, is_shared
        objects = MetricObjects(module)
        self._done = 0  # batches of the current dataloader in this process
        self._updates = objects.counts()
        self._per_forward = 0
        self.all_have_batch = True
        uneven = [span for span in whole if span.fewest < span.most < float("inf")]
        if uneven and not engine.supports_uneven_evaluation:
            raise ConfigurationError(
                f"Got processes with {uneven[0].fewest:.0f} to {uneven[0].most:.0f} {stage} batches, expected the"
                " same number in each, because each forward pass exchanges weights at stage 3 of DeepSpeed's ZeRO."
                " Divide the data evenly."
            )
        if is_shared and uneven:
            for name, metric in objects.by_name.items():
                if metric.dist_sync_on_step:
                    raise self._error(f"The metric {name!r}, with dist_sync_on_step=True,", uneven[0])
        engine.idle_forward()
        if is_shared and uneven:
            before = engine.collectives.num_collectives()
            engine.idle_forward()
            self._per_forward = engine.collectives.num_collectives() - before

    def run(self, dataloader_idx: int, evaluate: Callable[[], None]) -> None:
        """Evaluate one batch. With uneven inputs, check some of the batches for collectives.

        These are the batches that other processes lack, the last one that all processes have, and the first one.

        Raises:
            ConfigurationError: if the batch is checked and runs a collective. Issues only a warning for the first batch
                if all processes have another one.
        """
        engine, span, index = self._engine, self._spans[dataloader_idx], self._done
        self._done += 1
        self.all_have_batch = index < span.fewest
        if engine.forward_runs_collectives and span.most == float("inf"):
            engine.collectives.any_rank(True)  # this process still has a batch
        if not self._watches:
            evaluate()
            return
        if self._metrics.shares_steps is not self.all_have_batch:
            self._metrics.share_steps(self.all_have_batch)
        whole = self._whole[dataloader_idx]
        if whole.fewest == whole.most or whole.most == float("inf"):
            evaluate()
            return
        before = engine.collectives.num_collectives()
        subject = f"The `{self._stage}_step`, or a hook of the batch,"
        with (
            nullcontext() if self.all_have_batch else engine.collectives.forbid_collectives(self._error(subject, whole))
        ):
            evaluate()
        is_last = index == span.fewest - 1 and span.fewest < span.most
        if (index == 0 or is_last) and engine.collectives.num_collectives() - before > self._per_forward:
            error = self._error(subject, whole)
            if is_last:
                raise error
            if engine.global_rank == 0:
                warn(str(error))

    def finish(self, dataloader_idx: int) -> None:
        """End a dataloader in this process, and take part in the forward passes of processes that have more batches."""
        engine, most, done = self._engine, self._spans[dataloader_idx].most, self._done
        self._done = 0
        if not engine.forward_runs_collectives:
            return
        if most == float("inf"):
            while engine.collectives.any_rank(False):
                engine.idle_forward()
        else:
            for _ in range(done, int(most)):
                engine.idle_forward()

    @property
    def is_uneven(self) -> bool:
        """Whether processes have, or may have, different numbers of batches (uneven inputs)."""
        return any(span.fewest < span.most for span in self._spans)

    def reduce_logged(self) -> None:
        """Reduce all values that any process has logged for the current dataloader, on all processes."""
        engine, metrics, objects = self._engine, self._metrics, MetricObjects(self._module)
        local_outlines = metrics.outline(objects.name_of), objects.outline(self._updates)
        outlines = engine.collectives.gather_if_different(local_outlines)
        objects.complete([outline for _, outline in outlines], engine.device)
        metrics.complete([outline for outline, _ in outlines], objects.by_name.__getitem__, engine.collectives.reduce)

    def _error(self, subject: str, span: Span) -> ConfigurationError:
        return ConfigurationError(
            f"{subject} runs a collective for each batch, but the processes have different numbers of batches"
            f" ({int(span.fewest)} to {int(span.most)}): some of them would wait"
            " forever." + _REMEDY.format(stage=self._stage)
        )
