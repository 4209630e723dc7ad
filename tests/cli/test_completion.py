"""What a shell is told: candidates for the last word, and the scripts in the shells that are here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import write
from trainer.cli import main
from trainer.cli.arguments import COMMANDS
from trainer.cli.completion import candidates


def texts(*words: str) -> list[str]:
    return [text for text, _ in candidates(list(words))]


def test_commands_and_flags(project):
    assert texts("") == [f"{name} " for name in sorted(COMMANDS)]
    assert texts("val") == ["validate "]
    assert texts("fit", "--de") == ["--debug "]
    assert texts("fit", "--cfg", "") == ["all ", "hydra ", "job "]
    assert texts("recipes", "co") == ["copy "]
    assert texts("recipes", "copy", "lin") == ["line "]
    assert texts("tune", "") == ["batch_size ", "lr "]
    assert texts("completion", "") == ["bash ", "fish ", "zsh "]


def test_groups_and_options(project):
    assert texts("fit", "+") == ["+debug=", "+recipe=", "+sweep="]
    assert {"+recipe=", "data=", "callbacks.", "trainer.", "seed=", "ckpt="} <= set(texts("fit", ""))
    assert texts("fit", "+recipe=li") == ["+recipe=line "]
    assert texts("fit", "precision=16-mixed,b") == ["precision=16-mixed,bf16-mixed ", "precision=16-mixed,bf16-true "]
    assert texts("fit", "optimizer=adam") == ["optimizer=adam ", "optimizer=adamw "]
    assert texts("fit", "~sched") == ["~scheduler "]


def test_options_say_what_they_are(project):
    assert ("+recipe=line ", "A straight line through sixteen points.") in candidates(["fit", "+recipe="])


def test_keys_are_those_of_the_recipe_and_of_the_options_before(project):
    assert texts("fit", "+recipe=line", "model.") == [
        "model._target_=",
        "model.fail_at=",
        "model.optimizer=",
        "model.start=",
    ]
    assert texts("fit", "+recipe=line", "data.b") == ["data.batch_size="]
    assert "optimizer.nesterov=" in texts("fit", "+recipe=line", "optimizer.")  # sgd
    assert texts("fit", "+recipe=line", "optimizer=adam", "optimizer.b") == ["optimizer.betas="]
    assert texts("fit", "precision=16-mixed,32", "precision.init") == ["precision.init_scale="]
    assert texts("fit", "callbacks.sc") == ["callbacks.scale_monitor."]
    assert texts("fit", "callbacks=early_stopping", "callbacks.early_stopping.pat") == [
        "callbacks.early_stopping.patience="
    ]
    assert ("trainer.max_epochs=", "epochs to train; -1 for no end") in candidates(["fit", "trainer.max_e"])


def test_values(project):
    assert texts("fit", "+recipe=line", "optimizer.nesterov=") == [
        "optimizer.nesterov=false ",
        "optimizer.nesterov=true ",
    ]
    assert texts("fit", "trainer.accelerator=c") == ["trainer.accelerator=cpu ", "trainer.accelerator=cuda "]
    assert texts("fit", "seed=") == []


def test_files_of_checkpoints(project):
    write(project, {"outputs/line/then/checkpoints/epoch=1-step=8.ckpt": "", "outputs/line/then/fit.log": ""})
    assert texts("test", "ckpt=out") == ["ckpt=outputs/"]
    assert texts("test", "ckpt=outputs/line/then/") == ["ckpt=outputs/line/then/checkpoints/"]
    then = "ckpt_path=outputs/line/then/checkpoints/"
    assert texts("test", f"{then}e") == [f"{then}epoch=1-step=8.ckpt "]


def test_a_config_that_is_no_yaml_does_not_get_in_the_way(project):
    write(project, {"conf/recipe/broken.yaml": "a: ["})
    assert texts("fit", "+recipe=broken", "seed") == ["seed="]


def test_nothing_heavy_is_imported(project):
    code = "import sys; from trainer.cli import main; main(['_complete', 'fish', 'fit', '+recipe=line', 'model.st'])"
    code += "; print([name for name in ('torch', 'hydra', 'omegaconf', 'rich') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "model.start=\n[]\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["completion"], "completion needs the name of a shell (bash, zsh, fish)"),
        (["completion", "bsh"], "There is no completion for 'bsh'. Did you mean 'bash'?"),
    ],
)
def test_mistakes(argv, message, capsys):
    assert main(argv) == 2
    assert message in capsys.readouterr().err


LINES = [
    ("trainer f", ["fit"]),
    ("trainer fit +recipe=li", ["+recipe=line"]),
    ("trainer fit precision=16-mixed,32", ["precision=16-mixed,32-true"]),
    ("trainer fit +recipe=line model.st", ["model.start="]),
    ("trainer fit --q", ["--quiet"]),
]

# What each shell does with a line; it prints the candidates.
ASK = {
    "bash": """
        source <(trainer completion bash)
        COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}; COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
        COMP_WORDS=(trainer)
        _trainer_complete
        printf '%s\\n' "${COMPREPLY[@]}"
    """,
    "zsh": """
        compdef() { : }
        compadd() { while [[ $1 != -- ]]; do shift; done; shift; print -l -- "$@" }
        source <(trainer completion zsh)
        words=(${(z)1}); CURRENT=${#words}
        _trainer_complete
    """,
    "fish": """
        trainer completion fish | source
        complete -C $argv[1] | string split -f 1 \\t
    """,
}


@pytest.mark.parametrize("shell", list(ASK))
def test_the_script_in_the_shell(shell, project, monkeypatch):
    found = shutil.which(shell)
    if found is None or sys.platform == "win32":
        pytest.skip(f"there is no {shell} here")
    program = project / "bin" / "trainer"
    write(project, {"bin/trainer": f'#!/bin/sh\nexec "{sys.executable}" -m trainer "$@"\n', "ask": ASK[shell]})
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{Path('/usr/bin')}:/bin")
    monkeypatch.setenv("HOME", str(project))
    for line, expected in LINES:
        done = subprocess.run([found, "ask", line], capture_output=True, text=True, check=False, timeout=60)
        assert done.stderr == ""
        got = [one.strip() for one in done.stdout.splitlines()]
        if shell == "bash":  # which completes what is behind the =
            expected = [one if one.endswith("=") else one.rpartition("=")[2] for one in expected]
        assert got == expected, line
