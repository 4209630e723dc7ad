"""How DDP communicates gradients, which limits what a resumed run can restore exactly.

The state object of a communication hook is part of the snapshot if its class is the user's. Its tensors may belong to
gradient buckets. DDP rebuilds its buckets after the first backward pass, so a resumed run has different buckets in its
first step. Such tensors are restored only if the buckets stay the same: with ``find_unused_parameters=True`` and
without ``static_graph=True``.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


class Communication(NamedTuple):
    """How a run communicates gradients, if it differs from the default of DDP or its weights diverge.

    Attributes:
        holders: the state objects of hooks, always in the same order.
        keeps_buckets: whether DDP never rebuilds its gradient buckets.
        diverges: whether the processes have different weights.
    """

    holders: list[Any]
    keeps_buckets: bool
    diverges: bool


def communication_of(model: DistributedDataParallel) -> Communication | None:
    """Return how a module communicates, or None if it communicates as DDP does by default.

    The default has no communication hooks written in Python and no embedding with ``max_norm``. Such an embedding makes
    the weights of the processes differ, because each process normalizes the rows that it uses.
    """
    hooks = model._comm_hooks
    embeddings = [part for part in model.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag))]
    normalizes = any(part.max_norm is not None for part in embeddings)
    if not hooks and not normalizes:
        return None
    found = chain.from_iterable((state, getattr(hook, "__self__", None)) for hook, state in hooks)
    return Communication(
        holders=[
            one for one in found if one is not None and not isinstance(one, (distributed.ProcessGroup, nn.Module))
        ],
        keeps_buckets=bool(model.find_unused_parameters) and not model.static_graph,
        diverges=normalizes,
    )
