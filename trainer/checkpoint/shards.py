"""Sharded checkpoints: folders that all processes write, with ``torch.distributed.checkpoint`` (DCP).

==================  ==================================================================================================
``__0_0.distcp`` …  tensors of the module and its optimizers, from process 0, 1 …, in DCP's format; and the per-process
                    state (:mod:`trainer.checkpoint.process`): the bytes of a file, as a tensor
``.metadata``       DCP's: the position of each part of each tensor in these files
``state.ckpt``      everything else, as in a file (:mod:`trainer.lightning.contents`), written by process 0: the whole
                    checkpoint, with a tensor without data (on the meta device) instead of each tensor in DCP's files
``manifest.json``   hashes of these files, written last (:mod:`trainer.checkpoint.sharded_files`)
==================  ==================================================================================================

DCP's name of a tensor is its place in the checkpoint: ``state_dict.net.0.weight``. Optimizer states use the names of
parameters (``optimizer_states.0.state.net.0.weight.exp_avg``) instead of numbers, which a file contains.

DCP writes every ``DTensor``, wherever it is in the checkpoint, and from process 0 the plain tensors of the module and
the optimizers. So there is one file for each process, and no other file grows with the number of processes. DCP
gets only tensors, because it writes other entries as pickles and reads them without restriction. ``.metadata`` is also
a pickle, and is read here with a reader that allows only the few expected classes (:class:`_MetadataReader`).
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from io import BytesIO
from itertools import chain, repeat
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict  # `load` warns if there is one process
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.tensor import DTensor

try:
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter
except ImportError:  # older versions
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from trainer.checkpoint import sharded_files
from trainer.checkpoint import zero_files as zero
from trainer.checkpoint.host_copy import is_plain
from trainer.checkpoint.inert import load_inert
from trainer.checkpoint.manifest import TRAINER_KEY, Manifest
from trainer.checkpoint.reading import CountingStream, make_folder
from trainer.checkpoint.sharded_files import MANIFEST, STATE
from trainer.errors import CheckpointError
from trainer.state.containers import KeyPath, mapped

_METADATA = ".metadata"
_PROCESS = "process "
"""Prefix of DCP's names for per-process state. No place in a checkpoint begins with it."""
_BUFFER = 1 << 20

Tree = Any
Template = Callable[[KeyPath, torch.Size, torch.dtype], Tensor | None]
"""Returns the tensor to read into, given its place in the checkpoint, shape and dtype; None for a plain tensor."""

Save = Callable[[Path, zero.FileHasher], None]
"""Writes this process's tensors as files into a folder, through an object that records their hashes."""


# --- dividing a checkpoint --------------------------------------------------------------------------------------------


def split_for_write(checkpoint: dict[str, Any], rank: int = 0) -> tuple[Tree, dict[str, Tensor], dict[int, Any]]:
    """Split a checkpoint into the arguments of :func:`write`: the tree, the tensors, and the per-process states.

    Args:
        checkpoint: the checkpoint of process ``rank``, with its per-process state; or one read from a file, with the
            states of all processes, which process 0 writes.
        rank: rank of this process. Default: 0.
    """
    loops = checkpoint.get("loops", {})
    trainer_state = dict(loops.get(TRAINER_KEY, {}))
    processes = trainer_state.pop("processes", [])
    checkpoint = {**checkpoint, "loops": {**loops, TRAINER_KEY: trainer_state}} if trainer_state else checkpoint
    tree, tensors = split(checkpoint, trainer_state.get("parameters", []), is_first=rank == 0)
    return tree, tensors, dict(enumerate(processes, start=rank))


def read_whole(folder: str | Path, **options: Any) -> dict[str, Any]:
    """Return a checkpoint folder in the form of a file, read by :func:`read` with these options."""
    checkpoint, processes = read(folder, **options)
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"], names = by_number(checkpoint["optimizer_states"])
        if TRAINER_KEY in checkpoint.get("loops", {}):
            checkpoint["loops"][TRAINER_KEY]["parameters"] = names
    if processes:
        checkpoint["loops"][TRAINER_KEY]["processes"] = processes
    whole: dict[str, Any] = checkpoint
    return whole


def split(checkpoint: Mapping[str, Any], names: list[list[str]], *, is_first: bool) -> tuple[Tree, dict[str, Tensor]]:
    """Split a checkpoint into a tree with tensors on the meta device, and the tensors that these replace.

    Args:
        checkpoint: the result of :func:`trainer.lightning.contents.dump`.
        names: the names of each optimizer's parameters, in its order; [] if they are not known.
        is_first: whether this is process 0, which writes unsharded tensors.

    Raises:
        CheckpointError: if the checkpoint already has a tensor on the meta device.
    """
    tree = dict(checkpoint)
    if "optimizer_states" in tree:
        tree["optimizer_states"] = by_name(tree["optimizer_states"], names)
    tensors: dict[str, Tensor] = {}

    def take(place: KeyPath, value: Tensor) -> Tensor:
        if value.is_meta:
            raise CheckpointError(
                f"Got {'.'.join(place)} on the meta device in a checkpoint, expected values: a sharded checkpoint uses"
                " such tensors as placeholders. Allocate and initialize it, remove it in on_save_checkpoint, or write"
                " one file: CheckpointFiles(sharded=False)."
            )
        if not isinstance(value, DTensor):
            if not is_plain(value) or place[0] not in ("state_dict", "optimizer_states"):
                return value
            if place[0] == "optimizer_states" and not value.dim():
                return value  # a step count
        key = _unique_key(place, tensors)
        tensors[key] = value.detach()
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    outline = mapped(tree, take)
    return outline, {key: tensor for key, tensor in tensors.items() if is_first or isinstance(tensor, DTensor)}


def _unique_key(place: KeyPath, taken: Mapping[str, Any]) -> str:
    key = ".".join(place)
    while key in taken:  # {"a.b": ...} next to {"a": {"b": ...}}
        key += "'"
    return key


def by_name(states: list[dict[str, Any]], names: list[list[str]]) -> list[dict[str, Any]]:
    """Return optimizer states with parameter names instead of numbers; unchanged if there are no names."""
    return [
        _rename_parameters(state, dict(enumerate(known))) if known else state
        for state, known in zip(states, chain(names, repeat([])), strict=False)
    ]


def by_number(states: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Invert :func:`by_name`. Also returns the names, in the order of the parameters' numbers."""
    numbered, names = [], []
    for state in states:
        known = [parameter for group in state.get("param_groups", ()) for parameter in group["params"]]
        is_named = bool(known) and all(isinstance(parameter, str) for parameter in known)
        names.append(known if is_named else [])
        numbers = {name: index for index, name in enumerate(known)} if is_named else {}
        numbered.append(_rename_parameters(state, numbers))
    return numbered, names


def _rename_parameters(state: dict[str, Any], new: Mapping[Any, Any]) -> dict[str, Any]:
    if "param_groups" not in state or "state" not in state:
        return state
    groups = [{**group, "params": [new.get(old, old) for old in group["params"]]} for group in state["param_groups"]]
    renamed = {new.get(old, old): value for old, value in state["state"].items()}
    return {**state, "state": renamed, "param_groups": groups}


# --- writing ----------------------------------------------------------------------------------------------------------


def write(
    place: str | Path,
    tree: Tree,
    tensors: dict[str, Tensor],
    processes: Mapping[int, Any],
    facts: Mapping[str, Any],
    group: distributed.ProcessGroup | None,
    save: Save | None = None,
) -> None:
    """Write a checkpoint folder, replacing an older one completely or not at all. All processes must call it.

    Args:
        place: path of the folder, on a file system that all processes share, or its URL.
        tree: from :func:`split`; that of process 0 is written.
        tensors: from :func:`split`. They must not change during the call.
        processes: the per-process state, by rank.
        facts: additional plain values for the manifest.
        group: a gloo group of the processes that is used for nothing else; None for this process alone.
        save: writes tensors in addition to those of DCP. Default: None.

    Raises:
        OSError: if writing failed; raised on all processes. An older checkpoint is unchanged.
    """
    rank, is_alone = (0, True) if group is None else (distributed.get_rank(group), False)
    temporary: Any = _call_on_first(group, lambda: _make_temporary_folder(place))
    try:
        cls: type[FileSystemWriter] = FileSystemWriter if isinstance(temporary, Path) else FsspecWriter
        writer = cls(temporary, sync_files=False)
        files: Any = _HashingFileSystem(writer.fs)
        writer.fs = files
        if save is not None:
            _call_on_all(group, lambda: save(temporary, files))
        tensors = tensors | {_process_key(number): _bytes_of(state) for number, state in processes.items()}
        _run_dcp(lambda: _save_state_dict(tensors, writer, group, no_dist=is_alone))
        each = [files.sums]
        if not is_alone:
            each = [{} for _ in range(distributed.get_world_size(group))] if rank == 0 else []
            distributed.gather_object(files.sums, each or None, group=group)

        def finish() -> None:
            files.save(tree, files.concat_path(temporary, STATE))
            sums = {name: checksum for written in [*each, files.sums] for name, checksum in written.items()}
            if isinstance(place, Path):
                sharded_files.seal(temporary, place.name, sums, facts)
                sharded_files.move_into_place(temporary, place)
            else:
                sharded_files.seal_remote(place, temporary, sums, facts)

        _call_on_first(group, finish)
    except BaseException:
        if rank == 0:
            discard = sharded_files.discard if isinstance(temporary, Path) else sharded_files.discard_remote
            discard(temporary)
        raise


def _make_temporary_folder(place: str | Path) -> str | Path:
    if not isinstance(place, Path):
        return sharded_files.remote_subfolder(place)
    sharded_files.check_replaceable(place)
    make_folder(place.parent)
    temporary = sharded_files.temporary_path(place)
    temporary.mkdir()
    return temporary


def _process_key(rank: int) -> str:
    return f"{_PROCESS}{rank}"


def _bytes_of(state: Any) -> Tensor:
    stream = BytesIO()
    torch.save(state, stream)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


def _call_on_first(group: distributed.ProcessGroup | None, work: Callable[[], Any]) -> Any:
    """Return the result of ``work`` in process 0, which alone calls it. If it raises, all processes raise."""
    if group is None:
        return work()
    outcome: list[Any] = [None, None]
    if distributed.get_rank(group) == 0:
        try:
            outcome[0] = work()
        except OSError as problem:
            outcome[1] = OSError, (problem.errno, problem.strerror or str(problem))
        except Exception as problem:
            outcome[1] = RuntimeError, (f"{type(problem).__name__}: {problem}",)
    distributed.broadcast_object_list(outcome, src=0, group=group)
    result, failed = outcome
    if failed is not None:
        raise failed[0](*failed[1])
    return result


def _call_on_all(group: distributed.ProcessGroup | None, work: Callable[[], Any]) -> None:
    """Call ``work`` in all processes. If it raises in one of them, all processes raise."""
    error: Exception | None = None
    try:
        work()
    except Exception as problem:
        error = problem
    failures = torch.tensor(int(error is not None))
    if group is not None:
        distributed.all_reduce(failures, group=group)
    if failures:
        raise error or OSError(errno.EIO, "another process could not write its part")


def _run_dcp(work: Callable[[], Any]) -> None:
    """Call DCP. Raises the error of a process instead of DCP's summary."""
    try:
        work()
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


class _Stream(CountingStream):
    """A stream that hashes the bytes."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.hash.update(memoryview(data).cast("B"))
        return super().write(data)

    def close(self) -> None:
        """No-op: the function that opened the file closes it."""


class _HashingFileSystem:
    """DCP's file system. It records the size and SHA-256 of each file written, and flushes local files to disk."""

    def __init__(self, files: Any) -> None:
        self._files = files
        self.sums: dict[str, tuple[int, str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with self._open(path, mode) as file:
            stream = _Stream(file)
            yield stream
            if stream.error is not None:
                raise stream.error
            if isinstance(path, Path):
                file.flush()
                os.fsync(file.fileno())
        self.sums[Path(path).name] = stream.size, stream.hash.hexdigest()

    def _open(self, path: str | os.PathLike[str], mode: str) -> Any:
        return path.open(mode, buffering=_BUFFER) if isinstance(path, Path) else self._files.create_stream(path, mode)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._files.rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)

    def add(self, path: Path) -> None:
        """Record a file that other code has written."""
        content = path.read_bytes()
        self.sums[path.name] = len(content), hashlib.sha256(content).hexdigest()

    def save(self, value: Any, path: str | Path) -> None:
        """Write ``value`` as a separate file."""
        with self.create_stream(path, "wb") as stream:
            torch.save(value, stream)


# --- reading ----------------------------------------------------------------------------------------------------------


def read(
    folder: str | Path,
    *,
    weights_only: bool = True,
    template: Template | None = None,
    process: tuple[int, int] | None = None,
    only: str = "",
    joins: bool = True,
) -> tuple[Tree, list[Any]]:
    """Read a verified checkpoint folder. No other process has to take part.

    Args:
        folder: the checkpoint.
        weights_only: if False, ``state.ckpt`` may run any code. Default: True.
        template: returns the tensors to read into. Default: None, whole tensors in host memory.
        process: (rank, world size) of this process. If the same number of processes wrote the checkpoint, only the
            state of this one is read. Default: None, the states of all processes are read.
        only: a key of the checkpoint, such as ``"state_dict"``: tensors elsewhere stay without data, and per-process
            states are not read. Default: "", everything is read.
        joins: whether to assemble whole tensors from DeepSpeed's files. If False, they are left out. Default: True.

    Returns:
        The checkpoint, with optimizer states by parameter name, and the list of per-process states, with None for those
        that were not read. The list is empty if the checkpoint has none.

    Raises:
        CheckpointError: if the folder is damaged or does not exist.
        pickle.UnpicklingError: if it contains unexpected objects.
    """
    manifest = sharded_files.read_manifest(folder)
    place = sharded_files.folder_of_files(folder, manifest)
    tree = load_inert(BytesIO(sharded_files.read_bytes(place, STATE)), weights_only=weights_only)
    is_deepspeeds = zero.FACT in manifest.facts
    if is_deepspeeds and not isinstance(folder, Path):
        raise CheckpointError(
            f"{folder} was written by DeepSpeed. Expected a copy of it on this machine's file systems."
        )
    metadata = _metadata_of(place, manifest)
    targets: dict[str, Tensor] = {}

    def make(place: KeyPath, value: Tensor) -> Tensor:
        if not value.is_meta or (only and place[0] != only):
            return value
        key = _unique_key(place, targets)
        entry = metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{folder} is damaged: it lacks {key}.")
        target = None if template is None else template(place, value.shape, value.dtype)
        targets[key] = torch.empty(value.shape, dtype=value.dtype) if target is None else target
        return targets[key]

    tree = mapped(tree, make)
    if is_deepspeeds and joins:
        tree = zero.fill(tree, Path(folder), manifest, only)
    elif is_deepspeeds:
        zero.check(Path(folder), manifest, *process or (0, 1))
    count = sum(key.startswith(_PROCESS) for key in metadata.state_dict_metadata)
    wanted = [] if only else range(count) if process is None or process[1] != count else [process[0]]
    for rank in wanted:
        entry = metadata.state_dict_metadata.get(_process_key(rank))
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{folder} is damaged: it lacks the entries of process {rank}.")
        targets[_process_key(rank)] = torch.empty(entry.size, dtype=torch.uint8)
    if targets:
        _run_dcp(lambda: _load_state_dict(targets, _reader(place, metadata), no_dist=True))
    buffers = [targets[_process_key(i)] if i in wanted else None for i in range(count)]
    files = [None if buffer is None else BytesIO(buffer.numpy().tobytes()) for buffer in buffers]
    return tree, [None if file is None else load_inert(file, weights_only=weights_only) for file in files]


def _metadata_of(folder: str | Path, manifest: Manifest) -> Metadata:
    """Return DCP's metadata after checking that it describes only tensors in files of this folder.

    Raises:
        CheckpointError: if it describes anything else.
        pickle.UnpicklingError: if it contains other objects.
    """
    metadata = _MetadataReader(BytesIO(sharded_files.read_bytes(folder, _METADATA))).load()
    files = manifest.files.keys() - {MANIFEST, STATE, _METADATA}
    if not (
        isinstance(metadata, Metadata)
        and isinstance(metadata.state_dict_metadata, dict)
        and isinstance(metadata.storage_data, dict)
        and all(isinstance(entry, TensorStorageMetadata) for entry in metadata.state_dict_metadata.values())
        and all(
            isinstance(index, MetadataIndex)
            and isinstance(info, _StorageInfo)
            and info.relative_path in files
            and not info.transform_descriptors
            for index, info in metadata.storage_data.items()
        )
    ):
        raise CheckpointError(f"{folder} is damaged: its {_METADATA} has entries other than tensors of its files.")
    for key, info in metadata.state_dict_metadata.items():
        assert isinstance(info, TensorStorageMetadata)
        if sum(chunk.sizes.numel() for chunk in info.chunks) < info.size.numel():
            raise CheckpointError(f"{folder} is damaged: parts of {key} are missing.")
    return metadata


_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}  # fmt: skip
"""The names in DCP's metadata, by module."""


class _MetadataReader(pickle._Unpickler):  # in Python: operations of the C class cannot be replaced
    """Read DCP's metadata, and reject all names except those of the expected plain classes.

    Attributes are set only on instances of DCP's dataclasses, because setting them on a class would change it for the
    whole program.
    """

    def _build(self) -> None:
        built = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(built, type) or not dataclasses.is_dataclass(built):
            raise pickle.UnpicklingError(f"its {_METADATA} changes an object outside of it")
        self.load_build()  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}

    def find_class(self, module: str, name: str) -> Any:
        """Return the object for a name in the file."""
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"its {_METADATA} refers to {module}.{name}, which is not allowed there")
        return super().find_class(module.replace("pathlib._local", "pathlib"), name)


def _member(class_: Any, name: Any) -> Enum:
    """Return a member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as an attribute of its class."""
    if isinstance(class_, type) and issubclass(class_, Enum) and name in class_.__members__:
        return class_[name]
    raise pickle.UnpicklingError(f"its {_METADATA} refers to an attribute, which is not allowed")


def _reader(folder: str | Path, metadata: Metadata) -> FileSystemReader:
    """Return DCP's reader with metadata that was already checked, because it unpickles any object itself."""
    reader = FileSystemReader(folder) if isinstance(folder, Path) else FsspecReader(folder)
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]
    return reader
