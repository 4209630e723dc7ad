"""Asynchronous all-reduce of numbers on the host, without a host-device synchronization.

Signals use it: each process sends its flag at the end of a batch and reads the result of the previous batch, so that no
process waits and all stop at the same batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as distributed

SECONDS = 0.2
"""Target interval in seconds between two all-reduces, if batches are faster than that."""
MOST_BATCHES = 100
"""Largest number of batches between two all-reduces, because training may suddenly become slower."""


class AsyncMax:
    """Compute the maxima of several numbers over all processes, which all get the result at the same batch.

    An all-reduce starts after a batch, and its result is read after the next batch. It has usually arrived by
    then, so a process waits only for processes that are at least one batch behind. Each result also contains the number
    of batches to skip before the next all-reduce.

    Args:
        group: the processes, with a CPU backend. No other code may use it, because collectives are matched by their
            order.
        count: number of values.
    """

    def __init__(self, group: distributed.ProcessGroup, count: int) -> None:
        self._group = group
        self._count = count
        self._options = distributed.AllreduceOptions()
        self._options.reduceOp = distributed.ReduceOp.MAX
        self._sent = torch.zeros(count + 1, dtype=torch.int64)  # the values, and the negated number of batches to skip
        self._work: distributed.Work | None = None
        self._batches = 0  # number of batches since the last all-reduce
        self._batches_to_skip = 0  # number of batches without an all-reduce before the next one
        self._sent_at = time.monotonic()

    def reduce(self, numbers: Sequence[int]) -> list[int]:
        """Return the maxima of the pending all-reduce, or zeros if none is pending. Start the next one if it is due.

        If a maximum is not 0, the next all-reduce starts one batch later. All processes must call it at the end of each
        batch.
        """
        answer = self._read() if self._work is not None else [0] * self._count
        self._batches += 1
        if self._batches > self._batches_to_skip and not any(answer):
            self._send(numbers)
        return answer

    def reduce_now(self, numbers: Sequence[int]) -> list[int]:
        """Return the current maxima, including those of a pending all-reduce. Waits for all processes."""
        before = self._read() if self._work is not None else [0] * self._count
        self._send(numbers)
        return [max(pair) for pair in zip(before, self._read(), strict=True)]

    def close(self) -> None:
        """Wait for a pending all-reduce. Do not call it if a process has raised: the all-reduce may never complete."""
        if self._work is not None:
            self._read()

    def _send(self, numbers: Sequence[int]) -> None:
        now = time.monotonic()
        seconds, batches = now - self._sent_at, self._batches
        self._sent_at, self._batches = now, 0
        most_batches = min(int(SECONDS * batches / max(seconds, 1e-9)), MOST_BATCHES)
        self._sent = torch.tensor([*numbers, -most_batches])
        self._work = self._group.allreduce([self._sent], self._options)

    def _read(self) -> list[int]:
        assert self._work is not None
        work, self._work = self._work, None
        work.wait()
        *answer, less = self._sent.tolist()
        self._batches_to_skip = -less
        return answer
