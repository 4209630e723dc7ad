"""The README's tables and its example are up to date."""

import re
import tomllib

from _api_reference import with_tables

from tests.docs.pages import ROOT, read

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_of_commands_and_recipes():
    assert with_tables(README) == README, "Run scripts/make_api_reference."
    assert "| `fit` | Train a model, with validation |" in README
    assert "| `resnet50` | ResNet-50 on scanned digits" in README


def test_example():
    (example,) = [block for block in read(ROOT / "README.md") if block.markers.get("file") == "tabular.py"]
    assert example.text == (ROOT / "docs" / "examples" / "tabular.py").read_text(encoding="utf-8")


def test_custom_recipe_takes_ten_lines():
    (recipe,) = [block for block in read(ROOT / "README.md") if block.language == "yaml"]
    assert recipe.markers["file"] == "conf/recipe/mine.yaml"
    assert len(recipe.text.splitlines()) == 10


def test_measured_comparison_is_that_of_the_benchmarks():
    marked = re.compile(r"<!-- benchmark_overhead: start -->.*<!-- benchmark_overhead: end -->", re.DOTALL)
    (ours,) = marked.findall(README)
    assert ours in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_overhead_is_that_of_the_table():
    table = README.partition("<!-- benchmark_overhead: start -->")[2].partition("<!-- benchmark_overhead: end -->")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines() if re.match(r"\|.*\d", line)]
    ours, lightning = ([int(row[column]) for row in rows] for column in (4, 6))
    claim = f"adds at most {max(ours)} microseconds to each step of a small model, and Lightning's Trainer"
    assert f"{claim} {min(lightning)} to {max(lightning)}" in " ".join(README.split())


def test_each_extra_is_named():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = README.partition("| extra | purpose |\n|---|---|\n")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted([*named, "dev"]) == sorted(extras)
