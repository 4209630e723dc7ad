"""Combinations of features that were broken once."""

import weakref

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import Metric

from tests.support import SavesAt, make_trainer
from trainer.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore")
BATCHES = 4
SAMPLES = [torch.full((2,), float(i)) for i in range(BATCHES)]


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(float(batch[0, 0]))
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def loader():
    return DataLoader(SAMPLES)


def test_stop_iteration_of_an_ordinary_step_is_an_error(tmp_path):
    module = Net()
    module.validation_step = lambda batch, batch_idx: next(iter(()))
    with pytest.raises(StopIteration):
        make_trainer(tmp_path).validate(module, loader())


class Parts(Metric):
    def update(self):
        pass

    def compute(self):
        return {"a": torch.zeros(())}


@pytest.mark.parametrize("on_step", [True, False])
def test_metrics_that_cannot_be_read_do_not_keep_a_run_from_being_torn_down(tmp_path, on_step):
    class LogsParts(Net):
        def on_train_batch_start(self, batch, batch_idx):
            self.parts = Parts()
            self.parts()
            self.log("parts", self.parts, on_step=on_step, on_epoch=not on_step)

    module, trainer = LogsParts(), make_trainer(tmp_path)
    with pytest.raises(ConfigurationError, match="must be a tensor"):
        trainer.fit(module, loader())
    assert "log" not in vars(module)
    assert (trainer.interrupted, trainer.state.stage) == (True, None)


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
    def save(trainer, module, *args):
        calls.append(hook)
        if len(calls) == turn:
            trainer.save_checkpoint(tmp_path / "at.ckpt")

    calls, saves = [], Callback()
    setattr(saves, hook, save)
    options = {"max_epochs": 3, "num_sanity_val_steps": 0}
    whole, resumed = make_trainer(tmp_path, callbacks=[saves], **options), make_trainer(tmp_path, **options)
    whole.fit(WatchesBoth(), loader(), loader())
    resumed.fit(WatchesBoth(), loader(), loader(), ckpt_path=tmp_path / "at.ckpt")
    assert whole.optimizers[0].param_groups[0]["lr"] == resumed.optimizers[0].param_groups[0]["lr"] == 0.01 / 4


CUT_SHORT = {"max_steps": BATCHES + 1, "max_epochs": -1}


@pytest.mark.parametrize(("limits", "steps"), [(CUT_SHORT, 1), ({"max_epochs": 3}, 2)])
def test_plateau_schedule_takes_no_step_for_an_epoch_that_was_cut_short_before_a_resume(tmp_path, limits, steps):
    saves, path = Callback(), tmp_path / "at.ckpt"
    saves.on_train_epoch_end = lambda trainer, _: trainer.save_checkpoint(path)
    whole, resumed = make_trainer(tmp_path, callbacks=[saves], **CUT_SHORT), make_trainer(tmp_path, **limits)
    whole.fit(WatchesBoth(), loader(), loader())
    resumed.fit(WatchesBoth(), loader(), loader(), ckpt_path=path)
    assert [run.lr_scheduler_configs[0].scheduler.last_epoch for run in (whole, resumed)] == [1, steps]


def test_dataloaders_created_early_are_recreated_before_their_state_is_loaded(tmp_path):
    class Estimates(Net):
        def __init__(self):
            super().__init__()
            self.made = []

        def train_dataloader(self):
            self.made.append(StatefulDataLoader(SAMPLES))
            return self.made[-1]

        def configure_optimizers(self):
            assert self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    options = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    saves = SavesAt(tmp_path / "at.ckpt", BATCHES + 1)
    make_trainer(tmp_path, callbacks=[saves], enable_checkpointing=True, **options).fit(Estimates())
    module = Estimates()
    make_trainer(tmp_path, **options).fit(module, ckpt_path=tmp_path / "at.ckpt")
    # the attribute begins with the samples that the saved run has seen
    assert (module.seen, len(module.made)) == ([0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0], 2)


def test_predictions_of_processes_that_are_spawned_cannot_be_returned(tmp_path):
    with pytest.raises(ConfigurationError, match="`return_predictions` should be set to `False`"):
        make_trainer(tmp_path, strategy="ddp_spawn", devices=2).predict(Net(), loader(), return_predictions=True)


def test_validation_that_raises_leaves_the_module_in_its_modes(tmp_path):
    module = Net()
    module.validation_step = lambda batch, batch_idx: 1 / 0
    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path).fit(module, loader(), loader())
    assert (module.training, module.layer.training) == (True, True)


def test_closure_optimizer_holds_no_batch_after_its_window(tmp_path, no_gc):
    class Closure(Net):
        def training_step(self, batch, batch_idx):
            batches.append(weakref.ref(batch))
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=1)

    batches = []
    make_trainer(tmp_path, accumulate_grad_batches=2).fit(Closure(), loader())
    assert not [one for one in batches if one() is not None]
