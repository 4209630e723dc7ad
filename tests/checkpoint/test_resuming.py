"""``Trainer(resume="auto")``: the same script, run again."""

import os
from collections import UserList
from datetime import timedelta
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from tests.parity import assert_same_weights
from tests.support import Killed, KilledAt, Regression, loader_of, make_batches, make_trainer, momentum
from trainer.checkpoint import folder_locks as folders
from trainer.checkpoint import reading as files
from trainer.errors import ConfigurationError, FolderInUseError

BATCHES = make_batches(4)

pytestmark = pytest.mark.filterwarnings("ignore:.*Experiment logs directory")


class Logs(Regression):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", super().training_step(batch, batch_idx), batch_size=4)


def script(folder, *, kill=None, logger=None, saver=None, more=(), module=Logs, **arguments):
    """Run the user's script, which is run again to resume."""
    savers = [ModelCheckpoint(save_last=True) if saver is None else saver()]
    callbacks = [*savers, *more, LearningRateMonitor("step"), KilledAt(kill)]
    given = {"max_epochs": 3, "log_every_n_steps": 1, "resume": "auto", "enable_checkpointing": None}
    logger = CSVLogger(folder) if logger is None else logger
    fitted = make_trainer(folder, logger=logger, callbacks=callbacks, **given | arguments)
    try:
        fitted.fit(module(optimizer=momentum), loader_of(BATCHES), loader_of(BATCHES[:2]))
    except Killed:
        return None
    return fitted


def rows(folder):
    (file,) = folder.rglob("metrics.csv")
    return file.read_text().splitlines()


def checkpoints(folder):
    return {path.name: torch.load(path, weights_only=True)["global_step"] for path in sorted(folder.rglob("*.ckpt"))}


EACH_STEP = partial(ModelCheckpoint, every_n_train_steps=1, save_last=True)


@pytest.mark.parametrize(
    ("board", "kills", "saver", "arguments"),
    [
        (False, [4, 6, 6, 8], None, {}),
        (True, [9], None, {}),
        (False, [4, 7, 8], EACH_STEP, {}),
        (False, [4, 7, 8], EACH_STEP, {"accumulate_grad_batches": 3, "val_check_interval": 2}),
    ],
)
def test_killed_run_is_resumed_in_its_folder(tmp_path, board, kills, saver, arguments):
    def run(name, kill=None):
        folder = tmp_path / name
        boards = [TensorBoardLogger(folder)] if board else []
        return script(folder, logger=[*boards, CSVLogger(folder, name="csv")], kill=kill, saver=saver, **arguments)

    reference = run("whole")
    for kill in kills:
        assert run("killed", kill) is None
    fitted = run("killed")
    assert fitted.ckpt_path.endswith("last.ckpt")
    assert checkpoints(tmp_path / "killed") == checkpoints(tmp_path / "whole")
    assert_same_weights(fitted.lightning_module, reference.lightning_module)
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")


@pytest.mark.parametrize("folder", [None, "own"])
def test_checkpoints_with_a_slash_in_their_names_are_found(tmp_path, folder):
    class Nested(Logs):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", -float(self.global_step), batch_size=4)

    def run(name, kill=None):
        place = None if folder is None else tmp_path / name / folder
        saver = partial(ModelCheckpoint, place, filename="{epoch}-{val/loss:.0f}", monitor="val/loss")
        return script(tmp_path / name, saver=saver, kill=kill, module=Nested)

    run("killed", kill=9)
    run("whole")
    assert run("killed").ckpt_path.endswith("epoch=1-val/loss=-8.ckpt")
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    assert checkpoints(tmp_path / "killed") == checkpoints(tmp_path / "whole") == {"loss=-12.ckpt": 12}


def test_completed_run_trains_nothing(tmp_path):
    script(tmp_path)
    before = rows(tmp_path), checkpoints(tmp_path)
    fitted = script(tmp_path, kill=12)  # not reached
    assert (fitted.current_epoch, fitted.global_step) == (3, 12)
    assert (rows(tmp_path), checkpoints(tmp_path)) == before
    assert script(tmp_path, max_epochs=4).global_step == 16


class Clock(Timer):
    """Returns times as if each batch took a second."""

    def __init__(self, *args):
        super().__init__(*args)
        self.batches = UserList()  # which a resume does not restore

    def time_elapsed(self, stage="train"):
        return self._offset + len(self.batches)

    def on_train_batch_end(self, trainer, *args, **kwargs):
        self.batches.append(1)
        super().on_train_batch_end(trainer)


def test_larger_max_time_continues_training(tmp_path):
    for seconds, steps in ((6, 6), (6, 6), (9, 9), (99, 12)):
        saver = partial(ModelCheckpoint, every_n_train_steps=1)
        assert script(tmp_path, saver=saver, more=[Clock(timedelta(seconds=seconds))]).global_step == steps


def test_run_that_stopped_early_reports_it(tmp_path, caplog):
    caplog.set_level("INFO")
    for number in (0, 1):
        script(tmp_path, more=[EarlyStopping("val_loss", stopping_threshold=1e9)])
        assert caplog.text.count("had stopped early (should_stop), so it does not continue") == number


def test_folder_of_a_running_run_is_not_changed(tmp_path, monkeypatch):
    script(tmp_path, kill=7)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(rows(tmp_path)) > 10  # more than the checkpoint's
    monkeypatch.setattr(folders, "_try_lock", lambda handle: False)
    with pytest.raises(FolderInUseError):
        script(tmp_path)
    (lock,) = tmp_path.rglob(f"*{folders.LOCK}")  # of the other run
    lock.unlink()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_run_without_a_checkpoint_starts_from_the_beginning(tmp_path, caplog):
    with caplog.at_level("INFO"):
        fitted = script(tmp_path, max_epochs=1)
    assert fitted.ckpt_path is None
    assert f"no checkpoint in {fitted.log_dir}/checkpoints: starting from the beginning" in caplog.text
    assert sorted(os.listdir(tmp_path / "lightning_logs")) == ["version_0"]


def test_damaged_checkpoints_are_skipped(tmp_path):
    saver = partial(ModelCheckpoint, save_top_k=-1, save_last=True)
    script(tmp_path, kill=9, saver=saver)
    (folder,) = tmp_path.rglob("checkpoints")
    for name in ("last.ckpt", "epoch=1-step=8.ckpt"):
        (folder / name).write_bytes((folder / name).read_bytes()[:-100])
    with pytest.warns(UserWarning, match="passed over") as caught:
        fitted = script(tmp_path, saver=saver)
    assert sum("passed over" in str(w.message) for w in caught) == 2
    assert (fitted.ckpt_path, fitted.global_step) == (str(folder / "epoch=0-step=4.ckpt"), 12)
    assert files.newest_valid([folder]) is not None


def test_run_with_only_damaged_checkpoints_starts_in_a_new_folder(tmp_path):
    script(tmp_path, kill=5)
    for path in tmp_path.rglob("*.ckpt"):
        path.write_bytes(b"")
    with pytest.warns(UserWarning, match="it is empty"):
        fitted = script(tmp_path)
    assert fitted.ckpt_path is None
    assert sorted(os.listdir(tmp_path / "lightning_logs")) == ["version_0", "version_1"]


def test_sequence_of_fits_is_resumed(tmp_path):
    fitted = script(tmp_path, max_epochs=2)
    fitted.fit_loop.max_epochs = 3
    fitted.fit(fitted.lightning_module, loader_of(BATCHES), loader_of(BATCHES[:2]))
    script(tmp_path / "whole")
    assert rows(tmp_path / "lightning_logs") == rows(tmp_path / "whole")


def test_folders_elsewhere_are_refused_and_missing_ones_warned_about(tmp_path):
    fitted = make_trainer(tmp_path, resume="auto", callbacks=[ModelCheckpoint("memory://x")], enable_checkpointing=None)
    with pytest.raises(ConfigurationError, match="Got resume='auto' with checkpoints in memory://x, expected"):
        fitted.fit(Regression(), loader_of(BATCHES))
    with pytest.warns(UserWarning, match="no ModelCheckpoint"):
        make_trainer(tmp_path, resume="auto").fit(Regression(), loader_of(BATCHES))


def test_tensorboard_shows_no_step_twice(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # TensorBoard sorts the files of one second by their number in the process, as text: 10 before 9
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    script(tmp_path, logger=True, kill=7)
    script(tmp_path, logger=True)
    (folder,) = (tmp_path / "lightning_logs").iterdir()
    assert len(list(folder.glob("events.out.tfevents.*"))) == 2
    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("loss_step")] == list(range(12))


@pytest.mark.parametrize("version", ["", "fixed"])
def test_rows_before_the_checkpoint_are_kept(tmp_path, version):
    """With ``ckpt_path``, in a logger's fixed folder. Rows after the checkpoint are logged again."""

    class Logs(Regression):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    def fit(folder, epochs, ckpt_path=None):
        logger = CSVLogger(tmp_path / folder, name="", version=version)
        trainer = make_trainer(tmp_path, max_epochs=epochs, logger=logger, log_every_n_steps=1)
        trainer.fit(Logs(), loader_of(make_batches(4)), ckpt_path=ckpt_path)
        return trainer, (tmp_path / folder / version / "metrics.csv").read_text()

    _, whole = fit("whole", 3)
    first, _ = fit("run", 1)
    first.save_checkpoint(tmp_path / "x.ckpt")
    fit("run", 2, tmp_path / "x.ckpt")
    _, rows = fit("run", 3, tmp_path / "x.ckpt")
    assert rows == whole
