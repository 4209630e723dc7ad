"""``scripts/verify_gpu``: all parts on the simulated device, time limits, and the published tables."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.conftest import loaded

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "verify_gpu"

MACHINE = {
    "gpu": "NVIDIA H100", "memory": 80 * 2**30, "capability": [9, 0], "driver": "580.1", "cuda": "13.0",
    **dict.fromkeys(("python", "torch", "lightning", "torchmetrics", "hydra-core", "omegaconf", "rich"), "2.1"),
}  # fmt: skip

FAKE_PART = """
import json, sys, time
name, rows = sys.argv[1], sys.argv[3]
def row(**entry):
    with open(rows, "a") as file:
        print(json.dumps(entry), file=file)
row(name="quick", measured="1 | 2", expected="1", verdict="agrees", command="repeat quick")
row(marker="table", table="| a |")
if name == "amp":
    print("reason of the failure")
    sys.exit(3)
if name == "overhead":
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def script():
    """The script as a module."""
    with loaded("verify_gpu") as module:
        yield module


@pytest.fixture
def results(script, monkeypatch, tmp_path):
    """The results of a run with two parts: one that finishes, and one that fails."""
    fake = tmp_path / "checkout" / "scripts" / "_gpu.py"
    fake.parent.mkdir(parents=True)
    fake.write_text(FAKE_PART)
    monkeypatch.setattr(script, "ROOT", tmp_path / "checkout")
    monkeypatch.setattr(script, "PARTS", {"tests": (60, ""), "amp": (60, ""), "overhead": (2, ""), "fp8": (60, "")})
    monkeypatch.setattr(script, "SHORTEST", 1)
    monkeypatch.setattr(script, "machine_facts", lambda simulate: MACHINE)
    assert script.main(["--folder", str(tmp_path / "out"), "--only", "tests", "amp"]) == 1
    return tmp_path / "out" / "results.json"


def test_rows_of_a_part_that_fails_or_exceeds_its_time_limit_are_kept(script, results, tmp_path):
    assert script.main(["--folder", str(tmp_path / "out"), "--only", "overhead"]) == 1
    parts = json.loads(results.read_text())["parts"]
    found = {name: (part["ended"], *(row["verdict"] for row in part["rows"])) for name, part in parts.items()}
    assert found == {
        "tests": ("finished", "agrees"), "amp": ("failed", "agrees", "failed"),
        "overhead": ("time limit", "agrees", "not run"),
    }  # fmt: skip
    page = results.with_suffix(".md").read_text()
    assert "| tests | quick | 1 \\| 2 | 1 | **agrees** | `repeat quick` |" in page
    assert "NVIDIA H100, 80 GiB, capability 9.0, driver 580.1, CUDA 13.0, Python 2.1, torch 2.1" in page
    assert "Not measured: fp8." in page


def test_parts_after_the_time_limit_of_the_command_are_not_started(script, results, tmp_path, capsys):
    assert script.main(["--folder", str(tmp_path / "late"), "--minutes", "0"]) == 1
    parts = json.loads((tmp_path / "late" / "results.json").read_text())["parts"]
    assert {part["ended"] for part in parts.values()} == {"not started"}
    assert "Left: scripts/verify_gpu --only tests amp overhead fp8" in capsys.readouterr().out


def test_publish_writes_the_verdicts_and_the_tables(script, results, tmp_path):
    page = tmp_path / "page.md"
    markers = "".join(f"<!-- {name}: start -->\nold\n<!-- {name}: end -->\n" for name in ("verify_gpu", "table"))
    page.write_text(f"before\n{markers}after\n")
    words = ["--publish", "--folder", str(tmp_path / "out"), "--page", str(page)]
    assert script.main(words) == 0
    text = page.read_text()
    assert "old" not in text
    assert "<!-- table: start -->\n| a |\n<!-- table: end -->" in text
    assert "**agrees**" in text
    found = json.loads(results.read_text())
    assert re.search(r"NVIDIA H100, .*; \d{4}-\d\d-\d\d; `scripts/verify_gpu`\.", text)
    found["machine"]["gpu"] = "simulated"
    results.write_text(json.dumps(found))
    with pytest.raises(SystemExit, match="simulated device"):
        script.main(words)


def test_documentation_has_the_places_of_all_tables(script):
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for marker in ("verify_gpu", "benchmark_amp cuda", "benchmark_amp cuda compiled"):
        assert f"<!-- {marker}: start -->\n" in text


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_parts_run_on_the_simulated_device(tmp_path):
    command = [sys.executable, str(SCRIPT), "--simulate", "--folder", str(tmp_path)]
    environment = os.environ | {"AMP_BENCH": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert {part["ended"] for part in parts.values()} == {"finished"}
    rows = {row["name"]: row for part in parts.values() for row in part["rows"]}
    assert all(part["rows"] for part in parts.values())
    not_run = {name for name, row in rows.items() if row["verdict"] == "not run"}
    assert not_run <= {"fsdp", "fp8"}  # FSDP2 needs torch 2.13, float8 needs torchao
