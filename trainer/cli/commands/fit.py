"""Train a model, with validation.

Checkpoints, logs and a summary are written to the folder of the run, outputs/RECIPE/DATE_TIME; those of a sweep to
multirun/RECIPE/DATE_TIME/JOB.

Examples:
  Train with the recipe's settings, in another precision, or with other values:
    python -m trainer fit +recipe=resnet50
    python -m trainer fit +recipe=resnet50 precision=16-mixed
    python -m trainer fit +recipe=resnet50 trainer.max_epochs=3 optimizer.lr=0.05
  Run one batch of training and validation as a test:
    python -m trainer fit +recipe=resnet50 +debug=fast_dev_run
  Sweep: four runs and a table of their results:
    python -m trainer fit -m +recipe=resnet50 precision=32,16-mixed optimizer.lr=0.1,0.01
  Resume after any interruption by repeating the command:
    python -m trainer fit +recipe=resnet50 resume=auto
  Continue a run from its last checkpoint, with its config, for more epochs:
    python -m trainer fit ckpt=outputs/resnet50/DATE_TIME trainer.max_epochs=20
  Resume from a checkpoint with another config:
    python -m trainer fit +recipe=resnet50 ckpt_path=outputs/resnet50/DATE_TIME/checkpoints/last.ckpt
  Start a new run from the matching weights of another run or of a file (.ckpt, .pt, .safetensors):
    python -m trainer fit +recipe=resnet50 weights=outputs/resnet50/DATE_TIME optimizer.lr=0.001
"""

from trainer.cli.commands import Command

COMMAND = Command(__doc__, group="Train")
