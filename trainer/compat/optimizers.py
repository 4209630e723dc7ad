"""From what ``configure_optimizers`` returns to optimizers and schedules.

As ``Strategy.setup_optimizers`` does it, but for one thing: several optimizers are welcome in automatic optimization.
Each of them steps on the gradients of the one loss (one optimizer for the matrices, say, and one for the rest).
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.core import optimizer as parsing
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer

from trainer.compat.callbacks import overrides
from trainer.errors import ConfigurationError
from trainer.optimization import needs_closure


def set_up_optimizers(strategy: Strategy, trainer: Any) -> None:
    """Make the optimizers and schedules of the strategy's module, and hand them to the strategy.

    Raises:
        RuntimeError: ``training_step`` takes an ``optimizer_idx``, as it did in Lightning 1.
        MisconfigurationException: what was returned is no combination that Lightning knows.
        ConfigurationError: several optimizers in automatic optimization that share a parameter, or evaluate the loss.
    """
    module = strategy.lightning_module
    assert module is not None
    _refuse_optimizer_idx(module)
    returned = call._call_lightning_module_hook(trainer, "configure_optimizers", pl_module=module)
    if returned is None:
        rank_zero_warn("`LightningModule.configure_optimizers` returned `None`, this fit will run with no optimizer")
        returned = parsing._MockOptimizer()
    optimizers, schedules, monitor = parsing._configure_optimizers(returned)
    configs = (
        parsing._configure_schedulers_automatic_opt(schedules, monitor)
        if module.automatic_optimization
        else parsing._configure_schedulers_manual_opt(schedules)
    )
    parsing._validate_optimizers_attached(optimizers, configs)
    parsing._validate_scheduler_api(configs, module)
    if module.automatic_optimization and len(optimizers) > 1:
        _check_several(module, optimizers)
    strategy.optimizers, strategy.lr_scheduler_configs = optimizers, configs


def _check_several(module: LightningModule, optimizers: list[Optimizer]) -> None:
    """Refuse what several optimizers of one loss cannot share: parameters, and an ``optimizer_step`` with a closure."""
    if overrides(module, "optimizer_step") or any(needs_closure(optimizer) for optimizer in optimizers):
        raise ConfigurationError(
            f"Got {len(optimizers)} optimizers in automatic optimization, with an `optimizer_step` or an optimizer that"
            " evaluates the loss itself, expected one: each would run the batch again. Set"
            " `self.automatic_optimization = False` and step them in `training_step`."
        )
    owners: dict[int, int] = {}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for index, optimizer in enumerate(optimizers):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if owners.setdefault(id(parameter), index) != index:
                raise ConfigurationError(
                    f"Got the parameter {names.get(id(parameter), '?')!r} in optimizers {owners[id(parameter)]} and"
                    f" {index}, expected each in one of them: its gradient would be unscaled and clipped twice. Give"
                    " it to one, or set `self.automatic_optimization = False`."
                )


def _refuse_optimizer_idx(module: LightningModule) -> None:
    if is_param_in_hook_signature(module.training_step, "optimizer_idx", explicit=True):
        raise RuntimeError(
            "Training with multiple optimizers is only supported with manual optimization. Remove the `optimizer_idx`"
            " argument from `training_step`, set `self.automatic_optimization = False` and access your optimizers"
            " in `training_step` with `opt1, opt2, ... = self.optimizers()`."
        )
