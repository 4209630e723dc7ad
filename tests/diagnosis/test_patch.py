"""Remedies as patches of a program's files."""

import hashlib
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.callbacks import OverflowReport
from trainer.diagnosis import remedies
from trainer.diagnosis.patch import CallSites, call_site, make_patch, try_steps
from trainer.diagnosis.remedies import Setting, other_precision
from trainer.diagnosis.rewrite import Removal, propose
from trainer.diagnosis.trace import Origin
from trainer.precision import MixedPrecision

BF16 = other_precision("bf16-mixed")
FP32_MODULES = remedies.precision(MixedPrecision("float16"), fp32_modules=("net.1",))
MIXED = "MixedPrecision('float16', fp32_modules=['net.1'])"
OUR_IMPORTS = "from trainer import Trainer\nfrom trainer.precision import MixedPrecision\n"
PARAMETERS = "import torch\n\nparameters = [torch.zeros(1, requires_grad=True)]\n"
MODEL = PARAMETERS + "class Model:\n    def __init__(self, lr=0.5):\n        self.rate = lr\n"
HELPER = "def create(rate):\n    return torch.optim.SGD(parameters, lr=rate)\n"


def lr(value=0.1, old=0.5):
    return Setting("optimizer", "lr", value, f"{value}", old, f"lr={value}")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a function that runs files as a program, and returns the patch of a remedy for them."""
    sites = CallSites()

    class Trainer:
        def __init__(self, **arguments):
            sites.trainers.append(call_site())

    def init(optimizer, *arguments, **options):
        sites.optimizers.append(call_site())
        own(optimizer, *arguments, **options)

    own = torch.optim.Optimizer.__init__
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", init)
    monkeypatch.setattr(L, "Trainer", Trainer)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def run(*changes, figures=(), tried="the batch is finite with it", **files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
            monkeypatch.delitem(sys.modules, name, raising=False)
        runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")
        report = SimpleNamespace(changes=changes, figures=dict(figures), tried=tried)
        return make_patch(report, sites, tmp_path)

    return run


def applied(folder, patch, *, command=("git", "apply")):
    """Apply a patch, and return the changed lines of ``train.py``."""
    before = (folder / "train.py").read_text().splitlines()
    (folder / "doctor.patch").write_text(patch.text)
    with open(folder / "doctor.patch") as file:
        subprocess.run(command, cwd=folder, stdin=file, check=True)
    return [line for line in (folder / "train.py").read_text().splitlines() if line not in before]


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("torch.optim.SGD(parameters, lr=0.5)", "torch.optim.SGD(parameters, lr=0.1)"),
        ("torch.optim.SGD(parameters, 0.5)", "torch.optim.SGD(parameters, 0.1)"),
        ("rate = 0.5\ntorch.optim.SGD(parameters, lr=rate)", "rate = 0.1"),
        (HELPER + "create(rate=0.5)", "create(rate=0.1)"),
        (HELPER + "config = {'rate': 0.5}\ncreate(**config)", "config = {'rate': 0.1}"),
        (MODEL + "torch.optim.SGD(parameters, lr=Model().rate)", "    def __init__(self, lr=0.1):"),
        (MODEL + "torch.optim.SGD(parameters, lr=Model(lr=5e-1).rate)", None),
        ("options = {'lr': 0.5}\ntorch.optim.SGD(parameters, **options)", "options = {'lr': 0.1}"),
        ("from functools import partial\nmake = partial(torch.optim.SGD, lr=0.5)\nmake(parameters)",
         "make = partial(torch.optim.SGD, lr=0.1)"),
        ("import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--a-lr', default=0.5)\n"
         "torch.optim.SGD(parameters, lr=parser.parse_args([]).a_lr)", "parser.add_argument('--a-lr', default=0.1)"),
        ("torch.optim.SGD(parameters, lr=0.25 * 2)", None),
    ],
)  # fmt: skip
def test_a_rate_is_changed_where_it_is_a_literal(program, tmp_path, source, changed):
    patch = program(lr(), train=f"{PARAMETERS}{source}\n")
    assert "pass lr=0.1 to the optimizer" in patch.line
    if changed is None:
        assert (patch.text, patch.digests) == ("", {})
        assert patch.note.startswith("No patch was written, because ")
    else:
        assert applied(tmp_path, patch) == [changed]


def test_the_literal_may_be_in_a_module_of_the_program(program, tmp_path):
    files = {
        "settings": "RATE = 0.5\n",
        "train": f"{PARAMETERS}from settings import RATE\ntorch.optim.SGD(parameters, RATE)\n",
    }
    patch = program(lr(), **files)
    assert applied(tmp_path, patch) == []
    assert (tmp_path / "settings.py").read_text() == "RATE = 0.1\n"
    assert patch.digests == {"settings.py": hashlib.sha256(b"RATE = 0.5\n").hexdigest()}


def test_an_argument_that_is_not_given_is_added(program, tmp_path):
    setting = Setting("optimizer", "eps", 1e-8, "1e-08", 0.0, "")
    patch = program(setting, train=f"{PARAMETERS}torch.optim.Adam(\n    parameters,  # all\n    lr=0.5,\n)\n")
    assert applied(tmp_path, patch) == ["    lr=0.5, eps=1e-08,"]


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("import lightning as L\nL.Trainer(max_epochs=2, precision='16-mixed')",
         ["L.Trainer(max_epochs=2, precision='bf16-mixed')"]),
        ("import lightning as L\nL.Trainer()", ["L.Trainer(precision='bf16-mixed')"]),
        ("from lightning import Trainer\nPRECISION = 16\nTrainer(precision=PRECISION)", ["PRECISION = 'bf16-mixed'"]),
    ],
)  # fmt: skip
def test_a_precision_is_changed(program, tmp_path, source, changed):
    assert applied(tmp_path, program(BF16, train=f"{source}\n")) == changed


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import lightning as L\nimport torch\nL.Trainer(precision=16)",
         f"import lightning as L\n{OUR_IMPORTS}import torch\nTrainer(precision={MIXED})"),
        ("def main():\n    from lightning import Trainer\n    Trainer(max_epochs=2)\nmain()",
         "def main():\n    from lightning import Trainer\n    from trainer import Trainer\n"
         f"    from trainer.precision import MixedPrecision\n    Trainer(max_epochs=2, precision={MIXED})\nmain()"),
        ("import lightning.pytorch as pl\npl.Trainer(plugins=['MixedPrecision(1)'], max_epochs=1)",
         f"import lightning.pytorch as pl\n{OUR_IMPORTS}Trainer(precision={MIXED}, max_epochs=1)"),
        ("from lightning import Trainer as T\nT(max_epochs=2)", None),
    ],
)  # fmt: skip
def test_fp32_modules_change_the_import_of_the_trainer(program, tmp_path, monkeypatch, source, expected):
    monkeypatch.setattr(sys.modules["lightning.pytorch"], "Trainer", L.Trainer)
    patch = program(FP32_MODULES, train=f"{source}\n")
    if expected is None:
        assert (patch.text, patch.note) == ("", "No patch was written, because T in train.py:2 is not Lightning's.")
    else:
        applied(tmp_path, patch)
        assert (tmp_path / "train.py").read_text() == f"{expected}\n"
        assert patch.note.startswith("Lightning's Trainer does not have this precision")


CODE = """\
import torch


def loss(x, mask):
    with torch.autocast("cpu", torch.float16):
        # the mean
        text = '''
        over the mask'''
        x = x / mask.sum()  # may be empty
    return x"""


@pytest.mark.parametrize("command", [("git", "apply"), ("patch", "-p1")])
def test_new_code_replaces_only_its_statement(program, tmp_path, command):
    (tmp_path / "train.py").write_text(CODE)
    change, *_ = propose(Origin("div", "forward", "", "", file=str(tmp_path / "train.py"), line=9))
    patch = program(change, train=CODE)
    assert patch.line == "in train.py:9 write: x = x / mask.sum().clamp(min=1e-06)"
    assert applied(tmp_path, patch, command=command) == ["        x = x / mask.sum().clamp(min=1e-06)  # may be empty"]
    assert not (tmp_path / "train.py").read_text().endswith("\n")


@pytest.mark.parametrize(
    ("context", "remaining"),
    [
        ('torch.autocast("cpu", torch.float16)', None),
        ('torch.no_grad(), torch.autocast("cpu", torch.float16)', "    with torch.no_grad():"),
    ],
)
def test_autocast_is_removed_but_not_its_body(program, tmp_path, context, remaining):
    old = CODE.replace('torch.autocast("cpu", torch.float16)', context)
    removal = Removal(str(tmp_path / "train.py"), 5)
    applied(tmp_path, program(removal, train=old))
    lines = CODE.splitlines()
    body = ["    # the mean", "    text = '''", "        over the mask'''", "    x = x / mask.sum()  # may be empty"]
    expected = [*lines[:4], *body, lines[-1]] if remaining is None else [*lines[:4], remaining, *lines[5:]]
    assert (tmp_path / "train.py").read_text().splitlines() == expected


def test_installed_packages_and_changes_that_do_not_help_get_no_patch(program, tmp_path):
    outside = Removal(nn.__file__, 5)
    patch = program(outside, train="")
    assert (patch.text, patch.line) == ("", "remove torch.autocast in __init__.py:5")
    reason = f"{Path(nn.__file__).resolve()} is not a Python file of the program's folder"
    assert patch.note == f"No patch was written, because {reason}."
    patch = program(lr(), figures={"steps": (1.0, 1.2)}, train=f"{PARAMETERS}torch.optim.SGD(parameters, lr=0.5)\n")
    assert patch.text == ""
    assert patch.note == "No patch was written, because the loss goes from 1 to 1.2 in a few steps with it."
    patch = program(lr(), tried="", train=f"{PARAMETERS}torch.optim.SGD(parameters, lr=0.5)\n")
    assert (patch.text, patch.note) == ("", "No patch was written, because the change could not be tried.")


class Masked(Regression):
    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        mask = torch.ones(len(x)) * (batch_idx != 2)
        return ((self.net(x) - y).pow(2).mean(dim=1) * mask).sum() / mask.sum()


def tried(folder, module, change=None, **arguments):
    """Train until the first verdict. Return the result of trying its remedy, or ``change``, on a few steps."""
    found = []

    def on_verdict(run, case, report):
        before = [parameter.detach().clone() for parameter in module.parameters()]  # not finite any more
        report.changes = report.changes if change is None else (change,)
        try_steps(run, case, report)
        torch.testing.assert_close(before, [*module.parameters()], rtol=0, atol=0, equal_nan=True)
        found.append(report)

    trainer = make_trainer(folder, max_epochs=2, log_every_n_steps=1, **arguments)
    next(one for one in trainer.callbacks if isinstance(one, OverflowReport)).on_verdict = on_verdict
    trainer.fit(module, loader_of(make_batches(4)))
    return found[0]


def test_steps_are_tried_with_the_remedy(tmp_path):
    report = tried(tmp_path, Masked())
    assert "mask.sum().clamp(min=1e-06)" in str(report.changes[0])
    before, after = report.figures["steps"]
    assert 0 < after < before


def test_steps_with_a_rate_that_does_not_help(tmp_path):
    report = tried(tmp_path, Masked(), lr(1e6))
    assert report.figures["steps"][1] == float("inf")
