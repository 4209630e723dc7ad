"""``trainer consolidate``: a checkpoint that is a folder as one file. Imports torch when it begins with that."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint.sharded_files import MANIFEST
from trainer.cli.arguments import Arguments, UsageError
from trainer.errors import CheckpointError, CheckpointWriteError, did_you_mean
from trainer.record.checkpoints import is_checkpoint_folder


def command(arguments: Arguments) -> int:
    """``trainer consolidate FOLDER FILE``."""
    folder, file = two(arguments, "a folder that a run has written as a checkpoint, and the file to make of it")
    if not is_checkpoint_folder(existing(folder, "consolidate")):
        found = f"there is no {MANIFEST} in it" if folder.is_dir() else "it is a file"
        raise UsageError(
            f"consolidate got {folder}, expected a folder that a run has written as a checkpoint, such as"
            f" outputs/RECIPE/DATE_TIME/checkpoints/last.ckpt: {found}."
        )
    absent(file)

    def convert() -> str:
        from trainer.checkpoint.conversion import consolidate

        return told(consolidate(folder, file))

    return carry_out(convert, file)


def two(arguments: Arguments, expected: str) -> tuple[Path, Path]:
    """The two paths that a command was given.

    Raises:
        UsageError: it was given fewer.
    """
    if len(arguments.words) < 2:
        from trainer.cli.help import WORDS

        name = arguments.command
        assert name is not None
        raise UsageError(f"{name} needs {expected}: python -m trainer {name} {WORDS[name]}")
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


def told(left_out: list[str]) -> str:
    """What is said of the hyper-parameters that are left out; "" where none are."""
    if not left_out:
        return ""
    return f" Left out, because they are objects, which are not made when a checkpoint is read: {', '.join(left_out)}."
