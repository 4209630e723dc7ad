"""Optional packages: the table agrees with pyproject.toml, and every "pip install" in the project names packages of it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from trainer import packages

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_OTHERS = {"datasets", "mlflow", "timm"}
"""Packages that a page names and the project does not use: pip knows them."""


def name_of(requirement: str) -> str:
    return re.split(r"[<>=~! ]", requirement)[0]


def texts() -> list[tuple[str, str]]:
    """All text files of the project, without the changelog, which speaks of earlier versions, and this file."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    kinds = (".py", ".md", ".yaml", ".toml", ".jinja")
    own = [file for file in tracked if file.endswith(kinds) and file not in ("CHANGELOG.md", "tests/test_packages.py")]
    return [(file, (ROOT / file).read_text(encoding="utf-8")) for file in own if (ROOT / file).is_file()]


def test_table_agrees_with_pyproject() -> None:
    extras = {name: {name_of(one) for one in needed} for name, needed in PROJECT["optional-dependencies"].items()}
    del extras["dev"]
    assert {extra: set(modules.values()) for extra, modules in packages.EXTRAS.items()} == extras


def test_modules_of_the_table_are_those_that_the_packages_install() -> None:
    modules = {module for extra in packages.EXTRAS.values() for module in extra}
    assert {module for module in modules if not packages.is_installed(module)} <= {"ray"}  # not in dev


def test_pip_install_in_texts_names_known_packages() -> None:
    known = {name for extra in packages.EXTRAS.values() for name in extra.values()} | OF_OTHERS
    found = set()
    for file, text in texts():
        for words in re.findall(r"pip install ([a-z'][^`\"\n|(#;:]*)", text):
            names = re.findall(r"[\w\[\],.-]*\w\]?", re.split(r"[.,]?(?:\s{2,}|\. |, |$)", words)[0])
            assert not [name for name in names if name.startswith("amp-trainer")], (file, words)
            found |= {(file, name) for name in names[:1]}
    assert {name for _, name in found} - known <= {"ray"}, sorted(one for one in found if one[1] not in known)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("ray",), "ray, which is not installed: pip install 'ray[train,tune]'"),
        (("mlflow", "alembic"), "alembic, which is not installed: pip install mlflow-skinny sqlalchemy alembic filelock"),
        (("slurm",), "hydra_plugins, which is not installed: pip install hydra-submitit-launcher submitit"),
    ],
)
def test_missing_package_comes_with_its_command(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda module: False)
    assert packages.missing(*arguments) == expected
    monkeypatch.setattr(packages, "is_installed", lambda module: True)
    assert packages.missing(*arguments) is None


IMPORTS = """
import sys

blocked = {"torchvision", "sklearn", "PIL", "transformers", "tokenizers", "peft"}

class Blocks:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocks())
import recipes, recipes.mlp, recipes.tabular, recipes.language_model
from recipes.data import RandomVectors, ByteText, PackedText, Examples
blocked.remove("sklearn")
from recipes.data import Tabular, DigitScans, Digits
"""


def test_recipe_imports_only_its_own_packages() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
