"""Print the error that ended a run as a short paragraph: its message, the line of the user's code, and advice.

The full traceback is written to the log file in the run's folder; ``--debug`` prints it as well. Advice depends on the
type of the error, except for an out-of-memory error. Messages of other libraries are printed as they are.
"""

from __future__ import annotations

import errno
import linecache
import logging
import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from trainer import packages, redaction
from trainer.cli.folders import PACKAGE
from trainer.cli.processes import is_debug, is_first, rank
from trainer.cli.walk import walk
from trainer.errors import (
    ConfigurationError,
    FolderInUseError,
    NonFiniteError,
    ResumeError,
    TrainerError,
    UnsafeCheckpointError,
    is_out_of_memory,
)
from trainer.files import from_here

log = logging.getLogger(__name__)

_LONGEST = 600
"""Characters of an error's message, before the rest is left to the log."""

_FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
_IN_WORKER = re.compile(
    r"\ACaught (?P<kind>\w+) in (?P<where>[^\n]+?)\.\nOriginal (?:[\s\S]*\n)?Traceback \(most recent call last\):\n"
    r"(?: .*\n)+(?:[\w.<>]+\.)?(?P=kind)(?:: |$)",
    re.MULTILINE,
)
"""What a dataset's error looks like by the time it arrives, up to its message. The last traceback is its own: before it
come those of its causes."""

_TOLD = ".failure"
"""In the folder of a run of several processes: one of them has told already what ended it."""


def record(error: Exception, folder: Path, command: str, processes: int = 1) -> None:
    """Write the traceback of ``error`` to the run's log, and remember where that is.

    Args:
        error: what ended a run, with its traceback.
        folder: of the run.
        command: such as ``fit``, after which the log is called.
        processes: of the run.
    """
    error.__dict__["folder"] = folder
    error.__dict__["processes"] = max(processes, int(os.environ.get("WORLD_SIZE", "1")))
    if isinstance(error, FolderInUseError):
        return  # the folder, and the log in it, are another run's
    trace = redaction.text("".join(traceback.format_exception(_from_run(error))))
    handler = log_handler()
    try:
        if handler is not None:
            written = log.makeRecord(log.name, logging.ERROR, __file__, 0, "The run failed.\n%s", (trace,), None)
            handler.handle(written)
            file = Path(handler.baseFilename)
        else:  # of another rank, which has no log
            file = folder / f"{command}_rank_{rank()}.log"
            with file.open("a", encoding="utf-8") as lines:
                lines.write(trace)
    except OSError:  # a full disk, say; what has happened matters more
        return
    error.__dict__["log_file"] = file


def log_handler() -> logging.FileHandler | None:
    """What writes the run's log; None in a process that has none."""
    files = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.FileHandler)]
    return next((handler for handler in files if handler.baseFilename != os.path.abspath(os.devnull)), None)


def explain_path(error: Exception, settings: dict[str, Any]) -> None:
    """Where ``error`` is about a file that is not there, note which setting names it, or a folder that it is in."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError, PermissionError)):
        return
    said = " ".join(map(str, (error, error.filename)))
    for key, name, value, _ in walk(settings):
        if (
            isinstance(value, str)
            and len(value) > 1
            and ("/" in value or "\\" in value or name in ("root", "path", "folder"))
        ):
            absolute = str(Path(value).expanduser().absolute())
            inside = str(error.filename).startswith(value.rstrip("/\\") + os.sep)
            if value in said.split() or absolute in said or inside or (os.sep in value and value in said):
                error.add_note(f"The path is the setting {key}={value}.")
                return


def tell(error: Exception) -> None:
    """Print what ended a run to stderr; of the processes of a run, the first that gets here does.

    A mistake in the command line or in a config says by itself all that there is to say.
    """
    if not _is_first_to_tell(error):
        return
    if is_debug():
        print(printable("".join(traceback.format_exception(_from_run(error)))), file=sys.stderr)
    said = f"trainer: {error}" if isinstance(error, ConfigurationError) else paragraph(error)
    print(printable(said), file=sys.stderr)


def printable(said: str) -> str:
    """``said`` without secrets and colours; what else would tell a terminal to do something is spelled out."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", redaction.text(said))
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], plain)


def is_about_settings(error: BaseException) -> bool:
    """Whether ``error`` is ours, or Lightning's, about how something is configured."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return not names.isdisjoint(("ConfigurationError", "MisconfigurationException"))


def is_recorded(error: Exception) -> bool:
    """Whether ``error`` was raised in a run, and not on the way there."""
    return "folder" in error.__dict__


def one_line(error: BaseException) -> str:
    """The message of ``error``, and what to do where that is known."""
    said = " ".join(str(error).split())
    end = "" if said.endswith((".", "!", "?")) else "."
    return f"{said}{end} {_advice(error)}".rstrip()


def paragraph(error: BaseException) -> str:
    """What ``error`` is, where it was raised, what to do about it, and where its traceback is: a line for each."""
    kind, message = type(error).__name__, str(error)
    text = message
    if found := _IN_WORKER.match(message):
        kind, text = found["kind"], message[found.end() :]
    if isinstance(error, TrainerError):
        lines = [f"trainer: {_shortened(message)}"]
    else:
        said = _shortened(text)
        lines = [f"trainer: {kind}: {said}" if said else f"trainer: {kind}."]
    if found:
        lines.append(f"In {found['where']}.")
    if not isinstance(error, TrainerError) and (place := where(error)):
        lines.append(f"Raised in {place}")
    is_memory = is_out_of_memory(error)
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    lines += [note.partition("\nTry ")[0].replace("\n", "\n  ") if is_memory else note for note in notes]
    if advice := _advice(error):
        lines.append(advice)
    file = error.__dict__.get("log_file")
    if file is not None:
        rest = "The rest of it, and the full traceback, are" if "[...]" in lines[0] else "The full traceback is"
        lines.append(f"{rest} in {from_here(file)}{'' if is_debug() else '; --debug shows it here'}.")
    elif not isinstance(error, FolderInUseError) and not is_debug():
        lines.append("--debug shows the full traceback.")
    return "\n  ".join(lines)


def where(error: BaseException) -> str:
    """The innermost line of the user's own code that ``error`` came through; "" where there is none.

    Own is what lies in no installed package, in Python's library or in ours.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_own(error.filename):
        return _place(error.filename, error.lineno or 1, "")
    in_text = [(f["file"], int(f["line"]), f["function"]) for f in _FRAME.finditer(str(error))]
    in_trace = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    for file, line, function in [*reversed(in_text), *reversed(in_trace)]:
        if _is_own(file):
            return _place(file, line, function)
    return ""


def _place(file: str, line: int, function: str) -> str:
    source = linecache.getline(file, line).strip()
    inside = f", in {function}" if function and function != "<module>" else ""
    return f"{from_here(Path(file))}:{line}{inside}" + (f": {source}" if source else "")


def _is_own(file: str) -> bool:
    path = Path(file)
    if file.startswith("<") or not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return False
    theirs = [PACKAGE, PACKAGE.parent / "recipes", *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platlib"))]
    for name in ("torch", "lightning", "hydra", "omegaconf"):
        theirs += [Path(file).parent for file in [getattr(sys.modules.get(name), "__file__", None)] if file]
    return not any(path.resolve().is_relative_to(folder.resolve()) for folder in theirs)


def _shortened(message: str) -> str:
    """The message on lines that belong to one paragraph; of a long one its beginning."""
    lines = [line.rstrip() for line in message.strip().splitlines() if line.strip()]
    text = "\n  ".join(lines)
    if len(text) <= _LONGEST:
        return text
    return text[:_LONGEST].rpartition("\n" if "\n" in text[_LONGEST // 2 : _LONGEST] else " ")[0].rstrip() + " [...]"


def _advice(error: BaseException) -> str:
    """Return the next thing to try, or "" if the message of the error has to do."""
    is_ours = isinstance(error, TrainerError)
    for kinds, advice in _OF_OURS if is_ours else _OF_OTHERS:
        if isinstance(error, kinds):
            return str(advice(error) if callable(advice) else advice)
    if is_ours:
        return ""
    return _about_memory(error) if is_out_of_memory(error) else ""


def _about_memory(error: BaseException) -> str:
    said = "\n".join(getattr(error, "__notes__", ()))
    tries = []
    if "expandable_segments" in said:
        tries.append("PYTORCH_ALLOC_CONF=expandable_segments:True before the command, which leaves no gaps")
    if "strategy='fsdp'" in said:
        tries.append("trainer=fsdp on several devices, for the weights and their like take most of the memory")
    if "train_dataloader" in said:
        tries += [
            "half of data.batch_size with twice trainer.accumulate_grad_batches, which learns from as many samples a"
            " step",
            "precision=bf16-mixed, where it is 32 now",
            "callbacks=activation_checkpointing",
        ]
        found = " `python -m trainer tune batch_size` with the same words finds the largest batch that fits."
    else:
        tries.append("a smaller data.batch_size")
        found = ""
    return f"Try {'; '.join(tries)}.{found}"


def _about_missing_file(error: OSError) -> str:
    return f"Relative paths start from the folder that the command is run in, {Path.cwd()}."


def _about_resuming(error: ResumeError) -> str:
    said = "On the command line exact_resume=false goes on all the same."
    if "set a batch size" in str(error):
        folder = from_here(Path(error.__dict__.get("folder", "FOLDER")))
        said += f" With another data.batch_size, say which run is meant: hydra.run.dir={folder} resume=auto."
    return said


def _about_missing_module(error: ModuleNotFoundError) -> str:
    if error.name is None:  # raised by hand, such as by a logger of Lightning's
        found = re.search(
            r"[Rr]equirement '?([A-Za-z][\w.-]*)|(?:pip|conda) install (?:-\S+ )*([A-Za-z][\w.-]*)", str(error)
        )
        named = next(filter(None, found.groups()), "") if found else ""
        return f"Install it: pip install {named}" if named else "Install what it asks for."
    return (
        f"If {error.name} is a package, install it; if it is a file of yours, run the command from the folder that it"
        f" is in. The recipes need: {packages.pip_install('recipes')}."
    )


def _about_system(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "The disk is full: make room, or send the run elsewhere with hydra.run.dir=FOLDER."
    if any(kind.__name__ in ("URLError", "HTTPError", "gaierror") for kind in type(error).__mro__):
        return (
            "Something was to be downloaded. Without a network, put the files where the data or the weights are sought."
        )
    return ""


_OF_OURS: tuple[tuple[Any, Any], ...] = (
    (ResumeError, _about_resuming),
    (
        NonFiniteError,
        "On the command line callbacks=nonfinite_guard names the step and the layer, and"
        " callbacks.nonfinite_guard.policy=skip leaves such steps out and goes on.",
    ),
    (
        UnsafeCheckpointError,
        "The command line has neither: load the file with a program of your own, by torch.load(..., weights_only="
        "False), leave out what it asks for, torch.save the rest to another file, and give that.",
    ),
)
_OF_OTHERS: tuple[tuple[Any, Any], ...] = (
    ((FileNotFoundError, NotADirectoryError), _about_missing_file),
    (PermissionError, "Expected a file or a folder that this user may read, and a run's folder that it may write."),
    (ModuleNotFoundError, _about_missing_module),
    ((ConnectionError, TimeoutError, OSError), _about_system),
)


def _from_run(error: BaseException) -> BaseException:
    """``error`` with its traceback from the run on, without Hydra's frames before it, where it was in the run."""
    entry: TracebackType | None = error.__traceback__
    while entry is not None and entry.tb_frame.f_globals.get("__name__") != "trainer.cli.run":
        entry = entry.tb_next
    return error.with_traceback(entry or error.__traceback__)


def forget_last(folder: Path) -> None:
    """A run begins in ``folder``: what ended an earlier one there has been told."""
    (folder / _TOLD).unlink(missing_ok=True)


def _is_first_to_tell(error: Exception) -> bool:
    """Whether no other process of this run has told what ended it: the first knows the reason, the others miss it."""
    folder = error.__dict__.get("folder")
    if folder is None or error.__dict__.get("processes", 1) < 2:
        return True
    try:
        (folder / _TOLD).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return is_first()
    return True
