"""Find the largest batch that fits into memory, or a learning rate.

tune batch_size finds the largest batch in each precision, and measures the speed of each size. The limit is
tune.memory (such as 3GiB); by default, it is all memory of the GPU or, on a CPU, 90% of the free memory. Each size is
tried in a few training steps, in its own process. The default precisions are 32, 16-mixed and bf16-mixed.
tune lr runs a learning rate range test: it increases the rate with each step, and suggests a rate from the losses.
Both write tune.json to outputs/RECIPE/DATE_TIME, and no checkpoints.

  python -m trainer tune batch_size +recipe=resnet50
  python -m trainer tune batch_size +recipe=resnet50 precision=32,bf16-mixed tune.memory=4GiB tune.multiple_of=1
  python -m trainer tune lr +recipe=resnet50 precision=16-mixed
  python -m trainer tune lr +recipe=resnet50 tune.min_lr=1e-5 tune.max_lr=1 tune.steps=200

Accepts the settings of fit, and tune.*.
"""

from trainer.cli.commands import Command

COMMAND = Command(
    __doc__,
    group="Train",
    usage="batch_size|lr [SETTING=VALUE ...]",
    settings=("tune",),
    function="trainer.cli.tune:command",
    words=1,
)
