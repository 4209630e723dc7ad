import json
import math
import sys
from itertools import pairwise
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from matplotlib.image import imread

from trainer import Trainer
from trainer.callbacks.curves import Curves, Series, training_loss
from trainer.precision import MixedPrecision


class Net(torch.nn.Module):
    """Stands for a module in the title."""


class FakeTrainer:
    """What the curves read of a trainer, and the hooks of a fit in their order."""

    precision = "16-mixed"
    accumulate_grad_batches = 1
    num_training_batches = 5
    world_size = 1
    strategy = SimpleNamespace(root_device=torch.device("cpu"))

    def __init__(self, folder, curves):
        self.default_root_dir = folder
        self.loggers: list = []
        self.curves = curves
        self.is_global_zero = True
        self.current_epoch = self.global_step = 0
        self.callback_metrics = {}
        self.module = Net()

    def train_batch(self, loss, scale=65536.0, skipped=False):
        self.global_step += 1
        next_scale = scale / 2 if skipped else scale
        outcome = SimpleNamespace(skipped=skipped, scale=scale, next_scale=next_scale)
        for optimizer in ("generator", "discriminator"):
            self.curves.on_after_optimizer_step(self, None, optimizer, outcome)
        self.callback_metrics["train_loss"] = torch.tensor(loss)  # as logged on each step
        self.curves.on_train_batch_end(self, None, {"loss": torch.tensor(loss)}, None, 0)

    def validate(self, **metrics):
        self.curves.on_validation_start(self, None)
        self.callback_metrics |= {name: torch.tensor(value) for name, value in metrics.items()}
        self.curves.on_validation_end(self, None)

    def end_epoch(self, **metrics):
        self.callback_metrics |= {name: torch.tensor(value) for name, value in metrics.items()}
        self.curves.on_train_epoch_end(self, None)
        self.current_epoch += 1

    def fit(self, epochs=2):
        """Losses 1/step, an overflow in the third step."""
        self.validate(val_loss=9.0)  # sanity check
        self.curves.on_train_start(self, self.module)
        for epoch in range(epochs):
            for batch_idx in range(self.num_training_batches):
                third = epoch == 0 and batch_idx == 2
                halved = self.global_step >= 3
                self.train_batch(1 / (self.global_step + 1), 32768.0 if halved else 65536.0, skipped=third)
            self.validate(val_loss=0.5 - epoch / 8, val_acc=0.5 + epoch / 4, f1=0.125)
            self.end_epoch(train_acc=0.25 + epoch / 4, epoch_time=3.0)
        self.curves.on_fit_end(self, self.module)


def points(series):
    return dict(zip(series.steps, series.read(), strict=True))


@pytest.fixture
def curves():
    return Curves()


def test_points(tmp_path, curves):
    FakeTrainer(tmp_path, curves).fit()
    assert points(curves.losses) == pytest.approx({step: 1 / step for step in range(1, 11)})
    assert points(curves.scales) == {1: 65536.0, 4: 32768.0}
    assert points(curves.skipped) == {3: 65536.0}
    assert {name: points(series) for name, series in curves.metrics["val"].items()} == {
        "val_loss": {5: 0.5, 10: 0.375},
        "val_acc": {5: 0.5, 10: 0.75},
        "f1": {5: 0.125, 10: 0.125},
    }
    # Not train_loss: its last value was logged before the validation, and is not new.
    assert {name: points(series) for name, series in curves.metrics["train"].items()} == {
        "train_acc": {5: 0.25, 10: 0.5},
        "epoch_time": {5: 3.0, 10: 3.0},
    }


def test_picture(tmp_path, curves, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # an import of it raises
    FakeTrainer(tmp_path / "new", curves).fit()
    assert curves.path == tmp_path / "new" / "curves.png"
    height, width, _ = imread(curves.path).shape
    assert width == 1350
    assert 1000 < height < 1300


def test_the_points_are_left_beside_the_picture(tmp_path, curves):
    FakeTrainer(tmp_path, curves).fit()
    written = json.loads((tmp_path / "curves.json").read_text())
    assert written == curves.state_dict() | {"pace": curves.pace.state_dict()}
    assert written["pace"]["seconds"]["steps"] == [*range(1, 11)]
    assert written["metrics"]["val"]["val_acc"] == {"steps": [5, 10], "values": [0.5, 0.75], "stride": 1}


def test_the_points_are_written_while_the_fit_goes_on(tmp_path, curves, monkeypatch):
    trainer = FakeTrainer(tmp_path, curves)
    seconds = 0.0
    monkeypatch.setattr("trainer.callbacks.curves.time.monotonic", lambda: seconds)
    curves.on_train_start(trainer, trainer.module)
    trainer.train_batch(0.5)
    trainer.end_epoch()
    assert list(tmp_path.iterdir()) == []
    seconds = 11.0
    trainer.train_batch(0.25)
    trainer.validate(val_loss=0.75)
    assert [file.name for file in tmp_path.iterdir()] == ["curves.json"]
    written = json.loads((tmp_path / "curves.json").read_text())
    assert written["losses"]["values"] == [0.5, 0.25]
    assert written["metrics"]["val"]["val_loss"]["values"] == [0.75]
    trainer.train_batch(0.125)
    trainer.end_epoch()
    assert json.loads((tmp_path / "curves.json").read_text()) == written
    trainer.is_global_zero, seconds = False, 30.0
    trainer.end_epoch()
    assert json.loads((tmp_path / "curves.json").read_text()) == written


def test_panels(tmp_path, curves):
    FakeTrainer(tmp_path, curves).fit()
    figure = curves.draw("Net, 16-mixed")
    loss, accuracy, scale = figure.axes
    assert [axes.get_title("left") for axes in figure.axes] == ["Loss", "Score", "Loss scale"]
    assert loss.lines[0].get_ydata() == pytest.approx([1 / step for step in range(1, 11)])
    assert loss.lines[2].get_xydata().tolist() == [[5, 0.5], [10, 0.375]]
    assert {text.get_text() for text in loss.texts} == {"train", "val_loss"}
    assert {text.get_text() for text in accuracy.texts} == {"train_acc 0.500", "val_acc 0.750", "f1 0.125"}
    assert scale.lines[0].get_xydata().tolist() == [[1, 65536], [4, 32768], [10, 32768]]
    assert scale.lines[0].get_drawstyle() == "steps-post"
    assert scale.lines[1].get_xydata().tolist() == [[3, 65536]]
    assert scale.get_yscale() == "log"
    assert scale.yaxis.get_transform().base == 2
    assert scale.get_ylim() == (16384, 131072)
    assert loss.get_shared_x_axes().joined(loss, scale)
    assert {round(axes.get_xlim()[1], 2) for axes in figure.axes} == {10.09}


def test_panels_without_points_are_left_out(tmp_path, curves):
    trainer = FakeTrainer(tmp_path, curves)
    curves.on_train_start(trainer, trainer.module)
    trainer.train_batch(1.0, scale=1.0)
    trainer.validate(val_acc=0.5)
    assert [axes.get_title("left") for axes in curves.draw().axes] == ["Loss", "Accuracy"]


def test_nothing_to_draw(tmp_path, curves):
    trainer = FakeTrainer(tmp_path, curves)
    curves.on_train_start(trainer, trainer.module)
    curves.on_train_batch_end(trainer, None, None, None, 0)
    curves.on_fit_end(trainer, trainer.module)
    assert curves.path is None
    assert list(tmp_path.iterdir()) == []


def test_losses_that_are_not_finite(tmp_path, curves):
    trainer = FakeTrainer(tmp_path, curves)
    curves.on_train_start(trainer, trainer.module)
    for loss in (math.nan, 1.0, math.inf, 3.0, math.nan):
        trainer.train_batch(loss)
    trainer.validate(val_loss=math.nan, val_acc=math.nan)
    curves.on_fit_end(trainer, trainer.module)
    assert curves.path.exists()
    low, high = curves.draw().axes[0].get_ylim()
    assert low < 1 < 3 < high


def test_a_loss_over_decades_is_drawn_on_a_log_scale(tmp_path, curves):
    trainer = FakeTrainer(tmp_path, curves)
    curves.on_train_start(trainer, trainer.module)
    for exponent in range(6):
        trainer.train_batch(10.0**-exponent)
    assert curves.draw().axes[0].get_yscale() == "log"


def test_points_are_thinned_out(tmp_path):
    curves = Curves(max_points=100)
    trainer = FakeTrainer(tmp_path, curves)
    curves.on_train_start(trainer, trainer.module)
    for step in range(1, 1001):
        trainer.train_batch(float(step))
    assert 50 <= len(curves.losses) <= 100
    assert all(step == loss for step, loss in points(curves.losses).items())
    gaps = {after - before for before, after in pairwise(curves.losses.steps)}
    assert gaps == {curves.losses.stride} == {16}


def test_a_loss_on_a_device_is_not_read_until_the_epoch_ends(tmp_path, curves):
    trainer = FakeTrainer(tmp_path, curves)
    curves.on_train_start(trainer, trainer.module)
    loss = torch.tensor(1.0, device="meta")  # has no value: to read it raises
    curves.on_train_batch_end(trainer, None, {"loss": loss}, None, 0)
    assert len(curves.losses) == 1
    with pytest.raises((RuntimeError, NotImplementedError)):
        curves.on_train_epoch_end(trainer, None)


def test_series_reads_tensors_in_place():
    series = Series(max_points=4)
    value = torch.tensor(1.0)
    series.append(1, value)
    series.append(2, torch.tensor(2.0, dtype=torch.float16))
    series.append(3, 3.0)
    series.append(4, torch.tensor(4.0))
    assert series.read() == [1.0, 2.0, 3.0, 4.0]
    series.append(5, torch.tensor(5.0))
    assert points(series) == {1: 1.0, 3: 3.0, 5: 5.0}
    assert series.stride == 2
    series.truncate(4)
    assert points(series) == {1: 1.0, 3: 3.0}


def test_resume(tmp_path, curves):
    trainer = FakeTrainer(tmp_path, curves)
    trainer.fit(epochs=2)
    state = curves.state_dict()
    torch.save(state, tmp_path / "state.pt")
    resumed = Curves()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.state_dict() == state
    again = FakeTrainer(tmp_path, resumed)
    again.global_step = 5  # from an earlier point than where the state is from
    resumed.on_train_start(again, again.module)
    again.train_batch(0.75)
    assert points(resumed.losses) == pytest.approx({1: 1, 2: 1 / 2, 3: 1 / 3, 4: 1 / 4, 5: 1 / 5, 6: 0.75})
    assert points(resumed.metrics["val"]["val_loss"]) == {5: 0.5}
    assert resumed.draw() is not None


def test_validations_are_no_part_of_the_pace(tmp_path, curves):
    trainer = FakeTrainer(tmp_path, curves)
    now = 0.0
    curves.pace._clock = lambda: now
    curves.on_train_start(trainer, trainer.module)
    now = 1.0
    trainer.train_batch(0.5)
    curves.on_validation_start(trainer, None)
    now = 61.0
    curves.on_validation_end(trainer, None)
    now = 62.0
    trainer.train_batch(0.5)
    assert points(curves.pace.seconds) == {1: 1.0, 2: 2.0}


def test_the_pace_of_a_resumed_run_goes_on_in_the_same_folder(tmp_path, curves):
    FakeTrainer(tmp_path, curves).fit()
    seconds = points(curves.pace.seconds)
    resumed = Curves()
    again = FakeTrainer(tmp_path, resumed)
    again.global_step = 5
    resumed.on_train_start(again, again.module)
    assert points(resumed.pace.seconds) == {step: seconds[step] for step in range(1, 6)}
    (tmp_path / "curves.json").write_text('{"losses": {')
    resumed = Curves()
    resumed.on_train_start(again, again.module)
    assert points(resumed.pace.seconds) == {}


def test_a_new_run_starts_afresh(tmp_path, curves):
    FakeTrainer(tmp_path, curves).fit()
    FakeTrainer(tmp_path, curves).fit(epochs=1)
    assert curves.losses.steps == [1, 2, 3, 4, 5]
    assert points(curves.metrics["val"]["val_acc"]) == {5: 0.5}


def test_an_interrupted_run_is_drawn(tmp_path, curves):
    trainer = FakeTrainer(tmp_path, curves)
    curves.on_exception(trainer, trainer.module, ValueError())
    assert curves.path is None  # not in a fit
    curves.on_train_start(trainer, trainer.module)
    trainer.train_batch(1.0)
    curves.on_exception(trainer, trainer.module, KeyboardInterrupt())
    assert curves.path == tmp_path / "curves.png"


def test_the_exception_of_a_fit_is_not_hidden_by_another(tmp_path, curves, caplog):
    (tmp_path / "file").touch()
    trainer = FakeTrainer(tmp_path / "file", curves)
    curves.on_train_start(trainer, trainer.module)
    trainer.train_batch(1.0)
    curves.on_exception(trainer, trainer.module, KeyboardInterrupt())
    assert "could not be drawn" in caplog.text
    with pytest.warns(UserWarning, match="could not be written"):
        curves.on_fit_end(trainer, trainer.module)
    assert curves.path is None


def test_only_rank_zero_draws(tmp_path, curves):
    trainer = FakeTrainer(tmp_path, curves)
    trainer.is_global_zero = False
    trainer.fit()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_ones_own(tmp_path):
    curves = Curves(dirpath=tmp_path / "mine")
    FakeTrainer(tmp_path / "run", curves).fit()
    assert curves.path == tmp_path / "mine" / "curves.png"


@pytest.mark.parametrize(
    ("trainer", "factor"),
    [
        ({"accumulate_grad_batches": 4, "loss_share": 1.0}, 1),
        ({"accumulate_grad_batches": 4, "loss_share": 0.5}, 2),
        ({"accumulate_grad_batches": 4, "loss_share": torch.tensor(0.125)}, 8),
        ({"accumulate_grad_batches": 4}, 4),  # Lightning's own
    ],
)
def test_training_loss_is_what_training_step_returned(trainer, factor):
    loss = torch.tensor(0.5)
    for outputs in (loss, {"loss": loss}):
        assert training_loss(SimpleNamespace(**trainer), outputs).item() == 0.5 * factor


@pytest.mark.parametrize("outputs", [None, {}, {"loss": 1.0}, {"logits": torch.zeros(1)}, torch.zeros(2)])
def test_no_training_loss(outputs):
    assert training_loss(SimpleNamespace(), outputs) is None


def test_wrong_arguments():
    with pytest.raises(ValueError, match="max_points=1: a curve needs at least 2"):
        Curves(max_points=1)


class Logging(BoringModel):
    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.losses.append(loss.item())
        self.log("train_acc", 0.25, on_step=False, on_epoch=True)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", 0.5 + self.current_epoch / 4)


BOTH_TRAINERS = pytest.mark.parametrize(
    "trainer_class", [Trainer, pytest.param(lightning.Trainer, marks=pytest.mark.filterwarnings("ignore"))]
)


def real_fit(trainer_class, curves, folder, module, ckpt_path=None, **options):
    trainer = trainer_class(
        accelerator="cpu",
        limit_val_batches=2,
        default_root_dir=folder,
        callbacks=[curves],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, "limit_train_batches": 3, **options},
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


@BOTH_TRAINERS
def test_a_real_fit(tmp_path, curves, trainer_class):
    module = Logging()
    real_fit(trainer_class, curves, tmp_path, module)
    assert points(curves.losses) == dict(enumerate(module.losses, start=1))
    val, train = curves.metrics["val"], curves.metrics["train"]
    assert {name: points(series) for name, series in val.items()} == {"val_acc": {3: 0.5, 6: 0.75}}
    assert {name: points(series) for name, series in train.items()} == {"train_acc": {3: 0.25, 6: 0.25}}
    assert [axes.get_title("left") for axes in curves.draw().axes] == ["Loss", "Accuracy"]
    assert curves.path == tmp_path / "curves.png"


def test_a_real_fit_with_loss_scaling(tmp_path, curves):
    class Overflow(BoringModel):
        def training_step(self, batch, batch_idx):
            return self.step(batch) * (float("inf") if batch_idx == 1 else 1.0)

    real_fit(Trainer, curves, tmp_path, Overflow(), precision=MixedPrecision("float16", init_scale=1024.0))
    assert points(curves.skipped) == {2: 1024.0, 5: 512.0}
    assert points(curves.scales) == {1: 1024.0, 3: 512.0, 6: 256.0}
    assert [axes.get_title("left") for axes in curves.draw().axes] == ["Loss", "Loss scale"]


def test_accumulation_does_not_shrink_the_loss(tmp_path, curves):
    module = Logging()
    real_fit(Trainer, curves, tmp_path, module, max_epochs=1, limit_train_batches=5, accumulate_grad_batches=3)
    assert curves.losses.read() == pytest.approx(module.losses)


def test_a_resumed_fit(tmp_path, curves):
    trainer = real_fit(Trainer, curves, tmp_path, Logging())
    resumed, module = Curves(), Logging()
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    real_fit(Trainer, resumed, tmp_path, module, max_epochs=3, ckpt_path=tmp_path / "end.ckpt")
    assert points(resumed.losses) == points(curves.losses) | dict(enumerate(module.losses, start=7))
    assert points(resumed.metrics["val"]["val_acc"]) == {3: 0.5, 6: 0.75, 9: 1.0}
