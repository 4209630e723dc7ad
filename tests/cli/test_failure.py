"""Messages of failed runs, for errors as they are raised by torch or by the system."""

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tests.cli.conftest import write
from trainer.cli import failure
from trainer.cli.failure import log_warnings
from trainer.errors import FolderInUseError, ResumeError


def raised(function, *args):
    try:
        function(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def out_of_memory():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    error.add_note("Memory ran out at batch_idx 3 of epoch 0 (train_dataloader).\nTry Trainer(...).")
    raise error


def out_of_memory_elsewhere():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


@pytest.mark.parametrize(
    ("function", "message", "advice"),
    [
        (lambda: __import__("no_such_module"), "No module named 'no_such_module'", "If no_such_module is a package"),
        (out_of_memory_elsewhere, "CUDA out of memory", "a smaller data.batch_size"),
        (lambda: torch.nn.Linear(3, 2)(torch.zeros(4, 5)), "(4x5 and 3x2)", ""),  # of another library
    ],
)
def test_advice_depends_on_the_type_of_the_error(function, message, advice):
    first, *rest, last = failure.paragraph(raised(function)).splitlines()
    assert first.startswith("trainer: ")
    assert message in first
    found = " ".join(line for line in rest if "Raised in" not in line)
    assert (advice in found, bool(found)) == (True, bool(advice))
    assert last == "  --debug prints the full traceback."


def test_out_of_memory_advice_uses_command_line_settings():
    text = failure.paragraph(raised(out_of_memory))
    assert "Memory ran out at batch_idx 3 of epoch 0 (train_dataloader).\n  Try Trainer(...).\n" in text
    assert "trainer.accumulate_grad_batches" in text


MODULE = """
import torch

def inner(x):
    return torch.nn.Linear(3, 2)(x)

def outer(x):
    return inner(x)
"""


def test_innermost_line_of_the_users_own_code(tmp_path, monkeypatch):
    write(tmp_path, {"shapes_of_mine.py": MODULE, "broken_of_mine.py": "x = 1\ndef f(:\n"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import shapes_of_mine

    error = raised(shapes_of_mine.outer, torch.zeros(4, 5))
    assert failure.user_line(error) == "shapes_of_mine.py:4, in inner: return torch.nn.Linear(3, 2)(x)"
    error = raised(__import__, "broken_of_mine")
    assert failure.user_line(error) == "broken_of_mine.py:2: def f(:"


class DamagedError(ValueError):
    pass


class Items(torch.utils.data.Dataset):
    """The error of the second item has a cause, which comes first in the traceback of a worker process."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        try:
            raise KeyError("labels")
        except KeyError as error:
            if index == 0:
                raise
            raise DamagedError("cat.jpg cannot be read. Mend it.") from error


@pytest.mark.filterwarnings("default")
def test_error_in_a_worker_is_the_datasets_own():
    items = iter(DataLoader(Items(), num_workers=1))
    for message, line in (
        ("KeyError: 'labels'", 'raise KeyError("labels")'),
        ("DamagedError: cat.jpg cannot be read. Mend it.", 'raise DamagedError("cat.jpg cannot'),
    ):
        lines = failure.paragraph(raised(next, items)).splitlines()
        assert lines[:2] == [f"trainer: {message}", "  In DataLoader worker process 0."]
        assert lines[2].startswith("  Raised in ")
        assert f", in __getitem__: {line}" in lines[2]
    assert list(items) == []  # ends the worker; garbage collection would wait for it


def test_long_message_ends_early():
    text = failure.paragraph(ValueError("\n".join(["word " * 20] * 100)))
    assert "[...]" in text
    assert len(text) < 800


def test_errors_without_advice():
    assert failure.paragraph(FolderInUseError("Another run writes there.")) == "trainer: Another run writes there."
    text = failure.paragraph(ResumeError("Other data."))
    assert text.startswith("trainer: Other data.\n  On the command line, exact_resume=false resumes anyway.")
    error = ResumeError("An update had 32 samples; set a batch size of 8, 16")
    error.folder = Path("outputs/mine")
    assert "hydra.run.dir=outputs/mine resume=auto" in failure.paragraph(error)


@pytest.fixture
def no_log(monkeypatch):
    """A process without a log file, regardless of earlier tests."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])


def test_one_of_several_processes_reports(tmp_path, capsys, no_log):
    for _ in range(2):  # each starts again
        failure.forget_last(tmp_path)
        for error in (ValueError("first"), ValueError("second")):
            failure.record(error, tmp_path, "fit", processes=2)
            failure.print_error(error)
        err = capsys.readouterr().err
        assert err.count("trainer: ") == 1
        assert "first" in err
    logged = (tmp_path / "fit_rank_0.log").read_text()
    assert logged.count("ValueError: first") == logged.count("ValueError: second") == 2


def test_single_process_always_reports(tmp_path, capsys, no_log):
    for _ in range(2):
        error = ValueError("again")
        failure.record(error, tmp_path, "fit")
        failure.print_error(error)
        assert "again" in capsys.readouterr().err
    assert [file.name for file in Path(tmp_path).iterdir()] == ["fit_rank_0.log"]


# --- warnings -------------------------------------------------------------------------------------------------

PROGRAM = """
import warnings
from trainer.cli.failure import log_warnings
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
