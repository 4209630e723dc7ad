"""Saving, reading and removal of checkpoints, and the folders of a run."""

import errno
import os
import threading
from concurrent.futures import wait
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer import CheckpointFiles
from trainer.checkpoint import folder_locks as folders
from trainer.checkpoint import reading as files
from trainer.errors import CheckpointError, CheckpointWriteError, ConfigurationError, FolderInUseError

BATCHES = make_batches(4)


def fit(folder, *callbacks, ckpt_path=None, module=None, **arguments):
    given = {"callbacks": list(callbacks), "enable_checkpointing": None, "max_epochs": 2}
    fitted = make_trainer(folder, **given | arguments)
    fitted.fit(module or Regression(), loader_of(BATCHES), ckpt_path=ckpt_path)
    return fitted


def names(folder):
    return sorted(os.listdir(folder))


def flip(path):
    data = bytearray(Path(path).read_bytes())
    data[len(data) // 2] ^= 1
    Path(path).write_bytes(data)


# --- choice of the IO -------------------------------------------------------------------------------------------------


def test_arguments_of_checkpoint_files_are_checked():
    with pytest.raises(ConfigurationError, match="Got when_full='ignore', expected 'stop' or 'continue'"):
        CheckpointFiles(when_full="ignore")
    with pytest.raises(TypeError, match=r"`storage_options`.*`CheckpointFiles`"):
        CheckpointFiles().save_checkpoint({}, "x.ckpt", storage_options={})


# --- contents ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["fit", "validate"])
def test_damaged_file_is_refused_by_every_run(tmp_path, run):
    saver = ModelCheckpoint(tmp_path / "c")
    fit(tmp_path, saver)
    flip(saver.best_model_path)
    module = Regression()
    if run == "validate":
        module.validation_step = module.training_step
    with pytest.raises(CheckpointError, match=r"epoch=1-step=8.ckpt is damaged: .* not those that were written"):
        getattr(make_trainer(tmp_path), run)(module, loader_of(BATCHES), ckpt_path=saver.best_model_path)


def test_file_in_another_folder_has_a_manifest():
    from fsspec.implementations.memory import MemoryFileSystem

    io, memory, other = CheckpointFiles(), MemoryFileSystem(), "memory://files/other.ckpt"
    io.save_checkpoint({"state_dict": {"a": torch.ones(2)}, "epoch": 3}, "memory://files/x.ckpt")
    assert torch.equal(io.load_checkpoint("memory://files/x.ckpt")["state_dict"]["a"], torch.ones(2))
    assert b'"epoch": 3, "weights_only": true, "sha256_without_contents": "' in memory.cat("/files/x.ckpt")
    io.remove_checkpoint("memory://files/x.ckpt")
    for way in (other, "memory://files/../files/other.ckpt", "memory://files2/x.ckpt"):
        memory.pipe(way.removeprefix("memory:/"), b"")
        with pytest.warns(UserWarning, match="not in a folder"):
            io.remove_checkpoint(way)
        io.belong(["memory://files"], [])
    io.remove_checkpoint(other)
    assert not memory.exists("/files/x.ckpt")
    assert not memory.exists("/files/other.ckpt")


# --- other writers ----------------------------------------------------------------------------------------------------

_SAVE, _LOAD = torch.save, torch.load


def _encrypt(data):
    return bytes(255 - byte for byte in data)


def save_encrypted(what, stream, *arguments, **options):
    """Encrypt in place, as a caller of Lightning's API may."""
    _SAVE(what, stream, *arguments, **options)
    data = stream.getvalue()
    stream.seek(0)
    stream.truncate()
    stream.write(_encrypt(data))


def load_encrypted(stream, *arguments, **options):
    return _LOAD(BytesIO(_encrypt(stream.read())), *arguments, **options)


@pytest.mark.parametrize("where", ["local", "memory://encrypted"])
def test_encrypted_file_is_written_and_read(tmp_path, where, monkeypatch):
    monkeypatch.setattr(torch, "save", save_encrypted)
    monkeypatch.setattr(torch, "load", load_encrypted)
    path = str(tmp_path if where == "local" else where) + "/x.ckpt"
    fit(tmp_path, enable_checkpointing=False).save_checkpoint(path)
    with fsspec.open(path) as file:
        assert _LOAD(BytesIO(_encrypt(file.read())), weights_only=True)["global_step"] == 8
    savers = [ModelCheckpoint(tmp_path)] if where == "local" else []
    how = {"resume": "auto"} if savers else {"ckpt_path": path, "enable_checkpointing": False}
    again = fit(tmp_path, *savers, max_epochs=3, **how)
    assert (again.ckpt_path, again.global_step) == (path, 12)


# --- removal ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def io(tmp_path):
    """Return a CheckpointIO with the folder ``c`` as its run's folder."""
    io = CheckpointFiles()
    io.belong([tmp_path / "c"], [])
    return io


FULL = {"state_dict": {"a": torch.ones(2)}, "optimizer_states": []}


def kept(io, path, why):
    with pytest.warns(UserWarning, match=f"was to be removed as an old checkpoint, and is kept: {why}"):
        io.remove_checkpoint(path)
    assert os.path.lexists(path)


def test_last_good_one_is_kept(tmp_path, io):
    first, second = tmp_path / "c" / "1.ckpt", tmp_path / "c" / "2.ckpt"
    io.save_checkpoint(FULL, first)
    kept(io, first, "there is no other good one")
    io.save_checkpoint({"state_dict": {}}, tmp_path / "c" / "weights.ckpt")
    kept(io, first, "there is no other good one")
    io.save_checkpoint(FULL, second)
    flip(second)
    kept(io, first, "there is no other good one")
    io.remove_checkpoint(second)  # a damaged file is not kept
    io.remove_checkpoint(tmp_path / "c" / "weights.ckpt")
    io.save_checkpoint(FULL, second)
    io.remove_checkpoint(first)
    assert names(tmp_path / "c") == ["2.ckpt"]


def test_checkpoint_of_an_earlier_process_is_verified(tmp_path, io):
    CheckpointFiles().save_checkpoint(FULL, tmp_path / "c" / "1.ckpt")
    io.save_checkpoint(FULL, tmp_path / "c" / "2.ckpt")
    flip(tmp_path / "c" / "1.ckpt")
    kept(io, tmp_path / "c" / "2.ckpt", "there is no other good one")
    CheckpointFiles().save_checkpoint(FULL, tmp_path / "c" / "1.ckpt")
    io.remove_checkpoint(tmp_path / "c" / "2.ckpt")
    assert names(tmp_path / "c") == ["1.ckpt"]


def test_files_outside_the_runs_folders_are_not_removed(tmp_path, io):
    io.save_checkpoint(FULL, tmp_path / "c" / "1.ckpt")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (tmp_path / "c" / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "c" / "folder").mkdir()
    for way in ("precious/file", "c/../precious/file", "c/link/file", "precious"):
        kept(io, tmp_path / way, "it is not in a folder that this run writes")
    kept(io, tmp_path / "c", "it is not in a folder")
    kept(io, tmp_path / "c" / "folder", "it is a folder")
    io.remove_checkpoint(tmp_path / "c" / "link")  # removes the link, not its target
    io.remove_checkpoint(tmp_path / "c" / "not there")
    assert (names(tmp_path / "precious"), names(tmp_path / "c")) == (["file"], ["1.ckpt", "folder"])


# --- ownership of folders ---------------------------------------------------------------------------------------------


class NoData(Regression):
    """Raises if data is accessed."""

    def setup(self, stage):
        raise AssertionError("the data is not to be loaded")

    train_dataloader = setup


def test_folder_of_another_run_is_refused_before_data_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_try_lock", lambda handle: False)
    with pytest.raises(FolderInUseError, match="is in use by another run"):
        fit(tmp_path, ModelCheckpoint(tmp_path / "a"), module=NoData())


def test_folder_that_cannot_be_written_to_is_refused_before_data_is_loaded(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointWriteError, match=f"checkpoint folder {tmp_path}/file/c cannot be written to"):
        fit(tmp_path, ModelCheckpoint(tmp_path / "file" / "c"), module=NoData())
    assert names(tmp_path) == ["file"]


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch):
    """A disk with or without free space."""
    disk, write = SimpleNamespace(is_full=False), files.SealingStream._write

    def put(stream, data):
        if disk.is_full and stream.size > 1000 and stream.error is None:
            stream.error = OSError(errno.ENOSPC, "No space left on device")
        write(stream, data)

    monkeypatch.setattr(files.SealingStream, "_write", put)
    return disk


def fills_up(disk, *epochs):
    """Return a callback that fills the disk in these epochs."""

    def fill(trainer, module):
        wait(trainer.strategy.checkpoint_io._pending, timeout=20)  # writes in progress fit
        disk.is_full = trainer.current_epoch in epochs

    return LambdaCallback(on_train_epoch_start=fill)


@pytest.mark.filterwarnings("ignore:.*was to be removed as an old checkpoint")
def test_full_disk_stops_the_run_and_keeps_the_old_file(tmp_path, disk):
    io, saver = CheckpointFiles(asynchronous=True), ModelCheckpoint(tmp_path / "c", filename="{epoch}")
    with pytest.raises(CheckpointWriteError, match=r"epoch=1.ckpt was not written: No space .* It needs .* bytes free"):
        fit(tmp_path, saver, fills_up(disk, 1), plugins=io, max_epochs=3)
    assert names(tmp_path / "c") == ["epoch=0.ckpt"]
    assert files.newest_valid([tmp_path / "c"]) is not None


def test_training_continues_without_the_checkpoint_if_configured(tmp_path, disk):
    io, saver = CheckpointFiles(when_full="continue"), ModelCheckpoint(tmp_path / "c", filename="{epoch}")
    with pytest.warns(UserWarning, match=r"\.ckpt") as caught:
        fitted = fit(tmp_path, saver, fills_up(disk, 1, 2), plugins=io, max_epochs=4)
    texts = [str(warning.message).replace(f"{tmp_path}/c/", "") for warning in caught]
    for epoch in (1, 2):
        assert any(text.startswith(f"The checkpoint epoch={epoch}.ckpt was not written: No space") for text in texts)
    (kept,) = [text for text in texts if "is kept: the one that should have taken its place" in text]
    assert kept.startswith("epoch=0.ckpt")
    assert names(tmp_path / "c") == ["epoch=0.ckpt", "epoch=3.ckpt"]
    assert (saver.best_model_path, fitted.global_step) == (str(tmp_path / "c" / "epoch=3.ckpt"), 16)


# --- asynchronous saving ----------------------------------------------------------------------------------------------


def test_asynchronous_save_has_the_state_of_its_call(tmp_path, monkeypatch):
    may_write, write = threading.Event(), files.write
    monkeypatch.setattr(files, "write", lambda *arguments: may_write.wait(20) and write(*arguments))
    io = CheckpointFiles(asynchronous=True)
    state = {"state_dict": {"a": torch.zeros(3)}, "list": [1], "optimizer_states": []}
    io.save_checkpoint(state, tmp_path / "x.ckpt")
    state["state_dict"]["a"] += 1
    state["list"].append(2)
    assert names(tmp_path) == []
    may_write.set()
    loaded = io.load_checkpoint(tmp_path / "x.ckpt")  # waits
    assert (loaded["state_dict"]["a"].tolist(), loaded["list"]) == ([0, 0, 0], [1])


@pytest.mark.parametrize(
    ("waits", "removes"),
    [
        (lambda io, folder: io.save_checkpoint(FULL, folder / "y.ckpt"), False),
        (lambda io, folder: io.load_checkpoint(folder / "x.ckpt"), True),
        (lambda io, folder: io.teardown(), True),
    ],
)
def test_errors_of_asynchronous_saves_are_raised(tmp_path, disk, waits, removes):
    io, disk.is_full = CheckpointFiles(asynchronous=True), True
    io.save_checkpoint(FULL, tmp_path / "x.ckpt")
    if removes:
        io.remove_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(CheckpointWriteError, match=r"x.ckpt was not written"):
        waits(io, tmp_path)
    disk.is_full = False
    io.save_checkpoint(FULL, tmp_path / "y.ckpt")
    io.teardown()
    assert names(tmp_path) == ["y.ckpt"]


def test_error_of_the_run_is_not_replaced(tmp_path, disk):
    disk.is_full = True
    saver = ModelCheckpoint(tmp_path / "c", every_n_train_steps=3)
    module = Regression(change=lambda loss, batch_idx: loss * (1 / (3 - batch_idx)))
    with pytest.raises(ZeroDivisionError), pytest.warns(UserWarning, match=r"step=3.ckpt was not written"):
        fit(tmp_path, saver, plugins=CheckpointFiles(asynchronous=True), module=module)
    assert names(tmp_path) == []


def test_all_ranks_raise_if_rank_zero_cannot_write(tmp_path, monkeypatch):
    """This process acts as another rank, which writes nothing itself."""
    fitted = fit(tmp_path, max_epochs=1, enable_checkpointing=False)
    collectives = fitted.engine.collectives
    monkeypatch.setattr(collectives, "any_rank", lambda decision: True)
    with pytest.raises(CheckpointWriteError, match=r"x.ckpt was not written; see the error of another process"):
        fitted.save_checkpoint(tmp_path / "x.ckpt")
    monkeypatch.undo()
    monkeypatch.setattr(type(collectives), "global_rank", 1)
    monkeypatch.setattr(collectives, "broadcast", lambda value: (None, FolderInUseError("it is in use")))
    with pytest.raises(FolderInUseError, match="it is in use"):
        fitted.fit(Regression(), loader_of(BATCHES))
