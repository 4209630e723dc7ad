"""pytorch-forecasting: models made from a dataset, which log through an override of `log`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from pytorch_forecasting import Baseline, DeepAR, NBeats, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import GroupNormalizer, NaNLabelEncoder
from pytorch_forecasting.metrics import SMAPE, NormalDistributionLoss, QuantileLoss

REQUIRES = ("pytorch-forecasting==1.8.0", "torch==2.15.0", "lightning==2.6.6")


def series() -> pd.DataFrame:
    """Return six series of 40 steps with season, trend, noise, and a price that is known in advance."""
    random = np.random.default_rng(3)
    rows = []
    for number in range(6):
        steps = np.arange(40)
        price = 1 + random.random(40)
        volume = 20 + number + 0.2 * steps + 3 * np.sin(steps / 3 + number) - price + 0.3 * random.standard_normal(40)
        month = [str(step % 12) for step in steps]
        rows.append(
            pd.DataFrame(
                {"series": f"s{number}", "step": steps, "price": price, "volume": volume, "month": month}
            ).astype({"price": "float32", "volume": "float32"})
        )
    return pd.concat(rows, ignore_index=True)


def loaders(**options: Any) -> tuple[Any, Any, Any]:
    """Return the training set, its dataloader, and a dataloader for validation."""
    table = series()
    options = {
        "time_idx": "step",
        "target": "volume",
        "group_ids": ["series"],
        "time_varying_unknown_reals": ["volume"],
        "max_encoder_length": 12,
        "max_prediction_length": 4,
        **options,
    }
    training = TimeSeriesDataSet(table[table.step < 32], **options)
    validation = TimeSeriesDataSet.from_dataset(training, table, min_prediction_idx=32)
    train = training.to_dataloader(train=True, batch_size=16, num_workers=0)
    return training, train, validation.to_dataloader(train=False, batch_size=16, num_workers=0)


def train(run: Any, model: Any, train: Any, val: Any, **options: Any) -> str:
    """Fit with clipping, test, reload, predict. Returns the checkpoint."""
    callbacks = [EarlyStopping("val_loss", patience=5), LearningRateMonitor()]
    sizes = {"limit_train_batches": 6, "gradient_clip_val": 0.1, "max_epochs": 2, **options}
    trainer = run.Trainer(callbacks=callbacks, **sizes)
    trainer.fit(model, train, val)
    run.keep("test", trainer.test(model, val, verbose=False))
    path = trainer.checkpoint_callback.best_model_path
    again = run.reload(type(model), path)
    run.seed(2)
    arguments = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    predicted = again.predict(val, trainer_kwargs=dict(arguments), return_index=True, return_y=True)
    run.keep("predicted", [predicted.output, predicted.index, predicted.y])
    run.seed(2)
    raw = again.predict(val, mode="raw", return_x=True, trainer_kwargs=dict(arguments))
    run.keep("raw", raw.output.prediction)
    return path


def go_on(run: Any, model: type[Any], path: str, train: Any, val: Any, **options: Any) -> None:
    """Resume. A plateau schedule must not be used: Lightning skips its step at the end of the saved epoch."""
    sizes = {"limit_train_batches": 6, "gradient_clip_val": 0.1, "max_epochs": 3, "num_sanity_val_steps": 0}
    with run.resume():
        trainer = run.Trainer(**{**sizes, **options})
        again = model.load_from_checkpoint(path, weights_only=False)
        trainer.fit(again, train, val, ckpt_path=path, weights_only=False)


def case_temporal_fusion_transformer(run: Any) -> None:
    """TemporalFusionTransformer with quantiles, gradient flow logged, clipping"""
    dataset, training, validation = loaders(
        static_categoricals=["series"],
        time_varying_known_reals=["step", "price"],
        time_varying_known_categoricals=["month"],
        target_normalizer=GroupNormalizer(groups=["series"], transformation="softplus"),
        add_relative_time_idx=True,
        add_target_scales=True,
    )
    sizes = {"hidden_size": 8, "attention_head_size": 2, "hidden_continuous_size": 4, "dropout": 0.1}
    model = TemporalFusionTransformer.from_dataset(
        dataset, learning_rate=0.03, loss=QuantileLoss([0.1, 0.5, 0.9]), log_interval=4, log_val_interval=1,
        log_gradient_flow=True, reduce_on_plateau_patience=1, optimizer="adam", output_size=3, **sizes,
    )  # fmt: skip
    train(run, model, training, validation)


def case_deepar(run: Any) -> None:
    """DeepAR: samples from a distribution in validation and prediction, clipping by value"""
    dataset, training, validation = loaders(
        static_categoricals=["series"],
        time_varying_known_reals=["price"],
        target_normalizer=GroupNormalizer(groups=["series"]),
        categorical_encoders={"series": NaNLabelEncoder().fit(series().series)},
    )
    model = DeepAR.from_dataset(
        dataset, learning_rate=[0.05, 0.04, 0.03], hidden_size=8, rnn_layers=2, loss=NormalDistributionLoss(),
        log_interval=4, log_val_interval=1, optimizer="adamw",
    )  # fmt: skip
    path = train(run, model, training, validation, gradient_clip_algorithm="value")
    go_on(run, DeepAR, path, training, validation, gradient_clip_algorithm="value")


def case_nbeats(run: Any) -> None:
    """N-BEATS: the library's own optimizer, backcast loss, accumulation"""
    _, training, validation = loaders(target_normalizer=GroupNormalizer(groups=["series"]))
    model = NBeats.from_dataset(
        training.dataset, learning_rate=[0.01, 0.005], widths=[16, 64], backcast_loss_ratio=0.1, log_interval=4,
        log_gradient_flow=True, weight_decay=1e-2,
    )  # fmt: skip
    path = train(run, model, training, validation, accumulate_grad_batches=2)
    go_on(run, NBeats, path, training, validation, accumulate_grad_batches=2)


def case_baseline(run: Any) -> None:
    """Baseline: a model without parameters that only predicts"""
    _, _, validation = loaders()
    arguments = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    predicted = Baseline().predict(validation, return_y=True, trainer_kwargs=arguments)
    run.keep("error", SMAPE()(predicted.output, predicted.y))
