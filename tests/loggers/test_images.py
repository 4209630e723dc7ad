"""Images in TensorBoard, W&B and MLflow, with the real packages."""

from io import BytesIO

import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support import make_trainer
from trainer import log_images

IMAGES = torch.tensor([[[[0.0, 1.0], [0.5, 2.0]]], [[[1.0, 0.0], [0.25, -1.0]]]])  # two grey ones of 2x2 pixels
PIXELS = np.array([[[0, 255], [128, 255]], [[255, 0], [64, 0]]], dtype=np.uint8)


class Shows(BoringModel):
    """Shows images at the end of each validation."""

    images = IMAGES

    def on_validation_epoch_end(self):
        log_images(self.trainer, "val_samples", self.images)


def fit(loggers, folder, model):
    limits = {"max_steps": 2, "limit_val_batches": 1, "val_check_interval": 2, "num_sanity_val_steps": 1}
    make_trainer(folder, logger=loggers, **limits).fit(model)


@pytest.mark.whole
def test_every_logger_that_can_shows_them(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # creating a database takes ten seconds
    monkeypatch.setattr("mlflow.tracking.context.git_context._resolve_git_info", dict)  # it leaves a git behind
    loggers = [
        CSVLogger(tmp_path, name="csv"),
        TensorBoardLogger(tmp_path, name="tensorboard", version=""),
        WandbLogger(save_dir=tmp_path, offline=True),
        MLFlowLogger(tracking_uri=(tmp_path / "runs").as_uri(), artifact_location=(tmp_path / "artifacts").as_uri()),
    ]
    try:
        fit(loggers, tmp_path, Shows())
        wandb.finish()
    finally:
        wandb.teardown()

    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    (shown,) = events.Images("val_samples")  # and none of the sanity check
    assert shown.step == 2
    grid = np.asarray(Image.open(BytesIO(shown.encoded_image_string)))
    assert grid[..., 0].tolist() == np.hstack(PIXELS).tolist()

    files = sorted(tmp_path.glob("wandb/offline-run-*/files/media/images/val_samples_*.png"))
    assert sorted(np.asarray(Image.open(file)).tolist() for file in files) == sorted(PIXELS.tolist())

    files = sorted(tmp_path.glob("artifacts/*/artifacts/images/val_samples?[01]?step?2?*.png"))
    assert [np.asarray(Image.open(file)).tolist() for file in files] == PIXELS.tolist()


@pytest.mark.parametrize(
    ("images", "error", "complaint"),
    [
        (torch.zeros(2, 2), ValueError, r"Got images of shape \(2, 2\), expected \(count, channels, height, width\)"),
        (torch.zeros(1, 2, 4, 4), ValueError, "with 1 or 3 channels"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), TypeError, r"Got images of torch.int64, expected uint8"),
    ],
)
def test_mistakes(images, error, complaint, tmp_path):
    model = Shows()
    model.images = images
    with pytest.raises(error, match=complaint):
        fit([TensorBoardLogger(tmp_path)], tmp_path, model)
