"""A SIGTERM and a Ctrl-C end a run as under Lightning's Trainer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.parity import Classifier, Learner, data, ours, run_both
from trainer.compat.signals import ctrl_c_ignored


@pytest.fixture(autouse=True)
def handlers() -> Iterator[list[int]]:
    """SIGTERM has a handler of the user's, which is called too; everything is as it was afterwards."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    own = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield received
    assert own == {number: signal.getsignal(number) for number in own}
    signal.signal(signal.SIGTERM, before)


class Does(Callback):
    """Does something at the start of the third batch of a stage; notes which batches ended and what was raised."""

    def __init__(self, stage: str, action: Any) -> None:
        self.action, self.seen, self.raised = action, [], []  # type: ignore[var-annotated]
        vars(self)[f"on_{stage}_batch_start"] = self.start
        vars(self)[f"on_{stage}_batch_end"] = self.end

    def start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if len(self.seen) == 2:
            self.action()

    def end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(batch_idx)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append("epoch end")

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.raised.append((type(exception), trainer.global_step, trainer.interrupted))


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("action", [terminate, interrupt])
@pytest.mark.parametrize(
    ("stage", "fn", "batches"),
    [("train", "fit", 3), ("train", "fit", 6), ("validation", "fit", 6), ("test", "test", 6)],
)
def test_the_run_ends(action: Any, stage: str, fn: str, batches: int, handlers: list[int]) -> None:
    def scenario(make: Any) -> Any:
        handlers.clear()
        does = Does(stage, action)
        trainer = make(max_epochs=2, callbacks=[does], num_sanity_val_steps=0)
        assert not trainer.received_sigterm
        loaders = [data(2 * batches), data(8)] if fn == "fit" else [data(2 * batches)]
        with pytest.raises(SystemExit) as raised:
            getattr(trainer, fn)(Classifier(), *loaders)
        said = (type(raised.value), raised.value.code, trainer.received_sigterm, trainer.interrupted, list(handlers))
        return does.seen, does.raised, said

    theirs, mine = run_both(scenario)
    assert theirs == mine
    code = SIGTERMException().code
    expected = (SIGTERMException, code, True, True, [15]) if action is terminate else (SystemExit, 1, False, True, [])
    assert mine[2] == expected


def test_an_evaluation_whose_last_batch_is_under_way_comes_to_its_end() -> None:
    def scenario(make: Any) -> Any:
        trainer = make(callbacks=[Does("test", terminate)])
        trainer.test(Classifier(), data(6), verbose=False)
        return trainer.received_sigterm, trainer.state.finished

    theirs, mine = run_both(scenario)
    assert theirs == mine == (True, True)


def test_the_next_run_starts_afresh() -> None:
    does = Does("train", terminate)
    trainer = ours(max_epochs=1, callbacks=[does])
    with pytest.raises(SIGTERMException):
        trainer.fit(Learner(), data(8))
    does.action = lambda: None
    trainer.fit(Learner(), data(8))
    assert (trainer.state.finished, trainer.received_sigterm, trainer.current_epoch) == (True, False, 1)


def test_a_ctrl_c_kills_the_processes_of_the_launcher() -> None:
    trainer: Any = ours(max_epochs=1, callbacks=[Does("train", interrupt)])
    launcher = trainer.strategy._launcher = Mock(spec=_SubprocessScriptLauncher)
    launcher.launch = lambda function, *args, trainer: function(*args)
    with pytest.raises(SystemExit):
        trainer.fit(Learner(), data(8))
    launcher.kill.assert_called_once_with(signal.SIGKILL)


def test_another_ctrl_c_does_nothing() -> None:
    with ctrl_c_ignored():
        os.kill(os.getpid(), signal.SIGINT)
        thread = threading.Thread(target=lambda: ctrl_c_ignored().__enter__())  # no signals there
        thread.start()
        thread.join()


def test_a_run_in_another_thread() -> None:
    trainer = ours(max_epochs=1)
    thread = threading.Thread(target=trainer.fit, args=(Learner(), data(8)))
    thread.start()
    thread.join()
    assert trainer.state.finished


def test_a_job_of_slurms_is_requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.signal_connector.call", lambda c: calls.append(c) or 0)
    monkeypatch.setenv("SLURM_JOB_ID", "12345")
    does = Does("train", lambda: os.kill(os.getpid(), signal.SIGUSR1))
    trainer = ours(max_epochs=1, callbacks=[does], plugins=SLURMEnvironment(), default_root_dir=tmp_path)
    trainer.fit(Learner(), data(8))
    assert calls == [["scontrol", "requeue", "12345"]]
    assert [path.name for path in tmp_path.iterdir()] == ["hpc_ckpt_1.ckpt"]
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    for given in (None, "hpc"):
        again = ours(max_epochs=1, default_root_dir=tmp_path)
        again.fit(Learner(), data(8), ckpt_path=given)
        assert (again.ckpt_path, again.global_step) == (str(tmp_path / "hpc_ckpt_1.ckpt"), 4)
    with pytest.raises(ValueError, match="no HPC checkpoint was found"):
        ours(default_root_dir=tmp_path / "elsewhere").fit(Learner(), data(8), ckpt_path="hpc")
