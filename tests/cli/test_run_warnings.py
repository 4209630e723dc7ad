"""Warnings of a run on the terminal and in the log."""

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from trainer.cli.run_warnings import log_warnings

PROGRAM = """
import warnings
from trainer.cli.run_warnings import log_warnings
with log_warnings():
    warnings.formatwarning = None  # as Lightning does when it is imported
    warnings.warn("Scale is\\n  low.")
    for line in (3, 4):
        warnings.warn_explicit("Old.", DeprecationWarning, "/lib/torch/old.py", line)
"""


def test_terminal_gets_a_line_with_the_users_own_file_in_it(tmp_path):
    (tmp_path / "mine.py").write_text(PROGRAM)
    ran = subprocess.run(
        [sys.executable, "-W", "always", "mine.py"],
        cwd=tmp_path, env={"PYTHONPATH": str(Path(__file__).parents[2])}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stderr == "WARNING: Scale is low. (mine.py:6)\nWARNING: Old.\n"


def test_log_gets_a_line_with_the_place(tmp_path, monkeypatch):
    handler = logging.FileHandler(tmp_path / "fit.log")
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])  # runs of other tests may have left theirs
    before = warnings.showwarning, warnings.formatwarning
    try:
        with pytest.warns(UserWarning, match="Old"), log_warnings():
            warnings.warn_explicit("Old\nand slow.", UserWarning, "/lib/torch/old.py", 3)
    finally:
        handler.close()
    assert (warnings.showwarning, warnings.formatwarning) == before
    assert (tmp_path / "fit.log").read_text() == "WARNING Old and slow. (/lib/torch/old.py:3)\n"
