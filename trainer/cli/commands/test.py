"""Compute the test metrics of a model.

The test data are those of the recipe. The weights and the config come from ckpt.
"""

from trainer.cli.commands import WITH_WEIGHTS, Command

COMMAND = Command(__doc__, group="Use what was trained", examples=WITH_WEIGHTS)
