"""Rendezvous of the processes that torchrun has started, including after a restart.

torchrun serves one store during its whole lifetime. After a restart it still contains the entries of the previous
processes, for example their addresses. A process that reads such an entry before the new one is written waits for a
process that no longer exists. The number of restarts cannot identify the current start either, because each node's
agent counts separately. Therefore rank 0 of each start chooses a name, and sends it only to the processes that request
it now.
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

_POLL_INTERVAL = 0.01
_PREFIX = "amp_trainer"
_ADVICE = "Check their output, and whether each node runs torchrun with the same --nnodes and --nproc-per-node."


def is_served() -> bool:
    """Return whether torchrun started this process and serves a store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def store_of_this_start(timeout: timedelta = timedelta(minutes=30)) -> Store:
    """Return a store that only the processes of this start of torchrun share. All of them must call it.

    Args:
        timeout: time limit for all processes to join, and for each later read from the store. Default: 30 minutes.

    Raises:
        ClusterError: if a process has not called it within ``timeout``.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    served = TCPStore(address, port, is_master=False, timeout=timeout)
    return rendezvous(served, rank, world_size, timeout)


def rendezvous(served: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return the part of ``served`` that only the ``world_size`` processes of this rendezvous share.

    Raises:
        ClusterError: if some of them have not arrived within ``timeout``.
    """
    store: Any = PrefixStore(_PREFIX, served)
    name = uuid.uuid4().hex
    if rank:
        store.set(f"request/{rank}", name)
        try:
            answer = store.get(f"answer/{name}").decode()
        except DistStoreError as error:
            raise ClusterError(f"{_timeout_text(timeout)} rank 0 did not join. {_ADVICE}") from error
        store.set(f"{answer}/joined/{rank}", "")
        store.add(f"{answer}/number", 1)
        return PrefixStore(f"{_PREFIX}/{answer}", served)
    others, answered_requests, end = range(1, world_size), set[bytes](), time.monotonic() + timeout.total_seconds()
    keys = [f"request/{other}" for other in others]
    while store.add(f"{name}/number", 0) < len(keys):  # one request to the store for any number of processes
        requests = set[bytes]()
        with suppress(DistStoreError):  # some processes have not arrived within the store's timeout
            requests = set(store.multi_get(keys)) - answered_requests
        if requests:  # some may be from processes of an earlier start, which do not read the answer
            store.multi_set([f"answer/{request.decode()}" for request in requests], [name] * len(requests))
            answered_requests |= requests
        if time.monotonic() > end:
            missing = ", ".join(str(other) for other in others if not store.check([f"{name}/joined/{other}"]))
            raise ClusterError(f"{_timeout_text(timeout)} rank {missing} of {world_size} did not join. {_ADVICE}")
        time.sleep(_POLL_INTERVAL)
    return PrefixStore(f"{_PREFIX}/{name}", served)


def _timeout_text(timeout: timedelta) -> str:
    return f"Waited {timeout.total_seconds():.0f} s for the other processes of this run:"
