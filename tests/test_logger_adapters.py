"""An adapter from outside the package, for a logger of another package."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from tests.parity import RecordingLogger
from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer import log_images, loggers
from trainer.callbacks import RunRecorder
from trainer.cli import tracking
from trainer.cli.parsing import UsageError
from trainer.errors import ConfigurationError
from trainer.lightning.defaults import in_opening_order
from trainer.loggers import LoggedRun, LoggerAdapter, adapter, adapter_class
from trainer.loggers.mlflow import MLFlow
from trainer.record.run_record import RunRecord, load_run


class Memory(RecordingLogger):
    """A logger that keeps everything in memory."""

    def __init__(self, title=None):
        super().__init__()
        self.title = title
        self.images = []


NODE = {"_target_": f"{__name__}.Memory", "title": None}


@pytest.fixture(autouse=True)
def registered():
    adapter(None)  # the built-in adapters come first
    before = dict(loggers._ADAPTERS)

    class MemoryAdapter(LoggerAdapter):
        target = f"{__name__}.Memory"
        opening_order = 0
        logs_images = True
        is_tracker = True

        @classmethod
        def check(cls, key, node, checkpoint_files):
            if node["title"] == "":
                raise ConfigurationError(f"{key}.title is empty.")

        @classmethod
        def complete(cls, node, run):
            return loggers.fill(node, title=run.title)

        def log_images(self, name, images, step):
            self.logger.images.append((name, images, step))

        def log_settings(self, settings):
            self.logger.log_hyperparams(dict(settings))
            return str(self.logger.version)

    yield
    loggers._ADAPTERS.clear()
    loggers._ADAPTERS.update(before)


def test_settings_of_an_adapter_are_checked_and_completed():
    assert tracking.complete({"m": NODE}, LoggedRun(Path("a/b"), sweep="s"), {})["m"]["title"] == "s/b"
    assert tracking.has_tracker({"m": NODE})
    assert not tracking.has_tracker({"c": {"_target_": "lightning.pytorch.loggers.CSVLogger"}})
    with pytest.raises(UsageError, match="title is empty"):
        tracking.check({"logger": {"m": NODE | {"title": ""}}, "checkpoint_files": {}})


def test_adapter_logs_images_and_the_settings_of_the_run(tmp_path):
    memory, rows = Memory(), CSVLogger(tmp_path, name="csv")
    recorder = RunRecorder(RunRecord.begin(tmp_path / "run", command="fit"), settings={"seed": 3})

    module = Regression()
    module.on_train_end = lambda: log_images(module.trainer, "samples", torch.zeros(1, 3, 2, 2))
    make_trainer(tmp_path, logger=[rows, memory], callbacks=[recorder]).fit(module, loader_of(make_batches(2)))
    assert memory.hyper_parameters["seed"] == 3
    assert [(name, images.shape, step) for name, images, step in memory.images] == [("samples", (1, 2, 2, 3), 2)]
    assert load_run(tmp_path / "run").facts["tracking"] == {"memoryadapter": "0"}


def test_adapter_is_found_by_the_class_of_the_logger_and_its_bases(tmp_path):
    assert type(adapter(type("Derived", (Memory,), {})())).__name__ == "MemoryAdapter"
    assert type(adapter(object())) is LoggerAdapter
    board = "lightning.pytorch.loggers.tensorboard.TensorBoardLogger"
    assert adapter_class({"_target_": board}).__name__ == "TensorBoard"
    assert adapter_class({"_target_": "pytorch_lightning.loggers.WandbLogger"}).__name__ == "Wandb"
    one, other, memory = TensorBoardLogger(tmp_path), CSVLogger(tmp_path), Memory()
    wandb = object.__new__(WandbLogger)
    assert in_opening_order([one, other, wandb, memory]) == [wandb, memory, other, one]


def test_each_run_has_its_folder():
    wandb = [WandbLogger(project="p", id="x", offline=True, **options) for options in ({}, {"save_dir": "runs"})]
    # of MLflow, the name is the id of the experiment
    mlflow = [MLFlow(SimpleNamespace(save_dir="runs", name="7", _run_id=run)) for run in (None, "x")]
    folders = [Path(str(one.folder)) for one in (*map(adapter, wandb), *mlflow)]
    assert folders == [Path("p/x"), Path("runs/p/x"), Path("runs"), Path("runs/7/x")]
