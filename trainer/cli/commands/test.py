"""Declare ``trainer test``."""

from __future__ import annotations

from trainer.cli.commands import WITH_WEIGHTS, Command

COMMAND = Command(
    summary="compute the test metrics of a model",
    about="""\
Computes the metrics of a recipe's model on its test data. The weights, and the config, come from ckpt.""",
    group="Use what was trained",
    examples=WITH_WEIGHTS,
)
