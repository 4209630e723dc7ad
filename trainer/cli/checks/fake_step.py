"""Measure the memory of training steps on fake tensors, which have a shape and a dtype but no values.

The steps use the real module and optimizer and, for FSDP, torch's ``fully_shard`` with a fake process group. The bytes
of live tensors are counted. The fake tensors are on the CPU, because torch needs a GPU for fake tensors on CUDA.
Autocast and attention are set to behave as on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as distributed
import torch.nn.functional as F
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.common.parts import local
from trainer.diagnosis.sync_detector import Synchronization, SyncWatch
from trainer.distributed.sharding.wrap import find_blocks
from trainer.loop.schedule_free import schedule_free
from trainer.precision import MixedPrecision, cuda_autocast_ops
from trainer.precision.autocast_ops import ops_that_differ


class Memory(NamedTuple):
    """Bytes on one device.

    Args:
        peak: peak memory in the step.
        after: memory after the step: weights, gradients and optimizer states.
    """

    peak: int
    after: int


def measure(
    build: Callable[[], Any], batch: Any, precision: Any, prepare: Callable[[Any], None], shards: int | None
) -> Memory:
    """Return the memory of a training step on one device.

    Args:
        build: returns the LightningModule. Called with meta as the default device.
        batch: a batch of the dataloader.
        precision: the precision plugin.
        prepare: called with the module before the optimizers are created.
        shards: number of processes that FSDP shards over. None: no sharding.

    Raises:
        ValueError: if the module uses manual optimization, or its step depends on values.
    """
    with nullcontext() if shards is None else _fake_mesh(shards) as mesh:
        module = _on_meta(build, precision)
        with without_values() as (fakes, living):
            module = precision.convert_module(module.to_empty(device="cpu"))
            prepare(module)
            if mesh is not None:
                for block in find_blocks(module, None):
                    fully_shard(block, mesh=mesh)
                fully_shard(module, mesh=mesh)
            optimizers = _optimizers(module)
            batch = tree_map_only(Tensor, fakes.from_tensor, precision.convert_batch(batch))
            _train(module, optimizers, batch, precision, living)
            return Memory(living.peak, living.current)


@contextmanager
def without_values() -> Iterator[tuple[FakeTensorMode, LiveMemory]]:
    """Create fake tensors inside the context, and count their bytes. Attention behaves as on a GPU.

    A backward pass inside needs ``torch.autograd.set_multithreading_enabled(False)``: other threads are not counted.
    """
    living = LiveMemory()
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes, _ReadAsOne(), living, _WithoutAttentionDropout():  # type: ignore[no-untyped-call]
        yield fakes, living


def look(
    build: Callable[[], Any], batch: Any, precision: Any, synchronizations: dict[tuple[str, int, str], Synchronization]
) -> dict[str, tuple[str, str]]:
    """Find the host-device synchronizations of a forward pass on a GPU, and operations with another dtype there.

    Args:
        build, batch, precision: as in :func:`measure`.
        synchronizations: the lines that synchronize are added to it, even if the step fails later.

    Returns:
        Operations that run in another dtype under CUDA autocast than under CPU autocast
        (:func:`~trainer.precision.autocast_ops.ops_that_differ`).
    """
    module = _on_meta(build, precision)
    mixed = isinstance(precision, MixedPrecision)
    autocast = torch.autocast("cpu", precision.dtype if mixed else torch.bfloat16, enabled=mixed)
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes, _ReadAsOne():  # type: ignore[no-untyped-call]
        module = precision.convert_module(module.to_empty(device="cpu"))
        _optimizers(module)
        batch = tree_map_only(Tensor, fakes.from_tensor, precision.convert_batch(batch))
        with SyncWatch("cpu", synchronizations), ops_that_differ() as differing, autocast:
            _training_step(module, batch)
    return differing


def _training_step(module: Any, batch: Any) -> Any:
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return module.training_step(batch, 0) if takes_index else module.training_step(batch)


def _on_meta(build: Callable[[], Any], precision: Any) -> Any:
    with torch.device("meta"), precision.init_context():
        module = build()
        module.configure_model()
    if not module.automatic_optimization:
        raise ValueError("it uses manual optimization (automatic_optimization=False)")
    return module


def _train(module: Any, optimizers: Sequence[Optimizer], batch: Any, precision: Any, living: LiveMemory) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for optimizer in optimizers:
        optimizer.step()  # creates the optimizer states
    living.peak = living.current
    forward = module.forward

    def step() -> Any:
        module.forward = forward  # because the step may call it
        return _training_step(module, batch)

    module.forward = step  # because FSDP's hooks run when the module is called
    # bfloat16 also stands for float16, which has the same size but fewer CPU kernels.
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=isinstance(precision, MixedPrecision))
    # Gradients are cleared at the same points as in trainer/loop/fit.py.
    if not any(is_overridden(name, module) for name in ("optimizer_zero_grad", "on_before_zero_grad")):
        _clear(optimizers)
    with autocast, cuda_autocast_ops():
        output = module()
    _clear(optimizers)
    loss = output["loss"] if isinstance(output, dict) else output
    with torch.autograd.set_multithreading_enabled(False):  # because other threads are not counted
        loss.backward()
    del output, loss
    for optimizer in optimizers:
        optimizer.step()


def _clear(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()


def _optimizers(module: Any) -> list[Optimizer]:
    """Return the optimizers of the module, with ``foreach=True`` as on a GPU unless they choose an implementation."""
    module.log = module.log_dict = lambda *_, **__: None
    module.trainer = SimpleNamespace(
        **dict.fromkeys(("current_epoch", "global_step", "global_rank", "local_rank"), 0),
        **dict.fromkeys(("max_epochs", "world_size", "accumulate_grad_batches"), 1),
        **dict.fromkeys(("estimated_stepping_batches", "num_training_batches"), 1000),
        **dict.fromkeys(("is_global_zero", "training"), True),
        **dict.fromkeys(("logger", "progress_bar_callback")),
        max_steps=-1,
        sanity_checking=False,
        loggers=[],
        callback_metrics={},
    )
    optimizers = [leaf for leaf in tree_leaves(module.configure_optimizers()) if isinstance(leaf, Optimizer)]
    for optimizer in schedule_free(optimizers):
        optimizer.train()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
    return optimizers


@contextmanager
def _fake_mesh(processes: int) -> Iterator[Any]:
    """Yield a mesh of a fake process group, with this process as rank 0 and collectives that are no-ops."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        yield init_device_mesh("cpu", (processes,))
    finally:
        distributed.destroy_process_group()


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes of all live tensors that were created inside the mode.

    Attributes:
        current: bytes of live tensors.
        peak: largest value of ``current`` so far. It can be reset.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __enter__(self) -> LiveMemory:
        """Patch ``UntypedStorage.resize_``, which FSDP uses to free and allocate gathered parameters."""
        self._resize: Any = torch.UntypedStorage.resize_
        living, resize = self, self._resize

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            living._note(storage, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and count the bytes of its results."""
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                storage = self.storage_of(value)
                if storage is not None and storage._cdata not in self._sizes:
                    weakref.finalize(storage, self._note, None, 0, storage._cdata)
                    self._note(storage, storage.nbytes())
        return result

    def storage_of(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """Return the storage to count, or None for a tensor that is not counted."""
        return local(tensor).untyped_storage()

    def _note(self, storage: Any, size: int, key: int | None = None) -> None:
        key = storage._cdata if key is None else key
        self.current += size - self._sizes.pop(key, 0)
        if storage is not None:
            self._sizes[key] = size
        self.peak = max(self.peak, self.current)


class _WithoutAttentionDropout(TorchFunctionMode):
    """Ignore the dropout of attention, which needs no memory on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention and "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return function(*args, **kwargs)


class _ReadAsOne(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Return 1 if the value of a fake tensor is read."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return dtype is torch.bool or (1.0 if dtype.is_floating_point else 1)
        return function(*args, **(kwargs or {}))
