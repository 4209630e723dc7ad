"""The layout of the package, as far as the import contracts in pyproject.toml do not check it."""

from collections import Counter
from pathlib import Path

import trainer

PACKAGE = Path(trainer.__file__).parent


def test_names_of_modules_are_unique():
    """Commands have the names of the modules that implement them."""
    stems = Counter(path.stem for path in PACKAGE.rglob("*.py") if path.parent.name != "commands")
    assert {stem for stem, number in stems.items() if number > 1} == {"__init__", "__main__"}
