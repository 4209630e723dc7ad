"""Supervision of child processes; whole runs are in ``tests/distributed/test_failures.py``."""

import os
import signal
import subprocess
import sys
import time

import pytest

from trainer.distributed import child_processes as processes
from trainer.distributed.child_processes import ChildProcesses, _exit_description, deadline_after


def test_only_processes_that_the_launcher_starts_know_their_parent():
    """A later one, such as torchrun in a subprocess of the program, has another parent, and must not exit."""
    with processes.parent_named():
        assert os.environ["AMP_TRAINER_PARENT"] == str(os.getpid())
    assert "AMP_TRAINER_PARENT" not in os.environ


@pytest.fixture
def children(monkeypatch):
    """Rank 1 sleeps; rank 2 has ended successfully."""
    monkeypatch.setattr(processes, "GRACE", 0.2)
    monkeypatch.setattr(processes, "children", found := ChildProcesses())
    found._processes = {1: subprocess.Popen(["sleep", "100"]), 2: subprocess.Popen([sys.executable, "-c", ""])}
    found._processes[2].wait()
    yield found
    for process in found._processes.values():
        process.kill()
        process.wait()


def test_how_a_process_has_ended():
    assert _exit_description(-signal.SIGKILL) == "was killed by SIGKILL"
    assert _exit_description(-200) == "was killed by signal 200"
    assert _exit_description(3).startswith("has ended with exit status 3")


def test_failed_rank_is_named_once(children, capfd):
    assert not children._any_has_failed()
    children.send(signal.SIGTERM)
    children._processes[1].wait()
    assert children._any_has_failed()
    assert children._any_has_failed()
    pid = children._processes[1].pid
    assert capfd.readouterr().err == f"\ntrainer: Rank 1 (process {pid}) was killed by SIGTERM. The others end, too.\n"
    children.expected.add(-signal.SIGTERM)
    assert not children._any_has_failed()
    children.start_run()
    assert children._any_has_failed()


def test_other_ranks_continue_after_a_successful_end(children):
    children.exit()
    assert children._processes[1].poll() is None


def test_other_ranks_end_after_a_failure(children, monkeypatch, capfd):
    left = []
    monkeypatch.setattr(processes, "_exit", left.append)
    with deadline_after(SystemExit(7), waited_for=True):
        pass
    children.exit()
    assert children._processes[1].wait() == -signal.SIGKILL
    assert "has not exited, and is killed" in capfd.readouterr().err
    time.sleep(0.4)  # the next call hangs
    assert left == [7]


def test_last_words_have_an_end(children, monkeypatch, capfd):
    left = []
    monkeypatch.setattr(processes, "_exit", left.append)
    monkeypatch.setattr(processes, "ERROR_TIMEOUT", 0.1)
    with deadline_after(ValueError("too much"), waited_for=False):
        time.sleep(0.3)
    assert (left, children.has_failed) == ([], False)
    with deadline_after(ValueError("too much"), waited_for=True):
        time.sleep(0.3)  # a callback waits for the other rank
    assert (left, children.has_failed) == ([1], True)
    assert "ValueError: too much" in capfd.readouterr().err
    assert children._processes[1].wait() == -signal.SIGKILL
