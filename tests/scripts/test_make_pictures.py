"""The pictures of the documentation."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_pictures_are_small():
    files = {file.name: file.stat().st_size for file in (ROOT / "docs" / "pictures").iterdir()}
    assert {"fit.svg", "report.png", "report-dark.png"} <= set(files)
    assert max(files.values()) < 300_000
