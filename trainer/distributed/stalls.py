"""Detect a hang while it lasts, and report the rank that the others wait for, its current line, and the duration.

If a process is missing in a collective, the others wait until the collective's timeout (half an hour), and the error
then names no rank. Here a thread of each process periodically checks whether the run makes progress. If it has made
none for a third of the timeout, each process writes its position to the store of the rendezvous: its batch, its line,
and the last collectives in torch's flight recorder. One process combines the positions in a report. While a run makes
progress, nothing is exchanged, and steps take no additional time.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as distributed

from trainer.common.files import write_text
from trainer.distributed.child_processes import write_stderr

_RUNS = itertools.count()
"""Counts the runs, equally on all processes. The count is part of the keys, because the store outlives a run."""
_CHECKS_PER_TIMEOUT = 20
"""Number of checks before a run without progress counts as stalled."""
_LINES = 4
"""Stack lines in the message for a process that is waited for; the file has all lines."""
_LIBRARIES = re.compile(r"[/\\](torch|lightning|pytorch_lightning|deepspeed)[/\\]")
_INTERNAL = ("torch.distributed", "trainer.common.async_max")
"""Modules in which a process waits for other processes."""


class RankState(NamedTuple):
    """Position of a process.

    Attributes:
        rank, host, pid: the process.
        seconds: time without progress.
        phase: such as ``in the forward pass, in net.blocks.7 (Block), at step 120, batch_idx 20 of epoch 1``.
        blocked_in: the function in which it waits for others; "" if it does not wait.
        begun: number and description of the last collective that it has begun, by the name of the process group.
        stack: stack lines, the innermost last.
    """

    rank: int
    host: str
    pid: int
    seconds: float
    phase: str
    blocked_in: str
    begun: dict[str, tuple[int, str]]
    stack: list[str]


class StallWatch:
    """Check in a thread whether a run makes progress. A context manager.

    Args:
        process: this process's rank, and the number of processes.
        timeout: timeout of collectives. A run without progress for a third of it counts as stalled.
        counters: returns values that change as long as the run makes progress. Called in the thread.
        describe: returns the activity of the main thread from its frames, outermost first.
        folder: returns the folder for the file with all stacks, or None for no file.
    """

    def __init__(
        self,
        process: tuple[int, int],
        timeout: timedelta,
        counters: Callable[[], Any],
        describe: Callable[[list[FrameType]], str],
        folder: Callable[[], Path | None],
    ) -> None:
        self._rank, self._processes = process
        self._timeout = timeout.total_seconds() / 3
        self._counters, self._describe, self._folder = counters, describe, folder
        self._watched = threading.get_ident()
        self._ends = threading.Event()
        self._store: Any = None
        self._key = f"amp_trainer/stall/{next(_RUNS)}"
        self._collects = False

    def __enter__(self) -> StallWatch:
        threading.Thread(target=self._watch, daemon=True, name="stalls").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()

    def last_report(self) -> str | None:
        """Return the report of the current or last stall, from whichever process wrote it, or None."""
        with suppress(Exception):
            if self._store is not None and self._store.check([f"{self._key}/report"]):
                report: str = self._store.get(f"{self._key}/report").decode()
                return report
        return None

    def _watch(self) -> None:
        interval, has_reported = self._timeout / _CHECKS_PER_TIMEOUT, False
        seen, since = self._counters(), time.monotonic()
        while not self._ends.wait(interval):
            if (counters := self._counters()) != seen:
                seen, since = counters, time.monotonic()
                if has_reported:
                    has_reported = False
                    with suppress(Exception):
                        self._forget()
            elif not has_reported and (seconds := time.monotonic() - since) >= self._timeout:
                has_reported = True
                state = self._rank_state(seconds)
                try:
                    self._report_state(state, interval, seen)
                except Exception as problem:  # the store is in the memory of a process that may have died
                    write_stderr(f"{_report([state])}\nThe state of the other processes could not be read: {problem}")

    # --- this process -----------------------------------------------------------------------------------------

    def _rank_state(self, seconds: float) -> RankState:
        frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[self._watched])][::-1]
        summary = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
        stack = [line.rstrip() for line in summary.format()]
        phase = ""
        with suppress(Exception):  # the main thread may be changing the objects that are read
            phase = self._describe(frames)
        host, pid = socket.gethostname(), os.getpid()
        return RankState(self._rank, host, pid, seconds, phase, _blocked_in(frames), begun_collectives(), stack)

    # --- all processes ----------------------------------------------------------------------------------------

    def _report_state(self, state: RankState, interval: float, seen: Any) -> None:
        """Write this process's position to the store. Report all positions, unless another process does."""
        if self._store is None:
            store = distributed.distributed_c10d._get_default_store()
            with suppress(Exception):  # a separate connection, because the process may be blocked on the existing one
                store = store.clone()
            self._store = store
        store, ranks = self._store, range(self._processes)
        store.set(f"{self._key}/{self._rank}", json.dumps(state))
        if self._rank and self._ends.wait(2 * interval):  # rank 0 reports if it can
            return
        self._collects = store.add(f"{self._key}/collects", 1) == 1
        if not self._collects:
            return
        deadline, missing = time.monotonic() + self._timeout / 2, set(ranks)
        while missing and time.monotonic() < deadline:
            missing = {rank for rank in missing if not store.check([f"{self._key}/{rank}"])}
            if missing and (self._ends.wait(interval) or self._counters() != seen):  # the run makes progress again
                return
        keys = [f"{self._key}/{rank}" for rank in ranks if rank not in missing]
        states = [RankState(*json.loads(text)) for text in store.multi_get(keys)]
        text = _report(states, sorted(missing))
        with suppress(OSError):
            if (folder := self._folder()) is not None:
                write_text(file := folder / "stall.txt", f"{text}\n\n{_stacks(states)}\n")
                text += f"\nThe stacks of all are in {file}."
        store.set(f"{self._key}/report", text)
        write_stderr(text)

    def _forget(self) -> None:
        """Delete the entries in the store, because the run makes progress again."""
        for key in [str(self._rank), *(["collects", "report"] if self._collects else [])]:
            self._store.delete_key(f"{self._key}/{key}")
        self._collects = False


def record_collectives() -> None:
    """Enable torch's flight recorder, which keeps NCCL's last collectives and writes them to a file after a timeout.

    Must be called before the process group is created. Environment variables that are already set take precedence.
    """
    for name, value in (("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"), ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")):
        os.environ.setdefault(name, value)


def begun_collectives() -> dict[str, tuple[int, str]]:
    """Return the number and description of this process's last collective for each process group, by name.

    Read from torch's flight recorder, which keeps the last 2,000 (``TORCH_NCCL_TRACE_BUFFER_SIZE``). Without it, only
    the number of collectives issued on the default process group is known.
    """
    begun: dict[str, tuple[int, str]] = {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with suppress(Exception):
            for entry in json.loads(getattr(torch._C._distributed_c10d, name)())["entries"]:
                group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
                if not entry["is_p2p"] and number > begun.get(group, (0, ""))[0]:
                    begun[group] = number, f"{entry['profiling_name']} of {entry['input_sizes']}, number {number}"
    if not begun:
        with suppress(Exception):
            group_of_all: Any = distributed.group.WORLD
            number = group_of_all._get_sequence_number_for_group()
            begun["0"] = number, f"collective number {number}"
    return begun


def missing_ranks(states: list[RankState]) -> list[int]:
    """Return the ranks that others wait for and that wait for no other; if there are none, all that others wait for."""
    ahead: dict[str, int] = {}
    for state in states:
        for group, (number, _) in state.begun.items():
            ahead[group] = max(number, ahead.get(group, 0))
    late = {
        group: {p.rank for p in states if group in p.begun and p.begun[group][0] < most}
        for group, most in ahead.items()
    }
    lag = set[int]().union(*late.values())
    waiting = {p.rank for p in states for group in p.begun if late[group] and p.rank not in late[group]}
    return sorted(lag - waiting or lag)


def _blocked_in(frames: list[FrameType]) -> str:
    """Return the function of torch.distributed that the main thread is blocked in; "" if it is not blocked."""
    function = ""
    for frame in reversed(frames):
        module = str(frame.f_globals.get("__name__"))
        if not module.startswith(_INTERNAL):
            break
        if frame.f_code.co_name != "wrapper":
            function = frame.f_code.co_name
    return function


def _report(states: list[RankState], silent: Sequence[int] = ()) -> str:
    late_ranks, by_rank = missing_ranks(states), {state.rank: state for state in states}
    lines = [f"The run has not moved for {min(state.seconds for state in states):.0f} s."]
    for rank in late_ranks:
        late_state = by_rank[rank]
        lines.append(
            f"Rank {rank} (process {late_state.pid} on {late_state.host}) has not reached the collective of the others."
            f" It has been {_describe(late_state)}:"
        )
        lines += ([line for line in late_state.stack if not _LIBRARIES.search(line)] or late_state.stack)[-_LINES:]
    if silent:
        lines.append(
            f"{_ranks(list(silent))} did not respond: dead, stopped, in code that blocks Python, or busy with other"
            " work, such as a validation, while the others wait."
        )
    others: dict[str, list[int]] = {}
    for state in states:
        if state.rank not in late_ranks:
            others.setdefault(_describe(state), []).append(state.rank)
    lines += [f"{_ranks(ranks)}: {description}." for description, ranks in others.items()]
    if len(states) > 1 and not late_ranks and not silent:
        lines.append("All processes have begun the same collectives.")
    return "\n".join(lines)


def _describe(state: RankState) -> str:
    last = max(state.begun.values(), default=(0, ""))[1]
    waits = f", waiting in {state.blocked_in}" if state.blocked_in else ""
    return f"{state.phase or 'in its own code'}{waits}, for {state.seconds:.0f} s" + (
        f"; the last collective begun is {last}" if last else ""
    )


def _ranks(ranks: list[int]) -> str:
    """Return ``Rank 3``, ``Ranks 0-2, 4-7``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return f"Rank{'s' * (len(ranks) > 1)} {', '.join('-'.join(map(str, span)) for span in spans)}"


def _stacks(states: list[RankState]) -> str:
    """Return each distinct stack once, with the ranks that have it."""
    ranks_by_stack: dict[str, list[int]] = {}
    for state in states:
        ranks_by_stack.setdefault("\n".join(state.stack), []).append(state.rank)
    return "\n\n".join(f"{_ranks(ranks)}:\n{stack}" for stack, ranks in ranks_by_stack.items())
