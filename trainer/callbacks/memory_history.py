"""Have the snapshot of a GPU's memory say which lines have allocated what."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info

from trainer.callbacks.run_callback import RunCallback


class MemoryHistory(RunCallback):
    """Records each allocation on a CUDA device, with the lines of Python that asked for it.

    Where memory runs out, the run leaves a snapshot of it in its folder, ``memory_snapshot.pickle``, for
    https://pytorch.org/memory_viz. Without this callback that shows which blocks there were; with it also whose they
    are, and how memory went up and down on the way there.

    Costs some 2 microseconds for each allocation (PyTorch's documentation, "Understanding CUDA Memory Usage"), and
    memory of the host, and of the file, of some KiB for each entry. On other devices it does nothing, and says so.

    Args:
        max_entries: the newest allocations and releases that are kept.

    Raises:
        ValueError: if `max_entries` is below 1.
    """

    def __init__(self, max_entries: int = 100_000) -> None:
        if max_entries < 1:
            raise ValueError(f"max_entries={max_entries}: expected 1 or more.")
        self.max_entries = max_entries
        self._record: Any = None  # torch's function, while it records

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begins, before the module comes to the device."""
        device = trainer.strategy.root_device
        record = getattr(torch.cuda.memory, "_record_memory_history", None)
        if device.type != "cuda" or record is None:
            rank_zero_info(f"MemoryHistory records nothing on {device}: torch tells of allocations on CUDA only.")
            return
        record(max_entries=self.max_entries, stacks="python")
        self._record = record

    def _let_go(self, trainer: Any) -> None:
        """Ends; where memory has run out, once the snapshot is written."""
        if self._record is not None:
            self._record(enabled=None)
            self._record = None
