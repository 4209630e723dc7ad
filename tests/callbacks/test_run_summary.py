import io
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from rich.console import Console
from torch.utils.data import DataLoader

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer import Trainer
from trainer.callbacks import InferenceSpeed, OverflowReport, run_summary
from trainer.callbacks.curves import Curves
from trainer.callbacks.run_summary import RunSummary
from trainer.precision import MixedPrecision


class Clock:
    """Time that passes only when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class FakeTrainer:
    """What a summary reads of a trainer, and the hooks of a fit in their order."""

    precision = "16-mixed"
    num_training_batches = 4
    checkpoint_callback = None

    def __init__(self, folder, summary, world_size=1, device="cpu", scaling=True):
        self.default_root_dir = folder
        self.summary = summary
        self.clock = summary._clock = Clock()
        self.world_size = world_size
        self.strategy = SimpleNamespace(root_device=torch.device(device))
        self.is_global_zero = True
        self.current_epoch = self.global_step = 0
        self.skipped_steps = 2
        self.scaler = SimpleNamespace(is_enabled=lambda: scaling, get_scale=lambda: 32768.0)
        self.callback_metrics = {"val_acc": torch.tensor(0.5)}
        self.callbacks = []
        self.loggers = []

    def fit(self, epochs=2, sizes=(8, 8, 8, 3), error=None):
        self.summary.on_fit_start(self, None)
        self.validate(1)  # sanity check
        self.summary.on_train_start(self, None)
        try:
            for _ in range(epochs):
                self.summary.on_train_epoch_start(self, None)
                for batch_idx, size in enumerate(sizes):
                    self.clock.now += 0.5
                    self.global_step += 1
                    self.summary.on_train_batch_end(self, None, {}, [torch.zeros(size, 2)], batch_idx)
                if error is not None:
                    raise error
                self.validate(10)
                self.summary.on_train_epoch_end(self, None)
                self.current_epoch += 1
        except BaseException:
            self.summary.on_exception(self, None, error)
            return
        self.summary.on_train_end(self, None)
        self.clock.now += 7  # other callbacks draw and save
        self.summary.on_fit_end(self, None)

    def validate(self, seconds):
        self.summary.on_validation_start(self, None)
        self.clock.now += seconds
        self.summary.on_validation_end(self, None)


@pytest.fixture
def summary():
    return RunSummary(console=Console(file=io.StringIO(), width=80))


def printed(summary):
    return summary._console.file.getvalue()


def rows(summary):
    lines = (re.split(r"\s{2,}", line.strip()) for line in printed(summary).splitlines())
    return {line[0]: line[1] for line in lines if len(line) == 2}


def test_values(tmp_path, summary):
    FakeTrainer(tmp_path, summary, world_size=2).fit()
    peak = summary.summary.pop("peak_memory_bytes")
    assert 2**26 < peak < 2**40
    assert summary.summary == {
        "status": "finished",
        "error": None,
        "precision": "16-mixed",
        "devices": "2 x CPU",
        "epochs": 2,
        "steps": 8,
        "skipped_steps": 2,
        "seconds": 24.0,
        "train_seconds": 4.0,
        "samples": 108,
        "samples_per_second": 27.0,
        "metrics": {"val_acc": 0.5},
        "scale": 32768.0,
        "paths": {"run": str(tmp_path), "summary": str(tmp_path / "summary.json")},
    }


def test_json_is_the_summary(tmp_path, summary):
    FakeTrainer(tmp_path / "new", summary).fit()
    assert json.loads((tmp_path / "new" / "summary.json").read_text()) == summary.summary
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"environment.json", "summary.json"}  # nothing temporary


def test_where_the_fit_takes_place_is_written_when_it_begins(tmp_path, summary):
    trainer = FakeTrainer(tmp_path, summary)
    summary.on_fit_start(trainer, None)
    assert json.loads((tmp_path / "environment.json").read_text())["pid"] == os.getpid()
    (tmp_path / "environment.json").write_text("{}")  # the command line's own
    summary.on_fit_start(trainer, None)
    assert (tmp_path / "environment.json").read_text() == "{}"


def test_table(tmp_path, summary, monkeypatch):
    monkeypatch.setattr(run_summary, "_peak_memory", lambda device: 3 * 2**30)
    trainer = FakeTrainer(tmp_path, summary)
    trainer.global_step = 1992
    trainer.callback_metrics = {
        "loss": torch.tensor(0.123456),
        "loss_step": 0.2,
        "loss_epoch": 0.1,
        "a_step": 1.0,
    }
    trainer.fit()
    assert printed(summary).startswith("fit finished")
    assert rows(summary) == {
        "precision": "16-mixed",
        "devices": "1 x CPU",
        "epochs": "2",
        "optimizer steps": "2,000",
        "time": "24.0 s (training 4.0 s)",
        "samples/s": "13.5",
        "peak memory": "3,072 MiB",
        "scale": "32,768",
        "skipped steps": "2",
        "loss": "0.1235",
        "a_step": "1",
        "run folder": str(tmp_path),
        "summary": str(tmp_path / "summary.json"),
        "report": f"python -m trainer report {tmp_path}",
    }


def test_what_is_not_known_is_left_out(tmp_path, summary):
    trainer = FakeTrainer(tmp_path, summary, scaling=False)
    del trainer.skipped_steps
    trainer.fit(sizes=(0,))
    assert summary.summary["scale"] is None
    assert summary.summary["skipped_steps"] is None
    assert summary.summary["samples_per_second"] is None
    assert not {"scale", "skipped steps", "samples/s"} & rows(summary).keys()


def test_paths(tmp_path, summary, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = FakeTrainer(tmp_path / "run", summary)
    curves = Curves()
    curves.path = tmp_path / "run" / "curves.png"
    trainer.callbacks = [curves, summary]
    trainer.checkpoint_callback = ModelCheckpoint()
    trainer.checkpoint_callback.best_model_path = "run/best[1].ckpt"
    trainer.loggers = [CSVLogger("run/logs", name="x", version=3), CSVLogger("run/logs", name="x", version=3)]
    trainer.fit()
    assert summary.summary["paths"] == {
        "run": str(tmp_path / "run" / "logs" / "x" / "version_3"),
        "summary": str(tmp_path / "run" / "logs" / "x" / "version_3" / "summary.json"),
        "best_checkpoint": str(tmp_path / "run" / "best[1].ckpt"),
        "curves": str(tmp_path / "run" / "curves.png"),
        "loggers": [str(tmp_path / "run" / "logs" / "x" / "version_3")],
    }
    table = rows(summary)
    assert table["best checkpoint"] == "run/best[1].ckpt"  # seen from the working directory
    assert table["logger"] == "run/logs/x/version_3"
    assert "last checkpoint" not in table


def test_a_path_is_not_broken_in_a_log(tmp_path, summary):
    folder = tmp_path / ("x" * 100) / "y"
    FakeTrainer(folder, summary).fit()
    assert str(folder / "summary.json") in printed(summary)


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
        (SystemExit(143), "interrupted", "SystemExit: 143"),
        (RuntimeError("out of [b]luck[/b]"), "failed", "RuntimeError: out of [b]luck[/b]"),
    ],
)
def test_a_fit_cut_short(tmp_path, summary, error, status, text):
    FakeTrainer(tmp_path, summary).fit(error=error)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary.summary
    assert summary.summary["status"] == status
    assert summary.summary["error"] == text
    assert printed(summary).startswith(f"fit {status}: {text}")
    assert summary.summary["epochs"] == 0
    assert summary.summary["samples"] == 27
    assert summary.summary["train_seconds"] == summary.summary["seconds"] == 2.0


def test_a_fit_that_fails_before_training(tmp_path, summary):
    trainer = FakeTrainer(tmp_path, summary)
    summary.on_fit_start(trainer, None)
    summary.on_exception(trainer, None, ValueError("no data"))
    assert summary.summary["error"] == "ValueError: no data"
    assert summary.summary["seconds"] == 0


def test_a_fit_that_fails_after_training(tmp_path, summary):
    trainer = FakeTrainer(tmp_path, summary)
    summary.on_fit_start(trainer, None)
    summary.on_train_start(trainer, None)
    trainer.clock.now += 3
    summary.on_train_end(trainer, None)
    trainer.clock.now += 7  # another callback tries to save
    summary.on_exception(trainer, None, OSError("disk full"))
    assert summary.summary["status"] == "failed"
    assert summary.summary["seconds"] == summary.summary["train_seconds"] == 3.0


def test_the_exception_of_a_fit_is_not_hidden_by_another(tmp_path, summary, caplog):
    trainer = FakeTrainer(tmp_path, summary)

    def get_scale():
        raise RuntimeError("the device is gone")

    trainer.scaler.get_scale = get_scale
    trainer.fit(error=RuntimeError("first"))  # would raise "the device is gone"
    assert "could not be written" in caplog.text
    with pytest.raises(RuntimeError, match="the device is gone"):
        trainer.fit()


def test_a_folder_that_cannot_be_written(tmp_path, summary):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="could not be written to .*file/summary.json"):
        FakeTrainer(tmp_path / "file", summary).fit()
    assert printed(summary).startswith("fit finished")


def test_a_second_fit_starts_afresh(tmp_path, summary):
    trainer = FakeTrainer(tmp_path, summary)
    trainer.fit(epochs=3)
    trainer.fit(epochs=1)
    assert summary.summary["samples"] == 27
    assert summary.summary["train_seconds"] == 2.0
    assert summary.summary["seconds"] == 12.0
    assert summary.summary["epochs"] == 4


def test_validation_alone_summarises_nothing(tmp_path, summary):
    trainer = FakeTrainer(tmp_path, summary)
    trainer.validate(1)
    summary.on_exception(trainer, None, ValueError())
    assert summary.summary == {}
    assert printed(summary) == ""


def test_only_rank_zero(tmp_path, summary):
    trainer = FakeTrainer(tmp_path, summary)
    trainer.is_global_zero = False
    trainer.fit()
    assert printed(summary) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_ones_own(tmp_path):
    summary = RunSummary(dirpath=tmp_path / "mine", console=Console(file=io.StringIO()))
    FakeTrainer(tmp_path / "run", summary).fit()
    assert summary.summary["paths"]["summary"] == str(tmp_path / "mine" / "summary.json")
    assert (tmp_path / "mine" / "summary.json").exists()


def test_cuda_memory_and_time(tmp_path, summary, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 12345 + device.index)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    FakeTrainer(tmp_path, summary, device="cuda:1").fit()
    assert summary.summary["peak_memory_bytes"] == 12346
    assert summary.summary["devices"] == "1 x NVIDIA X"
    assert calls[0] == "reset"
    assert calls.count("synchronize") == 1 + 2 * 2 + 1  # train start, around each validation, train end


BOTH_TRAINERS = pytest.mark.parametrize(
    "trainer_class", [Trainer, pytest.param(lightning.Trainer, marks=pytest.mark.filterwarnings("ignore"))]
)


def real_fit(trainer_class, summary, folder, module=None, **options):
    trainer = trainer_class(
        accelerator="cpu",
        max_epochs=2,
        limit_train_batches=3,
        limit_val_batches=2,
        default_root_dir=folder,
        callbacks=[Curves(), summary],
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    data = DataLoader(RandomDataset(32, 10), batch_size=4)  # batches of 4, 4 and 2
    trainer.fit(module or BoringModel(), data, data)
    return trainer


@BOTH_TRAINERS
def test_a_real_fit(tmp_path, summary, trainer_class):
    trainer = real_fit(trainer_class, summary, tmp_path)
    values = summary.summary
    assert values["status"] == "finished"
    assert values["precision"] == "32-true"
    assert values["devices"] == "1 x CPU"
    assert values["epochs"] == 2
    assert values["steps"] == 6
    assert values["samples"] == 20
    assert values["scale"] is None
    assert 0 < values["train_seconds"] < values["seconds"]
    assert values["paths"]["best_checkpoint"] == trainer.checkpoint_callback.best_model_path
    assert Path(values["paths"]["best_checkpoint"]).exists()
    assert Path(values["paths"]["curves"]).exists()
    assert values["paths"]["loggers"] == [trainer.log_dir]
    assert json.loads(Path(values["paths"]["summary"]).read_text()) == values


def test_a_real_fit_with_loss_scaling(tmp_path, summary):
    class Overflow(BoringModel):
        def training_step(self, batch, batch_idx):
            return self.step(batch) * (float("inf") if batch_idx == 1 else 1.0)

    precision = MixedPrecision("float16", init_scale=1024.0)
    trainer = real_fit(Trainer, summary, tmp_path, Overflow(), precision=precision, logger=False)
    assert summary.summary["precision"] == "16-mixed"
    assert summary.summary["steps"] == 6
    assert summary.summary["skipped_steps"] == trainer.skipped_steps == 2
    assert summary.summary["scale"] == trainer.scaler.get_scale() == 256.0


@BOTH_TRAINERS
def test_a_real_fit_that_fails(tmp_path, summary, trainer_class):
    class Fails(BoringModel):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("enough")
            return self.step(batch)

    with pytest.raises(RuntimeError, match="enough"):
        real_fit(trainer_class, summary, tmp_path, Fails())
    assert summary.summary["status"] == "failed"
    assert summary.summary["error"] == "RuntimeError: enough"
    assert summary.summary["samples"] == 8
    assert json.loads(Path(summary.summary["paths"]["summary"]).read_text()) == summary.summary


@pytest.mark.parametrize("spec", [None, Logger, TensorBoardLogger])
def test_a_folder_that_a_mock_names_is_none(tmp_path, summary, spec, monkeypatch):
    """As programs test their use of a logger: what its ``save_dir`` turns into is no folder."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    trainer = make_trainer(
        tmp_path / "root", logger=MagicMock(spec=spec), callbacks=[summary, Curves()], log_every_n_steps=1
    )
    trainer.fit(Regression(), loader_of(make_batches(2)))
    assert os.listdir(tmp_path / "cwd") == []
    assert {"curves.json", "environment.json", "summary.json"} <= set(os.listdir(tmp_path / "root"))
    assert "loggers" not in summary.summary["paths"]


def test_where_there_is_no_folder_of_this_machine_nothing_is_written(tmp_path, summary, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callbacks = [summary, Curves(), OverflowReport(at_step=0), InferenceSpeed()]
    trainer = make_trainer("memory://runs", logger=CSVLogger("memory://logs"), callbacks=callbacks, log_every_n_steps=1)
    trainer.fit(Regression(), loader_of(make_batches(2)))
    assert os.listdir(tmp_path) == []
    assert summary.summary["status"] == "finished"
    assert summary.summary["paths"] == {}


@BOTH_TRAINERS
def test_fast_dev_run(tmp_path, summary, trainer_class):
    real_fit(trainer_class, summary, tmp_path, fast_dev_run=True)  # with a logger that has no folder
    assert summary.summary["steps"] == 1
    assert "loggers" not in summary.summary["paths"]


def test_without_a_file(tmp_path, summary):
    summary._writes = False
    FakeTrainer(tmp_path, summary).fit()
    assert summary.summary["paths"] == {"run": str(tmp_path)}
    assert printed(summary).startswith("fit finished")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        ({"logger": False}, set()),
        ({"fast_dev_run": True}, set()),
        ({}, {"summary.json", "curves.json", "curves.png", "environment.json"}),
    ],
    ids=["no logger", "fast_dev_run", "default"],
)
def test_a_fit_that_logs_nothing_leaves_nothing(tmp_path, arguments, files):
    trainer = make_trainer(tmp_path, **{"logger": None, "enable_progress_bar": True, **arguments})
    trainer.fit(Regression(), loader_of(make_batches(2)))
    assert {path.name for path in tmp_path.iterdir()} == ({"lightning_logs"} if files else set())
    folder = tmp_path / "lightning_logs" / "version_0"
    assert files <= {path.name for path in folder.glob("*")}
