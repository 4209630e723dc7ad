"""Set-ups with state in unusual places, resumed from each batch: bitwise equal to the uninterrupted run."""

import copy
import random
import warnings
from collections import UserList, deque
from functools import partial

import pytest
import torch
from _faults.training import differences
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchmetrics import CatMetric, MeanMetric, RunningMean, RunningSum, SumMetric
from torchmetrics.wrappers import MetricTracker

from tests import census
from tests.parity import RecordingLogger
from tests.support import SavesAt, SavesEverywhere, make_trainer
from trainer import Trainer
from trainer.callbacks import Curves, GradientAccumulation, ScaleMonitor
from trainer.checkpoint.loading import process_states_in
from trainer.errors import ResumeError


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
        self.head = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.head(self.backbone(batch[0])).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.head(self.backbone(batch[0])).square().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)


class Closures(Module):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class NothingAtTheEnd(Module):
    """Every second window has a loss in its first batch only, so that the scaler scales no other."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 4 in (0, 1, 2) and batch_idx % 2 == 0 else None


class Averages(Callback):
    """Keeps an average that is no part of the module's tree."""

    def on_fit_start(self, trainer, pl_module):
        self.average = copy.deepcopy(pl_module.backbone)

    def on_train_batch_end(self, trainer, pl_module, *_):
        for own, new in zip(self.average.parameters(), pl_module.backbone.parameters(), strict=True):
            own.data.mul_(0.5).add_(new.data, alpha=0.5)


class LearnsFromItsAverage(Module):
    def training_step(self, batch, batch_idx):
        (callback,) = (one for one in self.trainer.callbacks if isinstance(one, Averages))
        target = callback.average(batch[0]).detach()
        return super().training_step(batch, batch_idx) + (self.backbone(batch[0]) - target).square().mean()


class Running:
    """Saves its state itself, if its owner asks for it, which no owner does."""

    value = 0.0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class StepsItself(Module):
    """Has optimizers, schedules and a loss scaler that ``configure_optimizers`` does not return."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.own = {p: torch.optim.Adam([p], 0.05) for p in self.parameters()}
        self.schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in self.own.values()]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.scaler.scale(torch.zeros(()))  # creates its tensors
        self.running = Running()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * (1 + self.running.value)
        self.running.value += float(loss)
        self.scaler.scale(loss).backward()
        for optimizer in self.own.values():
            self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        for schedule in self.schedules:
            schedule.step()

    def configure_optimizers(self):
        return []


class Alternates(Module):
    """Trains one of its parts in each batch; the other moves by momentum, because its gradient is 0 and not None."""

    def training_step(self, batch, batch_idx):
        part = self.backbone if batch_idx % 2 else self.head
        return part(batch[0]).square().mean()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class AlternatesItself(Alternates):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad(set_to_none=False)
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class AccumulatesItself(Module):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 3 == 2:
            optimizer.step(optimizer_closure)
        else:
            optimizer_closure()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 3 == 0:
            optimizer.zero_grad()


class Freezes(Module):
    def on_train_epoch_start(self):
        self.head.requires_grad_(self.current_epoch >= 1)
        self.backbone[1].train(self.current_epoch != 1)


class Measures(Module):
    """Metric objects that wrap others, and metrics of validations that are never reset."""

    def __init__(self):
        super().__init__()
        self.window, self.ratio = RunningSum(window=5), MeanMetric() / SumMetric()
        self.tracker = MetricTracker(MeanMetric(), maximize=False)
        self.validations, self.values, self.last = SumMetric(), CatMetric(), RunningMean(window=4)

    def on_train_epoch_start(self):
        self.tracker.increment()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.window(loss.detach())
        for metric in (self.ratio, self.tracker):
            metric.update(loss.detach())
        self.log_dict({"window": self.window, "ratio": self.ratio}, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.log("best", self.tracker.best_metric())

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        for metric in (self.validations, self.values, self.last):
            metric.update(batch[0].mean())

    def on_validation_epoch_end(self):
        values = (self.validations.compute(), self.values.compute().sum(), self.last.compute())
        self.log_dict(dict(zip(("number", "sum", "running"), values, strict=True)))


class Anneals(Module):
    """The loss depends on plain attributes and on a random generator, which many hooks change."""

    def __init__(self):
        super().__init__()
        self.factor, self.noise = 1.0, torch.Generator().manual_seed(2)
        self.recent = deque(maxlen=3)
        self.losses = []
        self.validations = []
        self.mean = None

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        value = loss.detach()
        self.mean = value if self.mean is None else 0.9 * self.mean + 0.1 * value
        self.losses.append(value)
        self.recent.append(float(value))
        return loss * self.factor * (1 + sum(self.recent) + torch.rand((), generator=self.noise)) / self.mean

    def on_train_batch_start(self, batch, batch_idx):
        self.factor *= 1.1

    def on_train_batch_end(self, *_):
        self.factor *= 0.8
        self.backbone[2].p *= 0.9

    def on_train_epoch_end(self):
        self.factor += float(torch.stack(self.losses).mean())
        self.losses.clear()

    def validation_step(self, batch, batch_idx):
        self.validations.append(self.head(self.backbone(batch[0])).square().mean())

    def on_validation_epoch_end(self):
        self.factor += float(torch.stack(self.validations).mean())
        self.validations.clear()


class Boosts(Callback):
    """Changes the module by a number that grows."""

    def __init__(self):
        self.boost = 1.0

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.boost *= 1.05
        pl_module.factor *= self.boost


class DrawsAll(Module):
    """Draws the samples of each dataloader when it is created, depending on the epoch and on attributes that change.

    The training depends on an attribute that ``train_dataloader`` sets. The validation adds noise.
    """

    def __init__(self):
        super().__init__()
        self.validated = Noisy()
        self.first, self.drawn, self.order = 0, [], torch.Generator().manual_seed(3)

    def train_dataloader(self):
        indices = torch.randperm(12 - self.current_epoch, generator=self.order)[:6] + self.current_epoch + self.first
        self.drawn = (indices % 12).tolist()
        return DataLoader(Subset(Points(), self.drawn), 2)

    def val_dataloader(self):
        indices = torch.randperm(12)[: 2 + self.current_epoch] + self.first
        return DataLoader(Subset(self.validated, (indices % 12).tolist()), 2)

    def training_step(self, batch, batch_idx):
        self.first += 1
        return super().training_step(batch, batch_idx) * self.drawn[0]


class ScaleCurve(Curves):
    """Limits curves to a few points of losses and scales."""

    def __init__(self):
        super().__init__(max_points=4)

    def state_dict(self):
        return {**super().state_dict(), "metrics": {}}


class Points(Dataset):
    def __init__(self):
        self.noise = random.Random(1)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return [torch.arange(4.0).add(index).sin() + 0.1 * torch.randn(4) + 0.1 * self.noise.random()]


class Noisy(Points):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __getitem__(self, index):
        return [torch.arange(4.0).add(index).sin() + torch.randn(4, generator=self.generator)]


class Lookahead(torch.optim.Optimizer):
    """Counts in an attribute, and wraps an optimizer that its state dict does not include, like many SAMs."""

    def __init__(self, inner):
        self.inner, self.steps = inner, 0
        super().__init__(inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", parameter.clone())
            parameter.copy_(slow.lerp_(parameter, 1 / self.steps))
        return loss


class LooksAhead(Module):
    def configure_optimizers(self):
        optimizer = Lookahead(torch.optim.SGD(self.parameters(), 0.1, momentum=0.9))
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), "interval": "step"}]


def train(make, folder, *, seed=0, start=None, callbacks=(), collate=None, **arguments):
    """Return the state at the end, the logged rows, and the checkpoints, each with its number of earlier rows."""
    folder.mkdir()
    torch.manual_seed(5)
    module, saver, rows = make(), SavesEverywhere(folder), RecordingLogger()
    torch.manual_seed(seed)
    options = {"max_epochs": 2, "val_check_interval": 3, "num_sanity_val_steps": 0, **arguments}
    savers = [saver] if start is None else []
    options |= {"logger": rows, "log_every_n_steps": 1, "enable_checkpointing": bool(savers)}
    trainer = make_trainer(folder, callbacks=[*callbacks, *savers], **options)
    points = Points()  # of both stages, which share its generator
    data = None if make is DrawsAll else DataLoader(points, 2, shuffle=True, collate_fn=collate)
    trainer.fit(module, data, None if make is DrawsAll else DataLoader(points, 4), ckpt_path=start)
    states = [one.state_dict() for one in (*trainer.optimizers, trainer.scaler, *trainer.callbacks) if one is not saver]
    found = {"module": module, "states": states, "metrics": dict(trainer.callback_metrics)}
    state = census.take(found, without=(Trainer,))
    return state, rows.rows, [*zip(saver.files, saver.rows, strict=True)]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings(action="ignore"):
        yield


@pytest.mark.parametrize(
    ("make", "callbacks", "arguments"),
    [
        (Closures, list, {}),
        (NothingAtTheEnd, list, {"accumulate_grad_batches": 2, "precision": "16-mixed"}),
        (Freezes, list, {}),
        (StepsItself, list, {}),
        (Alternates, list, {}),
        (AlternatesItself, list, {}),
        (AccumulatesItself, list, {"precision": "16-mixed"}),
        (Measures, lambda: [ScaleMonitor(), ScaleCurve()], {"precision": "16-mixed"}),
        (LooksAhead, list, {}),
        (Anneals, lambda: [Boosts()], {"accumulate_grad_batches": 2}),
        (DrawsAll, list, {"check_val_every_n_epoch": 2, "max_epochs": 4}),
        (DrawsAll, list, {"reload_dataloaders_every_n_epochs": 2, "check_val_every_n_epoch": 2, "max_epochs": 5}),
        (Module, lambda: [StochasticWeightAveraging(0.01, 1, 2)], {"accumulate_grad_batches": 2}),
        (Module, lambda: [GradientAccumulation(4, straddles_epochs=True)], {"max_epochs": -1, "max_steps": 3}),
        (Module, lambda: [GradientAccumulation(schedule={0: 1, 1: 2})], {"val_check_interval": 2}),
        (LearnsFromItsAverage, lambda: [Averages()], {}),
    ],
)
def test_resumed(make, callbacks, arguments, tmp_path):
    whole, rows, saved = train(make, tmp_path / "whole", callbacks=callbacks(), **arguments)
    for number in (1, len(saved) // 2 - 1, len(saved) - 6, len(saved) - 3):
        path, logged = saved[number]
        state, own_rows, _ = train(make, tmp_path / str(number), seed=1, start=path, callbacks=callbacks(), **arguments)
        assert census.differences(state, whole) == [], number
        assert differences(own_rows, rows[logged:]) == [], number


def test_states_of_wrapped_optimizers_are_refused_if_the_checkpoint_lacks_them(tmp_path):
    *_, saved = train(LooksAhead, tmp_path / "whole")
    checkpoint = torch.load(saved[3][0], weights_only=False)
    assert len(checkpoint["optimizer_states"][0].pop("inner_optimizers")) == 1
    torch.save(checkpoint, path := tmp_path / "older.ckpt")
    with pytest.raises(ResumeError, match=r"Lookahead.*such as the base optimizer of SAM.*Define state_dict"):
        train(LooksAhead, tmp_path / "resumed", start=path)


@pytest.mark.parametrize("extra", [None, object()])
def test_states_of_own_optimizers_that_are_not_restored_are_reported(tmp_path, extra):
    def make():
        module = StepsItself()
        if extra is None:
            module.schedules.clear()
        next(iter(module.own.values())).param_groups[0]["extra"] = extra
        return module

    *_, saved = train(StepsItself if extra is None else make, tmp_path / "whole")
    with pytest.warns(UserWarning, match=f"not restored: {'ExponentialLR' if extra is None else 'Adam'}"):
        train(make, tmp_path / "resumed", start=saved[3][0])


class Levels(Points):
    level = 0

    def __getitem__(self, index):
        return [torch.arange(4.0) * (index + self.level)]


class Curriculum(Module):
    def on_train_epoch_start(self):
        self.trainer.train_dataloader.dataset.level = self.current_epoch


def test_attribute_of_the_dataset_that_a_hook_sets_reaches_the_workers_of_a_resumed_epoch(tmp_path):
    ends = []
    for start in (None, tmp_path / "8.ckpt"):
        torch.manual_seed(5)
        module, savers = Curriculum(), [SavesAt(tmp_path / "8.ckpt", batches=8)] if start is None else []
        trainer = make_trainer(tmp_path, max_epochs=2, callbacks=savers, enable_checkpointing=start is None)
        trainer.fit(module, DataLoader(Levels(), 2, num_workers=1), ckpt_path=start)
        ends.append(module.state_dict())
    assert differences(*ends) == []


class Step(Module):
    """Saves a checkpoint at a place in the second batch of a window; not with the place ""."""

    def __init__(self, path, place=""):
        super().__init__()
        self.path, self.place, self.trained = path, place, UserList()  # not restored

    def save(self, place):
        if place == self.place and self.trainer.global_step == 1 and self.trainer.fit_loop.batch_idx == 4:
            self.trainer.save_checkpoint(self.path)

    def on_train_batch_start(self, batch, batch_idx):
        self.save("before the batch")

    def training_step(self, batch, batch_idx):
        self.trained.append((batch_idx, self.trainer.loop.window.size))
        self.save("in the step")
        return self.head(self.backbone[0](batch[0])).square().mean()

    def on_after_backward(self):
        self.save("after the backward pass")


class HandSteps(Step):
    """The same windows of three batches in manual optimization."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx) / 3)
        if batch_idx % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


@pytest.mark.parametrize(
    ("make", "place"),
    [(Step, "before the batch"), (Step, "after the backward pass"), (HandSteps, "in the step")],
)
def test_batch_of_a_checkpoint_that_was_saved_inside_it_is_repeated(make, place, tmp_path):
    """A new window begins with it."""
    path, window = tmp_path / "inside.ckpt", 3 if make is Step else 1
    arguments = {"precision": "16-mixed", "max_epochs": 1, "accumulate_grad_batches": window}
    train(partial(make, path, place), tmp_path / "whole", **arguments)
    resumed = make(path)
    with pytest.warns(UserWarning, match=r"inside a batch, batch_idx 4 of epoch 0.*gradients of earlier"):
        train(lambda: resumed, tmp_path / "resumed", start=path, **arguments)
    assert resumed.trained == [(batch_idx, 2 if make is Step else 1) for batch_idx in (4, 5)]
    assert process_states_in(torch.load(path))[0]["gradients"] == {}


def test_resume_inside_a_window_that_is_evaluated_again_is_refused(tmp_path):
    arguments = {"accumulate_grad_batches": 3, "max_epochs": 1}
    whole, rows, saved = train(Closures, tmp_path / "whole", **arguments)
    with pytest.raises(ResumeError, match=r"inside an accumulation window.*exact_resume=False"):
        train(Closures, tmp_path / "refused", start=saved[0][0], **arguments)
    with pytest.warns(UserWarning, match=r"They are not saved.*The run resumes, but not exactly"):
        train(Closures, tmp_path / "resumed", start=saved[0][0], exact_resume=False, **arguments)
    path, logged = saved[2]
    state, own_rows, _ = train(Closures, tmp_path / "between", start=path, **arguments)
    assert census.differences(state, whole) == []
    assert differences(own_rows, rows[logged:]) == []


def test_checkpoint_inside_the_first_batch_is_reported(tmp_path):
    def save(trainer, *_):
        if trainer.progress.batch_idx == 0:
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    train(Module, tmp_path / "whole", callbacks=[LambdaCallback(on_train_batch_start=save)])
    with pytest.warns(UserWarning, match="inside a batch, batch_idx 0 of epoch 1"):
        train(Module, tmp_path / "resumed", start=tmp_path / "1.ckpt")
