"""Report layers with sizes that are slow on Tensor Cores."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple

import lightning.pytorch as pl
from lightning.pytorch import Callback, LightningModule
from torch import nn

from trainer.common.module_tree import plain_class, plain_name
from trainer.common.run_callback import refuse_other_trainers
from trainer.errors import expect
from trainer.loop.run_state import state_of
from trainer.precision.devices import tensor_cores
from trainer.precision.fp32_modules import running_in_float32

log = logging.getLogger("lightning.pytorch.advice")
"""A child of Lightning's logger, so Lightning prints the advice; on the command line, the config
``hydra/job_logging: trainer`` prints it."""

MULTIPLE = 8
"""Number of 16-bit elements in 16 bytes, the alignment that Tensor Cores require for the best speed."""

_IMAGE_CHANNELS = 4
_Convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Misaligned(NamedTuple):
    """A layer with sizes that are not multiples of 8.

    Attributes:
        name: the name in ``named_modules()``.
        kind: the name of its class.
        sizes: the sizes that are not multiples of 8, by the name of the dimension; with groups, the sizes per group.
    """

    name: str
    kind: str
    sizes: dict[str, int]

    def __str__(self) -> str:
        changes = (f"{name} {size} -> {-(-size // MULTIPLE) * MULTIPLE}" for name, size in self.sizes.items())
        return f"{self.name} ({self.kind}): {', '.join(changes)}"


class AlignmentAdvisor(Callback):
    """Logs once, when a fit starts, the linear and convolution layers with sizes that are not multiples of 8.

    Tensor Cores compute 16-bit products most efficiently if the features of linear layers and the channels of
    convolutions are multiples of 8, according to NVIDIA's guide "Train With Mixed Precision" (which recommends the same
    for batch size, vocabulary and sequence length; these are not properties of a layer). Nothing is logged if the
    precision is not a 16-bit one, if the device has no Tensor Cores, or if all sizes are multiples of 8. A default
    callback in 16-bit precisions on a GPU.

    Args:
        everywhere: whether to check also without Tensor Cores and in any precision, for a model that will run on a
            GPU later. Default: False.
        max_lines: the largest number of layers to list, at least 1; the others are counted. Default: 10.

    Raises:
        ConfigurationError: if ``max_lines`` is below 1.
    """

    def __init__(self, everywhere: bool = False, max_lines: int = 10) -> None:
        expect(max_lines >= 1, "a number of lines, at least 1", max_lines=max_lines)
        self.everywhere = everywhere
        self.max_lines = max_lines
        self._message_logged = ""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Check the layers."""
        refuse_other_trainers(self, trainer)
        engine = state_of(trainer).engine
        if not self.everywhere and not (engine.precision.is_half and tensor_cores(engine.device)):
            return
        layers_found = list(misaligned(pl_module))
        layers = "1 layer has other sizes" if len(layers_found) == 1 else f"{len(layers_found)} layers have other sizes"
        lines = [
            f"Tensor Cores are fastest if sizes of 16-bit products are multiples of {MULTIPLE}. {layers},"
            " which can be padded:",
            *map(str, layers_found[: self.max_lines]),
        ]
        if len(layers_found) > self.max_lines:
            lines.append(f"and {len(layers_found) - self.max_lines} more")
        message = "\n  ".join(lines)
        if layers_found and message != self._message_logged:
            self._message_logged = message  # once, even if the same module is fitted again
            if trainer.is_global_zero:
                log.info(message)


def misaligned(root: nn.Module) -> Iterator[Misaligned]:
    """Yield the linear and convolution layers of ``root`` with sizes that are not multiples of 8.

    These are ignored: layers that ``fp32_modules`` keeps in float32; depthwise convolutions, which are not matrix
    products; up to four input channels, as images have, for which NVIDIA's libraries have special kernels
    (Convolutional Layers User's Guide, "Channels In And Out"); sizes that a lazy layer does not know yet.
    """
    in_float32 = running_in_float32(root)
    for path, layer in root.named_modules():
        sizes = {name: size for name, size in _sizes(layer) if size % MULTIPLE}
        if sizes and layer not in in_float32:
            yield Misaligned(plain_name(path), plain_class(layer).__name__, sizes)


def _sizes(layer: nn.Module) -> Iterator[tuple[str, int]]:
    if isinstance(layer, nn.Linear):
        yield from (("in_features", layer.in_features), ("out_features", layer.out_features))
    elif isinstance(layer, _Convolutions) and not 1 < layer.groups == layer.in_channels:
        each = " per group" if layer.groups > 1 else ""
        if layer.in_channels > _IMAGE_CHANNELS:
            yield f"in_channels{each}", layer.in_channels // layer.groups
        yield f"out_channels{each}", layer.out_channels // layer.groups
