import errno
import io
import os
import pickle
import resource
import time
import zipfile
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.serialization import set_crc32_options

from trainer.checkpoint import reading as files
from trainer.errors import CheckpointError, CheckpointNotFoundError, CheckpointWriteError


def content(seed=0):
    tensors = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed))
    return {"state_dict": {"a": tensors[0], "b": tensors[1]}, "epoch": seed}


def saved(path, seed=0, **facts):
    files.write(partial(torch.save, content(seed)), path, facts)
    return path


def complaint(path):
    with pytest.raises(CheckpointError) as caught:
        files.verify(path)
    assert str(path) in str(caught.value)
    return str(caught.value).removeprefix(f"{path} is damaged: ")


# --- the file ---------------------------------------------------------------------------------------------------------


def test_file_is_a_valid_zip_archive_with_a_manifest(tmp_path):
    before = time.time()
    path = saved(tmp_path / "deep" / "er" / "x.ckpt", step=7)
    files.verify(path)
    for loaded in (torch.load(path, weights_only=True), torch.load(path, weights_only=True, mmap=True)):
        assert torch.equal(loaded["state_dict"]["b"], content()["state_dict"]["b"])
    with zipfile.ZipFile(path) as opened:
        assert opened.testzip() is None
        assert opened.comment.startswith(b'{"format": 2, "bytes": ')
    assert os.listdir(path.parent) == ["x.ckpt"]
    manifest = files.read_manifest(path)
    assert manifest.size == len(archive())
    assert path.read_bytes()[: manifest.size - 2] == archive()[:-2]  # but for the length of the comment
    assert before <= manifest.saved_at <= time.time()
    assert dict(manifest.facts) == {"step": 7}
    assert manifest.resumable


def archive():
    buffer = io.BytesIO()
    torch.save(content(), buffer)
    return buffer.getvalue()


OTHERS = {
    "nothing": b"",
    "pickle": pickle.dumps(content()),
    "encrypted": bytes(255 - byte for byte in archive()),
    "an archive behind a header": b"header" + archive(),
    "an archive and a signature": archive() + b"signature",
    "an archive with a comment": archive()[:-2] + b"\4\0mine",
}
"""Files of other formats, which a replaced ``torch.save`` may write."""


@pytest.mark.parametrize("piece", [1, 3, 22, 1000])
@pytest.mark.parametrize("what", OTHERS)
def test_files_of_other_formats_are_written_unchanged(tmp_path, what, piece):
    data = OTHERS[what]

    def save(stream):
        for start in range(0, len(data), piece):
            stream.write(data[start : start + piece])
        assert stream.tell() == len(data)

    files.write(save, tmp_path / "x.ckpt")
    assert (tmp_path / "x.ckpt").read_bytes() == data
    assert os.listdir(tmp_path) == ["x.ckpt"]
    if data and not data.startswith(b"PK"):
        assert files.read_manifest(tmp_path / "x.ckpt") is None
        assert not files.verify(tmp_path / "x.ckpt")
    data = archive()  # in writes of the same size
    files.write(save, tmp_path / "x.ckpt")
    assert files.read_manifest(tmp_path / "x.ckpt") is not None
    assert files.verify(tmp_path / "x.ckpt")


# --- verify -----------------------------------------------------------------------------------------------------------


def save_compressed(stream):
    with zipfile.ZipFile(io.BytesIO(archive())) as old, zipfile.ZipFile(buffer := io.BytesIO(), "w", 8) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    stream.write(buffer.getvalue())


def save_without_checksums(stream):
    set_crc32_options(False)
    try:
        torch.save(content(), stream)
    finally:
        set_crc32_options(True)


@pytest.mark.parametrize("save", [partial(torch.save, content()), save_compressed, save_without_checksums])
def test_one_flipped_bit_is_detected_at_each_place(tmp_path, save):
    path = tmp_path / "x.ckpt"
    files.write(save, path)
    data = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for place in [*range(0, len(data) - 300, 7), *range(len(data) - 300, len(data))]:
            os.pwrite(file.fileno(), bytes([data[place] ^ 1 << place % 8]), place)
            complaint(path)
            os.pwrite(file.fileno(), data[place : place + 1], place)
    files.verify(path)


def test_truncated_file_is_detected_at_each_length(tmp_path):
    path = saved(tmp_path / "x.ckpt")
    size = path.stat().st_size
    for length in reversed(range(size)):
        os.truncate(path, length)
        message = complaint(path)
        assert "cut short" in message if length else "it is empty" in message, (length, message)


def test_damage_behind_the_archive_is_detected(tmp_path, monkeypatch):
    """Trailing bytes, and the manifest of another archive."""
    monkeypatch.setattr(time, "time", lambda: 1e9)
    path = saved(tmp_path / "a.ckpt", 0)
    one, other = path.read_bytes(), saved(tmp_path / "b.ckpt", 1).read_bytes()
    path.write_bytes(one + b"\0" * 3)
    assert complaint(path) == "3 bytes follow its end."
    cut = one.rindex(b'{"format"')
    path.write_bytes(one[:cut] + other[cut:])
    assert "SHA-256" in complaint(path)


def test_file_of_another_version_is_refused(tmp_path):
    path = saved(tmp_path / "x.ckpt")
    path.write_bytes(path.read_bytes().replace(b'{"format": 2,', b'{"format": 1,'))
    assert "was written by another version of this package" in complaint(path)


def test_without_a_manifest_the_archives_own_checksums_are_checked(tmp_path):
    path = tmp_path / "x.ckpt"
    torch.save(content(), path)
    assert files.read_manifest(path) is None
    files.verify(path)
    data = path.read_bytes()
    place = data.index(content()["state_dict"]["a"].numpy().tobytes())
    path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
    assert "(CRC-32)" in complaint(path)
    path.write_bytes(data[:-1])
    assert "cut short" in complaint(path)
    path.write_bytes(data[:-100] + b"\0" * 78 + data[-22:])
    assert "cannot be read as a zip archive" in complaint(path)
    path.write_bytes(data + b"signature")
    assert files.verify(path)


def test_file_without_a_checksum_is_read_before_it_is_selected(tmp_path):
    def read(path):
        if path.read_bytes() != b"whole":
            raise CheckpointError(f"{path} cannot be read.")

    saved(tmp_path / "old.ckpt")
    for name, data in (("a", b"whole"), ("b", b"who")):
        (tmp_path / f"{name}.ckpt").write_bytes(data)
        aged(tmp_path / f"{name}.ckpt", -1000 if name == "a" else -2000)
    with pytest.warns(UserWarning, match="b.ckpt cannot be read. It is passed over"):
        assert files.newest_valid([tmp_path], read) == (tmp_path / "a.ckpt").resolve()
    assert files.newest_valid([tmp_path]) == (tmp_path / "b.ckpt").resolve()


def test_unreadable_file_raises_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"x\.ckpt cannot be read: No such file"):
        files.verify(tmp_path / "x.ckpt")
    assert "is not a checkpoint, or is incomplete: it has no manifest.json" in complaint(tmp_path)


# --- interrupted saves ------------------------------------------------------------------------------------------------


def test_file_is_synced_before_it_is_renamed(tmp_path, monkeypatch):
    events = []
    sync, rename = os.fsync, Path.replace

    def fsync(handle):
        kind = "folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file"
        events.append(f"sync {kind}, {(tmp_path / 'x.ckpt').exists()}")
        sync(handle)

    def replace(self, target):
        assert self.parent == target.parent
        events.append(f"rename, {self.stat().st_size}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    size = saved(tmp_path / "x.ckpt").stat().st_size
    assert events == ["sync file, False", f"rename, {size}", "sync folder, True"]


@pytest.mark.parametrize("where", ["in the save", "os.fsync", "pathlib.Path.replace"])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("in between"), OSError(errno.EIO, "Input/output error")]
)
def test_old_file_is_kept_on_errors(tmp_path, monkeypatch, where, error):
    path = saved(tmp_path / "x.ckpt", 0)
    before, is_os_error = path.read_bytes(), isinstance(error, OSError)

    def save(stream):
        torch.save(content(1), stream)
        if where == "in the save":
            raise error

    if where != "in the save":
        monkeypatch.setattr(where, Mock(side_effect=error))
    message = f"The checkpoint {path} was not written: Input/output error." if is_os_error else None
    with pytest.raises(CheckpointWriteError if is_os_error else type(error), match=message) as caught:
        files.write(save, path)
    if is_os_error:
        assert caught.value.errno == errno.EIO
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_full_disk_error_has_the_bytes(tmp_path):
    path = tmp_path / "x.ckpt"
    path.write_bytes(b"the old one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(CheckpointWriteError, match=r"File too large\. It needs 100,.* bytes free") as caught:
            files.write(lambda stream: [stream.write(bytes(1000)) for _ in range(100)], path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno in files.FULL
    assert path.read_bytes() == b"the old one"
    assert os.listdir(tmp_path) == ["x.ckpt"]


# --- the newest good one ----------------------------------------------------------------------------------------------


def aged(path, seconds):
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def test_newest_that_is_good(tmp_path, recwarn):
    a, b = tmp_path / "a", tmp_path / "b"
    first = saved(a / "first.ckpt")
    newest = saved(b / "newest.ckpt")
    aged(newest, 1000)  # a copy, for example: the time of the save decides
    torch.save(content(), a / "lightnings.ckpt")
    aged(a / "lightnings.ckpt", 500)
    saved(b / "weights.ckpt", weights_only=True)
    saved(b / ".hidden.ckpt")
    saved(tmp_path / "elsewhere.ckpt")
    (a / "last.ckpt").symlink_to("first.ckpt")
    (b / "dangling.ckpt").symlink_to("gone.ckpt")
    (b / "notes.txt").touch()
    assert files.newest_valid([a, b, tmp_path / "not there"]) == newest.resolve()
    assert files.newest_valid([a, a]) == first.resolve()
    assert files.newest_valid([tmp_path / "not there"]) is None
    assert not recwarn
    (b / "folder.ckpt").mkdir()  # possibly of an interrupted sharded save, which is reported
    with pytest.warns(UserWarning, match="folder.ckpt is not a checkpoint.*It is passed over"):
        assert files.newest_valid([a, b]) == newest.resolve()


def test_leftovers_of_killed_saves_are_not_checkpoints(tmp_path):
    def save(stream):
        torch.save(content(), stream)
        left.append(next(path for path in tmp_path.iterdir() if path.name.endswith(".ckpt-part")).name)

    left = []
    files.write(save, tmp_path / "x.ckpt")
    (tmp_path / left[0]).write_bytes(b"half of")
    assert files.newest_first([tmp_path]) == [(tmp_path / "x.ckpt").resolve()]
    files.remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["x.ckpt"]
