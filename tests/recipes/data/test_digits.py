import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from recipes.data import Digits
from recipes.data.digits import MEAN, STD, random_affine


@pytest.fixture(scope="module")
def digits():
    module = Digits(augment=False)
    module.setup("fit")
    return module


def test_splits_are_fixed_disjoint_and_stratified(digits):
    other = Digits(augment=False, split_seed=1)
    other.setup("validate")
    assert not torch.equal(other.splits["val"].images, digits.splits["val"].images)
    # A change of these changes every published number.
    assert {name: split.labels[:12].tolist() for name, split in digits.splits.items()} == {
        "train": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1],
        "val": [4, 8, 5, 9, 9, 1, 3, 2, 2, 2, 0, 7],
        "test": [3, 6, 7, 5, 6, 3, 6, 4, 3, 7, 0, 1],
    }
    assert {name: len(split) for name, split in digits.splits.items()} == {"train": 1257, "val": 270, "test": 270}
    found = torch.cat([split.images for split in digits.splits.values()]).flatten(1)
    assert len(found.unique(dim=0)) == len(np.unique(load_digits().images, axis=0))
    assert torch.bincount(digits.splits["val"].labels).tolist() == [27, 27, 27, 28, 27, 27, 27, 27, 26, 27]


def test_images_are_the_scans_enlarged_and_normalised(digits):
    train = digits.splits["train"]
    assert train.images.shape == (1257, 3, 32, 32)
    assert (train.images.dtype, train.labels.dtype) == (torch.float32, torch.int64)
    assert train.images.mean().item() == pytest.approx(0.0, abs=1e-3)
    assert train.images.std().item() == pytest.approx(1.0, abs=1e-3)
    module = Digits(image_size=8, augment=False)
    module.setup("fit")
    raw = (module.splits["train"].images * STD + MEAN) * 16
    assert torch.allclose(raw[0, 2], torch.from_numpy(load_digits().images[0]).float(), atol=1e-4)


def test_only_training_images_are_augmented(digits):
    module = Digits()
    module.setup("fit")
    assert not torch.equal(module.splits["train"][0][0], digits.splits["train"][0][0])
    assert torch.equal(module.splits["val"][0][0], digits.splits["val"][0][0])


def test_random_affine_moves_each_image_differently_by_at_most_the_given_fraction():
    torch.manual_seed(0)
    moved = random_affine(torch.rand(1, 1, 16, 16).expand(4, -1, -1, -1))
    assert len(moved.unique(dim=0)) == 4
    ramp = torch.linspace(-1.0, 1.0, 64).expand(256, 1, 64, 64)  # value = x in affine_grid's coordinates
    moved = random_affine(ramp, degrees=0.0, scale=0.0, shift=0.25)
    shifts = moved[:, 0, 32, 32] - ramp[:, 0, 32, 32]
    assert 0.24 < shifts.abs().max() < 0.26
    assert shifts.min() < 0.0 < shifts.max()
