"""Metrics of dataloaders that are reloaded: names of earlier passes do not restrict later ones.

Metrics that a caller keeps after a run do not change in the next run; in a run, they are live.
"""

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback
from lightning.pytorch.loggers import CSVLogger

from tests.support import Regression, loader_of, loss_of, make_batches, make_trainer


class Reloads(Regression):
    """Validates ``numbers[epoch]`` dataloaders; their batches are numbers."""

    def __init__(self, numbers, log):
        super().__init__()
        self.numbers, self.log_of = numbers, log

    def val_dataloader(self):
        self.number = self.numbers[self.trainer.current_epoch]
        loaders = [loader_of([torch.tensor(float(i))]) for i in range(self.number)]
        return loaders[0] if self.number == 1 else loaders

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log_of(self, batch, dataloader_idx, self.number)


def run(tmp_path, numbers, log, *callbacks, **arguments):
    """Return the metrics after each validation."""
    seen = []
    look = LambdaCallback(on_validation_end=lambda trainer, _: seen.append({**trainer.callback_metrics}))
    trainer = make_trainer(
        tmp_path, max_epochs=len(numbers), reload_dataloaders_every_n_epochs=1, num_sanity_val_steps=0,
        callbacks=[look, *callbacks], **arguments,
    )  # fmt: skip
    trainer.fit(Reloads(numbers, log), loader_of(make_batches(1)))
    return seen


def log_last(module, batch, dataloader_idx, number):
    if dataloader_idx == number - 1:
        module.log("w", batch, add_dataloader_idx=False, batch_size=1)


def log_all(module, batch, dataloader_idx, number):
    module.log("v", batch, batch_size=1, on_step=number > 1, on_epoch=True)  # other arguments with another number


def test_name_of_one_dataloader_follows_it_if_their_number_changes(tmp_path):
    numbers = [2, 1, 3, 3]
    assert run(tmp_path, numbers, log_last) == [{"w": number - 1.0} for number in numbers]


def test_name_may_move_to_another_dataloader_between_passes(tmp_path):
    def log(module, batch, dataloader_idx, number):
        if dataloader_idx == module.trainer.current_epoch % 2:
            module.log("w", batch, add_dataloader_idx=False, batch_size=1)

    assert run(tmp_path, [2, 2, 2], log) == [{"w": 0.0}, {"w": 1.0}, {"w": 0.0}]


def test_metrics_of_dataloaders_that_are_gone_are_not_read(tmp_path):
    first, second, third = run(tmp_path, [2, 1, 2], log_all)
    assert first.keys() == third.keys() == {f"v{which}/dataloader_idx_{i}" for which in ("", "_epoch") for i in (0, 1)}
    assert second == {"v": 0.0}


def test_monitor_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="conditioned on metric `v/dataloader_idx_1` which is not available"):
        run(tmp_path, [2, 1], log_all, EarlyStopping("v/dataloader_idx_1"))


NAMES = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


class Module(Regression):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, prog_bar=True, batch_size=4)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log(f"{self.trainer.state.stage.value}_loss", loss_of(self.net, batch), prog_bar=True, batch_size=4)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
@pytest.mark.parametrize(
    ("first", "then"), [("fit", "test"), ("validate", "fit"), ("test", "predict"), ("test", "validate")]
)
def test_run_leaves_the_metrics_of_the_run_before_as_they_were(tmp_path, first, then):
    trainer, module = make_trainer(tmp_path, logger=CSVLogger(tmp_path), log_every_n_steps=1), Module()
    getattr(trainer, first)(module, loader_of(make_batches(2)))
    kept = {name: getattr(trainer, name) for name in NAMES}
    copies = {name: dict(metrics) for name, metrics in kept.items()}
    assert all(copies.values())
    getattr(trainer, then)(module, loader_of(make_batches(2)))
    for name, metrics in kept.items():
        assert metrics.keys() == copies[name].keys(), name
        assert all(metrics[key] is value for key, value in copies[name].items()), name
        now = getattr(trainer, name)
        assert now is not metrics
        assert bool(now) is (then != "predict"), name
        assert first == "fit" or not now.keys() & metrics.keys()
