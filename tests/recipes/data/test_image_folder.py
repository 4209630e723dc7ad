import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from recipes.data import ImageFolder
from recipes.data.image_folder import MEAN, STD

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """PNG files of one colour: four a class to train on, two to validate, one to test; wider than high."""
    for split, count in (("train", 4), ("val", 2), ("test", 1)):
        for name, colour in COLOURS.items():
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (40, 30), colour).save(folder / f"{i}.png")
    return tmp_path


def folder(root: Path, **options: object) -> ImageFolder:
    return ImageFolder(
        root,
        **{
            "num_classes": 3,
            "batch_size": 4,
            "num_workers": 0,
            "resize_size": 24,
            "crop_size": 16,
            **options,
        },
    )


def test_batches(root: Path):
    module = folder(root)
    module.setup("fit")
    batches = list(module.train_dataloader())
    assert len(batches) == 3
    for images, labels in batches:
        assert images.shape == (4, 3, 16, 16)
        assert images.dtype == torch.float32
        assert labels.dtype == torch.int64
    assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == [0] * 4 + [1] * 4 + [2] * 4

    module.setup("test")
    assert [labels.tolist() for _, labels in module.val_dataloader()] == [[0, 0, 1, 1], [2, 2]]
    assert [labels.tolist() for _, labels in module.test_dataloader()] == [[0, 1, 2]]
    assert [labels.tolist() for _, labels in module.predict_dataloader()] == [[0, 1, 2]]


@pytest.mark.parametrize("augment", [True, False])
def test_images_are_normalised_as_on_imagenet(root: Path, augment: bool):
    module = folder(root, augment=augment)
    module.setup("fit")
    for image, label in [module.splits["train"][0], module.splits["val"][5]]:
        colour = torch.tensor(list(COLOURS.values())[label]) / 255
        expected = (colour - torch.tensor(MEAN)) / torch.tensor(STD)
        assert torch.allclose(image, expected.view(3, 1, 1).expand(3, 16, 16), atol=1e-5)


def test_evaluation_resizes_the_shorter_side_then_crops_the_centre(root: Path):
    flag = Image.new("RGB", (40, 20), COLOURS["red"])
    flag.paste(COLOURS["blue"], (0, 0, 16, 20))
    flag.save(root / "val" / "red" / "0.png")
    module = folder(root, resize_size=10, crop_size=10, mean=(0, 0, 0), std=(1, 1, 1))
    module.setup("validate")

    image, label = module.splits["val"][4]
    assert label == 2
    assert image[2, :, :2].min() > 0.9  # seen are columns 10 to 29 of 40
    assert image[0, :, 4:].min() > 0.9


def test_a_stage_reads_only_what_it_needs(root: Path):
    shutil.rmtree(root / "train")
    shutil.rmtree(root / "val")
    module = folder(root)
    module.setup("predict")
    assert list(module.splits) == ["test"]


@pytest.mark.parametrize(("missing", "stage"), [("train", "fit"), ("val", "validate"), ("test", "test")])
def test_a_missing_folder_is_named(root: Path, missing: str, stage: str):
    shutil.rmtree(root / missing)
    with pytest.raises(FileNotFoundError) as caught:
        folder(root).setup(stage)
    assert f"There is no folder {root / missing}." in str(caught.value)
    assert f"{missing}/<class>" in str(caught.value)
    assert "Set data.root" in str(caught.value)


def test_a_class_that_one_split_lacks_is_named(root: Path):
    shutil.rmtree(root / "val" / "green")
    (root / "val" / "pink").mkdir()
    shutil.copy(root / "val" / "red" / "0.png", root / "val" / "pink")
    with pytest.raises(ValueError, match=r"missing \['green'\], not known \['pink'\]"):
        folder(root).setup("fit")


def test_a_wrong_number_of_classes_is_refused(root: Path):
    with pytest.raises(ValueError, match=r"num_classes is 10, but .*train has 3 classes. Set data.num_classes=3"):
        folder(root, num_classes=10).setup("fit")
