"""The engine: devices, processes and gradients, as far as the rest of the package needs to know of them.

``trainer.compat.engine`` has the implementation, over Lightning's strategies. Another engine is any object of this
shape: a subclass of ``Trainer`` builds it in ``_build_engine``. The Trainer, loops, callbacks, checkpoints and
post-mortems use nothing else of an engine than what is here; only ``trainer.compat`` asks for Lightning's strategy.
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

from trainer.engine.agreement import Agreement
from trainer.engine.communication import Communication
from trainer.engine.gradients import Gradients
from trainer.engine.optimizer_states import SavedDtypes
from trainer.precision.base import Precision

T = TypeVar("T")

Weight = float | Tensor
"""How much something counts: a number, or a 0-dim tensor on the device, where reading it would mean waiting."""


class ScheduleConfig(Protocol):
    """One schedule as ``configure_optimizers`` gave it (the shape of Lightning's ``LRSchedulerConfig``)."""

    scheduler: Any
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class ModuleCalls(NamedTuple):
    """What a module does by itself during a fit, and who does it then. None leaves it to the engine.

    Attributes:
        backward: ``LightningModule.manual_backward``: (loss, what runs the module's ``backward`` on the scaled loss).
        step: ``optimizer.step`` of what ``self.optimizers()`` returns: (optimizer, closure, other arguments by name).
        clip: ``LightningModule.clip_gradients``: (optimizer, limit, ``"norm"`` or ``"value"``).
    """

    backward: Callable[[Tensor, Callable[[Tensor], None]], None] | None = None
    step: Callable[..., Any] | None = None
    clip: Callable[[Optimizer, float, str], None] | None = None


class Engine(Protocol):
    """Devices, processes and gradients.

    A run calls, in this order: ``launch`` (in the parent; the rest happens in every process), ``connect``,
    ``setup_environment``, ``convert_module``, ``setup``, then the others, and ``teardown``.

    Attributes:
        module_calls: who does what a module does by itself. The Trainer sets it for each fit.
        shows_gradients: whether gradients can be looked at between a backward pass and the step.
        trains_unevenly: whether a process may have fewer training batches than others.
        evaluates_unevenly: the same of evaluation; where not, all are given as many.
        may_change_size: whether the run may go on with another number of processes: ``num_nodes="auto"``.
    """

    module_calls: ModuleCalls
    shows_gradients: bool
    trains_unevenly: bool
    evaluates_unevenly: bool
    may_change_size: bool

    @property
    def precision(self) -> Precision:
        """The precision plugin for this engine's device."""

    @property
    def gradients(self) -> Gradients:
        """What computes and changes gradients; the same object as long as the engine lives."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """What ``configure_optimizers`` returned; empty before ``setup`` and outside of fit. A live list."""

    @property
    def wrapped_optimizers(self) -> list[Any]:
        """The optimizers as modules know them (``self.optimizers()``)."""

    @property
    def schedules(self) -> list[ScheduleConfig]:
        """The learning-rate schedules that came with them. A live list."""

    @property
    def device(self) -> torch.device:
        """This process's device."""

    @property
    def world_size(self) -> int:
        """The number of processes."""

    @property
    def timeout(self) -> timedelta:
        """How long a process waits for the others in a collective."""

    @property
    def data_parallel_size(self) -> int:
        """How many processes have batches of their own, over which gradients are averaged.

        That is all of them, unless several share a batch (tensor or pipeline parallelism).
        """

    @property
    def global_rank(self) -> int:
        """This process's number; 0 writes the files."""

    @property
    def runs_here(self) -> bool:
        """Whether this process is one of those that run, not only the one that starts them."""

    @property
    def restores_after_setup(self) -> bool:
        """Whether a checkpoint's weights are loaded after ``setup``, into the module as it is wrapped then."""

    @property
    def model(self) -> nn.Module:
        """The wrapped form of the module; the module itself on one device."""

    @property
    def launch(self) -> Callable[..., Any]:
        """Calls ``function(*args)`` in every process, and returns what it returned in this one."""

    def refuse(self, callbacks: Iterable[Any]) -> None:
        """Raise an UnsupportedError, if one of the Trainer's callbacks cannot work on this engine."""

    def check_accumulation(self, batches: int) -> None:
        """Raise an UnsupportedError if gradients cannot be accumulated over windows of this number of batches."""

    def connect(self, module: nn.Module) -> None:
        """Make ``module`` the one to run. Nothing is moved yet."""

    def setup_environment(self) -> None:
        """Select the device and join the process group."""

    def convert_module(self) -> None:
        """Put the module into the dtype of the precision: before weights are loaded into it, which would be rounded."""

    def setup(self, *, fitting: bool) -> None:
        """Move the module to the device and, for fitting, wrap it and make the optimizers."""

    def override_of(self, name: str) -> Callable[..., Any] | None:
        """Return the strategy's method ``name``, as Lightning's loops call it, or None if it is not overridden."""

    def forward_context(self, name: str) -> Callable[[], AbstractContextManager[object]]:
        """Return the function that creates the context of each call of ``step_function(name)``."""

    def step_function(self, name: str) -> Callable[..., Any]:
        """The module's ``training_step`` (``validation_step``, ...), going through the wrapper where there is one."""

    @property
    def forward_exchanges(self) -> bool:
        """Whether every forward of an evaluation exchanges something: all processes run equally many of them."""

    def idle_forward(self) -> None:
        """Take part in the other processes' forward of an evaluation, in the place of a batch.

        All processes call it as a pass begins, too: a forward that exchanges something only the first time (DDP's sends
        the first process's buffers) has done so then.
        """

    def exchanges(self) -> int:
        """The number of exchanges among all processes that this one has begun so far, other than by :meth:`reduce`.

        0 where nobody knows.
        """

    def alone(self, error: Exception) -> AbstractContextManager[object]:
        """The context of a batch that another process lacks: ``error`` where the module would wait for the others."""

    def replay_step(self, name: str) -> Callable[..., Any]:
        """The module's step once more, by itself: nothing is exchanged by it but what it cannot be computed without."""

    def follow_trained_parameters(self) -> None:
        """Callbacks may have frozen parameters as an epoch began, or thawed some: average the gradients of these."""

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[object]:
        """The context of a forward and backward whose gradients are, or are not, averaged over the processes."""

    def gather(self, value: T) -> list[T]:
        """Every process's ``value``, on the first; [] on the others, and outside of a run that has several."""

    def gather_different(self, value: T) -> list[T]:
        """Every process's ``value``, on all of them; this one's alone where all have the same, by their ``repr``."""

    def reduce(self, tensor: Tensor, op: str = "mean", group: Any = None) -> Tensor:
        """``tensor`` reduced over the processes: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``."""

    @property
    def next_forward_exchanges(self) -> bool:
        """Whether the next forward begins by making buffers equal on all processes. It does so mostly, not always."""

    def skip_next_buffer_sync(self) -> None:
        """Skip the broadcast of buffers in the next forward, because the run was resumed between two broadcasts."""

    def begin_sum(self, *values: Weight) -> Callable[[], list[Weight]]:
        """Begin to add these up over the processes. What is returned waits, and returns the sums.

        On a GPU they stay there, and the host waits for nothing.
        """

    def any_rank(self, decision: bool) -> bool:
        """Whether ``decision`` is true on any process. The same answer on all of them."""

    def any_host(self, *flags: bool) -> list[bool]:
        """Return whether each of the flags is true on any process. Waits for the processes, and for no device."""

    def agreement(self, count: int, purpose: str) -> Agreement | None:
        """What tells each process, without waiting for a device, the largest of ``count`` numbers of all processes.

        None where there is one process, or no way. All processes ask for it together, once the device is selected. The
        one before of the same purpose ends.
        """

    def broadcast(self, value: T) -> T:
        """Rank 0's ``value``."""

    def barrier(self, name: str | None = None) -> None:
        """Wait for the other processes."""

    def module_state(self) -> dict[str, Any]:
        """The module's state dict. Sharded tensors stay that: :meth:`save` gathers them where it has to."""

    def load_module_state(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load ``checkpoint["state_dict"]``, whole or sharded as the module is, into the module."""

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """One optimizer's state dict, in which sharded tensors stay that."""

    def load_optimizer_states(self, checkpoint: Mapping[str, Any], saved: SavedDtypes) -> None:
        """Load the states of the optimizers with the dtypes that they were saved with.

        Args:
            checkpoint: Has them under ``"optimizer_states"``, whole or sharded as the parameters are.
            saved: The dtype that each parameter had when the checkpoint was saved.
        """

    @property
    def communication(self) -> Communication | None:
        """How processes communicate, if not as DDP does by default."""

    @property
    def saves_shards(self) -> bool:
        """Whether each process writes its own part of a checkpoint, so that nothing is to be gathered for it."""

    def save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint, which may have ``DTensor`` in it. All processes call it together.

        Rank 0 writes a file, for which sharded tensors are gathered, one after the other; or each process its part of a
        folder, where :attr:`saves_shards`.
        """

    def load(self, path: str | Path, weights_only: bool) -> dict[str, Any]:
        """Read a checkpoint."""

    def kill(self) -> None:
        """End the processes that the engine has started, at once."""

    def on_exception(self, error: BaseException) -> None:
        """A run is about to end with ``error``."""

    def teardown(self) -> None:
        """Unwrap the module, move it back to the CPU, free the device."""
