"""Fits on several processes with dataloaders of estimated or unknown length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as distributed
from lightning.pytorch import Callback
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset

from tests.distributed.setups import Uneven, only_these_warnings
from trainer import Trainer


class Stream(IterableDataset[Tensor]):
    """Yields ``counts[epoch]`` batches that differ between processes."""

    def __init__(self, counts: list[int]) -> None:
        self.counts, self.epoch = counts, -1

    def __iter__(self) -> Iterator[Tensor]:
        self.epoch += 1
        rank = distributed.get_rank()
        for number in range(self.counts[self.epoch]):
            generator = torch.Generator().manual_seed(100 * self.epoch + 10 * number + rank)
            yield torch.randn(4, 6, generator=generator)


class Estimated(Stream):
    """Reports a length."""

    def __init__(self, length: int, counts: list[int]) -> None:
        super().__init__(counts)
        self.length = length

    def __len__(self) -> int:
        return self.length


class Module(Uneven):
    """Validates, and has a schedule by epochs."""

    def configure_optimizers(self) -> Any:
        optimizer: Optimizer = super().configure_optimizers()
        return [optimizer], [StepLR(optimizer, 1, 0.5)]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)


class Validations(Callback):
    """Records the batches, steps, and learning rate at each validation.

    Args:
        stop_after: the batch after which the fit stops; -1 for none.
    """

    def __init__(self, stop_after: int = -1) -> None:
        self.seen: list[Any] = []
        self.stop_after = stop_after

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop |= batch_idx == self.stop_after

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((trainer.progress.batches, trainer.global_step, rate))


def fit(
    strategy: str,
    length: Any,
    counts: list[list[int]],
    window: int = 1,
    module: Any = (),
    stop_after: int = -1,
) -> dict[str, Any]:
    """Fit on ``counts[rank][epoch]`` batches in each process.

    Args:
        strategy: ``"ddp"`` or ``"fsdp"``.
        length: the length that dataloaders report; None for no length, ``"exact"`` for new loaders with the correct
            length in each epoch.
        counts: batches by rank and epoch.
        window: ``accumulate_grad_batches``.
        module: arguments of :class:`Uneven`.
        stop_after: the batch after which the fit stops; -1 for none.
    """
    own, validations = counts[distributed.get_rank()], Validations(stop_after)
    torch.manual_seed(0)
    made = Module(*module)

    def exact() -> Any:
        epoch = trainer.current_epoch
        counts = [0] * epoch + own[epoch : epoch + 1]
        stream = Stream(counts)
        stream.epoch = epoch - 1
        return DataLoader(list(stream), batch_size=None)

    if length == "exact":
        made.train_dataloader = exact
    with only_these_warnings():
        import warnings

        warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")
        trainer = Trainer(
            accelerator="cpu", devices=distributed.get_world_size(), strategy=strategy, max_epochs=len(own),
            logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            use_distributed_sampler=False, accumulate_grad_batches=window, num_sanity_val_steps=0,
            reload_dataloaders_every_n_epochs=int(length == "exact"),
            callbacks=[validations],
        )  # fmt: skip
        loader = None
        if length != "exact":
            loader = DataLoader(Stream(own) if length is None else Estimated(length, own), batch_size=None)
        trainer.fit(made, loader, DataLoader(torch.ones(4, 6), batch_size=2))
    return {
        "seen": made.seen,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "validations": validations.seen,
        "counts": (trainer.global_step, trainer.progress.updates, trainer.progress.batches),
        "weights": {name: value.clone() for name, value in made.state_dict().items()},
    }
