"""Run tests on the simulated device in a separate pytest process, because the simulation may crash its process.

A test that uses the fixture ``cuda`` runs there, and on a machine without a GPU also tests marked ``gpu``.
:class:`Child` sends the name of a test and waits for its outcome. As a script, this is the process.
"""

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

from tests.simulated_cuda import device
from tests.warm_python import ROOT, WarmPython


class Outcome(NamedTuple):
    """The outcome of a test: ``"passed"``, ``"failed"`` or ``"skipped"``, and its message."""

    result: str
    text: str


class Child:
    """A process that runs tests on the simulated device, one after the other.

    Args:
        python: starts the process.
        files: files with the tests.
    """

    def __init__(self, python: WarmPython, files: Iterable[Path]) -> None:
        self._python = python
        self._files = sorted(map(str, files))
        self._errors: IO[str] | None = None
        self._process: subprocess.Popen[str] | None = None
        self.refuses: str | None = None

    def run(self, nodeid: str) -> Outcome:
        """Run a test. If the process crashes, the test has failed, and the next test gets a new process."""
        if self._process is None and self.refuses is None:
            self._start()
        if self.refuses is not None:
            return Outcome("skipped", self.refuses)
        try:
            print(nodeid, file=self._process.stdin, flush=True)
            return self._answer()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._end()

    def _end(self) -> str:
        """Release a crashed process. Returns its last output."""
        self._process.communicate()
        with self._errors as errors:
            errors.seek(0)
            said = errors.read().partition("Extension modules:")[0][-5000:]
        self._process = self._errors = None
        return said

    def _start(self) -> None:
        pipe = subprocess.PIPE
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process lives)
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        self._process = self._python.start(
            "-m",
            __name__,
            *self._files,
            stdin=pipe,
            stdout=pipe,
            stderr=self._errors,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        ready = self._answer()
        if ready.result != "ready":
            self.refuses = f"CUDA cannot be simulated with this build of torch: {ready.text}"

    def _answer(self) -> Outcome:
        """Return the answer of the process."""
        line = self._process.stdout.readline()
        if line:
            return Outcome(*json.loads(line))
        return Outcome("failed", f"The process of the simulated device died.\n{self._end()}")


class _Loop:
    """Plugin of the process's pytest: runs the requested tests, and sends their outcomes."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests, self._answers = requests, answers
        self._outcome = Outcome("passed", "")

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Import no file before one of its tests is requested."""
        session.perform_collect = partial(session.perform_collect, genitems=False)  # type: ignore[method-assign]

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self._files = {file.nodeid: file for file in items}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items: dict[str, pytest.Item] = {}
        for line in self._requests:
            nodeid = line.rstrip("\n")
            if nodeid not in items:
                items |= {item.nodeid: item for item in session.genitems(self._files[nodeid.partition("::")[0]])}
            self._outcome = Outcome("passed", "")
            session.config.hook.pytest_runtest_protocol(item=items[nodeid], nextitem=None)
            self.say(*self._outcome)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed or self._outcome.result != "passed":
            return
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        printed = "".join(f"\n--- {name} ---\n{content}" for name, content in report.sections)
        self._outcome = Outcome(report.outcome, text + printed)

    def say(self, result: str, text: str) -> None:
        print(json.dumps([result, text]), file=self._answers, flush=True)


def main(files: list[str]) -> None:
    """Prove the simulation, then run tests of these files until the input ends."""
    faulthandler.enable()
    loop = _Loop(os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    try:
        device.prepare()
        device.probe()
    except Exception as error:
        loop.say("refused", f"{type(error).__name__}: {error}")
        return
    loop.say("ready", "")
    pytest.main(["-p", "no:cacheprovider", "-p", "pytest_timeout", "--rootdir", str(ROOT), *files], plugins=[loop])


if __name__ == "__main__":
    main(sys.argv[1:])
