"""The picture of a run: its panels and their contents."""

import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.callbacks import Curves, RunRecorder
from trainer.record.curves import figure_of
from trainer.record.run_record import RunRecord, load_run


def series(points):
    return {"steps": [*points], "values": [*points.values()], "stride": 1}


def record(scale=32768.0, losses=None, **more):
    """Return losses of 1/step with an overflow in the third step."""
    curves = {
        "losses": series({step: 1 / step for step in range(1, 11)} if losses is None else losses),
        "scales": series({1: 65536.0, 4: 32768.0}),
        "skipped": series({3: 1}),
        "metrics": {
            "train": {"train_acc": series({5: 0.25, 10: 0.5}), "epoch_time": series({5: 3.0, 10: 3.0})},
            "val": {
                "val_loss": series({5: 0.5, 10: 0.375}),
                "val_acc": series({5: 0.5, 10: 0.75}),
                "f1": series({5: 0.125, 10: 0.125}),
                "perplexity": series({5: 0.5, 10: 30.0}),
            },
        },
    }
    return RunRecord({"module": "Net", "precision": "16-mixed", "scale": scale, "curves": curves | more}, Path())


def titles(figure):
    return [axes.get_title("left") for axes in figure.axes]


def test_panels():
    figure = figure_of(record())
    loss, accuracy, *_, scale = figure.axes
    assert figure._suptitle.get_text() == "Net, 16-mixed"
    assert titles(figure) == ["Loss", "acc", "f1", "perplexity", "Loss scale"]
    assert loss.lines[0].get_ydata() == pytest.approx([1 / step for step in range(1, 11)])
    assert loss.lines[1].get_xydata().tolist() == [[5, 0.5], [10, 0.375]]
    legends = [[text.get_text() for text in axes.get_legend().texts] for axes in (loss, accuracy)]
    assert legends == [["train", "val_loss"], ["train_acc", "val_acc"]]
    skips = [[1, 65536], [4, 32768], [10, 32768]], [[3, 65536]]
    assert [line.get_xydata().tolist() for line in scale.lines[:2]] == [*skips]
    assert (scale.lines[0].get_drawstyle(), scale.get_yscale()) == ("steps-post", "log")
    assert (scale.yaxis.get_transform().base, scale.get_ylim()) == (2, (16384, 131072))
    assert loss.get_shared_x_axes().joined(loss, scale)
    assert {round(axes.get_xlim()[1], 2) for axes in figure.axes} == {10.15}


def test_panels_without_points_are_left_out():
    metrics = {"val": {"val_acc": series({1: 0.5})}}
    assert titles(figure_of(record(metrics=metrics, scales=None))) == ["Loss", "val_acc"]
    assert titles(figure_of(record(scale=None, metrics={}, scales=series({1: 1.0})))) == ["Loss"]
    assert figure_of(record(losses={}, metrics=[], scales=None)) is None


@pytest.mark.draws
def test_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # an import of it raises
    curves = Curves()
    assert curves.draw(record(), tmp_path / "new") == {"curves": tmp_path / "new" / "curves.png"}
    height, width, _ = imread(curves.path).shape
    assert width == 1350
    assert 1700 < height < 2000
    assert curves.draw(record(losses={}, metrics={}, scales=None), tmp_path / "new") == {}
    assert curves.path is None


def fit(folder, *callbacks, **options):
    make_trainer(folder, callbacks=[*callbacks], **options).fit(Regression(), loader_of(make_batches(4)))


def test_fit(tmp_path):
    curves = Curves(dirpath=tmp_path / "mine", max_points=2)
    fit(tmp_path / "run", curves, RunRecorder())
    assert curves.path == tmp_path / "mine" / "curves.png"
    assert len(load_run(tmp_path / "mine").losses) == 2
    assert not (tmp_path / "run").exists()


def test_each_view_writes_to_its_own_folder(tmp_path):
    """A picture that cannot be written is a warning, and the others and the record are written."""
    (tmp_path / "file").touch()
    views = [Curves(dirpath=tmp_path / name) for name in ("file", "one", "two")]
    with pytest.warns(UserWarning, match="could not be written to .*file"):
        fit(tmp_path, RunRecorder(dirpath=tmp_path / "record"), *views, Curves())
    assert {path.parent.name for path in tmp_path.glob("*/curves.png")} == {"one", "two", "record"}
    assert load_run(tmp_path / "record").status == "completed"
    assert [view.path for view in views] == [None, tmp_path / "one" / "curves.png", tmp_path / "two" / "curves.png"]
