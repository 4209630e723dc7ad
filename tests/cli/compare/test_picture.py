from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.compare.test_verdict import GB, run
from trainer.cli.compare.picture import draw
from trainer.cli.compare.verdict import Metric, Run
from trainer.record.reader import RunRecord

ACC = Metric("val_acc", higher_is_better=True)


def with_curves(precision, losses, accuracies=(), skipped=(), stage="val", **how):
    steps = list(range(1, len(losses) + 1))
    curves = {
        "losses": {"steps": steps, "values": losses},
        "skipped": {"steps": list(skipped), "values": list(range(1, len(skipped) + 1))},
        "metrics": {stage: {"val_acc": {"steps": steps[: len(accuracies)], "values": list(accuracies)}}},
    }
    return run(precision, curves=curves, **how)


def failed(**facts):
    return Run("a", RunRecord({"status": "failed", **facts}, Path()))


@pytest.fixture
def runs():
    return [
        with_curves("32-true", [4.0, 2.0, 1.0], [0.25, 0.5]),
        with_curves("16-mixed", [4.0, 3.0, 2.0], [0.25, 0.75], [2], rate=150.0, memory=6 * GB),
    ]


def test_panels(runs):
    loss, metric, speed, memory = draw(runs, ACC, "a: b, c").axes
    assert loss.get_title("left") == "Training loss (x: a skipped step)"
    losses = [list(line.get_ydata()) for line in loss.lines if line.get_marker() == "None"]
    assert losses == [[4.0, 2.0, 1.0]] * 2 + [[4.0, 3.0, 2.0]] * 2  # as they are, and smoothed
    assert [list(line.get_xdata()) for line in loss.lines if line.get_marker() == "x"] == [[], [2]]
    assert {text.get_text() for text in loss.texts} == {"32-true", "16-mixed"}
    assert metric.get_title("left") == "val_acc"
    assert [line.get_xydata().tolist() for line in metric.lines] == [[[1, 0.25], [2, 0.5]], [[1, 0.25], [2, 0.75]]]
    assert {text.get_text() for text in metric.texts} == {"32-true 0.5", "16-mixed 0.75"}
    assert loss.get_shared_x_axes().joined(loss, metric)
    assert speed.get_title("left") == "Samples per second"
    assert [bar.get_width() for bar in speed.patches] == [100.0, 150.0]
    assert [text.get_text() for text in speed.texts] == ["100", "150   1.50x"]
    assert memory.get_title("left") == "Peak memory (GPU), MiB"
    assert [text.get_text() for text in memory.texts] == ["10,240", "6,144   -40%"]
    assert [label.get_text() for label in speed.get_yticklabels()] == ["32-true", "16-mixed"]


def test_a_run_has_one_colour_everywhere(runs):
    from matplotlib.colors import to_hex

    loss, metric, speed, memory = draw(runs, ACC, "").axes
    ours = [
        *(line.get_color() for line in loss.lines if list(line.get_ydata())[-1:] == [2.0]),
        next(text.get_color() for text in loss.texts if text.get_text() == "16-mixed"),
        metric.lines[1].get_color(),
        to_hex(speed.patches[1].get_facecolor()),
        to_hex(memory.patches[1].get_facecolor()),
    ]
    assert len(ours) > 4
    assert len(set(ours)) == 1
    assert ours[0] != metric.lines[0].get_color()


def test_what_is_not_there_is_left_out(runs):
    titles = [axes.get_title("left") for axes in draw([run("a"), *runs], None, "").axes]
    assert titles[0].startswith("Training loss")
    assert "val_acc" not in titles
    assert draw([failed()], ACC, "") is None
    broken = {"losses": {"steps": [1], "values": [math.nan]}}
    figure = draw([failed(curves=broken), runs[0]], ACC, "")
    assert [text.get_text() for text in figure.axes[2].texts] == ["-", "100"]


def test_a_metric_of_the_training(runs):
    figure = draw([with_curves("32-true", [1.0], [0.5], stage="train")], ACC, "")
    assert [axes.get_title("left") for axes in figure.axes][1] == "val_acc"


def test_it_becomes_a_file_without_pyplot_and_torch(tmp_path):
    program = (
        "import sys\nsys.modules['matplotlib.pyplot'] = None\n"
        "from pathlib import Path\n"
        "from trainer.cli.compare.picture import draw\nfrom trainer.cli.compare.verdict import Run\n"
        "from trainer.record.reader import RunRecord\n"
        "facts = {'curves': {'losses': {'steps': [1, 2], 'values': [2.0, 1.0]}}}\n"
        f"draw([Run('a', RunRecord(facts, Path()))], None, 'A').savefig({str(tmp_path / 'a.png')!r})\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert (tmp_path / "a.png").stat().st_size > 10_000
