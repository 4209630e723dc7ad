"""anomalib: its Engine builds the Trainer, with a custom CheckpointIO, callbacks and ModelCheckpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import timm
from anomalib.data import Folder
from anomalib.engine import Engine
from anomalib.models import Ganomaly, Glass, Padim
from anomalib.pre_processing import PreProcessor
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from torchvision.transforms.v2 import Compose as Transforms
from torchvision.transforms.v2 import Resize

REQUIRES = ("anomalib==2.7.0", "torchvision==0.29.2", "torch==2.15.0", "lightning==2.6.6")

create_model = timm.create_model
timm.create_model = lambda *args, pretrained=False, **kwargs: create_model(*args, pretrained=False, **kwargs)
"""Random weights: nothing is downloaded."""


def case_ganomaly(run: Any) -> None:
    """GANomaly: manual optimization, two optimizers"""
    train(run, Ganomaly, {"batch_size": 4, "n_features": 8, "latent_vec_size": 16}, resumed=2, max_epochs=3)


def case_glass(run: Any) -> None:
    """GLASS: manual optimization, a bank of features rebuilt in hooks"""
    small = {"input_shape": (32, 32), "backbone": "resnet18", "layers": ["layer1", "layer2"], "step": 2}
    sizes = {"pretrain_embed_dim": 16, "target_embed_dim": 16, "discriminator_hidden": 16}
    train(run, Glass, {**small, **sizes}, max_epochs=2)


def case_padim(run: Any) -> None:
    """PaDiM: no optimizer, a model fitted in hooks"""
    train(run, Padim, {"backbone": "resnet18", "layers": ["layer1"], "n_features": 10})


def train(run: Any, cls: Any, options: dict[str, Any], resumed: int = 0, **trainer: Any) -> None:
    """Fit, test, predict; load the best checkpoint, test it with a new Engine; resume from it."""
    images(run.folder / "images")

    def model() -> Any:
        return cls(pre_processor=preprocessor(), visualizer=False, **options)

    def engine(name: str, **arguments: Any) -> Any:
        run.seed()
        logger = CSVLogger(run.folder / "logs", name=name, version=0)
        place = run.folder / "results" / name
        return Engine(default_root_dir=place, accelerator="cpu", enable_progress_bar=False, logger=logger, **arguments)

    first, fitted = engine("first", **trainer), model()
    first.fit(fitted, datamodule=data(run))
    run.keep("test", first.test(fitted, datamodule=data(run)))
    predictions = first.predict(fitted, datamodule=data(run))
    run.keep("scores", [batch.pred_score for batch in predictions])
    run.keep("labels", [batch.pred_label for batch in predictions])
    best = first.best_model_path
    run.keep("best", best)
    run.reload(cls, best, pre_processor=preprocessor())
    run.keep("tested from its file", engine("again").test(model(), datamodule=data(run), ckpt_path=best))
    if resumed:
        with run.resume():
            further = {**trainer, "max_epochs": trainer["max_epochs"] + resumed}
            engine("further", **further).fit(model(), datamodule=data(run), ckpt_path=best)


def data(run: Any) -> Any:
    sizes = {"train_batch_size": 4, "eval_batch_size": 4, "num_workers": 0, "seed": 5}
    folders = {"normal_dir": "good", "abnormal_dir": "bad", "normal_test_dir": "good_test", "mask_dir": "masks"}
    return Folder(name="squares", root=run.folder / "images", **folders, **sizes)


def preprocessor() -> Any:
    return PreProcessor(transform=Transforms([Resize((32, 32), antialias=True)]))


def images(folder: Path) -> None:
    """Write images of noise; the bad images contain a white square."""
    numbers = numpy.random.default_rng(0)
    for name, count in (("good", 16), ("bad", 8), ("good_test", 8), ("masks", 8)):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            noise = numbers.normal(128, 10, (64, 64, 3)).clip(0, 255)
            pixels = noise.astype(numpy.uint8) if name != "masks" else numpy.zeros((64, 64), numpy.uint8)
            if name in ("bad", "masks"):
                pixels[20:40, 20:40] = 255
            Image.fromarray(pixels).save(folder / name / f"{index:03}.png")
