"""Commands: those of this package are its modules, those of other packages are entry points."""

import sys

import pytest

from tests.cli.conftest import write
from trainer.cli import main
from trainer.cli.commands import is_run, names

MODULE = """
from trainer.cli.commands import Command

PRUNE = Command(
    "Remove small weights.\\n\\nThe smallest are set to 0.", usage="FILE", function="pruning:prune", words=1
)
NOTHING = 3


def prune(arguments):
    print(f"pruning {arguments.words} with {arguments.overrides}")
    return 5
"""
ENTRIES = "[trainer.commands]\nprune = pruning:PRUNE\nfit = pruning:PRUNE\n"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Another package, as an installer leaves it."""
    info = "pruning-1.0.dist-info"
    metadata = "Metadata-Version: 2.1\nName: pruning\nVersion: 1.0\n"
    write(tmp_path, {"pruning.py": MODULE, f"{info}/METADATA": metadata, f"{info}/entry_points.txt": ENTRIES})
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("pruning", None)


def test_command_of_another_package_gets_the_arguments(installed, capsys):
    assert main(["prune", "a.ckpt", "share=0.5"]) == 5
    assert capsys.readouterr().out == "pruning ['a.ckpt'] with ['share=0.5']\n"


def test_command_of_another_package_is_in_the_help(installed, capsys):
    assert main(["--help"]) == 0
    assert "Other packages:\n  prune        Remove small weights\n" in capsys.readouterr().out
    assert main(["prune", "--help"]) == 0
    assert capsys.readouterr().out == "usage: python -m trainer prune FILE\n\nThe smallest are set to 0.\n"
    assert main(["prnue"]) == 2
    assert "Did you mean 'prune'?" in capsys.readouterr().err


def test_entry_point_that_is_not_a_command_is_refused(installed, tmp_path, capsys):
    write(tmp_path, {"pruning-1.0.dist-info/entry_points.txt": "[trainer.commands]\nbroken = pruning:NOTHING\n"})
    assert main(["broken"]) == 2
    assert "The entry point pruning:NOTHING is a int, expected a trainer.cli" in capsys.readouterr().err


def test_entry_point_does_not_replace_a_command_of_this_package(installed):
    assert names().count("fit") == 1
    assert is_run("fit")
