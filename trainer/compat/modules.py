"""Modules: check them, attach them to a Trainer, and call their hooks around a run through Lightning."""

from __future__ import annotations

import sys
from collections.abc import Set
from dis import get_instructions
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loops.utilities import _verify_dataloader_idx_requirement
from lightning.pytorch.trainer.call import _call_configure_model, _call_setup_hook, _call_teardown_hook
from lightning.pytorch.trainer.configuration_validator import _verify_loop_configurations
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.compile import _maybe_unwrap_optimized, _verify_strategy_supports_compile
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torchmetrics import SumMetric

from trainer.arguments import refuse_other_package
from trainer.callbacks.gradient_accumulation import GradientAccumulation
from trainer.callbacks.gradient_clipping import GradientClipping
from trainer.compat import callback_order
from trainer.compat.loaders import DrawnLoaderSet, LoaderSet
from trainer.engine.optimizer_states import with_inner
from trainer.errors import ConfigurationError, join_first, warn
from trainer.module_tree import parameters_of
from trainer.state.metric_objects import metric_objects_in, saved_attributes
from trainer.state.program import ProgramState, package_of

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_BASES = {*LightningModule.__mro__, *LightningDataModule.__mro__}
_FRAMEWORKS = sys.stdlib_module_names | {"lightning", "pytorch_lightning", "torch", "trainer"}
_OF_MODULES = frozenset(vars(LightningModule()))
"""Attributes of a module that Lightning and torch set."""
_OF_OPTIMIZERS = frozenset(vars(SGD([Tensor()])))
"""Attributes of an optimizer that torch sets."""
_OF_METRICS = _OF_MODULES | vars(SumMetric()).keys()
"""Attributes of a metric object that torchmetrics and torch set."""

call_setup_hooks = _call_setup_hook
configure_model = _call_configure_model
call_teardown_hooks = _call_teardown_hook


def attach(trainer: Trainer, model: Any) -> LightningModule:
    """Make ``model`` the Trainer's module, or keep that of an earlier run if it is None. Return the module.

    Args:
        trainer: the Trainer.
        model: a LightningModule, or the result of ``torch.compile`` for one. A fit does not accept None.

    Raises:
        ConfigurationError: if it is a module of another package.
        TypeError: if it is not a LightningModule, or is None without an earlier run.
    """
    refuse_other_package("model", getattr(model, "_orig_mod", model))
    fitting = trainer.state.fn is TrainerFn.FITTING
    if model is None and not fitting and trainer.lightning_module is None:
        raise TypeError(
            f"`Trainer.{trainer.state.fn.value}()` requires a `LightningModule` when it hasn't been passed in a"
            " previous run"
        )
    module = trainer.lightning_module if model is None and not fitting else _maybe_unwrap_optimized(model)
    trainer.strategy._lightning_module = module
    module.trainer = trainer
    return module


def verify(trainer: Trainer, module: LightningModule) -> None:
    """Check that the module and the Trainer's settings are compatible, before the setup."""
    _verify_strategy_supports_compile(module, trainer.strategy)
    if trainer.state.fn is TrainerFn.FITTING and not module.automatic_optimization:
        _refuse_automatic_parts(trainer)
    _verify_loop_configurations(trainer)


def _refuse_automatic_parts(trainer: Trainer) -> None:
    """Refuse clipping and accumulation by the Trainer in manual optimization, where the module does them."""
    clips = callback_order.find_callback(trainer.callbacks, GradientClipping) is not None
    own = callback_order.find_callback(trainer.callbacks, GradientAccumulation)  # Lightning's refuses it itself
    accumulates = max([trainer.accumulate_grad_batches] if own is None else own.schedule.values()) > 1
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


def warn_of_eval_mode(trainer: Trainer) -> None:
    """Warn if parts of the module are in eval mode when training begins."""
    trainer.fit_loop._warn_if_modules_in_eval_mode()


def warn_of_gradient_hooks(trainer: Trainer) -> None:
    """Warn of hooks on the gradients of parameters if losses are scaled: autograd calls them inside backward passes."""
    scales = trainer.scaler.is_enabled() and any(map(parameters_of, trainer.optimizers))
    if not (scales and trainer.engine.exposes_gradients):
        return
    named = trainer.lightning_module.named_parameters()
    if hooked := [name for name, p in named if p._backward_hooks or p._post_accumulate_grad_hooks]:
        warn(
            f"Got hooks on the gradients of {join_first(hooked, 3)} with precision={trainer.precision!r}. Autograd"
            " calls them inside the backward pass, when gradients are multiplied by the loss scale. Hooks that multiply"
            " gradients, such as masks, work. Hooks that clip or log gradients or step an optimizer do not: use"
            " gradient_clip_val or on_after_backward instead, or precision='bf16-mixed'."
        )


def set_up_profiler(trainer: Trainer, module: LightningModule) -> None:
    """Set the module and the folder of the profiler."""
    profiler: Any = trainer.profiler
    profiler._lightning_module = module
    rank = trainer.local_rank if trainer.world_size > 1 else None
    profiler.setup(stage=trainer.state.fn, local_rank=rank, log_dir=trainer.log_dir)


def program_state(trainer: Trainer) -> ProgramState:
    """Return the state of the user's objects that changes from now on."""
    modules = (trainer.lightning_module, trainer.datamodule)
    packages = {package_of(base) for module in modules for base in type(module).__mro__} - _FRAMEWORKS
    packages.add("torchmetrics")
    metrics = set(map(id, metric_objects_in(trainer.lightning_module)))

    def ignored(value: Any) -> Set[str]:
        if id(value) in metrics:  # their states are saved by `MetricObjects`
            return _OF_METRICS | saved_attributes(value)
        if isinstance(value, Callback):
            kind: type = type(value)
            return _assigned_by_bases(kind)
        if isinstance(value, Optimizer):
            return _OF_OPTIMIZERS
        return _OF_MODULES if isinstance(value, nn.Module) else frozenset()

    roots = (*modules, trainer.callbacks, trainer.optimizers)
    saved = (*with_inner(trainer.optimizers), *(config.scheduler for config in trainer.lr_scheduler_configs))
    return ProgramState(
        roots,
        is_base=_is_base,
        ignored=ignored,
        packages=frozenset(packages),
        saved=saved,
        of_modules=_OF_MODULES,
    )


def _is_base(kind: type) -> bool:
    is_torchs = kind.__module__.startswith("torch.nn.") and issubclass(kind, nn.Module)
    return is_torchs or kind in _BASES or issubclass(kind, (Callback, Optimizer))


@cache
def _assigned_by_bases(kind: type) -> Set[str]:
    """Return the attributes of a callback that methods of its bases in Lightning and in this package assign."""
    bases = [base for base in kind.__mro__ if package_of(base) in ("lightning", "pytorch_lightning", "trainer")]
    methods = [getattr(value, "fset", value) for base in bases for value in vars(base).values()]
    steps = [step for method in methods if isinstance(method, FunctionType) for step in get_instructions(method)]
    return frozenset(step.argval for step in steps if step.opname == "STORE_ATTR")
