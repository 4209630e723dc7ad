"""Run a model over data, and save its outputs.

Uses the prediction data of the recipe, and the weights and config of ckpt. The outputs are written to predictions.pt in
the folder of the run, for torch.load; with several processes, to predictions_RANK.pt. If the config has a callback that
writes predictions (BasePredictionWriter), only the callback writes them. If ckpt is the folder of a sweep over folds,
the predictions of its models are averaged into predictions.csv.
"""

from trainer.cli.commands import WITH_WEIGHTS, Command

COMMAND = Command(__doc__, group="Use a trained model", examples=WITH_WEIGHTS)
