"""Lightning's ModelCheckpoint callbacks: when they save, their folders, and the state that they do not save themselves.

A ModelCheckpoint with ``every_n_train_steps`` and a ``monitor`` saves after the validation if one follows the same
batch, so that its score is that of the saved weights. All ranks select checkpoints by the metrics of rank 0.

If several of them save in the same hook, each file has the states of all of them after the hook: the decisions of the
others are made on copies, before the first file is written.

A folder belongs to one run at a time. A resumed run restores the step at which each ModelCheckpoint last saved, and
whether it waits for a validation, because the callback's own state lacks these.
"""

from __future__ import annotations

import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import cache, partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from trainer.checkpoint.checkpoint_io import files_of
from trainer.checkpoint.folder_locks import LOCK, describe_owner, lock_folder
from trainer.checkpoint.loading import TRAINER_KEY
from trainer.checkpoint.reading import EXTENSION
from trainer.common import cluster
from trainer.common.collectives import Collectives
from trainer.common.files import local_path
from trainer.common.session import Session
from trainer.loop.run_state import RunState, state_of
from trainer.state.progress import TRAINED

T = TypeVar("T")
_STATES = "savers"
_RESOLVE = "_ModelCheckpoint__resolve_ckpt_dir"
_LIGHTNINGS_METHOD = ModelCheckpoint.on_train_batch_end
_PACKAGES = ("lightning", "pytorch_lightning", "trainer")
_COUNTERS = (None, "epoch", "step")  # values of `monitor` that need no metric


def model_checkpoints_of(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    """Return the ModelCheckpoints of ``trainer``."""
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def are_written(run: RunState) -> bool:
    """Return whether callbacks write checkpoints during a fit."""
    return not run.fast_dev_run and any(
        not isinstance(callback, ModelCheckpoint)
        or callback.save_top_k != 0
        or callback.save_last
        or callback.save_on_exception
        for callback in run.callbacks
        if isinstance(callback, Checkpoint)
    )


# --- when they save ---------------------------------------------------------------------------------------------------


def attach_savers(trainer: pl.Trainer, session: Session) -> None:
    """Make each ModelCheckpoint save as described above until ``session`` closes.

    A ``on_train_batch_end`` that is overridden stays. Called twice, because hooks may add callbacks.
    """
    for saver in model_checkpoints_of(trainer):
        if "_monitor_candidates" in vars(saver):
            continue
        session.replace(saver, "_monitor_candidates", partial(_candidates_of_rank_0, saver._monitor_candidates))
        for hook in ("on_validation_end", "on_train_epoch_end"):
            session.replace(saver, hook, partial(_call, saver, hook, getattr(saver, hook)))
        if saver.on_train_batch_end == MethodType(_LIGHTNINGS_METHOD, saver):
            session.replace(saver, "on_train_batch_end", partial(_save_after_batch, saver))


def _waits_for_validations(saver: ModelCheckpoint) -> bool:
    return isinstance(method := saver.on_train_batch_end, partial) and method.func is _save_after_batch


def _save_after_batch(saver: ModelCheckpoint, trainer: pl.Trainer, *_: Any) -> None:
    """Save if ``every_n_train_steps`` or ``train_time_interval`` is due, in automatic and in manual optimization.

    Lightning's method ignores ``train_time_interval`` in manual optimization, and ranks weights by the metrics of an
    older validation unless the batch is the last of its epoch.
    """
    is_due = _time_is_up(saver, trainer) or _steps_are_due(saver, trainer)
    if not is_due or saver._should_skip_saving_checkpoint(trainer):
        return
    with _deciding(saver, "on_train_batch_end", trainer):
        if not _must_wait(saver, trainer):
            _save(saver, trainer)
            return
        saver._defer_save_until_validation = True
        if (save_last := getattr(saver, "save_last_before_validation", None)) is not None:  # our BestCheckpoint
            save_last(trainer)


def _call(saver: ModelCheckpoint, hook: str, method: Callable[..., None], trainer: pl.Trainer, module: Any) -> None:
    """Call a hook of the saver at the end of a validation or of an epoch."""
    with _deciding(saver, hook, trainer):
        _SAVES[hook](saver, method, trainer, module)


@contextmanager
def _deciding(saver: ModelCheckpoint, hook: str, trainer: pl.Trainer) -> Iterator[None]:
    """Return a context for a hook of a saver: ``RunState.savers_after`` returns the savers after the hook."""
    run, savers = state_of(trainer), model_checkpoints_of(trainer)
    if saver not in savers:  # a copy
        yield
        return
    pairs = [(saver, _copied(saver)), *((other, other) for other in savers[savers.index(saver) + 1 :])]
    run.savers_after = cache(partial(_decide, trainer, hook, pairs))
    try:
        yield
    finally:
        run.savers_after = dict


def _decide(trainer: pl.Trainer, hook: str, pairs: list[tuple[Any, Any]]) -> dict[Any, ModelCheckpoint]:
    """Return a copy of each saver after a hook, without writing or removing files.

    Savers that override the methods used here are left out, and so are those whose metric does not exist.

    Args:
        trainer: the Trainer.
        hook: the name of the hook.
        pairs: each saver, and its copy from before the hook; in the order in which they are called.
    """
    exists: dict[str, bool] = {}
    decided = {}
    for saver, before in pairs:
        methods = [getattr(type(saver), name) for name in (hook, "_save_topk_checkpoint", "_save_last_checkpoint")]
        known = all(method.__module__.partition(".")[0] in _PACKAGES for method in methods)
        if not known or not _has_metric(saver, trainer):
            continue
        after = decided[saver] = _copied(before)
        vars(after).pop(hook, None)
        vars(after)["_save_checkpoint"] = partial(_note_save, after, exists)
        vars(after)["_remove_checkpoint"] = lambda _, path: exists.update({path: False})
        vars(after)["_link_checkpoint"] = lambda _, __, link: exists.update({link: True})
        vars(after)["file_exists"] = partial(_exists_after, exists, saver.file_exists)
        usual = logging.root.manager.disable
        logging.disable(max(usual, logging.INFO))  # the call itself logs
        try:
            if hook == "on_train_batch_end":
                _save_after_batch(after, trainer)
            else:
                _SAVES[hook](after, MethodType(methods[0], after), trainer, trainer.lightning_module)
        finally:
            logging.disable(usual)
    return decided


def _copied(saver: ModelCheckpoint) -> ModelCheckpoint:
    copied = copy(saver)
    copied.best_k_models = dict(saver.best_k_models)
    return copied


def _note_save(saver: ModelCheckpoint, exists: dict[str, bool], trainer: pl.Trainer, path: str) -> None:
    exists[path] = True
    saver._last_global_step_saved, saver._last_checkpoint_saved = trainer.global_step, path


def _exists_after(exists: dict[str, bool], method: Callable[..., bool], path: str, trainer: pl.Trainer) -> bool:
    return exists[path] if path in exists else method(path, trainer)


def _save_after_validation(
    saver: ModelCheckpoint, method: Callable[..., None], trainer: pl.Trainer, module: Any
) -> None:
    """Save if a save waits for this validation, then call the saver's method.

    Lightning's method never makes such a save if validations run at the ends of epochs.
    """
    waits = saver._defer_save_until_validation and _has_metric(saver, trainer)
    if waits and not saver._should_skip_saving_checkpoint(trainer):
        saver._defer_save_until_validation = False
        _save(saver, trainer)
    method(trainer, module)


def _save_after_epoch(saver: ModelCheckpoint, method: Callable[..., None], trainer: pl.Trainer, module: Any) -> None:
    """Call the saver's method. Report a save that waits for a metric that neither the epoch nor a validation logged.

    In Lightning, a ModelCheckpoint with ``every_n_train_steps`` waits until the end of the fit, and saves nothing.
    """
    method(trainer, module)
    if not saver._defer_save_until_validation or _has_metric(saver, trainer):
        return
    if trainer.fit_loop.epoch_loop.val_loop._has_run or not any(trainer.num_val_batches):
        saver._save_topk_checkpoint(trainer, saver._monitor_candidates(trainer))


_SAVES = {"on_validation_end": _save_after_validation, "on_train_epoch_end": _save_after_epoch}


def _candidates_of_rank_0(method: Callable[..., dict[str, Tensor]], trainer: pl.Trainer) -> dict[str, Tensor]:
    """Return the metrics of rank 0, so that all ranks select the same checkpoint, with the name of its file."""
    candidates = method(trainer)
    # only one rank may have raised an exception, and then the others do not join a broadcast
    if trainer.world_size == 1 or trainer.interrupted:
        return candidates
    return state_of(trainer).collectives.broadcast({name: value.cpu() for name, value in candidates.items()})


def _save(saver: ModelCheckpoint, trainer: pl.Trainer) -> None:
    candidates = saver._monitor_candidates(trainer)
    saver._save_topk_checkpoint(trainer, candidates)
    saver._save_last_checkpoint(trainer, candidates)


def _steps_are_due(saver: ModelCheckpoint, trainer: pl.Trainer) -> bool:
    interval = saver._every_n_train_steps
    return interval >= 1 and trainer.global_step % interval == 0


def _time_is_up(saver: ModelCheckpoint, trainer: pl.Trainer) -> bool:
    """Return whether ``train_time_interval`` has passed, by the clock of rank 0, and restart it if it has."""
    if saver._train_time_interval is None:
        return False
    now, before = time.monotonic(), saver._last_time_checked
    is_up = before is not None and now - before >= saver._train_time_interval.total_seconds()
    if is_up := state_of(trainer).collectives.broadcast(is_up):
        saver._last_time_checked = now
    return bool(is_up)


def _has_metric(saver: ModelCheckpoint, trainer: pl.Trainer) -> bool:
    return saver.monitor in _COUNTERS or saver.monitor in trainer.callback_metrics


def _must_wait(saver: ModelCheckpoint, trainer: pl.Trainer) -> bool:
    """Return whether a save that is due now must wait for the metrics of the next validation.

    It waits if its metric does not exist yet, or if a validation follows this batch. If its metric exists, a save by
    ``train_time_interval`` does not wait, because its purpose is to save in time.
    """
    if saver.monitor in _COUNTERS:
        return False
    if not _has_metric(saver, trainer):
        return True
    has_batches = not trainer.num_val_batches or any(trainer.num_val_batches)  # [] before the loaders are built
    return saver._train_time_interval is None and has_batches and state_of(trainer).loop.validation_is_due()


# --- folders ----------------------------------------------------------------------------------------------------------


def folders_of(trainer: pl.Trainer) -> list[str]:
    """Return the folders that the ModelCheckpoints of ``trainer`` write to, paths and URLs. Call it on rank 0 only.

    Loggers that number their folders choose the number here, if they have not yet.
    """
    return list(dict.fromkeys(str(getattr(callback, _RESOLVE)(trainer)) for callback in model_checkpoints_of(trainer)))


def folders_with_files(trainer: pl.Trainer) -> list[str]:
    """Return :func:`folders_of`, and their subfolders if file names have a slash, as those with ``{val/loss}`` have."""
    folders = folders_of(trainer)
    for callback in model_checkpoints_of(trainer):
        name = callback.format_checkpoint_name({}).removeprefix(os.fspath(callback.dirpath or "")).lstrip("/")
        folder = local_path(getattr(callback, _RESOLVE)(trainer))
        if folder is not None and "/" in name:
            subfolders = folder.glob("/".join("*" * name.count("/")))
            folders += [str(path) for path in subfolders if EXTENSION not in path.name]  # not a sharded checkpoint
    return folders


def first_folder(run: RunState) -> str | None:
    """Return the folder of the first ModelCheckpoint of a run. None without one, and with ``fast_dev_run``."""
    if run.fast_dev_run:
        return None
    folders = (callback.dirpath for callback in model_checkpoints_of(run.trainer) if callback.dirpath is not None)
    return next((os.fspath(folder).rstrip("/") for folder in folders), None)


def claim_folders(run: RunState, session: ExitStack) -> None:
    """Lock the folders that a fit writes to, for this run, until ``session`` closes.

    Rank 0 locks them, and all ranks raise if it fails.

    Raises:
        FolderInUseError: if another run has locked one.
        CheckpointWriteError: if one cannot be created, or written to.
        ClusterError: if other nodes do not see one and the run requires it.
    """

    def claim() -> None:
        folders = folders_of(trainer) if run.fits else []
        if (files := files_of(trainer.strategy)) is not None:
            savers = (saver for saver in trainer.checkpoint_callbacks if isinstance(saver, OnExceptionCheckpoint))
            files.belong(folders, [saver.ckpt_path for saver in savers])
        for folder in folders:
            if (place := local_path(folder)) is not None:
                session.enter_context(lock_folder(place))

    trainer = run.trainer
    if not run.fast_dev_run:
        on_first_rank(run.collectives, claim)
        _check_shared(run)


def _check_shared(run: RunState) -> None:
    """Check that all nodes see the folders of rank 0, if the run requires it.

    Raises:
        ClusterError: if they do not.
    """
    trainer, shards = run.trainer, run.engine.checkpoints.saves_shards
    if trainer.num_nodes == 1 or not run.fits or not (run.resume == "auto" or shards):
        return
    folders = folders_of(trainer) if run.is_global_zero else []
    reason = "every node writes its shards there" if shards else "resume='auto' must find them on any node"
    collectives = run.collectives
    for folder in collectives.broadcast([os.path.realpath(place) for local in folders if (place := local_path(local))]):
        cluster.check_shared(
            collectives, partial(describe_owner, folder), f"Checkpoints are written to {folder}, and {reason}"
        )


def on_first_rank(collectives: Collectives, work: Callable[[], T]) -> T:
    """Call ``work`` on rank 0. All ranks return its result, or raise its exception."""
    result: Any = None
    error: Exception | None = None
    if collectives.global_rank == 0:
        try:
            result = work()
        except Exception as problem:
            error = problem
    result, error = collectives.broadcast((result, error))
    if error is not None:
        raise error
    return cast(T, result)


@contextmanager
def without_needless_warnings(run: RunState) -> Iterator[None]:
    """Return a context for the ``setup`` hooks that filters ModelCheckpoint's warning about folders that are not empty.

    The warning is suppressed for folders that hold only our lock, and for a run with ``resume="auto"``.
    """
    with warnings.catch_warnings():
        if run.is_global_zero and run.fits and not run.fast_dev_run:
            for folder in folders_of(run.trainer):
                if run.resume == "auto" or _is_empty(folder):
                    message = f"Checkpoint directory {re.escape(folder)} exists and is not empty"
                    warnings.filterwarnings("ignore", message=message)
        yield


def _is_empty(folder: str) -> bool:
    place: Path | None = local_path(folder)
    return place is not None and place.is_dir() and set(os.listdir(place)) <= {LOCK}


# --- state ------------------------------------------------------------------------------------------------------------


def states_to_save(run: RunState) -> dict[str, Any] | None:
    """Return the state of each ModelCheckpoint for the checkpoint that is about to be written, or None without any.

    The state is the step at which it last saved, so that it does not save twice, and whether it waits for the metrics
    of a validation. For the ModelCheckpoint that writes this checkpoint, it is the state after the save. At the end of
    a batch, another ModelCheckpoint may not have been called yet: if its save is due and must wait for a validation, it
    counts as waiting.
    """
    trainer, states, path = run.trainer, {}, run.destination
    after, progress = run.savers_after(), run.progress
    ends_batch = progress.position is TRAINED
    for saver in model_checkpoints_of(trainer):
        decided = after.get(saver, saver)
        step, waits = decided._last_global_step_saved, decided._defer_save_until_validation
        is_due = ends_batch and _steps_are_due(saver, trainer) and not saver._should_skip_saving_checkpoint(trainer)
        is_due = is_due and decided is saver
        waits = waits or (is_due and _waits_for_validations(saver) and _must_wait(saver, trainer))
        if decided is saver and path in (saver.best_model_path, saver.last_model_path, *saver.best_k_models):
            step, waits = progress.optimizer_steps, False
        states[saver.state_key] = {"dirpath": str(saver.dirpath), "step": step, "waits": waits}
    return states or None


def restore_states(run: RunState, checkpoint: dict[str, Any]) -> None:
    """Restore the result of :func:`states_to_save`; the step only if the folder is the same."""
    if not run.fits:
        return
    trainer = run.trainer
    states = checkpoint.get("loops", {}).get(TRAINER_KEY, {}).get(_STATES, {})
    for saver in model_checkpoints_of(trainer):
        if (state := states.get(saver.state_key)) is None:
            continue
        saver._defer_save_until_validation = state["waits"]
        if state["dirpath"] == str(saver.dirpath):
            saver._last_global_step_saved = state["step"]
            saver.last_model_path = saver.last_model_path or _link_to(str(trainer.ckpt_path), str(saver.dirpath))


def allow_removal(trainer: pl.Trainer, session: Session) -> None:
    """Let ModelCheckpoint remove the checkpoint that the run was resumed from, until ``session`` closes.

    ModelCheckpoint keeps the file of ``trainer.ckpt_path``, because usually the user has given it.
    """
    for saver in model_checkpoints_of(trainer):
        session.replace(saver, "_should_remove_checkpoint", partial(_should_remove, saver))


def _should_remove(saver: ModelCheckpoint, trainer: pl.Trainer, previous: str, current: str) -> bool:
    without_path: Any = SimpleNamespace(ckpt_path=None)
    return type(saver)._should_remove_checkpoint(saver, without_path, previous, current)


def _link_to(path: str, folder: str) -> str:
    """Return the link to ``path`` in ``folder`` (``save_last="link"``), or ""."""
    place = local_path(folder)
    links = [] if place is None else [file for file in place.glob(f"*{EXTENSION}") if file.is_symlink()]
    target = os.path.realpath(path)
    return next((os.path.join(folder, link.name) for link in links if os.path.realpath(link) == target), "")
