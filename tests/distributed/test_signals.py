"""A SIGTERM and a Ctrl-C end a run as under Lightning's Trainer."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import UserList
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.parity import Classifier, Learner, assert_same_weights, data, ours
from trainer import CheckpointFiles
from trainer.data.workers import SurviveSignals
from trainer.errors import RequeueError


@pytest.fixture(autouse=True)
def handlers():
    """Install the user's handler for SIGTERM, which is called too, and check that handlers are restored."""
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    own = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield received
    assert own == {number: signal.getsignal(number) for number in own}
    signal.signal(signal.SIGTERM, before)


class Does(Callback):
    """Calls a function at the start of the third batch of a stage; records finished batches and the exception."""

    def __init__(self, stage, action):
        self.action, self.seen, self.raised = action, UserList(), []  # not restored
        vars(self)[f"on_{stage}_batch_start"] = self.start
        vars(self)[f"on_{stage}_batch_end"] = self.end

    def start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        if len(self.seen) == 2:
            self.action()

    def end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.append(batch_idx)

    def on_train_epoch_end(self, trainer, module):
        self.seen.append("epoch end")

    def on_exception(self, trainer, module, exception):
        self.raised.append((type(exception), trainer.global_step, trainer.interrupted))


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


terminate = partial(send, signal.SIGTERM)


interrupt = Mock(side_effect=KeyboardInterrupt)
ENDS = [
    (signal.SIGTERM, SIGTERMException, 143),
    (signal.SIGUSR1, SIGTERMException, 138),
    (signal.SIGINT, SystemExit, 1),
]


def fit(folder, does, *, path=None, **arguments):
    """Two epochs of four batches, validated after each."""
    saver = ModelCheckpoint(folder / "checkpoints", every_n_epochs=5)
    usual = {"enable_checkpointing": True, "max_epochs": 2, "num_sanity_val_steps": 0, "callbacks": [saver, does]}
    trainer, module = ours(**usual | arguments), Classifier(momentum=0.9)
    does.trainer = trainer
    with warnings.catch_warnings():
        for message in ("Checkpoint directory .* exists", ".*The last model of", ".*no last checkpoint", "Be aware"):
            warnings.filterwarnings("ignore", message)
        trainer.fit(module, data(8), data(8), ckpt_path=path)
    return trainer, module


@pytest.mark.parametrize(("number", "error", "code"), ENDS)
@pytest.mark.parametrize("stage", ["train", "validation"])
def test_signal_finishes_the_step_saves_and_ends_the_fit(tmp_path, number, error, code, stage, caplog, capfd):
    caplog.set_level("INFO")
    _, uninterrupted = fit(tmp_path / "whole", Does("train", lambda: None))
    does = Does(stage, lambda: send(number))
    with pytest.raises(error) as raised:
        fit(tmp_path, does)
    assert raised.value.code == code
    steps = {"train": 3, "validation": 4}[stage]
    assert does.trainer.global_step == steps
    assert "the fit finishes the step, and its state is saved" in capfd.readouterr().err
    path = tmp_path / "checkpoints" / "interrupted.ckpt"
    assert f"{signal.Signals(number).name} has ended the fit after step {steps}" in caplog.text
    assert f"ckpt_path={str(path)!r}" in caplog.text
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    resumed = Does("train", lambda: None)
    trainer, module = fit(tmp_path, resumed, path=path)
    assert trainer.global_step == 8
    assert resumed.seen == [3, "epoch end", 0, 1, 2, 3, "epoch end"][stage == "validation" :]
    assert_same_weights(module, uninterrupted)
    assert path.exists(), "it may be the newest that there is"


@pytest.mark.parametrize(("num_nodes", "batches"), [(1, 3), ("auto", 4)])
def test_elastic_run_ends_at_an_optimizer_step(tmp_path, num_nodes, batches):
    does = Does("train", terminate)
    arguments = {"num_nodes": num_nodes, "accumulate_grad_batches": 2, "max_epochs": 1}
    trainer = ours(default_root_dir=tmp_path, callbacks=[does], **arguments)
    with pytest.raises(SIGTERMException):
        trainer.fit(Learner(), data(8))
    assert len(does.seen) == batches
    assert trainer.loop.window.is_open == (num_nodes == 1)


@pytest.mark.parametrize("saves", [True, False])
def test_ctrl_c_in_a_notebook_returns_from_fit(tmp_path, saves, monkeypatch, caplog, capfd):
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    caplog.set_level("INFO")
    does = Does("train", lambda: send(signal.SIGINT))
    trainer, _ = fit(tmp_path, does, **({} if saves else {"enable_checkpointing": False, "callbacks": [does]}))
    assert (trainer.interrupted, trainer.global_step) == (True, 3)
    announced = capfd.readouterr().err
    assert f"the fit finishes the step, and {'its state is saved' if saves else 'ends'}." in announced
    assert "graceful shutdown" not in announced
    assert ("Its state is in" if saves else "Nothing is saved") in caplog.text
    with pytest.raises(KeyboardInterrupt):
        ours(callbacks=[Does("test", interrupt)]).test(Classifier(), data(12))


def test_second_ctrl_c_ends_the_fit_at_once(tmp_path):
    does = Does("train", lambda: send(signal.SIGINT, signal.SIGINT))
    with pytest.raises(SystemExit) as raised:
        fit(tmp_path, does)
    assert raised.value.code == 1
    assert (does.seen, does.raised) == ([0, 1], [(KeyboardInterrupt, 2, True)])
    assert not (tmp_path / "checkpoints" / "interrupted.ckpt").exists()


def test_sigterm_has_precedence_over_other_signals(tmp_path):
    for order in ([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]):
        with pytest.raises(SIGTERMException) as raised:
            fit(tmp_path, Does("train", lambda order=order: send(*order)))
        assert raised.value.code == 143


def test_further_signals_do_not_break_into_the_end(tmp_path):
    came, does = [], Does("train", lambda: send(signal.SIGUSR1))

    def more(trainer, module, given):
        send(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        came.append(type(given))

    does.on_save_checkpoint = does.on_exception = more
    with pytest.raises(SIGTERMException) as raised:
        fit(tmp_path, does)
    assert raised.value.code == 138
    assert came == [dict, SIGTERMException]
    assert torch.load(tmp_path / "checkpoints" / "interrupted.ckpt", weights_only=True)["global_step"] == 3


@pytest.mark.parametrize("arguments", [{"enable_checkpointing": False}, {"fast_dev_run": 4}])
def test_run_without_checkpointing_saves_nothing(tmp_path, monkeypatch, caplog, arguments):
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    does = Does("train", terminate)
    saver = [ModelCheckpoint(tmp_path / "there")] if "fast_dev_run" in arguments else []
    with pytest.raises(SIGTERMException) as raised:
        fit(tmp_path, does, **{"enable_checkpointing": None} | arguments, callbacks=[does, *saver])
    assert raised.value.code == 143
    assert "SIGTERM has ended the fit after step 3. Nothing is saved: this Trainer writes no" in caplog.text
    assert list(tmp_path.rglob("*.ckpt")) == []


def test_no_save_before_the_first_batch(tmp_path):
    with pytest.raises(SIGTERMException):
        fit(tmp_path, LambdaCallback(on_sanity_check_start=lambda *_: terminate()), num_sanity_val_steps=2)
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGUSR1, SIGTERMException)])
def test_signal_after_the_run_ends_the_program(number, error):
    trainer = ours(callbacks=[Does("test", lambda: send(number))])
    with pytest.raises(error):
        trainer.test(Classifier(), data(6), verbose=False)
    assert trainer.state.finished
    trainer.test(Classifier(), data(2), verbose=False)


def test_signal_with_a_user_handler_is_left_to_it():
    received, number = [], signal.SIGINT
    before = signal.signal(number, lambda number, frame: received.append(number))
    trainer = ours(max_epochs=1, callbacks=[Does("train", lambda: send(number))])
    try:
        trainer.fit(Learner(), data(8))
    finally:
        signal.signal(number, before)
    assert (trainer.state.finished, received) == (True, [number])


def test_forked_worker_is_not_the_run(tmp_path):
    def fork():
        if (child := os.fork()) == 0:
            send(signal.SIGINT, signal.SIGINT, signal.SIGTERM)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    trainer = ours(max_epochs=1, callbacks=[Does("train", fork)])
    trainer.fit(Learner(), data(8))
    assert trainer.state.finished


def test_signal_to_everything_does_not_end_the_workers(tmp_path):
    def to_all():
        pids = [str(process.pid) for process in multiprocessing.active_children()]
        # from another process, because a signal of the parent is not ignored
        subprocess.run(["kill", *pids], check=True)
        time.sleep(0.2)  # torch raises here if a worker dies
        terminate()

    does, saver = Does("train", to_all), ModelCheckpoint(tmp_path, save_top_k=0)
    trainer = ours(max_epochs=1, enable_checkpointing=True, callbacks=[saver, does])
    with pytest.raises(SystemExit):
        trainer.fit(Learner(), data(20, num_workers=2, multiprocessing_context="fork"))
    assert torch.load(tmp_path / "interrupted.ckpt", weights_only=True)["global_step"] == 3
    assert multiprocessing.active_children() == []


def test_main_process_can_still_end_a_worker():
    called = []
    if (child := os.fork()) == 0:
        SurviveSignals(called.append)(3)
        send(signal.SIGINT, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
        send(signal.SIGTERM if called == [3] else signal.SIGKILL)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


DEAD = 2**22 + 1  # above the largest process id of Linux


@pytest.mark.parametrize(
    ("started_by", "parent", "ends"),
    [(DEAD, 1, True), (DEAD, 7, True), (os.getpid(), 1, True), (os.getpid(), 7, False), (7, 7, False), (1, 1, False)],
    ids=["killed", "killed_in_a_container", "zombie", "fork_server", "alive", "run_is_process_1"],
)
def test_worker_ends_if_the_run_was_killed_before_its_start(monkeypatch, started_by, parent, ends):
    called = []
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=started_by))
    for name, fake in (("getppid", lambda: parent), ("_exit", lambda status: sys.exit(f"status {status}"))):
        monkeypatch.setattr(os, name, fake)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit, match="status 1") if ends else nullcontext():
        SurviveSignals(called.append)(3)
    assert called == [3] * (not ends)


def test_signal_during_a_finder_ends_the_fit(tmp_path):
    def find(trainer, module):
        if trainer.current_epoch == 1:
            module.training_step = lambda batch, batch_idx: (terminate(), module.loss(batch))[1]
            finder.lr_find(trainer, module)

    finder = LearningRateFinder(num_training_steps=5)
    finder.on_fit_start, finder.on_train_epoch_start = lambda *_: None, find
    with pytest.raises(SIGTERMException):
        fit(tmp_path, finder, callbacks=[finder, ModelCheckpoint(tmp_path, save_top_k=0)])
    assert finder.trainer.global_step == 4  # the finder restored the attribute
    assert "interrupted.ckpt" not in {path.name for path in tmp_path.iterdir()}


def test_ctrl_c_kills_the_processes_of_the_launcher():
    trainer = ours(max_epochs=1, callbacks=[Does("train", interrupt)])
    launcher = trainer.strategy._launcher = Mock(spec=_SubprocessScriptLauncher)
    launcher.launch = lambda function, *args, trainer: function(*args)
    with pytest.raises(SystemExit):
        trainer.fit(Learner(), data(8))
    launcher.kill.assert_called_once_with(signal.SIGKILL)


def test_second_ctrl_c_before_the_start_is_ignored():
    impatient = LambdaCallback(setup=lambda *_, stage: interrupt(), on_exception=lambda *_: send(*[signal.SIGINT] * 2))
    with pytest.raises(SystemExit):
        ours(max_epochs=1, callbacks=[impatient]).fit(Learner(), data(8))


def test_run_in_another_thread():
    trainer = ours(max_epochs=1)
    thread = threading.Thread(target=trainer.fit, args=(Learner(), data(8)))
    thread.start()
    thread.join()
    assert trainer.state.finished


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Fake scontrol that records its calls, and a job's environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "scontrol"
    command.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name, value in (("JOB_ID", "12345"), ("NTASKS", "1"), ("JOB_NAME", "train")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    return command


def slurm(folder, number=signal.SIGUSR1, plugins=(), **options):
    """Return a Trainer in a job that gets the signal in its third batch."""
    does = Does("train", lambda: send(number))
    plugins = [SLURMEnvironment(**options), *plugins]
    return ours(max_epochs=1, callbacks=[does], plugins=plugins, default_root_dir=folder / "run")


def assert_resumed(folder, ckpt_path="hpc"):
    again = ours(max_epochs=1, default_root_dir=folder)
    again.fit(Learner(), data(8), ckpt_path=ckpt_path)
    assert (again.ckpt_path, again.global_step) == (str(folder / "hpc_ckpt_1.ckpt"), 4)


def test_job_of_slurms_is_requeued(tmp_path, scontrol):
    root = tmp_path / "run"
    slurm(tmp_path).fit(Learner(), data(8))  # continues until Slurm ends it
    assert (scontrol.parent / "calls").read_text() == "requeue 12345\n"
    assert [path.name for path in root.iterdir()] == ["hpc_ckpt_1.ckpt"]
    assert torch.load(root / "hpc_ckpt_1.ckpt", weights_only=True)["global_step"] == 3  # the step was finished first
    assert_resumed(root, ckpt_path=None)
    with pytest.raises(ValueError, match="no HPC checkpoint was found"):
        ours(default_root_dir=tmp_path / "elsewhere").fit(Learner(), data(8), ckpt_path="hpc")


@pytest.mark.parametrize("how", ["sharded", "by Lightning"])
def test_asynchronous_save_completes_before_the_job_is_requeued(tmp_path, scontrol, monkeypatch, how):
    scontrol.write_text(f"#!/bin/sh\nls {tmp_path}/run > {scontrol.parent}/there\n")
    name = "_save_shards" if how == "sharded" else "_save"
    write = getattr(CheckpointFiles, name)
    monkeypatch.setattr(CheckpointFiles, name, lambda *arguments: (time.sleep(0.3), write(*arguments))[1])
    io = CheckpointFiles(sharded=True, asynchronous=True) if how == "sharded" else AsyncCheckpointIO()
    slurm(tmp_path, plugins=[io]).fit(Learner(), data(8))
    assert (scontrol.parent / "there").read_text() == "hpc_ckpt_1.ckpt\n"
    assert (tmp_path / "run" / "hpc_ckpt_1.ckpt").is_dir() == (how == "sharded")
    assert_resumed(tmp_path / "run")


def test_job_of_an_array_and_another_signal(tmp_path, scontrol, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    slurm(tmp_path, signal.SIGUSR2, requeue_signal=signal.SIGUSR2).fit(Learner(), data(8))
    assert (scontrol.parent / "calls").read_text() == "requeue 77_3\n"
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_job_that_slurm_does_not_requeue_fails_loudly(tmp_path, scontrol, monkeypatch):
    saved = str(tmp_path / "run" / "hpc_ckpt_{}.ckpt")
    scontrol.write_text("#!/bin/sh\necho Requested operation is presently disabled >&2\nexit 3\n")
    message = f"with exit status 3 and printed: Requested operation is .*{saved.format(1)}.*auto_requeue=False"
    with pytest.raises(RequeueError, match=f"(?s){message}"):
        slurm(tmp_path).fit(Learner(), data(8))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_NTASKS")  # so that it is not resumed
    with pytest.raises(RequeueError, match="found no `scontrol` on the PATH"):
        slurm(tmp_path).fit(Learner(), data(8))
    assert torch.load(saved.format(2), weights_only=True)["global_step"] == 3


def test_without_requeueing_the_signal_ends_the_fit(tmp_path, scontrol):
    with pytest.raises(SIGTERMException) as raised:
        slurm(tmp_path, auto_requeue=False).fit(Learner(), data(8))
    assert raised.value.code == 138
    assert not (scontrol.parent / "calls").exists()
