"""Write a trained model as ONNX, a graph of torch.export, or safetensors.

The file can be used without this package. RUN is the folder of a run, or a checkpoint in it. The suffix of FILE
chooses the format:
  .pt2          the graph of the module's forward from torch.export; torch.export.load(FILE).module() runs it
  .onnx         the same graph as ONNX (pip install onnx onnxscript onnxruntime)
  .safetensors  only the weights; reading them runs no code (pip install safetensors)
forward is called with the module's example_input_array or, if it has none, with the first batch of its data. If this
batch is a mapping, forward gets the entries with the names of its arguments. If it is a tuple or list, forward gets as
many of the first items as it requires. The graph is in float32, and accepts batches of any size if forward does. The
command runs the file, and prints its size and the largest difference between its outputs and those of forward. If the
difference exceeds 0.0001 of the largest value, no file is kept. Existing files are not overwritten.

With prefix=PREFIX, a .safetensors file has only the weights with names that start with PREFIX, without the prefix. For
example, the weights of a LightningModule's self.model have the prefix "model.".

Examples:
    python -m trainer export ckpt=outputs/unet/DATE_TIME to=unet.onnx
    python -m trainer export ckpt=outputs/unet/DATE_TIME to=unet.pt2 data.batch_size=4
    python -m trainer export ckpt=outputs/finetune/DATE_TIME/checkpoints/last.ckpt to=model.safetensors prefix=model.
"""

from trainer.cli.commands import Command

COMMAND = Command(
    __doc__,
    group="Use a trained model",
    usage="ckpt=RUN to=FILE [SETTING=VALUE ...] | ckpt=RUN to=FILE.safetensors [prefix=PREFIX]",
    function="trainer.cli.export:command",
)
