"""pytorch-tabular: builds the Trainer from a config, loads its best checkpoint at the end, has its own file format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig

REQUIRES = ("pytorch-tabular==1.2.0", "requests", "torch==2.15.0", "pytorch-lightning==2.6.6")
PYTORCH_LIGHTNING = True


def case_regression(run: Any) -> None:
    """Categories embedded, clipping, early stopping; the library's own save and load"""
    random = np.random.default_rng(0)
    table = pd.DataFrame({name: random.normal(size=200) for name in "ab"} | {"c": random.choice(["x", "y", "z"], 200)})
    table["target"] = table.a * 2 + (table.c == "x") + 0.1 * random.normal(size=200)
    model = TabularModel(
        data_config=DataConfig(target=["target"], continuous_cols=["a", "b"], categorical_cols=["c"], num_workers=0),
        model_config=CategoryEmbeddingModelConfig(task="regression", layers="16-8", learning_rate=1e-2, dropout=0.1),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            max_epochs=3, batch_size=32, accelerator="cpu", progress_bar="none", gradient_clip_val=0.5,
            checkpoints_path=str(run.folder / "checkpoints"),
        ),
    )  # fmt: skip
    model.fit(train=table[:160], validation=table[160:], seed=1)
    run.keep("evaluated", model.evaluate(table[160:], verbose=False))
    run.keep("predicted", model.predict(table[160:]))
    model.save_model(str(run.folder / "saved"))
    again = TabularModel.load_model(str(run.folder / "saved"))
    run.note("reload", "load_model", again.model.state_dict())
    run.keep("predicted again", again.predict(table[160:]))
