"""finetuning-scheduler: phases that unfreeze parameters and restore the best checkpoint in the middle of a fit."""

from __future__ import annotations

from typing import Any

import torch
from finetuning_scheduler import FinetuningScheduler, FTSCheckpoint, FTSEarlyStopping
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

REQUIRES = ("finetuning-scheduler==2.14.1", "torch==2.15.0", "lightning==2.6.6")
VARIES = (
    r"_log_dir",
    r"^weights: 3\. fit: random numbers/torch",
)  # Lightning's resumed run draws other, unused numbers

PHASES = """
0: {params: [layers.5.bias, layers.5.weight], max_transition_epoch: 2}
1: {params: [layers.3.bias, layers.3.weight], max_transition_epoch: 4}
2: {params: ["layers.[01].(weight|bias)"]}
"""
NEW = """
0: {params: [layers.5.bias, layers.5.weight], max_transition_epoch: 1}
1:
  params: [layers.3.bias, layers.3.weight]
  max_transition_epoch: 3
  new_lr_scheduler:
    lr_scheduler_init: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 1, gamma: 0.7}}
    pl_lrs_cfg: {interval: epoch, frequency: 1}
2:
  params: ["layers.[01].(weight|bias)"]
  new_optimizer:
    optimizer_init: {class_path: torch.optim.SGD, init_args: {lr: 0.01, momentum: 0.9}}
"""


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        wide = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)]
        self.layers = nn.Sequential(*wide)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(filter(lambda parameter: parameter.requires_grad, self.parameters()), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def loader(count: int, seed: int) -> Any:
    """Return a dataloader with a label for the sign of a product."""
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(inputs, (inputs[:, 0] * inputs[:, 1] > 0).long()), batch_size=8)


def finetune(run: Any, phases: str | None, **options: Any) -> None:
    """Fit, validate the best checkpoint, resume."""
    (run.folder / "phases.yaml").write_text(phases or "")

    def trainer() -> Any:
        scheduler = FinetuningScheduler(ft_schedule=str(run.folder / "phases.yaml") if phases else None)
        saver = FTSCheckpoint(run.folder / "checkpoints", monitor="val_loss", save_top_k=-1, save_last=True)
        return run.Trainer(
            max_epochs=8, callbacks=[scheduler, saver, FTSEarlyStopping("val_loss", patience=1)], **options
        )

    first, module = trainer(), Net()
    train, val = loader(48, 1), loader(32, 2)
    first.fit(module, train, val)
    run.keep("trained", {name: parameter.requires_grad for name, parameter in module.named_parameters()})
    run.keep("validated", first.validate(module, val, ckpt_path="best", weights_only=False, verbose=False))
    with run.resume():
        further = trainer()
        further.ckpt_path = next((run.folder / "checkpoints").glob("epoch=1-*.ckpt"))  # for the callback's setup
        further.fit(Net(), train, val, weights_only=False)


def case_generated(run: Any) -> None:
    """A schedule that the library generates, early stopping"""
    finetune(run, None)


def case_phases(run: Any) -> None:
    """Three phases, accumulation, clipping"""
    finetune(run, PHASES, accumulate_grad_batches=2, gradient_clip_val=0.5)


def case_new_parts(run: Any) -> None:
    """Phases with a new learning-rate schedule and a new optimizer, bf16-mixed"""
    finetune(run, NEW, precision="bf16-mixed")
