"""The calls of loggers are those of Lightning's Trainer."""

import pickle
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger

from tests.parity import Classifier, Learner, RecordingLogger, assert_agree, data, ours, plain, recording, run_both

METHODS = ["log_metrics", "log_hyperparams", "log_graph", "save", "finalize", "after_save_checkpoint"]


class Diary(recording(RecordingLogger, METHODS, "logger")):
    """Records its calls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    @property
    def experiment(self):
        if self.calls[-1:] != ["experiment"]:  # Lightning looks twice
            self.calls.append("experiment")
        return object()


class LogsEverywhere(Classifier):
    def setup(self, stage):
        for logger in self.loggers:
            logger.calls.append("setup")

    def training_step(self, batch, batch_idx):
        self.log("loss", float(batch_idx), on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log_dict({"step": 100.0 + self.current_epoch, "at the end": 1.0})

    def validation_step(self, batch, batch_idx):
        self.log("val", float(batch_idx), on_step=True, on_epoch=True)

    def test_step(self, batch, batch_idx):
        self.log("test", 2.0)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"accumulate_grad_batches": 2, "val_check_interval": 2},
        {"log_every_n_steps": 0, "enable_checkpointing": False},
        {"fast_dev_run": True},
        {"enable_autolog_hparams": False, "num_sanity_val_steps": 0},
    ],
    ids=str,
)
def test_loggers_diary(arguments, tmp_path):
    def scenario(make):
        loggers = [Diary(), Diary()]
        trainer = make(
            max_epochs=2, logger=loggers, default_root_dir=tmp_path / make.__name__,
            **{"log_every_n_steps": 1, "enable_checkpointing": True, **arguments},
        )  # fmt: skip
        module = LogsEverywhere()
        if trainer.fast_dev_run:
            assert [type(logger) for logger in trainer.loggers] == [DummyLogger]
            trainer.loggers = loggers
        trainer.fit(module, data(6), data(4))
        trainer.validate(module, data(4), verbose=False)
        trainer.test(module, data(4), verbose=False)
        assert loggers[0].calls == loggers[1].calls
        saves = [call for call in loggers[0].calls if call[0] == "logger.after_save_checkpoint"]
        calls = [call for call in loggers[0].calls if call not in saves]  # our row follows that of the epoch
        return calls, saves, plain(dict(trainer.logged_metrics)), trainer.log_dir

    calls = assert_agree(scenario)[0]
    assert calls.index("experiment") < calls.index("setup")
    assert calls[-1][:2] == ("logger.finalize", {"status": "success"})


def test_setters_and_getters(tmp_path):
    def scenario(make):
        folder = tmp_path / make.__name__
        first, second = TensorBoardLogger(folder, name="a"), CSVLogger(folder, name="b")
        trainer = make(logger=first, default_root_dir=folder)
        seen = []

        def look():
            names = [logger.name for logger in trainer.loggers]
            seen.append((names, trainer.logger is None, type(trainer.loggers), Path(trainer.log_dir).name))

        look()
        trainer.loggers.append(second)
        look()
        for name, value in (
            ("logger", second), ("logger", None), ("loggers", [second, first]), ("loggers", None), ("loggers", []),
        ):  # fmt: skip
            setattr(trainer, name, value)
            look()
        for given in (False, [], {}, (first, second)):
            trainer = make(logger=given, default_root_dir=folder)
            look()
        return seen

    theirs, mine = run_both(scenario)
    assert [str(one).replace("ours", "lightning") for one in mine] == [str(one) for one in theirs]


class Settings(LightningDataModule):
    def __init__(self, settings):
        super().__init__()
        self.save_hyperparameters(settings)

    def train_dataloader(self):
        return data(2)


class Configured(Learner):
    def __init__(self, settings):
        super().__init__()
        self.hparams.clear()
        self.save_hyperparameters(settings)


@pytest.mark.parametrize(
    ("of_module", "of_data"),
    [
        ({"a": 1, "t": torch.tensor(4)}, {"a": 1, "t": torch.tensor(4)}),
        ({"a": 1}, {"b": 2}),
        ({"a": 1}, {"a": 2}),
    ],
)
def test_hyper_parameters_of_module_and_data(of_module, of_data):
    def scenario(make):
        diary = Diary()
        trainer = make(max_epochs=1, logger=diary)
        try:
            trainer.fit(Configured(of_module), datamodule=Settings(of_data))
        except Exception as error:  # the comparison depends on it
            return type(error), str(error)[:40]
        return diary.calls

    assert_agree(scenario)


@pytest.mark.parametrize("kind", [TensorBoardLogger, CSVLogger])
def test_copy_of_a_trainer_keeps_logging(kind, tmp_path):
    logger = kind(tmp_path)
    trainer = ours(max_epochs=1, logger=logger)
    trainer.fit(Learner(), data(2))
    copy = pickle.loads(pickle.dumps(trainer))
    copy.logger.log_metrics({"loss": 1.0}, 5)
    assert (copy.logger.name, copy.logger.version, copy.log_dir) == (logger.name, logger.version, trainer.log_dir)
