"""Write checkpoint files to disk, and verify that they are complete.

A checkpoint is one file, a zip archive written by ``torch.save``. The comment of the archive is its manifest: a line of
JSON with the archive's length, the time, and a SHA-256. Readers of zip archives ignore the comment. It stays with a
file that is moved. It is written last, so a file with a manifest is complete. A file in another form (if ``torch.save``
is replaced, for example by a function that encrypts) gets no manifest, and is passed to its reader unverified.

The contents of each member, such as a tensor, are verified by the CRC-32 that ``torch.save`` has computed and stored in
the archive's directory. The SHA-256 is that of all other bytes: the directory, the members' headers and the manifest.
So a save does not read the tensors a second time.

A file is written under a temporary name in the same folder, flushed to disk, and renamed. So at any time the
checkpoint's name refers to the old file or to the new one, never to an incomplete one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

from trainer.checkpoint import sharded_files
from trainer.checkpoint.manifest import FORMAT, PART, Manifest
from trainer.common.files import replacing, sync_folder
from trainer.errors import CheckpointError, CheckpointNotFoundError, CheckpointWriteError, warn

EXTENSION = ".ckpt"
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error codes for missing space: on the disk, in a quota, or under a limit on the file size."""

_CHUNK = 1 << 20
_END = b"PK\x05\x06"  # begins the last record of a zip archive: 22 bytes that end with the length of the comment
_END_SIZE = 22
_START = b"PK\x03\x04"  # begins a zip archive, and each of its members
_LENGTHS_AT = 26  # in a member's header: the lengths of its name and of additional values, two bytes each
_HASH = "sha256_without_contents"  # the manifest's last key


class CountingStream:
    """A stream that counts the bytes written to it.

    If the underlying file raises an error, the error is stored and the remaining bytes are only counted. Therefore a
    writer that cannot handle an exception continues to its end, and the required space is known.

    Args:
        file: the file that the bytes are written to.

    Attributes:
        size: number of bytes written.
        error: the error that the file raised, or None.
    """

    def __init__(self, file: Any) -> None:
        self.file = file
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes."""
        view = memoryview(data).cast("B")
        self.size += len(view)
        self._write(view)
        return len(view)

    def flush(self) -> None:
        """No-op: the file is flushed when it is complete."""

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.size

    def _write(self, data: Any) -> None:
        if self.error is None:
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error


class SealingStream(CountingStream):
    """A stream for writing an archive. `seal` appends a manifest.

    Any data other than a zip archive without a comment is written unchanged.

    Args:
        file: the file that the bytes are written to, which can also be read. `seal` raises its error.
        facts: additional plain values for the manifest. Default: none.
    """

    def __init__(self, file: Any, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(file)
        self._facts = dict(facts or {})
        self._start = self._end = b""  # first and last bytes written

    def write(self, data: Any) -> int:
        """Write bytes."""
        taken, view = super().write(data), memoryview(data).cast("B")
        if len(self._start) < len(_START):
            self._start = (self._start + bytes(view[: len(_START)]))[: len(_START)]
        self._end = (self._end + bytes(view[-_END_SIZE:]))[-_END_SIZE:]
        return taken

    def seal(self) -> None:
        """Append the manifest, if the data is a zip archive without a comment.

        Raises:
            OSError: if the file raised an error.
        """
        if self.error is not None:
            raise self.error
        is_ended = len(self._end) == _END_SIZE and self._end.startswith(_END) and self._end.endswith(b"\0\0")
        if is_ended and self._start == _START:
            self._seal()

    def _seal(self) -> None:
        header = {"format": FORMAT, "bytes": self.size, "saved_at": time.time(), **self._facts}
        text = f'{json.dumps(header)[:-1]}, "{_HASH}": "'.encode()
        digest = _hash_without_contents(self.file, self.size)
        digest.update(text)
        comment = text + f'{digest.hexdigest()}"}}'.encode()
        self.file.seek(self.size - 2)  # overwrites the last record's comment length, which was 0
        self.file.write(struct.pack("<H", len(comment)) + comment)


def write(save: Callable[[BinaryIO], None], path: str | Path, facts: Mapping[str, Any] | None = None) -> None:
    """Write a checkpoint file, replacing an older one completely or not at all.

    Args:
        save: writes into the given stream from start to end. A zip archive, as from ``torch.save``, gets a manifest;
            other data gets none.
        path: path of the file. Missing folders are created.
        facts: additional plain values for the manifest. Default: none.

    Raises:
        CheckpointWriteError: if writing failed. An older checkpoint is unchanged.
    """
    path = Path(path)
    stream: SealingStream | None = None
    try:
        make_folder(path.parent)
        is_folder = path.is_dir() and not path.is_symlink()
        aside = sharded_files.moved_aside(path) if is_folder else nullcontext()  # a file is replaced in one step
        with aside, replacing(path, part=PART, durable=True) as file:
            stream = SealingStream(file, facts)
            save(stream)  # type: ignore[arg-type]  # implements the part of BinaryIO that writers use
            stream.seal()
    except CheckpointError:
        raise
    except OSError as error:
        raise write_error(path, error, 0 if stream is None else stream.size) from error


def make_folder(folder: Path) -> list[Path]:
    """Create a folder and its missing parents. Returns the created folders, the innermost first.

    Raises:
        OSError: if the folder cannot be created.
    """
    missing = []
    above = folder
    while not above.exists():
        missing.append(above)
        above = above.parent
    folder.mkdir(parents=True, exist_ok=True)  # raises a descriptive error if it is a file
    for folder_made in missing:
        sync_folder(folder_made.parent)
    return missing


def read_manifest(path: str | Path) -> Manifest | None:
    """Return the manifest of a file or folder without verifying the contents, or None for a file without a manifest.

    Raises:
        CheckpointError: if the file is truncated, data was appended, or the manifest cannot be read.
        OSError: if the file cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        return sharded_files.read_manifest(path)
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            raise CheckpointError(f"{path} is damaged: it is empty.")
        file.seek(-min(size, _END_SIZE + 0xFFFF), os.SEEK_END)
        tail = file.read()
    try:
        return _parse(path, size, tail)
    except CheckpointError:
        if _is_archive(path):
            raise
        return None  # not an archive, so any bytes are valid


def _parse(path: Path, size: int, tail: bytes) -> Manifest | None:
    """Return the manifest in the ``tail`` of an archive, or None for an archive without a comment."""
    place = tail.rfind(_END)
    if place < 0 or len(tail) < place + _END_SIZE:
        raise CheckpointError(
            f"{path} is damaged: it was cut short after {size:,} bytes, so its end is missing. Use another checkpoint."
        )
    comment = tail[place + _END_SIZE :]
    length = int.from_bytes(tail[place + _END_SIZE - 2 : place + _END_SIZE], "little")
    if length == 0:
        return None  # even if something follows, such as a signature
    if len(comment) < length:
        raise CheckpointError(f"{path} is damaged: it was cut short, by {length - len(comment):,} bytes at its end.")
    if len(comment) > length:
        raise CheckpointError(f"{path} is damaged: {len(comment) - length:,} bytes follow its end.")
    try:
        header = json.loads(comment)
        if header.pop("format") != FORMAT:
            raise CheckpointError(f"{path} was written by another version of this package, which reads it.")
        manifest = Manifest(float(header.pop("saved_at")), int(header.pop("bytes")), str(header.pop(_HASH)), header)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{path} is damaged: its manifest cannot be read.") from None
    if manifest.size + length != size:
        raise CheckpointError(
            f"{path} is damaged: it has {size - length:,} bytes, and was written with {manifest.size:,}."
        )
    return manifest


def verify(path: str | Path) -> bool:
    """Verify that a checkpoint is unchanged since it was written. Reads the whole checkpoint.

    In an archive without a manifest, the checksums of the archive's members are verified. Returns False for other
    files, such as those of torch before 1.6 or encrypted ones, because they cannot be verified.

    Raises:
        CheckpointNotFoundError: if the checkpoint does not exist.
        CheckpointError: if the checkpoint was truncated, extended or changed, or it cannot be read.
    """
    path = Path(path)
    try:
        if path.is_dir():
            sharded_files.verify(path)
            return True
        manifest = read_manifest(path)
        if manifest is None and not _is_archive(path):
            return False
        _check_archive(path, manifest)
    except OSError as error:
        error_class = CheckpointNotFoundError if isinstance(error, FileNotFoundError) else CheckpointError
        raise error_class(f"{path} cannot be read: {error.strerror or error}.") from error
    return True


def newest_valid(
    folders: Iterable[str | Path], read: Callable[[Path], object] | None = None, additional: Iterable[Path] = ()
) -> Path | None:
    """Return the newest checkpoint in ``folders`` and ``additional`` that training can be resumed from, or None.

    Checkpoints are sorted by the time in the manifest, or by the file's time if there is no manifest. A damaged
    checkpoint is skipped with a warning.

    Args:
        folders: the folders to search.
        read: reads a file that cannot be verified, or raises a CheckpointError. Default: None, such files are trusted.
        additional: paths of additional checkpoints. Default: none.
    """
    for path in newest_first(folders, additional):
        try:
            manifest = read_manifest(path)
            if manifest is not None and not manifest.resumable:
                continue
            if not verify(path) and read is not None:
                read(path)
        except (CheckpointError, OSError) as error:
            warn(f"{error} It is passed over for the next older checkpoint.")
            continue
        return path
    return None


def newest_first(folders: Iterable[str | Path], additional: Iterable[Path] = ()) -> list[Path]:
    """Return the given checkpoints and those in ``folders``, newest first, without hidden files and duplicates."""
    times = {path.resolve(): _saved_at(path) for path in additional}
    for folder in dict.fromkeys(Path(folder) for folder in folders):
        for path in sorted(folder.glob(f"*{EXTENSION}")) if folder.is_dir() else ():
            target = path.resolve()
            if not path.name.startswith(".") and target.exists() and target not in times:
                times[target] = _saved_at(target)
    return sorted(times, key=times.__getitem__, reverse=True)


def remove_leftovers(folder: str | Path) -> None:
    """Remove incomplete checkpoints of killed processes from ``folder``.

    No process may be writing to the folder. A complete checkpoint that was not renamed yet gets its final name.
    """
    sharded_files.recover(Path(folder))
    for path in Path(folder).glob(f".*{PART}"):
        sharded_files.discard(path)


def _check_archive(path: Path, manifest: Manifest | None) -> None:
    size = path.stat().st_size if manifest is None else manifest.size - 2
    try:
        with path.open("rb") as file:
            digest = _hash_without_contents(file, size, verifies_contents=True)
            comment = file.read()[2:]
    except (OSError, CheckpointError):
        raise
    except Exception as error:  # a damaged archive can raise any exception in the reader
        raise CheckpointError(f"{path} is damaged: it cannot be read as a zip archive ({error}).") from error
    if manifest is None:
        return
    digest.update(b"\0\0")  # the comment length before the manifest was appended
    end = f'{manifest.sha256}"}}'.encode()
    digest.update(comment.removesuffix(end))
    if not comment.endswith(end) or digest.hexdigest() != manifest.sha256:
        raise CheckpointError(f"{path} is damaged: its bytes are not those that were written (SHA-256).")


def _hash_without_contents(file: BinaryIO, size: int, *, verifies_contents: bool = False) -> Any:
    """Return a SHA-256 of the first ``size`` bytes of an archive, without the contents of its members.

    The contents of members without a CRC-32 (``torch.serialization.set_crc32_options(False)``), and of compressed and
    encrypted ones are included. Afterwards, the position in the file is ``size``.

    Args:
        file: the archive.
        size: number of bytes.
        verifies_contents: whether to verify the CRC-32 of the contents, which reads the whole file. Default: False.

    Raises:
        CheckpointError: if the CRC-32 of a member is wrong.
    """
    digest, position = hashlib.sha256(), 0
    with zipfile.ZipFile(file) as archive:
        members = sorted(archive.infolist(), key=lambda member: member.header_offset)
    for member in members:
        if not member.CRC or member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            continue
        file.seek(member.header_offset + _LENGTHS_AT)
        start = file.tell() + 4 + sum(struct.unpack("<HH", file.read(4)))  # the name and additional values follow
        for chunk in _chunks(file, position, start):
            digest.update(chunk)
        position = start + member.file_size
        if verifies_contents:
            checksum = 0
            for chunk in _chunks(file, start, position):
                checksum = zlib.crc32(chunk, checksum)
            if checksum != member.CRC:
                raise CheckpointError(
                    f"{file.name} is damaged: the bytes of {member.filename} are not those that were written (CRC-32)."
                )
    for chunk in _chunks(file, position, size):
        digest.update(chunk)
    return digest


def _chunks(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """Read the bytes from ``start`` to ``end``."""
    file.seek(start)
    while start < end and (chunk := file.read(min(end - start, _CHUNK))):
        start += len(chunk)
        yield chunk


def _is_archive(path: Path) -> bool:
    """Return whether the file begins with a zip archive's signature, or with a part of it if the file is shorter."""
    with path.open("rb") as file:
        return _START.startswith(file.read(len(_START)))


def _saved_at(path: Path) -> float:
    with suppress(CheckpointError, OSError):
        if (manifest := read_manifest(path)) is not None:
            return manifest.saved_at
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def write_error(path: str | Path, error: OSError, needed: int) -> CheckpointWriteError:
    """Return the error for a checkpoint of ``needed`` bytes that was not written to ``path``, with advice."""
    message = f"The checkpoint {path} was not written: {error.strerror or error}."
    if error.errno in FULL:
        with suppress(OSError):
            message += (
                f" It needs {needed:,} bytes, and there are {shutil.disk_usage(Path(path).parent).free:,} bytes free."
            )
        message += (
            " An earlier file of that name is unchanged. Free space, save fewer checkpoints"
            " (ModelCheckpoint(every_n_epochs, save_top_k)), or continue without them:"
            " Trainer(plugins=CheckpointFiles(when_full='continue'))."
        )
    else:
        message += " Expected a writable path: choose another one, or change its permissions."
    return CheckpointWriteError(message, error.errno)
