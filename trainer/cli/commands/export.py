"""Declare ``trainer export``."""

from __future__ import annotations

from trainer.cli.commands import Command

COMMAND = Command(
    summary="write what was trained as ONNX, a graph of torch.export, or safetensors",
    about="""\
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
    group="Use what was trained",
    usage="ckpt=RUN to=FILE [SETTING=VALUE ...] | CHECKPOINT FILE.safetensors [PREFIX]",
    function="trainer.cli.export:command",
    words=3,
)
