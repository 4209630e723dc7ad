"""The files that a Trainer with default settings writes: those of Lightning's Trainer, and no others."""

import re

import lightning
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from tests.parity import ours
from trainer import Trainer

OPTIONS = {
    "accelerator": "cpu",
    "max_epochs": 2,
    "limit_train_batches": 2,
    "limit_val_batches": 1,
    "enable_model_summary": False,
}


def files_below(folder):
    """Relative paths, without the time, host and process id in the names of TensorBoard's files."""
    files = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(re.sub(r"tfevents\..*", "tfevents", file) for file in files)


def run_all(trainer_class, folder, monkeypatch, **options):
    """Fit, validate, test and predict in ``folder`` as the working directory."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    trainer, model = trainer_class(**(OPTIONS | options)), BoringModel()
    for function in (trainer.fit, trainer.validate, trainer.test):
        function(model)
    trainer.predict(model, DataLoader(RandomDataset(32, 4)))
    return files_below(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logger": False},
        {"barebones": True},
        {"default_root_dir": "root", "max_epochs": 1},
        {"logger": CSVLogger("logs")},
    ],
    ids=["default", "no logger", "barebones", "root", "csv"],
)
def test_trainer_writes_the_files_of_lightnings_trainer(tmp_path, monkeypatch, options):
    expected = run_all(lightning.Trainer, tmp_path / "lightning", monkeypatch, **options)
    assert run_all(Trainer, tmp_path / "ours", monkeypatch, **options) == expected


def test_logger_writes_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    trainer = ours(logger=True, default_root_dir="~/runs")
    assert trainer.default_root_dir == trainer.logger.save_dir == str(tmp_path / "runs")


def test_default_logger_without_tensorboard_is_csv(tmp_path, monkeypatch):
    for package in ("_TENSORBOARD_AVAILABLE", "_TENSORBOARDX_AVAILABLE"):
        monkeypatch.setattr(f"lightning.fabric.loggers.tensorboard.{package}", False)
    with pytest.warns(UserWarning, match="`logger=True` will use `CSVLogger` as the default logger"):
        trainer = ours(logger=True, default_root_dir=tmp_path)
    assert [type(logger) for logger in trainer.loggers] == [CSVLogger]
