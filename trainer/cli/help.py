"""The texts of ``--help`` and ``--version``. Needs neither Hydra nor torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import trainer
from trainer.arguments import describe
from trainer.cli.arguments import COMMANDS, FLAGS, GROUPS_TO_ADD, TOOLS
from trainer.cli.keys import groups, keys, options
from trainer.record.environment import version_of

SUMMARY = {
    "fit": "train a model, validating as it goes",
    "validate": "compute the validation metrics of a model",
    "test": "compute the test metrics of a model",
    "predict": "run a model over data and save what it says",
    "compare": "train in several precisions, and say what each of them gains and costs",
    "recipes": "list the recipes, show what one says, or copy one to edit",
    "tune": "find the largest batch that fits, or a learning rate",
    "checks": "say what this machine can do, and which precision to use; look at a recipe's data, layers, memory",
    "report": "make one HTML page of a run, a sweep or several runs",
    "consolidate": "make one file of a checkpoint that is a folder",
    "shard": "make a folder of a checkpoint that is one file",
    "export": "write what was trained as ONNX, a graph of torch.export, or safetensors",
}

_ABOUT = {
    "fit": """\
Trains the model of a recipe. Checkpoints, logs and a summary go to a folder of the run's own,
outputs/RECIPE/DATE_TIME; those of a sweep to multirun/RECIPE/DATE_TIME/JOB.""",
    "validate": """\
Computes the metrics of a recipe's model on its validation data. The weights, and the config, come from ckpt.""",
    "test": """\
Computes the metrics of a recipe's model on its test data. The weights, and the config, come from ckpt.""",
    "predict": """\
Runs a recipe's model over its prediction data and writes predictions.pt, which torch.load reads,
into the run's folder. The weights, and the config, come from ckpt.""",
    "compare": """\
Trains the model of a recipe once in each precision, with the same seed and the same batches, every run
in a process of its own and one after the other. Then it compares them with the first: loss, metric, time,
samples per second, peak memory and skipped steps, with a verdict on each. compare.md and compare.json go to
multirun/RECIPE/DATE_TIME, each run to a folder in there; `trainer report` draws their curves. The exit status
is 0 if all runs completed. If no precision is given, 32, 16-mixed and bf16-mixed are compared.""",
    "tune": """\
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
    "checks": """\
Tells the versions of what is installed, the devices, what each precision does on them (native, emulated or
unsupported), the measured speed of float32, float16 and bfloat16 (two seconds), how many dataloader workers to
begin with, memory and disks, and which precision to use here. `checks json` writes all of it as JSON. The exit
status is 1 when something is broken: torch cannot be imported, or nothing can be written; of a recipe, a step that
fails, a loss that is not finite, or labels that the model has no class for.

With a recipe it takes a first look at the data, in seconds and without a training. It shows a batch (shapes, ranges,
labels, NaN; images as a picture in outputs/checks), the layers with their parameters, activations and gradients in one
step, what float16 would make of these, and whether loading or the step is the brake. checks.steps=false runs no step.

It predicts the memory that the training takes on each device, in each precision: on one, by DDP, and sharded by FSDP.
That step is run on tensors without values, so neither a GPU nor the memory is needed; a recipe that reads weights from
files, such as finetune, reads them here, too, and needs host memory for them. It also names the lines of the model
that would make the host wait for a GPU, and what autocast computes in another dtype there than on this CPU.

  python -m trainer checks +recipe=tabular
  python -m trainer checks +recipe=gpt model=gpt_1b precision=bf16-mixed
  python -m trainer checks +recipe=gpt model=gpt_1b checks.devices=64 checks.gpu_memory=80GiB

Settings are those of fit, and checks.*.""",
    "recipes": """\
Lists the recipes that come with the package and those in ./conf/recipe, with a line on each. With a NAME: that
recipe, composed, with the meaning of every key. `recipes copy` writes one to ./conf/recipe/NEWNAME.yaml, to be edited.

Examples:
    python -m trainer recipes
    python -m trainer recipes resnet50 precision=16-mixed
    python -m trainer recipes copy resnet50 mine""",
    "consolidate": """\
Makes one file, in Lightning's format, of a checkpoint that is a folder (checkpoint_files.sharded=true). It has all
that the folder has, so load_from_checkpoint and any run read it, and ckpt goes on from it. One process does it, in
host memory; the folder is verified first. Nothing is written over.

Example:
    python -m trainer consolidate outputs/gpt/DATE_TIME/checkpoints/last.ckpt last.ckpt""",
    "shard": """\
Makes a folder, as checkpoint_files.sharded=true writes them, of a checkpoint that is one file: the opposite of
consolidate. Processes that go on from it read their parts alone. Nothing is written over.

Example:
    python -m trainer shard last.ckpt last_folder.ckpt""",
    "export": """\
Writes what was trained for use without this package; RUN is the folder of a run, or a checkpoint in it. How the
name of FILE ends says what:
  .pt2          the graph of the module's forward by torch.export; torch.export.load(FILE).module() runs it
  .onnx         the same graph as ONNX (pip install onnx onnxscript onnxruntime)
  .safetensors  the weights alone, which runs no code when it is read (pip install safetensors)
forward is called with the module's example_input_array or, without one, with the first batch of its data: a mapping
gives it the entries that are named as its arguments, a tuple or list as many of the first as it needs. The graph takes
batches of any size where forward does, in float32. The file is run before it is kept: it has to give what forward
gives, within 0.0001 of the largest value. Its size and the difference are printed. Nothing is written over.

A checkpoint's weights can be had without its run: with PREFIX, those whose names begin with it, without it: what a
LightningModule has as self.model begins with "model.".

Examples:
    python -m trainer export ckpt=outputs/unet/DATE_TIME to=unet.onnx
    python -m trainer export ckpt=outputs/unet/DATE_TIME to=unet.pt2 data.batch_size=4
    python -m trainer export outputs/finetune/DATE_TIME/checkpoints/last.ckpt model.safetensors model.""",
    "report": """\
Makes one page of a run or a sweep, whether it is finished, was cut short, or still goes on: settings, curves,
loss scale and gradients, speed, memory, overflow reports, environment. It is written to report.html in the
folder of the run, or to OUT.html, and needs nothing but itself: no network, no other file. Without RUN_DIR it is
about the newest run or sweep below outputs, multirun and lightning_logs. Of several folders, or of one that holds
several runs, the page shows the runs side by side: which settings differ, their curves on top of each other, one
table.

Examples:
    python -m trainer report
    python -m trainer report outputs/resnet50/DATE_TIME
    python -m trainer report multirun/resnet50/DATE_TIME sweep.html
    python -m trainer report outputs/resnet50/DATE_TIME multirun/resnet50/DATE_TIME/3 two.html""",
}

WORDS = {
    "recipes": "[NAME [SETTING=VALUE ...] | copy NAME [NEWNAME]]",
    "tune": "batch_size|lr [SETTING=VALUE ...]",
    "checks": "[json] [+recipe=NAME SETTING=VALUE ...]",
    "report": "[RUN_DIR ...] [OUT.html]",
    "consolidate": "FOLDER FILE",
    "shard": "FILE FOLDER",
    "export": "ckpt=RUN to=FILE [SETTING=VALUE ...] | CHECKPOINT FILE.safetensors [PREFIX]",
}
"""What may follow a command that runs nothing."""

_TRAIN = """\
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
    python -m trainer fit +recipe=resnet50 weights=outputs/resnet50/DATE_TIME optimizer.lr=0.001"""

_COMPARE = """\
    python -m trainer compare +recipe=resnet50 precision=32,16-mixed,bf16-mixed
  A first impression, in two epochs:
    python -m trainer compare +recipe=resnet50 trainer.max_epochs=2
  What is asked of each run: at most 0.5 points less accuracy, on a GPU at least 1.5x the speed; status 1 if not:
    python -m trainer compare +recipe=resnet50 compare.accuracy_tolerance=0.5 compare.strict=true
  Not precisions but something else, in one precision:
    python -m trainer compare +recipe=resnet50 precision=16-mixed +optimizer.fused=false,true"""

_USE = """\
  With the config, and the best weights, of a run:
    python -m trainer {command} ckpt=outputs/resnet50/DATE_TIME
  With those of one of its checkpoints, and other settings:
    python -m trainer {command} ckpt=outputs/resnet50/DATE_TIME/checkpoints/last.ckpt precision=bf16 data.batch_size=8
  The weights alone, with a config that you name:
    python -m trainer {command} +recipe=resnet50 ckpt_path=outputs/resnet50/DATE_TIME/checkpoints/last.ckpt"""

_COMMAND_GROUPS = {
    "Train": ("fit", "compare", "tune"),
    "Use what was trained": ("validate", "test", "predict", "report", "consolidate", "shard", "export"),
    "Look around": ("recipes", "checks"),
}

_BEGIN = """\
Begin with:
  trainer recipes resnet50                           what a recipe says, with the meaning of every key
  trainer fit +recipe=resnet50 precision=16-mixed    train it, in mixed precision
  trainer fit +recipe=resnet50 optimizer.lr=0.01     override any key; -m and 0.1,0.01 sweep over it
  trainer test ckpt=outputs/resnet50/DATE_TIME       a run's folder, or a checkpoint, brings its config along"""

_READ_ON = """\
`trainer COMMAND --help` says all about a command; `trainer fit --help` lists the settings and flags.
`python -m trainer` is the same program. Errors are short: --debug shows tracebacks, -q leaves one line of output."""

_WIDTH = 118
_NAMES = 36  # the width of the column of names, if they are not longer

_GROUPS = {
    "recipe": "what to train: a model, data and settings that fit together",
    "precision": "of the arithmetic; 32, 16, bf16 and 64 will do as well; auto goes by the device",
    "model": "the LightningModule",
    "data": "the LightningDataModule",
    "optimizer": "",
    "scheduler": "of the learning rate",
    "trainer": "the devices",
    "callbacks": "",
    "compile": "torch.compile, for the whole run",
    "tuning": "fast: TF32, cudnn.benchmark, channels_last, expandable segments",
    "logger": "several: logger=[default,wandb]",
    "compare": "what compare asks of the runs",
    "tune": "what tune tries",
    "checks": "what checks assumes",
    "debug": "settings to look for mistakes with",
    "sweep": "ready-made sweeps",
}

_ADDED = (
    ("+model.dropout=0.1", "a + adds a setting that the config does not have yet"),
    ("+name=my-run", "everything goes to outputs/my-run/DATE_TIME"),
    ("hydra.run.dir=FOLDER", "everything goes there"),
)


def help_text(command: str | None, config_dir: str | None = None) -> str:
    """What ``--help`` prints, for a command or, with None, for all.

    Args:
        command: one of `trainer.cli.arguments.COMMANDS`, or None.
        config_dir: what ``--config-dir`` was given, if anything.
    """
    if command in TOOLS:
        usage = f"usage: python -m trainer {command} {WORDS[command]}".rstrip()
        settings = [_settings(command, config_dir)] if command in ("tune", "checks") else []
        return "\n\n".join([usage, _ABOUT[command], *settings])
    if command is None:
        return _first_screen(config_dir)
    example = {"fit": _TRAIN, "compare": _COMPARE}.get(command) or _USE.format(command=command)
    flags = [(f"{', '.join(reversed(one.spellings))} {one.value}", one.about) for one in FLAGS if one.about]
    sections = [
        f"usage: python -m trainer {command} [SETTING=VALUE ...] [FLAGS]",
        _ABOUT[command],
        f"Examples:\n{example}",
        *([_settings("compare", config_dir)] if command == "compare" else []),
        _groups(config_dir),
        _settings("", config_dir),
        _settings("trainer", config_dir),
        _listed("Flags, anywhere among the settings:", flags),
    ]
    return "\n\n".join(sections)


def _settings(node: str, config_dir: str | None) -> str:
    """The settings in a node of the config, or with "" in none, with their defaults."""
    rows = [
        (f"{key.name}={describe(key.value)}", key.meaning)
        for key in keys((), config_dir).values()
        if key.name.rpartition(".")[0] in (node, node or "checkpoint_files")
        and key.name not in (*groups(config_dir), "command", "objective", "checkpoint_files")
    ]
    if not node:
        return _listed("Settings, with their defaults (--cfg job prints all):", [*rows, *_ADDED])
    return _listed(f"Settings {node}.NAME, with their defaults:", rows)


def _listed(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Names, and what they are, in two columns under a title."""
    width = min(max(len(name) for name, _ in rows), _NAMES)
    lines = [_wrapped(f"  {name:<{width}}  ", about) for name, about in rows]
    return "\n".join([title, *lines])


def _first_screen(config_dir: str | None) -> str:
    """What fits on one: the commands in groups, how to begin, and where to read on."""
    width = max(map(len, COMMANDS))
    lines = [(trainer.__doc__ or "").partition("\n")[0], "", "usage: trainer COMMAND [SETTING=VALUE ...] [FLAGS]"]
    for title, names in _COMMAND_GROUPS.items():
        lines += ["", _listed(f"{title}:", [(f"{name:<{width}}", SUMMARY[name]) for name in names])]
    recipes = ", ".join(options("recipe", config_dir)) or "none yet: put one into conf/recipe/"
    return "\n".join([*lines, "", _BEGIN, "", _wrapped("Recipes: ", recipes), "", _READ_ON])


def _wrapped(start: str, text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)


def versions() -> str:
    """The versions of this package and of those it stands on, without importing them."""
    names = ("torch", "lightning", "torchmetrics", "hydra-core")
    lines = [f"{name} {version_of(name) or 'is not installed'}" for name in names]
    return "\n".join([f"trainer {trainer.__version__}", *lines])


def _groups(config_dir: str | None) -> str:
    rows = []
    for group, about in _GROUPS.items():
        found = ", ".join(options(group, config_dir)) or "none yet"
        name = f"+{group}=" if group in GROUPS_TO_ADD else f"{group}="
        rows.append((name, f"{found}{f'  ({about})' if about else ''}"))
    return _listed("Settings that choose a file, conf/GROUP/OPTION.yaml, of ours or of your own:", rows)
