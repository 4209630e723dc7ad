"""Short fits of the recipes gpt and finetune for ``test_recipes.py``, by DDP and by FSDP2.

``torchrun ... recipes_worker.py FOLDER`` saves the results of each rank to ``FOLDER/rank_R.pt``, and the files of the
recipes to ``FOLDER/STRATEGY/SCENARIO``. ``FOLDER/model`` is the model to fine-tune.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, seed_everything
from torch.utils.data import DataLoader, Sampler, TensorDataset

from recipes.data.text import NO_TARGET
from recipes.finetune import FineTuner
from recipes.language_model import LanguageModel, TextSamples
from recipes.schedules import warmup_cosine
from tests.distributed.sharded_worker import Seen
from tests.support import HAS_FSDP2
from trainer import Trainer
from trainer.callbacks import ActivationCheckpointing

GLOBAL_BATCH = 8
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-3)  # the steps of tiny gradients mean little
SCHEDULE = partial(warmup_cosine, warmup=0.2)


class Part(Sampler[int]):
    """This rank's part of each global batch."""

    def __init__(self, number: int, processes: int) -> None:
        rank, size = int(os.environ.get("LOCAL_RANK", "0")), GLOBAL_BATCH // processes
        self.order = [
            i for start in range(0, number, GLOBAL_BATCH) for i in range(start + rank * size, start + (rank + 1) * size)
        ]

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Any:
        return iter(self.order)


def sequences() -> TensorDataset:
    """Random tokens below 256, in sequences of very different lengths."""
    draw = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, 256, (48, 16), generator=draw) for _ in range(2))
    lengths = torch.randint(1, 17, (48, 1), generator=draw)
    return TensorDataset(tokens, targets.masked_fill(torch.arange(16) >= lengths, NO_TARGET))


def texts() -> TensorDataset:
    """Random tokens with padding, and classes."""
    tokens, targets = sequences().tensors
    mask = (targets != NO_TARGET).long()
    return TensorDataset(tokens, mask, tokens[:, 0] % 3)


def scenarios(folder: Path) -> dict[str, tuple[Callable[[], LightningModule], Callable[[], TensorDataset]]]:
    """Return (module, its data) of each fit."""
    sizes = {"context": 16, "width": 16, "heads": 2, "layers": 2, "sample_length": 3}
    model, tuned = str(folder / "model"), partial(FineTuner, ADAMW, SCHEDULE)
    found: dict[str, Any] = {
        "gpt": (partial(LanguageModel, ADAMW, SCHEDULE, positions="rotary", **sizes), sequences),
        "gpt, tied": (partial(LanguageModel, ADAMW, tie_weights=True, **sizes), sequences),
    }
    if (folder / "model").is_dir():
        found |= {
            "finetune": (partial(tuned, folder=model), sequences),
            "finetune, lora": (partial(tuned, folder=model, lora_rank=4), sequences),
            "finetune, classes": (
                partial(tuned, folder=model, task="classification", num_classes=3, lora_rank=2),
                texts,
            ),
        }
    return found


def fit(name: str, folder: Path, strategy: str, processes: int) -> dict[str, Any]:
    """One fit of nine windows of two batches."""
    make, data = scenarios(folder)[name]
    seed_everything(7, verbose=False)
    module, seen, written = make(), Seen(), folder / strategy / name
    callbacks: list[Any] = [seen]
    if isinstance(module, FineTuner):
        module.save_to = str(written)
    else:
        callbacks += [TextSamples(str(written), prompt="The "), ActivationCheckpointing("Block")]
    trainer = Trainer(
        accelerator="cpu", devices=processes, strategy=strategy, max_epochs=3, accumulate_grad_batches=2,
        gradient_clip_val=0.5, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, use_distributed_sampler=False, num_sanity_val_steps=0, callbacks=callbacks,
    )  # fmt: skip
    loader = partial(DataLoader, data(), batch_size=GLOBAL_BATCH // processes, sampler=Part(48, processes))
    trainer.fit(module, loader(), loader())
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val_")}
    return {"weights": seen.weights, "norms": seen.norms, "metrics": metrics, "global_step": trainer.global_step}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    strategies = ("ddp", "fsdp") if HAS_FSDP2 else ("ddp",)
    results = {
        name: {strategy: fit(name, folder, strategy, 2) for strategy in strategies} for name in scenarios(folder)
    }
    torch.save(results, folder / f"rank_{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
