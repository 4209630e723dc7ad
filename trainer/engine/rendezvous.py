"""How the processes that torchrun has started find each other, also when it starts them again.

torchrun serves one store for as long as it runs, and after a restart what the processes of the start before have
written is still in it: where they listened, for example. A process that reads that before the new one has written it
waits for somebody who is gone. Nor do all processes know how often there was a restart: each node's agent counts its
own. So the first process of each start chooses a name, and tells it only to those who ask now.
"""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from trainer.errors import ClusterError

_LOOK = 0.01
_ALL = "amp_trainer"
_ADVICE = "See what they have said, and whether each node runs torchrun with the same --nnodes and --nproc-per-node."


def is_served() -> bool:
    """Whether torchrun has started this process, and serves a store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def store_of_this_start(timeout: timedelta = timedelta(minutes=30)) -> Store:
    """A store that the processes of this start of torchrun have for themselves. All of them call it.

    Args:
        timeout: for waiting for the others here, and for what is read from the store later.

    Raises:
        ClusterError: some process has not called it within ``timeout``.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    served = TCPStore(address, port, is_master=False, timeout=timeout)
    return meet(served, rank, world_size, timeout)


def meet(served: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """The part of ``served`` that the processes with ``world_size`` ranks, which meet here, have for themselves.

    Raises:
        ClusterError: some of them have not come within ``timeout``.
    """
    store: Any = PrefixStore(_ALL, served)
    name = uuid.uuid4().hex
    if rank:
        store.set(f"asks/{rank}", name)
        try:
            answer = store.get(f"answer/{name}").decode()
        except DistStoreError as error:
            raise ClusterError(f"{_waited(timeout)} rank 0 did not come. {_ADVICE}") from error
        store.set(f"{answer}/knows/{rank}", "")
        store.add(f"{answer}/known", 1)
        return PrefixStore(f"{_ALL}/{answer}", served)
    others, answered, end = range(1, world_size), set[bytes](), time.monotonic() + timeout.total_seconds()
    asks = [f"asks/{other}" for other in others]
    while store.add(f"{name}/known", 0) < len(asks):  # one question to the store, however many there are
        asked = set[bytes]()
        with suppress(DistStoreError):  # some have not come yet, in as long as the store waits
            asked = set(store.multi_get(asks)) - answered
        if asked:  # by them, or by processes of an earlier start, which do not read it
            store.multi_set([f"answer/{asker.decode()}" for asker in asked], [name] * len(asked))
            answered |= asked
        if time.monotonic() > end:
            missing = ", ".join(str(other) for other in others if not store.check([f"{name}/knows/{other}"]))
            raise ClusterError(f"{_waited(timeout)} of {world_size}, rank {missing} did not come. {_ADVICE}")
        time.sleep(_LOOK)
    return PrefixStore(f"{_ALL}/{name}", served)


def _waited(timeout: timedelta) -> str:
    return f"Waited {timeout.total_seconds():.0f} s for the other processes of this run:"
