from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler, TensorDataset

from recipes.data.loading import ImageTensors, make_loader, stratified_split

LABELS = [0] * 60 + [1] * 30 + [2] * 10


def test_splits_are_stratified_and_depend_on_their_seed_only():
    np.random.seed(1)
    state = np.random.get_state()[1].copy()
    splits = stratified_split(LABELS, held_out=(20, 30), seed=0)
    assert np.array_equal(np.random.get_state()[1], state)
    assert sorted(chain(*splits)) == list(range(100))
    counts = [np.bincount([LABELS[i] for i in split]).tolist() for split in splits]
    assert counts == [[30, 15, 5], [12, 6, 2], [18, 9, 3]]
    np.random.seed(123)
    assert stratified_split(LABELS, held_out=(20, 30), seed=0) == splits
    assert stratified_split(LABELS, held_out=(20, 30), seed=1) != splits


def test_image_tensors_read_a_batch_as_they_read_single_images():
    images, labels = torch.rand(5, 3, 4, 4), torch.arange(5)
    dataset = ImageTensors(images.clone(), labels, augment=lambda batch: batch.neg_())
    batch = dataset.collate(dataset.__getitems__([3, 0]))
    assert torch.equal(batch[0], -images[[3, 0]])
    assert batch[1].tolist() == [3, 0]
    image, label = dataset[3]
    assert torch.equal(image, -images[3])
    assert (label, len(dataset)) == (3, 5)
    assert torch.equal(dataset.images, images)  # a copy was changed


def test_training_loader_shuffles_and_drops_the_short_batch_and_others_do_neither():
    dataset = TensorDataset(torch.arange(10))
    training = make_loader(dataset, batch_size=4, num_workers=0, training=True)
    assert isinstance(training.sampler, RandomSampler)
    assert [len(batch[0]) for batch in training] == [4, 4]
    evaluation = make_loader(dataset, batch_size=16, num_workers=0, training=False)
    assert isinstance(evaluation.sampler, SequentialSampler)
    assert [batch[0].tolist() for batch in evaluation] == [list(range(10))]


def test_training_with_fewer_samples_than_a_batch_uses_all_of_them(monkeypatch):
    dataset = TensorDataset(torch.arange(10))
    with pytest.raises(ValueError, match=r"There are no training samples"):
        make_loader(TensorDataset(torch.zeros(0)), batch_size=1, num_workers=0, training=True)
    with pytest.warns(match="data.batch_size is 64, but there are only 10 training samples: .*data.batch_size=10"):
        (batch,) = make_loader(dataset, batch_size=64, num_workers=0, training=True)
    assert sorted(batch[0].tolist()) == list(range(10))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    with pytest.warns(match=r"only 4 training samples for each of 3 processes"):
        loader = make_loader(dataset, batch_size=5, num_workers=0, training=True)
    assert loader.batch_size == 4
    assert len(make_loader(dataset, batch_size=4, num_workers=0, training=True)) == 2  # before it is shared out
