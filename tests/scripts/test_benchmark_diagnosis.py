"""Every remedy of `scripts/benchmark_diagnosis` is executed as printed, and the program then learns."""

import ast
import linecache
import math
import re
import textwrap
from pathlib import Path

import pytest
from _diagnosis import doctor, frameworks
from _diagnosis.bench import learns
from _diagnosis.programs import PROGRAMS
from _diagnosis.remedy import execute

SCRIPTS = Path(__file__).parents[2] / "scripts"
REPRESENTATIVES = (
    "NanSample16", "EmptyMask16", "UnscaledAttention", "TwoLosses", "TinyLoss", "BrokenFile16", "RateTooHigh16",
)  # fmt: skip


def marks_of(name):
    return pytest.mark.whole if name in REPRESENTATIVES else pytest.mark.nightly


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=marks_of(name)) for name, program in PROGRAMS.items() if program.verdict != "healthy"],
)
def test_a_program_learns_with_the_remedy_of_its_report(name):
    execution = execute(PROGRAMS[name])
    assert execution.is_cured, execution


@pytest.mark.whole
def test_a_remedy_for_code_in_a_notebook(capsys, monkeypatch):
    cell = textwrap.dedent("""
        import torch
        from tests.support import Regression, loader_of, make_trainer

        class Masked(Regression):
            def training_step(self, batch, batch_idx):
                x, y, mask = batch
                losses = (self.net(x) - y).pow(2).mean(dim=1)
                loss = (losses * mask).sum() / mask.sum()
                self.losses.append(loss.item())
                return loss

        draw = torch.Generator().manual_seed(0)
        batches = [[torch.randn(8, 4, generator=draw), torch.ones(8, 2), torch.ones(8) * (i != 5)] for i in range(12)]
        module = Masked(torch.nn.Linear(4, 2))
        module.losses = []
        make_trainer(None, precision="16-mixed", max_epochs=4).fit(module, loader_of(batches))
    """)

    def run_cell(text, number):
        name = f"/tmp/ipykernel_1/{number}.py"  # as a notebook names the code of a cell
        monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
        space = {"__name__": "cell"}
        exec(compile(text, name, "exec"), space)
        return space["module"].losses

    assert not all(map(math.isfinite, run_cell(cell, 1)))
    printed = "".join(capsys.readouterr())
    found = re.search(r"Remedy: in line (\d+) of the cell write: (.+?)  \[tried", printed)
    assert found is not None, printed
    lines = cell.splitlines()
    lines[int(found[1]) - 1] = textwrap.indent(found[2], " " * 8)
    assert learns(run_cell("\n".join(lines), 2))


def test_frameworks_count_skipped_steps_and_losses_that_are_not_finite():
    outcome = frameworks.run_in("PyTorch", PROGRAMS["NanSample16"])
    assert frameworks.course(outcome, outcome) == "completes; 6 losses nan; 6 of 72 steps skipped"
    assert outcome.is_finite


def test_frameworks_leave_out_messages_of_healthy_programs():
    ordinary = frameworks.Outcome(lines=["epoch 0 step 10 loss 0.5"])
    broken = frameworks.Outcome(lines=["epoch 1 step 20 loss nan", "UserWarning: division"], losses=[0.5, math.nan])
    assert frameworks.messages(broken, ordinary) == ["UserWarning: division"]
    assert frameworks.report(broken, ordinary) == "`UserWarning: division`"


@pytest.mark.whole
def test_scripts_of_the_programs_are_complete():
    ours = {name: one for name, one in PROGRAMS.items() if one.__module__.startswith("_diagnosis.")}  # not other tests'
    for name, program in ours.items():
        script = doctor.script_of(program)
        defined = {node.name for node in ast.parse(script).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        assert {name, *(kind.__name__ for kind in program.mro() if "_diagnosis" in kind.__module__)} <= defined
        compile(script, name, "exec")


@pytest.mark.parametrize(
    ("old", "new", "worse"),
    [
        ([1.0, 0.5, math.nan], [1.0, 0.5, 0.4], False),
        ([1.0, 0.5, math.nan], [1.0, math.nan], True),
        ([1.0, 0.5, math.nan], [1.0, 0.9, 0.9], True),
        ([math.nan], [2.0, 3.0], False),
    ],
)
def test_a_patch_that_makes_a_program_worse(old, new, worse):
    entry = doctor.Entry("NanSample16", doctor.Run(3, "", old, {}), True, doctor.Run(0, "", new, {}))
    assert entry.is_worse == worse


@pytest.mark.parametrize(
    ("verdict", "text", "named"),
    [
        ("data", "IndexError: Target 4 is out of bounds.", True),
        ("data", "input[0] has nans\noutput has nans\n", True),
        ("data", "output has nans\n", False),
        ("weights", "weight has nans\noutput has nans\n", True),
        ("weights", "input[0] has nans\n", False),
        ("model", 'File "train.py", line 7, in training_step\n    x / 0\n', True),
        ("model", 'File "train.py", line 9, in training_step\n    x / 0\n', False),
        ("forward", "output has nans\n   metadata\n    net.1 Norm\n1.0 2.0 input[0]\n", True),
        ("forward", "output has nans\n   metadata\n    net.2 Norm\n1.0 2.0 input[0]\n", False),
        ("divergence", "RuntimeError: Function 'MulBackward0' returned nan values", False),
    ],
)
def test_tools_name_the_cause_or_the_place(verdict, text, named):
    found = {"place": {"line": 8, "module": "net.1"}, "patch": {"line": "in train.py:7 write: x / 1"}}
    assert doctor._is_named(verdict, found, text) == named
