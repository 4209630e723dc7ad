"""A generative adversarial network on handwritten digits: two optimizers, manual optimization, two schedules."""

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class GAN(LightningModule):
    def __init__(self, latent_dim=16, learning_rate=2e-4):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent_dim, 64), nn.BatchNorm1d(64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.Tanh()
        )
        self.discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, logits, real):
        target = torch.full_like(logits, float(real))
        return nn.functional.binary_cross_entropy_with_logits(logits, target)

    def training_step(self, batch, batch_idx):
        (images,) = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()
        z = torch.randn(images.size(0), self.hparams.latent_dim).type_as(images)

        generator_loss = self.adversarial_loss(self.discriminator(self(z)), real=True)
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()

        self.toggle_optimizer(discriminator_optimizer)
        real_loss = self.adversarial_loss(self.discriminator(images), real=True)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), real=False)
        discriminator_loss = (real_loss + fake_loss) / 2
        discriminator_optimizer.zero_grad()
        self.manual_backward(discriminator_loss)
        self.clip_gradients(discriminator_optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)

        self.log_dict({"g_loss": generator_loss, "d_loss": discriminator_loss}, prog_bar=True, on_epoch=True)

    def on_train_epoch_end(self):
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self):
        lr, betas = self.hparams.learning_rate, (0.5, 0.999)
        optimizers = [
            torch.optim.Adam(part.parameters(), lr=lr, betas=betas) for part in (self.generator, self.discriminator)
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


class Samples(Callback):
    """Writes a row of generated digits to TensorBoard after each epoch."""

    def __init__(self):
        self.means = []

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.eval()
        with torch.no_grad():
            images = pl_module(torch.ones(8, pl_module.hparams.latent_dim, device=pl_module.device))
        pl_module.train()
        trainer.logger.experiment.add_images("samples", images.view(8, 1, 8, 8) / 2 + 0.5, trainer.global_step)
        self.means.append(images.mean().item())


def main(folder):
    seed_everything(3)
    images = torch.tensor(load_digits().images[:512], dtype=torch.float32).flatten(1) / 8 - 1
    gan, samples = GAN(), Samples()
    options = {"accelerator": "cpu", "devices": 1, "default_root_dir": folder, "log_every_n_steps": 4}
    trainer = Trainer(max_epochs=3, logger=TensorBoardLogger(folder), callbacks=[samples], **options)
    trainer.fit(gan, DataLoader(TensorDataset(images), batch_size=64, shuffle=True))
    return {
        "weights": gan.state_dict(),
        "means": samples.means,
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "rates": [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers],
        "steps": trainer.global_step,
    }
