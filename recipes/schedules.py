"""Learning-rate schedules that depend on the number of optimizer steps of the run.

Every factory is called as ``factory(optimizer, total_steps)``, with the number of optimizer steps of the whole
run, and returns a scheduler to be stepped after each optimizer step. The ``lr`` of the optimizer, or of each
parameter group, is the peak: one override, ``optimizer.lr=0.05``, scales the whole schedule. In a config, choose a
factory with ``_partial_: true`` (see ``conf/scheduler``).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

from recipes.optimizers import MuonWithAdamW


def with_schedule(
    optimizer: Optimizer | MuonWithAdamW,
    make_scheduler: Callable[[Optimizer, int], LRScheduler] | None,
    module: LightningModule,
) -> OptimizerLRScheduler:
    """Return the value for ``configure_optimizers``: the optimizer, and a schedule that is stepped after each step.

    Args:
        optimizer: the optimizer; for `MuonWithAdamW`, the value has two, each with the schedule.
        make_scheduler: one of the factories of this module, with its options bound; None: a constant learning rate.
        module: the module with this optimizer; its trainer computes the number of optimizer steps of the run.

    Raises:
        ValueError: there is a schedule, and the run has no end.
    """
    if isinstance(optimizer, MuonWithAdamW):
        return [with_schedule(each, make_scheduler, module) for each in optimizer.optimizers(module)]
    if make_scheduler is None:
        return optimizer
    total_steps = module.trainer.estimated_stepping_batches
    if total_steps == float("inf"):
        raise ValueError(
            "The learning-rate schedule spans the whole run, but this run has no end. "
            "Set trainer.max_epochs or trainer.max_steps, or scheduler=none."
        )
    scheduler = make_scheduler(optimizer, int(total_steps))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def onecycle(
    optimizer: Optimizer,
    total_steps: int,
    *,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    cycle_momentum: bool = False,
) -> LRScheduler:
    """Return a schedule that rises from ``lr / div_factor`` to ``lr``, then falls far below the initial learning rate.

    It is torch's `OneCycleLR` with the optimizer's ``lr`` as ``max_lr``. Both parts are half cosines.

    Args:
        optimizer: its ``lr`` is the peak.
        total_steps: optimizer steps of the whole run, at least 1.
        pct_start: fraction of the steps with a rising learning rate, in [0, 1).
        div_factor: peak learning rate divided by the first one.
        final_div_factor: first learning rate divided by the last one.
        cycle_momentum: whether the momentum (or Adam's beta1) falls from 0.95 to 0.85 while the learning rate rises,
            and rises while the learning rate falls. Default: False, which keeps the optimizer's momentum.

    Raises:
        ValueError: ``total_steps`` or ``pct_start`` is out of range.
    """
    _check_steps(total_steps)
    _check_fraction("pct_start", pct_start)
    if pct_start * total_steps == 1.0:
        # The rise would have zero steps, and OneCycleLR divides by this number. A slightly larger fraction avoids this.
        pct_start *= 1.0 + 1e-6
    return OneCycleLR(
        optimizer,
        max_lr=[group["lr"] for group in optimizer.param_groups],
        total_steps=total_steps,
        pct_start=pct_start,
        div_factor=div_factor,
        final_div_factor=final_div_factor,
        cycle_momentum=cycle_momentum,
    )


def cosine(optimizer: Optimizer, total_steps: int, *, eta_min: float = 0.0) -> LRScheduler:
    """Return a schedule that falls from ``lr`` along half a cosine, and reaches ``eta_min`` after the last step.

    Args:
        optimizer: its ``lr`` is the peak and the start.
        total_steps: optimizer steps of the whole run, at least 1.
        eta_min: learning rate at the end.

    Raises:
        ValueError: ``total_steps`` is below 1.
    """
    _check_steps(total_steps)
    return CosineAnnealingLR(optimizer, T_max=total_steps, eta_min=eta_min)


def warmup_cosine(
    optimizer: Optimizer, total_steps: int, *, warmup: float = 0.05, final_factor: float = 0.0
) -> LRScheduler:
    """Return a schedule that rises linearly to ``lr``, then falls to ``final_factor * lr`` along half a cosine.

    Args:
        optimizer: its ``lr`` is the peak.
        total_steps: optimizer steps of the whole run, at least 1.
        warmup: fraction of the steps with a rising learning rate, in [0, 1).
        final_factor: learning rate after the last step divided by the peak.

    Raises:
        ValueError: ``total_steps`` or ``warmup`` is out of range.
    """
    _check_steps(total_steps)
    _check_fraction("warmup", warmup)
    return LambdaLR(optimizer, WarmupCosine(int(warmup * total_steps), total_steps, final_factor))


@dataclass
class WarmupCosine:
    """The factor of `warmup_cosine`: an object, not a closure, so that schedulers can be pickled."""

    warmup_steps: int
    total_steps: int
    final_factor: float = 0.0

    def __call__(self, step: int) -> float:
        """Return the factor after ``step`` steps: 1 at ``warmup_steps``, ``final_factor`` from ``total_steps`` on."""
        if step < self.warmup_steps:
            # step + 1, so that the learning rate of the first step is not 0.
            return (step + 1) / (self.warmup_steps + 1)
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.final_factor + (1.0 - self.final_factor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _check_steps(total_steps: int) -> None:
    if total_steps < 1:
        raise ValueError(f"total_steps is {total_steps}, expected at least 1: the run has no optimizer step.")


def _check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} is {value}, expected a fraction of the steps in [0, 1), such as 0.3.")
