"""The rules of "What a checkpoint contains" in `docs/reliability.md`, in fits that are resumed."""

import random
from collections import UserList

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import SumMetric

from tests.support import Regression, SavesAt, loader_of, loss_of, make_batches, make_net, make_trainer
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


# --- the points at which a checkpoint is exact ----------------------------------------------------------------------


class Due(Regression):
    """Draws random numbers in both stages, counts hooks, and has a schedule of each kind."""

    def __init__(self):
        super().__init__(make_net(dropout=0.3))
        self.factor, self.losses = 1.0, []
        self.events = UserList()  # not restored, because this class is not the user's

    def training_step(self, batch, batch_idx):
        self.events.append(("batch", self.current_epoch, batch_idx))
        return super().training_step(batch, batch_idx) * self.factor

    def on_train_epoch_start(self):
        self.factor *= 0.9

    def validation_step(self, batch, batch_idx):
        self.events.append(("validation", self.current_epoch, batch_idx))
        self.losses.append(loss_of(self.net, batch) * torch.rand(()))
        self.log("val_loss", self.losses[-1], batch_size=4)

    def on_validation_epoch_end(self):
        self.factor += float(torch.stack(self.losses).mean()) / 10
        self.losses.clear()

    def configure_optimizers(self):
        optimizer, lr = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9), torch.optim.lr_scheduler
        plateau = {"mode": "max", "patience": 0, "threshold": 1e9, "factor": 0.7}
        monitored = [
            {"scheduler": lr.ReduceLROnPlateau(optimizer, **plateau), "monitor": "val_loss", **often}
            for often in ({"interval": "step", "frequency": 2}, {"interval": "epoch"})
        ]
        return [optimizer], [{"scheduler": lr.ExponentialLR(optimizer, 0.9), "interval": "step"}, *monitored]


def fit_due(folder, module=None, *, hook=None, batches=None, path=None, max_epochs=2):
    """Fit with windows of 2 and a validation after every 3rd of 5 batches. Saves once in ``hook``, if it is given."""

    class Saves(Checkpoint):
        pass

    def save(_, trainer, *args):
        if trainer.progress.batches == batches and not (folder / "a.ckpt").exists():
            trainer.save_checkpoint(folder / "a.ckpt")

    if hook is not None:
        setattr(Saves, hook, save)
    module = Due() if module is None else module
    torch.manual_seed(3 if path is None else 4)
    options = {"accumulate_grad_batches": 2, "val_check_interval": 3, "num_sanity_val_steps": 0}
    trainer = make_trainer(folder, callbacks=[Saves()], enable_checkpointing=True, max_epochs=max_epochs, **options)
    trainer.fit(module, loader_of(make_batches(5)), loader_of(make_batches(2, seed=2)), ckpt_path=path)
    return trainer, module


@pytest.mark.parametrize(
    ("hook", "batches", "first"),
    [
        ("on_train_batch_end", 1, ("batch", 0, 1)),  # inside a window
        ("on_train_batch_end", 3, ("validation", 0, 0)),  # inside a window, with a due validation
        ("on_train_batch_end", 4, ("batch", 0, 4)),
        ("on_validation_start", 8, ("validation", 1, 0)),
        ("on_validation_batch_end", 3, ("validation", 0, 0)),
        ("on_validation_epoch_end", 3, ("validation", 0, 0)),
        ("on_validation_end", 3, ("batch", 0, 3)),
        ("on_train_epoch_end", 5, ("batch", 1, 0)),
        ("", 5, ("batch", 1, 0)),  # after the fit
    ],
)
def test_checkpoint_is_exact_at_three_points(hook, batches, first, tmp_path):
    trainer, whole = fit_due(tmp_path, hook=hook or None, batches=batches)
    if not hook:
        fit_due(tmp_path, max_epochs=1)[0].save_checkpoint(tmp_path / "a.ckpt")
    again, resumed = fit_due(tmp_path, path=tmp_path / "a.ckpt")
    assert resumed.events[0] == first
    assert resumed.events == whole.events[-len(resumed.events) :]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert (again.callback_metrics, resumed.factor) == (trainer.callback_metrics, whole.factor)
    states = [[config.scheduler.state_dict() for config in one.lr_scheduler_configs] for one in (again, trainer)]
    assert states[0] == states[1]


class Starts(Due):
    starts = 0

    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        self.starts += 1
        if self.starts == 2:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/a.ckpt")


def test_hook_that_starts_an_epoch_runs_again(tmp_path):
    _, whole = fit_due(tmp_path, Starts())
    _, resumed = fit_due(tmp_path, Starts(), path=tmp_path / "a.ckpt")
    assert resumed.events == whole.events[-len(resumed.events) :]
    assert (resumed.events[0], whole.starts, resumed.starts) == (("batch", 1, 0), 2, 3)
