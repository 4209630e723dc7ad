"""Start and stop runs, and compare their results."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from _faults.scoreboard import Outcome

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HYDRA_FULL_ERROR": "1", "COLUMNS": "200"}
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")


class HungError(Exception):
    """Raised if a run does not end in time."""


class Run:
    """A process that was started.

    Args:
        folder: folder of its ``log``, ``pid`` and ``exit`` files.
        process: the process if it is a child of this process and not a fork of the server.
        results: output folder of the program.
    """

    def __init__(
        self, folder: Path, process: subprocess.Popen[bytes] | None = None, results: Path | None = None
    ) -> None:
        self.folder, self.process, self.results = folder, process, results or folder
        self.started = time.monotonic()

    @cached_property
    def pid(self) -> int:
        """Return the process id."""
        if self.process is not None:
            return self.process.pid
        wait_until((self.folder / "pid").exists, 30)
        return int((self.folder / "pid").read_text())

    @property
    def status(self) -> int | None:
        """Return the exit status, a negative signal number, or None while the run continues."""
        if self.process is not None:
            return self.process.poll()
        file = self.folder / "exit"
        return int(file.read_text()) if file.exists() else None

    @property
    def log(self) -> str:
        """Return the output."""
        file = self.folder / "log"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait(self, seconds: float) -> int:
        """Wait for the end, and return the status.

        Raises:
            HungError: the run did not end in time; it is killed.
        """
        _ = self.pid
        if not wait_until(lambda: self.status is not None, seconds, fails=False):
            self.kill()
            raise HungError(f"still running after {seconds:.0f} s")
        status = self.status
        assert status is not None
        return status

    @property
    def children(self) -> list[int]:
        """Return the running child processes, on Linux."""
        found: list[int] = []
        for file in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, file.read_text().split())
        return sorted(found)

    def ends_within(self, seconds: float) -> bool:
        """Return whether the run ends by itself in this time."""
        return wait_until(lambda: self.status is not None, seconds, fails=False)

    def send(self, *names: str) -> None:
        """Send signals."""
        for name in names:
            with suppress(ProcessLookupError):
                os.kill(self.pid, getattr(signal, name))

    def kill(self) -> None:
        """Kill the process and its descendants."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        wait_until(lambda: self.status is not None, 10, fails=False)


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_until(condition: Any, seconds: float, *, fails: bool = True) -> bool:
    """Return whether ``condition()`` becomes true in this time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            if fails:
                raise HungError(f"nothing happened in {seconds:.0f} s")
            return False
        time.sleep(0.005)
    return True


@dataclass
class Reference:
    """The undisturbed run."""

    folder: Path
    seconds: float


class Bench:
    """Run the cases in a folder.

    Args:
        folder: each case gets subfolders.
        kills: number of kills of the case that kills at random instants.
        seed: seed of these instants.
        python: interpreter of the programs.
    """

    def __init__(self, folder: Path, kills: int = 40, seed: int = 0, python: str = sys.executable) -> None:
        self.folder, self.kills, self.random, self.python = folder, kills, random.Random(seed), python
        self.runs: list[Run] = []
        self._references: dict[str, Reference] = {}
        self._number = 0
        environment = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES} | ENVIRONMENT
        paths = [str(ROOT / "scripts"), str(ROOT), environment.get("PYTHONPATH", "")]
        self.environment = environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._server: subprocess.Popen[bytes] | None = None
        self._warm, self._warm_python = ExitStack(), python

    @property
    def server(self) -> subprocess.Popen[bytes]:
        """Start the server on first use."""
        if self._server is None:
            command = [self.python, "-m", "_faults.server"]
            pipe = subprocess.PIPE
            self._server = subprocess.Popen(command, env=self.environment, cwd=self.folder, stdin=pipe, stdout=pipe)
            assert self._server.stdout is not None
            lines = iter(self._server.stdout.readline, b"")  # DeepSpeed may print, too
            assert b"ready\n" in lines, "the server did not start"
        return self._server

    @property
    def warm_python(self) -> str:
        """Return the path of a Python with torch and Lightning already imported, so that torchrun starts it fast."""
        if self._warm_python == sys.executable:
            from tests.warm_python import WarmPython, start_server

            folder = Path(self._warm.enter_context(tempfile.TemporaryDirectory(prefix="faults")))  # has a short path
            server = self._warm.enter_context(start_server(folder, folder, subprocess.PIPE))
            self._warm.callback(server.kill)
            self._warm_python = str(WarmPython(folder).executable)
        return self._warm_python

    def close(self) -> None:
        """Kill the remaining processes, including those that ended runs have left behind."""
        for run in self.runs:
            run.kill()
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
        self._warm.close()

    # --- runs ---------------------------------------------------------------------------------------------------

    def new_folder(self, name: str) -> Path:
        """Create an empty folder."""
        self._number += 1
        folder = self.folder / f"{self._number:03d}-{name.replace(' ', '-')}"
        folder.mkdir(parents=True)
        return folder

    def train(self, who: str, folder: Path, *, fresh: bool = False, environment: Any = None, **options: Any) -> Run:
        """Start the program (see ``program.main``). With ``fresh``, start it in a new interpreter."""
        given = {"who": who, "folder": str(folder), **options}
        if "setup" in given:
            given["setup"] = asdict(given["setup"])
        if not fresh:
            return self._fork("program", given, environment or {})
        where = self.new_folder("run")
        with (where / "log").open("ab") as log:
            process = subprocess.Popen(
                [self.python, "-m", "_faults.program", json.dumps(given)], cwd=folder,
                env=self.environment | (environment or {}), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        self.runs.append(Run(where, process))
        return self.runs[-1]

    def command(self, cwd: Path, *words: str, environment: Any = None) -> Run:
        """Start the command line: ``python -m trainer WORDS``."""
        return self._fork("cli", list(words), environment or {}, cwd=str(cwd))

    def ranks(self, who: str, folder: Path, number: int = 2, **options: Any) -> list[Run]:
        """Start the program on several ranks."""
        port, runs = free_port(), []
        for rank in range(number):
            environment = {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(number), "RANK": str(rank),
                "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "faults", "GROUP_RANK": "0",
                "LOCAL_WORLD_SIZE": str(number),
            }  # fmt: skip
            runs.append(self.train(who, folder, rank=rank, ranks=number, environment=environment, **options))
        return runs

    def torchrun(
        self, who: str, folder: Path, *, nodes: int = 1, restarts: int = 100, environment: Any = None, **options: Any
    ) -> list[Run]:
        """Start the program on two ranks with torchrun, which restarts both if one fails.

        There is one torchrun per node; each of two nodes has one rank.
        """
        words = [f"--nnodes={nodes}", f"--nproc-per-node={2 // nodes}", f"--rdzv-endpoint=localhost:{free_port()}"]
        arguments = options.pop("trainer", {}) | ({"devices": 1, "num_nodes": 2} if nodes == 2 else {})
        words, options = [*words, f"--max-restarts={restarts}"], {**options, "trainer": arguments}
        return [self.agent(who, folder, *words, environment=environment, **options) for _ in range(nodes)]

    def agent(self, who: str, folder: Path, *words: str, environment: Any = None, **options: Any) -> Run:
        """Start one torchrun with these arguments for a program on two ranks."""
        given = {"who": who, "folder": str(folder), "ranks": 2, **options}
        given["setup"] = asdict(given["setup"])
        words = ("--rdzv-backend=c10d", "--monitor-interval=0.1", *words)
        words = (*words, "-m", "_faults.program", json.dumps(given))
        environment = {"PYTHON_EXEC": self.warm_python} | (environment or {})
        return self._fork("torchrun", words, environment, cwd=str(folder))

    def srun(self, cwd: Path, *words: str, job: int = 4711, again: int = 0) -> list[Run]:
        """Start the command line once on each of two nodes, with the variables that Slurm's srun sets.

        ``scontrol requeue JOB`` sends a SIGTERM to the processes, as on a cluster. It appends its arguments to the file
        ``scontrol`` in ``cwd``.
        """
        folder = self.new_folder("slurm")
        pids, command = folder / "pids", folder / "scontrol"
        command.write_text(f'#!/bin/sh\necho "$@" >> {cwd}/scontrol\nkill -TERM $(cat {pids})\n')
        command.chmod(0o755)
        port, runs = free_port(), []
        for node in range(2):
            environment = {
                "SLURM_JOB_ID": str(job), "SLURM_JOBID": str(job), "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0",
                "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2", "SLURM_PROCID": str(node),
                "SLURM_NODEID": str(node), "SLURM_LOCALID": "0", "SLURM_NODELIST": "127.0.0.1,127.0.0.2",
                "SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.2", "SLURM_TASKS_PER_NODE": "1(x2)",
                "MASTER_PORT": str(port),  # otherwise derived from the job's number, and possibly in use
                "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            } | ({"SLURM_RESTART_COUNT": str(again)} if again else {})  # fmt: skip
            runs.append(self.command(cwd, *words, environment=environment))
        pids.write_text(" ".join(str(run.pid) for run in runs))
        return runs

    def _fork(self, what: str, options: Any, environment: dict[str, str], **more: Any) -> Run:
        folder = self.new_folder("run")
        request = {"what": what, "options": options, "folder": str(folder), "environment": environment, **more}
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(request).encode() + b"\n")
        self.server.stdin.flush()
        self.runs.append(Run(folder, results=Path(more.get("cwd", folder))))
        return self.runs[-1]

    def reference(self, who: str, **options: Any) -> Reference:
        """Return the undisturbed run with these options, and run it on first use."""
        key = json.dumps([who, {k: asdict(v) if k == "setup" else v for k, v in options.items()}], sort_keys=True)
        if key not in self._references:
            folder = self.new_folder("reference")
            options.setdefault("start", None)
            number, _ = options.pop("ranks", 1), self.server
            started = time.monotonic()
            runs = [self.train(who, folder, **options)] if number == 1 else self.ranks(who, folder, number, **options)
            for run in runs:
                if run.wait(120) != 0:
                    raise RefusedError(last_line(run.log))
            self._references[key] = Reference(folder, time.monotonic() - started)
        return self._references[key]

    # --- comparing ----------------------------------------------------------------------------------------------

    def differences(self, folder: Path, reference: Reference, *, final: str = "final", without: int = -1) -> list[str]:
        """Return the differences from the reference: the final state, every trained batch, and the rows.

        Skip the batches of process ``without``, which trained wrong values on purpose.
        """
        import torch

        from _faults.training import differences, read_diary

        found = []
        for expected in sorted(reference.folder.glob("final_*.pt")):
            rank = expected.stem.partition("_")[2]
            end = folder / f"{final}_{rank}.pt"
            if not end.exists():
                return ["no end"]
            one, other = (torch.load(file, weights_only=True) for file in (end, expected))
            found += [line.lstrip(".") for line in differences(one, other)]
            wanted = {line[:2]: line[2:4] for line in read_diary(reference.folder / f"batches_{rank}.jsonl")}
            if final != "final":
                continue
            diary = read_diary(folder / f"batches_{rank}.jsonl")
            if wanted.keys() - {line[:2] for line in diary}:
                found.append("batches never trained")
            for epoch, batch, ids, loss, pid in diary:
                if pid != without and (ids, loss) != wanted.get((epoch, batch)):
                    found.append("losses" if ids == wanted[epoch, batch][0] else "samples")
        if final == "final" and read_rows(folder) != read_rows(reference.folder):
            found.append("rows of metrics.csv")
        return list(dict.fromkeys(found))

    def verdict(self, folder: Path, reference: Reference, detail: str = "", **how: Any) -> Outcome:
        """Return ``exact`` or ``inexact``."""
        found = self.differences(folder, reference, **how)
        if found == ["no end"]:
            return Outcome("lost", "no result")
        return Outcome("inexact", "other " + summary(found)) if found else Outcome("exact", detail)

    def close_to(self, folder: Path, reference: Reference, detail: str = "") -> Outcome:
        """Return ``exact`` if weights, steps and schedules of the remaining ranks are equal up to rounding."""
        import torch

        from _faults.training import parts

        ends, largest = sorted(folder.glob("final_*.pt")), 0.0
        for end in ends:
            one, other = (torch.load(file, weights_only=True) for file in (end, reference.folder / end.name))
            mine, theirs = parts(one["weights"]), parts(other["weights"])
            difference = max((mine[name] - theirs[name]).abs().max().item() for name in theirs)
            if difference > 1e-5 or one["steps"] != other["steps"] or one["schedules"] != other["schedules"]:
                return Outcome("inexact", f"weights differ by {difference:.2g} after {one['steps']} steps")
            largest = max(largest, difference)
        return Outcome("exact", f"{detail}; weights to {largest:.1g}") if ends else Outcome("lost", "no result")


class RefusedError(Exception):
    """Raised if a case cannot run, for example because its undisturbed run fails."""


def summary(found: list[str]) -> str:
    """Summarize the differences by their kinds, so that they fit into a table cell."""
    kinds = {line if " " in line else line.partition(".")[0] for line in found}
    order = ("weights", "averages", "optimizers", "scaler", "schedules")
    return ", ".join(sorted(kinds, key=lambda kind: (order.index(kind) if kind in order else len(order), kind)))


def last_line(log: str) -> str:
    """Return the last nonblank line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else "(no output)"


def read_rows(folder: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """Read the rows of all ``metrics.csv``, by step and names. Later files have precedence."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for file in sorted(folder.rglob("metrics.csv"), key=lambda file: file.stat().st_mtime):
        for row in csv.DictReader(file.read_text().splitlines()):
            given = {name: value for name, value in row.items() if name and value}
            rows[(row.get("step") or "", *sorted(given))] = given
    return rows


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints below ``folder``, files or folders, newest first."""
    found = [file for file in folder.rglob("*.ckpt") if file.parent.suffix != ".ckpt"]
    return sorted(found, key=lambda file: file.stat().st_mtime_ns, reverse=True)


def largest(checkpoint: Path) -> Path:
    """Return the largest file of a checkpoint in a folder, or the file itself."""
    return max(checkpoint.rglob("*"), key=lambda file: file.stat().st_size) if checkpoint.is_dir() else checkpoint


def contents(checkpoint: Path) -> bytes:
    """Return the bytes of a checkpoint's largest file."""
    return largest(checkpoint).read_bytes()


def flip_bit(file: Path) -> None:
    """Flip one bit in the bytes of the largest tensor, which are in the middle of the file."""
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)


def cut_short(file: Path) -> None:
    """Remove the second half of the file."""
    os.truncate(file, file.stat().st_size // 2)


@contextmanager
def small_disk(megabytes: int, folder: Path) -> Iterator[bool]:
    """Mount a file system of that size at ``folder``, and yield whether that was possible."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    mounted = (
        shutil.which("mount") is not None
        and os.geteuid() == 0
        and subprocess.run(command, capture_output=True).returncode == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)
