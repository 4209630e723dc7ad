"""A user's project: a module in the working directory, recipes and configs in ./conf."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.conftest import logging_restored
from trainer.cli import main
from trainer.cli.build import check, make
from trainer.cli.targets import Allowlist

MODULE = '''
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Line(L.LightningModule):
    """Fits y = 2x; ``fail_at`` raises in that training step."""

    def __init__(self, optimizer, start=0.0, fail_at=None):
        super().__init__()
        self.make_optimizer = optimizer
        self.fail_at = fail_at
        self.net = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(self.net.weight, start)
        torch.nn.init.constant_(self.net.bias, 0.0)

    def loss(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch, batch_idx):
        if self.global_step == self.fail_at:
            raise RuntimeError("asked to fail")
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


class Points(L.LightningDataModule):
    def __init__(self, batch_size=4):
        super().__init__()
        self.batch_size = batch_size

    def loader(self):
        x = torch.linspace(-1, 1, 16).unsqueeze(1)
        return DataLoader(TensorDataset(x, 2 * x), batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader
'''

FILES = {
    "line_fit.py": MODULE,
    "conf/model/line.yaml": "_target_: line_fit.Line\noptimizer: ${optimizer}\nstart: 0.0\nfail_at: null\n",
    "conf/data/points.yaml": "_target_: line_fit.Points\nbatch_size: 4\n",
    "conf/recipe/line.yaml": """
        # @package _global_
        # A straight line through sixteen points.
        #   python -m trainer fit +recipe=line
        defaults:
          - override /model: line
          - override /data: points
          - override /optimizer: sgd
          - override /trainer: cpu
          - override /logger: csv
        optimizer: {lr: 0.1}
        trainer: {max_epochs: 2, enable_progress_bar: false, enable_model_summary: false, log_every_n_steps: 1}
    """,
    "conf/recipe/other.yaml": "# @package _global_\n# Another line, steeper.\ndefaults: [line]\n",
}


STOPPED = {
    "stopped.py": """
        import os
        import time
        from pathlib import Path

        import line_fit


        class Stopped(line_fit.Line):
            # sends a signal in the steps in the file `stops`, once each, to itself, its parent, or the sweep

            def __init__(self, optimizer, number, receivers):
                super().__init__(optimizer)
                self.number, self.receivers = number, receivers

            def training_step(self, batch, batch_idx):
                file, step = Path("stops"), str(self.global_step)
                steps = file.read_text().split()
                if step in steps:
                    file.write_text(" ".join(other for other in steps if other != step))
                    known = {"self": os.getpid(), "parent": os.getppid(), "sweep": int(Path("sweep").read_text())}
                    for name in self.receivers:
                        os.kill(known[name], self.number)
                    time.sleep(2.0 * (self.receivers != ["self"]))  # to be passed on
                return super().training_step(batch, batch_idx)
    """,
    "conf/model/stopped.yaml": "_target_: stopped.Stopped\noptimizer: ${optimizer}\nnumber: 15\nreceivers: [self]\n",
    "stops": "2",
    "sweep": "0",
}


def build(node: Any, key: str = "", allowlist: Allowlist | None = None) -> Any:
    """Check a node of a config, and return the object that it describes."""
    allowlist = allowlist or Allowlist(())
    check(node, key, allowlist)
    return make(node, key, allowlist)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))


class FakeJob:
    """Stands in for the process of a job of a sweep.

    ``ends`` returns the record that the run writes, or the exit status of a run without one.
    """

    started: ClassVar[list[FakeJob]] = []
    ends: Callable[[FakeJob], Any]
    returncode: int | None = None

    def __init__(self, words: list[str], *, environment: dict[str, str], **options: Any) -> None:
        self.command, self.environment, self.options = words, environment, options
        self.folder = Path(self.value("hydra.run.dir"))
        FakeJob.started.append(self)

    def value(self, key: str) -> str:
        (found,) = [word.partition("=")[2].strip("'") for word in self.command if word.startswith(f"{key}=")]
        return found

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ended = FakeJob.ends(self)
            if isinstance(ended, dict):
                write(self.folder, {"run.json": json.dumps(ended)})
            self.returncode = ended if isinstance(ended, int) else 0
        return self.returncode


@pytest.fixture
def jobs(project: Path, monkeypatch: pytest.MonkeyPatch) -> type[FakeJob]:
    """Processes of jobs that are completed at once."""
    monkeypatch.setattr(FakeJob, "started", [])
    record = {"status": "completed", "metrics": {}, "run_dir": "."}
    monkeypatch.setattr(FakeJob, "ends", lambda job: record, raising=False)
    monkeypatch.setattr("trainer.cli.sweep.jobs.start_process", FakeJob)
    return FakeJob


def enter(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make ``folder`` the working directory, and restore everything that a run there sets."""
    patch.chdir(folder)
    patch.syspath_prepend(folder)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        patch.setenv(name, "")
        patch.delenv(name)


def train(folder: Path, files: dict[str, str], *words: str) -> Path:
    """Run a fit in a project in ``folder``, and return the folder of the run."""
    with pytest.MonkeyPatch.context() as patch, logging_restored():
        enter(folder, patch)
        write(folder, files)
        assert main(["fit", "+recipe=line", "hydra.run.dir=run", "-q", *words]) == 0
    for name in files:
        sys.modules.pop(name.removesuffix(".py"), None)
    return folder / "run"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    return train(tmp_path_factory.mktemp("trained"), FILES)


@pytest.fixture
def given(project: Path, trained: Path) -> Path:
    """The folder ``given`` in the user's project, of a run from elsewhere."""
    return Path(shutil.copytree(trained, project / "given"))


@pytest.fixture
def stopped(project: Path) -> Path:
    """The user's project, with a model that sends signals."""
    write(project, STOPPED)
    yield project
    sys.modules.pop("stopped", None)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the user's project in it."""
    write(tmp_path, FILES)
    enter(tmp_path, monkeypatch)
    monkeypatch.delitem(sys.modules, "line_fit", raising=False)
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    sys.modules.pop("line_fit", None)
