"""``Trainer(resume="auto")``: continue the previous run when the same command runs again."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from trainer.checkpoint import loading as checkpoints
from trainer.checkpoint import reading as files
from trainer.checkpoint import sharded_files
from trainer.checkpoint.checkpoint_io import wait_for_saves
from trainer.checkpoint.folder_locks import lock_folder
from trainer.checkpoint.inert import load_inert
from trainer.checkpoint.loading import TRAINER_KEY
from trainer.checkpoint.model_checkpoints import allow_removal, folders_of, folders_with_files, on_first_rank
from trainer.common.files import local_path
from trainer.common.session import Session
from trainer.errors import ConfigurationError, rank_zero_warn
from trainer.loggers import adapter
from trainer.loggers.numbered import CSV
from trainer.loop.run_state import RunState

_ROWS = "rows"
_CHECKPOINTS = "checkpoints/**/*.ckpt"  # below the folder of a logger: the default of ModelCheckpoint


def newest_checkpoint(run: RunState, session: Session, extra: Any = None) -> str | None:
    """Return the newest good checkpoint in the folders of this run or at the local path ``extra``, or None.

    The result is the same on all ranks.

    The folders are locked first, until ``session`` closes. Loggers that number their folders get the number of the run
    that wrote the checkpoint. Known loggers continue the files of that run, or its run in W&B or MLflow.

    Raises:
        FolderInUseError: if another run has locked one of the folders.
        ConfigurationError: if the folders are not in local file systems.
    """
    path, versions = on_first_rank(run.collectives, lambda: _choose_checkpoint(run, session, extra))
    for index, version in versions.items():
        adapter(run.loggers[index]).use_version(version)
    if path is not None:
        allow_removal(run.trainer, session)
        rank_zero_info(f"resume='auto': resuming from {path}")
        _continue_logs(run, path)
    return path


def keep_rows(run: RunState, path: str | Path) -> None:
    """Let CSV loggers with a fixed folder append to the rows before a checkpoint. Lightning's delete the file."""
    _continue_logs(run, path, lambda logger: isinstance(logger, CSV) and not logger.is_numbered and not logger.is_open)


def _continue_logs(run: RunState, path: str | Path, chosen: Callable[[Any], bool] = lambda _: True) -> None:
    if run.is_global_zero:
        step, places = _place_in_logs(path)
        for logger, place in zip_longest(run.loggers, places[: len(run.loggers)]):
            if chosen(adapted := adapter(logger)):
                adapted.resume(step, place)


def _choose_checkpoint(run: RunState, session: Session, extra: Any) -> tuple[str | None, dict[int, Any]]:
    """Return the checkpoint, and the version of each numbered logger."""
    trainer, engine = run.trainer, run.engine
    numbered = {index: logger for index, logger in enumerate(map(adapter, run.loggers)) if logger.is_numbered}
    former = None
    if 0 in numbered:  # the folder of the first logger holds the checkpoints
        former = numbered[0].newest_version(_CHECKPOINTS)
        numbered[0].use_version(former)
    folders = folders_of(trainer)
    if not folders:
        rank_zero_warn("resume='auto', but there is no ModelCheckpoint, so the run cannot be resumed later.")
    if remote := [folder for folder in folders if local_path(folder) is None]:
        raise ConfigurationError(
            f"Got resume='auto' with checkpoints in {remote[0]}, expected local folders. Pass the URL of the"
            " checkpoint: fit(ckpt_path=...)."
        )
    wait_for_saves(trainer.strategy)
    for folder in folders:
        if os.path.isdir(folder):
            session.enter_context(lock_folder(folder))
    others = [] if extra is None or local_path(extra) is None else [Path(extra)]
    path = files.newest_valid(
        folders_with_files(trainer), lambda file: checkpoints.read(engine.checkpoints.load, file, None), others
    )
    if path is None:
        if folders:
            rank_zero_info(f"resume='auto': no checkpoint in {', '.join(folders)}: starting from the beginning")
        return None, dict.fromkeys(numbered)
    versions = {index: logger.newest_version() for index, logger in numbered.items()}
    return str(path), versions if former is None else {**versions, 0: former}


def places_to_save(run: RunState) -> list[Any] | None:
    """Return the position of each logger in its files, where a resumed run continues.

    None on ranks other than 0, and for a checkpoint that is not written to a file.
    """
    if run.destination is None:
        return None
    # with Trainer(resume=...), write the files of all loggers; `position` writes only those of CSV loggers
    for logger in run.loggers if run.resume else ():
        logger.save()
    return [adapter(logger).position() for logger in run.loggers] if run.is_global_zero else None


def _place_in_logs(path: str | Path) -> tuple[int | None, list[int | str | None]]:
    """Return the step of the next row after the checkpoint ``path``, and the position of each logger."""
    with suppress(Exception):  # a file of another format may raise any error, which is reported when it is loaded
        loops = loops_in(path)
        if TRAINER_KEY not in loops:
            return int(loops["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"]), []
        trainer_state, progress = loops[TRAINER_KEY], loops[TRAINER_KEY]["progress"]
        step = progress["updates"] + progress["closing"]  # a window that closes has sent its row
        return int(step), list(trainer_state.get(_ROWS, []))
    return None, []


def loops_in(path: str | Path) -> dict[str, Any]:
    """Return the ``loops`` entry of a checkpoint without reading its tensors; {} if it cannot be read in parts."""
    with suppress(Exception):  # the error is reported when it is loaded
        folder = sharded_files.folder_at(path)
        source: Path | BytesIO = Path(path)
        if folder is not None:
            place = sharded_files.folder_of_files(folder, sharded_files.read_manifest(folder))
            source = BytesIO(sharded_files.read_bytes(place, sharded_files.STATE))
        loops: dict[str, Any] = load_inert(source, mmap=folder is None)["loops"]
        return loops
    return {}
