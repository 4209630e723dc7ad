from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from tests.parity import Classifier, data, lightning, ours
from trainer.compat.default_logger import default_logger


def rows_of(folder: Path) -> list[str]:
    return (folder / "metrics.csv").read_text().splitlines()


def test_it_is_lightnings_one_default_logger(tmp_path: Path) -> None:
    for given in (True, None):
        trainer = ours(logger=given, default_root_dir=tmp_path)
        theirs = lightning(logger=given, default_root_dir=tmp_path)
        assert trainer.loggers == [trainer.logger]
        assert type(trainer.logger) is TensorBoardLogger  # as programs ask
        assert isinstance(theirs.logger, TensorBoardLogger)
        for name in ("name", "version", "save_dir", "log_dir", "root_dir"):
            assert getattr(trainer.logger, name) == getattr(theirs.logger, name), name
        assert trainer.log_dir == theirs.log_dir


def test_both_files_have_every_row(tmp_path: Path) -> None:
    logger = default_logger(str(tmp_path))
    logger.log_hyperparams({"learning_rate": 0.1})
    logger.log_metrics({"loss": 1.0}, 0)
    logger.log_metrics({"loss": 0.5}, 1)
    logger.save()
    logger.finalize("success")
    folder = Path(logger.log_dir)
    assert rows_of(folder) == ["loss,step", "1.0,0", "0.5,1"]  # without TensorBoard's placeholder for no metric
    assert list(folder.glob("events.out.tfevents.*"))
    assert "learning_rate: 0.1" in (folder / "hparams.yaml").read_text()


def test_the_folder_is_chosen_when_it_is_needed(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    first, second = default_logger(str(tmp_path)), default_logger(str(tmp_path))
    for logger in (first, second):
        logger.log_metrics({"loss": 1.0}, 0)
        logger.save()
    assert [Path(logger.log_dir).name for logger in (first, second)] == ["version_0", "version_1"]
    assert not [w for w in recwarn if "exists and is not empty" in str(w.message)]


def test_a_copy_goes_on_in_the_same_files(tmp_path: Path) -> None:
    logger = default_logger(str(tmp_path))
    logger.log_metrics({"loss": 1.0}, 0)
    logger.save()
    copy = pickle.loads(pickle.dumps(logger))
    copy.log_metrics({"loss": 0.5}, 1)
    copy.save()
    assert rows_of(Path(logger.log_dir)) == ["loss,step", "1.0,0", "0.5,1"]


def test_without_tensorboard_there_is_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("_TENSORBOARD_AVAILABLE", "_TENSORBOARDX_AVAILABLE"):
        monkeypatch.setattr(f"lightning.fabric.loggers.tensorboard.{package}", False)
    with pytest.warns(UserWarning, match="`logger=True` will use `CSVLogger` as the default logger"):
        trainer = ours(logger=True, default_root_dir=tmp_path)
    assert [type(logger) for logger in trainer.loggers] == [CSVLogger]


def test_loggers_that_share_a_folder_open_it_without_a_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    shared = [TensorBoardLogger(tmp_path, version=0), CSVLogger(tmp_path, version=0)]
    ours(max_epochs=1, logger=shared).fit(Classifier(), data(4))
    assert not [w for w in recwarn if "exists and is not empty" in str(w.message)]
