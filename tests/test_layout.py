"""The layout of the package, as far as the import contracts in pyproject.toml do not check it."""

import ast
from collections import Counter
from pathlib import Path

import trainer

PACKAGE, TESTS = Path(trainer.__file__).parent, Path(__file__).parent


def test_names_of_modules_are_unique():
    """Commands have the names of the modules that implement them."""
    stems = Counter(path.stem for path in PACKAGE.rglob("*.py") if path.parent.name != "commands")
    assert {stem for stem, number in stems.items() if number > 1} == {"__init__", "__main__"}


def test_subclasses_that_tests_create_have_another_name_than_their_base():
    """``LightningCLI`` finds a class by its name among all classes in memory, those of other tests included."""
    same = []
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name("type"), args=[ast.Attribute(attr="__name__"), _, _]):
                    same.append(f"{path.relative_to(TESTS)}:{node.lineno}")
    assert not same
