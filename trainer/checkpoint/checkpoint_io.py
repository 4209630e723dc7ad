"""Lightning's CheckpointIO for files that are written atomically, verified when read, and not removed too early."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_object_storage, get_filesystem
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint

from trainer.checkpoint import reading as files
from trainer.checkpoint import sharded_files
from trainer.checkpoint.host_copy import on_host
from trainer.checkpoint.inert import allow_stand_ins
from trainer.checkpoint.manifest import facts_of
from trainer.common.files import local_path
from trainer.errors import CheckpointError, CheckpointWriteError, ConfigurationError, expect, rank_zero_warn

_LAUNCHER_FILE = ".temp.ckpt"  # file that Lightning's launchers use to return weights to the main process

_LIGHTNING_METHODS = {
    name: getattr(TorchCheckpointIO, name) for name in ("save_checkpoint", "load_checkpoint", "remove_checkpoint")
}

Identity = tuple[int, int, int]

VERSION_KEY = "pytorch-lightning_version"


class CheckpointFiles(TorchCheckpointIO):
    """Writes, reads and removes checkpoints. The default of a Trainer without another checkpoint IO plugin.

    A local file is written to a temporary file in the same folder, synchronized to disk and renamed. The manifest at
    the end of the file (:mod:`trainer.checkpoint.reading`) is used to verify the file before it is read.
    Only checkpoints of this run are removed, except the last good one. Remote files (``s3://...``) are written as in
    Lightning, with the manifest. Of remote folders, only the manifest and the sizes of the files are verified.

    Args:
        sharded: if True, a checkpoint is a folder, and each process writes its own part
            (:mod:`trainer.checkpoint.shards`). Any number of processes and any strategy can load it. Default: False,
            one file in Lightning's format.
        asynchronous: write in the background. Saving copies the state to host memory and returns. The next save,
            loading, and the end of the run wait for the write, and raise its errors. Removals run after the write.
            Default: False.
        when_full: the behavior if the disk is full: ``"stop"`` raises, ``"continue"`` warns and trains on. In both
            cases the older files are kept, including those that the new one was to replace. A ModelCheckpoint is
            not notified: its ``best_model_path`` may name a missing file until the next one is written. Default:
            ``"stop"``.

    Raises:
        ConfigurationError: if ``when_full`` is unknown.
    """

    def __init__(
        self, *, sharded: bool = False, asynchronous: bool = False, when_full: Literal["stop", "continue"] = "stop"
    ) -> None:
        expect(when_full in ("stop", "continue"), "'stop' or 'continue'", when_full=when_full)
        super().__init__()
        self.sharded = sharded
        self.asynchronous = asynchronous
        self.when_full = when_full
        self._folders: tuple[Path, ...] = ()  # the folders of the run's checkpoints
        self._urls: tuple[str, ...] = ()
        self._own: set[str] = set()  # files of the run in any folder
        self._good: dict[Path, Identity] = {}  # files that were verified, with their identities at that time
        self._disk_full = False  # the last save failed, usually because the disk was full
        self._writer: ThreadPoolExecutor | None = None
        self._pending: list[Future[list[str]]] = []  # a save, and the removals after it
        # whether files are memory-mapped, because each process needs only parts of their tensors
        self.maps_files = False
        self._stager: Any = None  # keeps the host memory of the last save for the next

    def belong(self, folders: Iterable[str | Path], others: Iterable[str | Path]) -> None:
        """Set which checkpoints belong to the run and may be removed.

        Args:
            folders: the folders of its checkpoints, paths or URLs; in local ones the last good checkpoint is kept.
            others: files of the run in other folders, paths or URLs.
        """
        self.wait()
        folders = list(folders)
        self._folders = tuple(Path(os.path.realpath(place)) for folder in folders if (place := local_path(folder)))
        self._urls = tuple(str(folder) for folder in folders if local_path(folder) is None)
        self._own |= {_name(file) for file in others}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``checkpoint`` to ``path``, a path or a URL.

        Raises:
            TypeError: if ``storage_options`` are given, because they are not supported.
            CheckpointWriteError: if the disk is full, or the folder cannot be written to.
        """
        if _is_patched("save_checkpoint") or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        self.wait()
        copied = checkpoint
        if self.asynchronous:
            with suppress(Exception):  # an object among the hyperparameters may be picklable, but not copyable
                copied = on_host(checkpoint)
        self._submit(self._save, copied, path)
        if copied is checkpoint:
            self.wait()  # the state must not change before it is written

    def save_shards(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        group: Any,
        save: Callable[[Path, Any], None] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint as a folder; each process writes its part. All processes call this together.

        Args:
            checkpoint: the checkpoint of this process. Its ``DTensor`` objects and those of the other processes are
                shards of the same tensors.
            path: a folder in a file system that all processes share, or a URL (``s3://...``).
            group: the gloo group of the processes, for this use only. None for this process alone.
            save: writes further tensors, synchronously; see :func:`trainer.checkpoint.shards.write`. Default: None,
                DCP writes all tensors.
            facts: additional entries of the manifest. Default: None.

        Raises:
            ConfigurationError: if the path is a URL and there is ``save``.
            CheckpointWriteError: if the disk is full, or the folder cannot be written to; raised on all processes.
        """
        from trainer.checkpoint import shards  # importing DCP takes 0.1 s

        place = local_path(path) or str(path).rstrip("/")
        if save is not None and not isinstance(place, Path):
            raise ConfigurationError(
                f"Got CheckpointFiles(sharded=True) and a checkpoint at {path} with DeepSpeed, which writes its files"
                " itself; expected a folder of this machine's file systems. Write there, or use sharded=False."
            )
        tree, tensors, processes = shards.split_for_write(checkpoint, 0 if group is None else group.rank())
        rest, copied = (tree, processes), None
        if self.asynchronous:
            tensors = self._stage(tensors)
            with suppress(Exception):  # see `save_checkpoint`
                copied = on_host(rest)
        facts = {**facts_of(checkpoint), **(facts or {})}
        self._submit(self._save_shards, *(copied or rest), tensors, facts, place, group, save)
        if copied is None:
            self.wait()

    def _stage(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy this process's parts to host memory. The memory is kept for the next save."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if self._stager is None:
            on_gpu = any(tensor.is_cuda for tensor in tensors.values())
            self._stager = DefaultStager(StagingOptions(on_gpu, False, False, on_gpu))
        staged: dict[str, torch.Tensor] = self._stager.stage(tensors)  # a host-device synchronization
        return staged

    def _save_shards(
        self,
        tree: Any,
        states: dict[int, Any],
        tensors: Any,
        facts: dict[str, Any],
        place: str | Path,
        group: Any,
        save: Any,
    ) -> list[str]:
        from trainer.checkpoint import shards

        try:
            shards.write(place, tree, tensors, states, facts, group, save)
        except OSError as error:
            needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            return self._note_failure(files.write_error(place, error, needed))
        except RuntimeError as error:
            raise CheckpointWriteError(f"The checkpoint {place} was not written: {error}") from error
        return self._note_saved(place, place if isinstance(place, Path) else None)

    def wait(self) -> None:
        """Wait for writes in the background.

        Raises:
            CheckpointWriteError: if a checkpoint was not written.
        """
        while self._pending:
            for warning in self._pending.pop(0).result():
                rank_zero_warn(warning)

    def teardown(self) -> None:
        """Wait for writes in the background, and end their thread.

        Raises:
            CheckpointWriteError: if a checkpoint was not written. If the run ends because of another error, a warning
                is issued instead.
        """
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.shutdown()
        self._stager = None
        is_failing = sys.exc_info()[0] is not None
        try:
            self.wait()
        except CheckpointWriteError as error:
            if not is_failing:
                raise
            rank_zero_warn(str(error))

    def __getstate__(self) -> dict[str, Any]:
        self.wait()
        return {**vars(self), "_writer": None, "_stager": None}

    def _submit(self, work: Callable[..., list[str]], *arguments: Any) -> None:
        """Call ``work``, which returns warnings, at once or in the background after earlier work."""
        if not self.asynchronous:
            for warning in work(*arguments):
                rank_zero_warn(warning)
            return
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "checkpoints")
        self._pending.append(self._writer.submit(work, *arguments))

    def _save(self, checkpoint: dict[str, Any], path: str | Path) -> list[str]:
        save, facts = _save_function(checkpoint), facts_of(checkpoint)
        local = local_path(path)
        try:
            if local is None:
                _upload(save, path, facts)
            else:
                files.write(save, local, facts)
        except CheckpointWriteError as error:
            return self._note_failure(error)
        return self._note_saved(path, local)

    def _note_failure(self, error: CheckpointWriteError) -> list[str]:
        self._disk_full = True
        if error.errno not in files.FULL or self.when_full == "stop":
            raise error
        return [f"{error} Training continues without it."]

    def _note_saved(self, path: str | Path, local: Path | None) -> list[str]:
        self._disk_full = False
        self._own.add(_name(path))
        if local is not None:
            self._remember(local)
        return []

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | Any = "cpu",
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint; a local file is verified first.

        Args:
            path: a path or a URL.
            map_location: as in ``torch.load``; ignored if the file is memory-mapped. Default: ``"cpu"``.
            weights_only: None and True load tensors and plain containers only. Default: None.

        Raises:
            FileNotFoundError: if there is no such file.
            CheckpointError: if the file is damaged.
            pickle.UnpicklingError: if ``weights_only`` is not False and the file holds other objects.
        """
        if _is_patched("load_checkpoint"):
            patched: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            return patched
        self.wait()
        local = local_path(path)
        if local is not None and local.is_file():
            files.verify(local)
            self._remember(local)
            if self.maps_files and files.read_manifest(local) is not None:
                mapped: dict[str, Any] = torch.load(
                    local, map_location="cpu", weights_only=weights_only is not False, mmap=True
                )
                return mapped
        return super().load_checkpoint(path, map_location, weights_only is not False)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint of this run. Any other file, and the last good checkpoint, are kept, with a warning."""
        if _is_patched("remove_checkpoint"):
            super().remove_checkpoint(path)
        else:
            self._submit(self._remove, path)

    def _remove(self, path: str | Path) -> list[str]:
        local, name = local_path(path), _name(path)
        if not (get_filesystem(path).exists(path) if local is None else os.path.lexists(local)):
            return []
        if reason := self._reason_to_keep(local, name):
            return [f"{path} was to be removed as an old checkpoint, and is kept: {reason}"]
        if local is None and sharded_files.folder_at(path) is not None:
            sharded_files.remove_remote(str(path))
        elif local is None:
            super().remove_checkpoint(path)
        elif local.is_dir() and not local.is_symlink():
            sharded_files.remove(local)
        else:
            local.unlink()
        return []

    def _reason_to_keep(self, local: Path | None, name: str) -> str:
        """Return the reason to keep a file, as a sentence; "" if it may be removed."""
        if local is None:
            inside = any(name.startswith(f"{folder.rstrip('/')}/") for folder in self._urls) and "/../" not in name
        else:
            inside = any(folder in Path(name).parents for folder in self._folders)
        if not inside and name not in self._own and not name.endswith(f"/{_LAUNCHER_FILE}"):
            return (
                "it is not in a folder that this run writes checkpoints to. A checkpoint that the run was resumed from"
                " may have named it."
            )
        if local is None or local.is_symlink():
            return ""
        if local.is_dir() and not (local / sharded_files.MANIFEST).is_file():
            return "it is a folder, but not a checkpoint."
        if not inside or local.name.startswith("."):
            return ""
        if self._disk_full:
            return "the one that should have taken its place could not be written."
        return "there is no other good one." if self._is_last(Path(name)) else ""

    def _is_last(self, path: Path) -> bool:
        """Return whether ``path`` is the only good checkpoint in the folders of the run."""
        others = (other for other in [*self._good, *files.newest_first(self._folders)] if other != path)
        return not any(self._is_good(other) for other in others) and self._is_good(path)

    def _is_good(self, path: Path) -> bool:
        if not any(folder in path.parents for folder in self._folders):
            return False
        try:
            manifest = files.read_manifest(path)
            if manifest is not None and not manifest.resumable:
                return False
            if self._good.get(path) != _identity(path):
                files.verify(path)
                self._remember(path)
        except (CheckpointError, OSError):
            return False
        return True

    def _remember(self, path: Path) -> None:
        """Record that ``path`` is good, so that it is not verified again while it does not change."""
        self._good[path.resolve()] = _identity(path)


def _is_patched(name: str) -> bool:
    """Return whether a program has replaced a method of ``TorchCheckpointIO``, Lightning's default."""
    return getattr(TorchCheckpointIO, name) is not _LIGHTNING_METHODS[name]


def adopt(strategy: Strategy) -> None:
    """Set a `CheckpointFiles` as the checkpoint IO of ``strategy``, unless the user has chosen another one."""
    if type(strategy).checkpoint_io is not Strategy.checkpoint_io:
        return  # the strategy has its own checkpoint IO
    given = strategy._checkpoint_io
    if given is None:
        strategy.checkpoint_io = CheckpointFiles()
    elif isinstance(given, _WrappingCheckpointIO) and given.checkpoint_io is None:
        given.checkpoint_io = CheckpointFiles()  # AsyncCheckpointIO() without an argument


def files_of(strategy: Strategy) -> CheckpointFiles | None:
    """Return the `CheckpointFiles` of ``strategy``, even inside a wrapper, or None if it uses another checkpoint IO."""
    io: Any = strategy.checkpoint_io
    while isinstance(io, _WrappingCheckpointIO):
        io = io.checkpoint_io
    return io if isinstance(io, CheckpointFiles) else None


def wait_for_saves(strategy: Strategy) -> None:
    """Wait for writes in the background of a `CheckpointFiles` or of Lightning's `AsyncCheckpointIO`.

    Raises:
        CheckpointWriteError: if a checkpoint was not written.
    """
    if isinstance(strategy.checkpoint_io, AsyncCheckpointIO):
        strategy.checkpoint_io.teardown()  # the next save starts another thread
    if (files_io := files_of(strategy)) is not None:
        files_io.wait()


@contextmanager
def without_objects(strategy: Strategy, path: str | Path) -> Iterator[None]:
    """Replace the objects among the hyperparameters by stand-ins when ``strategy`` reads the checkpoint ``path``.

    A checkpoint on the web (``http://...``) is read without stand-ins, because otherwise it would be downloaded twice.
    """
    wait_for_saves(strategy)
    with ExitStack() as opened:
        if not str(path).startswith("http"):
            with suppress(Exception):  # on any file system; reading the file reports the error
                file = opened.enter_context(get_filesystem(path).open(str(path), "rb"))
                opened.enter_context(allow_stand_ins(file))
        yield


def _name(path: str | Path) -> str:
    """Return the canonical name of a file. A link is not resolved."""
    local = local_path(path)
    return str(path) if local is None else os.path.join(os.path.realpath(local.parent), local.name)


def _identity(path: Path) -> Identity:
    stats = [file.stat() for file in ([path, *path.iterdir()] if path.is_dir() else [path])]
    return stats[0].st_ino, sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats)


def _save_function(checkpoint: Any) -> Callable[[Any], None]:
    """Return a function that writes ``checkpoint`` into a stream with the current ``torch.save``."""
    if torch.save is torch.serialization.save:
        return partial(torch.save, checkpoint)

    def save(stream: Any) -> None:
        buffer = BytesIO()  # a replacement of `torch.save` receives the arguments that Lightning passes
        torch.save(checkpoint, buffer)
        stream.write(buffer.getbuffer())

    return save


def _upload(save: Callable[[Any], None], path: str | Path, facts: dict[str, Any]) -> None:
    """Write to a remote file system, atomically if the file system supports it."""
    buffer = BytesIO()
    stream = files.SealingStream(buffer, facts)
    save(stream)
    stream.seal()
    file_system, place = url_to_fs(str(path))
    file_system.makedirs(os.path.dirname(place), exist_ok=True)
    with file_system.transaction:  # a temporary file and a move, on file systems with transactions
        if _is_object_storage(file_system) and "abfs" not in file_system.protocol:  # `pipe` is slower on abfs
            file_system.pipe(place, buffer.getvalue())
        else:
            with file_system.open(place, "wb") as file:
                file.write(buffer.getbuffer())


def up_to_date(checkpoint: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Migrate ``checkpoint`` in place to the format of the installed Lightning, if an older version wrote it."""
    is_lightnings = isinstance(checkpoint, dict) and VERSION_KEY in checkpoint
    return _pl_migrate_checkpoint(checkpoint, path) if is_lightnings else checkpoint
