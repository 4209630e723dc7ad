"""Read a checkpoint, and restore the module, the callbacks, the counters, the optimizers and the schedules from it.

``trainer.lightning.contents`` has the table of all entries of a checkpoint.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint.compact import unpacked
from trainer.checkpoint.manifest import TRAINER_KEY as TRAINER_KEY
from trainer.checkpoint.optimizer_states import keep_dtypes, keep_sharing, unsaved_inner
from trainer.common import redaction
from trainer.common.module_tree import parameters_of, plain_name
from trainer.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    ResumeError,
    UnsafeCheckpointError,
    join_first,
    refuse_inexact,
    warn,
)
from trainer.loop.run_state import RunState
from trainer.loop.schedule_free import schedule_free
from trainer.metrics.metric_objects import MetricObjects, reset
from trainer.state.progress import EPOCH_ENDED, FitProgress
from trainer.state.snapshot import selected

FORMAT = 5
"""Version of the entries under ``amp_trainer``. A checkpoint with another one cannot be resumed."""

_INNER = "inner_optimizers"
"""Key of the states of optimizers inside of one, in its state dict. ``load_state_dict`` ignores it."""


_EXPECTED = "Expected a file that ModelCheckpoint or Trainer.save_checkpoint has written, such as last.ckpt."
_FIRST_BYTES = (b"PK", b"\x80\x02")
"""Of a zip archive, which may be cut short, and of torch's format before version 1.6."""


def _may_be_of_torch(path: str | Path) -> bool:
    """Return whether ``torch.save`` may have written a file; True for a URL."""
    with suppress(OSError):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return any(name.endswith("/data.pkl") for name in archive.namelist())
        with open(path, "rb") as file:
            return file.read(2) in _FIRST_BYTES
    return True


def read(load: Callable[[Any, bool], Any], path: str | Path, weights_only: bool | None) -> dict[str, Any]:
    """Read a checkpoint.

    Args:
        load: an engine's function that reads a checkpoint, called with the path and whether to load only tensors and
            plain containers.
        path: path or URL of the file, or path of the folder.
        weights_only: if None or True, load only tensors and plain containers; objects among the hyperparameters become
            :class:`~trainer.checkpoint.inert.StandIn`. If False, the file may run any code: only for your own files.

    Raises:
        CheckpointNotFoundError: if the file does not exist.
        UnsafeCheckpointError: if it contains other objects than tensors and plain containers, outside of the
            hyperparameters.
        CheckpointError: if it is damaged, or is not a checkpoint.
    """
    shown = redaction.text(str(path))
    if weights_only is False:
        warn(
            f"Loading {shown} with weights_only=False: the file can run any code. Only do this with files that you"
            " created yourself.",
        )
    try:
        checkpoint = load(path, weights_only is not False)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            f"Checkpoint file not found: {shown}. Expected the path or URL of a file that exists."
        ) from error
    except IsADirectoryError as error:
        raise CheckpointError(f"{shown} is a folder. Expected the path or URL of a checkpoint file.") from error
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file can raise any exception in its reader
        is_of_other_reader = str(path).endswith(".safetensors") and not isinstance(error, UnpicklingError)
        if not (is_of_other_reader or _may_be_of_torch(path)):
            raise CheckpointError(
                f"{shown} is not a checkpoint: torch.save did not write this file. {_EXPECTED}"
            ) from error
        if not isinstance(error, UnpicklingError):
            detail = f"{type(error).__name__}: {redaction.text(str(error))}"
            raise CheckpointError(f"{shown} cannot be read as a checkpoint; it may be cut short: {detail}") from error
        match = re.search(r"GLOBAL (\S+) (?:was not an allowed global|whose module)", str(error))
        detail = f"it refers to {match[1]}" if match else str(error).splitlines()[0].rstrip(".")
        raise UnsafeCheckpointError(
            f"{shown} contains more than tensors and plain containers, or is damaged: {detail}. If you created the file"
            " yourself, pass its classes to torch.serialization.add_safe_globals, or pass weights_only=False, which"
            " allows it to run any code."
        ) from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        keys = join_first(checkpoint, 5) if isinstance(checkpoint, dict) else ""
        found_text = f"a dict with the keys {keys}" if keys else f"an object of type {type(checkpoint).__name__}"
        raise CheckpointError(
            f"{shown} is not a checkpoint: it has no 'state_dict', but contains {found_text}. {_EXPECTED} To start a"
            " new run with weights of another program, pass the file as fit(weights=...)."
        )
    return checkpoint


def restore_callbacks(run: RunState, checkpoint: dict[str, Any], callbacks: Iterable[Any] | None = None) -> None:
    """Restore the states of ``callbacks``, which must be among the run's callbacks. Default: all of them."""
    callbacks = list(run.callbacks if callbacks is None else callbacks)
    states = checkpoint.get("callbacks")
    if states is None:
        return
    # the key of a state is the class in files from before Lightning 1.5
    missing = states.keys() - {key for callback in run.callbacks for key in (callback.state_key, type(callback))}
    if missing:
        warn(
            "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be provided during"
            f" `Trainer` instantiation. Please add the following callbacks: {sorted(map(str, missing))}.",
        )
    for callback in callbacks:
        callback.on_load_checkpoint(run.trainer, run.module, checkpoint)
    states = {**states, **_trainer_state(checkpoint).get("callbacks", {})}
    for callback in callbacks:
        if state := states.get(callback.state_key, states.get(type(callback))):
            callback.load_state_dict(deepcopy(state))


def restore_progress(run: RunState, checkpoint: dict[str, Any], progress_from: Callable[..., None]) -> None:
    """Restore the counters.

    As in Lightning, an epoch that the saved run ended early continues if ``max_steps`` allows more steps now. Without
    ``max_steps``, the next epoch begins.

    Args:
        run: the state of the run.
        checkpoint: the result of :func:`read`.
        progress_from: sets the counters from those of Lightning's fit loop.

    Raises:
        ResumeError: if another version of this package wrote the checkpoint.
    """
    trainer_state, loops = _trainer_state(checkpoint), checkpoint.get("loops", {})
    progress, limits = run.progress, run.limits
    if trainer_state:
        if trainer_state["format"] != FORMAT:
            raise ResumeError(
                "The checkpoint was written by another version of this package (format"
                f" {trainer_state['format']}, expected {FORMAT}). Resume with that version, or start a new run with the"
                " weights of the checkpoint: Trainer.fit(weights=PATH)."
            )
        state = trainer_state["progress"]
        progress.load_state_dict(state, finish_epoch=limits.max_steps > state["optimizer_steps"])
    elif loops:
        progress_from(loops["fit_loop"], progress, finish_epoch=limits.max_steps != -1)
        progress.discard_batch()


def optimizer_states(run: RunState) -> list[dict[str, Any]]:
    """Return the state of each optimizer, with those of optimizers inside it that its state dict does not include."""
    engine = run.engine
    states = [engine.checkpoints.optimizer_state(optimizer) for optimizer in engine.optimizers]
    if not engine.exposes_gradients or engine.gradients.are_parts:  # only whole states can be loaded one by one
        return states
    for state, optimizer in zip(states, engine.optimizers, strict=True):
        if inner := unsaved_inner(optimizer):
            state[_INNER] = [engine.checkpoints.optimizer_state(base) for base in inner]
    return states


def restore_optimizers(run: RunState, checkpoint: dict[str, Any]) -> None:
    """Restore the states of the optimizers.

    Raises:
        IncompleteCheckpointError: if the checkpoint contains only weights.
        CheckpointError: if it has a different number of optimizers, or other types.
        ResumeError: if it lacks the states of optimizers inside of others, and the resume must be exact.
    """
    engine, trainer_state = run.engine, _trainer_state(checkpoint)
    _check_number(run.progress, checkpoint, "optimizer_states", engine.optimizers)
    for optimizer, state in zip(engine.optimizers, checkpoint["optimizer_states"], strict=False):
        _refuse_other_kind(optimizer, state)
        _keep_implementation(optimizer, state)
    names = parameter_names(run.module, engine.optimizers)
    _reorder_states(checkpoint, trainer_state.get("parameters", []), names)
    saved = _saved_dtypes(checkpoint, trainer_state, names, engine.optimizers)
    with ExitStack() as sharing:
        for optimizer in engine.optimizers:
            sharing.enter_context(keep_sharing(optimizer))
        engine.checkpoints.load_optimizer_states(checkpoint, saved)
    for optimizer, state in zip(engine.optimizers, checkpoint["optimizer_states"], strict=False):
        inner, states = unsaved_inner(optimizer), state.get(_INNER, [])
        if len(inner) != len(states):
            refuse_inexact(
                f"The checkpoint has the states of {len(states)} optimizers inside of {type(optimizer).__name__}, and"
                f" this run has {len(inner)}, such as the base optimizer of SAM.",
                f"Define state_dict and load_state_dict in {type(optimizer).__name__}, so that they include these.",
                exact=run.exact_resume and bool(trainer_state),  # Lightning's checkpoints never have them
            )
        for base, base_state in zip(inner, states, strict=False):
            with keep_dtypes([base], [base_state], saved), keep_sharing(optimizer):
                base.load_state_dict(base_state)


def restore_schedules(run: RunState, checkpoint: dict[str, Any], *, may_be_removed: bool = False) -> None:
    """Restore the states of the schedules, and the metrics that they will read.

    Args:
        run: the state of the run, with new schedules.
        checkpoint: the checkpoint.
        may_be_removed: whether a callback may have removed all schedules of this run. Default: False.

    Raises:
        IncompleteCheckpointError: if the checkpoint contains only weights.
        CheckpointError: if it has a different number of schedules, but not if it has none.
    """
    progress, schedules = run.progress, run.schedules
    if schedules or not may_be_removed:
        _check_number(progress, checkpoint, "lr_schedulers", schedules)
    for config, state in zip(schedules, checkpoint["lr_schedulers"]):  # noqa: B905  # one of them may be empty
        config.scheduler.load_state_dict(state)
    awaited = _trainer_state(checkpoint).get("awaited", {})
    metrics = {name: torch.tensor(value, dtype=torch.float64) for name, value in awaited.items()}
    if progress.batches_this_epoch:
        run.published.callback.update(metrics)  # read at the end of the resumed epoch
    # saved at the end of an epoch, before the schedules stepped; an interrupted epoch does not advance them
    position = _trainer_state(checkpoint).get("progress", {}).get("position")
    follow = position == EPOCH_ENDED.name and progress.is_last_batch
    for config in schedules if follow else ():
        waits = config.reduce_on_plateau and config.interval == "epoch" and config.monitor in metrics
        if waits and progress.epoch % config.frequency == 0:
            run.module.lr_scheduler_step(config.scheduler, metrics[str(config.monitor)])
            progress.schedule_steps += 1


def _check_number(progress: FitProgress, checkpoint: dict[str, Any], key: str, current: Sequence[Any]) -> None:
    """Check that the number of saved optimizers or schedules equals the current number."""
    if key not in checkpoint:
        raise IncompleteCheckpointError(
            "Trying to restore optimizer state but checkpoint contains only the model."
            f" This is probably due to `ModelCheckpoint.save_weights_only` being set to `True`. It has no {key!r}."
            " To start a new run with its weights, use fit(weights=...) instead of ckpt_path."
        )
    if current and not checkpoint[key]:
        if progress.batches or not checkpoint.get("loops"):  # else it was saved before the first fit
            warn(f"The checkpoint has no {key}: those of this run start from their initial states.")
    elif len(checkpoint[key]) != len(current):
        raise CheckpointError(
            f"The checkpoint has {len(checkpoint[key])} {key}, but configure_optimizers returned {len(current)}."
            " Return the same ones as in the run that saved it."
        )


def roll_back(
    run: RunState,
    checkpoint: dict[str, Any],
    process: dict[str, Any],
    callbacks: Iterable[Any],
    restore_training: Callable[[Any, dict[str, Any]], None],
) -> None:
    """Restore the weights and all dependent state from an earlier checkpoint, while the data continues at its position.

    The run then equals one that continues from the checkpoint without the batches in between. All processes must call
    it at the end of a batch that closes an accumulation window, after the row for the loggers.

    Args:
        run: the state of the run, with its ``loop``.
        checkpoint: the result of :func:`read`, of this run.
        process: the checkpoint's state of this process.
        callbacks: callbacks with states that depend on the weights.
        restore_training: restores the counters, the optimizers and the schedules.
    """
    loop, progress, module = run.loop, run.progress, run.module
    loop.resolve_outcome()
    before = replace(progress)
    module.on_load_checkpoint(checkpoint)
    run.engine.checkpoints.load_module_state(checkpoint, strict=module.strict_loading)
    restore_callbacks(run, checkpoint, callbacks)
    restore_training(run, checkpoint)
    is_same_epoch, closing = progress.epoch == before.epoch, progress.closing
    epochs = progress.epoch + (progress.is_last_batch and progress.batches_this_epoch > 0)
    for epoch in range(epochs, before.epoch + before.is_last_batch):  # epochs that have ended in between
        progress.epoch = epoch
        loop.schedules.advance("epoch")
    progress.roll_back(before)
    loop.metrics.clear()
    metrics = MetricObjects(module)
    for metric in metrics.by_name.values():
        reset(metric)
    logged = set() if is_same_epoch else {entry["metric"] for entry in process["metrics"]["entries"]}
    states = metrics.states_in_snapshot(metrics.by_name.keys() - logged)
    # keep the batch counts, and the attributes of modules and callbacks, which may count the calls of this function
    program = selected(process["program"], lambda path, name: name[0] == ":" or name in states.get(path, ()))
    process = {**process, "seen_batches": {}, "program": program}
    process["outcome"] = [process["outcome"][0], process["outcome"][1] and closing]
    if not is_same_epoch:  # drop the values logged in an epoch that has ended
        process |= {"metrics": {**process["metrics"], "entries": []}}
    run.process.load(process, stops=False)
    for optimizer in schedule_free(run.optimizers):
        optimizer.train()  # `state_dict` has the averages. After a resume, the first epoch does this
    progress.closing = loop.window.is_last  # of the checkpoint; the update is counted again after the batch
    progress.updates -= progress.closing


def process_states_in(checkpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the state of each process in a checkpoint, the result of :func:`read`, or [] if it has none."""
    return [unpacked(process) for process in _trainer_state(checkpoint).get("processes", [])]


def parameter_names(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[list[str]]:
    """Return the names of each optimizer's parameters in its order; [] if some of them are not the module's."""
    names = {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}
    held = [[id(parameter) for parameter in parameters_of(optimizer)] for optimizer in optimizers]
    return [[names[number] for number in ids] if names.keys() >= set(ids) else [] for ids in held]


def parameter_dtypes(run: RunState) -> list[list[torch.dtype]]:
    """Return the dtypes of each optimizer's parameters."""
    return [[parameter.dtype for parameter in parameters_of(optimizer)] for optimizer in run.optimizers]


def _trainer_state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that are not Lightning's, or {}."""
    trainer_state: dict[str, Any] = checkpoint.get("loops", {}).get(TRAINER_KEY, {})
    return trainer_state


def _saved_dtypes(
    checkpoint: dict[str, Any], trainer_state: dict[str, Any], names: list[list[str]], optimizers: list[Optimizer]
) -> dict[Tensor, torch.dtype]:
    """Return the dtype of each optimizer parameter when the checkpoint was saved.

    Checkpoints of Lightning do not record it. For these, it is the dtype of the saved weight.

    Args:
        checkpoint: the checkpoint.
        trainer_state: its entries that are not Lightning's.
        names: the names of each optimizer's parameters.
        optimizers: the optimizers.
    """
    saved = {
        plain_name(name): value.dtype for name, value in checkpoint["state_dict"].items() if isinstance(value, Tensor)
    }
    for known, dtypes in zip(trainer_state.get("parameters", []), trainer_state.get("dtypes", []), strict=False):
        saved.update(zip(known, dtypes, strict=False))
    return {
        parameter: saved[name]
        for known, optimizer in zip(names, optimizers, strict=True)
        for name, parameter in zip(known, parameters_of(optimizer), strict=False)  # no names if one is not the module's
        if name in saved
    }


def _reorder_states(checkpoint: dict[str, Any], saved: list[list[str]], names: list[list[str]]) -> None:
    """Renumber the states of optimizers in place if they have the same parameters in another order."""
    states = list(checkpoint["optimizer_states"])
    for index, (saved_names, current_names) in enumerate(zip(saved, names, strict=False)):
        groups = states[index].get("param_groups", []) if index < len(states) else []
        if (
            saved_names == current_names
            or len(saved_names) != len(set(saved_names))
            or len(groups) != 1
            or set(saved_names) != set(current_names)
        ):
            continue
        number = {name: current_names.index(name) for name in saved_names}
        state = {number[saved_names[old]]: value for old, value in states[index]["state"].items()}
        groups = [{**groups[0], "params": list(range(len(current_names)))}]
        states[index] = {**states[index], "state": state, "param_groups": groups}
    checkpoint["optimizer_states"] = states


def _refuse_other_kind(optimizer: Any, state: dict[str, Any]) -> None:
    """Raise if the saved optimizer has other groups, or if both optimizers have settings that the other lacks.

    If only one of them has such settings, it may come from another version, or have had a schedule.
    """
    saved = set().union(*state.get("param_groups", ()))
    missing, unknown = optimizer.defaults.keys() - saved, saved - set().union(*optimizer.param_groups)
    if saved and missing and unknown:
        raise CheckpointError(
            f"The checkpoint's optimizer is not of the class {type(optimizer).__name__}. Its state has the settings"
            f" {', '.join(sorted(unknown))}; expected {', '.join(sorted(missing))}. Return the optimizer of the saved"
            " run from configure_optimizers, or start a new run with the weights of the checkpoint:"
            " Trainer.fit(weights=PATH)."
        )
    both = state.get("param_groups", ()), optimizer.param_groups
    sizes, sizes_now = [[len(group["params"]) for group in groups] for groups in both]
    if saved and sizes != sizes_now and type(optimizer).load_state_dict is Optimizer.load_state_dict:
        raise CheckpointError(
            f"The checkpoint's optimizer has parameter groups of {sizes} parameters, but {type(optimizer).__name__} of"
            f" this run has {sizes_now}. Return all groups from configure_optimizers. To add groups during a run, use"
            " lightning.pytorch.callbacks.BaseFinetuning, which adds them again before a resume."
        )


def _keep_implementation(optimizer: Any, state: dict[str, Any]) -> None:
    """Keep this run's choices of implementation and device for the step, because a partly fused optimizer fails."""
    choices = ("fused", "foreach", "capturable")
    for group, saved in zip(optimizer.param_groups, state.get("param_groups", ()), strict=False):
        saved.update({key: group[key] for key in choices if key in group and key in saved})
        for key, value in saved.items():
            if isinstance(value, Tensor) and isinstance(current := group.get(key), Tensor):
                saved[key] = value.to(current.device)  # a learning rate


def is_own_callback(callback: Any) -> bool:
    """Return whether a callback is defined in this package."""
    return type(callback).__module__.startswith(f"{__name__.partition('.')[0]}.")


def awaited_metrics(run: RunState) -> dict[str, float]:
    """Return the metrics that schedules monitor, as far as they are known."""
    metrics = run.trainer.callback_metrics
    names = {str(config.monitor) for config in run.schedules if config.reduce_on_plateau}
    return {name: float(metrics[name]) for name in sorted(names & metrics.keys())}
