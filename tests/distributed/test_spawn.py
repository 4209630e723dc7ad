"""Processes started inside ``fit``: arguments and results."""

import atexit
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing import ProcessExitedException

from tests.parity import QUIET, Classifier, Learner, data, lightning, lightnings_noise_ignored, ours
from trainer import Trainer

pytestmark = pytest.mark.forks


class Validated(Classifier):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)


class Threads(Callback):
    """Records gloo's threads at the end of a process."""

    def __init__(self, folder):
        self.folder = folder

    def __setstate__(self, state):
        vars(self).update(state)
        atexit.register(self._write)  # registered first, so that it runs last

    def _write(self):
        names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        (self.folder / f"{os.getpid()}.txt").write_text("\n".join(name for name in names if "gloo" in name))


def trained(strategy, folder, *callbacks):
    best = ModelCheckpoint(folder / strategy, monitor="val_loss")
    arguments = {**QUIET, "enable_checkpointing": True, "devices": 2, "strategy": strategy}
    trainer = Trainer(
        max_epochs=1, num_sanity_val_steps=0, use_distributed_sampler=False, callbacks=[best, *callbacks], **arguments
    )
    module = Validated()
    trainer.fit(module, data(6), data(4, seed=1))
    assert trainer.state.finished
    return module.state_dict(), trainer.callback_metrics["val_loss"].item(), Path(best.best_model_path).is_file()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
@pytest.mark.usefixtures("spawn_is_warm")
def test_spawned_and_forked_ranks_equal_one_process(tmp_path):
    # both ranks have the same batches, so that two have the results of one; if spawned processes shared the weights,
    # each step would be taken twice
    alone = Trainer(max_epochs=1, num_sanity_val_steps=0, **QUIET)
    module = Validated()
    alone.fit(module, data(6), data(4, seed=1))
    for strategy in ("ddp_fork", "ddp_spawn"):
        weights, val_loss, has_checkpoint = trained(strategy, tmp_path, Threads(tmp_path))
        torch.testing.assert_close(weights, module.state_dict(), rtol=1e-6, atol=1e-7)
        assert val_loss == pytest.approx(alone.callback_metrics["val_loss"].item())
        assert has_checkpoint
    # a thread that frees a Python tensor during the interpreter's shutdown sometimes aborts the process
    assert [path.read_text() for path in tmp_path.glob("*.txt")] == ["", ""]


@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.nightly)])
def test_process_that_has_started_them_saves_checkpoints(tmp_path, strategy):
    def scenario(make_trainer):
        folder = tmp_path / make_trainer.__name__
        arguments = {**QUIET, "enable_checkpointing": True, "devices": 2, "strategy": strategy}
        trainer = make_trainer(max_epochs=1, default_root_dir=folder, **arguments)
        module = Learner()
        trainer.fit(module, data(6))
        found = []
        for weights_only in (False, True):
            trainer.save_checkpoint(folder / "x.ckpt", weights_only=weights_only)
            saved = torch.load(folder / "x.ckpt", weights_only=True)
            assert all(map(torch.equal, saved.pop("state_dict").values(), module.state_dict().values()))
            for key, value in saved.items():
                found.append((key, sorted(value) if key == "callbacks" else None if key == "loops" else value))
            found.append(sorted(set(saved["loops"]) - {"amp_trainer"}))
        assert trainer.lightning_module is trainer.model is module
        return sorted(map(str, found)), sorted(path.name for path in folder.rglob("*.ckpt"))

    makers = [lightning, ours] if strategy == "ddp_fork" else [ours]
    with lightnings_noise_ignored():
        results = [scenario(make) for make in makers]
    assert results[-1] == results[0]
    assert results[0][1] == ["epoch=0-step=2.ckpt", "x.ckpt"]


class Signals(Callback):
    """Sends a signal to the parent process, or kills a child."""

    def __init__(self, number, *, to_parent):
        self.number, self.to_parent = number, to_parent

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if (trainer.global_rank, trainer.global_step) == (1, 1):
            os.kill(os.getppid() if self.to_parent else os.getpid(), self.number)
        time.sleep(0.25)


def fork(folder, callback):
    arguments = {**QUIET, "enable_checkpointing": True, "devices": 2, "strategy": "ddp_fork"}
    trainer = Trainer(max_epochs=5, callbacks=[callback, ModelCheckpoint(folder, save_top_k=0)], **arguments)
    trainer.fit(Learner(), data(24))


def test_sigterm_is_passed_on_to_spawned_processes(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException) as raised:
        fork(tmp_path, Signals(signal.SIGTERM, to_parent=True))
    assert raised.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    saved = torch.load(tmp_path / "interrupted.ckpt", weights_only=True)
    assert saved["global_step"] in (2, 3, 4)  # the step that the processes agree on


def test_killed_spawned_process_is_named(tmp_path):
    with pytest.raises(ProcessExitedException, match="process 1 terminated with signal SIGKILL"):
        fork(tmp_path, Signals(signal.SIGKILL, to_parent=False))
