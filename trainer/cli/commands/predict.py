"""Run a model over data, and save its outputs.

The data are the prediction data of the recipe. The outputs are written to predictions.pt in the folder of the run, for
torch.load. The weights and the config come from ckpt.
"""

from trainer.cli.commands import WITH_WEIGHTS, Command

COMMAND = Command(__doc__, group="Use what was trained", examples=WITH_WEIGHTS)
