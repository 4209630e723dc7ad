"""Check the settings of ``FSDP2Strategy``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from trainer.distributed.sharding.wrap import Sharding
from trainer.errors import ConfigurationError, did_you_mean, expect, is_count

IS_SUPPORTED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether this torch supports uneven inputs with FSDP2: 2.13 and above."""
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
_POLICY = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")


def check_timeout(timeout: Any) -> timedelta | None:
    """Return the argument ``timeout`` of a strategy as a timedelta, or None.

    Raises:
        ConfigurationError: if it is not a timedelta, or a finite number of seconds above 0.
    """
    is_number = isinstance(timeout, (int, float)) and 0 < timeout < math.inf
    expect(is_number or timeout is None or isinstance(timeout, timedelta), "a timedelta, or seconds", timeout=timeout)
    return timedelta(seconds=timeout) if is_number else timeout


def check_sharding(
    blocks: Any, reshard_after_forward: Any, mixed_precision: Any, cpu_offload: Any, replicas: Any, sync_each_batch: Any
) -> Sharding:
    """Check the arguments of ``FSDP2Strategy``, and return them as settings.

    Raises:
        ConfigurationError: if an argument is not supported.
    """
    if isinstance(blocks, (type, str)):
        blocks = (blocks,)
    elif isinstance(blocks, Iterable):
        blocks = tuple(blocks)
    is_list = isinstance(blocks, tuple) and all(
        isinstance(block, str) or (isinstance(block, type) and issubclass(block, nn.Module)) for block in blocks
    )
    expected = (
        "classes of modules or their names, a function of (module, mesh), or None for the members of ModuleList and"
        " Sequential"
    )
    expect(is_list or blocks is None or callable(blocks), expected, blocks=blocks)
    is_size = isinstance(reshard_after_forward, int) and reshard_after_forward >= 0
    expected = "True, False, None, or a number of processes"
    expect(is_size or reshard_after_forward is None, expected, reshard_after_forward=reshard_after_forward)
    expect(isinstance(cpu_offload, bool), "True or False", cpu_offload=cpu_offload)
    expect(isinstance(sync_each_batch, bool), "True or False", sync_each_batch=sync_each_batch)
    expect(is_count(replicas), "a whole number of at least 1", replicas=replicas)
    return Sharding(blocks, reshard_after_forward, _policy(mixed_precision), cpu_offload, sync_each_batch)


def _policy(given: Any) -> MixedPrecisionPolicy:
    if given is None or isinstance(given, MixedPrecisionPolicy):
        return given or MixedPrecisionPolicy()
    expected = "a torch.distributed.fsdp.MixedPrecisionPolicy, its arguments, or None"
    expect(isinstance(given, Mapping), expected, mixed_precision=given)
    if unknown := [name for name in given if name not in _POLICY]:
        raise ConfigurationError(
            f"Got mixed_precision={dict(given)!r}, expected the arguments {', '.join(_POLICY)}."
            f"{did_you_mean(str(unknown[0]), _POLICY)}"
        )
    return MixedPrecisionPolicy(**{name: _policy_argument(name, value) for name, value in given.items()})


def _policy_argument(name: str, value: Any) -> Any:
    if name == "cast_forward_inputs":
        expect(isinstance(value, bool), "True or False", **{f"mixed_precision.{name}": value})
        return value
    is_known = value is None or isinstance(value, torch.dtype) or value in _DTYPES
    expect(is_known, ", ".join(_DTYPES), **{f"mixed_precision.{name}": value})
    return _DTYPES.get(value, value)
