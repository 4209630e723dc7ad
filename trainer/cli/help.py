"""The texts of ``--help`` and ``--version``. Needs neither Hydra nor torch."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import trainer
from trainer.cli.arguments import COMMANDS
from trainer.cli.recipes import options

_SUMMARY = {
    "fit": "train a model, validating as it goes",
    "validate": "compute the validation metrics of a model",
    "test": "compute the test metrics of a model",
    "predict": "run a model over data and save what it says",
    "recipes": "list the recipes, with a line on each",
}

_ABOUT = {
    "fit": """\
Trains the model of a recipe. Checkpoints, logs and a summary go to a folder of the run's own,
outputs/RECIPE/DATE_TIME; those of a sweep to multirun/RECIPE/DATE_TIME/JOB.""",
    "validate": """\
Computes the metrics of a recipe's model on its validation data. The weights come from ckpt_path.""",
    "test": """\
Computes the metrics of a recipe's model on its test data. The weights come from ckpt_path.""",
    "predict": """\
Runs a recipe's model over its prediction data and writes predictions.pt, which torch.load reads,
into the run's folder. The weights come from ckpt_path.""",
    "recipes": """\
Lists the recipes that come with the package and those in ./conf/recipe, with a line on each.""",
}

_TRAIN = """\
  Train with the recipe's settings, then in another precision, then with other values:
    python -m trainer fit +recipe=resnet50
    python -m trainer fit +recipe=resnet50 precision=16-mixed
    python -m trainer fit +recipe=resnet50 trainer.max_epochs=3 optimizer.lr=0.05
  Does it run at all? One batch of everything:
    python -m trainer fit +recipe=resnet50 +debug=fast_dev_run
  Four runs and one table of them:
    python -m trainer fit -m +recipe=resnet50 precision=32,16-mixed optimizer.lr=0.1,0.01
  Go on where a run stopped:
    python -m trainer fit +recipe=resnet50 ckpt_path=outputs/resnet50/DATE_TIME/checkpoints/last.ckpt"""

_USE = """\
    python -m trainer {command} +recipe=resnet50 ckpt_path=outputs/resnet50/DATE_TIME/checkpoints/last.ckpt"""

_GROUPS = {
    "recipe": "what to train: a model, data and settings that fit together",
    "precision": "of the arithmetic; 32, 16, bf16 and 64 will do as well; auto goes by the device",
    "model": "the LightningModule",
    "data": "the LightningDataModule",
    "optimizer": "",
    "scheduler": "of the learning rate",
    "trainer": "the devices",
    "callbacks": "",
    "logger": "",
    "debug": "settings to look for mistakes with",
    "sweep": "ready-made sweeps",
}

_SETTINGS = """\
Settings with a value (--cfg job prints all of them):
  trainer.max_epochs=3  trainer.devices=2  data.batch_size=64  optimizer.lr=0.1  seed=7
  ckpt_path=FILE        the checkpoint to resume from, or whose weights to use
  +model.dropout=0.1    a + adds a setting that the config does not have yet
  +name=my-run          everything goes to outputs/my-run/DATE_TIME
  hydra.run.dir=FOLDER  everything goes there"""

_FLAGS = """\
Flags, anywhere among the settings:
  -h, --help             this text; after a command, what that command does
  --version              the versions of this package and of those it stands on
  -m, --multirun         a sweep: one run for every combination of the comma-separated values
  --cfg job [--resolve]  print the config instead of running; with --package trainer a part of it
  --info [WHAT]          how the config is composed; WHAT is all, config, defaults, defaults-tree,
                         plugins or searchpath
  --config-dir FOLDER    look for configs there too (./conf is always looked into, and first)
  --hydra-help           the rest of Hydra's flags"""


def help_text(command: str | None, config_dir: str | None = None) -> str:
    """What ``--help`` prints, for a command or, with None, for all.

    Args:
        command: one of `trainer.cli.arguments.COMMANDS`, or None.
        config_dir: what ``--config-dir`` was given, if anything.
    """
    if command == "recipes":
        return f"usage: python -m trainer recipes\n\n{_ABOUT[command]}"
    if command is None:
        names = "\n".join(f"  {name:<9} {_SUMMARY[name]}" for name in COMMANDS)
        top = [
            "usage: python -m trainer COMMAND [SETTING=VALUE ...] [FLAGS]",
            (trainer.__doc__ or "").partition("\n")[0],
            f"Commands (COMMAND --help says more):\n{names}",
        ]
    else:
        top = [f"usage: python -m trainer {command} [SETTING=VALUE ...] [FLAGS]", _ABOUT[command]]
    example = _TRAIN if command in (None, "fit") else _USE.format(command=command)
    return "\n\n".join([*top, f"Examples:\n{example}", _groups(config_dir), _SETTINGS, _FLAGS])


def versions() -> str:
    """The versions of this package and of those it stands on, without importing them."""
    lines = [f"trainer {trainer.__version__}"]
    for name in ("torch", "lightning", "torchmetrics", "hydra-core"):
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} is not installed")
    return "\n".join(lines)


def _groups(config_dir: str | None) -> str:
    lines = ["Settings that choose a file, conf/GROUP/OPTION.yaml, of ours or of your own:"]
    for group, about in _GROUPS.items():
        name = f"+{group}=" if group in ("recipe", "debug", "sweep") else f"{group}="
        found = ", ".join(options(group, config_dir)) or "none yet"
        lines.append(f"  {name:<11} {found}{f'  ({about})' if about else ''}")
    return "\n".join(lines)
