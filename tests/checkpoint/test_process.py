"""The state of a process in a checkpoint. Resumed runs are compared in ``test_resume_corners.py``."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn

from tests.parity import RecordingLogger
from tests.support import Regression, SavesEverywhere, loader_of, make_batches, make_net, make_trainer
from trainer.checkpoint.loading import process_states_in
from trainer.checkpoint.process import ProcessState
from trainer.engine.communication import Communication
from trainer.errors import ResumeError

pytestmark = pytest.mark.filterwarnings("ignore:resume='auto', but there is no ModelCheckpoint")


class Counts(Regression):
    """Logs the largest loss, and counts the batches that have ended."""

    ended = 0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("largest", loss, on_step=True, on_epoch=True, reduce_fx="max", batch_size=4)
        return loss

    def on_train_batch_end(self, *_):
        self.ended += 1

    def on_save_checkpoint(self, checkpoint):
        checkpoint["ended"] = self.ended


def fit(folder, *callbacks, ckpt_path=None, **arguments):
    module, logger = Counts(make_net(dropout=0.3)), RecordingLogger()
    torch.manual_seed(7 if ckpt_path is None else 8)
    options = {"callbacks": list(callbacks), "enable_checkpointing": bool(callbacks), "log_every_n_steps": 1}
    trainer = make_trainer(folder, logger=logger, **options | arguments)
    trainer.fit(module, loader_of(make_batches(5)), ckpt_path=ckpt_path)
    return trainer, module


def test_checkpoint_is_written_when_all_about_a_batch_is_over(tmp_path):
    """Callbacks that save run after the module's hook and the loggers' row."""
    saver = SavesEverywhere(tmp_path)
    fit(tmp_path, saver, accumulate_grad_batches=2)
    checkpoints = [torch.load(path, weights_only=True) for path in saver.files]
    assert [checkpoint["ended"] for checkpoint in checkpoints] == [1, 2, 3, 4, 5, 5]
    assert list(saver.rows) == [0, 1, 1, 2, 3, 4]  # one for each optimizer step, and one for the epoch
    states = [state for checkpoint in checkpoints for state in process_states_in(checkpoint)]
    assert [len(state["gradients"]) for state in states] == [6, 0, 6, 0, 0, 0]  # saved in open windows only


def test_checkpoint_without_communication_is_resumed_with_fixed_buckets():
    engine = SimpleNamespace(communication=Communication([], keeps_buckets=True, may_diverge=True), device=None)
    ProcessState(SimpleNamespace(engine=engine, lightning_module=nn.Linear(1, 1)))._restore_communication({})


def test_states_of_another_number_of_processes_or_version(tmp_path):
    saver = SavesEverywhere(tmp_path)
    fit(tmp_path, saver)
    checkpoint = torch.load(saver.files[0], weights_only=True)
    ours, changed = checkpoint["loops"]["amp_trainer"], tmp_path / "changed.ckpt"
    ours["processes"] *= 2
    torch.save(checkpoint, changed)
    with pytest.raises(ResumeError, match=r"world size 2.*exact_resume=False"):
        fit(tmp_path, ckpt_path=changed)
    with pytest.warns(UserWarning, match="not exactly"):
        fit(tmp_path, ckpt_path=changed, exact_resume=False)
    ours |= {"format": 2, "processes": ours["processes"][:1]}
    torch.save(checkpoint, changed)
    with pytest.raises(ResumeError, match=r"another version of this package \(format 2, expected 5\)"):
        fit(tmp_path, ckpt_path=changed, exact_resume=False)


@pytest.mark.parametrize(
    ("resume", "min_epochs", "epochs"), [("auto", None, 1), (None, None, 3), ("auto", 2, 2), (None, 2, 2)]
)
def test_run_that_had_decided_to_stop(tmp_path, resume, min_epochs, epochs):
    """The same command stops again. With an explicit checkpoint, training continues.

    A stop that waits for ``min_epochs`` takes effect with either of them.
    """
    options = {"max_epochs": 3, "resume": resume, "min_epochs": min_epochs}
    saver = SavesEverywhere(tmp_path)
    fit(tmp_path, EarlyStopping("largest", patience=0, stopping_threshold=1e9), saver, **options)
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint"):
        trainer, _ = fit(tmp_path, ckpt_path=saver.files[5], **options)  # after the first epoch
    assert trainer.current_epoch == epochs
