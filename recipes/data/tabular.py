"""The tables that come with scikit-learn: classification and regression without a download."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from torch.utils.data import TensorDataset

from recipes.data.loading import SplitDataModule, check_num_classes, fold_of, stratified_split

LOADERS: dict[str, Callable[..., Any]] = {
    "breast_cancer": load_breast_cancer,
    "diabetes": lambda **options: load_diabetes(scaled=False, **options),  # in the units they were measured in
    "wine": load_wine,
}
BINS = 10  # number of bins of a regression's targets; every split has targets from each bin


class Tabular(SplitDataModule):
    """One of scikit-learn's tables: 70% of the rows to train on, 15% to validate, 15% to test.

    A batch is ``(features, targets)``: ``features`` is float32 of shape (batch, ``num_features``), standardized;
    ``targets`` has shape (batch,) and is int64 for classification, and for regression float32 in the table's own unit.
    The mean and standard deviation are those of the training rows, so that no other row influences the training.

    Args:
        name: ``breast_cancer`` (569 rows, benign or malignant), ``wine`` (178 rows, three cultivars) or ``diabetes``
            (442 rows, regression: disease progression after a year).
        batch_size: rows in a batch, on one rank.
        num_workers: processes that prepare batches; 0 suffices, because there is nothing to prepare.
        num_features: number of features of the model; must be the table's.
        num_classes: number of classes of the model; must be the table's. None: regression.
        split_seed: seed of the three splits, which are stratified by class or by the target's decile.
        fold: number of the fold to validate, from 0, for cross-validation: the rows that are not in the test split are
            divided into ``folds``, and the other folds are trained on. Default: None, no cross-validation.
        folds: number of folds.

    Attributes:
        target_mean: mean of the training targets of a regression; otherwise 0.
        target_std: standard deviation of the training targets of a regression; otherwise 1.

    Raises:
        ValueError: there is no such table or fold, or the table has another number of features or classes.
    """

    def __init__(
        self,
        name: str,
        batch_size: int = 32,
        *,
        num_workers: int = 0,
        num_features: int,
        num_classes: int | None,
        split_seed: int = 0,
        fold: int | None = None,
        folds: int = 5,
    ) -> None:
        super().__init__(batch_size, num_workers)
        if name not in LOADERS:
            raise ValueError(f"name is {name}, expected one of {', '.join(LOADERS)}.")
        self.name = name
        self.num_features = num_features
        self.num_classes = num_classes
        self.split_seed = split_seed
        self.fold, self.folds = fold, folds
        self.target_mean, self.target_std = 0.0, 1.0

    def setup(self, stage: str) -> None:
        """Load, split and standardize the table. A second call is a no-op."""
        if self.splits:
            return
        features, targets = LOADERS[self.name](return_X_y=True)
        strata = self._check(features, targets)
        held_out = round(0.15 * len(targets))
        positions = stratified_split(strata, held_out=(held_out, held_out), seed=self.split_seed)
        if self.fold is not None:
            positions[:2] = fold_of(strata, positions[2], self.split_seed, fold=self.fold, folds=self.folds)
        train = positions[0]
        features = (features - features[train].mean(axis=0)) / features[train].std(axis=0)
        if self.num_classes is None:
            self.target_mean, self.target_std = float(targets[train].mean()), float(targets[train].std())
        inputs = torch.from_numpy(features).float()
        outputs = torch.from_numpy(targets).to(torch.float32 if self.num_classes is None else torch.int64)
        for split, chosen in zip(("train", "val", "test"), positions, strict=True):
            self.splits[split] = TensorDataset(inputs[chosen], outputs[chosen])

    def _check(self, features: Any, targets: Any) -> Any:
        """Check the configured sizes. Return the strata of the split: the classes, or the deciles of the targets."""
        if features.shape[1] != self.num_features:
            raise ValueError(
                f"num_features is {self.num_features}, but {self.name} has {features.shape[1]} features. "
                f"Set data.num_features={features.shape[1]}."
            )
        is_regression = targets.dtype.kind == "f"
        if is_regression != (self.num_classes is None):
            expected = (
                "null: its targets are numbers" if is_regression else f"{len(np.unique(targets))}: it has classes"
            )
            raise ValueError(f"num_classes is {self.num_classes}, but {self.name} needs {expected}.")
        if is_regression:
            return np.digitize(targets, np.quantile(targets, np.linspace(0, 1, BINS + 1)[1:-1]))
        check_num_classes(self.num_classes or 0, len(np.unique(targets)), self.name)
        return targets
