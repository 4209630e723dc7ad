"""Declare ``trainer checks``."""

from __future__ import annotations

from trainer.cli.commands import Command

COMMAND = Command(
    summary="say what this machine can do, and which precision to use; look at a recipe's data, layers, memory",
    about="""\
Tells the versions of what is installed, the devices, what each precision does on them (native, emulated or
unsupported), the measured speed of float32, float16 and bfloat16 (two seconds), how many dataloader workers to
begin with, memory and disks, and which precision to use here. `checks json` writes all of it as JSON. The exit
status is 1 when something is broken: torch cannot be imported, or nothing can be written; of a recipe, a step that
fails, a loss that is not finite, or labels that the model has no class for.

With a recipe it takes a first look at the data, in seconds and without a training. It shows a batch (shapes, ranges,
labels, NaN; images as a picture in outputs/checks), the layers with their parameters, activations and gradients in one
step, these numbers in float16, and whether loading or the step is the bottleneck. checks.steps=false runs no step.

It predicts the memory that the training takes on each device, in each precision: on one, by DDP, and sharded by FSDP.
That step is run on tensors without values, so neither a GPU nor the memory is needed; a recipe that reads weights from
files, such as finetune, reads them here, too, and needs host memory for them. It also names the lines of the model
that would make the host wait for a GPU, and what autocast computes in another dtype there than on this CPU.

  python -m trainer checks +recipe=tabular
  python -m trainer checks +recipe=gpt model=gpt_1b precision=bf16-mixed
  python -m trainer checks +recipe=gpt model=gpt_1b checks.devices=64 checks.gpu_memory=80GiB

Settings are those of fit, and checks.*.""",
    group="Look around",
    usage="[json] [+recipe=NAME SETTING=VALUE ...]",
    settings=("checks",),
    function="trainer.cli.checks:command",
    words=1,
)
