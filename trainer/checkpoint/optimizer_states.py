"""Load optimizer states with the dtypes that they were saved with.

``torch.optim.Optimizer.load_state_dict`` casts every tensor except ``step`` to the dtype of its parameter, so float32
master weights of bfloat16 parameters become bfloat16, and 8-bit states become floating point. It also corrupts
strings, which it copies like lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.common.module_tree import parameters_of
from trainer.common.parts import spread

SavedDtypes = Mapping[Tensor, torch.dtype]
"""Dtype of each parameter when the checkpoint was saved."""


def dtype_to_load(value: Tensor, saved: torch.dtype | None, current: torch.dtype) -> torch.dtype:
    """Return the dtype of a state after loading.

    The state is cast only if its parameter's dtype has changed and the state had the parameter's dtype.

    Args:
        value: the state in the checkpoint.
        saved: the parameter's dtype when the checkpoint was saved, or None if it is not known.
        current: the parameter's dtype in this run.
    """
    return current if value.dtype == saved and current.is_floating_point else value.dtype


@contextmanager
def keep_dtypes(optimizers: Iterable[Any], states: Iterable[Any], saved: SavedDtypes) -> Iterator[None]:
    """Restore the saved dtypes of all states that are loaded in the ``with`` block.

    Includes optimizers inside of optimizers, such as the one that Lookahead wraps.

    Args:
        optimizers: the optimizers that the block loads.
        states: the state dict of each optimizer. Used only for an optimizer whose ``load_state_dict`` does not call
            ``torch.optim.Optimizer.load_state_dict``.
        saved: the saved dtypes of the parameters.
    """
    optimizers, given = list(optimizers), dict[Any, Any]()
    with ExitStack() as hooks:

        def restore(optimizer: Optimizer) -> None:
            _restore(optimizer, given[optimizer], saved)

        for optimizer in dict.fromkeys(with_inner(optimizers)):
            with suppress(AttributeError):  # its __init__ did not call torch's
                hooks.callback(optimizer.register_load_state_dict_pre_hook(given.__setitem__).remove)
                hooks.callback(optimizer.register_load_state_dict_post_hook(restore, prepend=True).remove)
        yield
    for optimizer, state in zip(optimizers, states, strict=False):
        if optimizer not in given and isinstance(optimizer, Optimizer):
            _restore(optimizer, state, saved)


def with_inner(optimizers: Iterable[Any], depth: int = 2) -> Iterator[Optimizer]:
    """Yield the optimizers, and those in their attributes."""
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            continue
        yield optimizer
        if depth:
            attributes = list(vars(optimizer).values())
            listed = (item for value in attributes if isinstance(value, (list, tuple)) for item in value)
            yield from with_inner([*attributes, *listed], depth - 1)


def unsaved_inner(optimizer: Any) -> list[Optimizer]:
    """Return the inner optimizers, such as the base optimizer of SAM, that the state dict of ``optimizer`` lacks."""
    if not isinstance(optimizer, Optimizer) or type(optimizer).state_dict is not Optimizer.state_dict:
        return []
    inner = dict.fromkeys(with_inner([optimizer]))
    return [base for base in inner if base is not optimizer and base.state is not optimizer.state]


@contextmanager
def keep_sharing(optimizer: Any) -> Iterator[None]:
    """After the ``with`` block, which loads ``optimizer``, share its new groups and states with inner optimizers again.

    Only what they shared before the block is shared again.
    """
    inner = [base for base in with_inner([optimizer]) if base is not optimizer]
    groups = [base for base in inner if list(map(id, base.param_groups)) == list(map(id, optimizer.param_groups))]
    states = [base for base in inner if base.state is optimizer.state]
    yield
    for base in groups:
        base.param_groups = optimizer.param_groups
    for base in states:
        base.state = optimizer.state


def _restore(optimizer: Optimizer, state: Mapping[str, Any], saved: SavedDtypes) -> None:
    parameters = parameters_of(optimizer)
    numbers = [number for group in state.get("param_groups", ()) for number in group["params"]]
    values = state.get("state", {})
    for number, parameter in zip(numbers, parameters, strict=False):
        if number in values and parameter in optimizer.state:
            load = partial(_loaded, dtypes=(saved.get(parameter), parameter.dtype))
            optimizer.state[parameter] = load(optimizer.state[parameter], values[number])


def _loaded(current: Any, value: Any, key: Any = None, *, dtypes: tuple[torch.dtype | None, torch.dtype]) -> Any:
    """Return the state to use after loading: ``current`` if its dtype is right.

    A dict is changed in place; a list, tuple or deque with a changed item is replaced by a new one.

    Args:
        current: the state after ``load_state_dict``.
        value: the state in the checkpoint.
        key: the name of the state.
        dtypes: the dtype of its parameter when it was saved, and the current dtype of the parameter.
    """
    if isinstance(value, Tensor) and isinstance(current, Tensor):
        if key == "step" and value.is_floating_point() and current.dtype is torch.float32:
            return current  # a fused step needs float32, regardless of the dtype in the file
        dtype = dtype_to_load(value, *dtypes)
        return current if current.dtype is dtype else spread(value, current).to(current.device, dtype)
    if isinstance(value, dict) and isinstance(current, dict):
        current.update(
            {name: _loaded(current[name], value[name], name, dtypes=dtypes) for name in current.keys() & value.keys()}
        )
    elif type(value) is type(current) and isinstance(value, (list, tuple, deque)) and len(value) == len(current):
        items = [_loaded(*pair, dtypes=dtypes) for pair in zip(current, value, strict=True)]
        return current if all(a is b for a, b in zip(items, current, strict=True)) else type(current)(items)
    return value if isinstance(value, (str, set, frozenset)) else current
