"""Make one file of a sharded checkpoint.

Converts a checkpoint that is a folder (checkpoint_files.sharded=true) to one file in Lightning's format, with all its
contents, so load_from_checkpoint and any run read it, and ckpt continues from it. One process does it in host memory,
after the folder is verified. No file is overwritten.

Example:
    python -m trainer consolidate outputs/gpt/DATE_TIME/checkpoints/last.ckpt last.ckpt
"""

from trainer.cli.commands import Command

COMMAND = Command(
    __doc__,
    group="Use what was trained",
    usage="FOLDER FILE",
    function="trainer.cli.consolidate:command",
    words=2,
    takes_files=True,
)
