"""Functions in processes of their own: what they tell, and what becomes of those that do not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.cli.tune.apart import killed, run_apart

HERE = "tests.cli.tune.test_apart"


def told(argument, tell):
    print("said aloud")
    method = multiprocessing.get_start_method()
    tell({"status": "ok", "twice": 2 * argument, "pid": os.getpid(), "method": method})


def told_and_hangs(argument, tell):
    tell({"status": "ok"})
    time.sleep(60)


def leaves_its_number(argument, tell):
    argument.write_text(str(os.getpid()))
    time.sleep(120)


def silent(argument, tell):
    os._exit(3)


def struck(argument, tell):
    os.kill(os.getpid(), argument)


def raises(argument, tell):
    raise ValueError("not caught")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_what_they_tell_and_how_they_end(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.cli.tune.apart._LAST_WORDS", 0.2)
    log = tmp_path / "log"
    message = run_apart(f"{HERE}:told", 21, log)
    assert (message["status"], message["twice"]) == ("ok", 42)
    assert message["pid"] != os.getpid()
    assert message["method"] == multiprocessing.get_start_method()  # of the workers of dataloaders
    assert log.read_text() == "said aloud\n"
    assert run_apart(f"{HERE}:silent", None, log) == {"status": "died", "signal": None, "exit_status": 3}
    dead = run_apart(f"{HERE}:struck", signal.SIGKILL, log)
    assert (dead["signal"], killed(dead)) == (signal.SIGKILL, True)
    dead = run_apart(f"{HERE}:struck", signal.SIGTERM, log)
    assert (dead["signal"], killed(dead)) == (signal.SIGTERM, False)
    assert run_apart(f"{HERE}:raises", None, log)["exit_status"] == 1
    assert "ValueError: not caught" in log.read_text()
    begun = time.monotonic()
    assert run_apart(f"{HERE}:told_and_hangs", None, log)["status"] == "ok"
    assert time.monotonic() - begun < 30


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_they_do_not_outlive_the_one_that_started_them(tmp_path):
    code = (
        "from pathlib import Path; from trainer.cli.tune import apart; apart._PRELOADED = 'json';"
        f"apart.run_apart('{HERE}:leaves_its_number', Path('{tmp_path}/number'), Path('{tmp_path}/log'))"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[3]) as parent:
        number = wait_for(lambda: (tmp_path / "number").exists() and (tmp_path / "number").read_text())
        parent.kill()
    assert wait_for(lambda: not Path(f"/proc/{number}").exists() or None)


def wait_for(what, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found
