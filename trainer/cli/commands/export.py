"""Write a trained model as ONNX, a graph of torch.export, or safetensors.

The file is for use without this package. RUN is the folder of a run, or a checkpoint in it. The ending of FILE chooses
the format:
  .pt2          the graph of the module's forward by torch.export; torch.export.load(FILE).module() runs it
  .onnx         the same graph as ONNX (pip install onnx onnxscript onnxruntime)
  .safetensors  the weights alone; reading them runs no code (pip install safetensors)
forward is called with the module's example_input_array or, without one, with the first batch of its data: a mapping
gives it the entries that are named as its arguments, a tuple or list as many of the first as it needs. The graph is in
float32, and takes batches of any size if forward does. The file is run before it is kept, and its outputs must equal
those of forward within 0.0001 of the largest value. Its size and the difference are printed. No file is overwritten.

The weights of a checkpoint can be exported without its run. With PREFIX, only those with names that begin with it are
written, without it: a LightningModule's self.model has the prefix "model.".

Examples:
    python -m trainer export ckpt=outputs/unet/DATE_TIME to=unet.onnx
    python -m trainer export ckpt=outputs/unet/DATE_TIME to=unet.pt2 data.batch_size=4
    python -m trainer export outputs/finetune/DATE_TIME/checkpoints/last.ckpt model.safetensors model.
"""

from trainer.cli.commands import Command

COMMAND = Command(
    __doc__,
    group="Use what was trained",
    usage="ckpt=RUN to=FILE [SETTING=VALUE ...] | CHECKPOINT FILE.safetensors [PREFIX]",
    function="trainer.cli.export:command",
    words=3,
)
