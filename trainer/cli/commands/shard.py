"""Make a sharded checkpoint of one file.

Converts a checkpoint that is one file to a folder, as checkpoint_files.sharded=true writes it. Each process that
continues from it reads only its own part. No file is overwritten.

Example:
    python -m trainer shard last.ckpt last_folder.ckpt
"""

from trainer.cli.commands import Command

COMMAND = Command(
    __doc__,
    group="Use what was trained",
    usage="FILE FOLDER",
    function="trainer.cli.consolidate:command",
    words=2,
    takes_files=True,
)
