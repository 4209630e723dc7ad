"""``trainer recipes``: the list, one of them with the meaning of every key, and a copy to edit."""

from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import write
from trainer.arguments import ARGUMENTS
from trainer.cli import main
from trainer.cli.folders import packaged_conf
from trainer.cli.parsing import read


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


def lines_of(capsys, *argv):
    assert main(["recipes", *argv]) == 0
    return capsys.readouterr().out.splitlines()


def line_of(lines, start):
    (found,) = [line for line in lines if line.strip().startswith(start)]
    return [part.strip() for part in found.rsplit("  # ", 1)]


def test_recipe_is_shown_composed_with_the_meaning_of_its_keys(listed, capsys):
    lines = lines_of(capsys, "noted", "optimizer.lr=0.3", "precision=16-mixed")
    assert lines[0] == "# A line with notes."
    assert lines[1] == "#   python -m trainer fit +recipe=noted precision=16 data.batch_size=2"
    shown = yaml.safe_load("\n".join(lines))
    assert shown["data"] == {"_target_": "line_fit.Points", "batch_size": 2}
    assert shown["optimizer"]["lr"] == 0.3
    assert (shown["model"]["start"], shown["model"]["tips"]) == ("a # b", {"a": 1, "b": [1, 2]})
    assert "hydra" not in shown
    assert "min_epochs" not in shown["trainer"]  # not set by anything
    assert line_of(lines, "lr:") == ["lr: 0.3", "learning rate"]
    assert line_of(lines, "limit_val_batches:")[1].endswith("0: none (enough)")
    assert line_of(lines, "start:") == ["start: 'a # b'"]
    assert line_of(lines, "tips:")[1] == "flow"
    assert line_of(lines, "optimizer: $") == ["optimizer: ${optimizer}", "the value of optimizer"]
    assert line_of(lines, "max_epochs:")[1] == ARGUMENTS["max_epochs"].meaning
    assert line_of(lines, "model_checkpoint:")[1].startswith("Keep last.ckpt")


def test_recipes_lists_all_recipes_with_a_line_each(project, capsys):
    lines = lines_of(capsys)
    summaries = dict(line.split(maxsplit=1) for line in lines)
    assert summaries["line"] == "A straight line through sixteen points."
    assert summaries["other"] == "Another line, steeper."
    assert summaries["resnet50"].startswith("ResNet-50 on ")
    assert len({line.index(text) for line, text in zip(lines, summaries.values(), strict=True)}) == 1  # a column
    assert list(summaries) == sorted(summaries)


def test_copy_has_its_own_name_and_runs(listed, capsys):
    assert lines_of(capsys, "copy", "noted", "mine") == [
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


def test_recipe_may_have_the_name_of_a_value(project, capsys):
    write(project, {"conf/recipe/null.yaml": "# @package _global_\n# Odd.\ndefaults: [line]\n"})
    assert lines_of(capsys, "null")[0] == "# Odd."
    assert read(["fit", "-m", "recipe=line,null"]).overrides == ["+recipe=line,'null'"]
    words = ["seed=001", "data.batch_size=1e5", "+recipe=1e5", "model=null"]  # not the names of options
    assert read(["fit", *words]).overrides == words
