"""Vectors drawn from a normal distribution: data for benchmarks, without anything to learn."""

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class RandomVectors(L.LightningDataModule):
    """Batches of inputs and targets from the standard normal distribution, the same in every epoch.

    A batch is ``(inputs, targets)``, both float32, of shapes (``batch_size``, ``in_features``) and (``batch_size``,
    ``out_features``). They are drawn once and held in memory: ``num_batches * batch_size * (in_features +
    out_features) * 4`` bytes.

    Args:
        batch_size: rows in a batch, on one rank.
        num_batches: batches in an epoch.
        in_features: size of the inputs.
        out_features: size of the targets.
        data_seed: seed of the vectors; nothing else uses it.
    """

    def __init__(
        self, batch_size: int = 512, *, num_batches: int = 50, in_features: int, out_features: int, data_seed: int = 0
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_batches = num_batches
        self.in_features = in_features
        self.out_features = out_features
        self.data_seed = data_seed
        self.batches: TensorDataset | None = None

    def setup(self, stage: str) -> None:
        """Draw the vectors. A second call is a no-op."""
        if self.batches is None:
            generator = torch.Generator().manual_seed(self.data_seed)
            shape = (self.num_batches, self.batch_size)
            inputs = torch.randn(*shape, self.in_features, generator=generator)
            self.batches = TensorDataset(inputs, torch.randn(*shape, self.out_features, generator=generator))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the batches, in order."""
        assert self.batches is not None
        return DataLoader(self.batches, batch_size=None, pin_memory=torch.cuda.is_available())
