"""Modules: what may be passed as one, what it must have to be run, and its bookkeeping around a run."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.utilities import _verify_dataloader_idx_requirement
from lightning.pytorch.trainer.configuration_validator import _verify_loop_configurations
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.compile import _maybe_unwrap_optimized, _verify_strategy_supports_compile
from lightning.pytorch.utilities.model_helpers import is_overridden

from trainer.arguments import refuse_other_package
from trainer.compat.loaders import DrawnLoaderSet
from trainer.data.batches import Loaders
from trainer.precision.base import Precision


def as_module(model: Any) -> LightningModule:
    """``model``, or the LightningModule inside what ``torch.compile`` returned.

    Raises:
        ConfigurationError: it is a module of another package.
        TypeError: it is neither.
    """
    refuse_other_package("model", getattr(model, "_orig_mod", model))
    return _maybe_unwrap_optimized(model)


def verify(trainer: Any, module: LightningModule) -> None:
    """Check that the module and the Trainer's settings go together, before anything is set up."""
    _verify_strategy_supports_compile(module, trainer.strategy)
    _verify_loop_configurations(trainer)


def verify_dataloader_idx(module: LightningModule, name: str, stage: RunningStage, loaders: Loaders) -> None:
    """Check that the module's evaluation methods take ``dataloader_idx`` where, and only where, there are several.

    Args:
        module: whose methods.
        name: ``"validation"``, ``"test"`` or ``"predict"``.
        stage: the stage they belong to, for the message.
        loaders: the data of that stage.

    Raises:
        RuntimeError: one does not.
    """
    several = loaders.is_sequential and len(loaders.limits) > 1
    step, hooks = (f"{name}_step",), (f"on_{name}_batch_start", f"on_{name}_batch_end")
    draws = isinstance(loaders, DrawnLoaderSet)  # what a step draws says itself where it comes from
    _verify_dataloader_idx_requirement(step, several and not draws, stage, module)
    _verify_dataloader_idx_requirement(hooks, several, stage, module)


def warn_of_eval_mode(module: LightningModule) -> None:
    """Training begins, and parts of the module are in eval mode: frozen ones, or forgotten ones."""
    evaluating = sum(not part.training for part in module.modules())
    if evaluating:
        rank_zero_warn(
            f"Found {evaluating} module(s) in eval mode at the start of training. This may lead to unexpected behavior"
            " during training. If this is intentional, you can ignore this warning.",
            category=PossibleUserWarning,
        )


def announce_device(trainer: Any, module: LightningModule) -> None:
    """Let ``module.device`` tell where the module will be; it is moved there after the ``setup`` hooks."""
    for part in module.modules():
        if isinstance(part, _DeviceDtypeModuleMixin):
            part._device = trainer.strategy.root_device


def set_up_profiler(trainer: Any, module: LightningModule) -> None:
    """Tell the profiler whose run it watches."""
    trainer.profiler._lightning_module = module
    rank = trainer.local_rank if trainer.world_size > 1 else None
    trainer.profiler.setup(stage=trainer.state.fn, local_rank=rank, log_dir=trainer.log_dir)


def configure_model(trainer: Any, module: LightningModule, precision: Precision) -> None:
    """Run ``module.configure_model()``, whose parameters are made on the device and in the precision's dtype."""
    if not is_overridden("configure_model", module):
        return
    with ExitStack() as stack:
        stack.enter_context(trainer.strategy.tensor_init_context())
        stack.enter_context(trainer.strategy.model_sharded_context())
        module._current_fx_name = "configure_model"
        module.configure_model()
    module._current_fx_name = None


def forget_run(module: LightningModule) -> None:
    """Forget what belonged to the run that has ended."""
    module._current_fx_name = None
    module._metric_attributes = None
