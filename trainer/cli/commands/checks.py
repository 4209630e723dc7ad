"""Check this machine, recommend a precision, and look at a recipe's data, layers and memory.

Lists versions, devices, the support of each precision on them (native, emulated or unsupported), the measured speed
of float32, float16 and bfloat16 (two seconds), a number of dataloader workers to begin with, memory and disks, and
recommends a precision. `checks json` writes all of it as JSON. The exit status is 1 if something is broken: torch
cannot be imported, or a folder cannot be written; for a recipe, a step fails, the loss is not finite, or the model has
no class for a label.

With a recipe, the command looks at the data in seconds, without a training: a batch (shapes, ranges, labels, NaN;
images as a picture in outputs/checks), the layers with their parameters, activations and gradients in one step, these
numbers in float16, and whether loading or the step is the bottleneck. checks.steps=false runs no step.

It predicts the memory that the training takes on each device, in each precision: on one, by DDP, and sharded by FSDP.
That step runs on tensors without values, so neither a GPU nor the memory is needed; a recipe that reads weights from
files, such as finetune, reads them here, too, and needs host memory for them. It also names the lines of the model
that make the host wait for a GPU, and the operations that autocast computes in another dtype there than on this CPU.

  python -m trainer checks +recipe=tabular
  python -m trainer checks +recipe=gpt model=gpt_1b precision=bf16-mixed
  python -m trainer checks +recipe=gpt model=gpt_1b checks.devices=64 checks.gpu_memory=80GiB

Settings are those of fit, and checks.*.
"""

from trainer.cli.commands import Command

COMMAND = Command(
    __doc__,
    group="Look around",
    usage="[json] [+recipe=NAME SETTING=VALUE ...]",
    settings=("checks",),
    function="trainer.cli.checks:command",
    words=1,
)
