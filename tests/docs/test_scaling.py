"""The table of features and engines: valid cells, and existing tests."""

import re

import pytest

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "scaling.md"
ENGINES = ["one device", "DDP", "FSDP", "DeepSpeed"]
REFUSED = {"Fused SGD", "Schedule-free optimizers", "Ignored parameters (`ignored_params`)", "`GradientCheck`"}
"""Features that a sharded engine refuses, and no others."""

KEPT_BY_DEEPSPEED = {"off", "refused", "synchronizes"}
"""Words for features that DeepSpeed implements itself."""

UNTESTED = {"one device": 0, "DDP": 0, "FSDP": 0, "DeepSpeed": 0}
"""Number of cells without a test. It may only decrease."""


def table():
    """Return the cells of each feature."""
    lines = PAGE.read_text(encoding="utf-8").split("## Feature support by engine")[1].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert rows[0][1:] == ENGINES
    return {name: cells for name, *cells in rows[2:]}


@pytest.mark.parametrize("name", table())
def test_cells_name_existing_tests(name):
    cells = table()[name]
    assert len(cells) == len(ENGINES)
    for engine, cell in zip(ENGINES, cells, strict=True):
        if found := re.fullmatch(r"\[tested\]\(\.\./(tests/\S+\.py)#(test_\w+)\)", cell):
            assert f"def {found[2]}(" in (ROOT / found[1]).read_text(encoding="utf-8"), cell
        elif engine == "DeepSpeed":
            assert cell in (*KEPT_BY_DEEPSPEED, "not tested", "-"), cell
        else:
            assert cell in ("refused", "needs a GPU", "not tested", "-"), cell
            assert cell != "refused" or (engine == "FSDP" and name in REFUSED)


def test_few_cells_are_not_tested():
    for index, engine in enumerate(ENGINES):
        assert sum(cells[index] == "not tested" for cells in table().values()) == UNTESTED[engine], engine


def test_refused_features_are_in_the_table():
    assert table().keys() >= REFUSED
