"""The command ``doctor`` runs Lightning programs, and reports the cause and the exit status."""

import json
import re
import runpy
import signal
import sys
from pathlib import Path
from unittest.mock import ANY

import lightning.pytorch as pl
import pytest
import torch

from tests.cli.conftest import write
from tests.conftest import logging_restored
from tests.support import assert_identical
from trainer.cli import main
from trainer.cli.commands.doctor import FAILED, NO_PATCH, NOTHING_FOUND, PATCH, USAGE

PROGRAM = """
    import sys

    import lightning as L
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    SETTINGS = dict(word.split("=") for word in sys.argv[1:])


    class Line(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            if self.global_step == int(SETTINGS.get("fail_at", -1)):
                raise KeyError("mine")
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            print("expected steps:", self.trainer.estimated_stepping_batches)
            return torch.optim.SGD(self.parameters(), lr=0.1)


    class Mine(L.Trainer):
        def __init__(self, **arguments):
            super().__init__(max_epochs=int(SETTINGS.get("epochs", 2)), **arguments)


    def data():
        x = torch.linspace(-1, 1, 128).reshape(32, 4)
        x[21] = float(SETTINGS.get("value", 0))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


    def fit():
        trainer = Mine(
            accelerator=SETTINGS.get("accelerator", "cpu"), devices=int(SETTINGS.get("devices", 1)),
            strategy=SETTINGS.get("strategy", "auto"), precision=SETTINGS.get("precision", "32-true"), logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        L.seed_everything(1)
        module = Line()
        trainer.fit(module, data())
        return trainer, module


    if __name__ == "__main__":
        trainer, module = fit()
        if trainer.is_global_zero:
            torch.save([module.state_dict(), trainer.global_step, torch.rand(1)], "done.pt")
"""
SUMMARY = re.compile(
    r"doctor: no problem found\. Watched losses, gradients, weights and data in (\d+) optimizer steps of 1 fit"
    r" \((.+)\): (.*skipped), \d+% of the time waited for data\.\n"
)


@pytest.fixture
def doctor(tmp_path, monkeypatch, capfd):
    """Run ``trainer doctor`` in this process, in the folder of the program ``train.py``. Returns status and output."""
    write(tmp_path, {"train.py": PROGRAM})
    monkeypatch.chdir(tmp_path)
    for owner, name in ((sys, "argv"), (sys, "path"), (sys, "meta_path")):
        monkeypatch.setattr(owner, name, list(getattr(owner, name)))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    handler = signal.getsignal(signal.SIGPIPE)

    def run(*words):
        with logging_restored():
            status = main(["doctor", *words])
        return status, *capfd.readouterr()

    yield run
    signal.signal(signal.SIGPIPE, handler)


# --- a program without a problem ------------------------------------------------------------------------------------


@pytest.mark.representative
def test_program_runs_as_python_runs_it(tmp_path, python):
    shown = "number: int = value\nprint(__name__, __file__, __spec__ and __spec__.name, sys.argv, sys.path[0])\n"
    shown += "print(sys.modules['__main__'].number, __annotations__)"
    files = {
        "package/__init__.py": "", "package/other.py": "value = 7",
        "package/relative.py": f"import sys\nfrom .other import value\n{shown}",
        "package/script.py": f"import sys\nfrom other import value\n{shown}",
    }  # fmt: skip
    write(tmp_path, files)
    for program in ((str(tmp_path / "package/script.py"),), ("-m", "package.relative")):
        plain = python.run(*program, "--help", "a=b", cwd=tmp_path)
        done = python.trainer("doctor", *program, "--help", "a=b", cwd=tmp_path)
        assert done.stdout.startswith(plain.stdout)
        assert done.stdout.removeprefix(plain.stdout).startswith("doctor: nothing was watched")
        assert (plain.returncode, done.returncode) == (0, NOTHING_FOUND)


@pytest.mark.filterwarnings("ignore")
def test_results_are_those_of_lightning_and_the_output_has_one_more_line(doctor, monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["train.py"])
    runpy.run_path("train.py", run_name="__main__")
    weights, steps, drawn = torch.load("done.pt")
    assert capfd.readouterr().out == "expected steps: 16\n"
    status, out, _ = doctor("train.py")
    assert SUMMARY.fullmatch(out.removeprefix("expected steps: 16\n")).groups() == ("16", "32-true", "0 skipped")
    assert_identical(torch.load("done.pt"), [weights, steps, drawn])
    assert (status, steps) == (NOTHING_FOUND, 16)
    assert pl.Trainer.__module__ == "lightning.pytorch.trainer.trainer"


def test_fit_that_is_not_watched_is_not_reported_as_good(doctor):
    write(Path(), {"train.py": PROGRAM.replace("logger=False,", "barebones=True,")})
    assert "\ndoctor: nothing was watched" in doctor("train.py", "value=nan")[1]


def test_limits_keep_the_length_that_schedules_expect(doctor):
    program = ("train.py", "accelerator=gpu", "devices=4", "precision=16-mixed")
    status, out, _ = doctor("--max-steps", "3", "--accelerator", "cpu", *program)
    assert (status, torch.load("done.pt")[1]) == (NOTHING_FOUND, 3)
    steps, precision, facts = SUMMARY.fullmatch(out.removeprefix("expected steps: 16\n")).groups()
    assert (steps, precision) == ("3", "16-mixed")
    scales, skipped = re.fullmatch(r"loss scale (\d+) to 65536, (\d) skipped", facts).groups()
    assert int(scales) * 2 ** int(skipped) == 65536
    status, out, _ = doctor("--max-time", "0:01", "train.py", "epochs=-1")
    assert (status, SUMMARY.search(out) is not None) == (NOTHING_FOUND, True)


# --- a program with a problem ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_program_ends_at_the_first_verdict(doctor, precision):
    status, out, err = doctor("train.py", "value=nan", f"precision={precision}")
    facts = json.loads(Path("doctor.json").read_text())
    assert (status, facts["verdict"], facts["samples"]) == (NO_PATCH, "data", {"batch[0]": [1], "batch[1]": [1]})
    assert out.count("Verdict: ") == 1
    assert "Traceback" not in out + err
    assert not Path("done.pt").exists()
    status, out, _ = doctor("--continue", "train.py", "value=nan", f"precision={precision}")
    assert (status, out.count("Verdict: "), Path("done.pt").exists()) == (NO_PATCH, 1, True)


def change_rate(rate):
    """Write another learning rate into the program, and return its text."""
    program = Path("train.py").read_text().replace("lr=0.1", f"lr={rate}")
    Path("train.py").write_text(program)
    return program


def test_patch_is_applied_to_unchanged_files_only(doctor):
    program, wrong = Path("train.py"), change_rate(20.0)
    assert doctor("--apply") == (USAGE, "", ANY)
    status, out, _ = doctor("train.py", "epochs=4")
    facts = json.loads(Path("doctor.json").read_text())
    assert (status, facts["verdict"]) == (PATCH, "divergence")
    assert "\n  Patch: git apply doctor.patch." in out
    assert program.read_text() == wrong
    rate = re.search(r"\+ .+ lr=([\d.]+)\)\n", Path("doctor.patch").read_text())[1]
    patched = wrong.replace("lr=20.0", f"lr={rate}")
    program.write_text(f"{wrong}\n")
    status, _, err = doctor("--apply")
    assert (status, "train.py has changed since the patch was written" in err) == (USAGE, True)
    program.write_text(wrong)
    assert doctor("--apply") == (PATCH, "doctor: the patch was applied to train.py.\n", "")
    assert program.read_text() == patched
    assert doctor("train.py", "epochs=4")[0] == NOTHING_FOUND
    program.write_text(wrong)
    assert doctor("--apply", "train.py", "epochs=4")[0] == PATCH
    assert program.read_text() == patched


def test_untried_remedy_is_no_patch(doctor, monkeypatch):
    change_rate(20.0)

    def try_nothing(run, case, report):
        report.tried = ""

    monkeypatch.setattr("trainer.cli.doctor_session.try_steps", try_nothing)
    status, out, _ = doctor("train.py", "epochs=4")
    assert (status, "Remedy: a lower learning rate, lr=" in out, Path("doctor.patch").exists()) == (
        NO_PATCH,
        True,
        False,
    )
    status, out, err = doctor("--apply")
    assert (status, "has no patch, but this remedy: a lower learning rate, lr=" in err) == (USAGE, True)


def test_error_of_the_program(doctor, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # another test may have joined a process group
    status, out, err = doctor("train.py", "fail_at=3")
    assert (status, out) == (FAILED, "expected steps: 16\n")
    assert re.search(r'Traceback \(most recent call last\):\n  File ".+train.py", line \d+, in <module>', err)
    assert err.endswith("KeyError: 'mine'\n")
    Path("ends.py").write_text("import sys\nsys.exit('no data')")
    assert doctor("ends.py") == (FAILED, "", "no data\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-step", "3", "train.py"], "unrecognized arguments: --max-step"),
        (["--max-steps", "0", "train.py"], "got '0', expected a positive number"),
        (["--max-time", "5m", "train.py"], "got '5m', expected seconds, MM:SS, HH:MM:SS or DD:HH:MM:SS"),
        (["trian.py"], "Got the program trian.py, expected a file, or -m MODULE"),
        (["own/train.py"], "own/trainer.py has the name of this package"),
        (["train.py", "precision=8-true"], "precision='8-true'"),
    ],
)
def test_wrong_command_line_or_unsupported_argument(doctor, words, message):
    write(Path(), {"own/train.py": PROGRAM, "own/trainer.py": ""})
    status, out, err = doctor(*words)
    assert (status, out) == (USAGE, "")
    assert message in err


# --- launchers and other entry points -------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_processes_of_a_launcher_end_with_one_report(tmp_path, python, strategy):
    write(tmp_path, {"package/__init__.py": "", "package/train.py": PROGRAM})
    program = ("-m", "package.train", "devices=2", f"strategy={strategy}", "precision=16-mixed")
    done = python.trainer("doctor", *program, cwd=tmp_path)
    assert (done.returncode, len(SUMMARY.findall(done.stdout))) == (NOTHING_FOUND, 1), done.stderr
    done = python.trainer("doctor", *program, "value=nan", cwd=tmp_path)
    assert (done.returncode, done.stdout.count("Verdict: ")) == (NO_PATCH, 1), done.stderr
    assert json.loads((tmp_path / "doctor.json").read_text())["rank"] == 1


@pytest.mark.usefixtures("spawn_is_warm")
def test_spawned_processes_have_the_subclass_of_the_program(doctor):
    program = ("train.py", "devices=2", "strategy=ddp_spawn", "precision=16-mixed")
    status, out, _ = doctor(*program)
    assert (status, len(SUMMARY.findall(out))) == (NOTHING_FOUND, 1)
    status, out, _ = doctor(*program, "value=nan")
    assert (status, out.count("Verdict: "), Path("doctor.json").exists()) == (NO_PATCH, 1, True)


CLI = """
    import pytorch_lightning as pl
    from pytorch_lightning.cli import LightningCLI
    from train import Line, data


    class Module(Line):
        train_dataloader = staticmethod(data)


    cli = LightningCLI(Module, save_config_callback=None)
    print(isinstance(cli.trainer, pl.Trainer), cli.trainer.global_step)
"""


def test_lightning_cli_with_the_other_name_of_the_package(tmp_path, python):
    write(tmp_path, {"train.py": PROGRAM.replace("sys.argv[1:]", "()"), "cli.py": CLI})
    words = ("fit", "--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.logger=false")
    done = python.trainer("doctor", "cli.py", *words, "--trainer.enable_checkpointing=false", cwd=tmp_path)
    assert done.returncode == NOTHING_FOUND, done.stderr
    assert "True 8\ndoctor: no problem found." in done.stdout
