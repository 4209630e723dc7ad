"""Every malformed config is refused with a sentence, before data is loaded, and most before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cli.conftest import write
from tests.cli.malformed import CASES, EARLY, LATE, PROJECT
from trainer import machine
from trainer.cli import main


@pytest.fixture(autouse=True)
def malformed_project(project, monkeypatch):
    write(project, PROJECT)
    monkeypatch.delitem(sys.modules, "typed", raising=False)
    return project


def refused(argv, expected, capsys) -> str:
    status = main(argv)
    out, err = capsys.readouterr()
    assert status == 2, err
    assert expected in err
    assert "Traceback" not in err
    assert "data was loaded" not in err
    assert out == ""
    return err


@pytest.mark.parametrize(("argv", "expected"), [case[1:] for case in EARLY], ids=[case[0] for case in EARLY])
def test_malformed_before_torch_is_imported(malformed_project, capsys, argv, expected):
    err = refused(argv, expected, capsys)
    assert err.startswith("trainer: ")
    assert err.count("\n") == 1
    assert not (malformed_project / "outputs").exists()


@pytest.mark.parametrize(("argv", "expected"), [case[1:] for case in LATE], ids=[case[0] for case in LATE])
def test_before_data_is_loaded(malformed_project, capsys, argv, expected):
    err = refused([*argv, "hydra.run.dir=run"], expected, capsys)
    last = err.splitlines()[-1]
    assert last.startswith("trainer: ")
    assert expected in last
    if (malformed_project / "run/run.json").exists():
        assert json.loads((malformed_project / "run/run.json").read_text())["status"] == "failed"


def test_number_and_names_of_cases():
    assert len({name for name, _, _ in CASES}) == len(CASES) >= 100


@pytest.mark.whole
def test_without_torch(malformed_project):
    program = (
        "import sys\nfrom trainer.cli import main\n"
        f"for argv in {[argv for _, argv, _ in EARLY[::6]]!r}:\n"
        "    assert main(argv) == 2, argv\n"
        "    loaded = {'torch', 'lightning', 'numpy', 'typed'}.intersection(sys.modules)\n"
        "    assert not loaded, (argv, loaded)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=240)


def test_monitor_that_is_never_logged_is_named_after_the_first_validation(project, capsys):
    argv = ["fit", "+recipe=line", "callbacks.model_checkpoint.monitor=val_los", "hydra.run.dir=run"]
    assert main(argv) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("trainer: `ModelCheckpoint(monitor='val_los')` could not find the monitored key")
    assert "'val_loss'" in err


@pytest.mark.skipif(not machine.has_no_gpu(), reason="there may be a GPU")
def test_missing_gpu_is_reported_without_torch(malformed_project):
    program = (
        "import sys\nfrom trainer.cli import main\n"
        "every = ['trainer.devices=-1', 'trainer.accelerator=auto']\n"
        "for words in (['trainer.accelerator=gpu'], ['trainer=gpu'], every):\n"
        "    assert main(['fit', '+recipe=it', *words]) == 2, words\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=240)
    gpu, group, every = done.stderr.splitlines()
    assert gpu.startswith("trainer: trainer.accelerator is gpu, but this machine has no GPU")
    assert group == gpu
    assert every.startswith("trainer: trainer.devices is -1 (all GPUs), but this machine has no GPU")
