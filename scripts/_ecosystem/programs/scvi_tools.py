"""scvi-tools: a subclass of the Trainer, a datamodule, custom training plans, a logger that is a dictionary."""

from __future__ import annotations

from typing import Any

import anndata
import numpy as np
import pandas as pd
import scvi
from scvi.model import SCANVI, SCVI, TOTALVI, AmortizedLDA
from scvi.train import SaveCheckpoint

REQUIRES = ("scvi-tools==1.4.2", "anndata==0.12.19", "torch==2.15.0", "lightning==2.6.6")  # newer: Python 3.12
VARIES = (r"/_scvi_uuid$", r"/run_name_$")

SMALL = {"max_epochs": 3, "batch_size": 32, "accelerator": "cpu", "devices": 1, "enable_progress_bar": False}


def cells() -> Any:
    """Return 160 cells of three types with 40 genes and 6 proteins, in two batches. Some cells have no type."""
    random = np.random.default_rng(5)
    kind = random.integers(0, 3, 160)
    rates = 1 + 6 * random.random((3, 40))
    table = anndata.AnnData(random.poisson(rates[kind]).astype(np.float32))
    table.obs["batch"] = pd.Categorical([f"b{number % 2}" for number in range(160)])
    known = random.random(160) < 0.7
    table.obs["kind"] = pd.Categorical(np.where(known, np.array(["x", "y", "z"])[kind], "unknown"))
    table.obsm["protein"] = random.poisson(3 + 4 * kind[:, None], (160, 6)).astype(np.float32)
    return table


def prepare(run: Any) -> Any:
    """Set scvi's seed, log folder and number of workers, and return the cells."""
    scvi.settings.seed = 3
    scvi.settings.logging_dir = str(run.folder / "scvi_log")
    scvi.settings.dl_num_workers = 0
    return cells()


def keep(run: Any, model: Any) -> None:
    """Record the learned values of a model and its history."""
    run.weights(type(model).__name__, model.module)
    run.keep(f"history of {type(model).__name__}", {key: value.to_dict() for key, value in model.history.items()})


def case_scvi(run: Any) -> None:
    """SCVI: KL warm-up, plateau schedule, early stopping, clipping; the library's save and load; trained further"""
    table = prepare(run)
    SCVI.setup_anndata(table, batch_key="batch")
    model = SCVI(table, n_hidden=16, n_latent=4)
    plan = {"lr": 3e-3, "n_epochs_kl_warmup": 2, "reduce_lr_on_plateau": True, "lr_patience": 1}
    model.train(**SMALL, early_stopping=True, plan_kwargs=plan, gradient_clip_val=5.0, train_size=0.8)
    keep(run, model)
    run.keep("latent", model.get_latent_representation())
    model.save(str(run.folder / "saved"), overwrite=True)
    again = SCVI.load(str(run.folder / "saved"), adata=table, accelerator="cpu")
    run.note("reload", "SCVI.load", again.module.state_dict())
    run.keep("elbo", float(again.get_elbo()))
    with run.resume():
        again.train(**SMALL, train_size=0.8)
        keep(run, again)


def case_checkpoints(run: Any) -> None:
    """SCVI with SaveCheckpoint, which writes folders instead of Lightning's files and loads the best at the end"""
    table = prepare(run)
    SCVI.setup_anndata(table)
    model = SCVI(table, n_hidden=16, n_latent=4)
    saver = SaveCheckpoint(run.folder / "best", monitor="elbo_validation", load_best_on_end=True, save_top_k=2)
    model.train(**SMALL, callbacks=[saver], enable_checkpointing=True, check_val_every_n_epoch=1, train_size=0.8)
    keep(run, model)
    run.keep("best", saver.best_model_path)
    again = SCVI.load(saver.best_model_path, adata=table, accelerator="cpu")
    run.note("reload", "best", again.module.state_dict())


def case_adversarial(run: Any) -> None:
    """TOTALVI: manual optimization, two optimizers in turn, an adversary, a schedule stepped by hand"""
    table = prepare(run)
    TOTALVI.setup_anndata(table, batch_key="batch", protein_expression_obsm_key="protein")
    model = TOTALVI(table, n_latent=4, empirical_protein_background_prior=False)
    small = {key: value for key, value in SMALL.items() if key != "devices"}
    model.train(**small, adversarial_classifier=True, reduce_lr_on_plateau=True, early_stopping=True)
    keep(run, model)
    run.keep("latent", model.get_latent_representation())
    model.save(str(run.folder / "saved"), overwrite=True)
    again = TOTALVI.load(str(run.folder / "saved"), adata=table, accelerator="cpu")
    run.note("reload", "TOTALVI.load", again.module.state_dict())


def case_scanvi(run: Any) -> None:
    """SCANVI from a trained SCVI: semi-supervised, labels resampled by a callback before each epoch"""
    table = prepare(run)
    SCVI.setup_anndata(table, batch_key="batch", labels_key="kind")
    first = SCVI(table, n_hidden=16, n_latent=4)
    first.train(**SMALL)
    model = SCANVI.from_scvi_model(first, labels_key="kind", unlabeled_category="unknown")
    small = {key: value for key, value in SMALL.items() if key != "devices"}
    model.train(**small, n_samples_per_label=8, check_val_every_n_epoch=1)
    keep(run, model)
    run.keep("kinds", list(model.predict()))


def case_topics(run: Any) -> None:
    """AmortizedLDA: Pyro, no Lightning optimizer, a warm-up batch drawn in on_train_start"""
    table = prepare(run)
    AmortizedLDA.setup_anndata(table)
    model = AmortizedLDA(table, n_topics=4, n_hidden=16)
    small = {key: value for key, value in SMALL.items() if key != "devices"}
    model.train(**small, train_size=0.8)
    keep(run, model)
    run.keep("topics", model.get_latent_representation().to_numpy())
    model.save(str(run.folder / "saved"), overwrite=True)
    again = AmortizedLDA.load(str(run.folder / "saved"), adata=table, accelerator="cpu")
    run.note("reload", "AmortizedLDA.load", again.module.state_dict())
