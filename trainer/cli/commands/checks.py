"""Check this machine and recommend a precision; check a recipe's data, layers and memory.

Lists versions, devices, their support of each precision (native, emulated or unsupported), the measured speed of
float32, float16 and bfloat16 (two seconds), a number of dataloader workers to start with, memory and disks, and
recommends a precision. `checks json` prints these facts as JSON. The exit status is 1 if torch cannot be imported or a
folder cannot be written, and with a recipe also if a step fails, the loss is not finite, or a label is out of range.

With a recipe, the command takes some seconds, and reports instead: a batch (shapes, ranges, labels, NaN; images are
drawn to outputs/checks), the parameters, activations and gradients of each layer in one step, whether activations and
gradients fit into float16, and whether the dataloader or the step is the bottleneck. checks.steps=false runs no step.

It then predicts the memory that training needs per device: on one device in several precisions, and with DDP and FSDP.
The prediction runs a step on fake tensors, so it needs neither a GPU nor that memory; only weights that a recipe reads
from files, as finetune does, need host memory. The command names the lines of the model that synchronize host and GPU,
and the operations that CUDA autocast runs in another dtype than CPU autocast.

  python -m trainer checks +recipe=tabular
  python -m trainer checks +recipe=gpt model=gpt_1b precision=bf16-mixed
  python -m trainer checks +recipe=gpt model=gpt_1b checks.devices=64 checks.gpu_memory=80GiB

Accepts the settings of fit, and checks.*.
"""

from trainer.cli.commands import Command

COMMAND = Command(
    __doc__,
    group="Inspect",
    usage="[json] [+recipe=NAME SETTING=VALUE ...]",
    settings=("checks",),
    function="trainer.cli.checks:command",
    words=1,
)
