import pytest
import torch

from recipes.data import DigitScenes
from recipes.data.digit_scenes import MEAN, STD

SMALL = {"train_size": 20, "val_size": 6, "test_size": 5, "image_size": 32, "batch_size": 4}


def scenes(**options):
    module = DigitScenes(**{**SMALL, **options})
    module.setup("fit")
    return module


def test_batches():
    module = scenes()
    batches = list(module.train_dataloader())
    assert [(images.shape, masks.shape) for images, masks in batches] == [((4, 3, 32, 32), (4, 32, 32))] * 5
    assert [len(masks) for _, masks in module.val_dataloader()] == [4, 2]
    assert set(torch.cat([masks for _, masks in batches]).unique().tolist()) == {0, 1}

    train = module.splits["train"]
    assert torch.allclose(train[0][0], (train.images[0] / 255 - MEAN) / STD)
    (images, names), (_, rest) = module.predict_dataloader()
    assert [*names, *rest] == [f"test_{number:04}" for number in range(5)]
    assert torch.equal(images, next(iter(module.test_dataloader()))[0])


def test_scenes_depend_on_their_seed_only():
    first, again, other = scenes(), scenes(), scenes(seed=1)
    for split in ("train", "val", "test"):
        assert torch.equal(first.splits[split].images, again.splits[split].images)
        assert torch.equal(first.splits[split].masks, again.splits[split].masks)
        assert not torch.equal(first.splits[split].images, other.splits[split].images)


def test_masks_may_have_digit_classes():
    which, whether = scenes(num_classes=11, train_size=100), scenes(train_size=100)
    assert set(which.splits["train"].masks.unique().tolist()) == set(range(11))
    assert torch.equal(which.splits["train"].masks.clamp(max=1), whether.splits["train"].masks)


@pytest.mark.parametrize("options", [{"num_classes": 3}, {"image_size": 16}])
def test_invalid_settings_are_refused(options):
    with pytest.raises(ValueError, match=r"expected (2|at least 32)"):
        DigitScenes(**options)
