"""Images in every logger that can show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.loggers import adapter

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import Tensor


def log_images(trainer: pl.Trainer, name: str, images: Tensor) -> None:
    """Show images in TensorBoard, W&B and MLflow, whichever of them are among the loggers, at the step of now.

    Other loggers are left out; where there is no other, nothing is computed or fetched from the device. So it is on
    all ranks but zero, and in the sanity check before a training. Works with Lightning's Trainer as well.

    Args:
        trainer: whose loggers and ``global_step`` count; ``self.trainer`` in a module.
        name: such as ``"samples"``. W&B and TensorBoard show one row of images by this name, MLflow each by a name of
            its own, ``samples/0`` and so on.
        images: shape (count, channels, height, width), or without count for one; 1 or 3 channels; uint8, or floating
            point in [0, 1].

    Raises:
        ValueError: another shape.
        TypeError: another dtype.
    """
    adapters = [one for one in map(adapter, trainer.loggers) if one.logs_images]
    if not adapters or not trainer.is_global_zero or trainer.sanity_checking:
        return
    pixels, step = _pixels(images), trainer.global_step
    for each in adapters:
        each.log_images(name, pixels, step)


def _pixels(images: Tensor) -> Any:
    """As a numpy array of uint8 and of shape (count, height, width, channels)."""
    several = images.detach() if images.dim() == 4 else images.detach()[None]
    if several.dim() != 4 or several.shape[1] not in (1, 3):
        raise ValueError(
            f"Got images of shape {tuple(images.shape)}, expected (count, channels, height, width), or without count,"
            " of 1 or 3 channels."
        )
    if several.is_floating_point():
        several = (several.float().clamp(0, 1) * 255).round().byte()
    elif str(several.dtype) != "torch.uint8":
        raise TypeError(f"Got images of {several.dtype}, expected uint8, or floating point in [0, 1].")
    return several.permute(0, 2, 3, 1).cpu().numpy()  # host-device synchronisation
