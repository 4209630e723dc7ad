"""Choose the file for ``ckpt_path``, and restore the run from it, through Lightning's checkpoint connector."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch.callbacks import Checkpoint, ModelPruning, Timer
from lightning.pytorch.trainer.call import _call_callbacks_load_state_dict
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
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
from trainer.module_weights import load_into
from trainer.record.find_checkpoint import find_weights

if TYPE_CHECKING:
    from trainer.trainer import Trainer

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

    trainer: Trainer

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._has_order = True  # False if the sample order cannot be restored
        self._is_chosen = False  # by the user
        self._foreign: dict[str, str] = {}  # by `best_model_path`: the checkpoint that contains it
        self._weights: Path | None = None  # of another run, to start with
        self._states: list[dict[str, Any]] = []  # of the processes that saved the loaded checkpoint
        self.destination: str | None = None  # of the checkpoint that is being saved
        # while a ModelCheckpoint is called: returns copies of it and of the following ones after this point
        self.savers_after: Callable[[], dict[Any, Any]] = dict

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
        trainer, is_assigned = self.trainer, self._user_managed and not given
        if weights is not None and (given or is_assigned):
            raise ConfigurationError(
                f"Got ckpt_path={redaction.text(str(given or self._ckpt_path))!r} and weights={str(weights)!r},"
                " expected one of them: ckpt_path resumes a run with its optimizers and counters; weights initializes"
                " a new run."
            )
        self._weights = None if weights is None else find_weights(weights)
        if trainer.state.fn is TrainerFn.FITTING:
            trainer.loaded_weights = None
        if given and _is_registry(given) and module_available("litmodels"):
            download_model_from_registry(given, trainer)
        try:
            assert trainer.state.fn is not None
            path = self._select_ckpt_path(trainer.state.fn, given, model_provided=model_given, model_connected=True)
        except ValueError as error:
            advice = "Add ModelCheckpoint(monitor=...) to the callbacks, or pass the path of a file."
            if given == "hpc":
                advice = f"Expected a file hpc_ckpt_*.ckpt in {trainer.default_root_dir}."
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
            self._ckpt_path = resuming.newest_checkpoint(self.trainer, session, self._ckpt_path)

    def keep_rows(self) -> None:
        """Let CSV loggers keep their rows from before the checkpoint that the user has chosen for a fit."""
        if self._is_chosen and self._ckpt_path is not None and self.trainer.state.fn is TrainerFn.FITTING:
            resuming.keep_rows(self.trainer, self._ckpt_path)

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
            cluster.check_shared(self.trainer.engine, path.exists, subject)
        self.resume_start(self._ckpt_path, weights_only)
        with self._program_restored():
            contents.load(self.trainer, self._loaded_checkpoint, "set-up")
        self._note_foreign()

    @contextmanager
    def _program_restored(self) -> Iterator[None]:
        """Return a context in which the user's objects are restored, because what a hook sets in it is kept."""
        trainer = self.trainer
        if trainer.state.fn is not TrainerFn.FITTING:
            yield
            return
        self._states = checkpoints.process_states_in(self._loaded_checkpoint)
        state = (self._states[trainer.global_rank :] or self._states or [{}])[0]
        with trainer.process.restored_for_hooks(snapshot_of(trainer), state):
            yield

    def _begin_with_weights(self, weights_only: bool | None) -> None:
        """Load the weights of another run that a fit starts with, and report the loaded and the missing ones."""
        trainer, engine = self.trainer, self.trainer.engine
        if self._weights is None:
            return
        # broadcast, because the other run may write a new best checkpoint meanwhile
        file = Path(engine.broadcast(str(self._weights)))
        loaded = load_into(trainer.lightning_module, file, engine.load_module_state, weights_only, engine.template)
        averaging.follow(trainer)
        trainer.loaded_weights = loaded
        if trainer.is_global_zero:
            report = logging.getLogger("lightning.pytorch.advice").info if loaded.complete else log.warning
            report("%s", redaction.text(str(loaded)))

    def restore_fit(self) -> dict[str, Any] | None:
        """Restore counters, optimizers and schedules. Return the checkpoint's state of this process, or None.

        Raises:
            ConfigurationError: if the checkpoint has more epochs than ``max_epochs``.
            ResumeError: if the resume cannot be exact and ``exact_resume`` is True.
        """
        trainer, checkpoint = self.trainer, self._loaded_checkpoint
        if not checkpoint:
            trainer.progress.restart_epoch()
            return None
        if trainer.is_global_zero:
            where, given = (" in another folder", "resume") if trainer.resume else ("", "ckpt_path")
            advice = f"start a new run{where} with weights={redaction.text(str(self._ckpt_path))!r} instead of {given}"
            resumed_settings.announce_restored(trainer, checkpoint, advice)
        contents.load(trainer, checkpoint, "training")
        if loops := checkpoint.get("loops"):
            loop_state.evaluation_from(loops["fit_loop"], trainer)
            loop_state.resume_validation(trainer)
        if trainer.max_epochs not in (None, -1) and trainer.current_epoch > trainer.max_epochs:
            raise ConfigurationError(
                f"You restored a checkpoint with current_epoch={trainer.current_epoch}, but you have set"
                f" Trainer(max_epochs={trainer.max_epochs}). Set max_epochs to the total number of epochs."
            )
        state = self._process_state(checkpoint)
        position = loop_state.data_position_in(checkpoint, trainer.progress, trainer.max_steps != -1)
        prunes = any(isinstance(callback, ModelPruning) for callback in trainer.callbacks)
        if state is not None and prunes and not trainer.loop.limits.ends_fit():
            problem = (
                "A resume with ModelPruning is not exact: the checkpoint has the pruned weights, but not the masks, so"
                " these weights are trained until the callback prunes again."
            )
            refuse_inexact(problem, exact=trainer.exact_resume)
        if state is not None or position:
            trainer.data.resumed = (state or {}).get("data") or position
        if state is not None:
            trainer.data.resumed_validation = state.get("evaluation", {}).get("validation", {})
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
        if elastic.is_elastic(self.trainer, trainer_state):
            self._has_order = bool(self._translated(elastic.prepare, trainer_state))

    def _process_state(self, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
        """Return the checkpoint's state of this process, translated if it is from another number of processes, or None.

        Raises:
            ResumeError: if it cannot be translated and ``exact_resume`` is True.
        """
        trainer = self.trainer
        states = self._states
        if not states or not elastic.is_elastic(trainer, self._trainer_state):
            return states[trainer.global_rank] if states else None
        if self._has_order and trainer.data.elastic_state is None:  # `prepare_order` could not read the file in parts
            self._has_order = bool(self._translated(elastic.prepare, self._trainer_state))
        return self._translated(elastic.resume, self._trainer_state, states) if self._has_order else None

    def _translated(self, translate: Callable[..., Any], trainer_state: dict[str, Any], *states: Any) -> Any:
        """Return the result of ``translate``; None, with a warning, if it fails and the resume need not be exact."""
        trainer = self.trainer
        try:
            return translate(trainer, trainer_state, *states)
        except ResumeError as error:
            problem = (
                f"The checkpoint is of a run with world size {elastic.written_by(trainer_state)}, but this run has"
                f" world size {trainer.world_size}: each update would get other samples. Reason: {error}."
            )
        refuse_inexact(problem, "Resume with the same number.", exact=trainer.exact_resume)
        trainer.data.drop_sample_order()
        return None

    def roll_back(self, max_step: int) -> RolledBack | None:
        """Implement ``Trainer.roll_back``."""
        trainer, to = self.trainer, model_checkpoints.on_first_rank(self.trainer, partial(self._newest_until, max_step))
        if to is None:
            return None
        checkpoint = checkpoints.read(trainer.engine.load, to.path, None)
        states = checkpoints.process_states_in(checkpoint)
        apart = (Checkpoint, Timer)  # they count written files and time, which are not rolled back
        callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, apart)]
        state = states[trainer.global_rank]
        checkpoints.roll_back(trainer, checkpoint, state, callbacks, partial(contents.load, moment="training"))
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
        trainer, path = self.trainer, redaction.text(str(self._ckpt_path))
        if self._loaded_checkpoint and trainer.state.fn is not TrainerFn.FITTING:
            rank_zero_info(f"Loaded model weights from the checkpoint at {path}")
        elif self._loaded_checkpoint and trainer.is_global_zero:
            logging.getLogger("lightning.pytorch.advice").info(  # the command line also prints this logger
                f"Restored all states from the checkpoint at {path}: epoch {trainer.current_epoch}, step"
                f" {trainer.global_step}"
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
            assert self.trainer.state.fn is not None
            raise ConfigurationError(
                f"The best checkpoint is {redaction.text(path)}, according to {redaction.text(self._foreign[path])},"
                " from which this run was resumed; but it is not in a folder of this run, and a checkpoint may"
                " contain any path. To use it, pass its path:"
                f" `.{self.trainer.state.fn.value}(ckpt_path={redaction.text(path)!r})`."
            )

    def _get_loops_state_dict(self) -> dict[str, Any]:
        return loop_state.loops_of(self.trainer)

    def restore_callbacks(self) -> None:
        """Restore the states of the callbacks."""
        super().restore_callbacks()
        _call_callbacks_load_state_dict(self.trainer, self._trainer_state)

    def restore_loops(self) -> None:
        """Restore the counters."""
        super().restore_loops()
        if self.trainer.state.fn is TrainerFn.FITTING and "progress" in self._trainer_state:
            self.trainer.progress.load_state_dict(self._trainer_state["progress"])

    @property
    def _trainer_state(self) -> dict[str, Any]:
        """The entries of the loaded checkpoint that Lightning's format lacks."""
        trainer_state: dict[str, Any] = self._loaded_checkpoint.get("loops", {}).get(checkpoints.TRAINER_KEY, {})
        return trainer_state

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Return a checkpoint of the current state."""
        trainer, scope = self.trainer, HookScope(self.trainer.lightning_module)
        trainer.loop.resolve_outcome()
        averaging.follow(trainer)
        outer = scope.enter("on_save_checkpoint")
        checkpoint = contents.dump(trainer, weights_only=bool(weights_only))
        scope.enter(outer)
        return checkpoint

    @contextmanager
    def saving_to(self, path: str | Path) -> Iterator[None]:
        """Return a context that sets ``path`` as the destination of the checkpoint from :meth:`dump_checkpoint`."""
        before, self.destination = self.destination, os.fspath(path)
        try:
            yield
        finally:
            self.destination = before

    def resume_start(self, checkpoint_path: str | Path | None = None, weights_only: bool | None = None) -> None:
        """Read a checkpoint for the methods that restore parts of it."""
        self._ckpt_path = checkpoint_path
        if checkpoint_path:
            self._loaded_checkpoint = checkpoints.read(self.trainer.engine.load, checkpoint_path, weights_only)

    def restore(self, checkpoint_path: str | Path | None = None, weights_only: bool | None = None) -> None:
        """Restore all entries of a checkpoint of this run."""
        if not checkpoint_path:
            return
        trainer = self.trainer
        checkpoint = checkpoints.read(trainer.engine.load, checkpoint_path, weights_only)
        trainer.engine.barrier("restore")  # after this, rank 0 may remove the file, as a tuner does
        contents.load(trainer, checkpoint, "set-up")
        if trainer.state.fn is not TrainerFn.FITTING:
            return
        if "lr_schedulers" in checkpoint and len(checkpoint["lr_schedulers"]) != len(trainer.engine.schedules):
            checkpoint["lr_schedulers"] = []  # a finder has failed and left its own schedule; its error is reported
            trainer.engine.schedules.clear()
        contents.load(trainer, checkpoint, "training")


def _is_inside(path: str, folder: str) -> bool:
    place, home = local_path(path), local_path(folder)
    if place is None or home is None:
        return str(path).startswith(f"{str(folder).rstrip('/')}/") and "/../" not in str(path)
    return Path(os.path.realpath(place)).is_relative_to(os.path.realpath(home))
