"""The command line: ``python -m trainer`` and the console script ``trainer``.

A command passes through these modules in order: ``arguments`` parses the command line, ``validate`` checks it against
the configs that ``compose`` finds, and ``run`` builds the objects (``build``) and trains. ``sweep`` starts a
process for each job of a sweep, and ``compare`` compares the results of its jobs. Of these modules, only ``run`` and
``build`` import torch, and only to build objects.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from trainer.cli import commands
from trainer.cli.folders import search_here
from trainer.cli.parsing import Arguments, UsageError, read
from trainer.cli.processes import DEBUG, environment, started_as
from trainer.common.terminal import PROGRAM, QUIET, command_line

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trainer.cli.compose import Composer

__all__ = ["main"]

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after the program's name; by default ``sys.argv[1:]``.

    Returns:
        The exit status: 0 on success, 1 after an error in a run, 2 for an error in the command line or a config, and
        128 plus the signal's number if interrupted: 130 by Ctrl-C, 143 by SIGTERM, 138 by SIGUSR1.
    """
    search_here()
    words = list(sys.argv[1:] if argv is None else argv)
    with ExitStack() as command:
        if argv is None:
            command.enter_context(environment({PROGRAM: os.environ.get(PROGRAM) or started_as()}))
        try:
            arguments = read(words)
            flags = {"--debug": DEBUG, "--quiet": QUIET}
            command.enter_context(environment({flags[flag]: "1" for flag in arguments.flags if flag in flags}))
            only_prints = arguments.shows or "--help" in arguments.flags or not commands.is_run(arguments.command)
            if argv is None and only_prints and hasattr(signal, "SIGPIPE"):
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--cfg job | head` is not an error
            return _dispatch(arguments)
        except Exception as error:
            from trainer.cli import failure

            failure.print_error(error)
            return USAGE if failure.is_about_settings(error) else FAILED
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
    command = commands.find(arguments.command)
    if command is not None and command.function:
        return command.load()(arguments)
    if arguments.command is None:
        if not arguments.shows:
            example = command_line("fit", *arguments.overrides)
            raise UsageError(f"No command given, expected one of {', '.join(commands.names())}: `{example}`.")
        arguments.command = "fit"
    if arguments.command == "predict":
        from trainer.cli.sweep import folds

        if (status := folds.predict(arguments, _hydra)) is not None:
            return status
    return _hydra(arguments)


def _hydra(arguments: Arguments) -> int:
    """Check the command line, create the folder, and run the config or its sweep with Hydra."""
    from trainer.cli import restore
    from trainer.cli.compose import Composer
    from trainer.cli.config_checks import validate
    from trainer.cli.execution import task
    from trainer.cli.workdir import claim, resume_requeued_job, sweeps

    if "--experimental-rerun" in arguments.flags:
        raise UsageError("Got --experimental-rerun, which can run any code. Repeat .hydra/overrides.yaml instead.")
    resume_requeued_job(arguments)
    restore.apply(arguments)
    composer = Composer(arguments)
    config = validate(arguments, composer)
    if arguments.shows:
        return _call_hydra(composer, partial(composer.show, task))
    if sweeps(arguments, config):
        return _sweep(composer, config)
    config = composer.placed(config, claim(arguments, config))
    return _call_hydra(composer, partial(composer.run, config, task))


def _sweep(composer: Composer, config: DictConfig) -> int:
    """Run the jobs of a sweep or a comparison, and report on them."""
    from trainer.cli import compare, sweep
    from trainer.cli.execution import task
    from trainer.cli.sweep.jobs import SWEPT, waiting_for
    from trainer.cli.workdir import claim, resume_command

    arguments, given = composer.arguments, list(composer.arguments.overrides)
    started = time.time() - 1.0  # file time stamps are less precise than the clock
    folder = claim(arguments, config)
    if arguments.command == "compare":
        report = partial(compare.report, folder, compare.thresholds(config), given, since=started)
        compare.as_sweep(arguments)
    else:
        flags = [word for flag in arguments.flags.items() if flag[0] != "--quiet" for word in flag if word]
        resume = resume_command(arguments.command, [*flags, *given], folder, "hydra.sweep.dir")
        report = partial(sweep.report, folder, since=started, again=resume)

    def run_jobs() -> None:
        with waiting_for(config.hydra, folder), environment({SWEPT: " ".join(composer.swept(config))}):
            composer.sweep(task)

    try:
        status = _call_hydra(composer, run_jobs)
    finally:
        failed = report()
    return status or (FAILED if failed else OK)


def _call_hydra(composer: Composer, run: Callable[[], None]) -> int:
    from hydra.errors import HydraException

    from trainer.cli import failure

    outer, sys.argv = sys.argv, [sys.argv[0], *composer.arguments.for_hydra()]  # launchers start other ranks with it
    try:
        with environment({"HYDRA_FULL_ERROR": "1"}):  # otherwise, Hydra prints errors and exits
            run()
    except SystemExit as end:  # Hydra exits after --hydra-help
        return end.code if isinstance(end.code, int) else OK
    except HydraException as error:
        if failure.is_recorded(error):  # raised by the run
            raise
        raise UsageError(str(error)) from error
    finally:
        sys.argv = outer
    return OK
