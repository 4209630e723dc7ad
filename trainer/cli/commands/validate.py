"""Compute the validation metrics of a model.

The validation data are those of the recipe. The weights and the config come from ckpt.
"""

from trainer.cli.commands import WITH_WEIGHTS, Command

COMMAND = Command(__doc__, group="Use what was trained", examples=WITH_WEIGHTS)
