"""``trainer shard``: a folder of a checkpoint that is one file. Imports torch when it begins with that."""

from __future__ import annotations

from trainer.cli.arguments import Arguments, UsageError
from trainer.cli.consolidate import absent, carry_out, existing, told, two


def command(arguments: Arguments) -> int:
    """``trainer shard FILE FOLDER``."""
    file, folder = two(arguments, "a checkpoint that is one file, and the folder to make of it")
    if existing(file, "shard").is_dir():
        raise UsageError(f"shard got {file}, which is a folder, expected a checkpoint that is one file.")
    absent(folder)

    def convert() -> str:
        from trainer.checkpoint.conversion import split

        return told(split(file, folder))

    return carry_out(convert, folder)
