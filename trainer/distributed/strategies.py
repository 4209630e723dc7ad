"""Choose the engine for ``Trainer(strategy=...)``, or refuse the strategy with advice."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy as LightningDeepSpeedStrategy
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import ShardingStrategy

from trainer.arguments import deepspeed_settings
from trainer.common.lightning_private import settings_of
from trainer.distributed.engine import LightningEngine
from trainer.distributed.fsdp import FSDP2Strategy, ParallelStrategy, ShardedEngine
from trainer.errors import UnsupportedError
from trainer.loop.overrides import overridden
from trainer.precision.base import Precision


def build_engine(trainer: pl.Trainer, precision: Precision, plugins: Any, **options: Any) -> LightningEngine:
    """Build the engine for ``options["strategy"]``; see :class:`LightningEngine`.

    Raises:
        UnsupportedError: if it is FSDP1 (the message contains the alternative), or DeepSpeed and that is not installed.
    """
    given = options["strategy"] = _replacement(options.get("strategy"))
    kind: type[LightningEngine] = LightningEngine
    if isinstance(given, FSDP2Strategy):
        kind = ShardedEngine
    elif isinstance(given, LightningDeepSpeedStrategy):
        from trainer.distributed.deepspeed_engine import DeepSpeedEngine

        kind = DeepSpeedEngine
    return kind(trainer, precision, plugins, **options)


def _replacement(strategy: Any) -> Any:
    """Return the strategy that replaces ``strategy``, or ``strategy`` itself."""
    if strategy == "fsdp":
        return FSDP2Strategy()
    if strategy == "fsdp_cpu_offload":
        return FSDP2Strategy(cpu_offload=True)
    settings = deepspeed_settings(strategy)
    if settings is not None or isinstance(strategy, LightningDeepSpeedStrategy):
        from trainer.distributed.deepspeed_engine import DeepSpeedStrategy

        if settings is not None:
            return DeepSpeedStrategy(**settings)
        if isinstance(strategy, DeepSpeedStrategy):
            return strategy
        _refuse_overrides(strategy, LightningDeepSpeedStrategy, "trainer.DeepSpeedStrategy")
        return DeepSpeedStrategy.of(strategy)
    if isinstance(strategy, FSDPStrategy):
        line = equivalent_strategy(strategy)
        imports = "; from trainer import FSDP2Strategy" if "FSDP2Strategy" in line else ""
        raise UnsupportedError(
            f"Got strategy={type(strategy).__name__}(...), which is FSDP1, expected FSDP2. With the same settings:"
            f" strategy={line}{imports}."
        )
    if isinstance(strategy, ModelParallelStrategy):
        _refuse_overrides(strategy, ModelParallelStrategy, "trainer.FSDP2Strategy")
        return ParallelStrategy(
            strategy._data_parallel_size,
            strategy._tensor_parallel_size,
            cluster_environment=strategy.cluster_environment,
            **settings_of(strategy),
        )
    return strategy


def _refuse_overrides(strategy: Any, kind: type, replacement: str) -> None:
    """Refuse methods that would be lost, because only the settings of the strategy are used."""
    if names := overridden(strategy, kind):
        raise UnsupportedError(
            f"Got {type(strategy).__name__} with its own `{names[0]}`, which is never called, because only the settings"
            f" of a {kind.__name__} are used. Derive from {replacement} instead, or override a method of the"
            " LightningModule."
        )


def equivalent_strategy(strategy: FSDPStrategy) -> str:
    """Return the line of code with the same settings for our strategy."""
    found: dict[str, str] = {}
    notes: list[str] = []
    if policy := strategy.kwargs.get("auto_wrap_policy"):
        classes = getattr(policy, "_module_classes", None)
        found["blocks"] = _names(classes) if classes else "[...]"
        if not classes:
            notes.append("blocks: the classes that its auto_wrap_policy chose")
    sharding = strategy.sharding_strategy
    if sharding is ShardingStrategy.NO_SHARD:
        return "'ddp'"
    if sharding in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2):
        found["reshard_after_forward"] = "False"
    if sharding in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        mesh = strategy.kwargs.get("device_mesh")
        shape = mesh if isinstance(mesh, tuple) else getattr(mesh, "shape", None)
        found["replicas"] = str(shape[0]) if shape else "..."
        if not shape:
            notes.append("replicas: the number of machines")
    if strategy.cpu_offload is not None and strategy.cpu_offload.offload_params:
        found["cpu_offload"] = "True"
    if (mixed := strategy.mixed_precision) is not None:
        names = {name: getattr(mixed, name, None) for name in ("param_dtype", "reduce_dtype")}
        dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in names.items() if dtype is not None}
        found["mixed_precision"] = repr(dtypes)
    if strategy._process_group_backend is not None:
        found["process_group_backend"] = repr(strategy._process_group_backend)
    if strategy._activation_checkpointing_kwargs:
        notes.append("its activation checkpointing: the callback trainer.callbacks.ActivationCheckpointing")
    line = f"FSDP2Strategy({', '.join(f'{name}={value}' for name, value in found.items())})"
    return f"{line} ({'; '.join(notes)})" if notes else line


def _names(classes: Any) -> str:
    return f"[{', '.join(sorted(one.__name__ for one in classes))}]"
