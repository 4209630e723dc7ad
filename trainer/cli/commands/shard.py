"""Convert a checkpoint of one file to a sharded checkpoint.

Writes the folder that checkpoint_files.sharded=true would write. Each process that resumes from it reads only its own
part. Existing files are not overwritten.

Example:
    python -m trainer shard last.ckpt last_folder.ckpt
"""

from trainer.cli.commands import Command

COMMAND = Command(
    __doc__,
    group="Use a trained model",
    usage="FILE FOLDER",
    function="trainer.cli.export:convert",
    words=2,
    takes_files=True,
)
