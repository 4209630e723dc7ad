"""The processes of a run, and the operations that all of them call together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.apply_func import convert_to_tensors
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout

from trainer.common.async_max import AsyncMax
from trainer.common.lightning_private import settings_of
from trainer.common.session import Session
from trainer.errors import ConfigurationError

T = TypeVar("T")


class Collectives:
    """The processes of a strategy, and the operations that all of them call together.

    Args:
        strategy: Lightning's strategy.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._ddp = strategy if isinstance(strategy, DDPStrategy) else None
        self._reductions = 0  # collectives of `reduce`
        # gloo groups, by purpose; weak, because torch.distributed keeps them until the end
        self._groups: dict[str, Callable[[], Any]] = {}
        self._host_max: AsyncMax | None = None

    def end_run(self) -> None:
        """Drop the all-reduces of the run."""
        self._host_max = None

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return 1 if self._ddp is None else self._ddp.world_size

    @property
    def data_parallel_size(self) -> int:
        """The number of processes with different batches, over which gradients are averaged.

        All processes, unless several of them share a batch (tensor parallelism).
        """
        return self.world_size

    @property
    def global_rank(self) -> int:
        """This process's global rank."""
        return int(getattr(self._strategy, "global_rank", 0))

    @property
    def timeout(self) -> timedelta:
        """The time that a process waits for the others in a collective."""
        return (self._ddp and settings_of(self._ddp)["timeout"]) or default_pg_timeout

    def broadcast(self, value: T) -> T:
        """Return the ``value`` of rank 0."""
        return self._strategy.broadcast(value)

    def barrier(self, name: str | None = None) -> None:
        """Wait for the other processes."""
        self._strategy.barrier(name)

    def any_rank(self, decision: bool) -> bool:
        """Return whether ``decision`` is True on any process."""
        return decision if self.world_size == 1 else self._strategy.reduce_boolean_decision(decision, all=False)

    def any_rank_on_host(self, *flags: bool) -> list[bool]:
        """Return whether each of the flags is true on any process. Waits for the processes, but not for a device."""
        if self._strategy.root_device.type == "cpu":
            return [float(total) > 0 for total in self.begin_sum(*map(float, flags))()]
        if self._host_max is None:
            self._host_max = self.async_max(len(flags), "batches")
        if self._host_max is None:
            return [self.any_rank(flag) for flag in flags]
        return [number > 0 for number in self._host_max.reduce_now(flags)]

    def gather(self, value: T) -> list[T]:
        """Gather each process's ``value`` on rank 0; [] on the others, and if the process group is not initialized."""
        if self.world_size == 1:
            return [value]
        if not torch.distributed.is_initialized():
            return []
        gathered: list[Any] | None = [None] * self.world_size if self.global_rank == 0 else None
        torch.distributed.gather_object(value, gathered)
        return gathered or []

    def gather_if_different(self, value: T) -> list[T]:
        """Return the values of all processes, on each process; only one value if all have the same ``repr``."""
        if self.world_size == 1:
            return [value]
        number = int.from_bytes(sha256(repr(value).encode()).digest()[:7], "big")
        extremes = torch.tensor([number, -number], device=self._strategy.root_device)
        torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX)
        most, least = extremes.tolist()
        return [value] if most == -least else self.broadcast(self.gather(value))

    def reduce(self, tensor: Tensor, op: str = "mean", group: Any = None) -> Tensor:
        """Reduce ``tensor`` over the processes: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.

        This happens on the process's device, because a logged number may be on the CPU.
        """
        before = self.num_collectives()
        reduced: Tensor = self._strategy.reduce(tensor.to(self._strategy.root_device), group=group, reduce_op=op)
        self._reductions += self.num_collectives() - before
        return reduced

    def begin_sum(self, *values: float | Tensor) -> Callable[[], list[float | Tensor]]:
        """Start a sum over the processes, and return a function that waits for it.

        On a GPU the sums stay on the device, and the host does not synchronize. Unlike the strategy's ``reduce``, this
        has no barrier, which would block the host.
        """
        tensors = [
            value if isinstance(value, Tensor) else torch.full((), value, device=self._strategy.root_device)
            for value in values
        ]
        totals = torch.stack([value.to(self._strategy.root_device, torch.float32) for value in tensors])
        work = torch.distributed.all_reduce(totals, async_op=True)

        def sums() -> list[float | Tensor]:
            work.wait()
            return totals.tolist() if totals.is_cpu else list(totals)

        return sums

    def num_collectives(self) -> int:
        """Return the number of collectives issued on the default process group, without those of :meth:`reduce`.

        0 if it is not known.
        """
        distributed = torch.distributed
        if self.world_size == 1 or not distributed.is_initialized():
            return 0
        group: Any = distributed.group.WORLD
        begun: int = group._get_sequence_number_for_group()
        return begun - self._reductions

    @contextmanager
    def forbid_collectives(self, error: Exception) -> Iterator[None]:
        """Return a context in which the collectives of the strategy, except ``reduce``, raise ``error``."""
        with Session() as session:
            for name in ("all_gather", "barrier", "broadcast", "reduce_boolean_decision"):
                session.replace(self._strategy, name, partial(_raise, error))
            yield

    @contextmanager
    def equal_shapes(self, module: nn.Module) -> Iterator[None]:
        """Return a context in which ``self.all_gather`` raises an error on all ranks if they gather different tensors.

        Their number, shapes and dtypes must be equal.
        """
        if self.world_size == 1:
            yield
            return
        gather_tensor = self._strategy.all_gather
        distributed = torch.distributed

        def compare(tensors: str, group: Any) -> None:
            if distributed.is_initialized() and group in (None, distributed.group.WORLD):
                different = self.gather_if_different(tensors)
                if len(different) > 1:
                    raise ConfigurationError(
                        f"self.all_gather got different tensors on the ranks: {'; '.join(different)}. Gather them with"
                        " torch.distributed.all_gather_object, log a torchmetrics object instead, or use"
                        " Trainer(pad_evaluation=True): then all ranks evaluate equally many samples, some twice."
                    )

        def all_gather(gather: Any, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
            tensors: list[Tensor] = []
            apply_to_collection(convert_to_tensors(data, self._strategy.root_device), Tensor, tensors.append)
            compare(f"{len(tensors)} tensors", group)
            return gather(data, group, sync_grads)

        def all_gather_tensor(tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
            compare(f"{tuple(tensor.shape)}, {tensor.dtype}", group)
            return gather_tensor(tensor, group, sync_grads)

        with Session() as session:
            session.replace(self._strategy, "all_gather", all_gather_tensor)
            for submodule in module.modules():
                if isinstance(submodule, LightningModule):
                    session.replace(submodule, "all_gather", partial(all_gather, submodule.all_gather))
            yield

    def async_max(self, count: int, purpose: str) -> AsyncMax | None:
        """Create an asynchronous all-reduce that computes the maxima of ``count`` numbers, on the host.

        Return None for a single process, and without gloo. The all-reduce uses a gloo group, because NCCL would queue
        its work behind that of the GPUs. All processes must call this together, after the device is selected. The new
        all-reduce replaces the previous one with the same ``purpose``.
        """
        distributed = torch.distributed
        if self._ddp is None or self.world_size == 1:
            return None
        if not distributed.is_initialized() or not distributed.is_gloo_available():
            return None
        if (before := self._groups.get(purpose, _dead_reference)()) is not None:
            with suppress(ValueError):  # if all groups have been destroyed since
                distributed.destroy_process_group(before)
        return AsyncMax(self._new_group(purpose), count)

    def group(self, purpose: str) -> Any:
        """Return the gloo group of all processes with this purpose, because other groups may be in use meanwhile.

        None for a single process. All processes create it together at the first call.
        """
        if self.world_size == 1:
            return None
        return self._groups.get(purpose, _dead_reference)() or self._new_group(purpose)

    def _new_group(self, purpose: str) -> Any:
        """Create a gloo group of all processes, which call this together."""
        assert self._ddp is not None
        group = torch.distributed.new_group(backend="gloo", timeout=self.timeout)
        self._groups[purpose] = weakref.ref(group)
        return group


def _raise(error: Exception, *_: Any, **__: Any) -> None:
    raise error


def _dead_reference() -> None:
    """Stands for a weak reference to a deleted object."""
