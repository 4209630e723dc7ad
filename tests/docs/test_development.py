"""The pages for contributors name existing files, today's packages and the layers of the import contracts."""

import re
import tomllib

import pytest

import trainer
from tests.docs.pages import ROOT, without_blocks

PACKAGE = ROOT / "trainer"
CONTRIBUTING, ARCHITECTURE = ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md"
assert PACKAGE.samefile(trainer.__path__[0])


def table_of_packages():
    """Return the column "start with" of the table "Where does X live?", by folder."""
    section = CONTRIBUTING.read_text().partition("## Where does X live?")[2].partition("\n\n| outside")[0]
    rows = [
        [cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\| `trainer/.*$", section, re.M)
    ]
    return {ROOT / name.strip("`"): start for name, _, start in rows}


def test_table_of_packages_is_complete_and_names_their_files():
    table = table_of_packages()
    assert sorted(table) == sorted([PACKAGE, *(file.parent for file in PACKAGE.glob("*/__init__.py"))])
    for folder, start in table.items():
        for name in re.findall(r"`(\S+\.py)`", start):
            assert (folder / name).is_file() or (ROOT / name).is_file(), (folder, name)


@pytest.mark.parametrize("page", [CONTRIBUTING, ARCHITECTURE], ids=lambda page: page.name)
def test_named_files_exist(page):
    places = [ROOT, PACKAGE, *table_of_packages()]
    code = re.findall(r"`([^`\n]+)`", without_blocks(page.read_text()))
    paths = [word for word in code if re.fullmatch(r"\w[\w./-]*(/[\w.-]+|\.py)", word) and "NAME" not in word]
    assert len(paths) > 20
    assert [path for path in paths if not any((place / path).exists() for place in places)] == []


def test_layers_are_those_of_the_import_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    block = ARCHITECTURE.read_text().partition("## Layers\n\n```text\n")[2].partition("```")[0]
    named = [name for line in block.splitlines() for name in re.split(r"  +", line)[0].split(", ")]
    assert ["__main__", *(name.removesuffix(".py") for name in named)] == layers
