"""Lightning's weight averaging, without skipped steps, and with the current weights until the first update.

``WeightAveraging`` averages in ``on_train_batch_end``, after each optimizer step that ``trainer.global_step`` counts,
including skipped ones. Here the same method runs when the outcome of an update is known, unless the step was skipped.
The weights are still those of that update, even if the outcome arrives late.

If a subclass overrides ``on_train_batch_end``, that method is called after each batch, as usual. Its ``should_update``
is only called for steps that were not skipped, so the loop waits for an outcome that arrives late.

Until the first update, ``AveragedModel.n_averaged`` is 0 and the average is a copy of the initial weights. Before it is
read (by a validation, at the end of the fit, for a checkpoint), :func:`follow` copies the current weights into it. A
subclass that updates its average without ``AveragedModel.update_parameters`` must increment ``n_averaged`` itself.
``StochasticWeightAveraging`` reads its average only at the end. If it was never updated, the module is unchanged.

If each process holds a shard of the weights, each one also holds the same shard of the average, for both callbacks. The
module of the average is a copy without weights, made before the module is sharded; it receives copies of the sharded
weights. No process has a full copy. ``WeightAveraging(device=...)`` is ignored then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from trainer.common.parts import spread
from trainer.common.session import Session
from trainer.distributed.sharding.state_dicts import load_module_state
from trainer.loop.fit import FitLoop
from trainer.loop.run_state import RunState, state_of
from trainer.state.outcome import StepOutcome

_HOOK, _QUESTION, _SWAP = "on_after_optimizer_step", "should_update", "_swap_models"
_COPY, _TRANSFER = "_copy_average_to_current", "transfer_weights"
PartOf = Callable[[Tensor], Tensor]
"""Returns the part of a tensor that this process holds."""


def defer_copies(run: RunState, session: Session) -> None:
    """Prevent averaging callbacks from copying weights in ``setup`` if the weights will be sharded."""
    if not run.is_sharded:
        return
    for callback in run.callbacks:
        for base in (WeightAveraging, StochasticWeightAveraging):
            if isinstance(callback, base) and _is_default(callback, base, "setup"):
                session.replace(callback, "setup", _skip_copy)


def hide_averages(run: RunState, session: Session) -> None:
    """Hide the averages of an earlier fit from a run that does not train, until ``session`` closes.

    Otherwise, Lightning's callback would validate its average instead of the module's weights, and load the training
    weights of a checkpoint instead of its average.
    """
    for callback in run.callbacks if not run.fits else ():
        if isinstance(callback, WeightAveraging):
            session.callback(setattr, callback, "_average_model", callback._average_model)
            callback._average_model = None


def attach_averaging(run: RunState, session: Session) -> None:
    """Make averaging callbacks ignore skipped steps, and make their averages follow the weights until the first update.

    If the weights will be sharded, create the averages. The methods that are replaced are restored when ``session``
    closes.
    """
    makes_averages = run.is_sharded and run.stage is RunningStage.TRAINING
    for callback in run.callbacks:
        replace = partial(session.replace, callback)
        if makes_averages:
            _make_average(callback, run.module)
        if isinstance(callback, StochasticWeightAveraging):
            replace(_TRANSFER, partial(_transfer, callback, callback.transfer_weights))
        if not isinstance(callback, WeightAveraging):
            continue
        replace(_SWAP, _Swap(callback))
        replace(_COPY, partial(_copy_to_current, callback, callback._copy_average_to_current))
        if _is_default(callback, WeightAveraging, "on_train_batch_end"):
            replace(_HOOK, partial(_average, callback))
        elif run.skips_steps:
            replace(_QUESTION, partial(_unless_skipped, run.loop, callback.should_update))


def shard_averages(run: RunState, session: Session) -> None:
    """Copy the weights of the module, which has been sharded, into the averages."""
    if not (run.is_sharded and run.stage is RunningStage.TRAINING):
        return
    module, part_of = run.module, run.part
    for callback in run.callbacks:
        if isinstance(callback, WeightAveraging):
            average: Any = callback._average_model
            _fill(average.module, module)
            average.n_averaged = average.n_averaged.to(run.device)
            session.replace(average, "update_parameters", partial(_update, average, part_of))
            session.replace(callback, "on_load_checkpoint", partial(_load, callback.on_load_checkpoint))
        elif isinstance(callback, StochasticWeightAveraging):
            assert callback._average_model is not None
            _fill(callback._average_model, module)
            session.replace(callback, "update_parameters", partial(_update_swa, callback.update_parameters, part_of))
            session.replace(callback, "_load_average_model_state", partial(_load_swa, callback))


def call_load_hook(run: RunState, checkpoint: dict[str, Any]) -> None:
    """Call the module's ``on_load_checkpoint``, and change the training weights as it has changed the average."""
    module = run.module
    if "current_model_state" not in checkpoint:  # of a run without averages
        module.on_load_checkpoint(checkpoint)
        return

    def versions(key: str) -> dict[str, tuple[int, int]]:
        return {name: (id(value), _version(value)) for name, value in (checkpoint.get(key) or {}).items()}

    both = "state_dict", "current_model_state"
    held = [dict(checkpoint.get(key) or {}) for key in both]  # so that the ids stay those of these values
    before = [versions(key) for key in both]
    module.on_load_checkpoint(checkpoint)
    trained: Any = checkpoint.get(both[1])
    after = [versions(key) for key in both]
    for name in (before[0].keys() | after[0].keys()) if trained else ():
        is_changed, own_is_changed = (then.get(name) != now.get(name) for then, now in zip(before, after, strict=True))
        if is_changed and not own_is_changed:  # the hook may have changed both
            trained.pop(name, None)
            if name in after[0]:
                trained[name] = deepcopy(checkpoint["state_dict"][name])
    del held


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def training_state(run: RunState, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint that a fit loads the module from: with the training weights instead of their average.

    Without ``strict_loading``, the weights that the checkpoint lacks, such as frozen ones, are added, because
    ``WeightAveraging.on_load_checkpoint`` requires all of them.
    """
    module = run.module
    averages = run.fits and any(isinstance(callback, WeightAveraging) for callback in run.callbacks)
    if not averages or "current_model_state" not in checkpoint:
        return checkpoint
    if not module.strict_loading:
        every = nn.Module.state_dict(module)  # the module may override it
        for key in ("state_dict", "current_model_state"):
            checkpoint[key] = every | checkpoint[key]
    return checkpoint | {"state_dict": checkpoint["current_model_state"]}


def follow(run: RunState) -> None:
    """Copy the current weights and buffers into each average that has not been updated yet."""
    for callback in run.callbacks:
        if isinstance(callback, WeightAveraging):
            _follow(callback, run.module)


def resume_averaging(run: RunState) -> None:
    """Continue SWA: set up its schedule and, if it has begun, the pass that updates BatchNorm's statistics.

    Lightning's callback does this at the start of an epoch. That is too late for the rest of the resumed epoch, and
    does not happen after the last averaged epoch.
    """
    progress, module = run.progress, run.module
    epoch = progress.epoch
    for callback in run.callbacks:
        if not isinstance(callback, StochasticWeightAveraging) or callback._scheduler_state is None:
            continue
        start = partial(StochasticWeightAveraging.on_train_epoch_start, callback, run.trainer, module)
        saved = callback._max_epochs, callback._latest_update_epoch
        callback._max_epochs, callback._latest_update_epoch = epoch + 1, epoch  # an epoch that has been averaged
        start()
        callback._max_epochs, callback._latest_update_epoch = saved
        if callback.swa_end < epoch - (not progress.batches_this_epoch):  # that pass has begun
            statistics = [buffer.clone() for buffer in module.buffers()]
            callback._max_epochs = epoch
            start()  # resets the statistics
            callback._max_epochs = saved[0]
            for buffer, value in zip(module.buffers(), statistics, strict=True):
                buffer.copy_(value)


@contextmanager
def training_weights(callbacks: Iterable[Any], module: LightningModule) -> Iterator[None]:
    """Return a context for checkpoints: the module has its training weights, even while the average is evaluated."""
    swaps = [vars(callback).get(_SWAP) for callback in callbacks if isinstance(callback, WeightAveraging)]
    swapped = [swap for swap in swaps if isinstance(swap, _Swap) and swap.is_swapped]
    for swap in swapped:
        swap(module)
    try:
        yield
    finally:
        for swap in swapped:
            swap(module)


def _is_default(callback: Any, base: type, name: str) -> bool:
    """Return whether neither a subclass of ``base`` nor the callback itself overrides the method ``name``."""
    return name not in vars(callback) and getattr(type(callback), name) is getattr(base, name)


class _Swap:
    """``WeightAveraging._swap_models`` of one callback, which also stores whether the models are swapped."""

    def __init__(self, callback: WeightAveraging) -> None:
        self.is_swapped = False
        self._callback = callback
        self._swap = callback._swap_models

    def __call__(self, module: LightningModule) -> None:
        if not self.is_swapped:
            _follow(self._callback, module)
        self._swap(module)
        self.is_swapped = not self.is_swapped


def _follow(callback: WeightAveraging, module: LightningModule) -> None:
    """Copy the current weights and buffers into the average of a callback, unless it has been updated."""
    average = callback._average_model
    if average is None or average.n_averaged:  # host-device synchronization if the average is on a GPU
        return
    copies = chain(average.module.parameters(), average.module.buffers())
    for copied, current in zip(copies, chain(module.parameters(), module.buffers()), strict=False):
        copied.data.copy_(current.data)


def _copy_to_current(callback: WeightAveraging, copy: Callable[..., None], module: LightningModule) -> None:
    """Run ``WeightAveraging._copy_average_to_current`` on the current weights."""
    _follow(callback, module)
    copy(module)


def _transfer(
    callback: StochasticWeightAveraging, transfer: Callable[..., None], average: nn.Module, module: nn.Module
) -> None:
    """Run ``StochasticWeightAveraging.transfer_weights``, unless nothing has been averaged yet."""
    updates = callback._init_n_averaged if callback.n_averaged is None else callback.n_averaged
    if updates:  # host-device synchronization if the average is on a GPU
        transfer(average, module)


def _average(
    callback: WeightAveraging,
    trainer: pl.Trainer,
    pl_module: LightningModule,
    optimizer: Optimizer,
    outcome: StepOutcome,
) -> None:
    last = trainer.optimizers[outcome.optimizers[-1]] if outcome.optimizers else optimizer
    # called for each optimizer; averaged once
    if optimizer is last and not _was_skipped(outcome):
        callback.on_train_batch_end(trainer, pl_module, {}, None, state_of(trainer).progress.batch_idx)


def _unless_skipped(
    loop: FitLoop, should_update: Callable[..., bool], step_idx: int | None = None, epoch_idx: int | None = None
) -> bool:
    if step_idx is not None:
        loop.resolve_outcome()  # host-device synchronization with a fused optimizer on a GPU
        outcome = loop.update.outcome
        if outcome is not None and _was_skipped(outcome):
            return False
    return should_update(step_idx=step_idx, epoch_idx=epoch_idx)


def _was_skipped(outcome: StepOutcome) -> bool:
    return outcome.skipped and len(outcome.skipped_optimizers) == len(outcome.optimizers)


# --- sharded weights ----------------------------------------------------------------------------------------


def _skip_copy(trainer: pl.Trainer, pl_module: LightningModule, stage: str) -> None:
    """Replace ``setup`` by a no-op: see :func:`_make_average`."""


def _make_average(callback: Any, module: LightningModule) -> None:
    """Copy the module, which is whole or on the meta device, without its weights."""
    if not isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
        return
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()}
    copy = deepcopy(module, dict(empty))
    if isinstance(callback, StochasticWeightAveraging):
        callback._average_model = copy
    else:
        callback._average_model = AveragedModel(copy, use_buffers=callback._use_buffers, **callback._kwargs)


def _fill(average: nn.Module, module: nn.Module) -> None:
    """Copy the module's parameters and buffers into the average, sharded in the same way."""
    copies: dict[int, nn.Parameter] = {}  # one copy of a parameter that modules share
    for path, owner in module.named_modules(remove_duplicate=False):
        copied = average.get_submodule(path)
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                copied_parameter = copies.setdefault(
                    id(parameter), nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                )
                copied._parameters[name] = copied_parameter
        for name, buffer in owner._buffers.items():
            copied._buffers[name] = None if buffer is None else buffer.detach().clone()


class _Parts(nn.Module):
    """This process's shards of a module's parameters, and the module's buffers, as plain tensors in the same memory.

    An average is computed elementwise, so each process averages its own shards.
    """

    def __init__(self, module: nn.Module, part_of: PartOf) -> None:
        super().__init__()
        for number, parameter in enumerate(module.parameters()):
            self.register_parameter(f"p{number}", nn.Parameter(part_of(parameter.detach()), requires_grad=False))
        for number, buffer in enumerate(module.buffers()):
            self.register_buffer(f"b{number}", buffer)


def _update(average: AveragedModel, part_of: PartOf, model: nn.Module) -> None:
    """Run ``AveragedModel.update_parameters`` on the shards of this process."""
    whole = average.module
    average.module = _Parts(whole, part_of)
    try:
        AveragedModel.update_parameters(average, _Parts(model, part_of))
    finally:
        average.module = whole


def _update_swa(update: Callable[..., None], part_of: PartOf, average: nn.Module, model: nn.Module, *more: Any) -> None:
    """Run ``StochasticWeightAveraging.update_parameters`` on the shards of this process."""
    update(_Parts(average, part_of), _Parts(model, part_of), *more)


def _load(
    load: Callable[..., None], trainer: pl.Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
) -> None:
    """Run ``WeightAveraging.on_load_checkpoint`` on a checkpoint that may hold full tensors."""
    like = pl_module.state_dict()
    for key in {"state_dict", "current_model_state"} & checkpoint.keys():
        checkpoint[key] = {name: spread(value, like.get(name)) for name, value in checkpoint[key].items()}
    load(trainer, pl_module, checkpoint)


def _load_swa(callback: StochasticWeightAveraging, state: Any) -> None:
    """Run ``StochasticWeightAveraging._load_average_model_state`` on a state that may hold full tensors."""
    if callback._average_model is not None:
        load_module_state(callback._average_model, state, strict=True)
