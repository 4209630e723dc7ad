"""Print the error that ended a run, as a short paragraph: message, line of the user's code, advice; and its warnings.

The full traceback is written to the log file in the run's folder; ``--debug`` prints it as well. Advice depends on the
type of the error and, for some types, on its message and notes. Messages of other libraries are printed unchanged.
"""

from __future__ import annotations

import linecache
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from trainer import errors
from trainer.cli.folders import is_users
from trainer.cli.processes import is_debug, is_first, rank
from trainer.common import packages, redaction
from trainer.common.files import from_here

log = logging.getLogger(__name__)

_LONGEST = 600
"""Largest number of characters of an error's message to print; the log has the rest."""

_FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
_IN_WORKER = re.compile(
    r"\ACaught (?P<kind>\w+) in (?P<where>[^\n]+?)\.\nOriginal (?:[\s\S]*\n)?Traceback \(most recent call last\):\n"
    r"(?: .*\n)+(?:[\w.<>]+\.)?(?P=kind)(?:: |$)",
    re.MULTILINE,
)
"""The text before the message of an error in a DataLoader worker: the tracebacks of its causes, then its own."""

_REPORTED = ".failure"
"""File in the folder of a run with several processes, which exists once a process has printed its error."""


def record(error: Exception, folder: Path, command: str, processes: int = 1) -> None:
    """Write the traceback of ``error`` to the run's log, and store the log's path in the error.

    Args:
        error: the error that ended the run, with its traceback.
        folder: folder of the run.
        command: such as ``fit``; the name of the log starts with it.
        processes: number of processes of the run.
    """
    error.__dict__["folder"] = folder
    error.__dict__["processes"] = max(processes, int(os.environ.get("WORLD_SIZE", "1")))
    if isinstance(error, errors.FolderInUseError):
        return  # the folder and its log belong to another run
    trace = redaction.text("".join(traceback.format_exception(_without_hydra_frames(error))))
    handler = log_handler()
    try:
        if handler is not None:
            written = log.makeRecord(log.name, logging.ERROR, __file__, 0, "The run failed.\n%s", (trace,), None)
            handler.handle(written)
            file = Path(handler.baseFilename)
        else:  # a rank other than 0, which has no log
            file = folder / f"{command}_rank_{rank()}.log"
            with file.open("a", encoding="utf-8") as lines:
                lines.write(trace)
    except OSError:  # such as a full disk; the error of the run is still printed
        return
    error.__dict__["log_file"] = file


def log_handler() -> logging.FileHandler | None:
    """Return the handler that writes the run's log; None if this process has none."""
    files = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.FileHandler)]
    return next((handler for handler in files if handler.baseFilename != os.path.abspath(os.devnull)), None)


def print_error(error: Exception) -> None:
    """Print the error that ended a run to stderr, unless another process of the run has printed one before.

    For errors in the command line or a config, only the message is printed.
    """
    if not _is_first_to_report(error):
        return
    if is_debug():
        print(printable("".join(traceback.format_exception(_without_hydra_frames(error)))), file=sys.stderr)
    about_settings = f"trainer: {error if isinstance(error, errors.ConfigurationError) else one_line(error)}"
    print(printable(about_settings if is_about_settings(error) else paragraph(error)), file=sys.stderr)


def printable(text: str) -> str:
    """Return ``text`` without secrets and colors, with other control characters escaped."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", redaction.text(text))
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda matched: repr(matched[0])[1:-1], plain)


def is_about_settings(error: BaseException) -> bool:
    """Return whether ``error`` is a configuration error of this package or of Lightning."""
    names = {cls.__name__ for cls in type(error).__mro__}
    return not names.isdisjoint(("ConfigurationError", "MisconfigurationException"))


def is_recorded(error: Exception) -> bool:
    """Return whether `record` was called with ``error``: True if the error was raised during a run, not before."""
    return "folder" in error.__dict__


def one_line(error: BaseException) -> str:
    """Return the message of ``error`` and, if there is any, advice."""
    message = " ".join(str(error).split())
    end = "" if message.endswith((".", "!", "?")) else "."
    return f"{message}{end} {_advice(error)}".rstrip()


def paragraph(error: BaseException) -> str:
    """Return a paragraph: the message of ``error``, the line that raised it, advice, and the log with the traceback."""
    in_worker, is_own = _IN_WORKER.match(str(error)), isinstance(error, errors.TrainerError)
    name = in_worker["kind"] if in_worker else type(error).__name__
    text = _shortened(str(error)[in_worker.end() :] if in_worker else str(error))
    lines = [f"trainer: {text}" if is_own else f"trainer: {name}: {text}" if text else f"trainer: {name}."]
    if in_worker:
        lines.append(f"In {in_worker['where']}.")
    if not is_own and (place := user_line(error)):
        lines.append(f"Raised in {place}")
    lines += [note.replace("\n", "\n  ") for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    if advice := _advice(error):
        lines.append(advice)
    file = error.__dict__.get("log_file")
    if file is not None:
        lines.append(f"The full traceback is in {from_here(file)}{'' if is_debug() else '; --debug prints it'}.")
    elif not isinstance(error, errors.FolderInUseError) and not is_debug():
        lines.append("--debug prints the full traceback.")
    return "\n  ".join(lines)


def user_line(error: BaseException) -> str:
    """Return the innermost line of the user's code in the traceback of ``error``, or "" without one.

    Code outside of installed packages, Python's library and this package counts as the user's.
    """
    if isinstance(error, SyntaxError) and error.filename and is_users(error.filename):
        return _place(error.filename, error.lineno or 1, "")
    in_text = [(f["file"], int(f["line"]), f["function"]) for f in _FRAME.finditer(str(error))]
    in_trace = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    for file, line, function in [*reversed(in_text), *reversed(in_trace)]:
        if is_users(file):
            return _place(file, line, function)
    return ""


def _place(file: str, line: int, function: str) -> str:
    source = linecache.getline(file, line).strip()
    inside = f", in {function}" if function and function != "<module>" else ""
    return f"{from_here(Path(file))}:{line}{inside}" + (f": {source}" if source else "")


def _shortened(message: str) -> str:
    """Return the message without empty lines, indented for a paragraph, and cut at about `_LONGEST` characters."""
    lines = [line.rstrip() for line in message.strip().splitlines() if line.strip()]
    text = "\n  ".join(lines)
    if len(text) <= _LONGEST:
        return text
    return text[:_LONGEST].rpartition("\n" if "\n" in text[_LONGEST // 2 : _LONGEST] else " ")[0].rstrip() + " [...]"


def _advice(error: BaseException) -> str:
    """Return advice about ``error``, or "" for errors without advice."""
    if isinstance(error, errors.ResumeError):
        folder = from_here(Path(error.__dict__.get("folder", "FOLDER")))
        named = f" To resume with another data.batch_size, name the run: hydra.run.dir={folder} resume=auto."
        is_about_size = "set a batch size" in str(error)
        return f"On the command line, exact_resume=false resumes anyway.{named if is_about_size else ''}"
    if isinstance(error, errors.NonFiniteError):
        return "callbacks=nonfinite_guard names step and layer; callbacks.nonfinite_guard.policy=skip skips such steps."
    if isinstance(error, errors.UnsafeCheckpointError):
        return (
            "If you trust the file: torch.load(..., weights_only=False), remove these objects, and torch.save the rest."
        )
    if isinstance(error, ModuleNotFoundError):
        if error.name is None:  # not raised by an import, such as in Lightning's loggers
            return "Install the package that the message names."
        advice = f"If {error.name} is a package, install it. If it is your file, run the command in its folder."
        return f"{advice} The recipes need: {packages.pip_install('recipes')}."
    if not errors.is_out_of_memory(error) or isinstance(error, errors.TrainerError):
        return ""
    return (
        "Less memory: a smaller data.batch_size with a larger trainer.accumulate_grad_batches, precision=bf16-mixed,"
        " callbacks=activation_checkpointing, or trainer=fsdp on several devices. tune batch_size finds the largest."
    )


def _without_hydra_frames(error: BaseException) -> BaseException:
    """Remove Hydra's frames, those before `trainer.cli.execution`, from an error of a run, and return the error."""
    entry: TracebackType | None = error.__traceback__
    while entry is not None and entry.tb_frame.f_globals.get("__name__") != "trainer.cli.execution":
        entry = entry.tb_next
    return error.with_traceback(entry or error.__traceback__)


def forget_last(folder: Path) -> None:
    """Remove the file by which a process of an earlier run in ``folder`` recorded that it has printed its error."""
    (folder / _REPORTED).unlink(missing_ok=True)


def _is_first_to_report(error: Exception) -> bool:
    """Return whether no other process of this run has printed its error.

    The first error is the cause. The other processes then fail because that process is missing.
    """
    if not is_recorded(error) or error.__dict__["processes"] < 2:
        return True
    try:
        (error.__dict__["folder"] / _REPORTED).touch(exist_ok=False)
    except OSError as problem:
        return is_first() and not isinstance(problem, FileExistsError)
    return True


@contextmanager
def log_warnings() -> Iterator[None]:
    """Inside the context, print each warning once, as one line, and also write it to the run's log.

    Only the handler of the log gets the warnings, because Python itself prints them, above the progress bar. Repeated
    texts are dropped: torch issues some warnings from several places and for each dataloader.
    """
    show, form = warnings.showwarning, warnings.formatwarning
    shown: set[str] = set()

    def show_once(message: Warning | str, category: type[Warning], filename: str, lineno: int, *file: Any) -> None:
        text = _in_one_line(message)
        if text in shown:
            return
        shown.add(text)
        warnings.formatwarning = _line  # set here, because importing Lightning replaces it
        show(message, category, filename, lineno, *file)
        if (handler := log_handler()) is not None:
            entry = f"{text} ({from_here(Path(filename))}:{lineno})"
            handler.handle(logging.LogRecord("py.warnings", logging.WARNING, filename, lineno, "%s", (entry,), None))

    warnings.showwarning = show_once  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning, warnings.formatwarning = show, form


def _line(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """Return the line for the terminal, with file and line number if the file is the user's own."""
    is_own = Path(filename).is_relative_to(Path.cwd()) and packages.is_users_file(filename)
    return f"WARNING: {_in_one_line(message)}{f' ({from_here(Path(filename))}:{lineno})' if is_own else ''}\n"


def _in_one_line(message: Warning | str) -> str:
    return " ".join(str(message).split())
