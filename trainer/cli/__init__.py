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
from contextlib import AbstractContextManager, ExitStack
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
    from trainer.cli.workdir import claim, resume_command, resume_requeued_job, sweeps

    report: Callable[[], int] = int  # prints the report of a sweep and returns the number of failed jobs
    waiting: AbstractContextManager[None] | None = None  # waits for the jobs of a sweep
    started = time.time() - 1.0  # file time stamps are less precise than the clock
    if "--experimental-rerun" in arguments.flags:
        raise UsageError(
            "Got --experimental-rerun, which can run any code. Repeat the run's .hydra/overrides.yaml instead."
        )
    resume_requeued_job(arguments)
    restore.apply(arguments)
    composer = Composer(arguments)
    config = validate(arguments, composer)
    if not arguments.shows:
        given = list(arguments.overrides)
        folder = claim(arguments, config)
        if not sweeps(arguments, config):
            config = composer.placed(config, folder)
        else:
            from trainer.cli import compare, sweep
            from trainer.cli.sweep.jobs import waiting_for

            waiting = waiting_for(config.hydra, folder)
            if arguments.command == "compare":
                report = partial(compare.report, folder, compare.thresholds(config), given, since=started)
                compare.as_sweep(arguments)
            else:
                flags = [word for flag in arguments.flags.items() if flag[0] != "--quiet" for word in flag if word]
                resume = resume_command(arguments.command, [*flags, *given], folder, "hydra.sweep.dir")
                report = partial(sweep.report, folder, since=started, again=resume)
    try:
        status = _call_hydra(composer, config, waiting)
    finally:
        failed = report()
    return status or (FAILED if failed else OK)


def _call_hydra(composer: Composer, config: DictConfig, waiting: AbstractContextManager[None] | None) -> int:
    import hydra
    from hydra.errors import HydraException

    from trainer.cli import failure
    from trainer.cli.compose import CONFIG_NAME, VERSION_BASE
    from trainer.cli.execution import task
    from trainer.cli.folders import packaged_conf
    from trainer.cli.sweep.jobs import SWEPT

    try:
        with ExitStack() as stack:
            stack.callback(setattr, sys, "argv", sys.argv)
            sys.argv = [sys.argv[0], *composer.arguments.for_hydra()]  # launchers start the other ranks with it
            stack.enter_context(environment({"HYDRA_FULL_ERROR": "1"}))  # otherwise, Hydra prints errors and exits
            if waiting is not None:
                stack.enter_context(waiting)
                stack.enter_context(environment({SWEPT: " ".join(composer.swept(config))}))
            if composer.arguments.shows:
                main = hydra.main(config_path=str(packaged_conf()), config_name=CONFIG_NAME, **VERSION_BASE)
                main(task)()
            elif waiting is not None:
                composer.sweep(task)
            else:
                composer.run(config, task)
    except SystemExit as end:  # Hydra exits after --hydra-help
        return end.code if isinstance(end.code, int) else OK
    except HydraException as error:
        if failure.is_recorded(error):  # raised by the run
            raise
        raise UsageError(str(error)) from error
    return OK
