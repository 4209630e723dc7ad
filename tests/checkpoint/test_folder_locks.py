import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.checkpoint import folder_locks as folders
from trainer.errors import CheckpointWriteError, FolderInUseError

ROOT = Path(folders.__file__).parents[2]
HOLDER = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
from trainer.checkpoint.folder_locks import lock_folder
with lock_folder(sys.argv[1]):
    child = os.fork()
    if child:
        print(os.getpid(), child, flush=True)
    time.sleep(60)
"""


def holder(folder):
    """Start another process that holds ``folder``. Yields its id, and that of its fork."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, folder, ROOT], stdout=subprocess.PIPE, text=True)
    pid, child = process.stdout.readline().split()
    return process, int(pid), int(child)


def lock_of(folder):
    return folder.parent / f".{folder.name}{folders.LOCK}"


def test_lock_is_next_to_the_folder_and_removed(tmp_path):
    with folders.lock_folder(tmp_path / "a" / "b"):
        assert os.listdir(tmp_path / "a" / "b") == []
        assert sorted(os.listdir(tmp_path / "a")) == [".b.in-use.lock", "b"]
        assert json.loads((tmp_path / "a" / ".b.in-use.lock").read_text())["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []
    with folders.lock_folder(tmp_path / "a"):
        (tmp_path / "a" / "x.ckpt").touch()
    assert os.listdir(tmp_path / "a") == ["x.ckpt"]


def test_same_process_may_hold_it_twice(tmp_path):
    with folders.lock_folder(tmp_path / "a"):
        with folders.lock_folder(tmp_path / "a" / "." / ""):
            pass
        assert sorted(os.listdir(tmp_path)) == [".a.in-use.lock", "a"]
    assert os.listdir(tmp_path) == []


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    (tmp_path / ".123-abc.ckpt-part").touch()
    (tmp_path / folders.LOCK).touch()
    with folders.lock_folder(tmp_path):
        assert os.listdir(tmp_path) == []


def test_lock_of_another_process_ends_with_its_kill(tmp_path):
    folder = tmp_path / "a"
    (tmp_path / "link").symlink_to("a")
    process, pid, child = holder(folder)
    try:
        who = rf"in use by another run \(process {pid} on .*, since 20..-..-.. "
        with pytest.raises(FolderInUseError, match=who), folders.lock_folder(tmp_path / "link"):
            pass
        assert os.listdir(folder) == []
        process.kill()
        process.wait(10)
        with folders.lock_folder(folder):  # immediately, although its fork is still running
            assert json.loads(lock_of(folder).read_text())["pid"] == os.getpid()
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)
        process.communicate(timeout=10)
    assert sorted(os.listdir(tmp_path)) == ["a", "link"]
    assert os.listdir(folder) == []


def refuse(monkeypatch, refused):
    """Emulate folders without write permission; this process may write anywhere."""
    opened = os.open

    def open_if_allowed(path, *arguments, **options):
        if refused(Path(path)):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", open_if_allowed)


@pytest.mark.parametrize("why", ["rights", "mounted"])
def test_lock_is_in_the_folder_if_its_parent_is_not_writable(tmp_path, why, monkeypatch):
    folder = tmp_path / "a"
    folder.mkdir()
    if why == "rights":
        refuse(monkeypatch, lambda path: path == lock_of(folder))
    else:
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == folder)
    with folders.lock_folder(folder):
        assert os.listdir(folder) == [folders.LOCK]
        assert os.listdir(tmp_path) == ["a"]
        monkeypatch.undo()
        script = HOLDER.replace("time.sleep(60)", "")
        other = subprocess.run([sys.executable, "-c", script, folder, ROOT], capture_output=True, text=True)
        assert "FolderInUseError" in other.stderr  # although the parent folder is writable
    assert os.listdir(folder) == []
    assert os.listdir(tmp_path) == ["a"]


def test_lock_removed_meanwhile_does_not_count(tmp_path, monkeypatch):
    """The other run ended after this process opened its lock file, and before it locked it."""
    locks = []

    def lock(handle):
        locks.append(handle)
        if len(locks) == 1:
            lock_of(tmp_path / "a").unlink()
        return True

    monkeypatch.setattr(folders, "_try_lock", lock)
    with folders.lock_folder(tmp_path / "a"):
        assert json.loads(lock_of(tmp_path / "a").read_text())["pid"] == os.getpid()
    assert len(locks) == 2


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/nowhere/below"])
def test_folder_that_cannot_be_written_to(tmp_path, folder):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointWriteError, match=r"cannot be written to: .* Choose another"):
        folders.lock_folder(tmp_path / folder).__enter__()
    assert os.listdir(tmp_path) == ["file"]


def test_folder_that_takes_no_files_is_known_at_once(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    refuse(monkeypatch, lambda path: path.is_relative_to(tmp_path / "a"))
    with pytest.raises(CheckpointWriteError, match=r"cannot be written to: Permission denied"):
        folders.lock_folder(tmp_path / "a").__enter__()
    assert os.listdir(tmp_path) == ["a"]
