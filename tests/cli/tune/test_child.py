"""Functions in separate processes: their results, and failures without a result."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.cli.tune.child import run_in_child

HERE = "tests.cli.tune.test_child"


def reports_ok(report, folder, number):
    print("said aloud")
    (folder / "something").write_text("of no use afterwards")
    method = multiprocessing.get_start_method()
    report({"status": "ok", "twice": 2 * number, "pid": os.getpid(), "method": method, "folder": str(folder)})
    time.sleep(60)  # not waited for


def leaves_its_number(report, folder, file):
    file.write_text(str(os.getpid()))
    time.sleep(120)


def silent(report, folder):
    os._exit(3)


def struck(report, folder, number):
    os.kill(os.getpid(), number)


def raises(report, folder):
    raise ValueError("not caught")


@pytest.mark.whole
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_results_and_exit_status_of_processes(executable_is_warm, tmp_path):
    log = tmp_path / "log"
    begun = time.monotonic()
    message = run_in_child(f"{HERE}:reports_ok", log, number=21)
    assert time.monotonic() - begun < 50
    assert (message["status"], message["twice"]) == ("ok", 42)
    assert message["pid"] != os.getpid()
    assert message["method"] == multiprocessing.get_start_method()  # of the workers of dataloaders
    assert log.read_text() == "said aloud\n"
    assert [file.name for file in tmp_path.iterdir()] == ["log"]
    ended = "the process ended with {} and without a message"
    assert run_in_child(f"{HERE}:silent", log) == {"status": "failed", "error": ended.format("status 3")}
    killed = run_in_child(f"{HERE}:struck", log, number=signal.SIGKILL)
    assert killed == {"status": "out of memory", "error": "killed by the system"}
    dead = run_in_child(f"{HERE}:struck", log, number=signal.SIGTERM)
    assert dead == {"status": "failed", "error": ended.format(f"signal {signal.SIGTERM:d}")}
    assert run_in_child(f"{HERE}:raises", log)["error"] == ended.format("status 1")
    assert "ValueError: not caught" in log.read_text()


@pytest.mark.whole
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_processes_end_with_their_parent(tmp_path):
    from _faults.bench import wait_until  # not above: the processes do not find it

    code = (
        "from pathlib import Path; from trainer.cli.tune.child import run_in_child\n"
        "from trainer.cli.warm_process import warm_processes\n"
        f"with warm_processes(): run_in_child('{HERE}:leaves_its_number', Path('log'), file=Path('{tmp_path}/number'))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment) as parent:
        file = tmp_path / "number"
        wait_until(lambda: file.exists() and file.read_text() != "", 60)
        parent.kill()
    wait_until(lambda: not Path(f"/proc/{file.read_text()}").exists(), 60)
