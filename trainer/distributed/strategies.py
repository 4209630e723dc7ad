"""Choose the engine for ``Trainer(strategy=...)``, or refuse the strategy with advice."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy as LightningDeepSpeedStrategy
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

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
    engine_class: type[LightningEngine] = LightningEngine
    if isinstance(given, FSDP2Strategy):
        engine_class = ShardedEngine
    elif isinstance(given, LightningDeepSpeedStrategy):
        from trainer.distributed.deepspeed_engine import DeepSpeedEngine

        engine_class = DeepSpeedEngine
    return engine_class(trainer, precision, plugins, **options)


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
        raise UnsupportedError(
            f"Got strategy={type(strategy).__name__}(...), which is FSDP1, expected FSDP2: strategy='fsdp', or"
            " trainer.FSDP2Strategy(...) with `blocks` for the classes of auto_wrap_policy,"
            " `reshard_after_forward=False` for SHARD_GRAD_OP, `replicas` for HYBRID_SHARD, `cpu_offload`, and"
            " `mixed_precision`. Use strategy='ddp' for NO_SHARD, and the callback ActivationCheckpointing for"
            " activation_checkpointing_policy."
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


def _refuse_overrides(strategy: Any, base: type, replacement: str) -> None:
    """Refuse methods that would be lost, because only the settings of the strategy are used."""
    if names := overridden(strategy, base):
        raise UnsupportedError(
            f"Got {type(strategy).__name__} with its own `{names[0]}`, which is never called, because only the settings"
            f" of a {base.__name__} are used. Derive from {replacement} instead, or override a method of the"
            " LightningModule."
        )
