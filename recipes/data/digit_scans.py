"""The handwritten digits of scikit-learn as unprocessed scans, for models that generate such images."""

import torch
from sklearn.datasets import load_digits

from recipes.data.digits import MAX_GREY
from recipes.data.loading import ImageTensors, SplitDataModule, stratified_split


class DigitScans(SplitDataModule):
    """1,797 scanned digits of 8x8 pixels: 1,257 to train on, 270 to validate, 270 to test, split as in `Digits`.

    A batch is ``(images, labels)``: ``images`` is float32 of shape (batch, 1, 8, 8), from -1 (paper) to 1 (ink), and
    ``labels`` is int64 of shape (batch,).

    Args:
        batch_size: images in a batch, on one rank.
        num_workers: processes that prepare batches; 0 suffices, because there is nothing to prepare.
        split_seed: seed of the three splits, which are stratified; no other seed affects them.
    """

    def __init__(self, batch_size: int = 64, *, num_workers: int = 0, split_seed: int = 0) -> None:
        super().__init__(batch_size, num_workers, collate_fn=ImageTensors.collate)
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        """Load and split the data. A second call is a no-op."""
        if self.splits:
            return
        scans, targets = load_digits(return_X_y=True)
        images = torch.from_numpy(scans).float().view(-1, 1, 8, 8) / MAX_GREY * 2.0 - 1.0
        labels = torch.from_numpy(targets).long()
        positions = stratified_split(targets, held_out=(270, 270), seed=self.split_seed)
        for name, chosen in zip(("train", "val", "test"), positions, strict=True):
            self.splits[name] = ImageTensors(images[chosen], labels[chosen])
