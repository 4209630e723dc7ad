"""Every malformed config is refused with a sentence, before data is loaded, and most before torch is imported."""

import json
import subprocess
import sys

import pytest

from tests.cli.conftest import write
from tests.cli.malformed import EARLY, LATE, PROJECT
from trainer.cli import main


@pytest.fixture(autouse=True)
def malformed_project(project, monkeypatch):
    write(project, PROJECT)
    monkeypatch.delitem(sys.modules, "typed", raising=False)
    return project


def refused(argv, expected, capsys):
    status = main(argv)
    out, err = capsys.readouterr()
    assert status == 2, err
    last = err.splitlines()[-1]
    assert last.startswith("trainer: ")
    assert expected in f"{last}\n"
    assert "Traceback" not in err
    assert "data was loaded" not in err
    assert out == ""
    return err


@pytest.mark.parametrize(("argv", "expected"), EARLY, ids=[" ".join(argv[1:]) for argv, _ in EARLY])
def test_malformed_before_torch_is_imported(malformed_project, capsys, argv, expected):
    assert refused(argv, expected, capsys).count("\n") == 1
    assert not (malformed_project / "outputs").exists()


@pytest.mark.parametrize(("argv", "expected"), LATE, ids=[" ".join(argv[1:]) for argv, _ in LATE])
def test_before_data_is_loaded(malformed_project, capsys, argv, expected):
    refused([*argv, "hydra.run.dir=run"], expected, capsys)
    if (malformed_project / "run/run.json").exists():
        assert json.loads((malformed_project / "run/run.json").read_text())["status"] == "failed"


@pytest.mark.whole
def test_help_and_refusals_import_no_torch(malformed_project):
    """Help of commands without settings of their own does not import Hydra either."""
    without_settings = [
        ["--help"],
        ["report", "--help"],
        ["export", "--help"],
        ["validate", "--help"],
        ["doctor", "--help"],
    ]
    shown = [["--help"], ["fit", "--help"], ["recipes", "resnet50"], ["fit", "--cfg", "job"]]
    wrong = [*(argv for argv, _ in EARLY[::30]), ["compare", "+recipe=it", "compare.mode=up"], ["doctor", "no.py"]]
    program = (
        "import sys\nfrom trainer.cli import main\n"
        f"for argv in {without_settings!r}:\n"
        "    assert main(argv) == 0 and 'omegaconf' not in sys.modules, argv\n"
        f"for argv, status in {[*((a, 0) for a in shown), *((a, 2) for a in wrong)]!r}:\n"
        "    assert main(argv) == status, argv\n"
        "    loaded = {'torch', 'lightning', 'numpy', 'typed'}.intersection(sys.modules)\n"
        "    assert not loaded, (argv, loaded)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=240)
