"""Find the out-of-range index that has ended CUDA's context."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainer.common.module_tree import is_dense
from trainer.data.batches import identity
from trainer.diagnosis.out_of_range import OutOfRange, RaisedCall
from trainer.diagnosis.recording import RecordedBatch, storage_for
from trainer.diagnosis.replay import silence
from trainer.loop.batch_path import TrainingPath
from trainer.loop.run_state import RunState

_BATCHES = 64
"""Maximum number of stored batches: the host issues a limited number of kernels before it waits for the device."""
_MAX_WEIGHTS = 2**30
"""Maximum size of the parameters in bytes; a step of a larger model takes too long on a CPU."""
_SECONDS = 60.0
"""No further batch is tried on the CPU after this time."""


def is_device_assert(error: BaseException) -> bool:
    """Return whether a kernel ended CUDA's context, which is how a GPU reports an index that is out of range."""
    return isinstance(error, RuntimeError) and "device-side assert" in str(error)


class HostBatches:
    """The recent batches of a fit on a GPU, as they were before their transfer.

    A GPU reports an out-of-range index only some steps later, and without the index. Its memory, with batches and
    weights, can no longer be read then. The CPU reports it at once: :meth:`failing` runs the recent batches there.

    Args:
        run: the state of the run. The path of its batches is wrapped.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._loop = run.loop
        self._recent: deque[tuple[int, Any]] = deque(maxlen=0)
        self._stored: Callable[[Any], Any] = identity
        self._loop.wrap(self)

    def stop(self) -> None:
        """Drop the batches, and store no more."""
        self._recent.clear()
        self._loop.unwrap(self)

    def __call__(self, path: TrainingPath) -> TrainingPath:
        """Wrap the path of a batch: store each batch before its transfer."""
        return replace(path, train_batch=partial(self._train_batch, path.train_batch))

    def _train_batch(self, train_batch: Callable[..., None], batch: Any, batch_idx: int, is_last: bool) -> None:
        if not self._recent.maxlen:  # the first batch
            room, self._stored = storage_for(batch, _BATCHES)
            self._recent = deque(maxlen=room)
        self._recent.append((batch_idx, self._stored(batch)))
        train_batch(batch, batch_idx, is_last)

    def failing(self) -> tuple[RecordedBatch, OutOfRange] | None:
        """Run the recent batches on the CPU, newest first, with a copy of the module that has zeros as weights.

        Returns:
            The first batch with an index that is out of range, and the index. None if no batch has one, or if the model
            is too large.
        """
        module, trainer = self._run.module, self._run.trainer
        if sum(p.nbytes for p in module.parameters() if is_dense(p)) > _MAX_WEIGHTS:
            return None
        began, step = time.monotonic(), self._run.global_step
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            with _ZerosOnHost():
                host: LightningModule = deepcopy(module, {id(trainer): trainer}).to("cpu")
            silence(host)
            takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
            for batch_idx, batch in reversed(self._recent):
                with suppress(Exception), RaisedCall() as call:
                    given = host.on_after_batch_transfer(host.on_before_batch_transfer(batch, 0), 0)
                    host.training_step(given, *([batch_idx] if takes_index else []))
                if call.rejection is not None:
                    return RecordedBatch(batch, batch_idx, step, copy(self._loop.mean), {}), call.rejection
                if time.monotonic() - began > _SECONDS:
                    break
        return None


class _ZerosOnHost(TorchFunctionMode):
    """Copies tensors of a GPU as zeros on the CPU, without reading them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (Tensor.__deepcopy__, Tensor.clone) or not args[0].is_cuda:
            return func(*args, **kwargs or {})
        tensor, memo = args[0], args[1] if len(args) > 1 else {}
        if id(tensor) not in memo:
            zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
            is_parameter = func is Tensor.__deepcopy__ and isinstance(tensor, nn.Parameter)  # a tensor subclass
            memo[id(tensor)] = nn.Parameter(zeros, tensor.requires_grad) if is_parameter else zeros
        return memo[id(tensor)]
