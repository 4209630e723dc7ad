"""Train in several precisions, and compare their results, times and memory.

Trains the model of a recipe once in each precision, with the same seed and batches, one run after the other, each in
its own process. Compares each run with the first (loss, metric, time, samples per second, peak memory and skipped
steps), and prints a verdict on each. compare.md and compare.json are written to multirun/RECIPE/DATE_TIME, and each run
to a folder in it; `python -m trainer report` draws the curves. The exit status is 0 if all runs completed. The
default precisions are 32, 16-mixed and bf16-mixed.

Examples:
    python -m trainer compare +recipe=resnet50 precision=32,16-mixed,bf16-mixed
  Compare quickly, in two epochs:
    python -m trainer compare +recipe=resnet50 trainer.max_epochs=2
  Accept at most 0.5 points less accuracy, and exit with status 1 if any threshold is missed:
    python -m trainer compare +recipe=resnet50 compare.accuracy_tolerance=0.5 compare.strict=true
  Compare other settings in one precision:
    python -m trainer compare +recipe=resnet50 precision=16-mixed +optimizer.fused=false,true
"""

from trainer.cli.commands import Command

COMMAND = Command(__doc__, group="Train", settings=("compare",))
