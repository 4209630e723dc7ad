"""What a process does about those that it has started; whole runs are in ``tests/distributed/test_failures.py``."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from trainer.compat import processes
from trainer.compat.processes import _how, _Others, last_words


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Others]:
    """Rank 1 sleeps; rank 2 is done, well."""
    monkeypatch.setattr(processes, "GRACE", 0.2)
    monkeypatch.setattr(processes, "others", found := _Others())
    found._processes = {1: subprocess.Popen(["sleep", "100"]), 2: subprocess.Popen([sys.executable, "-c", ""])}
    found._processes[2].wait()
    yield found
    for process in found._processes.values():
        process.kill()
        process.wait()


def test_how_a_process_has_ended() -> None:
    assert _how(-signal.SIGKILL) == "was killed by SIGKILL"
    assert _how(-200) == "was killed by signal 200"
    assert _how(3).startswith("has ended with exit status 3")


def test_who_fails_is_named_once(others: _Others, capfd: Any) -> None:
    assert not others._any_has_failed()
    others.send(signal.SIGTERM)
    others._processes[1].wait()
    assert others._any_has_failed()
    assert others._any_has_failed()
    pid = others._processes[1].pid
    assert capfd.readouterr().err == f"\ntrainer: Rank 1 (process {pid}) was killed by SIGTERM. The others end, too.\n"
    others.expected.add(-signal.SIGTERM)
    assert not others._any_has_failed()
    others.start_run()
    assert others._any_has_failed()


def test_at_the_end_of_a_program_that_did_not_fail_the_others_go_on(others: _Others) -> None:
    others.end()
    assert others._processes[1].poll() is None


def test_at_the_end_of_one_that_failed_they_end(others: _Others, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    left: list[int] = []
    monkeypatch.setattr(processes, "_leave", left.append)
    with last_words(SystemExit(7), waited_for=True):
        pass
    others.end()
    assert others._processes[1].wait() == -signal.SIGKILL
    assert "has not ended by itself, and is killed" in capfd.readouterr().err
    time.sleep(0.4)  # what follows hangs
    assert left == [7]


def test_last_words_have_an_end(others: _Others, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    left: list[int] = []
    monkeypatch.setattr(processes, "_leave", left.append)
    monkeypatch.setattr(processes, "LAST_WORDS", 0.1)
    with last_words(ValueError("too much"), waited_for=False):
        time.sleep(0.3)
    assert (left, others.has_failed) == ([], False)
    with last_words(ValueError("too much"), waited_for=True):
        time.sleep(0.3)  # a callback waits for the other rank
    assert (left, others.has_failed) == ([1], True)
    assert "ValueError: too much" in capfd.readouterr().err
    assert others._processes[1].wait() == -signal.SIGKILL
