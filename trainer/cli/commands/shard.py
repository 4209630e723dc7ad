"""Declare ``trainer shard``."""

from __future__ import annotations

from trainer.cli.commands import Command

COMMAND = Command(
    summary="make a folder of a checkpoint that is one file",
    about="""\
Makes a folder, as checkpoint_files.sharded=true writes them, of a checkpoint that is one file: the opposite of
consolidate. Processes that go on from it read their parts alone. Nothing is written over.

Example:
    python -m trainer shard last.ckpt last_folder.ckpt""",
    group="Use what was trained",
    usage="FILE FOLDER",
    function="trainer.cli.consolidate:command",
    words=2,
    takes_files=True,
)
