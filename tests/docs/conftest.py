"""The warm Python that the pages share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.execute import warm_python


@pytest.fixture(scope="session")
def server() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="docs") as folder, warm_python(Path(folder)) as path:
        yield path
