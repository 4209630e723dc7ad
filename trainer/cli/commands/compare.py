"""Declare ``trainer compare``."""

from __future__ import annotations

from trainer.cli.commands import Command

COMMAND = Command(
    summary="train in several precisions, and say what each of them gains and costs",
    about="""\
Trains the model of a recipe once in each precision, with the same seed and the same batches, every run
in a process of its own and one after the other. Then it compares them with the first: loss, metric, time,
samples per second, peak memory and skipped steps, with a verdict on each. compare.md and compare.json go to
multirun/RECIPE/DATE_TIME, each run to a folder in there; `trainer report` draws their curves. The exit status
is 0 if all runs completed. If no precision is given, 32, 16-mixed and bf16-mixed are compared.""",
    group="Train",
    examples="""\
    python -m trainer compare +recipe=resnet50 precision=32,16-mixed,bf16-mixed
  A first impression, in two epochs:
    python -m trainer compare +recipe=resnet50 trainer.max_epochs=2
  What is asked of each run: at most 0.5 points less accuracy, on a GPU at least 1.5x the speed; status 1 if not:
    python -m trainer compare +recipe=resnet50 compare.accuracy_tolerance=0.5 compare.strict=true
  Not precisions but something else, in one precision:
    python -m trainer compare +recipe=resnet50 precision=16-mixed +optimizer.fused=false,true""",
    settings=("compare",),
)
