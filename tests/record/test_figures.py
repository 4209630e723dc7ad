"""Files of figures: paths, contents, writers, and errors."""

import json
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from torchmetrics.classification import MulticlassConfusionMatrix

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.record.figures import figures_of, write_confusion_matrix, write_pictures
from trainer.record.run_recorder import RunRecorder

COUNTS = torch.tensor([[3, 1], [0, 2]])


class Evaluated(Regression):
    def test_step(self, batch, batch_idx):
        pass

    def on_test_epoch_end(self):
        metric = MulticlassConfusionMatrix(2)
        metric.update(torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 0, 0, 0, 1, 1]))
        write_confusion_matrix(self.trainer, "test", metric.compute(), ["cat", "dog"])


def test_module_writes_a_matrix_into_the_folder_of_its_run(tmp_path):
    trainer = make_trainer(tmp_path / "default", callbacks=[RunRecorder(dirpath=tmp_path / "run")])
    trainer.test(Evaluated(), loader_of(make_batches(1)))
    figure = json.loads((tmp_path / "run" / "figures" / "test.json").read_text())
    assert figure == {"kind": "confusion matrix", "classes": ["cat", "dog"], "counts": [[3, 1], [0, 2]]}


def stand_in(folder, *, is_first=True):
    """A stand-in with the used attributes of a Trainer."""
    logger = SimpleNamespace(log_dir=str(folder))
    return SimpleNamespace(is_global_zero=is_first, callbacks=[], loggers=[logger], default_root_dir=str(folder))


def test_no_figures_on_other_ranks_and_without_a_local_folder(tmp_path):
    other_rank = stand_in(tmp_path, is_first=False)
    other_rank.callbacks = [SimpleNamespace(folder_of_record=lambda trainer: tmp_path)]
    for trainer in (other_rank, stand_in("s3://bucket")):
        assert figures_of(trainer) is None
        write_confusion_matrix(trainer, "test", COUNTS)
        write_pictures(trainer, "test", torch.zeros(1, 1, 4, 4))
    assert list(tmp_path.iterdir()) == []


def test_run_without_a_record_writes_no_figures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(tmp_path, callbacks=[RunRecorder(writes=False)], logger=False)
    trainer.test(Evaluated(), loader_of(make_batches(1)))
    make_trainer(tmp_path, L.Trainer).test(Evaluated(), loader_of(make_batches(1)))
    assert list(tmp_path.rglob("figures")) == []


def test_invalid_matrices_and_pictures(tmp_path):
    trainer = stand_in(tmp_path)
    with pytest.raises(ValueError, match=r"Got counts of shape \(2, 3\), expected \(classes, classes\)"):
        write_confusion_matrix(trainer, "test", torch.zeros(2, 3))
    with pytest.raises(ValueError, match="Got 3 names for 2 classes"):
        write_confusion_matrix(trainer, "test", COUNTS, ["a", "b", "c"])
    for shape in ((3, 4, 4), (1, 2, 4, 4)):
        with pytest.raises(ValueError, match="expected \\(count, channels, height, width\\) of 1 or 3 channels"):
            write_pictures(trainer, "x", torch.zeros(shape))
    write_confusion_matrix(trainer, "val", COUNTS)
    assert json.loads((tmp_path / "figures" / "val.json").read_text())["classes"] == ["0", "1"]


def test_small_pictures_are_enlarged_and_placed_in_a_row(tmp_path):
    images = torch.stack([torch.tensor([[[-1.0, 3.0], [1.0, 3.0]]]), *[torch.ones(1, 2, 2)] * 8])
    write_pictures(stand_in(tmp_path), "nine", images, ["3", "5, not 6"])
    pixels = np.asarray(Image.open(tmp_path / "figures" / "nine.png"))
    assert pixels.shape == (2 * (72 + 6 + 16), 8 * (72 + 6), 4)
    assert [pixels[y, x, 0] for y, x in ((0, 0), (0, 71), (71, 0), (71, 71))] == [0, 255, 128, 255]
    assert (pixels[0, 0, 3], pixels[0, 75, 3]) == (255, 0)  # nothing between them
    assert pixels[74:90, :72, 3].any()  # a caption
    assert not pixels[74:90, 160:, 3].any()


def test_uint8_color_pictures_are_kept_and_large_ones_made_smaller(tmp_path):
    images = torch.arange(3 * 80 * 100, dtype=torch.int64).remainder(256).to(torch.uint8).reshape(1, 3, 80, 100)
    for name, given in (("one", images), ("large", torch.zeros(1, 3, 1024, 512))):
        write_pictures(stand_in(tmp_path), name, given)
    one, large = (np.asarray(Image.open(tmp_path / "figures" / f"{name}.png")) for name in ("one", "large"))
    assert (one.shape, large.shape) == ((86, 106, 4), (256 + 6, 128 + 6, 4))
    assert np.array_equal(one[:80, :100, :3], images[0].permute(1, 2, 0).numpy())
