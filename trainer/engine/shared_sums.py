"""Sums over the processes that train on the CPU of one machine: through memory that they share.

A collective over gloo wakes several threads in each process, however few numbers it adds up. Training on a CPU keeps
all cores busy, and so that is time taken from it.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from trainer.engine.protocol import Engine, Weight

FOLDER = Path("/dev/shm")
"""Where Linux has files in memory. Unlike a folder on a network, it is never that of another machine."""
MOST = 3
"""How many numbers are added up at a time, at most."""

_RECORD = struct.Struct(f"=q{MOST}d")  # the turn, the numbers
_CHECKSUM = struct.Struct("=I")
_SIZE = _RECORD.size + _CHECKSUM.size
_SHORTEST, _LONGEST = 5e-5, 1e-3  # seconds between two looks at what another process has not written yet


class SharedSums:
    """What the processes write and read. All of them begin the same sums in the same order.

    A process writes its numbers and goes on; it reads the others' when it needs the sum. Most often they have been
    there for long: an exchange of gradients lies between. Two sums have places in the memory, in turn. A place is free
    again by the time that it is written to: whoever begins a sum has seen all processes begin the one before it, and
    they do so when they are done with the one before that.

    Args:
        path: the file, the same for all processes.
        rank: of this process.
        world_size: how many there are.
        timeout: how long to wait for another process, in seconds.

    Raises:
        OSError: there is no such file here.
    """

    def __init__(self, path: str | Path, rank: int, world_size: int, timeout: float) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _length(world_size))
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self._turn = 0
        self._is_read = True

    def begin(self, values: Sequence[float]) -> Callable[[], list[Weight]]:
        """Write this process's numbers. What is returned waits for those of the others, and returns the sums."""
        if not self._is_read:  # nobody asked for it: all must have begun it before its place is free
            self._sums(len(values))
        self._turn += 1
        self._is_read = False
        record = _RECORD.pack(self._turn, *values, *[0.0] * (MOST - len(values)))
        start = self._start(self._rank)
        self._memory[start : start + _SIZE] = record + _CHECKSUM.pack(zlib.crc32(record))
        return lambda: self._sums(len(values))

    def _sums(self, count: int) -> list[Weight]:
        self._is_read = True
        columns = zip(*(self._wait_for(rank) for rank in range(self._world_size)), strict=True)
        return [sum(column) for column in columns][:count]

    def _wait_for(self, rank: int) -> tuple[float, ...]:
        """What a process has written in this turn."""
        start, deadline, pause = self._start(rank), 0.0, _SHORTEST
        while True:
            read = self._memory[start : start + _SIZE]
            turn, *values = _RECORD.unpack_from(read)
            if turn == self._turn and zlib.crc32(read[: _RECORD.size]) == _CHECKSUM.unpack_from(read, _RECORD.size)[0]:
                return tuple(values)
            deadline = deadline or time.monotonic() + self._timeout
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"Rank {self._rank} waited {self._timeout:g} seconds for what rank {rank} says of its losses, and"
                    f" rank {rank} did not come there. Each process must train the same number of batches."
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _start(self, rank: int) -> int:
        return (self._turn % 2 * self._world_size + rank) * _SIZE


def shared_sums(engine: Engine) -> SharedSums | None:
    """For all processes of an engine, which call this together. None where they are not on the CPU of one machine."""
    if engine.world_size == 1 or engine.device.type != "cpu" or torch.distributed.get_backend() != "gloo":
        return None
    path = engine.broadcast(_new_file(engine.world_size) if engine.global_rank == 0 else None)
    if path is None:
        return None
    sums = None
    with suppress(OSError):
        sums = SharedSums(path, engine.global_rank, engine.world_size, engine.timeout.total_seconds())
    lacks = engine.any_rank(sums is None)
    if engine.global_rank == 0:
        os.unlink(path)  # the memory stays until the last process lets go of it
    return None if lacks else sums


def _length(world_size: int) -> int:
    """Of the file, in bytes."""
    return 2 * world_size * _SIZE


def _new_file(world_size: int) -> str | None:
    """The path of a file for this many processes; None where there is no place for it."""
    with suppress(OSError):
        handle, path = tempfile.mkstemp(dir=FOLDER, prefix="trainer-sums-")
        with open(handle, "wb") as file:
            file.write(bytes(_length(world_size)))
        return path
    return None
