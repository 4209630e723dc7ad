import pickle
from unittest.mock import Mock
from urllib.error import URLError

import numpy as np
import pytest
import torch
from torchvision import datasets

from recipes.data import CIFAR10
from recipes.data.cifar10 import MEAN, STD, read_batches
from tests.recipes.samples import cifar10
from tests.support import Payload


@pytest.fixture
def root(tmp_path):
    """A folder with 100 training and 20 test images in the format of CIFAR-10."""
    return cifar10(tmp_path, images=20)


def data(root, **options):
    return CIFAR10(root, num_workers=0, check_md5=False, **options)


def test_splits_and_batches(root):
    module = data(root, batch_size=16)
    module.prepare_data()
    module.setup("fit")

    train, val = module.splits["train"], module.splits["val"]
    assert (len(val), len(module.splits["test"])) == (10, 20)
    assert sorted(train.indices + val.indices) == list(range(100))
    other = data(root, split_seed=1)
    other.setup("fit")
    assert other.splits["val"].indices != val.indices
    batches = list(module.train_dataloader())
    assert [len(labels) for _, labels in batches] == [16] * 5
    assert batches[0][0].shape == (16, 3, 32, 32)
    ((_, val_labels),) = module.val_dataloader()
    assert sorted(val_labels.tolist()) == list(range(10))
    assert next(iter(module.test_dataloader()))[1].tolist() == [i % 10 for i in range(16)]


def test_images_are_normalised_and_only_training_images_augmented(root):
    augmented, plain = data(root), data(root, augment=False)
    augmented.setup("fit")
    plain.setup("fit")

    index = plain.splits["train"].indices[0]
    pixels = torch.from_numpy(plain.splits["train"].dataset.data[index]).permute(2, 0, 1) / 255
    expected = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    assert torch.allclose(plain.splits["train"][0][0], expected, atol=1e-5)

    torch.manual_seed(0)
    assert not torch.equal(augmented.splits["train"][0][0], plain.splits["train"][0][0])
    assert torch.equal(augmented.splits["val"][0][0], plain.splits["val"][0][0])


@pytest.mark.parametrize("error", [URLError("no route to host"), RuntimeError("File not found or corrupted.")])
def test_error_without_a_network_names_the_place_of_the_file(tmp_path, monkeypatch, error):
    monkeypatch.setattr(datasets.CIFAR10, "download", Mock(side_effect=error))
    with pytest.raises(FileNotFoundError, match=r"no file .*data_batch_1. Set data.root"):
        data(tmp_path).prepare_data()  # asks for no network
    with pytest.raises(FileNotFoundError) as caught:
        CIFAR10(tmp_path).prepare_data()
    assert datasets.CIFAR10.url in str(caught.value)
    assert str(tmp_path / "cifar-10-python.tar.gz") in str(caught.value)


def test_first_images_are_trained_on_and_later_ones_validated(root):
    module = data(root, limit=30, val_size=20, augment=False)
    module.setup("fit")
    train, val = module.splits["train"], module.splits["val"]
    assert train.indices == list(range(30))
    assert len(val) == 20
    assert min(val.indices) >= 30
    assert np.bincount([val.dataset.targets[i] for i in val.indices]).tolist() == [2] * 10

    for sizes in ({"limit": 90, "val_size": 20}, {"val_size": 101}, {"limit": -1}):
        with pytest.raises(ValueError, match=r"100 training images.*data.limit and data.val_size"):
            data(root, **sizes).setup("fit")


def test_file_cannot_run_code(tmp_path):
    cifar10(tmp_path)
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    batch.write_bytes(pickle.dumps({"data": Payload(tmp_path / "ran"), "labels": []}))
    with pytest.raises(ValueError, match=r"data_batch_2 is not a file of CIFAR-10's python version .*it requests"):
        CIFAR10(tmp_path, check_md5=False).setup("fit")
    assert not (tmp_path / "ran").exists()
    batch.write_bytes(b"<html>")
    with pytest.raises(ValueError, match="data_batch_2 is not a file of CIFAR-10's"):
        CIFAR10(tmp_path, check_md5=False).setup("fit")


def test_files_of_the_original_kind_are_read(tmp_path):
    # The original was pickled by Python 2 and numpy 1, with other names, and strings instead of bytes.
    cifar10(tmp_path)
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    content = pickle.loads(batch.read_bytes())
    written = pickle.dumps(content, protocol=2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert b"numpy.core.multiarray" in written
    batch.write_bytes(written)
    images, labels = read_batches(batch.parent, ["data_batch_1"])
    assert labels == content["labels"]
    assert np.array_equal(images, content["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
