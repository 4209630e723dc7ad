"""Scripts as programs that write a table, and as modules."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from tests.warm_python import WarmPython

SCRIPTS = Path(__file__).parents[2] / "scripts"


@contextmanager
def loaded(name: str) -> Iterator[Any]:
    """Load a script as a module, for the duration of the context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setenv("AMP_BENCH", "1")  # stay in this process
        loader = SourceFileLoader(name, str(SCRIPTS / name))
        spec = spec_from_loader(name, loader)
        module = module_from_spec(spec)
        patch.setitem(sys.modules, name, module)
        loader.exec_module(module)
        yield module


@pytest.fixture
def table(tmp_path: Path, python: WarmPython) -> Callable[..., str]:
    """Run a script with arguments, and return the table that it writes between the marks ``mark`` of a page."""

    def run(name: str, words: str | list[str], mark: str = "", **environment: str) -> str:
        page, begin, end = tmp_path / "page.md", f"<!-- {mark or name}: start -->\n", f"<!-- {mark or name}: end -->\n"
        page.write_text(f"before\n{begin}old\n{end}after\n")
        given = words.split() if isinstance(words, str) else words
        variables = {**os.environ, "AMP_BENCH": "1", **environment}  # stay in this environment
        done = python.run(str(SCRIPTS / name), *given, "--markdown", str(page), env=variables)
        assert done.returncode == 0, done.stderr[-2000:]
        text = page.read_text()
        assert text.startswith(f"before\n{begin}")
        assert text.endswith(f"{end}after\n")
        assert "old\n" not in text
        return text

    return run
