"""docs/quick-start.md, step by step, from an empty folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from _faults.bench import wait_until

from tests.docs.execute import make_commands, run, shell_environment
from tests.docs.pages import ROOT, Block, read
from tests.warm_python import WarmPython
from trainer.record.run_record import load_run

PAGE = ROOT / "docs" / "quick-start.md"
STEPS = [
    "Train the default recipe",
    "Write your own module and recipe",
    "Sweep over two precisions",
    "Open the report",
    "Debug an overflow",
    "Resume a killed run",
]

pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(shutil.which("bash") is None, reason="the commands are written for a shell"),
]


def steps() -> dict[str, list[Block]]:
    """Return the page's blocks by step."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    starts = [(number, line[6:]) for number, line in enumerate(lines, 1) if re.match(r"## \d\. ", line)]
    ends = [number for number, _ in starts[1:]] + [len(lines)]
    blocks = read(PAGE)
    return {
        name: [block for block in blocks if start < block.line < end]
        for (start, name), end in zip(starts, ends, strict=True)
    }


@dataclass
class Newcomer:
    """Follows the page in a folder.

    Args:
        folder: an empty folder.
        tools: a folder next to it.
        python: runs programs.
    """

    folder: Path
    tools: Path
    python: WarmPython

    def write(self) -> None:
        """Write all files of the page."""
        for block in read(PAGE):
            if file := block.markers.get("file"):
                path = self.folder / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text)

    def follow(self, *names: str) -> str:
        """Run the blocks of steps, and return their output."""
        blocks = [block for name in names for block in steps()[name]]
        return self.run(blocks, "-".join(str(STEPS.index(name)) for name in names))

    def run(self, blocks: list[Block], name: str) -> str:
        """Run blocks, with tools in a folder called ``name``, and return their output."""
        return run(blocks, self.folder, self.tools / name, self.python, timeout=200)

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """Start one command."""
        tools = self.tools / "start"
        if not tools.exists():
            make_commands(tools)
        environment = shell_environment(tools, self.python) | {"DOCS_LIMITS": "none"}
        return subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=self.folder, env=environment)

    def one(self, pattern: str) -> Path:
        """Return the one path in the folder that matches."""
        (path,) = self.folder.glob(pattern)
        return path


@pytest.fixture
def newcomer(python: WarmPython, tmp_path: Path) -> Newcomer:
    (tmp_path / "empty").mkdir()
    return Newcomer(tmp_path / "empty", tmp_path / "tools", python)


def result_in(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return result


def test_page_has_these_steps() -> None:
    assert list(steps()) == STEPS
    assert all(any(block.language == "bash" for block in blocks) for blocks in steps().values())


def test_trains_the_default_recipe(newcomer: Newcomer) -> None:
    newcomer.follow("Train the default recipe")
    run_folder = newcomer.one("outputs/resnet50/*")
    result = result_in(run_folder)
    assert (result["status"], result["precision"]) == ("completed", "16-mixed")
    for written in ("checkpoints/last.ckpt", "csv/metrics.csv", ".hydra/config.yaml", "run.json"):
        assert (run_folder / written).is_file(), written


def test_custom_module_and_recipe_train(newcomer: Newcomer) -> None:
    newcomer.follow("Write your own module and recipe")
    result = result_in(newcomer.one("outputs/mine/*"))
    assert result["status"] == "completed"
    assert result["epochs"] == 10
    assert result["metrics"]["val_acc"] > 0.9
    values = result["curves"]["metrics"]["val"]["val_acc"]["values"]  # the recipe has no metric to monitor
    assert result["best_score"] == max(values)
    assert f"epoch={values.index(max(values)):03d}-" in result["paths"]["best_checkpoint"]


def test_sweeps_two_precisions_and_opens_the_report(newcomer: Newcomer) -> None:
    newcomer.write()
    output = newcomer.follow("Sweep over two precisions", "Open the report")
    table = newcomer.one("multirun/mine/*/summary.md").read_text()
    for precision in ("32-true", "16-mixed"):
        assert re.search(rf"\| precision={precision} \| completed", table)
        assert f"precision={precision}" in output
    results = json.loads(newcomer.one("multirun/mine/*/summary.json").read_text())
    assert [result["precision"] for result in results] == ["32-true", "16-mixed"]

    page = newcomer.one("multirun/mine/*/report.html").read_text()
    assert "16-mixed" in page
    assert "val_acc" in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"https?:", page)


def test_overflowing_layer_is_reported(newcomer: Newcomer) -> None:
    newcomer.write()
    output = newcomer.follow("Debug an overflow")
    assert "Verdict: forward pass overflows in 16 bits" in output
    assert "in 'second' (Linear) overflows float16" in output
    broken, mended = sorted(newcomer.folder.glob("outputs/mine/*"), key=lambda path: path.name)
    assert "in 'second' (Linear) overflows float16" in next(broken.rglob("diagnosis_step_*.md")).read_text()
    assert result_in(broken)["status"] == "failed"
    assert result_in(mended)["status"] == "completed"
    assert result_in(mended)["skipped_steps"] == 0
    assert result_in(mended)["metrics"]["val_acc"] > 0.9


def test_killed_run_is_resumed_to_the_same_weights(newcomer: Newcomer, tmp_path: Path) -> None:
    (block,) = steps()["Resume a killed run"]
    command = block.text.strip()
    newcomer.write()
    undisturbed = Newcomer(tmp_path / "undisturbed", tmp_path / "other", newcomer.python)
    undisturbed.folder.mkdir()
    undisturbed.write()
    assert undisturbed.start(command).wait(timeout=120) == 0

    with newcomer.start(command) as first:
        wait_until(lambda: any(newcomer.folder.glob("outputs/mine/auto-*/checkpoints/last.ckpt")), 60)
        os.kill(first.pid, signal.SIGKILL)
    killed = newcomer.one("outputs/mine/auto-*")
    assert first.returncode == -signal.SIGKILL
    wait_until(lambda: load_run(killed).status == "killed", 60)  # the warm Python delivers a kill a moment later

    assert newcomer.start(command).wait(timeout=120) == 0
    assert newcomer.one("outputs/mine/auto-*") == killed
    assert result_in(killed)["epochs"] == 10
    log = (killed / "fit.log").read_text()
    assert "resume='auto': resuming from" in log  # a run from the start would have the same weights
    expected = _weights(undisturbed.one("outputs/mine/auto-*"))
    found = _weights(killed)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 190
    weights: dict[str, torch.Tensor] = checkpoint["state_dict"]
    return weights
