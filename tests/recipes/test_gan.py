import copy
from functools import partial

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from scipy.linalg import sqrtm
from torch.nn import functional as F
from torchvision.transforms.functional import pil_to_tensor

from recipes.data import DigitScans
from recipes.gan import GAN, SamplePictures, frechet_distance
from tests.parity import assert_same_weights
from tests.support import make_trainer

ADAM = partial(torch.optim.Adam, lr=2e-3, betas=(0.5, 0.999))


@pytest.fixture(scope="module")
def scans():
    data = DigitScans()
    data.setup("fit")
    return data


def test_training_equals_a_hand_written_loop(scans, tmp_path):
    """Loss scaling for two optimizers is compared in tests/loop/test_manual_optimization.py."""
    gan = GAN(ADAM, width=16)
    twin = copy.deepcopy(gan)
    torch.manual_seed(1)
    make_trainer(tmp_path, limit_train_batches=4, limit_val_batches=0).fit(gan, datamodule=scans)

    torch.manual_seed(1)
    d_optimizer, g_optimizer = ADAM(twin.discriminator.parameters()), ADAM(twin.generator.parameters())
    loss, real, fake = F.binary_cross_entropy_with_logits, torch.ones(64), torch.zeros(64)
    for _, (images, _) in zip(range(4), scans.train_dataloader(), strict=False):
        d_optimizer.zero_grad()
        generated = twin.generator(torch.randn(64, twin.latent_size))
        truth, fiction = twin.discriminator(images), twin.discriminator(generated.detach())
        (0.5 * (loss(truth, real) + loss(fiction, fake))).backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        loss(twin.discriminator(generated), real).backward()
        g_optimizer.step()
    assert_same_weights(gan, twin)


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
