"""Every command that the program prints runs as it is printed; every printed path exists."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from tests.cli.conftest import write
from trainer.cli import main
from trainer.cli.checks import LoadedBatch, Recipe
from trainer.cli.checks.first_look import bottleneck
from trainer.cli.config_checks import validate
from trainer.cli.folders import PACKAGE
from trainer.cli.parsing import read

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.whole]

LINE = ["+recipe=line", "callbacks.learning_rate_monitor=null"]
STOPPED = ["model=stopped", "model.number=2", "model.receivers=[self]"]
SHORT = ["tune.max_batch_size=4", "tune.steps_per_try=2", "precision=32"]  # one attempt
OTHERS = {
    "others.py": """
        import line_fit


        class Masked(line_fit.Line):
            '''Its memory cannot be predicted.'''

            def training_step(self, batch, batch_idx):
                return self.loss(batch) * float(batch[0].detach().numpy().any())

    """,
    "conf/model/masked.yaml": "_target_: others.Masked\noptimizer: ${optimizer}\n",
}
FAR = {"far/recipe/far.yaml": "# @package _global_\ndefaults: [line]\n"}
PLACEHOLDERS = {
    "+recipe=NAME": "+recipe=line",
    "ckpt=RUN": "ckpt=run",
    "ckpt=RUN_FOLDER": "ckpt=run",
    "ckpt=outputs/resnet50/DATE_TIME": "ckpt=run",
    "RUN": "run",
    "FILE.safetensors": "weights.safetensors",
    "FOLDER": "sharded",
    "FILE": "one.ckpt",
}
"""Words that stand for the user's own files, with those of the test. All other words are used as they are printed."""


@dataclass
class Shell:
    """Runs commands in this process, and collects the printed ones."""

    capfd: pytest.CaptureFixture[str]
    trained: Path

    def run(self, *words):
        """Run a command; return its exit status and output, after all paths in the output were found to exist."""
        self.capfd.readouterr()
        status = main(words)
        printed = "".join(self.capfd.readouterr())
        for path in re.findall(
            r"(?<![\w.\[/])(?<!package's )(?:outputs|multirun|run|jobs|conf|/tmp)/[\w./=-]*[\w/-]", printed
        ):
            is_template = re.search(r"\b[A-Z]{3,}", path)
            assert status == 2 or Path(path).exists() or is_template, (path, printed)  # 2: it may be the mistake
        return status, printed

    def follow(self, command):
        """Run a printed command as it is printed."""
        assert command.startswith("python -m trainer ")
        status, printed = self.run(*(PLACEHOLDERS.get(word, word) for word in shlex.split(command)[3:]))
        assert status == 0, (command, printed)

    def check(self, command):
        """Check the settings of a printed command that would take long."""
        validate(read(shlex.split(command.removeprefix("python -m trainer "))))


@pytest.fixture
def shell(stopped, executable_is_warm, trained, capfd, monkeypatch):
    write(stopped, {**OTHERS, "stops": ""})
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield Shell(capfd, trained)
    sys.modules.pop("others", None)


def commands_in(text):
    """The commands in an output: in backticks, or to the end of a line."""
    quoted = re.findall(r"`(python -m trainer [^`]+)`", text)
    rest = re.sub(r"`[^`]*`", "", text)
    return [*quoted, *(one.rstrip(".;, ") for one in re.findall(r"python -m trainer .+", rest))]


# --- scenarios -----------------------------------------------------------------------------------------------------


def has_run(shell):
    """Write the files that stand for those of the user."""
    shutil.copytree(shell.trained, "run", dirs_exist_ok=True)
    shutil.copy("run/checkpoints/last.ckpt", "loose.ckpt")


def printed_by(*words, status=2, count=1):
    """Return a scenario that follows the commands that a command prints.

    Args:
        words: the command.
        status: its exit status; by default that of a mistake.
        count: number of printed commands.
    """

    def scenario(shell):
        has_run(shell)
        found, printed = shell.run(*words)
        commands = commands_in(printed)
        assert (found, len(commands)) == (status, count), printed
        for command in commands:
            shell.follow(command)

    return scenario


def no_model(shell):
    for words, count in ((["test", "seed=2"], 3), (["fit", "weights=run"], 2)):
        printed_by(*words, count=count)(shell)


def paths_with_special_characters(shell):
    """A space, and a comma, which separates the jobs of a sweep."""
    has_run(shell)
    shutil.copytree("run", "my run, 2")
    status, printed = shell.run("test", *LINE, "weights='my run, 2'")
    (command,) = commands_in(printed)
    assert (status, shlex.split(command)[-1]) == (2, "ckpt='my run, 2'")
    shell.follow(command)
    status, printed = shell.run("checks", "ckpt='my run, 2'")
    words = printed.partition("replace it by ")[2].rpartition(".")[0]
    assert (status, shlex.split(words)) == (2, ["+recipe=line", "weights='my run, 2'"])


def two_interruptions(shell):
    """The folder stays that of the first run for each start, and the recipe is in another folder."""
    shutil.copytree(shell.trained, "run")
    write(Path.cwd(), FAR)
    line = ["--config-dir", "far", "+recipe=far", *LINE[1:], "+name=at-${now:%f}", "hydra.run.dir=run dir"]
    for words, stops, steps in ((line, ["1", "3"], 8), (["ckpt=run", "trainer.max_epochs=4"], ["9"], 16)):
        Path("stops").write_text(" ".join(stops))
        before = set(Path().rglob("run.json"))
        command = shlex.join(["python", "-m", "trainer", "fit", *STOPPED, *words])
        for _ in stops:
            status, printed = shell.run(*shlex.split(command)[3:])
            assert status == 130, printed
            (command,) = [one.partition(": ")[2] for one in printed.splitlines() if one.startswith("To resume: ")]
        assert "hydra.run.dir=" in command
        (record,) = set(Path().rglob("run.json")) - before
        former = json.loads(record.read_text())["steps"]
        for resumes in (True, False):
            status, printed = shell.run(*shlex.split(command)[3:])
            assert (status, f", step {former}\n" in printed) == (0, resumes), printed
        assert '"status": "completed"' in record.read_text()
        assert f'"steps": {steps}' in record.read_text()


def continued(shell):
    two_interruptions(shell)
    Path("stops").write_text("3")
    Path("sweep").write_text(str(os.getpid()))
    stops = [*STOPPED[:2], "model.receivers=[self,sweep]"]
    status, printed = shell.run("fit", "-m", *LINE, *stops, "optimizer.lr=0.1,0.2")
    assert status == 130, printed
    (command,) = [one.partition(": ")[2] for one in printed.splitlines() if one.startswith("To resume: ")]
    assert "hydra.sweep.dir=" in command
    (log,) = Path("multirun").rglob("console.log")
    assert "To resume" not in log.read_text()  # the sweep prints the command for all jobs
    shell.follow(command)


def best_of_a_sweep(shell):
    """Its values depend on its number, its recipe is in another folder, and its folder has a space and a comma."""
    write(Path.cwd(), FAR)
    words = ["+recipe=far", *LINE[1:], "seed=${hydra:job.num}", "optimizer.lr=0.1,0.2", "hydra.sweep.dir='my jobs, 2'"]
    status, printed = shell.run("fit", "-m", "--config-dir", "far", *words)
    repeat, use = commands_in(printed)
    (best,) = [job for job in json.loads(Path("my jobs, 2/summary.json").read_text()) if job["best"]]
    shell.follow(f"{repeat} hydra.run.dir=again")
    status, printed = shell.run(*shlex.split(use)[3:])
    assert f"{best['best_score']:.6f}" in printed
    record = json.loads(Path("again/run.json").read_text())
    assert status == 0
    assert (record["metrics"], record["seed"]) == (best["metrics"], best["job"])


def compared(shell):
    assert shell.run("compare", *LINE, "optimizer.lr=0.1,0.2", "precision=32", "hydra.sweep.dir=jobs")[0] == 0
    (command,) = commands_in(Path("jobs/compare.md").read_text())
    shell.check(command)


def slow_step(shell):
    recipe = Recipe("line", {}, loaded=LoadedBatch(None, 0.0, 1e-6, 1, 0), words=["+recipe=line", *SHORT])
    (command,) = commands_in(bottleneck(recipe, recipe.loaded, 1.0, 0))
    shell.check(command)


def unpredictable(shell):
    _, printed = shell.run("checks", *LINE, "model=masked", *SHORT)
    commands = commands_in(" ".join(printed.split()))  # another if the step is the bottleneck
    assert commands
    for command in commands:
        shell.check(command)


def under_torchrun(shell):
    with mock.patch.dict("os.environ", TORCHELASTIC_RUN_ID="1"):
        status, printed = shell.run("fit", "-m", *LINE, "trainer.accelerator=cpu", "seed=1,2")
    (command,) = commands_in(printed)
    assert status == 2
    shell.check(command)


def helped(shell):
    status, printed = shell.run("test", "--help")
    assert (status, commands_in(printed)[0]) == (0, "python -m trainer fit --help")
    shell.follow("python -m trainer fit --help")


def first_screen(shell):
    has_run(shell)
    status, printed = shell.run("--help")
    begin = printed.partition("First steps:\n")[2].partition("\n\n")[0]
    commands = [line.strip().partition("  ")[0] for line in begin.splitlines()]
    assert (status, len(commands)) == (0, 4)
    limits = " trainer.limit_train_batches=1 trainer.limit_val_batches=1 trainer.max_epochs=1 data.batch_size=2"
    limits += " +model.net.width_per_group=1 data.image_size=16"
    for command in commands:
        shell.follow(command + (limits if " fit " in command else ""))


SCENARIOS = {
    "record/run_summary.py:_paths": printed_by("fit", *LINE, "hydra.run.dir=new", status=0),
    "cli/__init__.py:_dispatch": printed_by(*LINE),
    "cli/parsing.py:_read_flag": printed_by("fit", *LINE, "--lr", "1"),
    "cli/parsing.py:check_flags": printed_by("tune", "lr", *LINE, "--cfg", "job"),
    "cli/checks/first_look.py:bottleneck": slow_step,
    "cli/checks/memory.py:check_memory": unpredictable,
    "cli/compare.py:report": compared,
    "cli/export.py:convert": printed_by("consolidate"),
    "cli/doctor.py:error": printed_by("doctor", "--lr"),
    "cli/help.py:_first_screen": first_screen,
    "cli/help.py:help_text": helped,
    "cli/recipes.py:_find": printed_by("recipes", "lin"),
    "cli/recipes.py:copy": printed_by("recipes", "copy", "line", "mine", status=0),
    "cli/report/__init__.py:write_report": printed_by("report", "run", "line_fit.py/page.html"),
    "cli/report/selection.py:choose_subject": printed_by("report"),
    "cli/restore.py:apply": printed_by("test", "ckpt=loose.ckpt"),
    "cli/execution.py:_require_last_checkpoint": printed_by("test", *LINE, "ckpt_path=last"),
    "cli/sweep/__init__.py:_best": best_of_a_sweep,
    "cli/sweep/__init__.py:_use": best_of_a_sweep,
    "cli/tune/__init__.py:command": printed_by("tune", "batchsize", *LINE, *SHORT),
    "cli/config_checks.py:_check_model": no_model,
    "cli/config_checks.py:_check_start": paths_with_special_characters,
    "cli/workdir.py:claim": under_torchrun,
    "cli/workdir.py:resume_command": continued,
}
"""The function that prints a command, and a scenario that reaches it."""


def test_every_function_that_prints_a_command_has_a_scenario():
    found = {
        f"{file.relative_to(PACKAGE).as_posix()}:{function.name}"
        for file in PACKAGE.rglob("*.py")
        if "command_line(" in (text := file.read_text(encoding="utf-8"))
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef) and re.search(r"(?<!def )\bcommand_line\(", ast.unparse(function))
    }
    assert found == set(SCENARIOS)


@pytest.mark.parametrize("place", SCENARIOS)
def test_printed_commands_run(place, shell):
    SCENARIOS[place](shell)


def test_program_is_the_one_that_the_user_started(tmp_path):
    script = Path(sys.executable).with_name("trainer")
    environment = os.environ | {"PATH": str(tmp_path)}  # not found by its name
    done = subprocess.run([script, "fit", "--lr"], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 2
    assert f"`{script} fit --help`" in done.stderr
