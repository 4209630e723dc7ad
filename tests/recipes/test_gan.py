import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from lightning import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from scipy.linalg import sqrtm
from torch.nn import functional as F
from torchvision.transforms.functional import pil_to_tensor

from recipes.data import DigitScans
from recipes.gan import GAN, SamplePictures, frechet_distance
from tests.support import AUTOCAST_DTYPES, make_trainer, native_fp16

ADAM = partial(torch.optim.Adam, lr=2e-3, betas=(0.5, 0.999))


@pytest.fixture(scope="module")
def scans() -> DigitScans:
    data = DigitScans()
    data.setup("fit")
    return data


class Watch(Callback):
    """Records the losses and the scale of each batch."""

    def __init__(self) -> None:
        self.losses: list[tuple[float, float]] = []
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer, module, *_):
        metrics = trainer.callback_metrics
        self.losses.append((metrics["d_loss"].item(), metrics["g_loss"].item()))
        self.scales.append(trainer.scaler.get_scale())


def train_by_hand(gan: GAN, batches, precision: str, scaler: torch.amp.GradScaler):
    """Train the same in plain torch. Yields losses and scale after each batch."""
    generator, discriminator = gan.generator, gan.discriminator
    d_optimizer, g_optimizer = ADAM(discriminator.parameters()), ADAM(generator.parameters())
    dtype = AUTOCAST_DTYPES.get(precision)
    autocast = partial(torch.autocast, "cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)
    real, fake = torch.ones(64), torch.zeros(64)
    loss = F.binary_cross_entropy_with_logits
    for images, _ in batches:
        d_optimizer.zero_grad()
        with autocast():
            generated = generator(torch.randn(64, gan.latent_size))
            truth, fiction = discriminator(images), discriminator(generated.detach())
            d_loss = 0.5 * (loss(truth, real.to(truth.dtype)) + loss(fiction, fake.to(truth.dtype)))
        scaler.scale(d_loss).backward()
        scaler.step(d_optimizer)
        g_optimizer.zero_grad()
        with autocast():
            fiction = discriminator(generated)
            g_loss = loss(fiction, real.to(fiction.dtype))
        scaler.scale(g_loss).backward()
        scaler.step(g_optimizer)
        scaler.update()
        yield (d_loss.item(), g_loss.item()), scaler.get_scale()


@pytest.mark.whole
@pytest.mark.parametrize(("precision", "init_scale"), [("32-true", 1.0), ("16-mixed", 2.0**24)])
def test_training_equals_a_hand_written_loop(precision, init_scale, scans, tmp_path):
    torch.manual_seed(0)
    gan = GAN(ADAM, width=16)
    twin = copy.deepcopy(gan)
    is_scaled, watch = precision == "16-mixed", Watch()
    plugin = native_fp16(init_scale=init_scale) if is_scaled else precision
    trainer = make_trainer(tmp_path, precision=plugin, limit_train_batches=4, limit_val_batches=0, callbacks=[watch])
    torch.manual_seed(1)
    trainer.fit(gan, datamodule=scans)

    torch.manual_seed(1)
    batches = (batch for _, batch in zip(range(4), scans.train_dataloader(), strict=False))
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, enabled=is_scaled)  # updated once in a batch
    by_hand = list(train_by_hand(twin, batches, precision, scaler))

    assert watch.losses == [losses for losses, _ in by_hand]
    assert watch.scales == [scale for _, scale in by_hand]
    weights, others = gan.state_dict(), twin.state_dict()
    assert all(torch.equal(weights[name], others[name]) for name in others)
    assert trainer.global_step == 2 * 4
    assert trainer.skipped_steps == sum(a > b for a, b in pairwise([init_scale, *watch.scales]))
    assert (trainer.skipped_steps >= 2) is is_scaled


def test_samples_depend_on_their_seed_only():
    gan = GAN(ADAM, width=16)
    state, weights = torch.get_rng_state(), copy.deepcopy(gan.state_dict())
    first = gan.sample(3)
    assert gan.training
    assert gan.generator.training
    assert torch.equal(gan.sample(3), first)
    assert torch.equal(gan.sample(3, seed=0), first)
    assert not torch.equal(gan.sample(3, seed=1), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in gan.state_dict().items())  # BatchNorm's as well
    gan.eval().sample(1)
    assert not gan.generator.training


def test_picture_is_written_for_every_epoch(scans, tmp_path):
    logger = TensorBoardLogger(tmp_path / "logs")
    pictures = SamplePictures(str(tmp_path / "samples"), count=6, columns=3, zoom=2)
    gan = GAN(ADAM, width=16)
    few = {"limit_train_batches": 2, "log_every_n_steps": 1}
    make_trainer(tmp_path, max_epochs=2, callbacks=[pictures], logger=logger, **few).fit(gan, datamodule=scans)
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["epoch_000.png", "epoch_001.png"]
    picture = pil_to_tensor(Image.open(tmp_path / "samples" / "epoch_001.png"))
    assert picture.shape == (3, 2 * 18 + 2, 3 * 18 + 2)  # images of 16 pixels, and 2 around each
    first = gan.sample(6)[0, 0] / 2 + 0.5
    expected = first.repeat_interleave(2, 0).repeat_interleave(2, 1) * 255
    assert torch.allclose(picture[0, 2:18, 2:18].float(), expected, atol=1.0)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert [event.step for event in events.Images("samples")] == [4, 8]


def test_frechet_distance_is_that_of_the_formula():
    torch.manual_seed(0)
    images, others = torch.randn(40, 1, 2, 3), torch.rand(50, 1, 2, 3) * 2
    a, b = images.flatten(1).double(), others.flatten(1).double()
    product = sqrtm(a.T.cov().numpy() @ b.T.cov().numpy()).real
    expected = (a.mean(0) - b.mean(0)).square().sum() + a.var(0).sum() + b.var(0).sum() - 2 * product.trace()
    assert frechet_distance(images, others).item() == pytest.approx(expected.item(), rel=1e-5)
    assert frechet_distance(images, images).item() == pytest.approx(0.0, abs=1e-6)
    assert frechet_distance(images, images + 2.0).item() == pytest.approx(6 * 4.0, rel=1e-5)


def test_predictions_are_images_and_a_checkpoint_loads(scans, tmp_path):
    gan, trainer = GAN(ADAM, width=16), make_trainer(tmp_path, limit_train_batches=2)
    trainer.fit(gan, datamodule=scans)
    assert set(trainer.callback_metrics) == {"d_loss", "g_loss", "val_frechet"}
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = GAN.load_from_checkpoint(tmp_path / "last.ckpt", optimizer=ADAM, weights_only=True)
    first, second, *_ = make_trainer(tmp_path).predict(loaded, datamodule=scans)
    assert torch.allclose(first, gan.sample(64), atol=1e-6)
    assert not torch.allclose(first, second)
    assert first.abs().max() <= 1
