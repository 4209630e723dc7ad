"""The state that the parts of a run share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from trainer.common.aliases import alias
from trainer.common.collectives import Collectives
from trainer.common.session import Session
from trainer.data.elastic_sampling import ElasticState
from trainer.loop.accumulation import AccumulationWindow
from trainer.loop.engine_protocol import Engine
from trainer.loop.evaluation import EvalLoop
from trainer.loop.fit import FitLoop
from trainer.loop.gradients import Gradients
from trainer.metrics.logging import no_log
from trainer.metrics.metrics import MetricStore, PublishedMetrics
from trainer.precision.base import Precision
from trainer.precision.scaler import LossScaler
from trainer.state.progress import FitProgress
from trainer.state.snapshot import Snapshot
from trainer.state.stopping import StoppingConditions

# local names, because in Python 3.11 reading a member of an enum is a function call
_TRAINING, _PREDICTING = RunningStage.TRAINING, RunningStage.PREDICTING


class RunData(Protocol):
    """The dataloaders of a run: ``trainer.lightning.loader_set.DataSource``."""

    datamodule: LightningDataModule | None
    resumed: dict[str, Any] | None
    resumed_validation: dict[str, Any] | None

    def loaders(self, stage: RunningStage, recreate: bool = False) -> Any: ...
    def ready(self, stage: RunningStage) -> Any: ...
    def source(self, stage: RunningStage) -> Any: ...
    def forget(self, stage: RunningStage) -> None: ...
    def drop_sample_order(self) -> None: ...
    def evaluation_state(self) -> dict[str, Any]: ...
    def load_evaluation_state(self, state: dict[str, Any]) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...


class Process(Protocol):
    """The state of this process in a checkpoint: ``trainer.checkpoint.process.ProcessState``."""

    def dump(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any], *, stops: bool) -> None: ...
    def convert_states(self, states: list[dict[str, Any]]) -> tuple[dict[str, Any], set[str]]: ...
    def restored_for_hooks(self, program: Snapshot, state: dict[str, Any]) -> AbstractContextManager[None]: ...


class _Shortcuts:
    """The attributes of the parts of a run that other parts read most, one level deep."""

    collectives: Collectives = alias("engine.collectives")
    module: LightningModule = alias("engine.module")
    device: torch.device = alias("engine.device")
    gradients: Gradients = alias("engine.gradients")
    scaler: LossScaler = alias("engine.gradients.scaler")
    optimizers: list[Optimizer] = alias("engine.optimizers")
    schedules: list[LRSchedulerConfig] = alias("engine.schedules")
    world_size: int = alias("engine.world_size")
    global_rank: int = alias("engine.global_rank")
    global_step: int = alias("progress.optimizer_steps")
    datamodule: LightningDataModule | None = alias("data.datamodule")
    loggers: list[Any] = alias("published.loggers", writable=True)
    fn: TrainerFn | None = alias("status.fn")
    stage: RunningStage | None = alias("status.stage", writable=True)
    epoch: int = alias("progress.epoch")
    precision: Precision = alias("engine.precision")
    is_sharded: bool = alias("engine.gradients.are_parts")
    part: Callable[[Tensor], Tensor] = alias("engine.gradients.part")
    limits: StoppingConditions = alias("loop.limits")
    window: AccumulationWindow = alias("loop.window")
    accumulate_grad_batches: int = alias("loop.window.batches", writable=True)
    is_automatic: bool = alias("engine.module.automatic_optimization")
    loss_scale: float = alias("engine.gradients.scaler.current_scale")
    skips_steps: bool = alias("engine.gradients.scaler.skips_steps")


@dataclass(eq=False)
class RunState(_Shortcuts):
    """The parts and options of the Trainer's current run, and of the runs after it. The Trainer's attributes read them.

    Attributes:
        trainer: the Trainer, as the methods of callbacks, strategies and loggers get it.
        engine: devices, processes, gradients and checkpoints.
        progress: the counters of the fit.
        published: the metrics for callbacks and loggers, and the loggers.
        loop: the fit loop.
        eval_loops: the loops of the other stages.
        callbacks: the callbacks, in their order.
        fast_dev_run: whether the run is a test of a few batches, without logs and checkpoints.
        profiler: the profiler.
        resume, exact_resume, pad_evaluation, dataloader_timeout, overfit_batches, reload_dataloaders_every_n_epochs:
            the arguments of the Trainer.
        status: Lightning's ``trainer.state``: the method of the Trainer that runs, and its stage.
        session: restores replaced methods and releases locks at the end of a run.
        log_metric: logs a value like the module's ``self.log``, with the same arguments, but bypasses overrides; for
            callbacks.
        destination: the path of the checkpoint that is being saved, or None.
        savers_after: while a ModelCheckpoint is called: returns copies of it and the following ones after this point.
        program: the user's objects since ``on_train_start``, which a resumed run calls, too.
        elastic_state: the state of a resumed run that had another number of processes. None if there is no such run.
        data: the dataloaders and the datamodule.
        process: the state of this process in a checkpoint.
    """

    trainer: pl.Trainer
    engine: Engine
    progress: FitProgress
    published: PublishedMetrics
    loop: FitLoop
    eval_loops: dict[RunningStage | None, EvalLoop]
    callbacks: list[Callback]
    fast_dev_run: int | bool
    profiler: Profiler
    resume: str | None
    exact_resume: bool
    pad_evaluation: bool
    dataloader_timeout: float
    overfit_batches: int | float
    reload_dataloaders_every_n_epochs: int
    status: TrainerState = field(default_factory=TrainerState)
    session: Session = field(default_factory=Session)
    log_metric: Callable[..., None] = field(default=no_log)
    destination: str | None = None
    savers_after: Callable[[], dict[Any, Any]] = dict
    program: Snapshot = field(default_factory=Snapshot)
    elastic_state: ElasticState | None = None
    data: RunData = field(init=False)
    process: Process = field(init=False)

    @property
    def is_global_zero(self) -> bool:
        """Whether this process has rank 0."""
        return self.engine.global_rank == 0

    @property
    def eval_loop(self) -> EvalLoop | None:
        """The loop of the running stage. None outside of a run, and while training."""
        return self.eval_loops.get(self.stage)

    @property
    def fits(self) -> bool:
        """Whether ``Trainer.fit`` runs, or ran last."""
        return self.status.fn is TrainerFn.FITTING

    def first_batch_size(self, index: int) -> int | None:
        """Return the ``batch_size`` of a dataloader, during the first batch of a pass. None later, or if unknown."""
        loaders: Any
        if (evaluation := self.eval_loop) is None:
            loaders, number = self.loop.batches.loaders, self.progress.batches_this_epoch
        else:
            loaders, number = evaluation.loaders, evaluation.progress.batches_by_loader[index]
        size: int | None = loaders.full_batch_size(index) if loaders is not None and number == 1 else None
        return size

    @property
    def active_metrics(self) -> MetricStore | None:
        """The store that ``self.log`` currently writes to. None if nothing may be logged."""
        stage = self.status.stage
        if stage is _TRAINING:
            return self.loop.metrics
        if stage is None or stage is _PREDICTING:
            return None
        # not `eval_loops[stage]`: a RunningStage computes its hash in Python
        for evaluated, loop in self.eval_loops.items():
            if evaluated is stage:
                return loop.metrics
        return None


def state_of(trainer: pl.Trainer) -> RunState:
    """Return the state of the Trainer's run."""
    state: RunState = trainer.run_state  # type: ignore[attr-defined]
    return state
