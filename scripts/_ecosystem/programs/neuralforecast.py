"""neuralforecast: each model builds its own Trainers; imports `pytorch_lightning`."""

from __future__ import annotations

from typing import Any

import numpy
import pandas
from neuralforecast import NeuralForecast
from neuralforecast.losses.pytorch import DistributionLoss, MQLoss
from neuralforecast.models import LSTM, NHITS
from pytorch_lightning.callbacks import ModelCheckpoint

PYTORCH_LIGHTNING = True
REQUIRES = ("neuralforecast==3.3.0", "torch==2.15.0", "pytorch-lightning==2.6.6")
VARIES = (r"hyper[-_]parameters/callbacks(/|$)",)  # Lightning's Trainer and the recorder append to this list

QUICK = {
    "h": 7, "input_size": 21, "max_steps": 24, "val_check_steps": 6, "early_stop_patience_steps": 3, "batch_size": 2,
    "windows_batch_size": 16, "random_seed": 3, "accelerator": "cpu", "enable_progress_bar": False,
}  # fmt: skip


def case_nhits_lstm(run: Any) -> None:
    """NHITS with quantiles, LSTM with a distribution: fit with clipping, predict, save, load, predict"""
    nhits = NHITS(
        loss=MQLoss(level=[80]), mlp_units=[[16, 16]] * 3, scaler_type="robust", gradient_clip_val=0.5, **QUICK
    )
    small = {"encoder_hidden_size": 8, "decoder_hidden_size": 8, "encoder_n_layers": 1}
    lstm = LSTM(loss=DistributionLoss(distribution="Normal", level=[80]), **small, **QUICK)
    forecasts = NeuralForecast(models=[nhits, lstm], freq="D")
    forecasts.fit(series(), val_size=14)
    keep(run, "fitted", forecasts)
    forecasts.save(str(run.folder / "saved"), overwrite=True, save_dataset=True)
    keep(run, "loaded", NeuralForecast.load(str(run.folder / "saved")))
    with run.resume():  # a second fit continues from the weights of the first
        forecasts.fit(series(), val_size=14)


def case_checkpoint(run: Any) -> None:
    """NHITS with a ModelCheckpoint: load_from_checkpoint"""
    saver = ModelCheckpoint(run.folder / "best", monitor="ptl/val_loss", save_last=True)
    model = NHITS(mlp_units=[[16, 16]] * 3, callbacks=[saver], enable_checkpointing=True, logger=False, **QUICK)
    NeuralForecast(models=[model], freq="D").fit(series(), val_size=14)
    run.reload(NHITS, run.folder / "best" / "last.ckpt")  # the saver is a copy by now


def case_cross_validation(run: Any) -> None:
    """NHITS: cross-validation with a refit of each window, each with another Trainer"""
    forecasts = NeuralForecast(models=[NHITS(mlp_units=[[16, 16]] * 3, **QUICK)], freq="D")
    windows = forecasts.cross_validation(series(), n_windows=2, val_size=14, refit=True)
    run.keep("cross-validation", windows["NHITS"])


def keep(run: Any, name: str, forecasts: Any) -> None:
    run.keep(f"{name}: forecast", forecasts.predict().select_dtypes("number"))
    for model in forecasts.models:
        run.weights(f"{name}: {model}", model)
        run.keep(f"{name}: {model}: losses", [model.train_trajectories, model.valid_trajectories])


def series() -> Any:
    """Four series with a weekly season."""
    numbers, parts = numpy.random.default_rng(0), []
    for index in range(4):
        days = pandas.date_range("2020-01-01", periods=120, freq="D")
        values = 10 + index + 3 * numpy.sin(numpy.arange(120) / 7 * 2 * numpy.pi) + numbers.normal(size=120)
        parts.append(pandas.DataFrame({"unique_id": f"series {index}", "ds": days, "y": values}))
    return pandas.concat(parts)
