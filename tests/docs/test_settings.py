"""Settings that the text of a page names exist."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from tests.docs.pages import PAGES, ROOT, without_blocks
from trainer.arguments import ARGUMENTS

GLOBAL = ("", "recipe", "debug", "sweep")
"""Groups with files that set keys of the whole config; those of ``compile`` and ``tuning`` add a callback."""


def paths(node: Any, prefix: str) -> Iterator[str]:
    """Yield the dotted names of a node and of all nodes below it."""
    yield prefix
    for key, value in node.items() if isinstance(node, dict) else ():
        yield from paths(value, f"{prefix}.{key}".strip("."))


def known_settings() -> set[str]:
    known = {f"trainer.{name}" for name in ARGUMENTS}
    for file in (ROOT / "conf").rglob("*.yaml"):
        group = file.parent.relative_to(ROOT / "conf").as_posix().strip(".")
        prefix = {"compile": "callbacks", "tuning": "callbacks", **dict.fromkeys(GLOBAL, "")}.get(group, group)
        known |= set(paths(yaml.safe_load(file.read_text()), prefix.replace("/", ".")))
    return known


def test_settings_in_the_text_exist():
    named = set()  # without those that a command adds to the config with a +
    for page in PAGES:
        for code in re.findall(r"`([^`\n]+)`", without_blocks(page.read_text(encoding="utf-8"))):
            named.update(re.findall(r"(?:^|[\s'])([a-z_]+(?:\.\w+)+)=", code))
    assert len(named) > 50
    assert named - known_settings() == set()
