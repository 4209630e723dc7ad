"""Whether the length of a dataloader is the number of its batches, or an estimate."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

_TRUSTED = ("torch", "torchdata", "lightning", "pytorch_lightning", "trainer")


def has_exact_length(loader: Any) -> bool:
    """Return whether ``len(loader)`` is certain to be the number of batches of a pass.

    This holds for a ``DataLoader`` over a map-style dataset with samplers of torch, torchdata, Lightning or this
    package. An ``IterableDataset``, a custom sampler, batch sampler or loader may yield another number.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    parts = (loader, sampler, getattr(sampler, "sampler", sampler))
    return all(map(is_trusted, parts))


def is_trusted(part: Any) -> bool:
    """Return whether the class of a sampler, dataset or dataloader is torch's, torchdata's, Lightning's or ours."""
    return type(part).__module__.partition(".")[0] in _TRUSTED
