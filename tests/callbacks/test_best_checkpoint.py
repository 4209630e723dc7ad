"""Checkpoints that select their metric automatically."""

import inspect
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.callbacks import BestCheckpoint
from trainer.record.measures import best_score_of, paths_of


class Logs(Regression):
    """Logs the given values per epoch in validation; ``train_loss``, and ``acc`` if requested, in training."""

    def __init__(self, trains_acc=False, **values):
        super().__init__()
        self.values, self.trains_acc = values, trains_acc

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        if self.trains_acc:
            self.log("train_acc", 0.5)
        return loss

    def validation_step(self, batch, batch_idx):
        for name, values in self.values.items():
            self.log(name, values[self.current_epoch], batch_size=4)


def fitted(module, folder, epochs, resume=None, batches=2, more=(), **options):
    """Fit with this number of ``batches``, and a validation after each second of them."""
    saver = BestCheckpoint(folder / "checkpoints", filename="{epoch}", **{"monitor": "auto", **options})
    settings = {"enable_checkpointing": True, "max_epochs": epochs, "val_check_interval": 2}
    trainer = make_trainer(folder, callbacks=[saver, *more], **settings)
    trainer.fit(module, loader_of(make_batches(batches)), loader_of(make_batches(1)), ckpt_path=resume)
    return trainer, saver


@pytest.mark.parametrize(
    ("values", "chosen", "best"),
    [
        ({"val_acc": [0.5, 0.9, 0.7]}, ("val_acc", "max"), 1),
        ({"val_aux_loss": [0.5, 0.9, 0.7], "val_loss": [3.0, 2.0, 1.0]}, ("val_loss", "min"), 2),
        ({"val_f1": [0.5, 0.1, 0.2], "val_aux_loss": [3.0, 1.0, 2.0]}, ("val_aux_loss", "min"), 1),
        ({"lr": [1.0, 2.0, 3.0], "accuracy": [0.9, 0.5, 0.1]}, ("accuracy", "max"), 0),
    ],
)
def test_best_checkpoint_by_the_validation_metric_is_kept(tmp_path, values, chosen, best, caplog):
    trainer, saver = fitted(Logs(**values), tmp_path, 3, save_last=True)
    assert (saver.monitor, saver.mode) == chosen
    (line,) = [message for message in caplog.messages if "best checkpoint" in message]
    assert f"est {chosen[0]}" in line
    best_file, last = (tmp_path / "checkpoints" / name for name in (f"epoch={best}.ckpt", "last.ckpt"))
    assert {*(tmp_path / "checkpoints").glob("*.ckpt")} == {best_file, last}
    assert torch.load(last, weights_only=True)["global_step"] == 6  # of 3 epochs
    assert best_score_of(trainer) == pytest.approx(values[chosen[0]][best])
    paths = paths_of(trainer)
    assert (paths["best_checkpoint"], paths["last_checkpoint"]) == (str(best_file), str(last))


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Logs(), {}),
        (Logs(trains_acc=True, val_size=[3.0, 2.0, 1.0]), {}),  # an unknown name; a metric of training
        (Logs(val_loss=[1.0, 2.0, 3.0]), {"monitor": None}),
        (Logs(val_loss=[1.0, 2.0, 3.0]), {"every_n_train_steps": 1}),  # one is written before there is a choice
    ],
)
def test_with_nothing_to_go_by_the_newest_is_kept_and_called_the_last(tmp_path, module, options):
    trainer, saver = fitted(module, tmp_path, 3, **options)
    assert saver.monitor is None
    (newest,) = (tmp_path / "checkpoints").glob("*.ckpt")
    assert paths_of(trainer)["last_checkpoint"] == str(newest)
    assert "best_checkpoint" not in paths_of(trainer)
    assert best_score_of(trainer) is None


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_resumed_run_keeps_to_the_choice_and_the_best_so_far(tmp_path):
    values = [0.5, 0.9, 0.7, 0.8]
    fitted(Logs(val_acc=values), tmp_path, 3, save_last=True)
    both = Logs(val_acc=values, val_loss=[1.0, 1.0, 1.0, 0.1])  # from scratch it would be val_loss
    _, saver = fitted(both, tmp_path, 4, save_last=True, resume=tmp_path / "checkpoints" / "last.ckpt")
    assert (saver.monitor, saver.mode, Path(saver.best_model_path).name) == ("val_acc", "max", "epoch=1.ckpt")
    assert saver.best_model_score == pytest.approx(0.9)
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    (key,) = [key for key in saved["loops"]["amp_trainer"]["callbacks"] if "BestCheckpoint" in key]
    assert "'monitor': 'auto'" in key  # one state, before and after the choice


def test_metric_that_is_named_is_monitored_as_by_lightning(tmp_path):
    values = {"val_loss": [1.0, 3.0, 2.0], "val_acc": [0.1, 0.2, 0.3]}
    _, saver = fitted(Logs(**values), tmp_path, 3, monitor="val_acc", mode="min")
    assert (saver.monitor, Path(saver.best_model_path).name) == ("val_acc", "epoch=0.ckpt")
    assert inspect.signature(BestCheckpoint) == inspect.signature(ModelCheckpoint)


def test_last_checkpoint_is_written_with_and_without_a_metric(tmp_path):
    steps, file = [], tmp_path / "checkpoints" / "last.ckpt"

    def look(*_):
        steps.append(torch.load(file, weights_only=True)["global_step"] if file.exists() else 0)

    more = [LambdaCallback(on_train_batch_start=look, on_train_end=look)]
    options = {"monitor": "val_loss", "save_last": True, "every_n_train_steps": 1}
    _, saver = fitted(Logs(val_loss=[1.0, 2.0]), tmp_path, 2, batches=3, more=more, **options)
    assert steps == [0, 1, 2, 3, 4, 5, 6]
    best = torch.load(saver.best_model_path, weights_only=True)
    assert (best["global_step"], float(saver.best_model_score or 0)) == (2, 1.0)  # saved by the validation itself
