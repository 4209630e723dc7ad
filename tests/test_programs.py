"""Programs for Lightning run under our Trainer with one changed import, and have the same results."""

import re
import warnings
from pathlib import Path
from typing import Any

from tests.test_lightning_parity import assert_close

PROGRAMS = Path(__file__).parent / "programs"
IMPORT = re.compile(r"^from lightning import (.*), Trainer, (.*)$", re.MULTILINE)


def test_one_import_changes(tmp_path):
    source = (PROGRAMS / "gan.py").read_text()
    changed, number = IMPORT.subn(r"from lightning import \1, \2\nfrom trainer import Trainer", source)
    assert number == 1
    results, messages = [], []
    for name, text in (("theirs", source), ("ours", changed)):
        namespace: dict[str, Any] = {"__name__": "tests.programs.gan"}
        with warnings.catch_warnings(record=True, action="always") as caught:
            exec(compile(text, "gan.py", "exec"), namespace)
            results.append(namespace["main"](str(tmp_path / name)))
        messages.append({str(one.message).replace(str(tmp_path / name), "") for one in caught})
    assert_close(*results, "gan")
    assert messages[1] <= messages[0]  # Lightning warns, for example about num_workers
