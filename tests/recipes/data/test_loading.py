import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import RandomSampler, SequentialSampler, TensorDataset

from recipes.data.image_folder import image_to_tensor
from recipes.data.loading import ImageTensors, check_num_classes, make_loader, stratified_split

LABELS = [0] * 60 + [1] * 30 + [2] * 10


def test_splits_are_disjoint_complete_and_stratified():
    train, val, test = stratified_split(LABELS, held_out=(20, 30), seed=0)

    assert sorted(train + val + test) == list(range(100))
    assert [np.bincount([LABELS[i] for i in split]).tolist() for split in (train, val, test)] == [
        [30, 15, 5],
        [12, 6, 2],
        [18, 9, 3],
    ]


def test_splits_depend_on_their_seed_only_and_keep_the_random_state():
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = stratified_split(LABELS, held_out=(20,), seed=0)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert np.array_equal(np.random.get_state()[1], state[1])

    np.random.seed(123)
    torch.manual_seed(123)
    assert stratified_split(LABELS, held_out=(20,), seed=0) == first
    assert stratified_split(LABELS, held_out=(20,), seed=1) != first


def test_image_tensors_read_a_batch_as_they_read_single_images():
    images, labels = torch.rand(5, 3, 4, 4), torch.arange(5)
    dataset = ImageTensors(images, labels)

    batch = dataset.collate(dataset.__getitems__([3, 0]))
    assert torch.equal(batch[0], images[[3, 0]])
    assert batch[1].tolist() == [3, 0]
    image, label = dataset[3]
    assert torch.equal(image, images[3])
    assert label == 3
    assert len(dataset) == 5


def test_image_tensors_augment_a_copy():
    images = torch.rand(5, 3, 4, 4)
    dataset = ImageTensors(images.clone(), torch.arange(5), augment=lambda batch: batch.neg_())
    assert torch.equal(dataset[2][0], -images[2])
    assert torch.equal(dataset.images, images)


def test_training_loader_shuffles_and_drops_the_short_batch_and_others_do_neither():
    dataset = TensorDataset(torch.arange(10))
    training = make_loader(dataset, batch_size=4, num_workers=0, training=True)
    assert isinstance(training.sampler, RandomSampler)
    assert [len(batch[0]) for batch in training] == [4, 4]

    evaluation = make_loader(dataset, batch_size=4, num_workers=0, training=False)
    assert isinstance(evaluation.sampler, SequentialSampler)
    assert torch.cat([batch[0] for batch in evaluation]).tolist() == list(range(10))


def test_training_batch_larger_than_the_data_is_refused():
    dataset = TensorDataset(torch.arange(10))
    with pytest.raises(ValueError, match=r"batch_size is 16.* at most 10"):
        make_loader(dataset, batch_size=16, num_workers=0, training=True)
    with pytest.raises(ValueError, match=r"there are 0 training samples"):
        make_loader(TensorDataset(torch.zeros(0)), batch_size=1, num_workers=0, training=True)
    assert len(make_loader(dataset, batch_size=16, num_workers=0, training=False)) == 1


def test_batch_must_fit_into_the_share_of_a_process(monkeypatch):
    dataset = TensorDataset(torch.arange(10))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    with pytest.raises(ValueError, match=r"4 training samples.*3 processes.* at most 4"):
        make_loader(dataset, batch_size=5, num_workers=0, training=True)
    assert len(make_loader(dataset, batch_size=4, num_workers=0, training=True)) == 2  # before it is shared out


def test_image_to_tensor_scales_then_normalises():
    grey = Image.new("RGB", (6, 4), (255, 0, 51))
    tensor = image_to_tensor((0.5, 0.5, 0.2), (0.5, 0.25, 1.0))(grey)
    assert tensor.shape == (3, 4, 6)
    assert tensor.dtype == torch.float32
    assert tensor[:, 0, 0].tolist() == pytest.approx([1.0, -2.0, 0.0], abs=1e-6)


def test_wrong_number_of_classes_is_refused_with_the_right_one():
    check_num_classes(3, 3, "here")
    with pytest.raises(ValueError, match=r"num_classes is 4.*data.num_classes=3"):
        check_num_classes(4, 3, "here")
