"""Steps that draw their own batches, and dataloaders that keep their place, under both Trainers."""

from collections import UserList
from itertools import cycle

import pytest
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from tests.parity import FEATURES, Classifier, assert_agree, data, ours, plain, weights
from tests.support import SavesAt, Stream, manual_step, stream_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument"),
]


class Draws(Classifier):
    """Draws ``at_once`` batches per step; ``catches`` a StopIteration, or raises it."""

    def __init__(self, at_once=1, catches=False, manual=False):
        super().__init__()
        self.at_once, self.catches, self.automatic_optimization = at_once, catches, not manual
        self.drawn = UserList()  # not restored, because this class is not the user's

    def draw(self, dataloader_iter):
        losses = []
        for _ in range(self.at_once):
            try:
                batch, batch_idx, dataloader_idx = next(dataloader_iter)
            except StopIteration:
                self.drawn.append("end")
                if not self.catches:
                    raise
                break
            losses.append(self.loss(batch))
            self.drawn.append((self.trainer.state.stage.value, batch_idx, dataloader_idx, dataloader_iter.done))
        return sum(losses) if losses else None

    def training_step(self, dataloader_iter):
        loss = self.draw(dataloader_iter)
        if not self.automatic_optimization and loss is not None:
            manual_step(self, loss)
        return loss

    def validation_step(self, dataloader_iter):
        return self.draw(dataloader_iter)

    test_step = predict_step = validation_step


class Records(Callback):
    """Records the arguments of hooks around a step, and the counters at the end of an epoch."""

    def __init__(self):
        self.events = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.events.append(("end", plain(batch), batch_idx, trainer.is_last_batch))

    def on_train_batch_start(self, trainer, module, batch, *where):
        self.events.append(("start", plain(batch), where))

    on_validation_batch_start = on_predict_batch_start = on_train_batch_start

    def on_validation_batch_end(self, trainer, module, outputs, batch, *where):
        self.events.append(("validated", plain(outputs), plain(batch), where))

    def on_train_epoch_end(self, trainer, module):
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        self.events.append((progress.ready, trainer.fit_loop._data_fetcher.fetched))


LOADERS = {"sized": lambda: data(8), "unsized": lambda: stream_of(data(6))}


@pytest.mark.parametrize(
    ("loader", "at_once", "how", "arguments"),
    [
        ("sized", 1, {}, {"limit_train_batches": 2, "limit_val_batches": 1}),
        ("sized", 2, {"manual": True}, {}),
        ("sized", 2, {}, {"reload_dataloaders_every_n_epochs": 1}),
        ("sized", 1, {}, {"limit_train_batches": 3, "val_check_interval": 2}),
        ("unsized", 2, {"catches": True}, {}),
        ("unsized", 1, {"manual": True}, {}),
    ],
    ids=str,
)
def test_fit(loader, at_once, how, arguments):
    def scenario(make):
        module, records = Draws(at_once, **how), Records()
        trainer = make(max_epochs=2, callbacks=[records], **arguments)
        trainer.fit(module, LOADERS[loader](), LOADERS[loader]())
        return module.drawn, records.events, trainer.current_epoch, [w.tolist() for w in weights(module)]

    assert_agree(scenario)


def test_validation_follows_data_without_a_length_that_ends_inside_a_step():
    module = Draws(at_once=2)
    ours(max_epochs=2, num_sanity_val_steps=0).fit(module, LOADERS["unsized"](), LOADERS["sized"]())
    stages = [drawn if drawn == "end" else drawn[0] for drawn in module.drawn]
    assert stages == 2 * [*["train"] * 3, "end", *["validate"] * 4]


@pytest.mark.parametrize(
    ("fn", "loader", "at_once"), [("validate", "sized", 1), ("test", "unsized", 2), ("predict", "sized", 2)]
)
def test_evaluation(fn, loader, at_once):
    def scenario(make):
        module, records = Draws(at_once), Records()
        trainer = make(callbacks=[records])
        result = getattr(trainer, fn)(module, LOADERS[loader]())
        assert hasattr(getattr(trainer, f"{fn}_loop"), "_data_fetcher")
        return module.drawn, records.events, plain(result)

    assert_agree(scenario)


def test_batch_size_is_set_by_the_module():
    class Logs(Draws):
        def training_step(self, dataloader_iter):
            loss = super().training_step(dataloader_iter)
            with pytest.raises(MisconfigurationException, match=r"batch_size=.*should be provided"):
                self.log("loss", loss, on_epoch=True)
            self.log("loss", loss, on_epoch=True, batch_size=1)
            return loss

    trainer = ours(max_epochs=1)
    trainer.fit(Logs(), data(4))
    assert set(trainer.callback_metrics) == {"loss", "loss_step", "loss_epoch"}


class Squares(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 3:
            raise IndexError
        return torch.full((4,), float(index)), torch.tensor(0)


@pytest.mark.parametrize("stage", ["train", "val"])
def test_dataset_instead_of_a_dataloader_is_a_warning(stage):
    given = {"train": data(2), "val": data(2), stage: Squares()}
    with pytest.warns(UserWarning, match=rf"Got a Squares as {stage}_dataloader: each .* `DataLoader\(dataset, batch_"):
        ours(max_epochs=1, num_sanity_val_steps=0).fit(Evaluates(), given["train"], given["val"])


# --- dataloaders that keep their place ----------------------------------------------------------------------------


class Numbers:
    """Yields 0, 1, 2, ... from its position; not a dataloader."""

    at = 0

    def __len__(self):
        return 4

    def __iter__(self):
        for number in range(self.at, 100):
            self.at = number + 1
            yield number


class Bookmark(Numbers):
    """Restores its position."""

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Sees(Classifier):
    def __init__(self):
        super().__init__()
        self.seen = UserList()  # not restored, because this class is not the user's

    def training_step(self, batch, batch_idx):
        self.seen.append((batch_idx, plain(batch)))
        return self.net(torch.ones(1, FEATURES)).sum()


def test_resume_is_exact_or_reports_the_batches_it_cannot_skip(tmp_path):
    def resumed(loader, forget=False):
        module, again, path = Sees(), Sees(), tmp_path / "saved.ckpt"
        torch.manual_seed(1)
        ours(max_epochs=1, callbacks=[SavesAt(path, 2)], enable_checkpointing=True).fit(module, loader())
        if forget:  # as Lightning writes it
            checkpoint = torch.load(path, weights_only=True)
            del checkpoint["loops"]["amp_trainer"]
            torch.save(checkpoint, path)
        ours(max_epochs=1).fit(again, loader(), ckpt_path=path)
        assert [batch_idx for batch_idx, _ in again.seen] == [2, 3]
        return [module.seen[2:], again.seen]

    for loader in (Bookmark, lambda: data(8), lambda: data(8, shuffle=True)):
        never_left, mine = resumed(loader)
        assert mine == never_left
    with pytest.warns(PossibleUserWarning, match=r"Numbers cannot skip batches.*first 2"):
        never_left, mine = resumed(Numbers)
    assert mine == never_left
    for loader in (Numbers, lambda: data(8, shuffle=True)):
        with pytest.warns(PossibleUserWarning, match="resuming from a checkpoint that ended before the epoch ended"):
            resumed(loader, forget=True)


def test_user_objects_keep_their_classes_and_identities_with_workers():
    class Looks(Sees):
        def training_step(self, batch, batch_idx):
            (loader,), (rows,) = self.trainer.train_dataloader, batch
            seen.append((loader is given, loader.dataset is dataset, type(dataset) is Own, rows.tolist()))
            return super().training_step(batch, batch_idx)

    dataset, seen = Own(), []
    given = DataLoader(dataset, 1, num_workers=1, persistent_workers=True, worker_init_fn=sees_its_dataset)
    ours(max_epochs=2).fit(Looks(), [given])
    assert seen == [(True, True, True, [[index, 1, 1]]) for index in [0, 1] * 2]


class Own(Stream):
    """Yields whether a worker has this class, and its ``worker_init_fn`` got it."""

    epoch = is_known = 0

    def __init__(self):
        super().__init__(range(2))

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for index in self.samples:
            yield torch.tensor(
                [index, float(type(self) is Own and type(get_worker_info().dataset) is Own), self.is_known]
            )


def sees_its_dataset(worker):
    get_worker_info().dataset.is_known = 1


class Streaming(Stream):
    """Has a state that needs arguments, and an attribute that is not saved, as litdata's ``StreamingDataset``."""

    at, cache = 0, None

    def __len__(self):
        return len(self.samples)

    def __iter__(self):
        self.cache = object()
        yield from self.samples[self.at :]

    def state_dict(self, num_samples_yielded, num_workers):
        return {"at": num_samples_yielded}

    def load_state_dict(self, state):
        self.at = state["at"]


class StreamingLoader(DataLoader):
    """Is iterated by a generator, as litdata's ``StreamingDataLoader``."""

    at = 0

    def __iter__(self):
        self.at = self.dataset.at
        for batch in super().__iter__():
            self.at += len(batch)
            yield batch
        self.dataset.at = 0

    def state_dict(self):
        return {"dataset": self.dataset.state_dict(self.at, self.num_workers)}

    def load_state_dict(self, state):
        self.dataset.load_state_dict(state["dataset"])


@pytest.mark.filterwarnings("ignore:Resuming inside an epoch")  # of the plain DataLoader
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize(("kind", "workers"), [(DataLoader, 0), (StreamingLoader, 1)])
def test_datasets_and_loaders_as_those_of_litdata_are_resumed(kind, workers, tmp_path):
    def make():
        return kind(Streaming(torch.arange(8.0)[:, None]), 2, num_workers=workers)

    module, again, path = Sees(), Sees(), tmp_path / "saved.ckpt"
    ours(max_epochs=2, callbacks=[SavesAt(path, 2)], enable_checkpointing=True).fit(module, make())
    ours(max_epochs=2).fit(again, make(), ckpt_path=path)
    assert list(again.seen) == module.seen[2:]
    assert len(again.seen) == 6


class Notes(Draws):
    """Records the drawn batches."""

    def loss(self, batch):
        self.drawn.append(plain(batch))
        return super().loss(batch["a"] if isinstance(batch, dict) else batch)


@pytest.mark.parametrize(("at_once", "shape"), [(1, lambda loader: loader), (2, lambda loader: {"a": loader})])
def test_steps_that_draw_batches_are_resumed_at_their_position(at_once, shape, tmp_path):
    torch.manual_seed(2)
    first, second, path = Notes(at_once), Notes(at_once), tmp_path / "saved.ckpt"
    saving = {"callbacks": [SavesAt(path, 3)], "enable_checkpointing": True}
    ours(max_epochs=2, **saving).fit(first, shape(data(16, shuffle=True)))
    ours(max_epochs=2).fit(second, shape(data(16, shuffle=True)), ckpt_path=path)
    assert second.drawn == first.drawn[6 * at_once :]
    assert [w.tolist() for w in weights(second)] == [w.tolist() for w in weights(first)]


class OwnIterator:
    """Starts again whenever it is iterated."""

    def __init__(self, length):
        self.length, self.passes = length, 0

    def __iter__(self):
        self.at, self.passes = 0, self.passes + 1
        return self

    def __next__(self):
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return self.at


class Evaluates(Sees):
    def validation_step(self, batch, batch_idx):
        self.seen.append(("validation", batch_idx, batch))
        return torch.ones(1)

    predict_step = validation_step


def test_loader_that_is_its_own_iterator_is_iterated_once_per_pass():
    loaders = [OwnIterator(3), OwnIterator(4), OwnIterator(2)]

    def scenario(make):
        module = Evaluates()
        trainer = make(max_epochs=2)
        trainer.fit(module, *loaders[:2])
        trainer.predict(module, loaders[2])
        return list(module.seen)

    assert_agree(scenario)
    for loader in loaders:
        loader.passes = 0
    scenario(ours)
    assert [loader.passes for loader in loaders] == [2, 3, 1]  # Lightning begins another one to check the type


class Once(UserList):
    """Can be iterated once."""

    is_used = False

    def __iter__(self):
        assert not self.is_used
        self.is_used = True
        return iter(self.data)


def test_stream_that_can_be_read_once_is_read_once():
    class Asks(Evaluates):
        def configure_optimizers(self):
            assert self.trainer.estimated_stepping_batches == 4
            return super().configure_optimizers()

    module = Asks()
    ours(max_epochs=1, max_steps=4, num_sanity_val_steps=0).fit(module, Once([1, 2, 3, 4]), Once([5, 6]))
    assert [batch for *_, batch in module.seen] == [1, 2, 3, 4, 5, 6]


class Paired(DataLoader):
    """Yields pairs from an iterator that raises an error after its last item, as scvi-tools' loaders do."""

    def __iter__(self):
        return zip(super().__iter__(), cycle([7]), strict=True)


def test_loader_with_its_own_iterator_is_not_read_beyond_its_length():
    module = Evaluates()
    ours(max_epochs=1, num_sanity_val_steps=0).fit(
        module, Paired([1, 2], batch_size=None), Paired([3], batch_size=None)
    )
    assert [plain(batch) for *_, batch in module.seen] == [[1, 7], [2, 7], [3, 7]]


class Indexed:
    """Has no ``__iter__``."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return [1, 2][index]


def test_loader_without_an_iter_method_is_read():
    module = Evaluates()
    ours(max_epochs=1, num_sanity_val_steps=0).fit(module, Indexed(), Indexed())
    assert [batch for *_, batch in module.seen] == [1, 2, 1, 2]


class Ends:
    """Counts the passes that have ended, after their last items."""

    ended = 0

    def __len__(self):
        return 2

    def __iter__(self):
        yield from [1, 2]
        self.ended += 1


class EndsSamples(Ends, IterableDataset):
    pass


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize("make", [Ends, lambda: DataLoader(EndsSamples(), None)])
def test_code_after_the_last_item_is_reached(make):
    loaders = [make() for _ in range(2)]
    ours(max_epochs=3, num_sanity_val_steps=0).fit(Evaluates(), *loaders)
    assert [getattr(loader, "dataset", loader).ended for loader in loaders] == [3, 3]


@pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled")
@pytest.mark.parametrize("number", [1, 2])
def test_samplers_of_an_evaluation_are_read_to_their_ends(number):
    class Evaluates(Sees):
        def validation_step(self, batch, *indices):
            self.seen.append(batch.tolist())

    def make():
        return [
            DataLoader(range(4), 2, shuffle=True, generator=torch.Generator().manual_seed(1)) for _ in range(number)
        ]

    module, trainer, loaders = Evaluates(), ours(max_epochs=1), make()
    for _ in range(2):
        trainer.validate(module, loaders, verbose=False)
    by_hand = make()
    assert list(module.seen) == [batch.tolist() for _ in range(2) for loader in by_hand for batch in loader]
