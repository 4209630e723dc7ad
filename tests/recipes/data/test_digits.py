import hashlib
import random

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from recipes.data import Digits
from recipes.data.digits import MEAN, STD, random_affine


@pytest.fixture(scope="module")
def digits() -> Digits:
    module = Digits(augment=False)
    module.setup("fit")
    return module


def fingerprint(images: torch.Tensor) -> str:
    return hashlib.sha256(np.ascontiguousarray(images.numpy())).hexdigest()


def test_splits_are_fixed(digits: Digits):
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    again = Digits(augment=False)
    again.setup("validate")

    for name in ("train", "val", "test"):
        assert torch.equal(again.splits[name].images, digits.splits[name].images)
    # A change of these changes every published number.
    assert {name: split.labels[:12].tolist() for name, split in digits.splits.items()} == {
        "train": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1],
        "val": [4, 8, 5, 9, 9, 1, 3, 2, 2, 2, 0, 7],
        "test": [3, 6, 7, 5, 6, 3, 6, 4, 3, 7, 0, 1],
    }

    other = Digits(augment=False, split_seed=1)
    other.setup("fit")
    assert not torch.equal(other.splits["val"].images, digits.splits["val"].images)


def test_splits_are_disjoint_and_hold_every_scan_once(digits: Digits):
    assert {name: len(split) for name, split in digits.splits.items()} == {
        "train": 1257,
        "val": 270,
        "test": 270,
    }
    scans = load_digits().images
    found = [fingerprint(image) for split in digits.splits.values() for image in split.images]
    assert len(set(found)) == len(np.unique(scans, axis=0))
    assert len(found) == len(scans)


def test_splits_are_stratified(digits: Digits):
    shares = torch.bincount(torch.from_numpy(load_digits().target)) / 1797
    for split in digits.splits.values():
        counts = torch.bincount(split.labels, minlength=10)
        assert (counts - shares * len(split)).abs().max() < 1.5  # of about 126 or 27


def test_images_are_the_scans_enlarged_and_normalised(digits: Digits):
    train = digits.splits["train"]
    assert train.images.shape == (1257, 3, 32, 32)
    assert train.images.dtype == torch.float32
    assert train.labels.dtype == torch.int64
    assert train.images.mean().item() == pytest.approx(0.0, abs=1e-3)
    assert train.images.std().item() == pytest.approx(1.0, abs=1e-3)

    raw = train.images * STD + MEAN
    assert raw.min().item() == pytest.approx(0.0, abs=1e-6)
    assert raw.max().item() == pytest.approx(1.0, abs=1e-6)
    assert torch.equal(raw[:, 0], raw[:, 2])


def test_at_their_own_size_the_images_are_the_scans():
    module = Digits(image_size=8, augment=False)
    module.setup("fit")
    raw = (module.splits["train"].images * STD + MEAN) * 16
    assert raw.shape == (1257, 3, 8, 8)
    assert torch.allclose(raw[0, 0], torch.from_numpy(load_digits().images[0]).float(), atol=1e-4)


def test_loaders(digits: Digits):
    batches = list(digits.train_dataloader())
    assert len(batches) == 1257 // 64
    assert batches[0][0].shape == (64, 3, 32, 32)
    assert batches[0][1].shape == (64,)
    for loader in (digits.val_dataloader(), digits.test_dataloader(), digits.predict_dataloader()):
        assert [len(labels) for _, labels in loader] == [64, 64, 64, 64, 14]


def test_seed_decides_order_and_augmentation():
    def first_batch(seed: int) -> torch.Tensor:
        module = Digits(batch_size=8)
        module.setup("fit")
        torch.manual_seed(seed)
        return next(iter(module.train_dataloader()))[0]

    assert torch.equal(first_batch(0), first_batch(0))
    assert not torch.equal(first_batch(0), first_batch(1))


def test_only_training_images_are_augmented(digits: Digits):
    module = Digits()
    module.setup("fit")
    assert not torch.equal(module.splits["train"][0][0], digits.splits["train"][0][0])
    assert torch.equal(module.splits["val"][0][0], digits.splits["val"][0][0])
    assert torch.equal(module.splits["test"][0][0], digits.splits["test"][0][0])


def test_workers_give_the_same_images(digits: Digits):
    module = Digits(augment=False, num_workers=1)
    module.setup("validate")
    for (images, labels), (expected_images, expected_labels) in zip(
        module.val_dataloader(), digits.val_dataloader(), strict=True
    ):
        assert torch.equal(images, expected_images)
        assert torch.equal(labels, expected_labels)


def test_second_setup_keeps_the_data(digits: Digits):
    before = digits.splits["train"]
    digits.setup("test")
    assert digits.splits["train"] is before


def test_another_number_of_classes_is_refused():
    with pytest.raises(ValueError, match="num_classes is 100, but Digits has 10 classes"):
        Digits(num_classes=100)


def test_random_affine_without_range_changes_nothing():
    images = torch.rand(4, 3, 16, 16)
    assert torch.allclose(random_affine(images, degrees=0.0, scale=0.0, shift=0.0), images, atol=1e-5)


def test_random_affine_moves_each_image_differently():
    torch.manual_seed(0)
    image = torch.rand(1, 1, 16, 16)
    moved = random_affine(image.expand(4, -1, -1, -1))
    assert moved.shape == (4, 1, 16, 16)
    assert len({fingerprint(one) for one in moved}) == 4
    assert moved.min() >= image.min()
    assert moved.max() <= image.max()


def test_random_affine_shifts_by_at_most_the_given_fraction():
    torch.manual_seed(0)
    ramp = torch.linspace(-1.0, 1.0, 64).expand(256, 1, 64, 64)  # value = x in affine_grid's coordinates
    moved = random_affine(ramp, degrees=0.0, scale=0.0, shift=0.25)
    shifts = moved[:, 0, 32, 32] - ramp[:, 0, 32, 32]
    assert 0.24 < shifts.abs().max() < 0.26
    assert shifts.min() < 0.0 < shifts.max()
