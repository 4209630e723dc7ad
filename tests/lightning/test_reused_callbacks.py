"""A callback of Lightning in the fits of two Trainers: the second fit equals one with a new callback."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging, Timer
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging

from tests.support import Regression, loader_of, make_batches, make_trainer

MAKE = {
    "early stopping": lambda: EarlyStopping("score", patience=2),
    "exponential average": lambda: EMAWeightAveraging(decay=0.5),
    "stochastic average": lambda: StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=2),
    "checkpoints": lambda: ModelCheckpoint(monitor="score"),
    "timer": lambda: Timer(duration={"hours": 1}),
}


def fit(folder, callback, first, trainer=None):
    """Fit a module that logs a score that falls from ``first`` on. Return the Trainer and the results."""
    saves, module = isinstance(callback, ModelCheckpoint), Regression()
    module.validation_step = lambda batch, batch_idx: module.log("score", first - module.current_epoch, batch_size=4)
    trainer = trainer or make_trainer(folder, max_epochs=5, callbacks=[callback], enable_checkpointing=saves)
    trainer.fit(module, loader_of(make_batches(3)), loader_of(make_batches(1)))
    best = Path(callback.best_model_path).relative_to(folder) if saves else None
    return trainer, (trainer.current_epoch, trainer.global_step, best, [p.tolist() for p in module.parameters()])


@pytest.mark.parametrize("kind", MAKE)
def test_fit_of_another_trainer_equals_that_with_a_new_callback(tmp_path, kind):
    callback = MAKE[kind]()
    fit(tmp_path / "first", callback, 10.0)
    if isinstance(callback, Timer):
        callback.load_state_dict({"time_elapsed": {"train": 3600.0}})
    _, expected = fit(tmp_path / "expected", MAKE[kind](), 100.0)
    _, reused = fit(tmp_path / "second", callback, 100.0)
    assert reused == expected
    assert reused[0] == 5


def test_folder_that_the_user_sets_between_the_fits_is_used(tmp_path):
    saver = ModelCheckpoint(tmp_path / "first")
    fit(tmp_path, saver, 10.0)
    saver.dirpath = str(tmp_path / "second")
    fit(tmp_path, saver, 10.0)
    assert Path(saver.best_model_path).parent == tmp_path / "second"


def test_second_fit_of_the_same_trainer_continues(tmp_path):
    """The time of a Timer begins again."""
    stops, timer = EarlyStopping("score", patience=2), Timer(duration={"microseconds": 1})
    trainer, _ = fit(tmp_path, stops, 10.0)
    trainer.fit_loop.max_epochs = 9
    fit(tmp_path, stops, 100.0, trainer)
    assert (trainer.current_epoch, stops.best_score) == (7, torch.tensor(6.0))
    trainer, _ = fit(tmp_path, timer, 10.0)
    assert trainer.global_step == 1
    fit(tmp_path, timer, 10.0, trainer)
    assert trainer.global_step == 2
