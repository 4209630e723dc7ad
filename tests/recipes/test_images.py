"""The recipes for photos, from the command line: training, test, prediction, and classes that differ."""

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset
from torchvision import models

from recipes.image_classification import ImageClassifier, PredictionTable
from recipes.transfer_learning import TransferNet
from tests.recipes.samples import THINGS, caltech256
from tests.support import make_trainer
from trainer.cli import main

SMALL = [
    *("trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false"),
    *("model.architecture=resnet18", "data.batch_size=8", "data.resize_size=36", "data.crop_size=32"),
    *("data.num_workers=0", "trainer.max_epochs=1"),
]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Four classes of 12 images, one of them gray and one with an alpha channel, and an empty file."""
    monkeypatch.chdir(tmp_path)
    folder = caltech256(tmp_path / "sample") / "256_ObjectCategories"
    shutil.rmtree(folder / "257.clutter")
    Image.new("RGBA", (40, 40), (0, 0, 255, 10)).save(folder / THINGS[1] / "056_0001.png")
    (folder / THINGS[0] / "empty.jpg").write_bytes(b"")
    return folder


@pytest.mark.whole
def test_folder_of_classes_is_all_that_a_training_needs(root, capsys):
    weights = Path("resnet18.pth")
    pretrained = models.resnet18()
    torch.save(pretrained.state_dict(), weights)
    frozen = ["model.frozen=true", f"model.weights={weights}"]
    with pytest.warns(UserWarning, match="1 of 51 images cannot be read"):
        assert main(["fit", "+recipe=images", f"data.root={root}", *SMALL, *frozen, "hydra.run.dir=run"]) == 0
    state = torch.load("run/checkpoints/last.ckpt", weights_only=True)
    assert torch.equal(state["state_dict"]["net.net.conv1.weight"], pretrained.conv1.weight)
    assert state["state_dict"]["net.net.fc.weight"].shape == (4, 512)
    assert state["hyper_parameters"]["classes"] == THINGS

    weights.unlink()  # only a new run needs it
    assert main(["test", "ckpt=run", "hydra.run.dir=tested"]) == 0
    assert json.loads(Path("tested/figures/test.json").read_text())["classes"] == THINGS

    new = Path("new")
    new.mkdir()
    for name in ("b.jpg", "a.jpg"):
        shutil.copy(root / THINGS[2] / "145_0001.jpg", new / name)
    (new / "broken.png").write_text("")
    capsys.readouterr()
    with pytest.warns(UserWarning, match="1 of 3 images cannot be read"):
        assert main(["predict", "ckpt=run", f"data.root={new}", "hydra.run.dir=predicted"]) == 0
    assert str(Path("predicted/predictions.csv")) in capsys.readouterr().out
    with Path("predicted/predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["path"]).name for row in rows] == ["a.jpg", "b.jpg"]
    assert {row["class"] for row in rows} <= set(THINGS)
    assert 0.25 <= float(rows[0]["probability"]) <= 1

    (root / THINGS[0]).rename(root / "001.bow")
    assert main(["test", "ckpt=run", "hydra.run.dir=other"]) != 0
    assert "001.bow" in capsys.readouterr().err


def test_number_of_classes_is_needed_unless_the_head_can_be_replaced():
    with pytest.raises(ValueError, match="num_classes"):
        ImageClassifier(models.resnet18(num_classes=3), torch.optim.SGD)
    module = ImageClassifier(TransferNet("resnet18", None), torch.optim.SGD, classes=["cat", "dog"])
    assert module.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 2)
    with pytest.raises(ValueError, match="num_classes is 2, but got 3"):
        ImageClassifier(TransferNet("resnet18", 2), torch.optim.SGD, num_classes=2, classes=["a", "b", "c"])


def test_data_without_classes_are_refused_before_the_first_batch(tmp_path):
    module = ImageClassifier(TransferNet("resnet18", None), torch.optim.SGD)
    data = DataLoader(TensorDataset(torch.zeros(4, 3, 32, 32), torch.zeros(4, dtype=torch.int64)))
    with pytest.raises(ValueError, match="num_classes is None, and the data module has no `classes`"):
        make_trainer(tmp_path).fit(module, data, data)


def test_predictions_of_other_datasets_have_the_index_of_the_image(tmp_path):
    trainer = SimpleNamespace(world_size=1, is_global_zero=True)
    table, module = PredictionTable(str(tmp_path)), LightningModule()
    probabilities, labels = torch.tensor([[0.25, 0.75], [0.5, 0.5]]), torch.ones(2)
    table.on_predict_start(trainer, module)
    table.write_on_batch_end(trainer, module, probabilities, [5, 4], (torch.zeros(2, 3, 8, 8), labels), 0, 0)
    table.on_predict_end(trainer, module)
    with table.path.open() as file:
        rows = [(row["path"], row["probability"]) for row in csv.DictReader(file)]
    assert rows == [("4", "0.5000"), ("5", "0.7500")]
