"""Combinations of features that were broken once."""

from __future__ import annotations

import os
import signal
import weakref

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader
from torchmetrics import Metric

from tests.support import SavesAt, make_trainer
from trainer.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore")
BATCHES = 4


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen: list[float] = []

    def training_step(self, batch, batch_idx):
        self.seen.append(float(batch[0, 0]))
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def loader(**options):
    return DataLoader([torch.full((2,), float(i)) for i in range(BATCHES)], **options)


def saved_after(tmp_path, steps, **options):
    """Train until ``steps``, and return the path of the checkpoint."""
    path = tmp_path / "at.ckpt"
    return make_trainer(tmp_path, callbacks=[SavesAt(path, steps)], enable_checkpointing=True, **options), path


def test_stop_iteration_of_an_ordinary_step_is_an_error(tmp_path):
    class Exhausted(Net):
        def validation_step(self, batch, batch_idx):
            next(iter(()))

    with pytest.raises(StopIteration):
        make_trainer(tmp_path).validate(Exhausted(), loader())


@pytest.mark.parametrize("on_step", [True, False])
def test_metrics_that_cannot_be_read_do_not_keep_a_run_from_being_torn_down(tmp_path, on_step):
    class Parts(Metric):
        def update(self):
            pass

        def compute(self):
            return {"a": torch.zeros(())}

    class LogsParts(Net):
        def __init__(self):
            super().__init__()
            self.parts = Parts()

        def training_step(self, batch, batch_idx):
            self.parts()
            self.log("parts", self.parts, on_step=on_step, on_epoch=not on_step)
            return super().training_step(batch, batch_idx)

    module, trainer = LogsParts(), make_trainer(tmp_path)
    with pytest.raises(ConfigurationError, match="must be a tensor"):
        trainer.fit(module, loader())
    assert "log" not in vars(module)
    assert trainer.interrupted
    assert trainer.state.stage is None


def test_open_window_of_an_optimizer_with_a_closure_is_used_if_training_stops(tmp_path):
    class Stops(Net):
        def training_step(self, batch, batch_idx):
            self.trainer.should_stop = batch_idx == 1
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=2)

    module, trainer = Stops(), make_trainer(tmp_path, accumulate_grad_batches=4, max_epochs=2)
    trainer.fit(module, loader())
    assert (module.seen, trainer.global_step) == ([0.0, 1.0, 0.0, 1.0], 1)  # evaluated twice: max_iter=2


def test_signal_ends_the_fit_without_references_to_the_exception(tmp_path):
    class Signalled(Net):
        def training_step(self, batch, batch_idx):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    class Asks(Callback):
        def on_exception(self, trainer, pl_module, exception):
            answers.append(trainer.fit_loop.done)

    answers = []
    trainer = make_trainer(tmp_path, callbacks=[Asks()])
    with pytest.raises(SIGTERMException):
        trainer.fit(Signalled(), loader())
    assert answers == [False]
    assert trainer._signal_connector.interruption is None
    assert all(loop.check_signals is None for loop in (trainer.loop.limits, *trainer.eval_loops.values()))


def test_epoch_that_ends_right_after_a_resume_steps_its_plateau_schedule(tmp_path):
    class Plateau(Net):
        def __init__(self):
            super().__init__()
            self.steps = []

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}

        def lr_scheduler_step(self, scheduler, metric):
            self.steps.append(self.trainer.current_epoch)

    first, path = saved_after(tmp_path, BATCHES)
    first.fit(Plateau(), loader())
    module = Plateau()
    make_trainer(tmp_path, max_epochs=2).fit(module, loader(), ckpt_path=path)
    assert module.steps == [0, 1]


class WatchesBoth(Net):
    """Logs two losses with one name, and has a schedule that monitors it."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("loss", 1.0 + self.trainer.current_epoch)  # it gets worse with each epoch

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}


@pytest.mark.parametrize(
    ("hook", "turn"),
    [("on_train_batch_start", BATCHES + 1), ("on_train_batch_end", 2 * BATCHES), ("on_validation_end", 2)],
)
def test_plateau_schedule_takes_no_step_twice_after_a_resume(tmp_path, hook, turn):
    class Saves(Callback):
        calls = 0

    def save(self, trainer, module, *args):
        self.calls += 1
        if self.calls == turn:
            trainer.save_checkpoint(tmp_path / "at.ckpt")

    setattr(Saves, hook, save)
    options = {"max_epochs": 3, "num_sanity_val_steps": 0}
    whole = make_trainer(tmp_path, callbacks=[Saves()], **options)
    whole.fit(WatchesBoth(), loader(), loader())
    resumed = make_trainer(tmp_path, **options)
    resumed.fit(WatchesBoth(), loader(), loader(), ckpt_path=tmp_path / "at.ckpt")
    assert whole.optimizers[0].param_groups[0]["lr"] == resumed.optimizers[0].param_groups[0]["lr"] == 0.01 / 4


class Place:
    """A dataloader that restores its position."""

    def __init__(self) -> None:
        self.at, self.loaded = 0, None

    def __len__(self):
        return BATCHES

    def __iter__(self):
        for i in range(self.at, BATCHES):
            self.at = i + 1
            yield torch.full((1, 2), float(i))
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = self.loaded = state["at"]


def test_dataloaders_created_early_are_recreated_before_their_state_is_loaded(tmp_path):
    class Estimates(Net):
        def __init__(self):
            super().__init__()
            self.made = []

        def train_dataloader(self):
            self.made.append(Place())
            return self.made[-1]

        def configure_optimizers(self):
            assert self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    options = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    first, path = saved_after(tmp_path, BATCHES + 1, **options)
    first.fit(Estimates())
    module = Estimates()
    make_trainer(tmp_path, **options).fit(module, ckpt_path=path)
    assert module.seen == [1.0, 2.0, 3.0]
    assert [one.loaded for one in module.made] == [None, 1]


def test_predictions_of_processes_that_are_spawned_cannot_be_returned(tmp_path):
    with pytest.raises(ConfigurationError, match="`return_predictions` should be set to `False`"):
        make_trainer(tmp_path, strategy="ddp_spawn", devices=2).predict(Net(), loader(), return_predictions=True)


def test_validation_that_raises_leaves_the_module_in_its_modes(tmp_path):
    class Raises(Net):
        def validation_step(self, batch, batch_idx):
            raise ValueError

    module = Raises()
    with pytest.raises(ValueError):  # noqa: PT011
        make_trainer(tmp_path).fit(module, loader(), loader())
    assert module.training
    assert module.layer.training


def test_closure_optimizer_holds_no_batch_after_its_window(tmp_path, no_gc):
    class Closure(Net):
        def training_step(self, batch, batch_idx):
            batches.append(weakref.ref(batch))
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=1)

    batches = []
    trainer = make_trainer(tmp_path, accumulate_grad_batches=2)
    trainer.fit(Closure(), loader())
    assert not [one for one in batches if one() is not None]
