"""Declare ``trainer consolidate``."""

from __future__ import annotations

from trainer.cli.commands import Command

COMMAND = Command(
    summary="make one file of a checkpoint that is a folder",
    about="""\
Makes one file, in Lightning's format, of a checkpoint that is a folder (checkpoint_files.sharded=true). It has all
that the folder has, so load_from_checkpoint and any run read it, and ckpt goes on from it. One process does it, in
host memory; the folder is verified first. Nothing is written over.

Example:
    python -m trainer consolidate outputs/gpt/DATE_TIME/checkpoints/last.ckpt last.ckpt""",
    group="Use what was trained",
    usage="FOLDER FILE",
    function="trainer.cli.consolidate:command",
    words=2,
    takes_files=True,
)
