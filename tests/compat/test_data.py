"""Dataloaders made ready: prepared by Lightning's connector, counted, limited, iterated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from tests.parity import Classifier, Learner, assert_agree, data, ours, weights
from tests.support import stream_of
from trainer.compat.loaders import LoaderSet
from trainer.data.unpadded import Span


def set_of(iterables: Any) -> LoaderSet:
    combined = CombinedLoader(iterables, "sequential")
    return LoaderSet(combined, [float(len(loader)) for loader in combined.flattened], has_length=True)


def test_limit_of_an_unknown_length_promises_no_batches() -> None:
    """Ranks exchange the number of batches that all of them have."""

    class Looks(Callback):
        def on_test_start(self, trainer: Any, module: Any) -> None:
            self.spans = trainer.data.loaders(trainer.state.stage).spans

    looks = Looks()
    for given, spans in ((stream_of(data(3, batch_size=1)), [Span(0, 5)]), (data(20), [Span(5, 5)])):
        ours(limit_test_batches=5, callbacks=[looks]).test(Classifier(), given, verbose=False)
        assert looks.spans == spans


def test_epochs_reach_everything_that_has_set_epoch_once() -> None:
    epochs: list[tuple[str, int]] = []

    class Has:
        def set_epoch(self, epoch: int) -> None:
            epochs.append((type(self).__name__, epoch))

    class Order(Has, SequentialSampler):
        pass

    class Batches(Has, BatchSampler):
        pass

    class Data(Has, TensorDataset):
        pass

    class Stream(Has, IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([torch.zeros(1)])

        def __len__(self) -> int:
            return 1

    class Loader(Has, list[Any]):
        pass

    dataset = Data(torch.zeros(4))
    one = DataLoader(dataset, batch_sampler=Batches(Order(dataset), 2, False))
    other = DataLoader(ConcatDataset([dataset, Subset(Data(torch.zeros(2)), [0])]), sampler=one.batch_sampler.sampler)
    loaders = set_of([one, other, DataLoader(Stream()), Loader([1])])
    loaders.start_epoch(3)
    assert sorted(epochs) == [("Batches", 3), ("Data", 3), ("Data", 3), ("Loader", 3), ("Order", 3), ("Stream", 3)]


class Reloads(Classifier):
    """Records requests for data, and validations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def note(self, what: str) -> None:
        trainer = self.trainer
        self.seen.append((what, self.current_epoch, trainer.state.stage.value, trainer.val_check_batch))

    def train_dataloader(self) -> Any:
        self.note("train")
        return data(4 + 2 * self.current_epoch)

    def val_dataloader(self) -> Any:
        self.note("val")
        return data(4)

    def on_train_epoch_start(self) -> None:
        self.note(f"{self.trainer.num_training_batches} batches")

    def on_validation_start(self) -> None:
        self.note("validates")


@pytest.mark.parametrize(
    ("sanity", "arguments"),
    [
        (1, {"reload_dataloaders_every_n_epochs": 2}),
        (1, {"reload_dataloaders_every_n_epochs": 4, "check_val_every_n_epoch": 3}),
        (0, {"reload_dataloaders_every_n_epochs": 1, "val_check_interval": 0.5}),
        (0, {"check_val_every_n_epoch": 2}),
        (1, {"limit_val_batches": 0}),
    ],
    ids=str,
)
def test_data_is_requested_at_the_same_points_as_in_lightning(sanity: int, arguments: dict[str, Any]) -> None:
    def scenario(make: Any) -> Any:
        module = Reloads()
        trainer = make(max_epochs=6, num_sanity_val_steps=sanity, **arguments)
        trainer.fit(module)
        return module.seen

    assert_agree(scenario)


@pytest.mark.parametrize(("every", "saved_after", "expected"), [(2, 0, [0, 2, 4]), (2, 1, [0, 2, 4]), (3, 1, [0, 3])])
def test_resumed_run_requests_data_at_the_same_points(
    every: int, saved_after: int, expected: list[int], tmp_path: Path
) -> None:
    class Saves(Reloads):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch == saved_after:
                self.trainer.save_checkpoint(tmp_path / "saved.ckpt")

    arguments = {"reload_dataloaders_every_n_epochs": every, "max_epochs": 5, "limit_val_batches": 0}
    ours(**arguments).fit(Saves())
    resumed = Reloads()
    ours(**arguments).fit(resumed, ckpt_path=tmp_path / "saved.ckpt")
    assert [epoch for what, epoch, *_ in resumed.seen if what == "train"] == expected


def test_dataloaders_are_recreated_on_request() -> None:
    class Asks(Reloads):
        def on_train_batch_end(self, *args: Any) -> None:
            if self.current_epoch in (1, 2):
                self.trainer.reload_dataloaders(train=self.current_epoch == 1, val=self.current_epoch == 2)

    module = Asks()
    trainer = ours(max_epochs=5)
    with pytest.raises(RuntimeError, match="can only be called during training"):
        trainer.reload_dataloaders()
    trainer.fit(module)
    requested = [(what, epoch) for what, epoch, *_ in module.seen if what in ("train", "val")]
    assert requested == [("val", 0), ("train", 0), ("train", 2), ("val", 2)]
    with pytest.raises(RuntimeError, match="can only be called during training"):
        trainer.reload_dataloaders()


def test_workers_of_dataloaders_that_are_replaced_are_shut_down() -> None:
    made = []

    class Workers(Learner):
        def train_dataloader(self) -> Any:
            made.append(data(4, num_workers=1, persistent_workers=True))
            return made[-1]

        def on_train_epoch_start(self) -> None:
            assert [loader._iterator for loader in made[:-1]] == [None] * (len(made) - 1)

    ours(max_epochs=2, reload_dataloaders_every_n_epochs=1).fit(Workers())
    assert len(made) == 2
    assert made[-1]._iterator is None


def test_dataloader_of_two_stages_may_have_persistent_workers() -> None:
    """A validation inside an epoch does not take the training batches away."""

    class Notes(Callback):
        def __init__(self) -> None:
            self.trained, self.validated = list[Any](), list[Any]()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
            self.trained.append(batch[0].tolist())

        def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
            self.validated.append(batch[0].tolist())

    notes, loader = Notes(), data(8, num_workers=1, persistent_workers=True)
    expected = [batch[0].tolist() for batch in data(8)]
    trainer = ours(max_epochs=1, val_check_interval=2, num_sanity_val_steps=0, callbacks=[notes])
    trainer.fit(Classifier(), loader, loader)
    assert notes.trained == expected
    assert notes.validated == expected * (len(expected) // 2)


def test_modes_of_several_dataloaders_are_refused_as_by_lightning() -> None:
    trainer = ours(max_epochs=1)
    with pytest.raises(ValueError, match='`CombinedLoader\\(mode="sequential"\\)`'):
        trainer.fit(Learner(), CombinedLoader([data(8), data(4)], "sequential"))
    assert trainer.num_training_batches == 6
    with pytest.raises(ValueError, match="only supports the `CombinedLoader"):
        trainer.predict(Classifier(), CombinedLoader([data(4), data(4)], "min_size"))


@pytest.mark.parametrize("how", ["plainly", "in a closure"])
def test_batch_none_is_not_trained(how: str) -> None:
    class InAClosure(Learner):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)

    class Records(Callback):
        def __init__(self) -> None:
            self.events: list[Any] = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.events.append(("start", batch_idx))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.events.append(("end", batch_idx, batch is None, outputs if outputs is None else sorted(outputs)))

    def scenario(make: Any) -> Any:
        records, module = Records(), InAClosure() if how == "in a closure" else Learner()
        trainer = make(max_epochs=1, callbacks=[records])
        with pytest.warns(UserWarning, match="train_dataloader yielded None"):
            trainer.fit(module, stream_of([next(iter(data(2))), None, next(iter(data(2)))]))
        return records.events, trainer.global_step, [w.tolist() for w in weights(module)]

    found = assert_agree(scenario)
    assert ("end", 1, True, None) in found[0]
