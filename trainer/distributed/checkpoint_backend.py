"""The states of modules and optimizers, and the files of checkpoints, by one of Lightning's strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.migration.utils import pl_legacy_patch
from torch import Tensor
from torch.optim import Optimizer

from trainer.checkpoint import sharded_files
from trainer.checkpoint.checkpoint_io import CheckpointFiles, files_of, up_to_date, without_objects
from trainer.checkpoint.optimizer_states import SavedDtypes, keep_dtypes
from trainer.common.files import local_path
from trainer.errors import CheckpointError, CheckpointWriteError
from trainer.loop.engine_protocol import Engine


class _Engine(Engine, Protocol):
    @property
    def strategy(self) -> Strategy: ...


class CheckpointBackend:
    """The states of one device and of DDP. Engines with sharded parameters override the parts that differ.

    Args:
        engine: the engine, whose strategy reads and writes files.
    """

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine

    def module_state(self) -> dict[str, Any]:
        """Return the module's state dict. Sharded tensors stay sharded: :meth:`save` gathers them if necessary."""
        return self._engine.strategy.lightning_module_state_dict()

    def load_module_state(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load ``checkpoint["state_dict"]``. Its tensors may be whole, or sharded like the module's."""
        self._engine.strategy.load_model_state_dict(checkpoint, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of one optimizer."""
        return self._engine.strategy.optimizer_state(optimizer)

    def load_optimizer_states(self, checkpoint: Mapping[str, Any], saved: SavedDtypes) -> None:
        """Load ``checkpoint["optimizer_states"]`` with their saved dtypes, unless the strategy loads them itself.

        Args:
            checkpoint: the checkpoint. Tensors may be whole, or sharded like the parameters.
            saved: the dtype of each parameter when the checkpoint was saved.
        """
        if self._engine.strategy.lightning_restore_optimizer:
            with keep_dtypes(self._engine.optimizers, checkpoint["optimizer_states"], saved):
                self._engine.strategy.load_optimizer_state_dict(checkpoint)

    def save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint, a file from rank 0 or a folder from all ranks.

        Waits until it is written, unless the checkpoint IO writes in the background. All processes must call it
        together. For a file, sharded tensors are gathered one after the other.

        Raises:
            CheckpointError: on all ranks, if it, or an earlier one in the background, cannot be written.
        """
        write: Callable[[], Any]
        if self.saves_shards:
            write = self._files.wait  # may raise on rank 0 only, which removes old checkpoints
        else:
            whole = self.gathered(checkpoint)
            write = partial(self._engine.strategy.save_checkpoint, whole, path, storage_options=storage_options)
        self._on_all(write, f"The checkpoint {path} was not written", CheckpointWriteError)
        if self.saves_shards:
            self.save_shards(checkpoint, path)

    def save_shards(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Write a checkpoint as a folder; each process writes its part."""
        self._files.save_shards(checkpoint, path, self._engine.collectives.group("saves"))

    @property
    def saves_shards(self) -> bool:
        """Whether the checkpoints are folders (``CheckpointFiles(sharded=True)``)."""
        return getattr(files_of(self._engine.strategy), "sharded", False)

    @property
    def _files(self) -> CheckpointFiles:
        files = files_of(self._engine.strategy)
        assert files is not None
        return files

    def gathered(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return ``checkpoint`` with full tensors instead of sharded ones, on rank 0.

        All processes call this together.
        """
        return checkpoint

    def template(self, place: tuple[str, ...], shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor to read a tensor of a sharded checkpoint into; None for a plain one in host memory."""
        return None

    def reads_parts(self, folder: str | Path) -> bool:
        """Return whether the strategy itself reads the tensors of a sharded checkpoint, into the wrapped module."""
        return False

    def load(self, path: str | Path, weights_only: bool) -> dict[str, Any]:
        """Read a checkpoint; from a folder, only the parts for this process.

        All processes call this together if the checkpoint is a folder.
        """
        with pl_legacy_patch():
            folder = None if files_of(self._engine.strategy) is None else sharded_files.folder_at(path)
            if folder is not None:
                checkpoint = self._load_shards(folder, weights_only)
            else:
                local = local_path(path)
                if local is not None and (local.parent / sharded_files.MANIFEST).is_file():
                    raise CheckpointError(f"{local} is a part of a checkpoint. Expected the folder: {local.parent}")
                with without_objects(self._engine.strategy, path) if weights_only else nullcontext():
                    checkpoint = self._engine.strategy.load_checkpoint(path, weights_only=weights_only)
            return up_to_date(checkpoint, path)

    def _load_shards(self, folder: str | Path, weights_only: bool) -> dict[str, Any]:
        """Read a folder. Each process verifies a part of the files."""
        from trainer.checkpoint import shards

        rank, processes = self._engine.global_rank, self._engine.world_size
        self._files.wait()
        read = partial(
            shards.read_whole, folder, weights_only=weights_only, template=self.template,
            process=(rank, processes), joins=not self.reads_parts(folder),
        )  # fmt: skip
        self._on_all(partial(sharded_files.verify, folder, rank, processes), f"{folder} is damaged")
        checkpoint: dict[str, Any] = self._on_all(read, f"{folder} cannot be read")
        return checkpoint

    def _on_all(self, work: Callable[[], Any], problem: str, error: type[CheckpointError] = CheckpointError) -> Any:
        """Call ``work`` on all ranks, and wait for all of them. If it raises on one, the others raise ``problem``."""
        result, raised = None, None
        try:
            result = work()
        except Exception as exception:
            raised = exception
        if self._engine.collectives.any_rank(raised is not None):
            raise raised or error(f"{problem}; see the error of another process.")
        return result
