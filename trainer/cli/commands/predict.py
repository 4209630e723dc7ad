"""Declare ``trainer predict``."""

from __future__ import annotations

from trainer.cli.commands import WITH_WEIGHTS, Command

COMMAND = Command(
    summary="run a model over data and save what it says",
    about="""\
Runs a recipe's model over its prediction data and writes predictions.pt, which torch.load reads,
into the run's folder. The weights, and the config, come from ckpt.""",
    group="Use what was trained",
    examples=WITH_WEIGHTS,
)
