"""The files that a Trainer with default settings writes: those of Lightning's Trainer, and no others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader

from tests.parity import lightning as lightnings
from tests.parity import ours
from trainer import Trainer

OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 2,
    "limit_train_batches": 2,
    "limit_val_batches": 1,
    "enable_model_summary": False,
}


class Predicts(BoringModel):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch)


def files_below(folder: Path) -> list[str]:
    """Relative paths, without the time, host and process id in the names of TensorBoard's files."""
    files = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(re.sub(r"tfevents\..*", "tfevents", file) for file in files)


def run_all(trainer_class: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[str]:
    """Fit, validate, test and predict in ``folder`` as the working directory."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    trainer = trainer_class(**(OPTIONS | options))
    model, data = Predicts(), DataLoader(RandomDataset(32, 4))
    trainer.fit(model)
    trainer.validate(model)
    trainer.test(model)
    trainer.predict(model, data)
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
def test_trainer_writes_the_files_of_lightnings_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    expected = run_all(lightning.Trainer, tmp_path / "lightning", monkeypatch, **options)
    assert run_all(Trainer, tmp_path / "ours", monkeypatch, **options) == expected


def test_trainer_leaves_a_metrics_csv_of_the_user_alone(tmp_path: Path) -> None:
    class Writes(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            (Path(trainer.log_dir) / "metrics.csv").write_text("mine")

    trainer = Trainer(**OPTIONS, default_root_dir=tmp_path, callbacks=[Writes()], log_every_n_steps=1)
    trainer.fit(BoringModel())
    assert (Path(trainer.log_dir) / "metrics.csv").read_text() == "mine"


def test_default_logger_is_lightnings(tmp_path: Path) -> None:
    loggers = [make(logger=None, default_root_dir=tmp_path).logger for make in (ours, lightnings)]
    assert [type(logger) for logger in loggers] == [TensorBoardLogger, TensorBoardLogger]
    for name in ("name", "version", "save_dir", "log_dir", "root_dir"):
        assert getattr(loggers[0], name) == getattr(loggers[1], name), name


def test_default_logger_without_tensorboard_is_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("_TENSORBOARD_AVAILABLE", "_TENSORBOARDX_AVAILABLE"):
        monkeypatch.setattr(f"lightning.fabric.loggers.tensorboard.{package}", False)
    with pytest.warns(UserWarning, match="`logger=True` will use `CSVLogger` as the default logger"):
        trainer = ours(logger=True, default_root_dir=tmp_path)
    assert [type(logger) for logger in trainer.loggers] == [CSVLogger]


def test_loggers_that_share_a_folder_open_it_without_a_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    shared = [TensorBoardLogger(tmp_path, version=0), CSVLogger(tmp_path, version=0)]
    ours(max_epochs=1, limit_train_batches=2, logger=shared).fit(BoringModel())
    assert not [warning for warning in recwarn if "exists and is not empty" in str(warning.message)]
