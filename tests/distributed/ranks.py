"""Persistent ranks of one process group: a call runs a function on all of them, and returns the results.

Starting processes takes seconds, a small fit on two of them a tenth of a second. :class:`Ranks` starts them once for
hundreds of fits::

    with Ranks(python, 2) as ranks:
        first, second = ranks.call(setups.fit, setup, "ddp")

The function (by its name), arguments and results are pickled. A process that raises, or does not answer in time,
breaks the group: all are killed, and the next call starts others. Each call has the environment of the start.

As a script, in each process: ``ranks.py RANK SIZE FILE`` joins the group by ``FILE``, reads calls from its standard
input and writes the results to its standard output. The output of a call goes to standard error.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.warm_python import ROOT


def run_program(python, *words, timeout):
    """Run a program that starts ranks. Returns its exit status, and the output of all its processes."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT")}
    with python.start(
        *words, text=True, env=inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout)  # which ends with the last process
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the other rank too
            raise
    return process.returncode, output


class RankError(Exception):
    """A call raised on some rank, or a rank did not return."""


class Ranks:
    """A process group to call functions in; a context manager.

    Args:
        python: starts the processes.
        size: number of ranks.
        timeout: seconds per call; also the timeout of a collective without all ranks.
    """

    def __init__(self, python, size, timeout=120.0):
        self.python, self.size, self.timeout = python, size, timeout
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        self._environment = dict(os.environ)  # without that of a test that restarts the processes
        self._started = 0
        self._processes = []
        self._calls = []
        self._answers = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()
        self._folder.cleanup()

    def call(self, function, *arguments):
        """Run a function of a module in each process.

        Returns:
            The results by rank.

        Raises:
            RankError: the errors and missing answers by rank, in order of time.
        """
        if not self._processes:
            self._start()
        for connection in self._calls:
            connection.send_bytes(pickle.dumps((function, arguments)))
        results = {}
        errors = {}
        ends = time.monotonic() + self.timeout
        while len(results) + len(errors) < self.size:
            waiting = {c: rank for rank, c in enumerate(self._answers) if rank not in results and rank not in errors}
            ready = wait([*waiting], max(0.0, ends - time.monotonic()))
            if not ready:
                errors |= dict.fromkeys(waiting.values(), "no answer")
            for connection in ready:
                rank = waiting[connection]
                try:
                    result, error = pickle.loads(self._answers[rank].recv_bytes())
                except EOFError:
                    result, error = None, "the process has ended"
                if error is None:
                    results[rank] = result
                else:
                    errors[rank] = error
                    ends = min(ends, time.monotonic() + 3.0)  # the others may wait for this rank
        if errors:
            self.end()
            raise RankError("\n".join(f"rank {rank}: {error}" for rank, error in errors.items()))
        return [results[rank] for rank in range(self.size)]

    def _start(self):
        self._started += 1
        rendezvous = Path(self._folder.name) / f"group_{self._started}"
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # asked for, and not used: there is a group
        for rank in range(self.size):
            environment = {
                **self._environment, **address, "OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank), "RANK": str(rank),
                "NODE_RANK": "0", "WORLD_SIZE": str(self.size), "PYTHONPATH": str(ROOT),
            }  # fmt: skip
            words = [str(Path(__file__)), str(rank), str(self.size), str(rendezvous), str(self.timeout)]
            process = self.python.start(
                *words, env=environment, cwd=self._folder.name, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._processes.append(process)
            self._calls.append(Connection(os.dup(process.stdin.fileno()), readable=False))
            self._answers.append(Connection(os.dup(process.stdout.fileno()), writable=False))

    def end(self):
        """Kill the processes."""
        for connection in (*self._calls, *self._answers):
            connection.close()
        for process in self._processes:
            process.kill()
            process.communicate()
        self._processes, self._calls, self._answers = [], [], []


def main(rank, size, rendezvous, timeout):
    """Answer calls until the input ends."""
    calls, answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    environment = dict(os.environ)
    while True:
        try:
            call = calls.recv_bytes()
        except EOFError:
            break
        result, error = None, None
        try:
            function, arguments = pickle.loads(call)
            result = function(*arguments)
        except BaseException:
            error = traceback.format_exc()
        answers.send_bytes(pickle.dumps((result, error)))
        os.environ.clear()  # for example of Lightning's seed, which samplers use
        os.environ.update(environment)
    os._exit(0)  # gloo's threads may be alive when the interpreter ends: an abort


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
