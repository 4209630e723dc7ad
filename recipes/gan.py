"""A generative adversarial network on scanned digits: two optimizers, manual optimization, one loss scaler."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import CatMetric
from torchvision.utils import make_grid, save_image

from trainer import log_images

SIDE = 8  # pixels of an image, in height and in width


class GAN(L.LightningModule):
    """A small DCGAN (Radford et al. 2016) for grayscale images of 8x8 pixels in [-1, 1].

    A batch is ``(images, labels)``, ``images`` of shape (batch, 1, 8, 8); labels are not used. In each batch, first the
    discriminator and then the generator takes a step, both with the non-saturating loss (Goodfellow et al. 2014). With
    loss scaling, both steps of a batch see the same scale, which is adjusted once, at the end of the batch.

    It logs ``d_loss`` and ``g_loss`` at every step, in nats per image (a discriminator that guesses has ln 2 = 0.693),
    and ``val_frechet``: the `frechet_distance` between the validation images and as many generated ones.

    Args:
        optimizer: called with the parameters of one of the two networks and returns its optimizer, such as
            ``functools.partial(torch.optim.Adam, lr=2e-4)``; in a config, ``_partial_: true``.
        latent_size: size of the latent vector that an image is generated from.
        width: number of channels of the larger layer of each network.
        sample_seed: seed of the latent vectors for the validation and for `sample`.
    """

    def __init__(
        self,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        *,
        latent_size: int = 32,
        width: int = 64,
        sample_seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters("latent_size", "width", "sample_seed")
        self.automatic_optimization = False
        self.make_optimizer = optimizer
        self.latent_size = latent_size
        self.sample_seed = sample_seed
        self.generator = make_generator(latent_size, width)
        self.discriminator = make_discriminator(width)
        self.val_images = CatMetric(nan_strategy="disable")  # gathers the images of all processes

    def forward(self, latents: Tensor) -> Tensor:
        """Return images of shape (batch, 1, 8, 8) for latents of shape (batch, ``latent_size``)."""
        return self.generator(latents)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Update the discriminator, then the generator, with the same generated images."""
        images, _ = batch
        d_optimizer, g_optimizer = self.optimizers()
        generated = self(torch.randn(len(images), self.latent_size, device=self.device, dtype=images.dtype))

        d_loss = 0.5 * (
            adversarial_loss(self.discriminator(images), real=True)
            + adversarial_loss(self.discriminator(generated.detach()), real=False)
        )
        d_optimizer.zero_grad()
        self.manual_backward(d_loss)
        d_optimizer.step()

        g_loss = adversarial_loss(self.discriminator(generated), real=True)
        g_optimizer.zero_grad()
        self.manual_backward(g_loss)  # also adds gradients to the discriminator, which its next zero_grad clears
        g_optimizer.step()
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss}, prog_bar=True)

    def on_validation_epoch_start(self) -> None:
        """Discard the images of an interrupted validation."""
        self.val_images.reset()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Collect the images."""
        self.val_images.update(batch[0])

    def on_validation_epoch_end(self) -> None:
        """Log ``val_frechet``."""
        images = self.val_images.compute()
        self.log("val_frechet", frechet_distance(images, self.sample(len(images))), prog_bar=True, sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Generate as many images as the batch has, float32 of shape (batch, 1, 8, 8); different ones in each batch."""
        number = batch_idx * self.trainer.world_size + self.global_rank  # number of the batch, over all processes
        return self.sample(len(batch[0]), self.sample_seed + number)

    def sample(self, count: int, seed: int | None = None) -> Tensor:
        """Generate images, float32 of shape (``count``, 1, 8, 8), on the module's device; the same for the same seed.

        Args:
            count: number of images.
            seed: seed of the latents. Default: None, ``sample_seed``. No global random state is used.
        """
        draw = torch.Generator().manual_seed(self.sample_seed if seed is None else seed)
        latents = torch.randn(count, self.latent_size, generator=draw).to(next(self.generator.parameters()))
        was_training = self.generator.training
        self.generator.eval()
        with torch.no_grad():
            images = self(latents).float()
        self.generator.train(was_training)
        return images

    def configure_optimizers(self) -> list[Optimizer]:
        """Return the optimizer of the discriminator and that of the generator."""
        return [self.make_optimizer(net.parameters()) for net in (self.discriminator, self.generator)]


class SamplePictures(L.Callback):
    """Writes a grid of generated images at the end of every training epoch: ``epoch_000.png`` and so on.

    TensorBoard, W&B and MLflow loggers show them as well.

    Args:
        dirpath: folder of the pictures.
        count: generated images in a picture.
        columns: images in a row of the picture.
        zoom: factor by which each image is enlarged.
    """

    def __init__(self, dirpath: str, count: int = 64, columns: int = 8, zoom: int = 4) -> None:
        self.dirpath = Path(dirpath)
        self.count = count
        self.columns = columns
        self.zoom = zoom

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the picture on rank 0."""
        if not trainer.is_global_zero:
            return
        images = pl_module.sample(self.count) / 2 + 0.5
        grid = make_grid(F.interpolate(images, scale_factor=self.zoom), nrow=self.columns)
        self.dirpath.mkdir(parents=True, exist_ok=True)
        save_image(grid, self.dirpath / f"epoch_{trainer.current_epoch:03d}.png")
        log_images(trainer, "samples", grid)


def make_generator(latent_size: int, width: int) -> nn.Sequential:
    """Build the network from latents of shape (batch, ``latent_size``) to images (batch, 1, 8, 8) in [-1, 1]."""
    return nn.Sequential(
        nn.Unflatten(1, (latent_size, 1, 1)),
        nn.ConvTranspose2d(latent_size, width, 2, bias=False),  # 2x2
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, width // 2, 4, stride=2, padding=1, bias=False),  # 4x4
        nn.BatchNorm2d(width // 2),
        nn.ReLU(),
        nn.ConvTranspose2d(width // 2, 1, 4, stride=2, padding=1),  # 8x8
        nn.Tanh(),
    )


def make_discriminator(width: int) -> nn.Sequential:
    """Build the network from images of shape (batch, 1, 8, 8) to logits (batch,): positive if they look real."""
    return nn.Sequential(
        nn.Conv2d(1, width // 2, 4, stride=2, padding=1),  # 4x4
        nn.LeakyReLU(0.2),
        nn.Conv2d(width // 2, width, 4, stride=2, padding=1, bias=False),  # 2x2
        nn.BatchNorm2d(width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 1, 2),
        nn.Flatten(0),
    )


def adversarial_loss(logits: Tensor, *, real: bool) -> Tensor:
    """Return the cross-entropy, in nats per image, for the target that all images are real, or that none is."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def frechet_distance(images: Tensor, others: Tensor) -> Tensor:
    """Return the Frechet distance between two sets of images: that of normal distributions fitted to their pixels.

    ``|m1 - m2|^2 + trace(C1 + C2 - 2 (C1 C2)^(1/2))`` with the means and covariances of the pixels (Dowson and Landau
    1982). The FID is the same distance between features of a network; for images of 8x8, pixels suffice.

    Args:
        images: float, shape (count, ...); at least two of them.
        others: the same for the other set; the count may differ.

    Returns:
        A float32 scalar, in squared units of the pixels; computed in float64.
    """
    (mean, covariance), (other_mean, other_covariance) = _moments(images), _moments(others)
    # Compute the trace of the square root of the product from its eigenvalues, on the CPU, which always has float64.
    roots = torch.linalg.eigvals(covariance @ other_covariance).real.clamp(min=0).sqrt().sum()
    return ((mean - other_mean).square().sum() + covariance.trace() + other_covariance.trace() - 2 * roots).float()


def _moments(images: Tensor) -> tuple[Tensor, Tensor]:
    pixels = images.flatten(1).double().cpu()
    return pixels.mean(0), pixels.T.cov()
