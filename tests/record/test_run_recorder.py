"""Contents of the record of a fit, and the times of its writes."""

import json
import os
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from tests.support import BOTH_TRAINERS, FakeTrainer, make_trainer
from trainer.callbacks import OptunaPruning, RunRecorder, RunSummary
from trainer.record import run_recorder as module
from trainer.record.measures import training_loss
from trainer.record.run_record import RunRecord, load_run


class Fit(FakeTrainer):
    """A fit of two epochs of 8, 8, 8 and 3 samples, half a second a batch, ten seconds a validation."""

    def __init__(self, *callbacks, **options):
        usual = {"ckpt_path": None, "early_stopping_callback": None, "seconds": 0.5}
        super().__init__(*callbacks, lightning_module=nn.Identity(), **(usual | options))

    def begin(self):
        self.hook("setup", "fit")
        self.hook("on_fit_start")
        self.evaluate(batches=1, seconds=10, val_loss=9.0)  # sanity check
        self.hook("on_train_start")
        return self

    def train(self, loss=1.0, size=8, batch_idx=0, **options):
        self.log(train_loss=loss)
        batch = torch.zeros(size, 2)
        self.train_batch(batch_idx, batch, {"loss": torch.tensor(loss)}, optimizers=("generator", "critic"), **options)

    def train_epoch(self, *_, **options):
        self.hook("on_train_epoch_start")
        for batch_idx, size in enumerate((8, 8, 8, 3)):
            self.train(1 / (self.global_step + 1), size, batch_idx, skipped=self.global_step == 2, **options)

    def fit(self, error=None, epochs=2, **options):
        self.begin()
        for epoch in range(epochs):
            self.train_epoch(**options)
            if error is not None:
                self.hook("on_exception", error)
                return
            self.evaluate(batches=1, seconds=10, val_loss=0.5 - epoch / 8, val_acc=0.5 + epoch / 4)
            self.end_epoch(train_acc=0.25 + epoch / 4)
        self.hook("on_train_end")
        self.clock.now += 7  # other callbacks draw and save
        self.hook("on_fit_end")


def points(series):
    return dict(zip(series.steps, series.read(), strict=True))


def written(folder):
    return json.loads((folder / "run.json").read_text())


@pytest.fixture
def recorder(clock):
    return RunRecorder()


def test_written_record(tmp_path, recorder, clock):
    Fit(recorder, folder=tmp_path, clock=clock, world_size=2).fit()
    facts = written(tmp_path)
    assert os.listdir(tmp_path) == ["run.json"]  # nothing temporary
    assert facts == recorder.record.facts
    curves, environment, peak = (facts.pop(name) for name in ("curves", "environment", "peak_memory"))
    assert 2**26 < peak["process"] < 2**40
    assert environment["pid"] == os.getpid()
    assert curves["losses"]["values"] == pytest.approx([1 / step for step in range(1, 9)])
    metrics = facts.pop("metrics")
    assert metrics == pytest.approx({"train_loss": 1 / 8, "val_loss": 0.375, "val_acc": 0.75, "train_acc": 0.5})
    assert facts == {
        "version": 1, "status": "completed", "error": None, "module": "Identity", "precision": "16-mixed",
        "devices": "2 x CPU", "gpu": None, "monitor": None, "best_score": None, "epochs": 2, "steps": 8,
        "skipped_steps": 1, "scale": 32768.0, "seconds": 24.0, "train_seconds": 4.0, "samples": 108,
        "samples_per_second": 27.0, "samples_per_step": 16,
        "paths": {"run": str(tmp_path), "record": str(tmp_path / "run.json")},
    }  # fmt: skip
    assert points(recorder.losses) == pytest.approx({step: 1 / step for step in range(1, 9)})
    assert points(recorder.scales) == {1: 65536.0, 4: 32768.0}
    assert points(recorder.skipped) == {3: 1}
    assert points(recorder.seconds) == {step: step / 2 for step in range(1, 9)}  # without validations
    # not train_loss, which was logged before the validation
    curves = {stage: {name: points(one) for name, one in parts.items()} for stage, parts in recorder.metrics.items()}
    expected = {"val_loss": {4: 0.5, 8: 0.375}, "val_acc": {4: 0.5, 8: 0.75}}
    assert curves == {"val": expected, "train": {"train_acc": {4: 0.25, 8: 0.5}}}


def test_record_is_written_during_the_fit(tmp_path, recorder, clock):
    trainer = Fit(recorder, folder=tmp_path, clock=clock).begin()
    facts = written(tmp_path)
    assert (facts["status"], facts["module"], facts["environment"]["pid"]) == ("running", "Identity", os.getpid())
    clock.now += 11
    trainer.train(0.5, seconds=1)
    trainer.evaluate(batches=1, seconds=0, val_loss=0.75)
    facts = written(tmp_path)
    assert (facts["status"], facts["steps"], facts["scale"]) == ("running", 1, 65536.0)
    assert facts["curves"]["losses"]["values"] == [0.5]
    assert facts["curves"]["metrics"]["val"]["val_loss"]["values"] == [0.75]
    assert load_run(tmp_path).status == "running"
    trainer.train(0.25)
    trainer.end_epoch()  # too soon for another one
    assert written(tmp_path) == facts
    trainer.is_global_zero = False
    clock.now += 30
    trainer.end_epoch()
    assert written(tmp_path) == facts


@pytest.mark.parametrize(
    ("error", "pruned", "status", "text"),
    [
        (SystemExit(143), False, "interrupted", "SystemExit: 143"),
        (RuntimeError("no s3://me:pw9@host"), True, "failed", "RuntimeError: no s3://me:***@host"),
        (None, True, "pruned", None),
    ],
)
def test_fit_cut_short(tmp_path, recorder, clock, error, pruned, status, text):
    pruning = OptunaPruning("sqlite://", "study", 0, "val_loss")
    pruning.pruned, pruning.on_fit_start, pruning.on_validation_end = pruned, lambda *_: None, lambda *_: None
    Fit(recorder, pruning, folder=tmp_path, clock=clock).fit(error)
    facts = written(tmp_path)
    assert (facts["status"], facts["error"]) == (status, text)
    if error is not None:
        assert (facts["epochs"], facts["samples"], facts["train_seconds"], facts["seconds"]) == (0, 27, 2.0, 2.0)


def test_fit_that_fails_after_training(tmp_path, recorder, clock):
    trainer = Fit(recorder, folder=tmp_path, clock=clock).begin()
    clock.now += 3
    trainer.hook("on_train_end")
    clock.now += 7  # another callback tries to save
    trainer.hook("on_exception", OSError("disk full"))
    run = load_run(tmp_path)
    assert (run.status, run.seconds, run.train_seconds) == ("failed", 3.0, 3.0)


def test_device_that_has_failed_hides_no_exception(tmp_path, recorder, caplog):
    trainer = Fit(recorder, folder=tmp_path).begin()
    trainer.callback_metrics["loss"] = MagicMock(__float__=Mock(side_effect=RuntimeError("the device is gone")))
    trainer.hook("on_exception", RuntimeError("first"))
    assert "not complete" in caplog.text
    assert load_run(tmp_path).error == "RuntimeError: first"


def test_folder_that_cannot_be_written(tmp_path, recorder):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="record could not be written to .*file"):
        Fit(recorder, folder=tmp_path / "file").fit()


def test_validation_alone_is_not_recorded_as_a_fit(tmp_path, recorder):
    trainer = Fit(recorder, folder=tmp_path)
    trainer.hook("setup", "validate")
    trainer.evaluate(val_loss=1.0)
    trainer.hook("on_exception", ValueError())
    assert recorder.record is None
    assert list(tmp_path.iterdir()) == []


def test_second_fit_of_a_trainer_is_appended(tmp_path, recorder, clock):
    trainer = Fit(recorder, folder=tmp_path, clock=clock)
    trainer.fit()
    trainer.fit(epochs=1)
    facts = written(tmp_path)
    assert (facts["samples"], facts["train_seconds"], facts["epochs"], facts["steps"]) == (27, 2.0, 3, 12)
    assert recorder.losses.steps == [*range(1, 13)]


def test_points_are_thinned_out(tmp_path, clock):
    recorder = RunRecorder(max_points=100)
    trainer = Fit(recorder, folder=tmp_path, clock=clock).begin()
    for step in range(1, 1001):
        trainer.train(float(step), skipped=True)
    assert 50 <= len(recorder.losses.steps) <= 100
    assert all(step == loss for step, loss in points(recorder.losses).items())
    assert {after - before for before, after in pairwise(recorder.losses.steps)} == {recorder.losses.stride} == {16}
    assert all(step == count for step, count in points(recorder.skipped).items())  # how many, also of those left out


def test_memory_is_read_once_a_second(tmp_path, recorder, monkeypatch, clock):
    monkeypatch.setattr(module.measures, "memory_in_use", Mock(side_effect=[7, 8, 9]))
    trainer = Fit(recorder, folder=tmp_path, clock=clock).begin()
    for _ in range(6):
        trainer.train(seconds=0.4)
    assert points(recorder.memory) == {1: 7, 4: 8}


@pytest.mark.parametrize(
    ("products", "convolutions", "tf32"), [("ieee", "tf32", ["convolutions"]), ("tf32", "none", ["matrix products"])]
)
def test_gpu(tmp_path, recorder, monkeypatch, products, convolutions, tf32):
    calls = []
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 12345 + device.index)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, device.index))
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=products))
    monkeypatch.setattr(torch.backends.cudnn, "conv", SimpleNamespace(fp32_precision=convolutions))
    Fit(recorder, folder=tmp_path, device="cuda:1").fit()
    run = load_run(tmp_path)
    assert (run.peak_memory, run.memory_is_the_gpus, run.devices) == (12346, True, "1 x NVIDIA X")
    assert run.gpu == {"capability": [8, 1], "tf32": tf32}
    assert calls[0] == "reset_peak_memory_stats"
    assert calls.count("synchronize") == 1 + 2 * 2 + 1  # train start, around each validation, train end


def test_resumed_fit_continues_from_an_earlier_point(tmp_path, recorder, clock):
    Fit(recorder, folder=tmp_path, clock=clock).fit()
    seconds = points(recorder.seconds)
    torch.save(recorder.state_dict(), tmp_path / "state.pt")
    resumed = RunRecorder()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert set(resumed.state_dict()) == {"batches", "losses", "scales", "skipped", "metrics"}  # no times
    assert resumed.state_dict() == recorder.state_dict()
    clock.now += 3600
    trainer = Fit(resumed, folder=tmp_path, clock=clock, global_step=5, ckpt_path="a.ckpt", skipped_steps=1).begin()
    assert written(tmp_path)["curves"]["losses"]["steps"][-1] == 8  # the earlier run's, until there are others
    trainer.train(0.75, seconds=0.25)
    assert points(resumed.losses) == pytest.approx({1: 1, 2: 1 / 2, 3: 1 / 3, 4: 1 / 4, 5: 1 / 5, 6: 0.75})
    assert points(resumed.metrics["val"]["val_loss"]) == {4: 0.5}
    assert points(resumed.seconds) == {step: seconds[step] for step in range(1, 6)} | {6: seconds[5] + 0.25}


@pytest.mark.parametrize("earlier", ['{"curves": {', '{"curves": {"seconds": {"steps": 1}}}'])
def test_times_of_an_earlier_run_that_cannot_be_read(tmp_path, recorder, earlier):
    (tmp_path / "run.json").write_text(earlier)
    Fit(recorder, folder=tmp_path, global_step=5).begin()
    assert points(recorder.seconds) == {}


def test_samples_of_batches_of_different_sizes(tmp_path, recorder):
    trainer = Fit(recorder, folder=tmp_path).begin()
    for _ in range(2):
        trainer.hook("on_train_epoch_start")
        for batch_idx, size in enumerate((20, 1, 3, 1, 1)):
            trainer.train(size=size, batch_idx=batch_idx)
        trainer.hook("on_train_epoch_end")
    trainer.hook("on_train_end")
    trainer.hook("on_fit_end")
    facts = load_run(tmp_path).facts
    assert facts["samples"] == 52


def test_batches_of_unknown_size(tmp_path, recorder):
    trainer = Fit(recorder, folder=tmp_path).begin()
    trainer.train_batch(batch="text")
    trainer.hook("on_fit_end")
    run = load_run(tmp_path)
    assert (run.samples_per_step, run.samples_per_second, run.steps) == (None, None, 1)


def test_paths(tmp_path, recorder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints, best = ModelCheckpoint(monitor="val_acc", mode="max"), tmp_path / "run" / "best[1].ckpt"
    checkpoints.best_model_path = "run/best[1].ckpt"
    best.parent.mkdir()
    best.touch()
    loggers = [CSVLogger("run/logs", name="x", version=3) for _ in range(2)]
    Fit(recorder, folder=tmp_path / "run", checkpoint_callback=checkpoints, loggers=loggers).fit()
    folder = tmp_path / "run" / "logs" / "x" / "version_3"
    run, record = load_run(folder), str(folder / "run.json")
    assert run.paths == {
        "run": str(folder), "record": record, "best_checkpoint": str(best), "loggers": [str(folder)],
    }  # fmt: skip
    assert run.objective == run.monitor == ("val_acc", "max")
    assert run.objective_value == 0.75


def test_file_of_an_earlier_writer_is_kept(tmp_path, clock):
    record = RunRecord.begin(tmp_path / "mine", command="fit", seed=7)
    Fit(RunRecorder(record, writes=False), folder=tmp_path / "run", clock=clock).fit()
    assert (written(tmp_path / "mine")["seed"], written(tmp_path / "mine")["steps"]) == (7, 8)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("trainer", "factor"),
    [
        ({"accumulate_grad_batches": 4, "loss_share": torch.tensor(0.125)}, 8),
        ({"accumulate_grad_batches": 4}, 4),  # Lightning's own
    ],
)
def test_training_loss_is_the_returned_loss(trainer, factor):
    loss = torch.tensor(0.5)
    assert [training_loss(SimpleNamespace(**trainer), one).item() for one in (loss, {"loss": loss})] == [factor / 2] * 2
    assert [training_loss(SimpleNamespace(), one) for one in (None, {"loss": 1.0}, torch.zeros(2))] == [None] * 3


class Logging(BoringModel):
    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.losses.append(loss.item())
        self.log("train_acc", 0.25, on_step=False, on_epoch=True)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", 0.5 + self.current_epoch / 4)


@BOTH_TRAINERS
def test_real_fit(tmp_path, trainer_class):
    recorder, model = RunRecorder(), Logging()
    model.losses = []
    data = DataLoader(RandomDataset(32, 10), batch_size=4)  # batches of 4, 4 and 2
    make_trainer(tmp_path, trainer_class, max_epochs=2, limit_val_batches=2, callbacks=recorder).fit(model, data, data)
    run = load_run(tmp_path)
    assert (run.status, run.precision, run.devices) == ("completed", "32-true", "1 x CPU")
    assert (run.epochs, run.steps, run.scale, run.facts["samples"]) == (2, 6, None, 20)
    assert 0 < run.train_seconds < run.seconds
    assert dict(zip(run.losses.steps, run.losses.values, strict=True)) == dict(enumerate(model.losses, start=1))
    assert [run.metric_curve(name).values for name in ("val_acc", "train_acc")] == [[0.5, 0.75], [0.25, 0.25]]
    assert not run.scales


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_second_fit_with_nothing_left_to_do_keeps_the_record_of_the_first(tmp_path, capsys):
    summary, model, file = RunSummary(), BoringModel(), tmp_path / "run.json"
    trainer = make_trainer(tmp_path, max_epochs=2, callbacks=[RunRecorder(), summary], enable_checkpointing=True)
    trainer.fit(model)
    first, shown = file.read_text(), dict(summary.summary)
    capsys.readouterr()
    with pytest.warns(UserWarning, match="Nothing to do"):
        trainer.fit(model)
    assert (file.read_text(), summary.summary) == (first, shown)
    assert "fit completed" not in capsys.readouterr().out
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model)
    run = load_run(tmp_path)
    assert (run.status, run.epochs, run.steps) == ("completed", 3, 192)
