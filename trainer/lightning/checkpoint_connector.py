"""Choose the file for ``ckpt_path``, and restore the run from it, through Lightning's checkpoint connector."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, ModelPruning, Timer
from lightning.pytorch.trainer.call import _call_callbacks_load_state_dict
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_registry import _is_registry, download_model_from_registry
from lightning_utilities.core.imports import module_available

from trainer.checkpoint import loading as checkpoints
from trainer.checkpoint import model_checkpoints, resuming
from trainer.checkpoint import reading as files
from trainer.checkpoint.checkpoint_io import wait_for_saves
from trainer.common import cluster, redaction
from trainer.common.files import local_path
from trainer.common.session import Session
from trainer.errors import CheckpointError, ConfigurationError, ResumeError, refuse_inexact
from trainer.lightning import averaging, contents, loop_state, resumed_settings
from trainer.lightning import elastic_resume as elastic
from trainer.lightning.modules import snapshot_of
from trainer.loop.hooks import HookScope
from trainer.loop.run_state import state_of
from trainer.module_weights import LoadedWeights, load_into
from trainer.record.find_checkpoint import find_weights

log = logging.getLogger(__name__)


class RolledBack(NamedTuple):
    """The checkpoint that a run was rolled back to.

    Attributes:
        path: its path.
        step: its number of optimizer steps.
        epoch, batch_idx: the position of the first batch after it.
    """

    path: str
    step: int
    epoch: int
    batch_idx: int


class CheckpointConnector(_CheckpointConnector):
    """``trainer._checkpoint_connector``: Lightning's connector, but it reads and writes our checkpoints.

    It is used by the Trainer, by the tuner's finders, and by programs that dump a checkpoint.
    """

    trainer: pl.Trainer

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self._run = state_of(trainer)
        self._engine = self._run.engine
        self._has_order = True  # False if the sample order cannot be restored
        self._is_chosen = False  # by the user
        self._foreign: dict[str, str] = {}  # by `best_model_path`: the checkpoint that contains it
        self._weights: Path | None = None  # of another run, to start with
        self._states: list[dict[str, Any]] = []  # of the processes that saved the loaded checkpoint
        self.loaded_weights: LoadedWeights | None = None

    def select(self, given: str | Path | None, *, model_given: bool, weights: str | Path | None = None) -> None:
        """Set ``trainer.ckpt_path``, the file to load in a run that was called with ``ckpt_path=given``.

        A value that the user has assigned to ``trainer.ckpt_path`` is used if nothing is given.

        Args:
            given: a path, a URL, ``"best"``, ``"last"``, ``"hpc"``, ``"registry..."`` or None.
            model_given: whether the run was given a module; if not, None means ``"best"``. With an
                ``OnExceptionCheckpoint``, None means ``"last"`` in a fit.
            weights: the weights of another run that a fit starts with. Default: None.

        Raises:
            ConfigurationError: if there is no checkpoint for ``"best"`` or ``"hpc"`` (for ``"last"``, this is a
                warning), or no file of ``weights``; if the best checkpoint is outside the folders of the run and only
                a restored checkpoint names it; or if both a checkpoint and weights are given. A path is not checked.
        """
        run, is_assigned = self._run, self._user_managed and not given
        if weights is not None and (given or is_assigned):
            raise ConfigurationError(
                f"Got ckpt_path={redaction.text(str(given or self._ckpt_path))!r} and weights={str(weights)!r},"
                " expected one of them: ckpt_path resumes a run with its optimizers and counters; weights initializes"
                " a new run."
            )
        self._weights = None if weights is None else find_weights(weights)
        if run.fits:
            self.loaded_weights = None
        if given and _is_registry(given) and module_available("litmodels"):
            download_model_from_registry(given, self.trainer)
        try:
            fn = run.fn
            assert fn is not None
            path = self._select_ckpt_path(fn, given, model_provided=model_given, model_connected=True)
        except ValueError as error:
            advice = "Add ModelCheckpoint(monitor=...) to the callbacks, or pass the path of a file."
            if given == "hpc":
                advice = f"Expected a file hpc_ckpt_*.ckpt in {self.trainer.default_root_dir}."
            raise ConfigurationError(f"{str(error).rstrip('.')}. {advice}") from error
        if path != given and not is_assigned:
            self._refuse_foreign(str(path))
        self._ckpt_path, self._is_chosen = path, bool(given) or is_assigned

    def find_newest(self, session: Session) -> None:
        """Choose the newest good checkpoint of this run (``resume="auto"``), unless the user has chosen one.

        A newer checkpoint of a requeued Slurm job takes precedence.

        Args:
            session: locks the folders for this run until it closes.
        """
        if not self._is_chosen:
            self._ckpt_path = resuming.newest_checkpoint(self._run, session, self._ckpt_path)

    def keep_rows(self) -> None:
        """Let CSV loggers keep their rows from before the checkpoint that the user has chosen for a fit."""
        if self._is_chosen and self._ckpt_path is not None and self._run.fits:
            resuming.keep_rows(self._run, self._ckpt_path)

    def restore_module_and_callbacks(self, weights_only: bool | None) -> None:
        """Read the checkpoint of the run, if any, and restore the parts that the setup of the strategy requires."""
        self._loaded_checkpoint = {}
        if self._ckpt_path is None:
            self._begin_with_weights(weights_only)
            return
        if self._weights is not None:
            rank_zero_info(f"The run resumes from its own checkpoint: {self._weights} is not loaded again.")
        rank_zero_info(f"Restoring states from the checkpoint path at {redaction.text(str(self._ckpt_path))}")
        if self.trainer.num_nodes > 1 and (path := local_path(self._ckpt_path)) is not None:
            subject = f"The run resumes from the checkpoint {redaction.text(str(path))}, which every process reads"
            cluster.check_shared(self._engine.collectives, path.exists, subject)
        self.resume_start(self._ckpt_path, weights_only)
        with self._program_restored():
            contents.load_before_setup(self._run, self._loaded_checkpoint)
        self._note_foreign()

    @contextmanager
    def _program_restored(self) -> Iterator[None]:
        """Return a context in which the user's objects are restored, because what a hook sets in it is kept."""
        run = self._run
        if not run.fits:
            yield
            return
        self._states = checkpoints.process_states_in(self._loaded_checkpoint)
        state = (self._states[run.global_rank :] or self._states or [{}])[0]
        with run.process.restored_for_hooks(snapshot_of(run), state):
            yield

    def _begin_with_weights(self, weights_only: bool | None) -> None:
        """Load the weights of another run that a fit starts with, and report the loaded and the missing ones."""
        run, engine = self._run, self._engine
        if self._weights is None:
            return
        # broadcast, because the other run may write a new best checkpoint meanwhile
        file = Path(engine.collectives.broadcast(str(self._weights)))
        backend = engine.checkpoints
        loaded = load_into(run.module, file, backend.load_module_state, weights_only, backend.template)
        averaging.follow(run)
        self.loaded_weights = loaded
        if run.is_global_zero:
            report = logging.getLogger("lightning.pytorch.advice").info if loaded.complete else log.warning
            report("%s", redaction.text(str(loaded)))

    def restore_fit(self) -> dict[str, Any] | None:
        """Restore counters, optimizers and schedules. Return the checkpoint's state of this process, or None.

        Raises:
            ConfigurationError: if the checkpoint has more epochs than ``max_epochs``.
            ResumeError: if the resume cannot be exact and ``exact_resume`` is True.
        """
        run, checkpoint = self._run, self._loaded_checkpoint
        data, progress, limits = run.data, run.progress, run.limits
        if not checkpoint:
            progress.restart_epoch()
            return None
        if run.is_global_zero:
            where, given = (" in another folder", "resume") if run.resume else ("", "ckpt_path")
            advice = f"start a new run{where} with weights={redaction.text(str(self._ckpt_path))!r} instead of {given}"
            resumed_settings.announce_restored(run, checkpoint, advice)
        contents.load_training(run, checkpoint)
        if loops := checkpoint.get("loops"):
            loop_state.evaluation_from(loops["fit_loop"], run)
            loop_state.resume_validation(run)
        if limits.max_epochs not in (None, -1) and progress.epoch > limits.max_epochs:
            raise ConfigurationError(
                f"You restored a checkpoint with current_epoch={progress.epoch}, but you have set"
                f" Trainer(max_epochs={limits.max_epochs}). Set max_epochs to the total number of epochs."
            )
        state = self._process_state(checkpoint)
        position = loop_state.data_position_in(checkpoint, progress, limits.max_steps != -1)
        prunes = any(isinstance(callback, ModelPruning) for callback in run.callbacks)
        if state is not None and prunes and not limits.ends_fit():
            problem = (
                "A resume with ModelPruning is not exact: the checkpoint has the pruned weights, but not the masks, so"
                " these weights are trained until the callback prunes again."
            )
            refuse_inexact(problem, exact=run.exact_resume)
        if state is not None or position:
            data.resumed = (state or {}).get("data") or position
        if state is not None:
            data.resumed_validation = state.get("evaluation", {}).get("validation", {})
        return state

    def prepare_order(self) -> None:
        """Restore the sample order of a run on another number of processes, if the checkpoint is from such a run.

        Called before the strategy is set up.

        Raises:
            ResumeError: if the updates cannot get the same samples and ``exact_resume`` is True.
        """
        self._has_order = True
        if self._ckpt_path is None:
            return
        loops = self._loaded_checkpoint.get("loops") or resuming.loops_in(self._ckpt_path)
        trainer_state = loops.get(checkpoints.TRAINER_KEY, {})
        if elastic.is_elastic(self._run, trainer_state):
            self._has_order = bool(self._translated(elastic.prepare, trainer_state))

    def _process_state(self, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
        """Return the checkpoint's state of this process, translated if it is from another number of processes, or None.

        Raises:
            ResumeError: if it cannot be translated and ``exact_resume`` is True.
        """
        run = self._run
        states = self._states
        if not states or not elastic.is_elastic(run, self._trainer_state):
            return states[run.global_rank] if states else None
        if self._has_order and run.elastic_state is None:  # `prepare_order` could not read the file in parts
            self._has_order = bool(self._translated(elastic.prepare, self._trainer_state))
        return self._translated(elastic.resume, self._trainer_state, states) if self._has_order else None

    def _translated(self, translate: Callable[..., Any], trainer_state: dict[str, Any], *states: Any) -> Any:
        """Return the result of ``translate``; None, with a warning, if it fails and the resume need not be exact."""
        run = self._run
        try:
            return translate(run, trainer_state, *states)
        except ResumeError as error:
            problem = (
                f"The checkpoint is of a run with world size {elastic.written_by(trainer_state)}, but this run has"
                f" world size {run.world_size}: each update would get other samples. Reason: {error}."
            )
        refuse_inexact(problem, "Resume with the same number.", exact=run.exact_resume)
        run.data.drop_sample_order()
        return None

    def roll_back(self, max_step: int) -> RolledBack | None:
        """Implement ``Trainer.roll_back``."""
        run, engine = self._run, self._engine
        to = model_checkpoints.on_first_rank(run.collectives, partial(self._newest_until, max_step))
        if to is None:
            return None
        checkpoint = checkpoints.read(engine.checkpoints.load, to.path, None)
        states = checkpoints.process_states_in(checkpoint)
        apart = (Checkpoint, Timer)  # they count written files and time, which are not rolled back
        callbacks = [callback for callback in run.callbacks if not isinstance(callback, apart)]
        state = states[run.global_rank]
        checkpoints.roll_back(run, checkpoint, state, callbacks, contents.load_training)
        return to

    def _newest_until(self, max_step: int) -> RolledBack | None:
        """Return the newest good checkpoint of this run with at most ``max_step`` optimizer steps, or None."""
        wait_for_saves(self.trainer.strategy)
        for path in files.newest_first(model_checkpoints.folders_with_files(self.trainer)):
            progress = resuming.loops_in(path).get(checkpoints.TRAINER_KEY, {}).get("progress")
            if progress is None or progress["optimizer_steps"] > max_step:
                continue
            with suppress(CheckpointError):  # skip a damaged checkpoint
                is_valid, manifest = files.verify(path), files.read_manifest(path)
                if is_valid and (manifest is None or manifest.resumable):  # not with weights only
                    epoch, batch_idx = progress["epoch"], progress["batch_idx"] + 1
                    if batch_idx and progress.get("is_last_batch"):
                        epoch, batch_idx = epoch + 1, 0
                    return RolledBack(str(path), progress["optimizer_steps"], epoch, batch_idx)
        return None

    def forget(self) -> None:
        """Log which checkpoint was restored, and free its memory."""
        run, path = self._run, redaction.text(str(self._ckpt_path))
        if self._loaded_checkpoint and not run.fits:
            rank_zero_info(f"Loaded model weights from the checkpoint at {path}")
        elif self._loaded_checkpoint and run.is_global_zero:
            logging.getLogger("lightning.pytorch.advice").info(  # the command line also prints this logger
                f"Restored all states from the checkpoint at {path}: epoch {run.epoch}, step {run.global_step}"
            )
        self._loaded_checkpoint, self._states = {}, []

    def _note_foreign(self) -> None:
        """Record each ``best_model_path`` of a restored callback that is outside the folders of the run.

        The folders of the run are those of its ModelCheckpoints, and the one that the checkpoint was read from.
        """
        callbacks: list[Any] = list(self.trainer.checkpoint_callbacks)
        folders = [callback.dirpath for callback in callbacks if getattr(callback, "dirpath", None)]
        folders.append(os.path.dirname(str(self._ckpt_path)))
        for callback in callbacks:
            best = getattr(callback, "best_model_path", "")
            if best and not any(_is_inside(best, folder) for folder in folders):
                self._foreign[str(best)] = str(self._ckpt_path)

    def _refuse_foreign(self, path: str) -> None:
        if path in self._foreign:
            fn = self._run.fn
            assert fn is not None
            raise ConfigurationError(
                f"The best checkpoint is {redaction.text(path)}, according to {redaction.text(self._foreign[path])},"
                " from which this run was resumed; but it is not in a folder of this run, and a checkpoint may"
                " contain any path. To use it, pass its path:"
                f" `.{fn.value}(ckpt_path={redaction.text(path)!r})`."
            )

    def _get_loops_state_dict(self) -> dict[str, Any]:
        return loop_state.loops_of(self._run)

    def restore_callbacks(self) -> None:
        """Restore the states of the callbacks."""
        super().restore_callbacks()
        _call_callbacks_load_state_dict(self.trainer, self._trainer_state)

    def restore_loops(self) -> None:
        """Restore the counters."""
        super().restore_loops()
        if self._run.fits and "progress" in self._trainer_state:
            self._run.progress.load_state_dict(self._trainer_state["progress"])

    @property
    def _trainer_state(self) -> dict[str, Any]:
        """The entries of the loaded checkpoint that Lightning's format lacks."""
        trainer_state: dict[str, Any] = self._loaded_checkpoint.get("loops", {}).get(checkpoints.TRAINER_KEY, {})
        return trainer_state

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Return a checkpoint of the current state."""
        run, scope = self._run, HookScope(self._run.module)
        run.loop.resolve_outcome()
        averaging.follow(run)
        outer = scope.enter("on_save_checkpoint")
        checkpoint = contents.dump(run, weights_only=bool(weights_only))
        scope.enter(outer)
        return checkpoint

    @contextmanager
    def saving_to(self, path: str | Path) -> Iterator[None]:
        """Return a context that sets ``path`` as the destination of the checkpoint from :meth:`dump_checkpoint`."""
        run = self._run
        before, run.destination = run.destination, os.fspath(path)
        try:
            yield
        finally:
            run.destination = before

    def resume_start(self, checkpoint_path: str | Path | None = None, weights_only: bool | None = None) -> None:
        """Read a checkpoint for the methods that restore parts of it."""
        self._ckpt_path = checkpoint_path
        if checkpoint_path:
            self._loaded_checkpoint = checkpoints.read(self._engine.checkpoints.load, checkpoint_path, weights_only)

    def restore(self, checkpoint_path: str | Path | None = None, weights_only: bool | None = None) -> None:
        """Restore all entries of a checkpoint of this run."""
        if not checkpoint_path:
            return
        run = self._run
        engine = self._engine
        checkpoint = checkpoints.read(engine.checkpoints.load, checkpoint_path, weights_only)
        engine.collectives.barrier("restore")  # after this, rank 0 may remove the file, as a tuner does
        contents.load_before_setup(run, checkpoint)
        if not run.fits:
            return
        if "lr_schedulers" in checkpoint and len(checkpoint["lr_schedulers"]) != len(engine.schedules):
            checkpoint["lr_schedulers"] = []  # a finder has failed and left its own schedule; its error is reported
            engine.schedules.clear()
        contents.load_training(run, checkpoint)


def _is_inside(path: str, folder: str) -> bool:
    place, home = local_path(path), local_path(folder)
    if place is None or home is None:
        return str(path).startswith(f"{str(folder).rstrip('/')}/") and "/../" not in str(path)
    return Path(os.path.realpath(place)).is_relative_to(os.path.realpath(home))
