"""The command line: ``python -m trainer`` and the console script ``trainer``.

In the order in which a command passes through them: ``arguments`` takes the line apart, ``validate`` checks
it against the configs that ``compose`` finds, ``run`` builds the objects (``build``) and trains; ``sweep``
does that for each of many jobs, and ``compare`` holds what they leave against each other. Only ``run`` imports
torch.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from types import TracebackType

from trainer import redaction
from trainer.cli.arguments import COMMANDS, RUNS, TOOLS, Arguments, UsageError, read
from trainer.cli.folders import search_here
from trainer.errors import ConfigurationError

__all__ = ["main"]

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after the program's name; those of this process by default.

    Returns:
        The exit status: 0, or 1 after an error in a run, 2 for a mistake in the command line or a config, and 128 plus
        the signal's number when interrupted: 130 by Ctrl-C, 143 by SIGTERM, 138 by SIGUSR1.
    """
    search_here()
    try:
        arguments = read(sys.argv[1:] if argv is None else argv)
        if argv is None and (arguments.shows or arguments.command not in RUNS) and hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--cfg job | head` is no error
        return _dispatch(arguments)
    except ConfigurationError as error:
        print(f"trainer: {redaction.text(str(error))}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("trainer: interrupted.", file=sys.stderr)
        return INTERRUPTED


def _dispatch(arguments: Arguments) -> int:
    flags = arguments.flags
    if "--version" in flags:
        from trainer.cli.help import versions

        print(versions())
        return OK
    if "--help" in flags or not (arguments.command or arguments.overrides or flags):
        from trainer.cli.help import help_text

        print(help_text(arguments.command, flags.get("--config-dir")))
        return OK
    if arguments.command in TOOLS:
        tool = import_module(f"trainer.cli.{arguments.command}")
        status: int = tool.command(arguments)
        return status
    if arguments.command is None:
        if not arguments.shows:
            raise UsageError(
                f"No command given, expected one of {', '.join(COMMANDS)}:"
                f" `python -m trainer fit {' '.join(arguments.overrides)}`."
            )
        arguments.command = "fit"
    return _hydra(arguments)


def _hydra(arguments: Arguments) -> int:
    """Check the command line, claim a folder, and let Hydra compose the config again and run it."""
    from trainer.cli.validate import validate
    from trainer.cli.workdir import claim, sweeps

    report: Callable[[], int] = int  # of a sweep; how many jobs failed
    waiting: AbstractContextManager[None] = nullcontext()  # for the jobs of a sweep
    started = time.time() - 1.0  # file systems are not that exact
    if "--experimental-rerun" in arguments.flags:
        raise UsageError(
            "--experimental-rerun reads a pickle, which may run any code. The settings of a run are in its folder, in"
            " .hydra/overrides.yaml: give them again."
        )
    config = validate(arguments)
    if not arguments.shows:
        given = list(arguments.overrides)
        folder = claim(arguments, config)
        if arguments.command == "compare":
            from trainer.cli import compare

            report = partial(compare.report, folder, compare.thresholds(config), given, since=started)
        elif sweeps(arguments, config):
            from trainer.cli import sweep

            report = partial(sweep.report, folder, since=started)
        if sweeps(arguments, config):
            from trainer.cli import jobs

            waiting = jobs.waiting(config.hydra, folder)
    try:
        status = _call_hydra(arguments, waiting)
    finally:
        failed = report()
    return status or (FAILED if failed else OK)


def _call_hydra(arguments: Arguments, waiting: AbstractContextManager[None]) -> int:
    import hydra
    from hydra.errors import HydraException

    from trainer.cli.compose import CONFIG_NAME, VERSION_BASE
    from trainer.cli.folders import packaged_conf
    from trainer.cli.run import task

    start = hydra.main(config_path=str(packaged_conf()), config_name=CONFIG_NAME, version_base=VERSION_BASE)
    try:
        with _as_command_line(arguments), waiting:
            start(task)()
    except ConfigurationError:
        raise
    except SystemExit as end:  # how Hydra ends after --hydra-help
        return end.code if isinstance(end.code, int) else OK
    except Exception as error:
        if any(kind.__name__ == "MisconfigurationException" for kind in type(error).__mro__):  # Lightning's
            raise UsageError(" ".join(str(error).split())) from error
        own = _from_run(error)
        if own is None and isinstance(error, HydraException):
            raise UsageError(str(error)) from error
        trace = traceback.format_exception(error.with_traceback(own or error.__traceback__))
        print(redaction.text("".join(trace)), end="", file=sys.stderr)
        return FAILED
    return OK


@contextmanager
def _as_command_line(arguments: Arguments) -> Iterator[None]:
    """``sys.argv`` in Hydra's form, from which launchers start the other ranks; errors come out whole."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *arguments.for_hydra()]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # or Hydra prints the error its own way and exits
    try:
        yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]


def _from_run(error: BaseException) -> TracebackType | None:
    """The traceback from the run on, without Hydra's frames before it; None if it was not in the run."""
    entry = error.__traceback__
    while entry is not None and entry.tb_frame.f_globals.get("__name__") != "trainer.cli.run":
        entry = entry.tb_next
    return entry
