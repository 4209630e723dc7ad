"""Checkpoints written in every hook; a run resumed from each of them equals the uninterrupted run bit for bit."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from _faults.training import differences
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

from tests.parity import RecordingLogger, looks_in
from tests.support import make_trainer, native_fp16, tiered
from trainer import Trainer
from trainer.callbacks import GradientAccumulation, OverflowReport
from trainer.checkpoint.loading import process_states_in
from trainer.checkpoint.process import ProcessState
from trainer.engine.communication import Communication
from trainer.errors import ResumeError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled"),
    pytest.mark.filterwarnings("ignore:Resuming inside an epoch. a Drawn cannot skip batches"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:resume='auto', but there is no ModelCheckpoint"),
]

BATCHES = [torch.randn(2, 4, generator=torch.Generator().manual_seed(i)) for i in range(5)]


class Drawn:
    """Batches with noise from every kind of random generator."""

    def __iter__(self) -> Iterator[Tensor]:
        for batch in BATCHES:
            yield batch + 0.1 * (torch.randn(4) + random.random() + np.random.rand())

    def __len__(self) -> int:
        return len(BATCHES)


class Remembering(LightningModule):
    """A random module with state outside its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.mean, self.val_mean = MeanMetric(), MeanMetric()
        self.errors = MetricCollection([MeanSquaredError(), MeanAbsoluteError()])
        self.ended = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out = self.net(batch)
        loss = (out**2).mean()
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.errors.update(*out.detach().unbind(1))
        self.log("largest", loss, on_step=True, on_epoch=True, reduce_fx="max", prog_bar=True)
        if batch_idx == 0:
            self.log("first", loss)
        overflows = self.trainer.precision == "16-mixed" and self.trainer.progress.batches in (1, 2, 7)
        return loss * float("inf") if overflows else loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.ended += 1
        self.log("ended", float(self.ended))

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.errors.compute())
        self.errors.reset()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = (self.net(batch) ** 2).mean()
        self.val_mean(loss)
        self.log("val_mean", self.val_mean)
        self.log("val_loss", loss, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7), "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["ended"] = self.ended

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.ended = checkpoint["ended"]


SAVES_IN = ("on_train_batch_end", "on_validation_batch_start", "on_validation_end", "on_train_epoch_end")


@looks_in(*SAVES_IN)
class SavesAlways(Checkpoint):
    """Writes a checkpoint after each batch, validation and epoch, and at each batch of a validation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = UserDict[Path, int]()

    def look(self, hook: str, trainer: Any) -> None:
        if not trainer.sanity_checking:
            path = self.folder / f"{len(self.rows):02}_{hook}.ckpt"
            trainer.save_checkpoint(path)
            self.rows[path] = len(trainer.logger.rows)


def run(folder: Path, how: dict[str, Any], ckpt_path: Path | None = None, saving: Any = ()) -> dict[str, Any]:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7 if ckpt_path is None else 8)
    module, logger = Remembering(), RecordingLogger()
    arguments = {"max_epochs": 2, "enable_checkpointing": bool(saving), "logger": logger, "log_every_n_steps": 1,
                 "num_sanity_val_steps": 1, **deepcopy(how)}  # fmt: skip
    arguments["callbacks"] = [*arguments.get("callbacks", ()), *saving]
    trainer = make_trainer(folder, **arguments)
    generator = torch.Generator().manual_seed(3)
    validation = DataLoader(BATCHES[:2], batch_size=None, shuffle=True, generator=generator)
    trainer.fit(module, Drawn(), validation, ckpt_path=ckpt_path)
    return {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "counters": (trainer.current_epoch, trainer.global_step, trainer.skipped_steps, module.ended),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "rows": logger.rows,
        "draw": (torch.rand(1).item(), random.random(), np.random.rand()),
    }


SETUPS: dict[str, dict[str, Any]] = {
    "overflows": {
        "precision": native_fp16(init_scale=1024.0, growth_interval=2),
        "callbacks": [OverflowReport(after=None)],  # a diagnosis takes longer than a fit
    },
    "over the epoch's end": {
        "callbacks": [GradientAccumulation(3, straddles_epochs=True)], "max_epochs": -1, "max_steps": 3
    },
    "a window that grows": {"callbacks": [GradientAccumulation(schedule={0: 1, 1: 2})], "val_check_interval": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", tiered(SETUPS, quick=["overflows", "a window that grows"]))
def test_resumed_at_every_chance(name: str, tmp_path: Path) -> None:
    how = SETUPS[name]
    saving = SavesAlways(tmp_path)
    whole = run(tmp_path, how, saving=[saving])
    assert differences(whole, run(tmp_path, how)) == [], "saving changes nothing"
    assert {path.stem[3:] for path in saving.rows} == set(SAVES_IN)
    for path in sorted(saving.rows, key=lambda path: path.stem[3:])[::3]:  # a third of each kind
        rows = saving.rows[path]
        resumed = run(tmp_path, how, path)
        if "batch_start" in path.stem:  # the validation begins again, and with it its rows
            rows = len(whole["rows"]) - len(resumed["rows"])
        for what in whole:
            expected = whole["rows"][rows:] if what == "rows" else whole[what]
            assert differences(expected, resumed[what]) == [], (path.stem, what)


def test_checkpoint_is_written_when_all_about_a_batch_is_over(tmp_path: Path) -> None:
    """Callbacks that save run after the module's hook and the loggers' row."""
    saving = SavesAlways(tmp_path)
    how = {"accumulate_grad_batches": 2, "limit_val_batches": 0, "max_epochs": 1}
    run(tmp_path, how, saving=[saving])
    checkpoints = [torch.load(path, weights_only=True) for path in saving.rows]
    assert [checkpoint["ended"] for checkpoint in checkpoints] == [1, 2, 3, 4, 5, 5]
    assert list(saving.rows.values()) == [0, 1, 1, 2, 3, 4]  # one for each optimizer step, and one for the epoch
    states = [state for checkpoint in checkpoints for state in process_states_in(checkpoint, exact=True)]
    assert [len(state["gradients"]) for state in states] == [6, 0, 6, 0, 0, 0]  # saved in open windows only


def test_checkpoint_without_communication_is_resumed_with_fixed_buckets() -> None:
    engine = SimpleNamespace(communication=Communication([], keeps_buckets=True, may_diverge=True), device=None)
    process = ProcessState(SimpleNamespace(engine=engine, lightning_module=nn.Linear(1, 1)))
    process._restore_communication({})


def test_states_of_another_number_of_processes_or_version(tmp_path: Path) -> None:
    saving = SavesAlways(tmp_path)
    whole = run(tmp_path, {"max_epochs": 1}, saving=[saving])
    checkpoint = torch.load(next(iter(saving.rows)), weights_only=True)
    ours, changed = checkpoint["loops"]["amp_trainer"], tmp_path / "changed.ckpt"
    for change, reason in (
        ({"processes": ours["processes"] * 2}, r"world size 2"),
        ({"format": 1}, r"another version of this package \(format 1, "),
    ):
        torch.save({**checkpoint, "loops": {**checkpoint["loops"], "amp_trainer": {**ours, **change}}}, changed)
        with pytest.raises(ResumeError, match=f"{reason}.*exact_resume=False"):
            run(tmp_path, {}, changed)
        with pytest.warns(UserWarning, match="not exactly"):
            run(tmp_path, {"exact_resume": False, "max_epochs": 1}, changed)
    ours |= {"format": 2, "processes": process_states_in(checkpoint, exact=True)}  # of the version before
    assert isinstance(ours["processes"][0]["rng"]["torch"], bytes)
    torch.save(checkpoint, changed)
    resumed = run(tmp_path, {"max_epochs": 1}, changed)
    assert differences({**resumed, "rows": whole["rows"]}, whole) == []


@pytest.mark.parametrize(
    ("resume", "min_epochs", "epochs"), [("auto", None, 1), (None, None, 3), ("auto", 2, 2), (None, 2, 2)]
)
def test_run_that_had_decided_to_stop(tmp_path: Path, resume: Any, min_epochs: int | None, epochs: int) -> None:
    """The same command stops again. With an explicit checkpoint, training continues.

    A stop that waits for ``min_epochs`` takes effect with either of them.
    """

    def trainer_with(more: list[Any]) -> Trainer:
        stop = EarlyStopping("largest", patience=0, stopping_threshold=1e9)
        return make_trainer(
            tmp_path, max_epochs=3, limit_val_batches=0, enable_checkpointing=bool(more), callbacks=[stop, *more],
            logger=RecordingLogger(), resume=resume, min_epochs=min_epochs,
        )  # fmt: skip

    saving = SavesAlways(tmp_path)
    trainer_with([saving]).fit(Remembering(), Drawn())
    path = next(path for path in reversed([*saving.rows]) if torch.load(path, weights_only=True)["epoch"] == 0)
    trainer = trainer_with([])
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, EarlyStopping)]
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint"):
        trainer.fit(Remembering(), Drawn(), ckpt_path=path)
    assert trainer.current_epoch == epochs
