"""A resume on another number of ranks: refusals with their numbers, and converted settings.

The checkpoints are of one process, and changed to look like those of two. Real ones are in
``tests/distributed/test_elastic.py``.
"""

from collections import UserList
from collections.abc import Callable

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler

from tests.support import SavesAt, make_trainer, manual_step
from trainer.callbacks import GradientAccumulation
from trainer.checkpoint.loading import TRAINER_KEY
from trainer.errors import ResumeError

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor"),
    pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument in the `training_step`"),
]
DATA = torch.arange(26.0).unsqueeze(1)


class Net(LightningModule):
    """One weight, and a schedule that may count batches."""

    def __init__(self, frequency=1, interval="step", by_hand=False):
        super().__init__()
        self.net = nn.Linear(1, 1)
        for parameter in self.net.parameters():
            nn.init.constant_(parameter, 0.5)  # with some random weights, losses grow, and a diagnosis repeats steps
        self.how = {"frequency": frequency, "interval": interval}
        self.automatic_optimization = not by_hand
        self.seen = UserList()  # not restored, because this class is not the user's

    def training_step(self, batch, batch_idx):
        batch = batch[0] if isinstance(batch, list) else batch
        self.seen.append((self.trainer.progress.updates, batch.flatten().tolist()))
        loss = self.net(batch / 26).square().mean()
        if not self.automatic_optimization:
            manual_step(self, loss)
        return loss

    def validation_step(self, batch, batch_idx): ...

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), **self.how}]


class DrawsItself(Net):
    def training_step(self, dataloader_iter):
        batch, *_ = next(dataloader_iter)
        return self.net(batch).square().mean()


def loader(batch_size=4, **options):
    return DataLoader(DATA, batch_size, **options)


def written(folder, data=None, module=None, after=2, batch_size=4, **more):
    """A checkpoint of a run with batches of 4, as if two processes had had batches of 2."""
    path = folder / "two.ckpt"
    callbacks = [SavesAt(path, batches=after), *more.pop("callbacks", [])]
    trainer = make_trainer(folder, **{"max_epochs": 2, "enable_checkpointing": True, "callbacks": callbacks, **more})
    validation = loader() if "val_check_interval" in more else None
    trainer.fit(module or Net(), loader(batch_size) if data is None else data, validation)
    checkpoint = torch.load(path, weights_only=True)
    ours, halves = checkpoint["loops"]["amp_trainer"], {"processes": 2, "batch_size": batch_size // 2}
    ours["processes"] *= 2
    if "samples" in ours["order"]:
        ours["order"] |= halves
        ours["order"]["samples"] |= {**halves, "sampler": "DistributedSampler", "shuffle": False}
    torch.save(checkpoint, path)
    return path


def resumed(path, data=None, module=None, **arguments):
    module = module or Net()
    trainer = make_trainer(path.parent, **{"max_epochs": 2, **arguments})
    validation = loader() if "val_check_interval" in arguments else None
    trainer.fit(module, loader() if data is None else data, validation, ckpt_path=path)
    return trainer, module


REFUSED = {
    "inside a window": (
        {"accumulate_grad_batches": 2, "after": 3}, {"accumulate_grad_batches": 2},
        "from the middle of an accumulation window, after batch 3 of epoch 0; take one from the end of a window",
    ),
    "another global batch": (
        {}, {"data": lambda: loader(3)},
        r"an update had 4 samples \(2 x 2 x 1: processes x batch size x accumulate_grad_batches\), which is no"
        r" multiple of 1 x 3 = 3; set a batch size of 1, 2, 4\.",
    ),
    "another accumulation": (
        {}, {"data": lambda: loader(1), "accumulate_grad_batches": 2},
        "got accumulate_grad_batches=2, expected 4, because an update has 4 samples, and a batch has 1",
    ),
    "validations that do not divide": (
        {"batch_size": 2, "val_check_interval": 1, "accumulate_grad_batches": 2},
        {"val_check_interval": 1, "accumulate_grad_batches": 2},
        "there were 2 samples between two validations, and in this run a batch over all processes has 4: set another",
    ),
    "a schedule by batches": (
        {"module": lambda: Net(3, "batch"), "batch_size": 2, "accumulate_grad_batches": 2},
        {"module": lambda: Net(3, "batch")}, "the schedule StepLR counts batches: use interval 'step'",
    ),
    "a limit": ({"limit_train_batches": 6}, {}, "limit_train_batches was 6, expected 1.0"),
    "a limit now": ({}, {"limit_train_batches": 6}, "limit_train_batches is 6, expected 1.0"),
    "a sampler of the user's own now": (
        {}, {"data": lambda: loader(sampler=SubsetRandomSampler(range(20)))}, "sampler is a SubsetRandomSampler",
    ),
    "two dataloaders now": ({}, {"data": lambda: [loader(), loader()]}, "there are 2 training dataloaders"),
    "a step that draws": ({"module": DrawsItself}, {}, "the training_step drew its own batches"),
    "a step that draws now": ({}, {"module": DrawsItself}, "the training_step draws its own batches"),
    "a scheduler of Lightning's": (
        {"callbacks": [GradientAccumulationScheduler({0: 1})]}, {}, "accumulation changed with the epochs"
    ),
    "accumulation by epochs": (
        {"callbacks": [GradientAccumulation(schedule={0: 1, 1: 2})]}, {}, r"expected Trainer\(accumulate_grad_batches"
    ),
    "accumulation by epochs now": (
        {}, {"callbacks": [GradientAccumulation(schedule={0: 1, 1: 2})]}, "got accumulate_grad_batches=a schedule"
    ),
    "by hand": (
        {"module": lambda: Net(by_hand=True)}, {"module": lambda: Net(by_hand=True), "data": lambda: loader(2)},
        "an optimizer step is assumed for each batch, so that a batch of all processes must have 4 samples",
    ),
    "windows over epochs": (
        {"callbacks": [GradientAccumulation(2, straddles_epochs=True)]},
        {"callbacks": [GradientAccumulation(2, straddles_epochs=True)], "data": lambda: loader(2)},
        "straddles_epochs=True",
    ),
    "other samples": (
        {}, {"data": lambda: DataLoader(DATA[:20], 4)}, "the number of samples was 26 and is 20",
    ),
}  # fmt: skip


def made(arguments):
    return {k: v() if isinstance(v, Callable) else v for k, v in arguments.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_inexact_resume_is_refused_with_the_fix(tmp_path, name):
    first, second, words = REFUSED[name]
    path = written(tmp_path, **made(first))
    with pytest.raises(ResumeError, match=f"(?s){words}.*exact_resume=False"):
        resumed(path, **made(second))


def test_inexact_resume_works_with_exact_resume_false(tmp_path):
    path = written(tmp_path)
    message = "with world size 2, but this run has world size 1: .*The run resumes, but not exactly"
    with pytest.warns(UserWarning, match=message):
        trainer, module = resumed(path, loader(3), exact_resume=False)
    assert trainer.accumulate_grad_batches == 1
    assert module.seen[0] == (2, [6.0, 7.0, 8.0])  # after 2 batches on each of its ranks
    assert trainer.train_dataloader.drop_last is False


@pytest.mark.parametrize(("interval", "expected"), [(2, [4, 6, 9, 11, 13]), (1, [11, 12, 13, 14])])
def test_settings_in_batches_are_converted(interval, expected, tmp_path):
    """26 samples, 4 per step: 7 batches before (one of them short), 13 of 2 samples now."""
    path = written(tmp_path, module=Net(2), val_check_interval=interval)
    trainer = make_trainer(path.parent, max_epochs=2, val_check_interval=interval)
    module, validated, rates = Net(2), [], set()
    module.on_validation_start = lambda: validated.append(trainer.global_step)
    module.on_train_batch_end = lambda *_: rates.add(trainer.optimizers[0].param_groups[0]["lr"])
    trainer.fit(module, loader(2), loader(), ckpt_path=path)
    assert validated[-len(expected) :] == expected
    assert len(rates) == 7  # the schedule steps every second update
    assert (trainer.global_step, trainer.progress.batches, len(module.seen)) == (14, 26, 26 - 4)


def test_batches_of_a_later_epoch_are_converted(tmp_path):
    trainer, module = resumed(written(tmp_path, after=9), loader(2))
    assert (trainer.global_step, trainer.progress.batches, len(module.seen)) == (14, 26, 26 - 13 - 4)


class Asks(Net):
    def configure_optimizers(self):
        self.updates = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_estimated_stepping_batches_are_equal_after_an_elastic_resume(tmp_path):
    first = Asks()
    trainer, module = resumed(written(tmp_path, module=first), loader(1), Asks())
    assert module.updates == first.updates == trainer.global_step == 14


@pytest.mark.parametrize(("after", "later", "update"), [(2, 8, 4), (7, 15, 8)])
def test_with_workers(after, later, update, tmp_path):
    options = {"num_workers": 1, "persistent_workers": True}
    written(tmp_path, loader(**options), whole := Net(), after=after)
    for start, first in (("two", after), ("again", update)):  # "again": from a checkpoint of the resumed run
        saving = {"callbacks": [SavesAt(tmp_path / "again.ckpt", batches=later)], "enable_checkpointing": True}
        _, module = resumed(tmp_path / f"{start}.ckpt", loader(2, **options), **saving)
        for update in range(first, 14):
            seen, expected = (
                sorted(number for at, numbers in one.seen if at == update for number in numbers)
                for one in (module, whole)
            )
            assert seen == expected


def test_order_of_later_epochs_after_an_epoch_is_that_of_the_first_run(tmp_path):
    """The sampler draws from a generator of the dataloader."""

    def make(batch_size=4):
        return loader(batch_size, shuffle=True, generator=torch.Generator().manual_seed(1))

    path, whole = tmp_path / "one.ckpt", Net()
    make_trainer(tmp_path, max_epochs=2, callbacks=[SavesAt(path, 7)], enable_checkpointing=True).fit(whole, make())
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["loops"]["amp_trainer"]["processes"] *= 2
    torch.save(checkpoint, path)
    _, module = resumed(path, make(2))
    for update in range(7, 14):
        seen, expected = (
            sorted(number for at, numbers in one.seen if at == update for number in numbers) for one in (module, whole)
        )
        assert seen == expected


def test_elastic_job_has_a_checkpoint_before_it_trains(tmp_path):
    folder = tmp_path / "checkpoints"

    def fit(**options):
        saver = ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
        make_trainer(tmp_path, callbacks=[saver], enable_checkpointing=True, **options).fit(Net(), loader())
        return sorted(path.name for path in folder.glob("*.ckpt"))

    for options in ({"resume": "auto"}, {"num_nodes": "auto"}):
        assert fit(**options) == ["epoch=0.ckpt"]
        (folder / "epoch=0.ckpt").unlink()
    assert fit(max_epochs=0, num_nodes="auto", resume="auto") == []
    assert fit(num_nodes="auto", resume="auto") == ["epoch=0.ckpt", "start.ckpt"]
    start = torch.load(folder / "start.ckpt", weights_only=True)
    assert (start["global_step"], start["loops"][TRAINER_KEY]["order"]["samples"]["processes"]) == (0, 1)
    (folder / "start.ckpt").unlink()
    assert fit(max_epochs=2, num_nodes="auto", resume="auto") == ["epoch=0.ckpt", "epoch=1.ckpt"]
