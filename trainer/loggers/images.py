"""Log images to all loggers that support them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.loggers import adapter

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import Tensor


def log_images(trainer: pl.Trainer, name: str, images: Tensor) -> None:
    """Log images to TensorBoard, W&B and MLflow at the current step. Also works with Lightning's Trainer.

    Does nothing on ranks above 0, in the sanity check, and without such a logger. The images are then not copied from
    the device.

    Args:
        trainer: the Trainer with the loggers; ``self.trainer`` in a module.
        name: such as ``"samples"``. W&B and TensorBoard show one row of images with this name. MLflow shows each
            image separately, with the names ``samples/0``, ``samples/1``, and so on.
        images: shape (count, channels, height, width) or (channels, height, width), with 1 or 3 channels; uint8, or
            floating point in [0, 1].

    Raises:
        ValueError: if ``images`` has another shape.
        TypeError: if ``images`` has another dtype.
    """
    adapters = [one for one in map(adapter, trainer.loggers) if one.logs_images]
    if not adapters or not trainer.is_global_zero or trainer.sanity_checking:
        return
    pixels, step = _pixels(images), trainer.global_step
    for each in adapters:
        each.log_images(name, pixels, step)


def _pixels(images: Tensor) -> Any:
    """Return a numpy array of uint8 with shape (count, height, width, channels)."""
    batch = images.detach() if images.dim() == 4 else images.detach()[None]
    if batch.dim() != 4 or batch.shape[1] not in (1, 3):
        raise ValueError(
            f"Got images of shape {tuple(images.shape)}, expected (count, channels, height, width) or"
            " (channels, height, width), with 1 or 3 channels."
        )
    if batch.is_floating_point():
        batch = (batch.float().clamp(0, 1) * 255).round().byte()
    elif str(batch.dtype) != "torch.uint8":
        raise TypeError(f"Got images of {batch.dtype}, expected uint8, or floating point in [0, 1].")
    return batch.permute(0, 2, 3, 1).cpu().numpy()  # a host-device synchronization
