"""Every remedy of `scripts/benchmark_diagnosis` is executed as printed, and the program then learns."""

from __future__ import annotations

import json
import linecache
import math
import os
import re
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
from _diagnosis import frameworks
from _diagnosis.bench import learns
from _diagnosis.programs import PROGRAMS
from _diagnosis.remedy import edited, execute, remedy_in

from tests.docs.execute import make_commands, shell_environment
from tests.warm_python import WarmPython

SCRIPTS = Path(__file__).parents[2] / "scripts"
REPRESENTATIVES = (
    "NanSample16", "EmptyMask16", "UnscaledAttention", "TwoLosses", "TinyLoss", "BrokenFile16", "RateTooHigh16",
)  # fmt: skip


def marks_of(name: str) -> Any:
    return pytest.mark.whole if name in REPRESENTATIVES else pytest.mark.nightly


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=marks_of(name)) for name, program in PROGRAMS.items() if program.verdict != "healthy"],
)
def test_a_program_learns_with_the_remedy_of_its_report(name: str) -> None:
    execution = execute(PROGRAMS[name])
    assert execution.is_cured, execution


@pytest.mark.whole
def test_a_remedy_for_code_in_a_notebook(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cell = textwrap.dedent("""
        import torch, lightning as L
        from torch.utils.data import DataLoader
        from trainer import Trainer

        class Masked(L.LightningModule):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.net = torch.nn.Linear(4, 2)
                self.losses = []

            def training_step(self, batch, batch_idx):
                x, y, mask = batch
                losses = (self.net(x) - y).pow(2).mean(dim=1)
                loss = (losses * mask).sum() / mask.sum()
                self.losses.append(loss.item())
                return loss

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.05)

        draw = torch.Generator().manual_seed(0)
        batches = [[torch.randn(8, 4, generator=draw), torch.ones(8, 2), torch.ones(8) * (i != 5)] for i in range(12)]
        module = Masked()
        Trainer(
            accelerator="cpu", precision="16-mixed", max_epochs=4, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(module, DataLoader(batches, batch_size=None))
    """)

    def run_cell(text: str, number: int) -> list[float]:
        name = f"/tmp/ipykernel_1/{number}.py"  # as a notebook names the code of a cell
        monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
        space: dict[str, Any] = {"__name__": "cell"}
        exec(compile(text, name, "exec"), space)
        losses: list[float] = space["module"].losses
        return losses

    assert not all(map(math.isfinite, run_cell(cell, 1)))
    printed = "".join(capsys.readouterr())
    found = re.search(r"(\d+)(?: of the cell)? write: (.+?)(?:  \[tried|$)", remedy_in(printed))
    assert found is not None, printed
    assert learns(run_cell(edited(cell, int(found[1]), found[2]), 2))


PROJECT = {
    "batches.py": """
        import json
        import lightning as L
        from _diagnosis.programs import PROGRAMS
        from torch.utils.data import DataLoader

        class Batches(L.LightningDataModule):
            def __init__(self, program):
                super().__init__()
                self.program = PROGRAMS[program]

            def train_dataloader(self):
                return DataLoader(self.program.batches(), batch_size=None)

        class Losses(L.Callback):
            losses = []

            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                self.losses.append(float(outputs["loss"]))

            def on_train_end(self, trainer, module):
                with open("losses.json", "w") as file:
                    json.dump(self.losses, file)
    """,
    "conf/model/program.yaml": """
        _target_: _diagnosis.programs.${program}
        lr: ${optimizer.lr}
    """,
    "conf/data/batches.yaml": """
        _target_: batches.Batches
        program: ${program}
    """,
    "conf/recipe/broken.yaml": """
        # @package _global_
        # A program of the benchmark.
        defaults:
          - override /model: program
          - override /data: batches
          - override /optimizer: sgd
          - override /trainer: cpu
          - override /logger: csv
        program: ???
        trainer:
          max_epochs: 6
          log_every_n_steps: 10
          enable_progress_bar: false
        callbacks:
          losses:
            _target_: batches.Losses
    """,
}


@pytest.mark.whole
@pytest.mark.skipif(shutil.which("bash") is None, reason="the commands are written for a shell")
def test_a_remedy_on_the_command_line(python: WarmPython, tmp_path: Path) -> None:
    words = "program=UnscaledAttention precision=16-mixed optimizer.lr=0.05"
    folder, tools = tmp_path / "project", tmp_path / "tools"
    for name, text in PROJECT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    make_commands(tools)
    environment = shell_environment(tools, python) | {"DOCS_LIMITS": "none"}
    environment["PYTHONPATH"] += os.pathsep + str(SCRIPTS)

    def fit(words: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-c", f"python -m trainer fit +recipe=broken {words}"]
        return subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    before = fit(words).stdout
    after = fit(f"{words} {remedy_in(before)}")
    assert after.returncode == 0, after.stdout
    assert "Verdict:" not in after.stdout, after.stdout
    assert learns(json.loads((folder / "losses.json").read_text()))


def test_frameworks_count_skipped_steps_and_losses_that_are_not_finite() -> None:
    outcome = frameworks.run_in("PyTorch", PROGRAMS["NanSample16"])
    assert frameworks.course(outcome, outcome) == "completes; 6 losses nan; 6 of 72 steps skipped"
    assert outcome.is_finite


def test_frameworks_leave_out_messages_of_healthy_programs() -> None:
    ordinary = frameworks.Outcome(lines=["epoch 0 step 10 loss 0.5"])
    broken = frameworks.Outcome(lines=["epoch 1 step 20 loss nan", "UserWarning: division"], losses=[0.5, math.nan])
    assert frameworks.messages(broken, ordinary) == ["UserWarning: division"]
    assert frameworks.report(broken, ordinary) == "`UserWarning: division`"
