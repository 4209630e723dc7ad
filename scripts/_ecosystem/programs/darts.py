"""darts: builds the Trainer from `pl_trainer_kwargs`, with a custom CheckpointIO; imports `pytorch_lightning`."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from darts import TimeSeries
from darts.models import BlockRNNModel, NBEATSModel, TFTModel
from darts.utils.likelihood_models.torch import QuantileRegression
from pytorch_lightning.callbacks import EarlyStopping
from torchmetrics import MeanAbsoluteError

PYTORCH_LIGHTNING = True
REQUIRES = ("darts==0.48.1", "torch==2.15.0", "pytorch-lightning==2.6.6")
VARIES = (r"/_fs_token_$",)


def case_nbeats(run: Any) -> None:
    """N-BEATS in float64 with a metric and early stopping: fit, predict, save and load, its checkpoints, fit again"""
    model = NBEATSModel(
        input_chunk_length=12, output_chunk_length=4, num_stacks=2, num_blocks=1, num_layers=1, layer_widths=8,
        torch_metrics=MeanAbsoluteError(), **common(run, "nbeats", callbacks=[EarlyStopping("val_loss", patience=3)]),
    )  # fmt: skip
    check(run, model, NBEATSModel, series())


def case_rnn(run: Any) -> None:
    """LSTM in float32: clipping, a schedule, accumulation"""
    model = BlockRNNModel(
        input_chunk_length=12, output_chunk_length=4, model="LSTM", hidden_dim=8, dropout=0.1, n_rnn_layers=2,
        lr_scheduler_cls=torch.optim.lr_scheduler.ExponentialLR, lr_scheduler_kwargs={"gamma": 0.9},
        **common(run, "rnn", gradient_clip_val=0.5, accumulate_grad_batches=2),
    )  # fmt: skip
    check(run, model, BlockRNNModel, series().astype(numpy.float32))


def case_tft(run: Any) -> None:
    """Temporal Fusion Transformer with quantiles: a search for the learning rate, samples, historical forecasts"""
    model = TFTModel(
        input_chunk_length=12, output_chunk_length=4, hidden_size=4, lstm_layers=1, num_attention_heads=2,
        likelihood=QuantileRegression([0.1, 0.5, 0.9]), add_relative_index=True, **common(run, "tft"),
    )  # fmt: skip
    values = series().astype(numpy.float32)
    found = model.lr_find(values, num_training=12)
    run.keep("learning rates", found.results)
    model.fit(values[:-20], val_series=values[-40:], epochs=2, verbose=False)
    run.keep("samples", model.predict(6, num_samples=5, verbose=False).all_values())
    past = model.historical_forecasts(values, start=0.9, forecast_horizon=2, retrain=False, verbose=False)
    run.keep("past", past.values())


def common(run: Any, name: str, **trainer: Any) -> dict[str, Any]:
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    return {
        "n_epochs": 4, "batch_size": 8, "random_state": 3, "save_checkpoints": True, "force_reset": True,
        "work_dir": str(run.folder), "model_name": name,
        "pl_trainer_kwargs": {**quiet, "log_every_n_steps": 1, **trainer},
    }  # fmt: skip


def check(run: Any, model: Any, cls: Any, values: Any) -> None:
    """Fit, predict; load the saved model and the checkpoints; train further."""
    model.fit(values[:-20], val_series=values[-40:], verbose=False)
    run.keep("forecast", model.predict(6, verbose=False).values())
    model.save(str(run.folder / "model.pt"))
    loaded = cls.load(str(run.folder / "model.pt"))
    run.keep("loaded", loaded.predict(6, verbose=False).values())
    best = cls.load_from_checkpoint(model.model_name, work_dir=str(run.folder), best=True)
    run.keep("best", best.predict(6, series=values, verbose=False).values())
    with run.resume():
        last = cls.load_from_checkpoint(model.model_name, work_dir=str(run.folder), best=False)
        last.fit(values[:-20], val_series=values[-40:], epochs=6, verbose=False)


def series() -> Any:
    numbers = numpy.random.default_rng(0)
    values = numpy.sin(numpy.arange(140) / 5) + 0.1 * numbers.normal(size=140)
    return TimeSeries.from_values(values)
