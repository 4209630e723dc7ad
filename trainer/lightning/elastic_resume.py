"""Elastic resume: continue a run on another number of processes, by translating its checkpoint.

Each weight update gets the samples that it would have got without the interruption
(``trainer.data.elastic_sampling``): the number of batches in an update is chosen so that processes x batch size x
accumulation is unchanged. Counters and ``val_check_interval`` are converted, the latter only if the user has not
changed it.

The batch size is not converted: it belongs to the user's dataloader, determines the memory, and may be part of a
sampler. A process without a sample in a shorter last step repeats one with weight 0, because a step with
``sync_dist=True`` waits for all processes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_info

from trainer.callbacks.gradient_accumulation import GradientAccumulation, accumulation_schedule, find_callback
from trainer.data.elastic_sampling import ElasticSampler, ElasticState, SampleOrder
from trainer.errors import ResumeError
from trainer.lightning.loaders import DrawnLoaderSet, LoaderSet
from trainer.loop.run_state import RunState
from trainer.state.progress import FitProgress

_KEY = "order"
_LIMITED = "limit_train_batches {}, expected 1.0"


def order_to_save(run: RunState) -> dict[str, Any] | None:
    """Return the settings that a run on another number of processes requires; None without training dataloaders."""
    trainer, data = run.trainer, run.data
    loaders = data.ready(RunningStage.TRAINING)
    if loaders is None:
        return None
    given = _given_settings(run)
    order = _order_of(trainer, run.elastic_state, loaders, given)
    is_resized, world_size = run.elastic_state is not None, run.world_size
    saved = {"given": given, "carried": is_resized, "world_size": world_size}
    if isinstance(order, str):
        return {**saved, "problem": order}
    batch_size = loaders.loaders[0].loader.batch_size
    return saved | {
        "samples": asdict(order),
        "processes": _replicas(trainer),
        "batch_size": batch_size,
        "interval": _interval(trainer.val_check_interval, run.elastic_state, _replicas(trainer) * batch_size),
    }


def is_elastic(run: RunState, trainer_state: dict[str, Any]) -> bool:
    """Return whether a checkpoint is from another number of processes, or from a run that resumed such a checkpoint.

    Args:
        run: the state of the run that resumes from it.
        trainer_state: the entries of this package in the checkpoint.
    """
    elastic = bool(trainer_state.get(_KEY, {}).get("carried"))
    return elastic or written_by(trainer_state) not in (0, run.world_size)


def written_by(trainer_state: dict[str, Any]) -> int:
    """Return the number of processes of the run that wrote a checkpoint; 0 if it is unknown."""
    return len(trainer_state.get("processes", ())) or int(trainer_state.get(_KEY, {}).get("world_size", 0))


def prepare(run: RunState, trainer_state: dict[str, Any]) -> bool:
    """Create dataloaders that give each update the samples that it would have got, and set the accumulation to match.

    Called before ``configure_optimizers``, because a module may read the number of updates there.

    Args:
        run: the state of the run that resumes a run on another number of processes.
        trainer_state: our entries in the checkpoint.

    Returns:
        True. The caller uses None instead if this function raises and ``exact_resume`` is False.

    Raises:
        ResumeError: if the updates cannot get the same samples.
    """
    saved = trainer_state.get(_KEY, {"problem": "the version that wrote it did not record the sample order"})
    if "problem" in saved:
        raise ResumeError(saved["problem"])
    if (limit := run.trainer.limit_train_batches) != 1.0:
        raise ResumeError(_LIMITED.format(f"is {limit}"))
    order = SampleOrder(**saved["samples"])
    data = run.data
    elastic = run.elastic_state = ElasticState(order, _given_settings(run))
    data.resumed = {}  # `loaders` begins no training pass
    loaders = data.loaders(RunningStage.TRAINING, recreate=True)
    assert loaders is not None
    if isinstance(loaders, DrawnLoaderSet):
        raise ResumeError("the training_step draws its own batches")
    change = _BatchConversion(saved, order, loaders)
    needed = _accumulation(run, change, saved["given"])
    elastic.interval = change.validation(run)
    _accumulate(run, needed)
    return True


def resume(run: RunState, trainer_state: dict[str, Any], states: list[Any]) -> dict[str, Any]:
    """Translate the counters and schedules of the saved run to this run, after :func:`prepare`.

    Args:
        run: the state of the run, with the counters of the checkpoint.
        trainer_state: our entries in the checkpoint.
        states: the states of the processes in the checkpoint. If this run has the same number of processes, only the
            state of this process is needed, and the others may be None.

    Returns:
        The state of this process, for ``ProcessState.load``.

    Raises:
        ResumeError: if the checkpoint is from the middle of an update, a schedule counts batches of another size, or
            the batches of this run cannot have the samples of the saved run.
    """
    window = run.window
    elastic, loaders = run.elastic_state, run.data.loaders(RunningStage.TRAINING)
    assert elastic is not None
    assert loaders is not None
    saved = trainer_state[_KEY]
    change = _BatchConversion(saved, elastic.order, loaders)
    for config in run.schedules:
        if config.interval == "batch" and change.saved_samples != change.samples:
            name = type(config.scheduler).__name__
            raise ResumeError(f"the schedule {name} counts batches: use interval 'step' with frequency 1")
    if len(states) == run.world_size:
        if change.saved_samples != change.samples:
            raise ResumeError(
                f"a batch of all processes had {change.saved_samples} samples, and in this run it has {change.samples}"
            )
        process: dict[str, Any] = states[run.global_rank]
        return process
    if run.engine.data_parallel_size != run.world_size:
        raise ResumeError("some processes of this run share their samples with others (tensor parallelism)")
    done = _position(states[0], run.progress, change)
    change.translate(run.progress, done)
    state: dict[str, Any]
    states = states[:: len(states) // saved["processes"]]  # one state for each group of processes with the same samples
    state, lost = run.process.convert_states(states)
    if state["data"]:
        state["data"] = loaders.convert_state(states[0]["data"], done, state["rng"])
    state["window"] = {**state["window"], "batches": change.accumulated, "given": window.batches}
    rank_zero_info(_summary(run, change, lost))
    return state


class _BatchConversion:
    """Converts batches of the run that wrote a checkpoint to batches of this run.

    Args:
        saved: the result of :func:`order_to_save` in the run that wrote the checkpoint.
        order: the order of the samples.
        loaders: the dataloaders that read them in this order now.

    Attributes:
        saved_samples, samples: the number of samples in a batch over all processes, in the saved run and in this run.
        saved_batches, batches: the number of batches in an epoch, in the saved run and in this run.
    """

    def __init__(self, saved: dict[str, Any], order: SampleOrder, loaders: LoaderSet) -> None:
        sampler: ElasticSampler = loaders.combined.flattened[0].sampler
        self.saved, self.order, self.sampler = saved, order, sampler
        self.saved_samples = int(saved["processes"] * saved["batch_size"])
        self.samples = sampler.num_replicas * sampler.batch_size
        self.saved_batches, self.batches = math.ceil(sampler.total / self.saved_samples), int(loaders.num_batches())

    @property
    def accumulated(self) -> int:
        """The number of batches in an update."""
        return self.order.update_size // self.samples

    def validation(self, run: RunState) -> tuple[int, bool] | None:
        """Return the number of batches between two validations, and whether each epoch ends with one.

        Returns:
            None if ``val_check_interval`` applies unchanged: it counts no batches, or the user has changed it.

        Raises:
            ResumeError: if it cannot be converted.
        """
        samples, size = self.saved["interval"], self.samples
        is_given = _given_settings(run)["val_check_interval"] == self.saved["given"]["val_check_interval"]
        if samples is None or not is_given or not run.trainer.enable_validation:
            return None
        only_counts_batches = run.limits.check_val_every_n_epoch is None
        if samples % size or (only_counts_batches and size != self.saved_samples):
            raise ResumeError(
                f"there were {samples} samples between two validations, and in this run a batch over all processes has"
                f" {size}: set another val_check_interval, a multiple, and not check_val_every_n_epoch=None"
            )
        if only_counts_batches:
            return samples // size, False
        order = self.order
        epoch = order.batches(self.sampler.samples) * order.processes * order.batch_size
        return min(samples // size, self.batches), epoch % samples == 0

    def translate(self, progress: FitProgress, done: int) -> None:
        """Convert the counters of batches to this run.

        ``done`` is the number of batches trained in the current epoch.
        """
        start = self._since_start(progress.epoch_start.batches)
        progress.batches = start + done if progress.batches_this_epoch else self._since_start(progress.batches)
        progress.batches_started, progress.batch_idx = progress.batches, done - 1
        progress.epoch_start = replace(progress.epoch_start, batches=start, batches_started=start)

    def _since_start(self, batches: int) -> int:
        epochs, rest = divmod(batches, self.saved_batches)
        return epochs * self.batches + rest * self.saved_samples // self.samples


def _given_settings(run: RunState) -> dict[str, Any]:
    """Return the settings that are counted in batches, as the user gave them, as plain data."""
    if (elastic := run.elastic_state) is not None:
        return elastic.given
    interval = run.trainer.val_check_interval
    return {
        "accumulate_grad_batches": _constant_accumulation(run),
        "val_check_interval": int(interval) if isinstance(interval, int) else None,  # a checkpoint holds plain numbers
    }


def _interval(interval: float | None, elastic: ElasticState | None, size: int) -> int | None:
    """Return the number of samples between two validations, with ``size`` in a batch; None if they count no batches."""
    if elastic is not None and elastic.interval is not None:
        interval = elastic.interval[0]
    return int(interval) * size if isinstance(interval, int) else None


def _replicas(trainer: pl.Trainer) -> int:
    return int((trainer.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"])


def _order_of(
    trainer: pl.Trainer, elastic: ElasticState | None, loaders: LoaderSet, given: dict[str, Any]
) -> SampleOrder | str:
    """Return the order of a run's samples, or the reason why no other number of processes gives the same updates."""
    if elastic is not None:
        return elastic.order
    if isinstance(loaders, DrawnLoaderSet):
        return "the training_step drew its own batches"
    if len(loaders.combined.flattened) != 1:
        return f"there were {len(loaders.combined.flattened)} training dataloaders, expected one"
    (loader,), accumulate = loaders.combined.flattened, given["accumulate_grad_batches"]
    if not accumulate:
        return "the accumulation changed with the epochs, expected Trainer(accumulate_grad_batches=...)"
    if (limit := trainer.limit_train_batches) != 1.0:
        return _LIMITED.format(f"was {limit}")
    return SampleOrder.of(loader, accumulate, _replicas(trainer))


def _constant_accumulation(run: RunState) -> int:
    """Return ``accumulate_grad_batches``; 0 if it changes with the epochs."""
    schedule = accumulation_schedule(run)
    is_lightnings = find_callback(run.callbacks, GradientAccumulationScheduler) is not None
    return 0 if is_lightnings or len(schedule) > 1 else schedule.get(0, 1)


def _accumulation(run: RunState, change: _BatchConversion, before: dict[str, Any]) -> int:
    """Return the ``accumulate_grad_batches`` that gives each update the samples of the saved run.

    Raises:
        ResumeError: if this is not possible, or the user has set another value.
    """
    order, sampler, size = change.order, change.sampler, change.order.update_size
    if size % change.samples:
        raise ResumeError(
            f"an update had {size} samples ({order.processes} x {order.batch_size} x {order.accumulate}: processes x"
            f" batch size x accumulate_grad_batches), which is no multiple of {sampler.num_replicas} x"
            f" {sampler.batch_size} = {change.samples}; {_batch_size_advice(size, sampler.num_replicas)}"
        )
    needed, given = change.accumulated, _given_settings(run)["accumulate_grad_batches"]
    if given not in (needed, before["accumulate_grad_batches"], order.accumulate):
        raise ResumeError(
            f"got accumulate_grad_batches={given or 'a schedule'}, expected {needed}, because an update has {size}"
            f" samples, and a batch has {change.samples} ({sampler.num_replicas} x {sampler.batch_size}: processes x"
            " batch size); set the expected value, or that of the saved run"
        )
    if not run.is_automatic and needed != 1:
        raise ResumeError(
            "with manual optimization, an optimizer step is assumed for each batch, so that a batch of all processes"
            f" must have {change.saved_samples} samples, and in this run it has {change.samples}"
        )
    if run.window.straddles_epochs and change.saved_samples != change.samples:
        raise ResumeError("straddles_epochs=True counts the short last batch of an epoch like a full one")
    return needed


def _batch_size_advice(size: int, processes: int) -> str:
    """Return the advice on the batch size."""
    if size % processes:
        return f"{size} samples cannot be divided evenly among {processes} processes"
    sizes = [batch_size for batch_size in range(1, size // processes + 1) if size // processes % batch_size == 0]
    return f"set a batch size of {', '.join(map(str, sizes[-4:]))}"


def _accumulate(run: RunState, needed: int) -> None:
    """Set the accumulation of this run to ``needed``, until the end of the run."""
    window, session = run.window, run.session
    accumulation = find_callback(run.callbacks, GradientAccumulation)
    if accumulation is not None:
        session.callback(setattr, accumulation, "schedule", accumulation.schedule)
        accumulation.schedule = {0: needed}
    session.callback(setattr, window, "batches", window.batches)
    run.engine.check_accumulation(needed)
    window.batches = needed


def _position(state: dict[str, Any], progress: FitProgress, change: _BatchConversion) -> int:
    """Return the number of this run's batches that contain the samples trained in the current epoch.

    Raises:
        ResumeError: if the checkpoint is from the middle of an update.
    """
    done, data = progress.batches_this_epoch, state["data"]
    if "size" in state["window"] or state["gradients"]:
        raise ResumeError(
            "the checkpoint is from the middle of an accumulation window, after batch"
            f" {done} of epoch {progress.epochs_trained}; take one from the end of a window"
        )
    is_its_epoch = bool(data) and data["epoch"] == progress.epochs_trained
    if not done or (is_its_epoch and data["is_over"]):
        return change.batches if done else 0
    size = change.order.update_size
    if done * change.saved_samples % size or not is_its_epoch or data["batches"] != done:
        raise ResumeError(
            f"the checkpoint is from the middle of an update: after {done} batches of {change.saved_samples} samples,"
            f" but an update has {size} samples"
        )
    return done * change.saved_samples // change.samples


def _summary(run: RunState, change: _BatchConversion, lost: set[str]) -> str:
    """Return a message about the parts of the resume that are exact and those that are not."""
    order, sampler, saved, size = change.order, change.sampler, change.saved, change.order.update_size
    text = (
        f"Resuming with {sampler.num_replicas} x {sampler.batch_size} x {change.accumulated} after"
        f" {saved['processes']} x {saved['batch_size']} x {size // change.saved_samples} (processes x batch size x"
        f" accumulate_grad_batches): each update gets the {size} samples that it would have got. The following"
        " differ: random numbers (dropout, augmentation)"
    )
    if order.sampler == "RandomSampler":
        text += ", the order of the samples in later epochs if training draws from torch's CPU generator"
    text += ", statistics of a batch (BatchNorm), losses that compare the samples of a batch"
    if sampler.last_update:
        text += ", the weights of the samples in an epoch's last, short update, if its batches had different sizes"
    if lost:
        text += f", the metrics {', '.join(sorted(lost))} (a part of them is lost)"
    return f"{text}, the order of sums."
