"""Declare ``trainer tune``."""

from __future__ import annotations

from trainer.cli.commands import Command

COMMAND = Command(
    summary="find the largest batch that fits, or a learning rate",
    about="""\
tune batch_size finds the largest batch that fits into memory, in each precision, and tells how fast each size
is. On a GPU it asks the GPU; on a CPU a budget does: tune.memory=3GiB, or most of what is free. Each size is
tried in a few real training steps, in a process of its own. 32, 16-mixed and bf16-mixed are tried where no
precision is given.
tune lr runs a learning-rate range test: the rate grows from update to update, and the loss over it tells
which rate to use.
Both write tune.json into outputs/RECIPE/DATE_TIME, and leave no checkpoints and nothing else behind.

  python -m trainer tune batch_size +recipe=resnet50
  python -m trainer tune batch_size +recipe=resnet50 precision=32,bf16-mixed tune.memory=4GiB tune.multiple_of=1
  python -m trainer tune lr +recipe=resnet50 precision=16-mixed
  python -m trainer tune lr +recipe=resnet50 tune.min_lr=1e-5 tune.max_lr=1 tune.steps=200

Settings are those of fit, and tune.*.""",
    group="Train",
    usage="batch_size|lr [SETTING=VALUE ...]",
    settings=("tune",),
    function="trainer.cli.tune:command",
    words=1,
)
