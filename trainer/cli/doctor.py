"""The command ``doctor``: parse its options, run the program, and return the exit status. Imports torch to run it."""

from __future__ import annotations

import argparse
import builtins
import hashlib
import json
import runpy
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from trainer.cli.commands.doctor import FAILED, FILE, NO_PATCH, NOTHING_FOUND, PATCH, USAGE
from trainer.cli.failure import is_about_settings, user_line
from trainer.cli.parsing import Arguments, UsageError
from trainer.cli.processes import is_first
from trainer.common.terminal import command_line, print_line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"doctor: {message}. `{command_line('doctor', '--help')}` lists the options.")


def command(arguments: Arguments) -> int:
    """Run a program and return the exit status.

    Raises:
        UsageError: if an option is wrong, or the program does not exist or would import its own ``trainer``.
    """
    words = arguments.words
    if not words or words[0] in ("--help", "-h"):
        from trainer.cli.help import help_text

        print(help_text("doctor"))
        return NOTHING_FOUND
    if words == ["--apply"]:
        return _apply()
    given = _parse(words)
    folder = Path.cwd() if given.module else Path(given.program).resolve().parent
    if not given.module and not Path(given.program).is_file():
        raise UsageError(f"Got the program {given.program}, expected a file, or -m MODULE. Options precede it.")
    files = [file for pattern in ("trainer.py", "trainer/*.py") for file in folder.glob(pattern)]
    if files and files[0].resolve().parent != Path(__file__).parents[1]:
        raise UsageError(f"{files[0]} has the name of this package, so `import trainer` would be ambiguous. Rename it.")
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as in any Python program
    if not sys.flags.safe_path:
        sys.path[0] = str(folder)
    status = _run(given, words)
    return _apply() if given.apply and status == PATCH and is_first() else status


def _parse(words: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="doctor", add_help=False, allow_abbrev=False)
    parser.add_argument("--accelerator")
    parser.add_argument("--devices", type=_positive)
    parser.add_argument("--max-steps", type=_positive)
    parser.add_argument("--max-time", type=_seconds)
    parser.add_argument("--continue", action="store_true", dest="continues")
    parser.add_argument("--apply", action="store_true")
    parser.add_argument("-m", action="store_true", dest="module")
    parser.add_argument("program", metavar="PROGRAM")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(words)


def _positive(word: str) -> int:
    if not (word.isascii() and word.isdigit() and int(word)):
        raise argparse.ArgumentTypeError(f"got {word!r}, expected a positive number")
    return int(word)


def _seconds(word: str) -> float:
    parts = word.split(":")
    if len(parts) > 4 or not all(number.isascii() and number.isdigit() for number in parts) or not any(map(int, parts)):
        raise argparse.ArgumentTypeError(f"got {word!r}, expected seconds, MM:SS, HH:MM:SS or DD:HH:MM:SS")
    return float(sum(int(number) * unit for number, unit in zip(reversed(parts), (1, 60, 3600, 86400), strict=False)))


def _run(given: argparse.Namespace, words: list[str]) -> int:
    """Run the program as ``python`` does, and return the exit status."""
    from torch.multiprocessing.spawn import ProcessExitedException

    import trainer.pytorch_lightning  # noqa: F401  # before all other imports of Lightning
    from trainer.cli.doctor_session import Doctor, Options

    names = ("accelerator", "devices", "max_steps", "max_time", "continues")
    before = [word for word in words[: len(words) - len(given.arguments) - 1] if word != "--apply"]
    program = given.program if given.module else str(Path(given.program).resolve())
    command = (sys.executable, "-m", "trainer", "doctor", *before, program)
    options = Options(**{name: getattr(given, name) for name in names}, command=command)
    doctor, failure = Doctor(options, Path.cwd()), NOTHING_FOUND
    sys.argv = [given.program, *given.arguments]
    with doctor.watching():
        try:
            if given.module:
                runpy.run_module(given.program, run_name="__main__", alter_sys=True)
            else:
                _run_file(program)
        except SystemExit as end:
            failure = FAILED if end.code else NOTHING_FOUND
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except ProcessExitedException as error:  # raised by a launcher that spawns processes
            failure = error.exit_code if error.exit_code in (PATCH, NO_PATCH) else _print_error(error)
        except Exception as error:
            failure = _print_error(error)
    if doctor.status and is_first():
        return doctor.status
    if not failure and is_first():
        doctor.print_summary()
    return failure  # of other ranks: 0 after a verdict, so that launchers do not report a failure


def _run_file(path: str) -> None:
    """Run a file like ``python path``. Unlike ``runpy.run_path``, keep ``sys.argv[0]`` as the user wrote it."""
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    module = sys.modules["__main__"] = ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=builtins)
    exec(code, vars(module))


def _print_error(error: Exception) -> int:
    """Print the error that ended the program, as Python prints it, and return the exit status."""
    if is_about_settings(error):
        print(f"trainer: {error}", file=sys.stderr)
        if place := user_line(error):
            print(f"  Raised in {place}", file=sys.stderr)
        return USAGE
    entry = error.__traceback__
    while entry is not None and entry.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        entry = entry.tb_next
    sys.excepthook(type(error), error.with_traceback(entry), entry)
    return FAILED


def _apply() -> int:
    """Apply the patch of the last verdict, and return the exit status.

    Raises:
        UsageError: if there is none, or a file has changed since.
    """
    if not Path(FILE).is_file():
        raise UsageError(f"There is no {FILE} in this folder, expected the one that doctor writes with a verdict.")
    facts = json.loads(Path(FILE).read_text(encoding="utf-8"))
    patch = facts["patch"]
    if not patch["text"]:
        raise UsageError(f"The last verdict has no patch, but this remedy: {facts['remedy'].rstrip('.')}.")
    before = {name: Path(name).read_bytes() if Path(name).is_file() else b"" for name in patch["edits"]}
    changed = [name for name, data in before.items() if hashlib.sha256(data).hexdigest() != patch["digests"][name]]
    if changed:
        raise UsageError(
            f"{', '.join(changed)} has changed since the patch was written, so nothing was applied. Run doctor again."
        )
    for name, data in before.items():
        for start, end, text in patch["edits"][name]:
            data = data[:start] + text.encode() + data[end:]
        Path(name).write_bytes(data)
    print_line(f"doctor: the patch was applied to {', '.join(before)}.")
    return PATCH
