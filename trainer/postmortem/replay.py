"""Running a recorded batch again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from trainer.engine.protocol import Engine, ModuleCalls
from trainer.loops.step_output import loss_in
from trainer.module_tree import parameters_of
from trainer.postmortem.recording import RecordedBatch
from trainer.postmortem.state import ObjectState
from trainer.precision.cast_cache import forget_casts
from trainer.state import random_states

if TYPE_CHECKING:
    from trainer.trainer import Trainer

OnLoss = Callable[[Tensor], None]


@contextmanager
def undisturbed(trainer: Trainer) -> Iterator[ObjectState]:
    """A context for replays. When it ends, the run is as it was when it began, to the bit.

    Gives the state from when it began, for :func:`rewind`.

    Put back are: random states; weights, buffers, attributes of the module and of its metrics
    (:class:`~trainer.postmortem.state.ObjectState` says how deep); gradients; learning rates and schedules.
    Inside, nothing reaches a logger, optimizers do not step, and compiled modules run eagerly.

    Not put back is what a ``training_step`` changes outside of the module: files, counters of other objects, its
    batch.
    """
    engine: Engine = trainer.engine
    module, device = trainer.lightning_module, engine.device
    random_state = random_states.capture(device)
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    state = ObjectState([module, *schedules], groups, parameters=True)
    calls, loggers = engine.module_calls, trainer.loggers
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(engine.gradient_sync(False))
        # a step without gradients changes nothing, whoever calls it
        stack.enter_context(engine.gradients.set_aside(module.parameters()))
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            engine.module_calls = ModuleCalls(step=_evaluate_only)
            trainer.loggers = [DummyLogger()] if loggers else []
            yield state
        finally:
            forget_casts()
            trainer.loggers, engine.module_calls = loggers, calls
            state.restore()
            random_states.restore(random_state, device)


def in_step(trainer: Trainer, batches: Sequence[RecordedBatch]) -> list[RecordedBatch | None]:
    """As many batches on every process as any of them has: None in the place of those that this one lacks.

    All processes call this together.
    """
    engine: Engine = trainer.engine
    lacking = 0
    if engine.world_size > 1:
        most = engine.reduce(torch.tensor(len(batches), device=engine.device), "max")
        lacking = int(most) - len(batches)
    return [*batches, *[None] * lacking]


def rewind(trainer: Trainer, now: ObjectState, recorded: RecordedBatch | None) -> None:
    """Make things as they were just before the batch's ``training_step``; what was not recorded, as it is now."""
    now.restore()  # an earlier replay may have left its traces
    if recorded is not None:
        if recorded.state is not None:
            recorded.state.restore()
        random_states.restore(recorded.random_state, trainer.engine.device)


def optimized(trainer: Trainer) -> dict[str, Tensor]:
    """Of the parameters that optimizers have, what a backward pass computes gradients of, by name.

    Their gradients decide whether a step is skipped. All processes call this together.
    """
    leaves: dict[str, Tensor] = trainer.engine.gradients.leaves(trainer.lightning_module)
    stepped = {id(p) for optimizer in trainer.optimizers for p in parameters_of(optimizer)}
    return {name: leaves[name] for name, p in trainer.lightning_module.named_parameters() if id(p) in stepped}


def is_idle(recorded: RecordedBatch | None) -> bool:
    """Whether this process has no batch, or none that gave a loss, where others have."""
    return recorded is None or not recorded.has_loss


def run(
    trainer: Trainer,
    recorded: RecordedBatch | None,
    on_loss: OnLoss,
    autocast: AbstractContextManager[object] | None = None,
) -> None:
    """Run ``training_step`` on the bare module, with ``on_loss`` in the place of each backward pass.

    Where forward and backward passes wait for other processes (parameters are sharded), a process without a batch, or
    without a loss, does what keeps step with them, with a loss of 0.

    ``on_loss`` is given the loss as it would be scaled: its share of the window's mean (without the correction that
    a window's last batch gets where the others had other weights, or None). In manual optimization it is called for
    each ``manual_backward``. ``autocast`` is the context of the forward pass. Default: that of the run's precision.
    """
    module, engine = trainer.lightning_module, trainer.engine
    silence(module)
    if is_idle(recorded) or recorded is None:
        idle = engine.gradients.idle_loss()
        if idle is not None:
            on_loss(idle)
        return

    def manual_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with torch.autocast(loss.device.type, enabled=False):
            on_loss(loss)

    vars(module).update(manual_backward=manual_backward, clip_gradients=_nothing)
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    with _another(trainer.loop.precision.autocast()) if autocast is None else autocast:
        output = engine.replay_step("training_step")(recorded.batch, *([recorded.batch_idx] if takes_index else []))
    if not module.automatic_optimization:
        return
    loss, weight = loss_in(output)
    if loss is not None and recorded.window.batch_weight != 0:
        on_loss(copy(recorded.window).share(loss, weight))


def silence(module: nn.Module) -> None:
    """Have ``self.log`` do nothing, in the module and in those inside of it, until `undisturbed` ends."""
    for part in module.modules():
        if isinstance(part, LightningModule):
            vars(part).update(log=_nothing, log_dict=_nothing)


def backward(loss: Tensor, scale: float, parameters: Mapping[str, Tensor], look: Callable[[str, Tensor], None]) -> None:
    """One backward pass of the scaled loss that leaves ``.grad`` alone.

    Args:
        loss: with its graph, which is kept.
        scale: what it is multiplied by, as the scaler would: in float32.
        parameters: by name; those whose gradients are looked at (:func:`optimized`). None of them where this process
            is idle, and only keeps step.
        look: given each name and gradient as soon as it is there; of a sparse one, the values.
    """

    def looking(name: str) -> Callable[[Tensor], Tensor | None]:
        def hook(gradient: Tensor) -> Tensor | None:
            if gradient.layout is not torch.strided:  # that of an embedding, sparse=True
                look(name, gradient.coalesce().values())
                return None
            look(name, gradient)
            return gradient.new_zeros(()).expand_as(gradient)  # not kept: no second set of gradients in memory

        return hook

    wanted = {name: p for name, p in parameters.items() if p.requires_grad}
    handles = [p.register_hook(looking(name)) for name, p in wanted.items()]  # type: ignore[no-untyped-call]
    try:
        scaled = loss * torch.tensor(scale, dtype=torch.float32, device=loss.device)
        if wanted:
            torch.autograd.grad(scaled, list(wanted.values()), allow_unused=True, retain_graph=True)
        elif not parameters:
            scaled.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()


def _evaluate_only(optimizer: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
    """In the place of a module's ``optimizer.step``: closures run, optimizers do not step."""
    return closure()


def _another(context: AbstractContextManager[object]) -> AbstractContextManager[object]:
    """A context like this one, which is reused and may be in use: a manual step asks for the last outcome, too."""
    try:
        return deepcopy(context)
    except TypeError:  # made by a generator function: each one is new
        return context


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Log nothing, clip nothing."""
