"""Compute the test metrics of a model.

Uses the test data of the recipe, and the weights and config of ckpt.
"""

from trainer.cli.commands import WITH_WEIGHTS, Command

COMMAND = Command(__doc__, group="Use a trained model", examples=WITH_WEIGHTS)
