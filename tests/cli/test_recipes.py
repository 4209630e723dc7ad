"""``trainer recipes``: the list, one of them with the meaning of every key, and a copy to edit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from tests.cli.conftest import write
from trainer.arguments import ARGUMENTS
from trainer.cli import main
from trainer.cli.arguments import Arguments, read
from trainer.cli.compose import Composer
from trainer.cli.folders import packaged_conf
from trainer.cli.keys import meanings
from trainer.cli.recipes import annotated
from trainer.cli.validate import validate
from trainer.record.run_record import load_run

RECIPES = [file.stem for file in sorted((packaged_conf() / "recipe").glob("*.yaml"))]
GROUPS = ("precision", "optimizer", "scheduler", "callbacks", "data", "logger", "trainer")


def without_meaning(words: list[str]) -> list[str]:
    """Return the lines of the composed config that have no comment."""
    composer = Composer(Arguments())
    config = OmegaConf.to_container(composer.compose(words), resolve=False)
    del config["hydra"]
    return [line for line in annotated(config, meanings(composer, words)[0]).splitlines() if " # " not in line]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_of_a_recipe_that_ships_has_a_meaning(recipe):
    assert without_meaning([f"+recipe={recipe}"]) == []


@pytest.mark.whole
@pytest.mark.parametrize("group", GROUPS)
def test_every_key_of_an_option_that_ships_has_a_meaning(group):
    for option in Composer(Arguments()).options(group):
        assert without_meaning([f"{group}={option}"]) == [], option


@pytest.fixture
def listed(project):
    write(
        project,
        {
            "conf/recipe/noted.yaml": """
            # @package _global_
            # A line with notes.
            #   python -m trainer fit +recipe=noted precision=16 data.batch_size=2
            # +recipe=noted.yaml and +recipe=noted-2 are others
            defaults: [line]
            data:
              batch_size: 2 # points, few
            trainer:
              limit_val_batches: 3 # enough
            model:
              start: "a # b"
              tips: {a: 1, b: [1, 2]} # flow
        """
        },
    )
    return project


def lines_of(capsys, *argv: str) -> list[str]:
    assert main(["recipes", *argv]) == 0
    return capsys.readouterr().out.splitlines()


def line_of(lines: list[str], start: str) -> list[str]:
    (found,) = [line for line in lines if line.strip().startswith(start)]
    return [part.strip() for part in found.rsplit("  # ", 1)]


def test_recipe_is_shown_composed_with_the_meaning_of_its_keys(listed, capsys):
    lines = lines_of(capsys, "noted", "optimizer.lr=0.3", "precision=16-mixed")
    assert lines[:2] == [
        "# A line with notes.",
        "#   python -m trainer fit +recipe=noted precision=16 data.batch_size=2",
    ]
    shown = yaml.safe_load("\n".join(lines))
    assert shown["data"] == {"_target_": "line_fit.Points", "batch_size": 2}
    assert shown["optimizer"]["lr"] == 0.3
    assert shown["model"]["start"] == "a # b"
    assert shown["model"]["tips"] == {"a": 1, "b": [1, 2]}
    assert shown["precision"]["init_scale"] == 65536.0
    assert "hydra" not in shown
    assert {"max_epochs", "limit_val_batches", "accelerator"} < set(shown["trainer"])
    assert "min_epochs" not in shown["trainer"]  # not set by anything
    assert line_of(lines, "lr:") == ["lr: 0.3", "learning rate"]
    assert line_of(lines, "limit_val_batches:")[1].endswith("0: no validation (enough)")
    assert line_of(lines, "start:") == ["start: 'a # b'"]
    assert line_of(lines, "tips:")[1] == "flow"
    assert line_of(lines, "optimizer: $") == ["optimizer: ${optimizer}", "the value of optimizer"]
    assert line_of(lines, "max_epochs:")[1] == ARGUMENTS["max_epochs"].meaning
    assert line_of(lines, "model_checkpoint:")[1].startswith("Keep the best checkpoint")


def test_copy_has_its_own_name_and_runs(listed, capsys):
    lines = lines_of(capsys, "copy", "noted", "mine")
    assert lines == [
        f"Wrote {Path('conf', 'recipe', 'mine.yaml')}, a copy of conf/recipe/noted.yaml. Edit it, then run:",
        "  python -m trainer fit +recipe=mine precision=16 data.batch_size=2",
    ]
    text = Path("conf/recipe/mine.yaml").read_text()
    assert "# +recipe=noted.yaml and +recipe=noted-2 are others" in text
    assert yaml.safe_load(text) == yaml.safe_load(Path("conf/recipe/noted.yaml").read_text())
    assert any(line.startswith("mine ") and "A line with notes." in line for line in lines_of(capsys))
    assert yaml.safe_load("\n".join(lines_of(capsys, "mine")))["data"]["batch_size"] == 2


def test_recipe_that_ships_is_copied_into_a_new_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines_of(capsys, "copy", "resnet50")
    ours = (packaged_conf() / "recipe" / "resnet50.yaml").read_text()
    assert Path("conf/recipe/resnet50.yaml").read_text() == ours
    assert main(["recipes", "copy", "resnet50"]) == 2
    assert " exists already." in capsys.readouterr().err


MISTAKES = [
    (["notted"], "There is no recipe 'notted'. Did you mean 'noted'?"),
    (["copy"], "recipes copy NAME [NEWNAME]"),
    (["copy", "notted"], "There is no recipe 'notted'."),
    (["copy", "noted", "../x"], "as the name of a recipe, expected"),
    (["copy", "noted", "line"], " exists already."),
    (["line", "noted"], "Got the recipes line and noted, expected one"),
    (["line", "optimizer=sdg"], "Did you mean 'sgd'?"),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES)
def test_mistakes(listed, capsys, argv, message):
    before = sorted(Path("conf/recipe").iterdir())
    assert main(["recipes", *argv]) == 2
    assert message in capsys.readouterr().err
    assert sorted(Path("conf/recipe").iterdir()) == before


def test_nothing_heavy_is_imported():
    code = "import sys; from trainer.cli import main; main(['recipes', 'resnet50']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.endswith("\nFalse\n")


@pytest.mark.whole
@pytest.mark.parametrize("name", ["nan", "001", "1e5", "true", "null", "Inf"])
def test_recipe_may_have_the_name_of_a_value(project, capsys, name):
    write(project, {f"conf/recipe/{name}.yaml": "# @package _global_\n# Odd.\ndefaults: [line]\n"})
    assert main(["recipes", name]) == 0
    assert capsys.readouterr().out.startswith("# Odd.\n")
    for words in (["fit", f"+recipe={name}"], ["fit", f"recipe={name}"]):
        assert validate(read(words)).hydra.runtime.choices["recipe"] == name
    arguments = read(["fit", "-m", f"recipe=line,{name}"])
    assert arguments.overrides == [f"+recipe=line,'{name}'"]
    assert validate(arguments).command == "fit"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["nan", "null"])
def test_run_of_such_a_recipe_is_tested(project, name):
    write(project, {f"conf/recipe/{name}.yaml": "# @package _global_\ndefaults: [line]\n"})
    assert main(["fit", f"+recipe={name}", "callbacks.learning_rate_monitor=null"]) == 0
    (folder,) = Path("outputs", name).iterdir()
    assert load_run(folder).recipe == name
    assert main(["test", f"ckpt={folder}"]) == 0


def test_value_that_is_not_an_option_keeps_its_meaning(project):
    words = ["seed=001", "data.batch_size=1e5", "+recipe=null", "model=null", "ckpt=null"]
    assert read(["fit", *words]).overrides == words
