"""How several processes find out, without waiting for a device, what any of them knows."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as distributed

SECONDS = 0.2
"""About how often the processes ask each other, where batches are faster than that."""
MOST_BATCHES = 100
"""Batches between two questions at most: training may become slower all of a sudden."""


class Agreement:
    """The largest of the numbers that any process gives, the same at the same batch on all of them.

    A question is sent at the end of a batch, and its answer read at the end of the next: it has long arrived then, and
    no process waits for another that is less than a batch behind. Each answer also says how many batches to leave out
    before the next question.

    Args:
        group: the processes, on a backend of the CPU. Nobody else may use it: what is sent has its turn.
        count: how many numbers there are.
    """

    def __init__(self, group: distributed.ProcessGroup, count: int) -> None:
        self._group = group
        self._count = count
        self._options = distributed.AllreduceOptions()
        self._options.reduceOp = distributed.ReduceOp.MAX
        self._question = torch.zeros(count + 1, dtype=torch.int64)  # the numbers, and minus the batches to leave out
        self._work: distributed.Work | None = None
        self._batches = self._to_leave_out = 0  # since the last question; how many it is to be at least
        self._sent_at = time.monotonic()

    def ask(self, numbers: Sequence[int]) -> list[int]:
        """At the end of a batch: the largest numbers that were given at the last question; zeros where none was asked.

        All processes call it equally often.
        """
        answer = self._read() if self._work is not None else [0] * self._count
        self._batches += 1
        if self._batches > self._to_leave_out and not any(answer):
            self._send(numbers)
        return answer

    def ask_now(self, numbers: Sequence[int]) -> list[int]:
        """The largest numbers of this moment and, where a question is under way, of that. Waits for all processes."""
        before = self._read() if self._work is not None else [0] * self._count
        self._send(numbers)
        return [max(pair) for pair in zip(before, self._read(), strict=True)]

    def close(self) -> None:
        """Wait for what is under way. Where a process has raised there may be no answer, and nobody waits for one."""
        if self._work is not None:
            self._read()

    def _send(self, numbers: Sequence[int]) -> None:
        now = time.monotonic()
        seconds, batches = now - self._sent_at, self._batches
        self._sent_at, self._batches = now, 0
        wanted = min(int(SECONDS * batches / max(seconds, 1e-9)), MOST_BATCHES)
        self._question = torch.tensor([*numbers, -wanted])
        self._work = self._group.allreduce([self._question], self._options)

    def _read(self) -> list[int]:
        assert self._work is not None
        work, self._work = self._work, None
        work.wait()
        *answer, less = self._question.tolist()
        self._to_leave_out = -less
        return answer
