"""The methods and attributes of an engine that the loops and the other parts of a run use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.loop.batch_path import ModuleCalls
from trainer.loop.gradients import Gradients
from trainer.precision.base import Precision
from trainer.state.snapshot import Lost

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.utilities.types import LRSchedulerConfig

    from trainer.common.collectives import Collectives

T = TypeVar("T")


class Checkpoints(Protocol):
    """The states of modules and optimizers. ``trainer.distributed.checkpoint_backend.CheckpointBackend``."""

    @property
    def saves_shards(self) -> bool: ...
    def load(self, path: str | Path, weights_only: bool) -> dict[str, Any]: ...
    def module_state(self) -> dict[str, Any]: ...
    def load_module_state(self, checkpoint: Mapping[str, Any], strict: bool) -> None: ...
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]: ...
    def load_optimizer_states(self, checkpoint: Mapping[str, Any], saved: dict[Tensor, torch.dtype]) -> None: ...
    def template(self, place: tuple[str, ...], shape: torch.Size, dtype: torch.dtype) -> Tensor | None: ...


class Engine(Protocol):
    """Devices, processes, gradients and checkpoints. ``trainer.distributed.engine.LightningEngine``."""

    collectives: Collectives
    world_size: int
    data_parallel_size: int
    global_rank: int
    precision: Precision
    gradients: Gradients
    module_calls: ModuleCalls
    optimizers: list[Optimizer]
    schedules: list[LRSchedulerConfig]
    kinds: dict[str, list[str]]
    device: torch.device
    kind: str
    module: LightningModule
    exposes_gradients: bool
    keeps_optimizers: bool
    supports_uneven_inputs: bool
    supports_uneven_evaluation: bool
    may_change_world_size: bool

    @property
    def checkpoints(self) -> Checkpoints: ...
    @property
    def runs_here(self) -> bool: ...
    @property
    def forward_runs_collectives(self) -> bool: ...
    @property
    def next_forward_syncs_buffers(self) -> bool: ...
    @property
    def lost_by_ddp(self) -> list[Lost]: ...

    # steps
    def check_accumulation(self, batches: int) -> None: ...
    def counts_steps_of(self, optimizer: Optimizer) -> bool: ...
    def follow_trained_parameters(self) -> None: ...
    def gradient_sync(self, enabled: bool) -> AbstractContextManager[object]: ...
    def idle_forward(self) -> None: ...
    def override_of(self, name: str) -> Callable[..., Any] | None: ...
    def replay_step(self, name: str) -> Callable[..., Any]: ...
    def skip_next_buffer_sync(self) -> None: ...
