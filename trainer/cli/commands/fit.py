"""Declare ``trainer fit``."""

from __future__ import annotations

from trainer.cli.commands import Command

COMMAND = Command(
    summary="train a model, validating as it goes",
    about="""\
Trains the model of a recipe. Checkpoints, logs and a summary go to a folder of the run's own,
outputs/RECIPE/DATE_TIME; those of a sweep to multirun/RECIPE/DATE_TIME/JOB.""",
    group="Train",
    examples="""\
  Train with the recipe's settings, then in another precision, then with other values:
    python -m trainer fit +recipe=resnet50
    python -m trainer fit +recipe=resnet50 precision=16-mixed
    python -m trainer fit +recipe=resnet50 trainer.max_epochs=3 optimizer.lr=0.05
  Does it run at all? One batch of everything:
    python -m trainer fit +recipe=resnet50 +debug=fast_dev_run
  Four runs and one table of them:
    python -m trainer fit -m +recipe=resnet50 precision=32,16-mixed optimizer.lr=0.1,0.01
  Whatever happens to it, the same command again goes on where it stopped:
    python -m trainer fit +recipe=resnet50 resume=auto
  Go on from the last checkpoint of a run, with its config, for longer:
    python -m trainer fit ckpt=outputs/resnet50/DATE_TIME trainer.max_epochs=20
  Go on from a checkpoint with a config that you name:
    python -m trainer fit +recipe=resnet50 ckpt_path=outputs/resnet50/DATE_TIME/checkpoints/last.ckpt
  Begin a new run with the weights of another, or of a file (.ckpt, .pt, .safetensors), as far as they fit:
    python -m trainer fit +recipe=resnet50 weights=outputs/resnet50/DATE_TIME optimizer.lr=0.001""",
)
