"""The engine protocol: devices, processes and gradients, restricted to the parts that the rest of the package uses.

``trainer.compat.engine`` implements it with Lightning's strategies. Any other object that implements this protocol can
be an engine: a subclass of ``Trainer`` builds it in ``_build_engine``. The Trainer, loops, callbacks, checkpoints and
post-mortems use nothing else of an engine; only ``trainer.compat`` accesses Lightning's strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.engine.async_max import AsyncMax
from trainer.engine.communication import Communication
from trainer.engine.gradients import Gradients
from trainer.engine.optimizer_states import SavedDtypes
from trainer.precision.base import Precision

T = TypeVar("T")

Weight = float | Tensor
"""Weight of a loss or metric: a number, or a 0-dim tensor on the device if reading it would synchronize."""


class ScheduleConfig(Protocol):
    """A learning-rate schedule from ``configure_optimizers`` (with the attributes of ``LRSchedulerConfig``)."""

    scheduler: Any
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class ModuleCalls(NamedTuple):
    """Functions that handle the calls that a module makes during a fit. None leaves a call to the engine.

    Attributes:
        backward: handles ``LightningModule.manual_backward``: (loss, function that runs the module's ``backward`` on
            the scaled loss).
        step: handles ``optimizer.step`` of the optimizers from ``self.optimizers()``: (optimizer, closure, other
            arguments by name).
        clip: handles ``LightningModule.clip_gradients``: (optimizer, limit, ``"norm"`` or ``"value"``).
    """

    backward: Callable[[Tensor, Callable[[Tensor], None]], None] | None = None
    step: Callable[..., Any] | None = None
    clip: Callable[[Optimizer, float, str], None] | None = None


class Engine(Protocol):
    """Devices, processes and gradients.

    A run calls, in this order: ``launch`` (in the parent; the rest happens in every process), ``connect``,
    ``setup_environment``, ``convert_module``, ``setup``, then the other methods, and ``teardown``.

    Attributes:
        module_calls: functions that handle the calls that the module makes. The Trainer sets it for each fit.
        keeps_optimizers: whether the optimizers cannot be replaced during a run.
        exposes_gradients: whether gradients can be read between a backward pass and the step.
        supports_uneven_inputs: whether training supports uneven inputs: processes with different numbers of batches.
        supports_uneven_evaluation: whether evaluation supports uneven inputs. If not, all processes get the same number
            of batches.
        may_change_world_size: whether the run may continue with another number of processes: ``num_nodes="auto"``.
    """

    module_calls: ModuleCalls
    keeps_optimizers: bool
    exposes_gradients: bool
    supports_uneven_inputs: bool
    supports_uneven_evaluation: bool
    may_change_world_size: bool

    @property
    def precision(self) -> Precision:
        """The precision plugin for this engine's device."""

    @property
    def gradients(self) -> Gradients:
        """The object that computes and changes gradients; the same object during the engine's lifetime."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers from ``configure_optimizers``; empty before ``setup`` and outside of fit. A live list."""

    @property
    def wrapped_optimizers(self) -> list[Any]:
        """The optimizers that modules get from ``self.optimizers()``."""

    @property
    def schedules(self) -> list[ScheduleConfig]:
        """The learning-rate schedules from ``configure_optimizers``. A live list."""

    @property
    def device(self) -> torch.device:
        """This process's device."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    @property
    def timeout(self) -> timedelta:
        """Time that a process waits for the others in a collective."""

    @property
    def data_parallel_size(self) -> int:
        """Number of processes with separate batches, over which gradients are averaged.

        This is the world size, unless several processes share a batch (tensor or pipeline parallelism).
        """

    @property
    def global_rank(self) -> int:
        """This process's rank; rank 0 writes the files."""

    @property
    def runs_here(self) -> bool:
        """Whether this process runs the model, instead of only starting the processes that do."""

    @property
    def restores_after_setup(self) -> bool:
        """Whether a checkpoint's weights are loaded after ``setup``, into the wrapped module."""

    @property
    def model(self) -> nn.Module:
        """The wrapped module; the module itself on one device."""

    @property
    def launch(self) -> Callable[..., Any]:
        """Function that calls ``function(*args)`` in every process, and returns this process's result."""

    def refuse(self, callbacks: Iterable[Any]) -> None:
        """Raise an UnsupportedError if one of the Trainer's callbacks cannot work on this engine."""

    def check_accumulation(self, batches: int) -> None:
        """Raise an UnsupportedError if gradients cannot be accumulated over windows of this number of batches."""

    def connect(self, module: nn.Module) -> None:
        """Set ``module`` as the module to run. Does not move it."""

    def setup_environment(self) -> None:
        """Select the device and join the process group."""

    def convert_module(self) -> None:
        """Convert the module to the dtype of the precision, before weights are loaded, so that they get this dtype."""

    def setup(self, *, fitting: bool) -> None:
        """Move the module to the device; for fitting, also wrap it and create the optimizers."""

    def override_of(self, name: str) -> Callable[..., Any] | None:
        """Return the strategy's method ``name``, as Lightning's loops call it, or None if it is not overridden."""

    def forward_context(self, name: str) -> Callable[[], AbstractContextManager[object]]:
        """Return the function that creates the context of each call of ``step_function(name)``."""

    def step_function(self, name: str) -> Callable[..., Any]:
        """Return the module's ``training_step`` (``validation_step``, ...), called through its wrapper, if any."""

    @property
    def forward_runs_collectives(self) -> bool:
        """Whether every forward of an evaluation uses collectives, so all processes must run equally many of them."""

    def idle_forward(self) -> None:
        """Take part in the collectives of other processes' forward pass if this process has no batch left to evaluate.

        All processes also call it when a pass begins, because the first forward of a pass may communicate (DDP
        broadcasts rank 0's buffers), and must then run on all processes.
        """

    def num_collectives(self) -> int:
        """Return the number of collectives issued on the default process group, except by :meth:`reduce`.

        0 if it is not known.
        """

    def forbid_collectives(self, error: Exception) -> AbstractContextManager[object]:
        """Return a context for a batch that other processes lack: a collective of the strategy raises ``error``."""

    def equal_shapes(self) -> AbstractContextManager[object]:
        """Return a context in which ``self.all_gather`` raises an error on each rank if shapes or dtypes differ."""

    def replay_step(self, name: str) -> Callable[..., Any]:
        """Return the module's step for a replay in this process, with only the collectives that it requires."""

    def follow_trained_parameters(self) -> None:
        """Update gradient averaging after callbacks may have frozen or unfrozen parameters at the start of an epoch."""

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[object]:
        """Return the context for a forward and backward pass, with or without averaging of its gradients."""

    def gather(self, value: T) -> list[T]:
        """Gather all processes' ``value`` on rank 0. Returns [] on other ranks, and if no process group exists."""

    def gather_if_different(self, value: T) -> list[T]:
        """Gather all values on all processes. If all have the same ``repr``, return only this process's, in a list."""

    def reduce(self, tensor: Tensor, op: str = "mean", group: Any = None) -> Tensor:
        """Reduce ``tensor`` over the processes: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``."""

    @property
    def next_forward_syncs_buffers(self) -> bool:
        """Whether the next forward begins with its usual broadcast of buffers.

        DDP omits it after a forward without gradient synchronization.
        """

    def skip_next_buffer_sync(self) -> None:
        """Skip the broadcast of buffers in the next forward, because the run was resumed between two broadcasts."""

    def begin_sum(self, *values: Weight) -> Callable[[], list[Weight]]:
        """Start to sum these values over the processes. Returns a function that waits for the sums and returns them.

        On a GPU the sums stay on the device, and the host does not synchronize.
        """

    def any_rank(self, decision: bool) -> bool:
        """Return whether ``decision`` is true on any process; the same result on all of them."""

    def any_rank_on_host(self, *flags: bool) -> list[bool]:
        """Like :meth:`any_rank` for several flags, on the host: waits for the processes, but not for a device."""

    def async_max(self, count: int, purpose: str) -> AsyncMax | None:
        """Create an asynchronous all-reduce of the maxima of ``count`` numbers over all processes, on the host.

        Returns None if there is only one process, or if the engine does not support it. All processes must call it
        together, after the device is selected. It replaces the previous one with the same ``purpose``.
        """

    def broadcast(self, value: T) -> T:
        """Return rank 0's ``value``."""

    def barrier(self, name: str | None = None) -> None:
        """Wait for the other processes."""

    def module_state(self) -> dict[str, Any]:
        """Return the module's state dict. Sharded tensors stay sharded: :meth:`save` gathers them if necessary."""

    def load_module_state(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load ``checkpoint["state_dict"]`` into the module. Its tensors may be whole, or sharded like the module's."""

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return one optimizer's state dict. Sharded tensors stay sharded."""

    def load_optimizer_states(self, checkpoint: Mapping[str, Any], saved: SavedDtypes) -> None:
        """Load the states of the optimizers with the dtypes that they were saved with.

        Args:
            checkpoint: has them under ``"optimizer_states"``. Tensors may be whole, or sharded like the parameters.
            saved: the dtype of each parameter when the checkpoint was saved.
        """

    def template(self, place: tuple[str, ...], shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return an empty tensor, sharded like the parameter that ``place`` names, to load a checkpoint's tensor into.

        None if there is no sharded parameter with this name and shape.
        """

    @property
    def communication(self) -> Communication | None:
        """How processes communicate, or None for DDP's default."""

    @property
    def saves_shards(self) -> bool:
        """Whether each process writes its own part of a checkpoint, so that nothing is gathered."""

    def save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint, which may contain ``DTensor``. All processes must call it together.

        Rank 0 writes a file, for which sharded tensors are gathered one after the other; or, if :attr:`saves_shards`,
        each process writes its part of a folder.
        """

    def load(self, path: str | Path, weights_only: bool) -> dict[str, Any]:
        """Read a checkpoint."""

    def kill(self) -> None:
        """Kill the processes that the engine has started."""

    def on_exception(self, error: BaseException) -> None:
        """Handle the end of a run by ``error``."""

    def teardown(self) -> None:
        """Unwrap the module, move it back to the CPU, and free the device."""
