from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.checkpoint import folders
from trainer.errors import CheckpointWriteError, FolderInUseError

HOLDER = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
from trainer.checkpoint.folders import held
with held(sys.argv[1]):
    child = os.fork() if sys.argv[3] == "forks" else 1
    if child:
        print(os.getpid(), child, flush=True)
    time.sleep(60)
"""


def holder(folder: Path, how: str = "") -> tuple[subprocess.Popen[str], int, int]:
    """Another process that holds ``folder``; its id, and that of what it has forked."""
    root = Path(folders.__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, folder, root, how or "alone"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pid, child = process.stdout.readline().split()
    return process, int(pid), int(child)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with folders.held(tmp_path / "a" / "b"):
        assert os.listdir(tmp_path / "a" / "b") == [folders.LOCK]
        who = json.loads((tmp_path / "a" / "b" / folders.LOCK).read_text())
        assert who["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []
    with folders.held(tmp_path / "a"):
        (tmp_path / "a" / "x.ckpt").touch()
    assert os.listdir(tmp_path / "a") == ["x.ckpt"]


def test_the_same_process_may_hold_it_twice(tmp_path: Path) -> None:
    with folders.held(tmp_path):
        with folders.held(tmp_path / "." / ""):
            pass
        assert os.listdir(tmp_path) == [folders.LOCK]
    assert os.listdir(tmp_path) == []


def test_what_killed_saves_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".123-abc.ckpt-part").touch()
    with folders.held(tmp_path):
        assert os.listdir(tmp_path) == [folders.LOCK]


@pytest.mark.parametrize("how", ["alone", "forks"])
def test_another_process_has_it_until_it_is_killed(tmp_path: Path, how: str) -> None:
    process, pid, child = holder(tmp_path, how)
    try:
        who = rf"in use by another run \(process {pid} on .*, since 20..-..-.. "
        with pytest.raises(FolderInUseError, match=who), folders.held(tmp_path):
            pass
        process.kill()
        process.wait(10)
        with folders.held(tmp_path):  # at once, though a process that it forked is there still
            assert json.loads((tmp_path / folders.LOCK).read_text())["pid"] == os.getpid()
    finally:
        process.kill()
        if how == "forks":
            os.kill(child, signal.SIGKILL)
        process.communicate(timeout=10)
    assert os.listdir(tmp_path) == []


def test_a_lock_that_was_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the other run had ended between our opening its file and our locking it."""
    locks = []

    def lock(handle: int) -> bool:
        locks.append(handle)
        if len(locks) == 1:
            (tmp_path / folders.LOCK).unlink()
        return True

    monkeypatch.setattr(folders, "_try_lock", lock)
    with folders.held(tmp_path):
        assert json.loads((tmp_path / folders.LOCK).read_text())["pid"] == os.getpid()
    assert len(locks) == 2


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/nowhere/below"])
def test_a_folder_that_cannot_be_written_to(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointWriteError, match=r"cannot be written to: .* choose another"):
        folders.held(tmp_path / folder).__enter__()
    assert os.listdir(tmp_path) == ["file"]
