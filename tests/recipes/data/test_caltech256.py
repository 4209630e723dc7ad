import shutil
import tarfile

import pytest
import torch
from PIL import Image

from recipes.data import Caltech256
from recipes.data.caltech256 import ADDRESS
from recipes.data.image_folder import MEAN, STD, Images
from tests.recipes.samples import THINGS, caltech256


@pytest.fixture
def root(tmp_path):
    return caltech256(tmp_path)


def data(root, **options):
    return Caltech256(root, **{"num_classes": 4, "num_workers": 0, "batch_size": 8, "image_size": 32, **options})


def image_of(transform, module):
    """Return the first image of all splits and its label."""
    return Images(sorted(module.splits["train"].samples + module.splits["val"].samples), transform)[0]


def test_splits_and_batches_are_without_clutter_and_other_files(root):
    (root / "256_ObjectCategories" / THINGS[0] / "._001_0001.jpg").write_text("what macOS leaves in archives")
    module = data(root)
    module.prepare_data()
    module.setup("fit")
    train, val = module.splits["train"], module.splits["val"]
    assert (len(train), len(val)) == (44, 4)
    assert len({path for path, _ in train.samples + val.samples}) == 48
    assert {images.shape for images, _ in module.train_dataloader()} == {(8, 3, 32, 32)}
    (batch,) = module.val_dataloader()
    assert batch[1].tolist() == [0, 1, 2, 3]  # stratified, and in order
    module.setup("test")
    assert module.splits["test"].samples == val.samples


def test_images_are_squeezed_and_normalised_and_only_training_ones_changed(root):
    flag = Image.new("RGB", (90, 30), (255, 0, 0))
    flag.paste((0, 0, 255), (0, 0, 30, 30))  # the left third
    flag.save(root / "256_ObjectCategories" / THINGS[0] / "001_0001.jpg", quality=100)
    module, plain = data(root), data(root, augment=False)
    module.setup("fit")
    plain.setup("fit")
    image, _ = image_of(module.evaluation, module)
    back = image * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    assert back[:, 16, 4].tolist() == pytest.approx([0, 0, 1], abs=0.05)
    assert back[:, 16, 16].tolist() == pytest.approx([1, 0, 0], abs=0.05)
    assert torch.equal(image_of(plain.training, plain)[0], image)
    torch.manual_seed(0)
    assert not torch.equal(image_of(module.training, module)[0], image)


def test_archive_is_extracted_once_and_whole(root, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    archive, module = other / "256_ObjectCategories.tar", data(other)
    with tarfile.open(archive, "w") as tar:
        tar.add(root / "256_ObjectCategories", "256_ObjectCategories")
    content = archive.read_bytes()
    archive.write_bytes(content[:20_000])
    with pytest.raises(ValueError, match=r"256_ObjectCategories.tar cannot be extracted"):
        module.prepare_data()
    assert [file.name for file in other.iterdir()] == ["256_ObjectCategories.tar"]
    archive.write_bytes(content)
    module.prepare_data()
    module.setup("fit")
    assert len(module.splits["train"]) == 44
    archive.write_text("not looked at any more")
    module.prepare_data()


@pytest.mark.parametrize("name", ["/tmp/evil2", "C:/evil2", "a/..\\..\\evil2", "256_ObjectCategories"])
def test_archive_writes_in_its_folder_only(tmp_path, name):
    (tmp_path / "in").mkdir()
    evil = tarfile.TarInfo(name)
    if name == "256_ObjectCategories":
        evil.type, evil.linkname = tarfile.SYMTYPE, str(tmp_path)
    with tarfile.open(tmp_path / "in" / "256_ObjectCategories.tar", "w") as tar:
        tar.addfile(evil)
    with pytest.raises(ValueError, match="would be extracted outside the folder"):
        data(tmp_path / "in").prepare_data()
    assert [file.name for file in (tmp_path / "in").iterdir()] == ["256_ObjectCategories.tar"]


def test_error_without_the_data_names_its_place(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        data(tmp_path).prepare_data()
    assert ADDRESS in str(caught.value)
    assert str(tmp_path / "256_ObjectCategories.tar") in str(caught.value)


def test_classes_of_a_single_image_are_named(root):
    folder = root / "256_ObjectCategories" / "003.backpack"
    folder.mkdir()
    shutil.copy(root / "256_ObjectCategories" / THINGS[1] / "056_0001.jpg", folder)
    with pytest.raises(ValueError, match=r"fewer than two images of 003.backpack in "):
        data(root, num_classes=5).setup("fit")
