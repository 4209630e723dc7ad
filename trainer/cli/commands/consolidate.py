"""Convert a sharded checkpoint to one file.

Converts a checkpoint that is a folder (checkpoint_files.sharded=true) to one file with the same contents in
Lightning's format, which load_from_checkpoint and ckpt_path can read. The folder is verified first. The conversion runs
in one process and needs host memory for the whole checkpoint. Existing files are not overwritten.

Example:
    python -m trainer consolidate outputs/gpt/DATE_TIME/checkpoints/last.ckpt last.ckpt
"""

from trainer.cli.commands import Command

COMMAND = Command(
    __doc__,
    group="Use a trained model",
    usage="FOLDER FILE",
    function="trainer.cli.export:convert",
    words=2,
    takes_files=True,
)
