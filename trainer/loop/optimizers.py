"""Create optimizers and schedules from the result of ``configure_optimizers``, and call ``optimizer_step``.

This follows ``Strategy.setup_optimizers``, with two differences. Automatic optimization supports several optimizers,
which all step on the gradients of one loss (for example one for matrices and one for other parameters). And the
interval of a schedule may be ``"batch"``, which counts batches, while ``"step"`` counts weight updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core import optimizer as parsing
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.common.module_tree import parameters_of
from trainer.errors import ConfigurationError, UnsupportedError, rank_zero_warn
from trainer.loop.closures import needs_closure
from trainer.loop.engine_protocol import Engine
from trainer.loop.overrides import overrides
from trainer.loop.run_state import state_of
from trainer.loop.schedule_free import schedule_free


class MultipleOptimizersError(ConfigurationError, RuntimeError):
    """Raised for several optimizers that cannot share one loss.

    It is also a RuntimeError, like Lightning's error for several optimizers.
    """


def set_up_optimizers(strategy: Strategy, engine: Engine, trainer: pl.Trainer) -> None:
    """Create the optimizers and schedules of the strategy's module, and set them on the strategy.

    Raises:
        RuntimeError: if ``training_step`` takes an ``optimizer_idx``, as in Lightning 1.
        MisconfigurationException: if the returned combination is unknown to Lightning.
        ConfigurationError: if the returned list has no optimizer in automatic optimization (None is allowed), or a
            ``frequency`` is below 1.
        MultipleOptimizersError: if several optimizers in automatic optimization share a parameter, or evaluate the
            loss.
    """
    module = strategy.lightning_module
    assert module is not None
    returned = call._call_lightning_module_hook(trainer, "configure_optimizers", pl_module=module)
    if returned is None:
        rank_zero_warn("`LightningModule.configure_optimizers` returned `None`, this fit will run with no optimizer")
        returned = parsing._MockOptimizer()
    optimizers, schedules, monitor = parsing._configure_optimizers(returned)
    parsing._validate_multiple_optimizers_support(optimizers[:1], module)  # refuses `optimizer_idx`
    if module.automatic_optimization and not optimizers:
        raise ConfigurationError(
            f"Got {returned!r} from {type(module).__name__}.configure_optimizers, expected at least one optimizer."
            " Return None to run the training steps without any."
        )
    configs = (
        _configure_schedules(schedules, monitor)
        if module.automatic_optimization
        else parsing._configure_schedulers_manual_opt(schedules)
    )
    parsing._validate_optimizers_attached(optimizers, configs)
    parsing._validate_scheduler_api(configs, module)
    if module.automatic_optimization and len(optimizers) > 1:
        owns_step = overrides(module, "optimizer_step") or engine.override_of("optimizer_step") is not None
        _check_several(module, optimizers, owns_step)
    strategy.optimizers, strategy.lr_scheduler_configs = optimizers, configs
    engine.kinds = kinds_of(optimizers, configs)
    for optimizer in schedule_free(optimizers):
        _check_schedule_free(optimizer, engine, state_of(trainer).callbacks)


def kinds_of(optimizers: list[Optimizer], configs: list[Any]) -> dict[str, list[str]]:
    """Return the classes of the optimizers and of the schedules, which include those of the schedules inside them."""
    nested = [list(nested_schedules(config.scheduler)) or [config.scheduler] for config in configs]
    return {
        "optimizer": [type(optimizer).__name__ for optimizer in optimizers],
        "schedule": [" of ".join(type(schedule).__name__ for schedule in schedules) for schedules in nested],
    }


def nested_schedules(schedule: Any) -> Iterator[LRScheduler]:
    """Iterate over a schedule and those inside it, such as the parts of a ``SequentialLR``."""
    if isinstance(schedule, LRScheduler):
        yield schedule
        for value in vars(schedule).values():
            for item in value if isinstance(value, (list, tuple)) else (value,):
                yield from nested_schedules(item)


def with_closure(optimizer_step: Callable[..., Any]) -> Callable[[int, int, Any, Callable[[], Tensor | None]], None]:
    """Wrap ``LightningModule.optimizer_step`` so that its closure is Lightning's ``Closure``.

    ``Closure`` returns the loss without its graph. If ``optimizer_step`` does not call it, a MisconfigurationException
    is raised.
    """

    def step(epoch: int, batch_idx: int, optimizer: Any, evaluate: Callable[[], Tensor | None]) -> None:
        closure = Closure(lambda: ClosureResult(evaluate()))
        optimizer_step(epoch, batch_idx, optimizer, closure)
        closure.consume_result()

    return step


def _configure_schedules(schedules: list[Any], monitor: str | None) -> list[Any]:
    """Return Lightning's configs of the schedules. Its parsing rejects the interval ``"batch"``.

    Raises:
        ConfigurationError: if a ``frequency`` is not a whole number of at least 1, or a plateau schedule has the
            interval ``"batch"``.
    """
    by_batch = [isinstance(schedule, dict) and schedule.get("interval") == "batch" for schedule in schedules]
    known = [{**s, "interval": "step"} if special else s for s, special in zip(schedules, by_batch, strict=True)]
    configs = parsing._configure_schedulers_automatic_opt(known, monitor)
    for config, special in zip(configs, by_batch, strict=True):
        if special and config.reduce_on_plateau:
            raise ConfigurationError(
                f"Got 'interval': 'batch' for the schedule {type(config.scheduler).__name__}, expected 'step' or"
                " 'epoch': a plateau schedule reads its metric after an optimizer step or an epoch."
            )
        config.interval = "batch" if special else config.interval
        if not hasattr(config.frequency, "__index__") or config.frequency < 1:
            raise ConfigurationError(
                f"Got 'frequency': {config.frequency!r} for the schedule {type(config.scheduler).__name__}, expected"
                " a whole number of at least 1: the number of optimizer steps, epochs or batches between two scheduler"
                " steps. Default: 1."
            )
    return configs


def _check_several(module: LightningModule, optimizers: list[Optimizer], owns_step: bool) -> None:
    """Refuse several optimizers of one loss if they share parameters, or if a step evaluates the loss itself."""
    if owns_step or any(needs_closure(optimizer) for optimizer in optimizers):
        raise MultipleOptimizersError(
            "Training with multiple optimizers is only supported with manual optimization if a step evaluates the"
            f" loss. Got {len(optimizers)} optimizers, with an `optimizer_step` or an optimizer that evaluates the"
            " loss itself, expected one: each would run the batch again. Set `self.automatic_optimization = False`"
            " and step them in `training_step`."
        )
    owners: dict[int, int] = {}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for index, optimizer in enumerate(optimizers):
        for parameter in parameters_of(optimizer):
            if owners.setdefault(id(parameter), index) != index:
                raise MultipleOptimizersError(
                    "Training with multiple optimizers is only supported with manual optimization if they share"
                    f" parameters. Got {names.get(id(parameter), '?')!r} in optimizers {owners[id(parameter)]} and"
                    f" {index}, expected each parameter in one of them: its gradient would be unscaled and clipped"
                    " twice. Give it to one, or set `self.automatic_optimization = False`."
                )


def _check_schedule_free(optimizer: Any, engine: Engine, callbacks: Iterable[Any]) -> None:
    """Refuse a schedule-free optimizer if the engine or a callback cannot be used with it."""
    name = type(optimizer).__name__
    if engine.kind != "ddp":
        raise UnsupportedError(
            f"Got {name}, which has `train()` and `eval()`, with strategy={engine.kind!r}; expected strategy='ddp' or"
            " one device. Or use AdamW with a schedule."
        )
    if averages := [c for c in callbacks if isinstance(c, (WeightAveraging, StochasticWeightAveraging))]:
        raise ConfigurationError(
            f"Got {name} with {type(averages[0]).__name__}, and both average the weights. Remove the callback:"
            f" validation and checkpoints use the average of {name}."
        )


def returned_none(optimizers: Sequence[Optimizer]) -> bool:
    """Return whether ``configure_optimizers`` returned no optimizer, for which Lightning has a stand-in."""
    return all(isinstance(optimizer, parsing._MockOptimizer) for optimizer in optimizers)
