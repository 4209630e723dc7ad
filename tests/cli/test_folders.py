"""The user's modules and folders next to ours, with any names."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import write
from trainer.cli.compose import Composer
from trainer.cli.folders import conf_folders, packaged_conf, search_here, user_conf
from trainer.cli.parsing import Arguments, read

# Finding a module is not running it: ours would import torch.
USE_BOTH = """
import importlib.util
from trainer.cli.folders import merge_recipes, search_here
search_here()
merge_recipes()
import recipes.mine
print(recipes.mine.NAME, importlib.util.find_spec("recipes.schedules").origin)
"""


def run_here(folder, *python):
    command = [*(python or [sys.executable]), "-c", USE_BOTH]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("init", [True, False], ids=["package", "namespace"])
def test_recipes_of_the_user_and_ours_are_one_package(tmp_path, init):
    write(tmp_path, {"recipes/mine.py": "NAME = 'mine'\n"} | ({"recipes/__init__.py": ""} if init else {}))
    name, ours = run_here(tmp_path, sys.executable, "-I")  # as a console script
    assert name == "mine"
    assert ours.endswith("schedules.py")
    assert not ours.startswith(str(tmp_path))
    write(tmp_path, {"recipes/schedules.py": ""})  # that of the user has precedence
    assert run_here(tmp_path) == ["mine", str(tmp_path / "recipes" / "schedules.py")]


@pytest.mark.parametrize("name", ["trainer.py", "trainer/__init__.py"])
def test_module_with_the_name_of_the_package_is_reported_and_not_used(tmp_path, name):
    here = tmp_path / "here"
    write(here, {name: "raise RuntimeError('the wrong one')\n", "recipes/mine.py": "NAME = 'mine'\n"})
    write(tmp_path, {"bin/script.py": USE_BOTH + "import trainer.errors\n"})
    command = [sys.executable, str(tmp_path / "bin" / "script.py")]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "mine"
    assert str(Path(name)) in done.stderr
    assert "Rename it" in done.stderr


def test_file_with_the_name_of_a_package_is_reported(tmp_path, monkeypatch, capsys):
    write(tmp_path, {"random.py": "", "torch.py": "", "mine.py": ""})
    monkeypatch.chdir(tmp_path)
    search_here()
    assert "random.py, torch.py in this folder would be imported instead" in capsys.readouterr().err


def test_conf_of_the_user_has_precedence_and_is_optional(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert user_conf() is None
    assert conf_folders() == [packaged_conf()]
    write(tmp_path, {"conf/a.yaml": "", "more/b.yaml": ""})
    assert conf_folders("more")[:2] == [tmp_path / "conf", packaged_conf()]
    assert [folder.name for folder in conf_folders("more")] == ["conf", "conf", "more"]
    monkeypatch.chdir(packaged_conf().parent)
    assert user_conf() is None


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("outputs/a/epoch=1-step=8.ckpt", "outputs/a/epoch=1-step=8.ckpt"),
        (r"C:\runs\last.ckpt", r"C:\runs\last.ckpt"),
        ("größe/(1)/last.ckpt", "größe/(1)/last.ckpt"),
        ("'a=b.ckpt'", "a=b.ckpt"),
    ],
)
def test_checkpoints_name_needs_no_quotes(given, value):
    for key in ("ckpt_path", "hydra.run.dir"):
        (word,) = read(["fit", f"{key}={given}"]).overrides
        (override,) = Composer(Arguments()).parse([word])
        assert str(override.value()) == value
