"""What the README shows works: its Python, its commands, its config."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
QUICK = ["+debug=fast_dev_run", "data.batch_size=8"]
"""Added to commands that train, which would take minutes."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = [line.split("  #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    lines = [re.sub(r"\s{2,}#.*", "", line) for line in lines if line and not line.startswith("#")]
    return [line for line in lines if line.startswith("python -m trainer")]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def test_there_is_something_to_test():
    assert len(blocks("python")) == 3
    assert len(blocks("yaml")) == 1
    assert len(commands()) == 5


def test_the_python_runs(tmp_path):
    script = tmp_path / "readme.py"
    script.write_text("\n\n".join(blocks("python")))
    done = run([sys.executable, str(script)], tmp_path)
    assert "StepOutcome(skipped=" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_the_commands_run(command, tmp_path):
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "trainer"]
    words[0] = sys.executable
    if words[3] == "recipes":
        assert "resnet50" in run(words, tmp_path).stdout
        return
    done = run([*words, *QUICK], tmp_path)
    if words[3] == "compare":
        assert list(tmp_path.glob("multirun/resnet50/*/compare.md"))
    elif "-m" in words[3:]:
        assert done.stdout.count("completed") >= 3
    else:
        assert list(tmp_path.glob("outputs/resnet50/*/result.json"))


def test_the_recipe_composes(tmp_path):
    folder = tmp_path / "conf" / "recipe"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(blocks("yaml")[0])
    (tmp_path / "my_package.py").write_text("class Classifier: pass\n")
    trainer = [sys.executable, "-m", "trainer"]
    shown = run([*trainer, "fit", "+recipe=mine", "precision=16-mixed", "--cfg", "job"], tmp_path).stdout
    assert "_target_: my_package.Classifier" in shown
    assert "max_epochs: 10" in shown
    assert "My classifier." in run([*trainer, "recipes"], tmp_path).stdout


def test_the_script_commands_exist():
    for script in re.findall(r"scripts/(\w+)", README):
        assert (ROOT / "scripts" / script).exists(), script
