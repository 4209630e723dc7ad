import hashlib
import pickle
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from torchvision import datasets

from recipes.data import CIFAR10
from recipes.data.cifar10 import MEAN, STD


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that torchvision takes for CIFAR-10: its file format, 100 training and 20 test images."""
    noise = np.random.RandomState(0)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()

    def write(name: str, content: dict[str, object]) -> list[str]:
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return [name, hashlib.md5(data).hexdigest()]

    def images(count: int) -> dict[str, object]:
        pixels = noise.randint(0, 256, (count, 3 * 32 * 32), dtype=np.uint8)
        return {"data": pixels, "labels": [i % 10 for i in range(count)]}

    train = [write(f"data_batch_{i}", images(20)) for i in range(1, 6)]
    test = [write("test_batch", images(20))]
    _, md5 = write("batches.meta", {"label_names": [str(i) for i in range(10)]})
    monkeypatch.setattr(datasets.CIFAR10, "train_list", train)
    monkeypatch.setattr(datasets.CIFAR10, "test_list", test)
    monkeypatch.setattr(datasets.CIFAR10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": md5})
    return tmp_path


def test_splits_and_batches(root: Path):
    module = CIFAR10(root, batch_size=16, num_workers=0)
    module.prepare_data()
    module.setup("fit")

    assert {name: len(split) for name, split in module.splits.items()} == {"train": 90, "val": 10, "test": 20}
    batches = list(module.train_dataloader())
    assert [len(labels) for _, labels in batches] == [16] * 5
    images, labels = batches[0]
    assert images.shape == (16, 3, 32, 32)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    (_, val_labels), (_, test_labels) = (
        next(iter(module.val_dataloader())),
        next(iter(module.test_dataloader())),
    )
    assert sorted(val_labels.tolist()) == list(range(10))
    assert test_labels.tolist() == [i % 10 for i in range(16)]


def test_images_held_out_are_not_trained_on(root: Path):
    module = CIFAR10(root, augment=False)
    module.setup("fit")
    train, val = module.splits["train"], module.splits["val"]
    assert sorted(train.indices + val.indices) == list(range(100))

    again = CIFAR10(root)
    again.setup("fit")
    assert again.splits["val"].indices == val.indices
    other = CIFAR10(root, split_seed=1)
    other.setup("fit")
    assert other.splits["val"].indices != val.indices


def test_images_are_normalised_and_only_training_images_augmented(root: Path):
    augmented, plain = CIFAR10(root), CIFAR10(root, augment=False)
    augmented.setup("fit")
    plain.setup("fit")

    index = plain.splits["train"].indices[0]
    pixels = torch.from_numpy(plain.splits["train"].dataset.data[index]).permute(2, 0, 1) / 255
    expected = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    assert torch.allclose(plain.splits["train"][0][0], expected, atol=1e-5)

    torch.manual_seed(0)
    assert not torch.equal(augmented.splits["train"][0][0], plain.splits["train"][0][0])
    assert torch.equal(augmented.splits["val"][0][0], plain.splits["val"][0][0])
    assert torch.equal(augmented.splits["test"][0][0], plain.splits["test"][0][0])


@pytest.mark.parametrize("error", [URLError("no route to host"), RuntimeError("File not found or corrupted.")])
def test_without_a_network_the_error_says_where_to_put_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def fail(self: datasets.CIFAR10) -> None:
        raise error

    monkeypatch.setattr(datasets.CIFAR10, "download", fail)
    with pytest.raises(FileNotFoundError) as caught:
        CIFAR10(tmp_path).prepare_data()

    message = str(caught.value)
    assert caught.value.__cause__ is error
    assert str(error) in message
    assert datasets.CIFAR10.url in message
    assert str(tmp_path / "cifar-10-python.tar.gz") in message
    assert "data=digits" in message


def test_another_number_of_classes_is_refused():
    with pytest.raises(ValueError, match="num_classes is 100, but CIFAR-10 has 10 classes"):
        CIFAR10(num_classes=100)
