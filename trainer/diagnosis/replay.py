"""Replay recorded batches.

A failed step is run again, because hooks on every module would slow down every step. It runs on the module itself,
which is restored afterwards, because a copy would need twice the memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy, deepcopy
from functools import partial
from inspect import currentframe
from itertools import chain
from traceback import walk_stack
from typing import Any, NamedTuple, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainer.common.module_tree import is_dense, parameters_of
from trainer.common.packages import is_frameworks_file
from trainer.data.samples import batch_size, samples_of
from trainer.diagnosis.recording import RecordedBatch
from trainer.diagnosis.replay_state import ObjectState
from trainer.errors import ConfigurationError
from trainer.loop.accumulation import loss_in
from trainer.loop.batch_path import ModuleCalls
from trainer.loop.run_state import RunState
from trainer.precision.autocast_ops import cuda_autocast_ops
from trainer.precision.cast_cache import unwatched
from trainer.precision.fp32_modules import find_modules, in_float32
from trainer.state import random_states

T = TypeVar("T")
_HALF = (torch.float16, torch.bfloat16)
_WRAPPERS = ("autocast_mode.py", "contextlib.py", __file__)
"""Files with functions that enter a context for others, such as decorators."""


class Variant(NamedTuple):
    """A change for the replay of a batch.

    Attributes:
        dtype: dtype of autocast; float32 disables autocast. Default: None, the run's precision.
        modules: patterns of the modules that run in float32.
        cuda: whether autocast uses CUDA's lists of operations if the device is a CPU.
        without: indices of the samples to leave out. If none remains, their nan and inf become 0.
        is_wide: whether 16-bit weights, buffers and tensors of the batch become float32. Casts to 16 bits in the code
            then become casts to float32, and the code's own autocast has no effect.
        own_autocast: whether the code's own autocast to 16 bits has an effect.
    """

    dtype: torch.dtype | None = None
    modules: tuple[str, ...] = ()
    cuda: bool = False
    without: tuple[int, ...] = ()
    is_wide: bool = False
    own_autocast: bool = True

    def applied(self, run: RunState) -> ExitStack:
        """Return the context of the forward pass."""
        device, stack = run.device.type, ExitStack()
        if self.modules:
            stack.enter_context(in_float32(find_modules(run.module, self.modules), device))
        if self.cuda:
            stack.enter_context(cuda_autocast_ops())
        if self.dtype is None:
            stack.enter_context(_copy_context(run.precision.autocast()))
        else:
            enabled = self.dtype is not torch.float32
            stack.enter_context(torch.autocast(device, self.dtype if enabled else torch.bfloat16, enabled))
        if self.is_wide:
            stack.enter_context(_Widen())
        if self.is_wide or not self.own_autocast:
            stack.enter_context(own_autocast(is_ignored=True))
        return stack

    def changed(self, batch: Any) -> Any:
        """Return the batch in float32 if ``is_wide``, without the samples to leave out."""
        if self.is_wide:
            batch = apply_to_collection(
                batch, Tensor, lambda tensor: tensor.float() if tensor.dtype in _HALF else tensor
            )
        if not self.without:
            return batch
        rest = [index for index in range(batch_size(batch)) if index not in self.without]
        return samples_of(batch, rest) if rest else apply_to_collection(batch, Tensor, torch.nan_to_num, 0.0, 0.0, 0.0)


class _Widen(TorchFunctionMode):
    """Replaces 16-bit dtypes in the code by float32: in casts, and in the creation of tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.half, Tensor.bfloat16):
            return args[0].float()
        return func(
            *map(_widened_dtype, args), **{name: _widened_dtype(value) for name, value in (kwargs or {}).items()}
        )


@contextmanager
def _wide_weights(module: nn.Module) -> Iterator[None]:
    """Convert 16-bit parameters and buffers to float32 in this context. Their gradients become 16-bit at its end."""
    narrow = [
        tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.dtype in _HALF and is_dense(tensor)
    ]
    values = [tensor.data for tensor in narrow]
    for tensor in narrow:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, value in zip(narrow, values, strict=True):
            gradient, tensor.grad = tensor.grad, None
            tensor.data = value
            tensor.grad = None if gradient is None else gradient.to(value.dtype)


def _widened_dtype(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in _HALF else value


@contextmanager
def own_autocast(*, is_ignored: bool = False) -> Iterator[list[tuple[str, int]]]:
    """A context that collects the files and lines in which the code itself enters ``torch.autocast`` with 16 bits.

    Args:
        is_ignored: whether these have no effect. Default: False.
    """
    enter, places = torch.autocast.__enter__, list[tuple[str, int]]()

    def watched(context: torch.autocast) -> Any:
        device = context.device
        before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        entered = enter(context)  # type: ignore[no-untyped-call]
        frame = next(
            frame for frame, _ in walk_stack(currentframe()) if not frame.f_code.co_filename.endswith(_WRAPPERS)
        )
        file, is_half = frame.f_code.co_filename, torch.get_autocast_dtype(device) in _HALF
        if torch.is_autocast_enabled(device) and is_half and not is_frameworks_file(file):
            places.append((file, frame.f_lineno))
            if is_ignored:
                torch.set_autocast_enabled(device, before[0])
                torch.set_autocast_dtype(device, before[1])
        return entered

    torch.autocast.__enter__ = watched  # type: ignore[method-assign]
    try:
        yield places
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]


def has_half_weights(module: nn.Module) -> bool:
    """Return whether the module has parameters of 16 bits."""
    return any(parameter.dtype in _HALF for parameter in module.parameters())


UNCHANGED = Variant()
FLOAT32 = Variant(dtype=torch.float32, is_wide=True)


@contextmanager
def undisturbed(run: RunState) -> Iterator[ObjectState]:
    """Preserve the state of a run during replays, bit for bit. Yields the state for :func:`rewind`.

    Restores random states; weights, buffers and attributes of the module and of its metrics (see
    :class:`~trainer.diagnosis.replay_state.ObjectState`); gradients; learning rates and schedules. Inside the context,
    loggers get nothing, optimizers do not step, and compiled modules run eagerly.

    Changes that a ``training_step`` makes outside the module (files, other objects, its batch) are not reverted.
    """
    engine = run.engine
    module, device = run.module, engine.device
    random_state = random_states.capture(device)
    schedules = [config.scheduler for config in run.schedules]
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    state = ObjectState([module, *schedules, *groups], without=run.optimizers)
    calls, loggers = engine.module_calls, run.loggers
    with ExitStack() as stack:
        stack.enter_context(unwatched())  # a late outcome may be read inside a training step
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(engine.gradient_sync(False))
        # an optimizer step without gradients changes nothing
        optimized_parameters = chain.from_iterable(map(parameters_of, run.optimizers))  # may not be the module's
        stack.enter_context(engine.gradients.set_aside(chain(module.parameters(), optimized_parameters)))
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            engine.module_calls = ModuleCalls(step=lambda optimizer, closure, **_: closure())  # without a step
            run.loggers = [DummyLogger()] if loggers else []
            yield state
        finally:
            run.loggers, engine.module_calls = loggers, calls
            state.restore()
            random_states.restore(random_state, device)


def refuse_drawn_batches(run: RunState, subject: str) -> None:
    """Raise an error if ``training_step`` draws its own batches, so that a step cannot be repeated."""
    if run.loop.path.draws:
        raise ConfigurationError(
            f"{subject} repeats steps, which is not possible if `training_step` draws its own batches"
            " (`dataloader_iter`). Use `training_step(self, batch, batch_idx)`."
        )


def in_step(run: RunState, batches: Sequence[RecordedBatch]) -> list[RecordedBatch | None]:
    """Pad the batches with None, so that all processes have the same number. All processes must call it together."""
    engine = run.engine
    most = int(engine.collectives.reduce(torch.tensor(len(batches), device=engine.device), "max"))
    return [*batches, *[None] * (most - len(batches))]


def rewind(run: RunState, state: ObjectState, recorded: RecordedBatch | None) -> None:
    """Restore the buffers and random states that were recorded before the ``training_step`` of a batch.

    Everything else is restored to ``state``, which was captured when the replays began.
    """
    state.restore()  # an earlier replay may have changed it
    if recorded is not None:
        if recorded.buffers is not None:
            recorded.buffers.restore()
        random_states.restore(recorded.random_state, run.device)


def optimized(run: RunState) -> dict[str, Tensor]:
    """Return the parameters of the optimizers by name, or the gathered tensors of sharded ones.

    The backward pass computes gradients for these tensors. A step is skipped if one of the gradients is not finite. All
    processes must call it together.
    """
    module = run.module
    leaves: dict[str, Tensor] = run.gradients.leaves(module)
    stepped = {id(p) for optimizer in run.optimizers for p in parameters_of(optimizer)}
    return {name: leaves[name] for name, p in module.named_parameters() if id(p) in stepped}


def run_batch(
    run: RunState,
    recorded: RecordedBatch | None,
    on_loss: Callable[[Tensor], object],
    variant: Variant = UNCHANGED,
) -> None:
    """Run ``training_step`` on the unwrapped module, and call ``on_loss`` instead of each backward pass.

    If parameters are sharded, a process without a batch or a loss takes part in the collectives with a loss of 0.

    Args:
        run: the state of the run.
        recorded: the batch. None if this process has no batch.
        on_loss: called with the loss before scaling: the batch's share of the window's mean. A fit corrects the shares
            at the end of a window if its batches have different weights, or some have no loss; a replay does not. In
            manual optimization, called for each ``manual_backward``.
        variant: the change for the replay. Default: none.
    """
    module, engine = run.module, run.engine
    silence(module)
    if recorded is None:
        idle = engine.gradients.idle_loss()
        if idle is not None:
            on_loss(idle)
        return

    def manual_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with torch.autocast(loss.device.type, enabled=False):
            on_loss(loss)

    vars(module).update(manual_backward=manual_backward, clip_gradients=_nothing)
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    batch = variant.changed(recorded.batch)
    with _wide_weights(module) if variant.is_wide else nullcontext():
        with variant.applied(run):
            output = engine.replay_step("training_step")(batch, *([recorded.batch_idx] if takes_index else []))
        if not module.automatic_optimization:
            return
        loss, weight = loss_in(output)
        if loss is not None and recorded.mean.batch_weight != 0:
            on_loss(copy(recorded.mean).share(loss, weight))


def silence(module: nn.Module) -> None:
    """Make ``self.log`` a no-op in the module and its submodules until `undisturbed` ends."""
    for submodule in module.modules():
        if isinstance(submodule, LightningModule):
            vars(submodule).update(log=_nothing, log_dict=_nothing)


def replay(
    run: RunState,
    batches: Sequence[RecordedBatch],
    on_loss: Callable[[Tensor, Mapping[str, Tensor]], T],
    variant: Variant = UNCHANGED,
) -> Generator[list[T]]:
    """Replay batches, and yield for each the results of ``on_loss``. All processes must call it together.

    Args:
        run: the state of the run.
        batches: the batches of this process.
        on_loss: called with each loss and the parameters for :func:`backward`.
        variant: the change for the replay. Default: none.
    """
    with undisturbed(run) as state:
        parameters = optimized(run)
        for recorded in in_step(run, batches):
            results: list[T] = []
            watched = {} if recorded is None else parameters
            rewind(run, state, recorded)
            run_batch(run, recorded, lambda loss: results.append(on_loss(loss, watched)), variant)  # noqa: B023
            yield results


def backward(loss: Tensor, scale: float, parameters: Mapping[str, Tensor], look: Callable[[Tensor], T]) -> dict[str, T]:
    """Run a backward pass of the scaled loss without changing ``.grad``.

    Args:
        loss: the loss with its graph, which is retained.
        scale: the loss scale; the product is computed in float32, as by the scaler.
        parameters: the parameters whose gradients are passed to ``look``, by name (:func:`optimized`). Empty if this
            process only takes part in the collectives.
        look: called with the gradient of each parameter when it is computed; with the values of a sparse gradient.

    Returns:
        The results of ``look`` by name, in the order of the backward pass.
    """
    results: dict[str, T] = {}

    def hook(gradient: Tensor, name: str) -> Tensor | None:
        if gradient.layout is not torch.strided:  # of an embedding with sparse=True
            results[name] = look(gradient.coalesce().values())
            return None
        results[name] = look(gradient)
        return gradient.new_zeros(()).expand_as(gradient)  # frees the gradient

    wanted = {name: p for name, p in parameters.items() if p.requires_grad}
    handles = [p.register_hook(partial(hook, name=name)) for name, p in wanted.items()]  # type: ignore[no-untyped-call]
    try:
        scaled = loss * torch.tensor(scale, dtype=torch.float32, device=loss.device)
        if wanted:
            torch.autograd.grad(scaled, list(wanted.values()), allow_unused=True, retain_graph=True)
        elif not parameters:
            scaled.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    return results


def _copy_context(context: AbstractContextManager[object]) -> AbstractContextManager[object]:
    """Return a copy of a context manager, because the original is in use in a replay within a manual step."""
    try:
        return deepcopy(context)
    except TypeError:  # from a generator function, which creates a new one for each call
        return context


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, instead of logging and clipping."""
