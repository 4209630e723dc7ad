"""The memory of training steps, seen on tensors that have a shape and a dtype but no values.

The steps are real ones: of the module, its optimizer and, where it is sharded, of torch's ``fully_shard`` among
processes that are only pretended. What exists at a time is counted as tensors come and go. torch does that without
a GPU for tensors of the CPU alone; where autocast and attention differ on a GPU they are told to do as there.
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
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.engine.sharding.wrap import find_blocks
from trainer.precision import MixedPrecision

_FLOAT32_ON_GPUS = frozenset(
    (
        *(F.layer_norm, F.group_norm, F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, F.cross_entropy),
        *(F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits, F.kl_div),
        *(Tensor.softmax, Tensor.log_softmax, Tensor.pow, torch.pow, Tensor.exp, torch.exp, Tensor.log, torch.log),
    )
)
"""Of CUDA's autocast list of what is computed in float32, what the CPU's leaves in 16 bits and takes memory."""


class Memory(NamedTuple):
    """Bytes on one device.

    Args:
        peak: in the step, the most at a time.
        after: behind the step: weights, gradients, and the optimizer's states.
    """

    peak: int
    after: int


def measure(
    build: Callable[[], Any], batch: Any, precision: Any, prepare: Callable[[Any], None], shards: int | None
) -> Memory:
    """The memory of a training step on one device.

    Args:
        build: returns the LightningModule; called where new tensors have no values.
        batch: of the dataloader.
        precision: our precision plugin.
        prepare: called with the module, before the optimizers are made.
        shards: processes that its parameters, gradients and optimizer states are spread over; None: one device has all.

    Raises:
        ValueError: the module optimizes by itself (manual optimization), or what it does depends on values.
    """
    mesh_context = nullcontext() if shards is None else _pretended(shards)
    with mesh_context as mesh:
        with torch.device("meta"), precision.init_context():
            module = build()
            module.configure_model()
        if not module.automatic_optimization:
            raise ValueError("it optimizes by itself (automatic_optimization=False)")
        living = Living()
        with FakeTensorMode(allow_non_fake_inputs=True) as fakes, living:
            module = precision.convert_module(module.to_empty(device="cpu"))
            prepare(module)
            if mesh is not None:
                for block in find_blocks(module, None):
                    fully_shard(block, mesh=mesh)
                fully_shard(module, mesh=mesh)
            optimizers = _optimizers(module)
            batch = tree_map_only(Tensor, fakes.from_tensor, precision.convert_batch(batch))
            _train(module, optimizers, batch, precision, living)
            return Memory(living.peak, living.now)


def _train(module: Any, optimizers: Sequence[Optimizer], batch: Any, precision: Any, living: Living) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for optimizer in optimizers:
        optimizer.step()  # makes its states
    living.peak = living.now
    forward = module.forward
    module.forward = lambda: module.training_step(batch, 0)  # FSDP's hooks are around the module's call
    # Both 16-bit types have two bytes; the CPU's kernels for float16 are another matter.
    with torch.autocast("cpu", torch.bfloat16, enabled=isinstance(precision, MixedPrecision)), _AsOnGPU():
        output = module()
    module.forward = forward
    for optimizer in optimizers:
        optimizer.zero_grad()  # where the loop does it: see trainer/loops/fit.py
    loss = output["loss"] if isinstance(output, dict) else output
    with torch.autograd.set_multithreading_enabled(False):  # other threads would not be counted
        loss.backward()
    del output, loss
    for optimizer in optimizers:
        optimizer.step()


def _optimizers(module: Any) -> list[Optimizer]:
    """As a GPU has them: foreach, where nothing else is said."""
    module.log = module.log_dict = lambda *_, **__: None
    module._trainer = SimpleNamespace(
        estimated_stepping_batches=1000, max_epochs=1, world_size=1, global_rank=0, callback_metrics={}
    )
    made = module.configure_optimizers()
    found = [
        one
        for part in (made if isinstance(made, (list, tuple)) else [made])
        for one in (part if isinstance(part, (list, tuple)) else [part])
    ]
    found = [one["optimizer"] if isinstance(one, dict) else one for one in found]
    optimizers = [one for one in found if isinstance(one, Optimizer)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
    return optimizers


@contextmanager
def _pretended(processes: int) -> Iterator[Any]:
    """A mesh of so many processes, of which this is the first, and whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        yield init_device_mesh("cpu", (processes,))
    finally:
        distributed.destroy_process_group()


class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are made within, as long as they live.

    Attributes:
        now: that exist.
        peak: the most that existed since it was set.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __enter__(self) -> Living:
        """FSDP frees and fills what it gathers by resizing storages, which nobody is told of."""
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
        """Do what is to be done, and count what came out."""
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                storage = (value._local_tensor if isinstance(value, DTensor) else value).untyped_storage()
                if storage._cdata not in self._sizes:
                    weakref.finalize(storage, self._note, None, 0, storage._cdata)
                    self._note(storage, storage.nbytes())
        return result

    def _note(self, storage: Any, size: int, key: int | None = None) -> None:
        key = storage._cdata if key is None else key
        self.now += size - self._sizes.pop(key, 0)
        if storage is not None:
            self._sizes[key] = size
        self.peak = max(self.peak, self.now)


class _AsOnGPU(TorchFunctionMode):
    """Autocast keeps in float32 what it does on a GPU; attention with dropout needs no more memory than without."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention and "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        elif function in _FLOAT32_ON_GPUS and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
        return function(*args, **kwargs)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
