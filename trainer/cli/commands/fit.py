"""Train a model, with validation.

Checkpoints, logs and a summary are written to the folder of the run, outputs/RECIPE/DATE_TIME; those of a sweep to
multirun/RECIPE/DATE_TIME/JOB.

Examples:
  Train with the recipe's settings, then in another precision, then with other values:
    python -m trainer fit +recipe=resnet50
    python -m trainer fit +recipe=resnet50 precision=16-mixed
    python -m trainer fit +recipe=resnet50 trainer.max_epochs=3 optimizer.lr=0.05
  Run one batch of everything, as a test:
    python -m trainer fit +recipe=resnet50 +debug=fast_dev_run
  Four runs and one table of them:
    python -m trainer fit -m +recipe=resnet50 precision=32,16-mixed optimizer.lr=0.1,0.01
  Continue after any interruption, with the same command:
    python -m trainer fit +recipe=resnet50 resume=auto
  Continue from the last checkpoint of a run, with its config, for longer:
    python -m trainer fit ckpt=outputs/resnet50/DATE_TIME trainer.max_epochs=20
  Continue from a checkpoint with another config:
    python -m trainer fit +recipe=resnet50 ckpt_path=outputs/resnet50/DATE_TIME/checkpoints/last.ckpt
  Begin a new run with the weights of another, or of a file (.ckpt, .pt, .safetensors), as far as they fit:
    python -m trainer fit +recipe=resnet50 weights=outputs/resnet50/DATE_TIME optimizer.lr=0.001
"""

from trainer.cli.commands import Command

COMMAND = Command(__doc__, group="Train")
