"""``trainer export``: the weights of a checkpoint, as safetensors. Imports torch when it begins with that."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from trainer.cli.arguments import UsageError
from trainer.cli.consolidate import absent, carry_out, existing, two
from trainer.record.checkpoints import is_checkpoint_folder

if TYPE_CHECKING:
    from trainer.cli.arguments import Arguments

_ENDING = ".safetensors"


def command(arguments: Arguments) -> int:
    """``trainer export CHECKPOINT FILE.safetensors [PREFIX]``."""
    checkpoint, file = two(arguments, f"a checkpoint, and the {_ENDING} file to make of its weights")
    if existing(checkpoint, "export").is_dir() and not is_checkpoint_folder(checkpoint):
        raise UsageError(f"export got {checkpoint}, which is a folder and no checkpoint: name one of those in it.")
    if file.suffix != _ENDING:
        raise UsageError(f"export got {file}, expected the name of a {_ENDING} file, such as model{_ENDING}.")
    absent(file)
    if find_spec("safetensors") is None:
        raise UsageError("export needs safetensors, which is not installed: pip install 'amp-trainer[safetensors]'")
    prefix = arguments.words[2] if len(arguments.words) > 2 else ""

    def convert() -> str:
        from trainer.checkpoint.conversion import export, weights_of

        weights = weights_of(checkpoint, prefix)
        export(weights, file)
        return f" {len(weights)} tensors."

    return carry_out(convert, file)
