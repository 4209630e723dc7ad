"""Fits of ``test_checkpoints.py`` that save and resume, by DDP and by FSDP2.

``torchrun ... checkpoints_worker.py FOLDER`` saves the results of each rank to ``FOLDER/rank_R.pt``.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.worker import BATCH, Shard, precision_of, samples
from tests.distributed.worker import Regression as Plain
from tests.mixed_states import MixedStates
from trainer import CheckpointFiles, FSDP2Strategy, Trainer
from trainer.checkpoint import conversion
from trainer.engine.sharding import state_dicts as state

FORMS = {"folder": {"sharded": True}, "folder later": {"sharded": True, "asynchronous": True}, "file": {}}
"""How a checkpoint is written."""

LATE = {(1, 0), (1, 1)}
WINDOWS: tuple[Any, ...] = (
    ("folder later", (), True), ("folder", (), False), ("file", LATE, True), ("file", LATE, False),
)  # fmt: skip
"""Form, the batches without a loss on rank 1 (all of the window so far), and whether each batch reduces gradients."""

SAVED = ("fsdp folder", "fsdp folder later", "fsdp file", "ddp folder", "ddp file", "single folder", "single file")
"""Strategy that saved a checkpoint, and its form."""

CONVERTED = ("consolidated", "sharded again")
"""Conversions of FSDP's folder."""

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p, foreach=False),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, foreach=False),
    "ASGD": lambda p: torch.optim.ASGD(p, foreach=False),
    "mixed states": MixedStates,
}


CACHING = {"buffers, ddp": ("ddp", "file"), "buffers, fsdp": ("fsdp", "folder")}
"""Strategy and form of checkpoints of a module with buffers outside the state dict."""


class Net(Plain):
    """Parameters of uneven shards, a buffer, two groups of parameters, and one of a single element."""

    def __init__(self, optimizer: str = "AdamW fused", none_at: Any = ()) -> None:
        super().__init__(none_at)
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3), nn.Tanh(), nn.Linear(3, 2))
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(2))
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        if (self.global_rank, batch_idx) in self.none_at and self.trainer.training:
            return None
        features, target = batch
        return nn.functional.mse_loss(self.net(features).float() * self.gain, target)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        groups = [{"params": list(self.net.parameters())}, {"params": [self.gain], "lr": 0.02}]
        return OPTIMIZERS[self.optimizer](groups)


class Caching(Net):
    """Has growing buffers outside the state dict, which DDP broadcasts from rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("past", torch.zeros(1, 2), persistent=False)
        self.register_buffer("first", None, persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.training:
            self.past = torch.cat([self.past, batch[1].detach()[:1, :2]])
            if self.first is None:
                self.first = batch[1].detach().mean().reshape(1) + self.global_rank
        loss = super().training_step(batch, batch_idx)
        return loss + (self.gain * (self.past.mean() + self.first)).sum()


class Seen(Callback):
    """Records whole weights and optimizer states at the start and the end of training."""

    def __init__(self) -> None:
        self.at: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._look("start", trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._look("end", trainer, pl_module)

    def _look(self, when: str, trainer: Any, pl_module: Any) -> None:
        found = {
            "weights": pl_module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        }
        buffers = {name: buffer.clone() for name, buffer in pl_module.named_buffers()}
        whole = state.gathered(found, keep=True)
        self.at[when] = {
            "buffers": buffers,
            "weights": {name: value.clone() for name, value in whole["weights"].items()},
            "optimizers": torch.utils._pytree.tree_map(
                lambda one: one.clone() if isinstance(one, Tensor) else one, whole["optimizers"]
            ),
        }


class Saves(Callback):
    """Saves a checkpoint inside an open window: after batch 1 of the second epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 1):
            trainer.save_checkpoint(self.path)


def fit(
    folder: Path,
    strategy: Any,
    form: str,
    module: Net,
    *,
    devices: int = 2,
    ckpt: Any = None,
    more: Any = (),
    **arguments: Any,
) -> dict[str, Any]:
    seen = Seen()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=2, monitor="step", mode="max")
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, limit_train_batches=5, logger=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, use_distributed_sampler=False,
        callbacks=[seen, saver, *more], plugins=CheckpointFiles(**FORMS[form]), **arguments,
    )  # fmt: skip
    loader = DataLoader(samples(), batch_size=BATCH // devices, sampler=Shard(devices))
    trainer.fit(module, loader, ckpt_path=ckpt)
    (tested,) = trainer.test(module, loader, ckpt_path=saver.best_model_path, verbose=False)
    return {**seen.at, "best": saver.best_model_path, "tested": tested}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    for name in SAVED:
        strategy, _, form = name.partition(" ")
        if strategy != "single":
            results[name] = fit(folder / name, strategy, form, Net(), max_epochs=2)
    for strategy in ("fsdp", "ddp"):
        for name in SAVED:
            path = results[name]["best"] if name in results else str(folder / name / "step=10.ckpt")
            found = fit(folder / "resumed", strategy, "file", Net(), max_epochs=3, ckpt=path, exact_resume=False)
            results[f"{name} -> {strategy}"] = found
    if torch.distributed.get_rank() == 0:
        conversion.consolidate(Path(results["fsdp folder"]["best"]), folder / "consolidated.ckpt")
        conversion.split(folder / "consolidated.ckpt", folder / "sharded again.ckpt")
    torch.distributed.barrier()
    for name in CONVERTED:
        results[name] = fit(folder / "resumed", "fsdp", "file", Net(), max_epochs=3, ckpt=folder / f"{name}.ckpt")
    for optimizer in OPTIMIZERS:
        whole = fit(folder / optimizer, "fsdp", "folder", Net(optimizer), max_steps=2)
        results[optimizer] = fit(folder / "resumed", "fsdp", "file", Net(optimizer), ckpt=whole["best"], max_steps=3)
        results[optimizer]["saved"] = whole["end"]
    for form, none_at, each in WINDOWS:
        fsdp: Any = partial(FSDP2Strategy, sync_each_batch=each)  # one for each Trainer
        name = f"window {form} {each} {bool(none_at)}"
        path, window = folder / f"{name}.ckpt", {"accumulate_grad_batches": 3, "max_epochs": 2}
        precision = precision_of("16-mixed")
        whole = fit(folder / "w", fsdp(), form, Net(none_at=none_at), more=[Saves(path)], precision=precision, **window)
        precision = precision_of("16-mixed")
        resumed = fit(folder / "r", fsdp(), form, Net(none_at=none_at), ckpt=path, precision=precision, **window)
        results[name] = {"whole": whole, "resumed": resumed}
    for name, (strategy, form) in CACHING.items():
        path = folder / f"{name}.ckpt"
        whole = fit(folder / "w", strategy, form, Caching(), more=[Saves(path)], max_epochs=2)
        results[name] = {
            "whole": whole,
            "resumed": fit(folder / "r", strategy, form, Caching(), ckpt=path, max_epochs=2),
        }
    torch.save(results, folder / f"rank_{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
