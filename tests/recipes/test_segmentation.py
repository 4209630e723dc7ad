import json
from functools import partial
from io import BytesIO

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from recipes.schedules import onecycle
from recipes.segmentation import MaskPictures, MaskWriter, Segmenter, UNet, coloured, segmentation_loss
from tests.support import loader_of, make_trainer

ADAMW = partial(torch.optim.AdamW, lr=0.01)


class Brightness(nn.Module):
    """Predicts class 1 for images above 0."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, images):
        return torch.cat([-images[:, :1], images[:, :1]], dim=1) * self.weight


# Loaders yield whole batches with the names in the batch.
unknown_indices = pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices")


def halves(count, names=False):
    """Batches of two images, bright on the left or on the right half; with masks or with names."""
    batches = []
    for number in range(count):
        images = torch.full((2, 3, 8, 8), -1.0)
        images[0, :, :, :4] = images[1, :, :, 4:] = 1.0
        batches.append((images, [f"{number}_a", f"{number}_b"] if names else (images[:, 0] > 0).long()))
    return batches


def test_mask_is_as_large_as_its_image():
    net = UNet(3, width=4, depth=2)
    masks = net(torch.randn(2, 3, 12, 24))
    assert masks.shape == (2, 3, 12, 24)
    masks.square().sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())  # of every level
    for height, width in ((12, 22), (22, 12)):
        with pytest.raises(ValueError, match=f"The images have {height}x{width} pixels, expected multiples of 4"):
            net(torch.zeros(1, 3, height, width))


def test_loss_is_cross_entropy_plus_dice():
    masks = torch.tensor([[[0, 0], [1, 1]]])
    logits = torch.zeros(1, 3, 2, 2)
    third = 1 / 3
    dice_1 = (2 * 2 * third + 1) / (4 * third + 2 + 1)
    dice_2 = 1 / (4 * third + 1)  # of a class that is not there
    expected = -np.log(third) + 1 - (dice_1 + dice_2) / 2
    assert segmentation_loss(logits, masks).item() == pytest.approx(expected)

    right = torch.stack([masks == number for number in range(3)], dim=1) * 100.0
    assert segmentation_loss(right, masks).item() == pytest.approx(0.0, abs=1e-6)

    masks = torch.ones(2, 300, 300, dtype=torch.int64)  # more than float16's largest number, 65,504
    logits = torch.zeros(2, 2, 300, 300, dtype=torch.float16)
    loss = segmentation_loss(logits, masks)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(np.log(2) + 1 - 2 / 3, abs=1e-3)


def test_metrics_are_over_the_epoch_and_a_test_leaves_a_confusion_matrix_and_samples(tmp_path):
    module = Segmenter(Brightness(), ADAMW, num_classes=2)
    images, masks = halves(1)[0]
    wrong = masks.clone()
    wrong[0] = 1 - masks[0]  # half of all pixels; one image of the four
    (metrics,) = make_trainer(tmp_path).validate(module, loader_of([(images, masks), (images, wrong)]), verbose=False)
    assert set(metrics) == {"val_loss", "val_dice"}
    assert metrics["val_dice"] == pytest.approx(0.75)
    trainer = make_trainer(tmp_path, logger=CSVLogger(tmp_path, name="", version=""))
    (metrics,) = trainer.test(module, loader_of([(images, wrong)]), verbose=False)
    assert metrics["test_dice"] == pytest.approx(0.5)
    matrix = json.loads((tmp_path / "figures" / "test.json").read_text())
    assert matrix["counts"] == [[int(((wrong == i) & (masks == j)).sum()) for j in range(2)] for i in range(2)]
    with Image.open(tmp_path / "figures" / "test_samples.png") as picture:
        column = np.asarray(picture)[:72:3, :24:3, :3]  # three times as large
    height = images.shape[-2]
    truth, predicted = column[height : 2 * height], column[2 * height :]
    assert ((truth.sum(2) > 0) == wrong[0].numpy()).all()
    assert ((predicted.sum(2) > 0) == masks[0].numpy()).all()


@unknown_indices
def test_mask_is_written_for_each_image_and_nothing_is_kept(tmp_path):
    writer = MaskWriter(tmp_path / "masks", overview=3)
    trainer = make_trainer(tmp_path, callbacks=[writer])
    module = Segmenter(Brightness(), ADAMW, num_classes=2)
    assert trainer.predict(module, loader_of(halves(2, names=True)), return_predictions=False) is None
    names = ["0_a.png", "0_b.png", "1_a.png", "1_b.png", "overview.png"]
    assert sorted(file.name for file in (tmp_path / "masks").iterdir()) == names
    assert writer.written == 4
    assert writer._shown == []
    with Image.open(tmp_path / "masks" / "1_b.png") as mask:
        assert mask.mode == "P"
        assert np.array_equal(np.asarray(mask), halves(1)[0][0][1, 0] > 0)
    with Image.open(tmp_path / "masks" / "overview.png") as overview:
        pixels = np.asarray(overview)
    assert pixels.shape == (16, 24, 3)  # three images above their masks
    assert pixels[[0, 0, 8, 8], [0, 7, 0, 7]].any(1).tolist() == [True, False, True, False]


def test_masks_are_shown_at_each_validation(tmp_path):
    trainer = make_trainer(
        tmp_path, logger=TensorBoardLogger(tmp_path, name="", version=""), callbacks=[MaskPictures(1)]
    )
    trainer.fit(Segmenter(Brightness(), ADAMW, onecycle, num_classes=2), loader_of(halves(3)), loader_of(halves(2)))
    assert trainer.lr_scheduler_configs[0].scheduler.total_steps == 3
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (shown,) = events.Images("val_masks")
    image, true, found = np.asarray(Image.open(BytesIO(shown.encoded_image_string))).reshape(3, 8, 8, 3)
    assert shown.step == 3
    assert true.tolist() == found.tolist() == np.asarray(coloured(np.uint8(image[..., 0] > 0)).convert("RGB")).tolist()


@unknown_indices
def test_name_leads_out_of_no_folder(tmp_path):
    batch = (halves(1)[0][0], ["fine", "../out"])
    trainer = make_trainer(tmp_path, callbacks=[MaskWriter(tmp_path / "masks")])
    with pytest.raises(ValueError, match=r"'../out', expected a name"):
        trainer.predict(Segmenter(Brightness(), ADAMW, num_classes=2), loader_of([batch]))
    assert not (tmp_path / "out.png").exists()


def test_classes_have_distinct_colors():
    colours = np.asarray(coloured(np.arange(12, dtype=np.uint8).reshape(3, 4)).convert("RGB")).reshape(-1, 3).tolist()
    assert (colours[0], len({tuple(colour) for colour in colours})) == ([0, 0, 0], 12)
