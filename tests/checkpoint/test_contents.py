"""The rules of "What a checkpoint contains" in `docs/reliability.md`, in fits that are resumed."""

import random

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import SumMetric

from tests.support import Regression, SavesAt, loader_of, make_batches, make_trainer
from trainer.errors import ResumeError


class Counts(Regression):
    """Counts its batches in values of all kinds."""

    def __init__(self):
        super().__init__(nn.Linear(6, 3))
        self.sum = SumMetric()
        self.count, self.loaded, self.initial = 0, 0, 0
        self.register_buffer("seen", torch.zeros(2), persistent=False)

    def on_train_start(self):
        self.initial = self.loaded = -1

    def on_train_batch_end(self, *_):
        self.count += 1
        self.sum.update(1)
        self.loaded += 1
        self.initial += 1
        self.seen += 1


class Notes(Callback):
    def __init__(self):
        self.count = self.other = 0

    def on_train_batch_end(self, *_):
        self.count += 1
        self.other += 1


def fit(folder, module, *callbacks, ckpt_path=None, batches=3, **options):
    """Fit the module for an epoch, or resume it at a checkpoint of its end. Return the Trainer."""
    trainer = make_trainer(folder, callbacks=list(callbacks), enable_checkpointing=ckpt_path is None, **options)
    trainer.fit(module, loader_of(make_batches(batches)), ckpt_path=ckpt_path)
    return trainer


@pytest.fixture
def saved(tmp_path):
    """Return a function that saves a checkpoint after the second batch of a fit."""

    def save(module, *callbacks, **options):
        fit(tmp_path, module, *callbacks, SavesAt(tmp_path / "a.ckpt", 2), **options)
        return tmp_path / "a.ckpt"

    return save


class Restored(Callback):
    """Records values of the module and the callbacks when the first batch begins."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if not hasattr(self, "values"):
            noted = [(one.count, one.other) for one in trainer.callbacks if isinstance(one, Notes)]
            assert pl_module.sum.sum_value == pl_module.count
            self.values = (pl_module.count, pl_module.seen.tolist(), *noted)


def resumed(path, tmp_path, module, *callbacks, **options):
    restored = Restored()
    fit(tmp_path, module, *callbacks, restored, ckpt_path=path, **options)
    return restored.values


# --- rule 1: what a hook sets at a resume is the user's -------------------------------------------------------------


class ByHook(Counts):
    def on_load_checkpoint(self, checkpoint):
        assert (self.count, self.seen.tolist(), self.sum.compute()) == (2, [2, 2], 2)  # was restored before
        self.count, self.seen[0], self.sum.sum_value = 70, 50, torch.tensor(70.0)


class ByReplacedBuffer(Counts):
    def on_load_checkpoint(self, checkpoint):
        self.count, self.seen, self.sum.sum_value = 70, torch.tensor([50.0, 2.0]), torch.tensor(70.0)
        self.register_buffer("later", torch.ones(1), persistent=False)


class ByExtraState(Counts):
    def get_extra_state(self):
        return {"any": 1}

    def set_extra_state(self, state):
        self.count, self.seen[0], self.sum.sum_value = 70, 50, torch.tensor(70.0)


class ByStateDict(Counts):
    def load_state_dict(self, *args, **kwargs):
        self.count, self.seen[0], self.sum.sum_value = 70, 50, torch.tensor(70.0)
        return super().load_state_dict(*args, **kwargs)


class NotesByHook(Notes):
    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        assert self.count == 2
        self.count, pl_module.count, pl_module.seen[0] = 30, 70, 50
        pl_module.sum.sum_value = torch.tensor(70.0)


class NotesByStateDict(Notes):
    def state_dict(self):
        return {"any": 1}

    def load_state_dict(self, state):
        self.count = 30


@pytest.mark.parametrize("make", [ByHook, ByReplacedBuffer, ByExtraState, ByStateDict])
def test_values_that_a_hook_of_the_module_sets_are_kept(make, saved, tmp_path):
    path, module = saved(make()), make()
    assert resumed(path, tmp_path, module) == (70, [50, 2])
    assert (module.count, module.initial, module.loaded) == (71, 2, 2)
    assert hasattr(module, "later") is (make is ByReplacedBuffer)


@pytest.mark.parametrize(("make", "expected"), [(NotesByHook, (70, [50, 2])), (NotesByStateDict, (2, [2, 2]))])
def test_values_that_a_hook_of_a_callback_sets_are_kept(make, expected, saved, tmp_path):
    assert resumed(saved(Counts(), make()), tmp_path, Counts(), make()) == (*expected, (30, 2))


def test_values_that_the_set_up_sets_are_initial(saved, tmp_path):
    """They are overwritten by the checkpoint, and read by ``configure_optimizers``."""

    class SetsUp(Counts):
        def setup(self, stage):
            self.count = -7
            self.sum.sum_value = torch.tensor(-7.0)

        def configure_optimizers(self):
            self.configured = self.count
            return super().configure_optimizers()

    path, module = saved(SetsUp()), SetsUp()
    assert resumed(path, tmp_path, module)[0] == -5
    assert module.configured == -7


# --- rule 2: modules, datamodules and callbacks are always searched -------------------------------------------------


class Hooked(Counts):
    """Stores a note in checkpoints."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["note"] = "a1b2c3"

    def on_load_checkpoint(self, checkpoint):
        assert checkpoint["note"] == "a1b2c3"


class HookedNotes(Notes):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        pass

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        pass


def test_attributes_of_classes_with_hooks_for_checkpoints_are_restored(saved, tmp_path):
    path = saved(Hooked(), HookedNotes())
    assert resumed(path, tmp_path, Hooked(), HookedNotes()) == (2, [2, 2], (2, 2))


class Plain(Counts):
    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).square().mean()


class Streaming(Dataset):
    """A dataset whose ``state_dict`` takes arguments."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.read += 1
        x, y, _ = make_batches(1)[0]
        return x[0] + self.read, y[0]

    def state_dict(self, num_samples_yielded, num_workers):
        return {"read": self.read}

    def load_state_dict(self, state):
        raise AssertionError


def test_dataset_with_a_state_dict_that_takes_arguments_keeps_its_attributes(tmp_path):
    ends = []
    for path in (None, tmp_path / "a.ckpt"):
        torch.manual_seed(1)
        module, data = Plain(), Streaming()
        savers = [SavesAt(tmp_path / "a.ckpt", 2)] if path is None else []
        trainer = make_trainer(tmp_path, callbacks=savers, enable_checkpointing=path is None)
        trainer.fit(module, DataLoader(data, 4), ckpt_path=path)
        ends.append((data.read, module.state_dict()["net.weight"].tolist()))
    assert ends[0] == ends[1]
    assert ends[0][0] == 12


# --- rules 3 and 4: held values -------------------------------------------------------------------------------------


class Holds(Counts):
    def __init__(self, make):
        super().__init__()
        self.make, self.handle = make, None

    def on_train_batch_end(self, *_):
        super().on_train_batch_end()
        self.handle = self.make()


@pytest.mark.parametrize("make", [object, lambda: torch.zeros(2**22 + 1)])
def test_held_value_that_changed_is_named_once_and_at_the_resume(make, saved, tmp_path):
    with pytest.warns(UserWarning, match=r"checkpoint lacks values .*: Holds\.handle\. If") as warned:
        path = saved(Holds(make), SavesAt(tmp_path / "b.ckpt", 1))
    assert len(warned) == 1
    with pytest.warns(UserWarning, match=r"values of the program are not restored: Holds\.handle\. All others are"):
        assert resumed(path, tmp_path, Holds(make)) == (2, [2, 2])


class Mine(random.Random):
    pass


@pytest.mark.parametrize("make", [lambda: iter(range(9)), Mine])
def test_resume_is_refused_if_an_iterator_or_a_generator_is_held(make, saved, tmp_path):
    with pytest.warns(UserWarning, match=r"lacks values .*: Holds\.handle"):
        path = saved(Holds(make))
    with pytest.raises(ResumeError, match=r"Holds\.handle cannot be restored.*exact_resume=False"):
        resumed(path, tmp_path, Holds(make))
    with pytest.warns(UserWarning, match=r"Holds\.handle cannot be restored"):
        assert resumed(path, tmp_path, Holds(make), exact_resume=False) == (2, [2, 2])
