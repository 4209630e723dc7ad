"""The parts of a dataloader: those that have ``set_epoch``, and whether its length is exact."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    StackDataset,
    Subset,
)

_MAX_DEPTH = 10
_TRUSTED = ("torch", "torchdata", "lightning", "pytorch_lightning", "trainer")


def objects_with_set_epoch(*roots: Any) -> list[Any]:
    """Return the parts of dataloaders, samplers or datasets that have ``set_epoch``, each once.

    They are the loader itself, its sampler, its batch sampler with the samplers in it, and its dataset. Datasets inside
    of torch's ``Subset``, ``ConcatDataset``, ``ChainDataset`` and ``StackDataset`` count, too. Any other dataset that
    wraps a dataset must pass the epoch on itself.
    """
    with_set_epoch: list[Any] = []
    queue, seen = list(roots), set[int]()
    while queue:
        value = queue.pop(0)
        if value is None or id(value) in seen:
            continue
        seen.add(id(value))
        if callable(getattr(value, "set_epoch", None)):
            with_set_epoch.append(value)
        queue += _parts_of(value)
    return with_set_epoch


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, Subset):
        return [value.dataset]
    if isinstance(value, (ConcatDataset, ChainDataset, StackDataset)):
        datasets: Any = value.datasets
        return list(datasets.values() if isinstance(datasets, dict) else datasets)
    if isinstance(value, (Dataset, Sampler)):
        return []
    samplers = [getattr(value, "sampler", None)]  # of a dataloader
    batch_sampler = getattr(value, "batch_sampler", None)
    while batch_sampler is not None and len(samplers) < _MAX_DEPTH:
        samplers += [batch_sampler, getattr(batch_sampler, "sampler", None)]
        batch_sampler = getattr(batch_sampler, "batch_sampler", None)
    return [*samplers, getattr(value, "dataset", None)]


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


def is_trusted(value: Any) -> bool:
    """Return whether the class of a sampler, dataset or dataloader is torch's, torchdata's, Lightning's or ours."""
    return type(value).__module__.partition(".")[0] in _TRUSTED
