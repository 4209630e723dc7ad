"""What ``FSDP2Strategy`` may be given, and what it means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from trainer.engine.sharding.wrap import Sharding
from trainer.errors import ConfigurationError, did_you_mean

IS_SUPPORTED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether this torch can keep a process in step that has no batch: from 2.13 on."""
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
_POLICY = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")


def check_sharding(
    *,
    blocks: Any,
    reshard_after_forward: Any,
    mixed_precision: Any,
    cpu_offload: Any,
    replicas: Any,
    sync_each_batch: Any,
    timeout: Any,
) -> Sharding:
    """The settings, checked. The arguments are those of ``FSDP2Strategy``.

    Raises:
        ConfigurationError: one that it does not take.
    """
    if isinstance(blocks, (type, str)):
        blocks = (blocks,)
    elif isinstance(blocks, Iterable):
        blocks = tuple(blocks)
    classes = blocks if isinstance(blocks, tuple) else ()
    is_known = blocks is None or isinstance(blocks, tuple) or callable(blocks)
    if not is_known or not all(
        isinstance(one, str) or (isinstance(one, type) and issubclass(one, nn.Module)) for one in classes
    ):
        expected = "classes of modules or their names, a function of (module, mesh), or None for the members of lists"
        _refuse("blocks", blocks, expected)
    number = isinstance(reshard_after_forward, int)
    if reshard_after_forward is not None and (not number or reshard_after_forward < 0):
        _refuse("reshard_after_forward", reshard_after_forward, "True, False, None, or a number of processes")
    for name, switch in (("cpu_offload", cpu_offload), ("sync_each_batch", sync_each_batch)):
        if not isinstance(switch, bool):
            _refuse(name, switch, "True or False")
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
        _refuse("replicas", replicas, "a whole number of at least 1")
    is_time = timeout is None or isinstance(timeout, (timedelta, int, float))
    if not is_time or (isinstance(timeout, (int, float)) and not timeout > 0):
        _refuse("timeout", timeout, "a timedelta, or seconds")
    return Sharding(blocks, reshard_after_forward, _policy(mixed_precision), cpu_offload, sync_each_batch)


def _policy(given: Any) -> MixedPrecisionPolicy:
    if given is None:
        return MixedPrecisionPolicy()
    if isinstance(given, MixedPrecisionPolicy):
        return given
    if not isinstance(given, Mapping):
        _refuse("mixed_precision", given, "a torch.distributed.fsdp.MixedPrecisionPolicy, its arguments, or None")
    if unknown := [name for name in given if name not in _POLICY]:
        hint = did_you_mean(str(unknown[0]), _POLICY)
        _refuse("mixed_precision", dict(given), f"the arguments {', '.join(_POLICY)}.{hint}")
    return MixedPrecisionPolicy(**{name: _dtype(name, value) for name, value in given.items()})


def _dtype(name: str, value: Any) -> Any:
    if name == "cast_forward_inputs" and isinstance(value, bool):
        return value
    if name != "cast_forward_inputs" and (value is None or isinstance(value, torch.dtype)):
        return value
    if name != "cast_forward_inputs" and value in _DTYPES:
        return _DTYPES[value]
    expected = "True or False" if name == "cast_forward_inputs" else ", ".join(_DTYPES)
    return _refuse(f"mixed_precision.{name}", value, expected)


def _refuse(name: str, value: Any, expected: str) -> Any:
    raise ConfigurationError(f"Got FSDP2Strategy({name}={value!r}), expected {expected.removesuffix('.')}.")
