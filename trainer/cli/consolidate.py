"""``trainer consolidate`` and ``trainer shard``: a checkpoint that is a folder as one file, and one file as a folder.

Imports torch when it begins with that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint.sharded_files import MANIFEST
from trainer.cli.arguments import Arguments, UsageError
from trainer.cli.commands import find
from trainer.errors import CheckpointError, CheckpointWriteError, did_you_mean
from trainer.record.find_checkpoint import is_checkpoint_folder


def command(arguments: Arguments) -> int:
    """``trainer consolidate FOLDER FILE`` and ``trainer shard FILE FOLDER``."""
    to_file = arguments.command == "consolidate"
    folder, file = "a folder that a run has written as a checkpoint", "a checkpoint that is one file"
    given, made = two(
        arguments, f"{folder}, and the file to make of it" if to_file else f"{file}, and the folder to make of it"
    )
    existing(given, str(arguments.command))
    if to_file and not is_checkpoint_folder(given):
        found = f"there is no {MANIFEST} in it" if given.is_dir() else "it is a file"
        raise UsageError(
            f"consolidate got {given}, expected {folder}, such as outputs/RECIPE/DATE_TIME/checkpoints/last.ckpt:"
            f" {found}."
        )
    if not to_file and given.is_dir():
        raise UsageError(f"shard got {given}, which is a folder, expected {file}.")
    absent(made)

    def convert() -> str:
        from trainer.checkpoint.conversion import consolidate, split

        left_out = (consolidate if to_file else split)(given, made)
        why = "because they are objects, which are not made when a checkpoint is read"
        return f" Left out, {why}: {', '.join(left_out)}." if left_out else ""

    return carry_out(convert, made)


def two(arguments: Arguments, expected: str) -> tuple[Path, Path]:
    """The two paths that a command was given.

    Raises:
        UsageError: it was given fewer.
    """
    if len(arguments.words) < 2:
        command = find(arguments.command)
        assert command is not None
        raise UsageError(f"{arguments.command} needs {expected}: python -m trainer {arguments.command} {command.usage}")
    return Path(arguments.words[0]).expanduser(), Path(arguments.words[1]).expanduser()


def existing(path: Path, command: str) -> Path:
    """``path``, which is there.

    Raises:
        UsageError: it is not.
    """
    if not path.exists():
        near = did_you_mean(path.name, [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else [])
        raise UsageError(f"{command} got {path}: there is no such file or folder.{near}")
    return path


def absent(path: Path) -> None:
    """Refuse to write over what is there.

    Raises:
        UsageError: there is something, or a file where its folder would be.
    """
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path} is there already. Choose another name, or remove it first.")
    if path.parent.is_file():
        raise UsageError(f"{path} cannot be written: {path.parent} is a file, expected a folder.")


def carry_out(convert: Callable[[], str], made: Path) -> int:
    """Convert, and tell what was made. Returns the exit status.

    Raises:
        UsageError: what was given is damaged, or no checkpoint.
    """
    from trainer.cli import failure

    started = time.monotonic()
    try:
        said = convert()
    except CheckpointWriteError as error:
        failure.tell(error)
        return 1
    except CheckpointError as error:
        raise UsageError(failure.one_line(error)) from error
    files = [made] if made.is_file() else [one for one in made.iterdir() if one.is_file()]
    size = sum(one.stat().st_size for one in files) / 2**20
    print(f"{made}: {size:,.1f} MiB, in {time.monotonic() - started:.1f} s.{said}")
    return 0
