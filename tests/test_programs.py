"""Programs for Lightning run under our Trainer with one changed import, and have the same results."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from tests.test_lightning_parity import assert_close

PROGRAMS = Path(__file__).parent / "programs"
IMPORT = re.compile(r"^from lightning import (.*), Trainer, (.*)$", re.MULTILINE)


def run(name: str, folder: Path, *, with_ours: bool) -> dict[str, Any]:
    """Return the result of the program's ``main``; ``with_ours`` changes its import only."""
    source = (PROGRAMS / f"{name}.py").read_text()
    if with_ours:
        source, changed = IMPORT.subn(r"from lightning import \1, \2\nfrom trainer import Trainer", source)
        assert changed == 1
    namespace: dict[str, Any] = {"__name__": f"tests.programs.{name}"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(source, f"{name}.py", "exec"), namespace)
        result: dict[str, Any] = namespace["main"](str(folder))
    result["warnings"] = {str(warning.message).replace(str(folder), "") for warning in caught}
    return result


def test_one_import_changes(tmp_path: Path) -> None:
    theirs = run("gan", tmp_path / "theirs", with_ours=False)
    mine = run("gan", tmp_path / "ours", with_ours=True)
    assert mine.pop("warnings") <= theirs.pop("warnings")  # Lightning warns, for example about num_workers
    assert_close(theirs, mine, "gan")
    assert mine["steps"] == 48
