"""Modules: check them, attach them to a Trainer, and call their hooks around a run through Lightning."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Container, Iterable, Set
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from functools import cache, partial
from inspect import getsource
from itertools import chain
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import lightning.pytorch as pl
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.loops.utilities import _verify_dataloader_idx_requirement
from lightning.pytorch.trainer.call import _call_configure_model, _call_setup_hook, _call_teardown_hook
from lightning.pytorch.trainer.configuration_validator import _verify_loop_configurations
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.compile import _maybe_unwrap_optimized, _verify_strategy_supports_compile
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torchmetrics import Metric, SumMetric

from trainer.arguments import refuse_other_package
from trainer.callbacks.gradient_accumulation import GradientAccumulation, find_callback
from trainer.callbacks.gradient_clipping import GradientClipping
from trainer.checkpoint.optimizer_states import keep_dtypes, with_inner
from trainer.common.module_tree import parameters_of
from trainer.common.packages import is_users_module
from trainer.common.parts import local
from trainer.common.session import Session
from trainer.errors import ConfigurationError, join_first, warn
from trainer.lightning.loaders import DrawnLoaderSet, LoaderSet
from trainer.loop.run_state import RunState, state_of
from trainer.metrics.metric_objects import state_names
from trainer.state.snapshot import MAX_NUMBERS, STATELESS, UNLIMITED, Rules, Snapshot, memory_of
from trainer.state.stopping import EarlyStop

_BASES = {*LightningModule.__mro__, *LightningDataModule.__mro__}
_FRAMEWORKS = sys.stdlib_module_names | {"lightning", "pytorch_lightning", "torch", "trainer"}
_STATE = ("state_dict", "load_state_dict")
_SAVED_BY_OTHERS = ("lightning.", "trainer.", "torch.distributed.")
"""Packages with optimizers and schedules that wrap the Trainer's, or run collectives in ``state_dict``."""
_OF_MODULES = frozenset(vars(LightningModule()))
"""Attributes of a module that Lightning and torch set."""
_OF_OPTIMIZERS = frozenset(vars(SGD([Tensor()])))
"""Attributes of an optimizer that torch sets."""
_OF_METRICS = _OF_MODULES | vars(SumMetric()).keys()
"""Attributes of a metric object that torchmetrics and torch set, and the states of this one."""

_WITH_RESULTS = (EarlyStopping, ModelCheckpoint, StochasticWeightAveraging, Timer, WeightAveraging)
_FITS: WeakKeyDictionary[Callback, tuple[ref[pl.Trainer], dict[str, Any], dict[str, Any]]] = WeakKeyDictionary()
"""The Trainer of the last fit, and the attributes before the first fit and after the last one."""

call_setup_hooks = _call_setup_hook
configure_model = _call_configure_model
call_teardown_hooks = _call_teardown_hook


_PORT = """\
Write a LightningModule that has it as an attribute (`import lightning as L`), and pass Module({name}(...)):
  class Module(L.LightningModule):
      def __init__(self, net): super().__init__(); self.net = net
      def training_step(self, batch, batch_idx): return loss_function(self.net(batch[0]), batch[1])
      def configure_optimizers(self): return torch.optim.AdamW(self.parameters())"""
"""Note on the error about a module of torch that is no LightningModule."""


def attach(trainer: pl.Trainer, model: Any) -> LightningModule:
    """Make ``model`` the Trainer's module, or keep that of an earlier run if it is None. Return the module.

    Args:
        trainer: the Trainer.
        model: a LightningModule, or the result of ``torch.compile`` for one. A fit does not accept None.

    Raises:
        ConfigurationError: if it is a module of another package.
        TypeError: if it is not a LightningModule, or is None without an earlier run.
    """
    refuse_other_package("model", getattr(model, "_orig_mod", model))
    run = state_of(trainer)
    fitting, fn = run.fits, run.fn
    assert fn is not None
    if model is None and not fitting and trainer.lightning_module is None:
        raise TypeError(
            f"`Trainer.{fn.value}()` requires a `LightningModule` when it hasn't been passed in a previous run"
        )
    try:
        module = trainer.lightning_module if model is None and not fitting else _maybe_unwrap_optimized(model)
    except TypeError as error:
        if isinstance(model, nn.Module):
            error.add_note(_PORT.format(name=type(model).__name__))
        raise
    trainer.strategy._lightning_module = module
    module.trainer = trainer
    return module


def verify(trainer: pl.Trainer, module: LightningModule) -> None:
    """Check that the module and the Trainer's settings are compatible, before the setup."""
    _verify_strategy_supports_compile(module, trainer.strategy)
    run = state_of(trainer)
    if run.fits and not module.automatic_optimization:
        _refuse_automatic_parts(run)
    _verify_loop_configurations(trainer)


def _refuse_automatic_parts(run: RunState) -> None:
    """Refuse clipping and accumulation by the Trainer in manual optimization, where the module does them."""
    clips = find_callback(run.callbacks, GradientClipping) is not None
    accumulation = find_callback(run.callbacks, GradientAccumulation)  # Lightning's refuses it itself
    accumulates = max([run.accumulate_grad_batches] if accumulation is None else accumulation.schedule.values()) > 1
    for is_used, what, instead in (
        (clips, "gradient_clip_val, or GradientClipping,", "call `self.clip_gradients` before `optimizer.step()`"),
        (accumulates, "accumulate_grad_batches, or its callback,", "step the optimizer after every N batches"),
    ):
        if is_used:
            raise ConfigurationError(
                f"Got {what} with manual optimization, expected neither. Remove it, and {instead} in `training_step`;"
                " or use automatic optimization."
            )


def verify_dataloader_idx(module: LightningModule, name: str, stage: RunningStage, loaders: LoaderSet) -> None:
    """Check that evaluation methods take ``dataloader_idx`` if, and only if, there are several dataloaders.

    Args:
        module: the module with the methods.
        name: ``"validation"``, ``"test"`` or ``"predict"``.
        stage: their stage, for the message.
        loaders: the data of that stage.

    Raises:
        RuntimeError: if a method takes ``dataloader_idx`` with one dataloader, or lacks it with several.
    """
    several = loaders.is_sequential and len(loaders.limits) > 1
    step, hooks = (f"{name}_step",), (f"on_{name}_batch_start", f"on_{name}_batch_end")
    draws = isinstance(loaders, DrawnLoaderSet)  # drawn batches come with the index of their dataloader
    _verify_dataloader_idx_requirement(step, several and not draws, stage, module)
    _verify_dataloader_idx_requirement(hooks, several, stage, module)


def warn_of_eval_mode(trainer: pl.Trainer) -> None:
    """Warn if parts of the module are in eval mode when training begins."""
    trainer.fit_loop._warn_if_modules_in_eval_mode()


def warn_of_gradient_hooks(run: RunState) -> None:
    """Warn of hooks on gradients of parameters and modules if losses are scaled: they run inside backward passes."""
    scales = run.scaler.is_enabled() and any(map(parameters_of, run.optimizers))
    if not (scales and run.engine.exposes_gradients):
        return
    module = run.module
    hooked = [name for name, p in module.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    hooked += [name or "the module" for name, m in module.named_modules() if m._backward_hooks or m._backward_pre_hooks]
    if hooked:
        warn(
            f"Got hooks on the gradients of {join_first(hooked, 3)} with precision={run.precision.name!r}. Autograd"
            " calls them inside the backward pass, when gradients are multiplied by the loss scale. Hooks that multiply"
            " gradients, such as masks, work. Hooks that clip or log gradients or step an optimizer do not: use"
            " gradient_clip_val or on_after_backward instead, or precision='bf16-mixed'."
        )


def set_up_profiler(run: RunState) -> None:
    """Set the module and the folder of the profiler."""
    trainer, profiler = run.trainer, cast(Any, run.profiler)
    profiler._lightning_module = run.module
    rank = trainer.local_rank if run.world_size > 1 else None
    profiler.setup(stage=run.fn, local_rank=rank, log_dir=trainer.log_dir)


def snapshot_of(run: RunState) -> Snapshot:
    """Return the snapshot of the user's objects: changes from now on are part of a checkpoint."""
    engine, module, datamodule = run.engine, run.module, run.datamodule
    packages = {package_of(base) for root in (module, datamodule) for base in type(root).__mro__} - _FRAMEWORKS
    users = frozenset({*packages, "torchmetrics"})
    elsewhere = {*map(id, with_inner(run.optimizers)), *(id(config.scheduler) for config in run.schedules)}

    def ignored(value: Any) -> Container[str] | None:
        class_: type = type(value)
        if value is run.trainer:
            return set(vars(value))
        if not _is_searched(class_, users):
            return None
        if isinstance(value, Metric):
            return _OF_METRICS - state_names(value)
        if isinstance(value, Callback):
            return assigned_by_bases(class_)
        if isinstance(value, Optimizer):
            return None if _defines(class_, _STATE, users) else _OF_OPTIMIZERS
        return _OF_MODULES if isinstance(value, nn.Module) else frozenset()

    def saves_itself(value: Any) -> bool:
        class_: type = type(value)
        is_torchs = isinstance(value, (Optimizer, LRScheduler, GradScaler))
        if id(value) in elsewhere or isinstance(value, (Callback, LightningDataModule, DataLoader)):
            return False
        if is_torchs:
            return engine.exposes_gradients and not class_.__module__.startswith(_SAVED_BY_OTHERS)
        return _defines(class_, _STATE, users)

    def load(value: Any, state: Any) -> None:
        with keep_dtypes([value], [state], {}) if isinstance(value, Optimizer) else nullcontext():
            value.load_state_dict(state)

    averages = {
        f"{callback.state_key}.{name}": value
        for callback in run.callbacks
        for name, value in vars(callback).items()
        if isinstance(callback, WeightAveraging) and isinstance(value, AveragedModel)
    }

    def saved_elsewhere() -> Set[int]:
        saved = [tensor for root in (module, *averages.values()) for tensor in (*root.parameters(), *root.buffers())]
        return memory_of(map(local, saved))

    rules = Rules(
        ignored,
        saves_itself,
        load,
        limit=lambda value: UNLIMITED if isinstance(value, Metric) else MAX_NUMBERS,
        device=engine.device,
        elsewhere=saved_elsewhere,
        trained=lambda: memory_of(chain.from_iterable(map(parameters_of, run.optimizers))),
        saves_states=not run.is_sharded,
        saves_weights=engine.world_size == 1,
        saves_buffers=engine.global_rank > 0,
    )
    roots: dict[str, Any] = {
        "trainer": run.trainer,
        "module": module,
        "datamodule": datamodule,
        **_by_key(run.callbacks),
        **averages,
    }
    roots |= {f"optimizers.{number}": optimizer for number, optimizer in enumerate(run.optimizers)}
    return Snapshot(roots, rules)


def _by_key(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """Return the callbacks by their keys, with a number if several have the same."""
    keys = [callback.state_key for callback in callbacks]
    count = {key: keys.count(key) for key in keys}
    names = (f"{key} {keys[:place].count(key)} of {count[key]}" for place, key in enumerate(keys))
    return dict(zip((n if count[k] > 1 else k for n, k in zip(names, keys, strict=True)), callbacks, strict=True))


@cache
def _is_searched(class_: type, packages: Set[str]) -> bool:
    """Return whether the attributes of the objects of a class are part of a snapshot.

    The class must be the user's, have a ``__dict__``, and have no bases in other packages with a state that the
    framework does not know.
    """
    users, others = _bases(class_, packages)
    return bool(users and class_.__dictoffset__ and all(map(_is_base, others)))


@cache
def _defines(class_: type, names: tuple[str, ...], packages: Set[str]) -> bool:
    """Return whether the user's bases of a class define all methods."""
    users, _ = _bases(class_, packages)
    return all(any(name in vars(base) for base in users) for name in names)


def _bases(class_: type, packages: Set[str]) -> tuple[list[type], set[type]]:
    """Return the bases of a class that are the user's, and those of other packages, except the ones without a state."""
    users = [base for base in class_.__mro__ if is_users_module(base.__module__) or package_of(base) in packages]
    others = {base for base in class_.__mro__ if not base.__module__.startswith("torch.distributed.")}
    return users, others - STATELESS - {*users}


def package_of(class_: type) -> str:
    """Return the top-level package of a class."""
    return class_.__module__.partition(".")[0]


def _is_base(class_: type) -> bool:
    is_torchs = class_.__module__.startswith("torch.nn.") and issubclass(class_, nn.Module)
    return is_torchs or class_ in _BASES or issubclass(class_, (Callback, Optimizer))


@cache
def assigned_by_bases(class_: type) -> Set[str]:
    """Return the attributes of a callback that its bases in Lightning and in this package assign, by their source."""
    bases = [base for base in class_.__mro__ if package_of(base) in ("lightning", "pytorch_lightning", "trainer")]
    targets = [re.findall(r"^ *(self\.[^=\n]*?) [-+*/|]?= ", getsource(base), re.MULTILINE) for base in bases]
    return frozenset(name for target in chain(*targets) for name in re.findall(r"self\.(\w+)", target))


def reset_results(run: RunState, session: ExitStack) -> None:
    """Reset the results of callbacks that the fit of another Trainer has used. Called when a fit starts.

    Attributes that the user has set after that fit are kept.
    """
    for callback in run.callbacks:
        if not isinstance(callback, _WITH_RESULTS):
            continue
        class_: type = type(callback)
        attributes, names = vars(callback), assigned_by_bases(class_)
        owner, first, last = _FITS.get(callback, (None, {}, {}))
        if owner is None:
            first = {name: deepcopy(value) for name, value in attributes.items() if name in names}
        elif (is_timer := isinstance(callback, Timer)) or owner() is not run.trainer:  # each fit has its own time
            changed = {name for name in first if is_timer or attributes.get(name) is last.get(name)}
            attributes.update({name: deepcopy(first[name]) for name in changed})
        _FITS[callback] = ref(run.trainer), first, {}
        session.callback(partial(_note, callback, ref(run.trainer), first))


def withdraw_early_stops(run: RunState, session: Session) -> None:
    """Make ``EarlyStopping`` withdraw a request if its metric recovers before ``min_epochs`` and ``min_steps`` are met.

    ``trainer.should_stop = True`` of other code stays.
    """
    for callback in run.callbacks:
        if isinstance(callback, EarlyStopping):
            check = callback._run_early_stopping_check
            session.replace(callback, "_run_early_stopping_check", partial(_check_again, callback, check))


def _check_again(callback: EarlyStopping, check: Callable[[pl.Trainer], None], trainer: pl.Trainer) -> None:
    limits, key = state_of(trainer).loop.limits, callback.state_key
    before = limits.should_stop if limits.should_stop else EarlyStop.of(())
    if not isinstance(before, EarlyStop) or callback.monitor not in trainer.callback_metrics:
        check(trainer)
        return
    limits.should_stop = False
    check(trainer)
    stop = EarlyStop.of(before.callbacks | {key} if limits.should_stop else before.callbacks - {key})
    limits.should_stop = bool(stop) if limits.may_stop() else stop
    if key in before.callbacks - stop.callbacks:
        callback.stopped_epoch, callback.stopping_reason_message = 0, None
        callback.stopping_reason = EarlyStoppingReason.NOT_STOPPED


def _note(callback: Callback, owner: ref[pl.Trainer], first: dict[str, Any]) -> None:
    _FITS[callback] = owner, first, dict(vars(callback))
