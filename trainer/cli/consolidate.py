"""``trainer consolidate`` and ``trainer shard``: convert a sharded checkpoint to one file, and one file to a folder.

torch is imported only for the conversion, after the arguments are checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint.sharded_files import MANIFEST
from trainer.cli.parsing import Arguments, UsageError
from trainer.common.terminal import command_line
from trainer.errors import CheckpointError, CheckpointWriteError
from trainer.record.find_checkpoint import is_checkpoint_folder


def command(arguments: Arguments) -> int:
    """Run ``trainer consolidate FOLDER FILE`` or ``trainer shard FILE FOLDER``."""
    to_file = arguments.command == "consolidate"
    folder, file = "a sharded checkpoint, which is a folder", "a checkpoint that is one file"
    if len(arguments.words) < 2:
        expected = f"{folder}, and the file to write" if to_file else f"{file}, and the folder to write"
        raise UsageError(
            f"{arguments.command} got {len(arguments.words)} of two paths, expected {expected}:"
            f" `{command_line(arguments.command, '--help')}`"
        )
    given, made = (Path(word).expanduser() for word in arguments.words)
    if to_file and not is_checkpoint_folder(given):
        found = f"there is no {MANIFEST} in it" if given.is_dir() else "it is a file, or missing"
        raise UsageError(f"consolidate got {given}, expected {folder}: {found}.")
    if not (to_file or given.is_file()):
        raise UsageError(f"shard got {given}, which is a folder or missing, expected {file}.")
    check_new(made)

    def convert() -> str:
        from trainer.checkpoint.conversion import consolidate, split

        left_out = (consolidate if to_file else split)(given, made)
        reason = "objects are not constructed when a checkpoint is read"
        return f" Left out, because {reason}: {', '.join(left_out)}." if left_out else ""

    return run_conversion(convert, made)


def check_new(path: Path) -> None:
    """Check that ``path`` does not exist and can be created.

    Raises:
        UsageError: if it exists, or its folder is a file.
    """
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path} exists already. Choose another name, or remove it first.")
    if path.parent.is_file():
        raise UsageError(f"{path} cannot be written: {path.parent} is a file, expected a folder.")


def run_conversion(convert: Callable[[], str], made: Path) -> int:
    """Run a conversion, print the name and the size of its result, and the time, and return the exit status 0.

    Args:
        convert: writes ``made`` and returns a remark to print.
        made: the file or folder that ``convert`` writes.

    Raises:
        UsageError: if the input is damaged or not a checkpoint.
        CheckpointWriteError: if ``made`` cannot be written.
    """
    from trainer.cli import failure

    started = time.monotonic()
    try:
        remark = convert()
    except CheckpointWriteError:
        raise
    except CheckpointError as error:
        raise UsageError(failure.one_line(error)) from error
    files = [made] if made.is_file() else [one for one in made.iterdir() if one.is_file()]
    size = sum(file.stat().st_size for file in files) / 2**20
    print(f"Wrote {made}: {size:,.1f} MiB in {time.monotonic() - started:.1f} s.{remark}")
    return 0
