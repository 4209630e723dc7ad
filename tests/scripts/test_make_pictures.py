"""The pictures: the output of a terminal as SVG, and the top of a page as PNG."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.conftest import loaded

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pictures():
    """The script as a module."""
    with loaded("make_pictures") as module:
        yield module


BAR = "\x1b[?25lepoch 1\r\nloss 3\r\x1b[2K\x1b[1A\x1b[2K\x1b[1mepoch 2\x1b[0m\r\nloss 2  \r\n\x1b[?25hdone\n"


def test_svg_loads_no_font(pictures):
    svg = pictures.terminal(BAR)
    assert svg.startswith("<svg")
    assert "url(http" not in svg
    assert "@font-face" not in svg
    assert "epoch&#160;2" in svg


def test_pictures_are_small():
    files = {file.name: file.stat().st_size for file in (ROOT / "docs" / "pictures").iterdir()}
    assert {"fit.svg", "report.png", "report-dark.png"} <= set(files)
    assert max(files.values()) < 300_000
