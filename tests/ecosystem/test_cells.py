"""Programs like scvi-tools: a custom Trainer, custom files, warm-ups and random draws in hooks."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ecosystem.support import unexpected


class History(Logger):
    """A dictionary; takes steps and epochs out of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.history: dict[str, list[Any]] = {}

    @property
    def name(self) -> str:
        return "history"

    @property
    def version(self) -> int:
        return 1

    @property
    @rank_zero_experiment
    def experiment(self) -> dict[str, list[Any]]:
        return self.history

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None: ...

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        when = metrics.pop("step") if "step" in metrics else metrics.pop("epoch") if "epoch" in metrics else step
        for key, value in metrics.items():
            self.experiment.setdefault(key, []).append((when, value))


def own_trainer(base: type[Any]) -> type[Any]:
    """A subclass of the Trainer with its own defaults, arguments and attributes, as in the library."""

    class OwnTrainer(base):
        def __init__(
            self,
            max_epochs: int = 3,
            check_val_every_n_epoch: int | None = None,
            early_stopping: bool = False,
            num_sanity_val_steps: int = 0,
            logger: Any = None,
            callbacks: Any = None,
            **arguments: Any,
        ) -> None:
            callbacks = callbacks if callbacks is not None else []
            if early_stopping:
                callbacks.append(EarlyStopping("elbo_validation", patience=2))
                check_val_every_n_epoch = 1
            super().__init__(
                max_epochs=max_epochs,
                check_val_every_n_epoch=check_val_every_n_epoch or sys.maxsize,
                num_sanity_val_steps=num_sanity_val_steps,
                logger=History() if logger is None else logger,
                callbacks=callbacks,
                accelerator="cpu",
                devices=1,
                enable_progress_bar=False,
                enable_model_summary=False,
                log_every_n_steps=10,
                **arguments,
            )
            self._model = None

        def fit(self, *arguments: Any, **options: Any) -> None:
            super().fit(*arguments, **options)

    return OwnTrainer


class Cells(LightningDataModule):
    """Splits by a permutation drawn in `setup`; its training loader draws labels again on request."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.randn(40, 5)

    def setup(self, stage: str) -> None:
        order = torch.randperm(40)
        self.train_order, self.val_order = order[:32], order[32:]

    def train_dataloader(self) -> Any:
        return Resampled(TensorDataset(self.features[self.train_order]), batch_size=8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.features[self.val_order]), batch_size=8)


class Resampled(DataLoader[Any]):
    """Has a method for a callback."""

    times = 0

    def resample_labels(self) -> None:
        type(self).times += 1
        torch.randint(3, (4,))


class Network(nn.Module):
    """An autoencoder with noise; its first batch initializes a part of it randomly, as a guide of Pyro's does."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.seen = nn.Linear(5, 2), nn.Linear(2, 5), 0
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        if not self.seen:
            self.shift.normal_()
        self.seen += 1
        hidden = self.encoder(features) + self.shift
        hidden = hidden + torch.randn_like(hidden) * 0.1
        return hidden, (self.decoder(hidden) - features).pow(2).sum(1)


class Plan(LightningModule):
    """Wraps the trained module; the weight of a loss term depends on epoch and step."""

    def __init__(self, module: Network, adversary: bool = False, plateau: bool = False) -> None:
        super().__init__()
        self.module, self.automatic_optimization, self.plateau = module, not adversary, plateau
        self.adversary = nn.Linear(2, 1) if adversary else None

    @property
    def kl_weight(self) -> float:
        return min(1.0, (self.current_epoch + self.global_step / 10) / 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden, errors = self.module(batch[0])
        loss = errors.mean() + self.kl_weight * hidden.pow(2).mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("kl_weight", self.kl_weight, on_step=True, on_epoch=False)
        if self.adversary is None:
            return {"loss": loss, "n": len(errors)}
        first, second = self.optimizers()
        judged = self.adversary(hidden).mean()
        first.zero_grad()
        self.manual_backward(loss - judged)
        self.clip_gradients(first, gradient_clip_val=1.0)
        first.step()
        judged = self.adversary(self.module(batch[0])[0].detach()).mean()
        second.zero_grad()
        self.manual_backward(judged)
        second.step()
        return None

    def on_train_epoch_end(self) -> None:
        self.log("elbo_train", self.trainer.callback_metrics["train_loss_epoch"] * 2)
        if self.adversary is not None and self.plateau and "elbo_validation" in self.trainer.callback_metrics:
            self.lr_schedulers().step(self.trainer.callback_metrics["elbo_validation"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("elbo_validation", self.module(batch[0])[1].mean(), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.module.parameters(), lr=0.02, weight_decay=1e-6)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(first, patience=0, threshold=0.1)
        if self.adversary is not None:
            second = torch.optim.Adam(self.adversary.parameters(), lr=0.01)
            return [first, second], [plateau] if self.plateau else []
        watched = {"scheduler": plateau, "monitor": "elbo_validation"}
        return {"optimizer": first, **({"lr_scheduler": watched} if self.plateau else {})}


class Resample(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.train_dataloader.resample_labels()


class WarmUp(Callback):
    """Runs a batch of a separate loader before the training."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for batch in trainer.datamodule.train_dataloader():
            pl_module.module(batch[0].to(pl_module.device))
            break


class SaveFolders(ModelCheckpoint):
    """Replaces each file by a folder, and loads the best one at the end."""

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        trainer._model.eval()
        path = self.format_checkpoint_name(self._monitor_candidates(trainer)).split(".ckpt")[0]
        os.makedirs(path, exist_ok=True)
        torch.save(trainer._model.state_dict(), os.path.join(path, "model.pt"))
        trainer._model.train()

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._remove_checkpoint(trainer, filepath)
        shutil.rmtree(filepath.split(".ckpt")[0], ignore_errors=True)

    def _update_best_and_save(self, current: Tensor, trainer: Any, monitor_candidates: Any) -> None:
        super()._update_best_and_save(current, trainer, monitor_candidates)
        if os.path.exists(self.best_model_path):
            os.remove(self.best_model_path)
        self.best_model_path = self.best_model_path.split(".ckpt")[0]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.module.load_state_dict(torch.load(os.path.join(self.best_model_path, "model.pt")))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        assert not torch.isnan(outputs.get("loss") if isinstance(outputs, dict) else outputs).any()


def trained(base: type[Any], plan: Plan, **arguments: Any) -> dict[str, Any]:
    """Fit, and return the results."""
    trainer = own_trainer(base)(**arguments)
    trainer._model = plan.module
    before = Resampled.times
    trainer.fit(plan, Cells())
    return {
        "weights": plan.state_dict(),
        "history": trainer.logger.history,
        "metrics": dict(trainer.callback_metrics),
        "steps": trainer.global_step,
        "random": torch.rand(()),
        "resampled": Resampled.times - before,
        "seen": plan.module.seen,
        "rates": [[group["lr"] for group in one.param_groups] for one in trainer.optimizers],
        "stopped": trainer.early_stopping_callback is not None and trainer.early_stopping_callback.stopped_epoch,
    }


ARGUMENTS: dict[str, dict[str, Any]] = {
    "never validated": {"callbacks": [Resample()]},
    "stopped early": {"early_stopping": True, "max_epochs": 6, "gradient_clip_val": 0.5},
    "warmed up": {"callbacks": [WarmUp(), Resample()], "check_val_every_n_epoch": 1},
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("adversary", [False, True])
def test_custom_trainer(tmp_path, name, adversary):
    """Hooks that draw random numbers, and validations that do not occur."""
    arguments = dict(ARGUMENTS[name])
    if adversary:
        arguments.pop("gradient_clip_val", None)  # refused with manual optimization

    def scenario(trainer_class: Any, folder: Path) -> dict[str, Any]:
        given = {**arguments, "callbacks": list(arguments.get("callbacks", []))}
        plan = Plan(Network(), adversary, plateau=name != "never validated")
        return trained(trainer_class, plan, enable_checkpointing=False, default_root_dir=folder, **given)

    assert unexpected(scenario, tmp_path) == []


def test_folders_instead_of_files(tmp_path):
    """A ModelCheckpoint that removes each file after it is written, and saves in evaluation mode."""

    def scenario(trainer_class: Any, folder: Path) -> dict[str, Any]:
        saver = SaveFolders(folder / "saved", monitor="elbo_validation", save_top_k=2)
        options = {"callbacks": [saver], "check_val_every_n_epoch": 1, "max_epochs": 4}
        seen = trained(trainer_class, Plan(Network(), plateau=True), default_root_dir=folder, **options)
        names = sorted(str(path.relative_to(folder)) for path in (folder / "saved").rglob("*"))
        return {**seen, "names": names, "best": saver.best_model_path, "kept": saver.best_k_models}

    assert unexpected(scenario, tmp_path) == []
