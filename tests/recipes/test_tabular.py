import re
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning import seed_everything
from torch.nn import functional as F
from torchmetrics.functional import r2_score

from recipes.data import Tabular
from recipes.tabular import TabularMLP
from tests.support import make_trainer

ADAMW = partial(torch.optim.AdamW, lr=2e-3)
TABLES = {"breast_cancer": (30, 2), "wine": (13, 3), "diabetes": (10, None)}
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "tabular.py"


def table(name, **options):
    features, classes = TABLES[name]
    return Tabular(name, num_features=features, num_classes=classes, **options)


def model(name, **options):
    features, classes = TABLES[name]
    return TabularMLP(ADAMW, num_features=features, num_classes=classes, width=32, **options)


def test_splits_are_disjoint_complete_and_stratified():
    data, other = table("wine"), table("wine", split_seed=1)
    data.setup("fit")
    other.setup("fit")
    features, _ = data.splits["train"].tensors
    assert torch.allclose(features.mean(0), torch.zeros(13), atol=1e-5)  # and so not of all rows
    assert torch.allclose(features.std(0, correction=0), torch.ones(13), atol=1e-5)
    assert [len(data.splits[name]) for name in ("train", "val", "test")] == [124, 27, 27]
    shares = [data.splits[name].tensors[1].bincount() / len(data.splits[name]) for name in ("train", "val")]
    assert torch.allclose(shares[0], shares[1], atol=0.02)
    assert len(torch.cat([data.splits[name].tensors[0] for name in ("train", "val", "test")]).unique(dim=0)) == 178
    assert not torch.equal(data.splits["test"].tensors[0], other.splits["test"].tensors[0])


def test_folds_divide_the_rows_that_are_not_in_the_test():
    whole, *folds = (table("wine", fold=fold, folds=3) for fold in (None, 0, 1, 2, 2))
    for data in (whole, *folds):
        data.setup("fit")
        assert torch.equal(data.splits["test"].tensors[1], whole.splits["test"].tensors[1])
        assert len(data.splits["train"]) + len(data.splits["val"]) == 151
        assert data.splits["train"].tensors[0].mean().item() == pytest.approx(0, abs=1e-6)
    counts = [data.splits["val"].tensors[1].bincount().tolist() for data in folds]
    assert counts[:3] == [[17, 20, 14], [17, 20, 13], [16, 20, 14]]
    assert torch.equal(folds[2].splits["val"].tensors[0], folds[3].splits["val"].tensors[0])


def test_regression_has_targets_of_every_size_in_every_split():
    data = table("diabetes")
    data.setup("fit")
    targets = {name: split.tensors[1] for name, split in data.splits.items()}
    assert targets["train"].dtype == torch.float32
    assert data.target_mean == pytest.approx(targets["train"].mean().item())
    assert data.target_std == pytest.approx(targets["train"].std(correction=0).item())
    deciles = torch.cat(list(targets.values())).quantile(torch.linspace(0.1, 0.9, 9))
    for held_out in (targets["val"], targets["test"]):
        assert len(held_out) == 66
        assert set(torch.bucketize(held_out, deciles, right=True).bincount(minlength=10).tolist()) <= {6, 7, 8}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "titanic"}, "name is titanic, expected one of breast_cancer, diabetes, wine"),
        ({"num_features": 4}, "num_features is 4, but wine has 13 features. Set data.num_features=13"),

        ({"fold": 5}, "fold is 5, expected 0 to 4, because data.folds is 5"),
        ({"num_classes": None}, "num_classes is None, but wine needs 3: it has classes"),
        ({"name": "diabetes", "num_features": 10}, "num_classes is 3, but diabetes needs null: its targets are num"),
    ],
)  # fmt: skip
def test_sizes_that_are_not_the_tables_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Tabular(**{"name": "wine", "num_features": 13, "num_classes": 3} | options).setup("fit")


def test_classifier_learns(tmp_path):
    seed_everything(0, verbose=False)
    module, data = model("wine", dropout=0.1), table("wine")
    trainer = make_trainer(tmp_path, max_epochs=12, precision="16-mixed")
    trainer.fit(module, datamodule=data)
    assert set(trainer.callback_metrics) == {"train_loss", "val_loss", "val_acc"}
    assert trainer.callback_metrics["val_acc"] >= 0.96
    predictions = torch.cat(trainer.predict(module, datamodule=data))
    assert torch.allclose(predictions.sum(1), torch.ones(27), atol=1e-3)
    (tested,) = trainer.test(module, datamodule=data, verbose=False)
    right = (predictions.argmax(1) == data.splits["test"].tensors[1]).float().mean().item()
    assert tested["test_acc"] == pytest.approx(right)


def test_regression_speaks_in_the_targets_unit(tmp_path):
    seed_everything(0, verbose=False)
    module, data = model("diabetes"), table("diabetes")
    trainer = make_trainer(tmp_path, max_epochs=12)
    trainer.fit(module, datamodule=data)
    assert trainer.callback_metrics["val_r2"] >= 0.45
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = TabularMLP.load_from_checkpoint(tmp_path / "last.ckpt", optimizer=ADAMW, weights_only=True)

    predictions = torch.cat(make_trainer(tmp_path).predict(loaded, datamodule=data))
    _, targets = data.splits["test"].tensors
    assert (predictions.shape, predictions.dtype) == (targets.shape, torch.float32)

    (tested,) = trainer.test(module, datamodule=data, verbose=False)
    assert tested["test_mae"] == pytest.approx((predictions - targets).abs().mean().item(), rel=1e-4)
    assert tested["test_r2"] == pytest.approx(r2_score(predictions, targets).item(), rel=1e-4)
    assert tested["test_loss"] == pytest.approx(F.mse_loss(predictions, targets).item() / data.target_std**2, rel=1e-4)


def test_unit_of_the_targets_stays_if_the_data_has_none(tmp_path):
    data, module = table("diabetes"), model("diabetes")
    make_trainer(tmp_path).fit(module, data)
    unit = module.target_mean.item(), module.target_std.item()
    make_trainer(tmp_path).fit(module, data.train_dataloader(), data.val_dataloader())
    assert (module.target_mean.item(), module.target_std.item()) == unit != (0.0, 1.0)


def test_targets_unit_may_be_too_large_or_too_fine_for_16_bits():
    module, features, dtype = model("diabetes"), torch.randn(50, 10), torch.float16
    module.target_mean.fill_(250_000.0)
    module.target_std.fill_(10.0)
    with torch.autocast("cpu", dtype=dtype), torch.no_grad():
        outputs = module.net(features).squeeze(1)
        numbers = module(features)
    assert outputs.dtype == dtype
    assert torch.equal(numbers, outputs.float() * 10.0 + 250_000.0)


@pytest.mark.whole
def test_example_for_newcomers_runs_and_is_right(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLE), run_name="__main__")  # warnings are errors here
    line = capsys.readouterr().out.splitlines()[-1]
    assert float(re.fullmatch(r"accuracy (0\.\d\d\d), 0 skipped steps", line)[1]) >= 0.94
