"""The README's tables and its example are what is there."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT, read
from trainer.cli.arguments import COMMANDS
from trainer.cli.folders import packaged_conf
from trainer.cli.help import help_text
from trainer.cli.recipes import description

README = (ROOT / "README.md").read_text(encoding="utf-8")


def table_under(heading: str) -> dict[str, str]:
    """The rows of the section's table: the first column without its quotes, and the second."""
    section = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", section, re.MULTILINE))


def test_the_recipes():
    files = (packaged_conf() / "recipe").glob("*.yaml")
    assert table_under("Recipes") == {file.stem: description(file) for file in files}


def test_the_commands():
    table = table_under("The command line")
    assert table.keys() == set(COMMANDS)
    listed = " ".join(help_text(None).split())
    for command, text in table.items():
        assert f"{command} {text}" in listed


def test_the_example():
    (example,) = [block for block in read(ROOT / "README.md") if block.language == "python"]
    assert example.text == (ROOT / "docs" / "examples" / "tabular.py").read_text(encoding="utf-8")


def test_the_measured_comparison_is_that_of_the_benchmarks():
    marked = re.compile(r"<!-- benchmark_overhead: start -->.*<!-- benchmark_overhead: end -->", re.DOTALL)
    (ours,) = marked.findall(README)
    assert ours in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
