"""Programs in forks of a server behave as in a new Python, which runs them outside of `warm_processes`."""

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from _faults.bench import wait_until

from tests.cli.conftest import write
from trainer.cli.warm_process import start_process, warm_processes

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the server runs on Linux only"),
    pytest.mark.whole,  # starts processes, which import no torch
]

DESCRIBE = """
    import gc, json, os, signal, sys, threading, time
    sys.stdin.read()
    if sys.argv[1:] == ["sleeper"]:
        sys.exit(time.sleep(1.0))
    print(json.dumps({
        "signals": {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
        "wake-up": signal.set_wakeup_fd(-1),
        "environment": {name: os.environ[name] for name in os.environ if name not in ("TRAINER_PARENT", "LC_CTYPE")},
        "parent": int(os.environ["TRAINER_PARENT"]) == os.getppid(),
        "folder": os.getcwd(),
        "arguments": [sys.argv, sys.orig_argv, sys.executable, sys.path],
        "main": [__name__, __spec__.name, sys.modules["__main__"].__file__],
        "files": sorted(set(os.listdir("/proc/self/fd")) - {"3"}),  # that of the listing itself
        "collects": gc.isenabled(),
        "threads": [thread.name for thread in threading.enumerate()],
        "leads a session": os.getsid(0) == os.getpid(),
        "user's modules": [name for name in sys.modules if name in ("users", "packaged")],
    }))
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run ``python -m program ARGUMENTS``, and return its exit status and its output."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path / "site-packages")]))

    def start(*words, **options):
        given = {"folder": str(tmp_path), "environment": dict(os.environ)} | options
        with (tmp_path / "log").open("wb") as log:
            return start_process(["program", *words], output=log, **given)

    def run(*words, **options):
        status = start(*words, **options).wait(timeout=60)
        return status, (tmp_path / "log").read_text()

    run.start = start
    return run


def test_program_finds_everything_as_in_a_new_python(run, tmp_path, monkeypatch):
    write(tmp_path, {"program.py": DESCRIBE, "users.py": "", "site-packages/packaged.py": ""})
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # as in a sweep on Slurm
    found = {}
    try:
        for name, context in (("new", nullcontext()), ("warm", warm_processes())):
            with context:
                run(names=["users.f", "collections.abc", "no.such.module"])
                sleeper = run.start("sleeper")  # with open files of its own
                environment = {**os.environ, "EXTRA": "1"}
                del environment["HOME"]
                found[name] = run("a", "b=c", environment=environment, own_session=True)
                sleeper.wait()
    finally:
        signal.signal(signal.SIGUSR2, before)
    new, warm = (json.loads(text) for _, text in found.values())
    assert new == warm
    assert [warm["signals"][str(int(number))] for number in (signal.SIGUSR2, signal.SIGTERM)] == ["1", "0"]
    assert (warm["environment"]["EXTRA"], "HOME" in warm["environment"]) == ("1", False)
    assert (warm["files"], warm["parent"], warm["leads a session"]) == (["0", "1", "2"], True, True)


ENDS = """
    import atexit, os, signal, sys, threading, time
    atexit.register(print, "exit function")
    threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
    sys.file = open("written", "w")  # not closed
    sys.file.write(sys.argv[1])
    exec(sys.argv[1])
"""


@pytest.mark.parametrize(
    "code",
    [
        "pass",
        "sys.exit(3)",
        "sys.exit('text')",
        "sys.exit(-1)",
        "1 / 0",
        "raise KeyboardInterrupt",
        "import ctypes; ctypes.CDLL(None).puts(b'of C')",
        "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGTERM)",
    ],
)
def test_program_ends_as_in_a_new_python(run, tmp_path, code):
    write(tmp_path, {"program.py": ENDS})
    results = []
    for context in (nullcontext(), warm_processes()):
        with context:
            status, text = run(code)
        lines = {line for line in text.splitlines() if not line.startswith("  ")}  # of the stack
        results.append((status, lines, (tmp_path / "written").read_text()))
    assert results[0] == results[1]


def test_output_of_imports_is_printed_once(run, tmp_path):
    code = "import ctypes\nprint('of Python')\nctypes.CDLL(None).puts(b'of C')\n"
    write(tmp_path, {"site-packages/packaged.py": code, "program.py": "import packaged\nprint('program')"})
    with warm_processes():
        outputs = [run(names=["packaged"])[1].splitlines() for _ in range(2)]
    assert [sorted(lines) for lines in outputs] == [["of C", "of Python", "program"], ["program"]]


def test_only_packages_are_imported_by_the_server(run, tmp_path):
    files = {
        "site-packages/packaged.py": "import os\nnumber = os.getpid()",
        "users.py": "import os\nnumber = os.getpid()",
    }
    program = "import os, packaged, users\nprint(packaged.number == os.getpid(), users.number == os.getpid())"
    write(tmp_path, {**files, "program.py": program})
    with warm_processes():
        outputs = [run(names=["packaged.number", "users.number"])[1] for _ in range(2)]
    assert outputs == ["False True\n"] * 2


def test_random_states_differ(run, tmp_path):
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    write(tmp_path, {"program.py": code})
    with warm_processes():
        first, second = (run(names=["numpy.random"])[1].split() for _ in range(2))
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_finalizers_of_shared_objects_do_not_run(run, tmp_path):
    files = {
        "site-packages/packaged.py": "import tempfile\nfolder = tempfile.TemporaryDirectory()",
        "program.py": "import os, packaged\nprint(os.path.isdir(packaged.folder.name))",
    }
    write(tmp_path, files)
    with warm_processes():
        assert [run(names=["packaged"])[1] for _ in range(2)] == ["True\n"] * 2


@pytest.mark.parametrize(
    "code",
    [
        "threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "file = open('/dev/zero'); sys.modules['__main__']._GPUS = ('/dev/zero',)",
    ],
)
def test_new_python_if_an_import_starts_a_thread_or_opens_a_gpu(run, tmp_path, code):
    write(tmp_path, {"site-packages/packaged.py": f"import os, sys, threading\nnumber = os.getpid()\n{code}"})
    write(tmp_path, {"program.py": "import os, packaged\nprint(packaged.number == os.getpid(), 'HOME' in os.environ)"})
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    with warm_processes():
        assert run(names=["packaged"]) == (0, "True True\n")
        assert run(names=["packaged"], environment=environment) == (0, "True False\n")


def test_threads_of_torch(run, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write(tmp_path, {"program.py": "import torch\nprint(torch.get_num_threads())"})
    with warm_processes():
        outputs = [run(names=["torch"], environment={**os.environ, "OMP_NUM_THREADS": n})[1] for n in ("1", "2")]
    assert outputs == ["1\n", "2\n"]


WAITS = """
    import os, signal, sys, time
    from trainer.cli.processes import end_with_parent
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    end_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


def test_signals_are_passed_on_and_programs_end_with_the_server(run, tmp_path):
    write(tmp_path, {"program.py": WAITS})
    log = tmp_path / "log"
    with warm_processes():
        process = run.start()
        wait_until(lambda: log.read_text() != "", 60)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.01)
        process.send_signal(signal.SIGTERM)
        assert (process.wait(), process.returncode) == (7, 7)
        process.send_signal(signal.SIGTERM)  # has no effect
        early = run.start()
        early.send_signal(signal.SIGTERM)
        assert early.wait() in (-signal.SIGTERM, 7)
        orphan = run.start()
        wait_until(lambda: log.read_text() != "", 60)
    assert orphan.wait() == -signal.SIGTERM
    wait_until(lambda: not Path(f"/proc/{log.read_text().strip()}").exists(), 60)


def test_server_that_crashes_is_started_again(run, tmp_path):
    write(tmp_path, {"site-packages/crashes.py": "import os\nos.abort()", "program.py": "print('program')"})
    with warm_processes():
        assert run(names=["crashes"])[0] == -signal.SIGABRT
        assert run() == (0, "program\n")
