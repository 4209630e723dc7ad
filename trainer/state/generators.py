"""Random generators that dataloaders carry with them: the loader's, its samplers', its dataset's."""

from __future__ import annotations

import random
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState

_LOOKED_AT = 1000
"""Objects that are looked at, at most: a generator that somebody means to be found is not far away."""
_LONG = 64
"""Containers with more items than this hold data."""
_NO_HOME = (str, bytes, int, float, type, ModuleType, torch.Tensor, np.ndarray)
_GLOBAL = (torch.default_generator, vars(np.random)["get_state"].__self__, vars(random)["getstate"].__self__)
"""Everybody's, which ``trainer.state.random_states`` looks after."""


def find(*roots: Any, except_in: Any = None) -> list[Generator]:
    """The generators that are reached from ``roots`` by attributes and short containers, each once.

    Args:
        roots: where to look; their order, and that of their attributes, is the order of what is found.
        except_in: an object not to look into.
    """
    found: list[Generator] = []
    queue, seen = list(roots), {id(except_in), *map(id, _GLOBAL)}
    while queue and len(seen) < _LOOKED_AT:
        thing = queue.pop(0)
        if id(thing) in seen or thing is None or isinstance(thing, _NO_HOME):
            continue
        seen.add(id(thing))
        if isinstance(thing, Generator):
            found.append(thing)
        elif isinstance(thing, (list, tuple)):
            queue.extend(thing if len(thing) <= _LONG else ())
        elif isinstance(thing, dict):
            queue.extend(thing.values() if len(thing) <= _LONG else ())
        elif isinstance(thing, MethodType):
            queue.append(thing.__self__)
        elif isinstance(thing, partial):
            queue += [thing.func, thing.args, thing.keywords]
        elif not isinstance(thing, FunctionType):
            queue.extend(_attributes_of(thing))
    return found


def _attributes_of(thing: Any) -> list[Any]:
    try:
        attributes = object.__getattribute__(thing, "__dict__")  # not what a proxy does for it
    except AttributeError:
        return []
    return list(attributes.values()) if isinstance(attributes, dict) else []


def state_of(generator: Generator) -> Any:
    """The state of ``generator``, in tensors and plain containers."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return [version, list(numbers), gauss]
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.bit_generator.state)


def set_state(generator: Generator, state: Any) -> None:
    """Put ``generator`` into a state that :func:`state_of` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_arrays(state))
    else:
        generator.bit_generator.state = _arrays(state)


def states_of(generators: list[Generator]) -> list[Any]:
    """The state of each."""
    return [state_of(generator) for generator in generators]


def set_states(generators: list[Generator], states: list[Any]) -> None:
    """Put each into its state; none of them where their number is another one."""
    if len(generators) == len(states):
        for generator, state in zip(generators, states, strict=True):
            set_state(generator, state)


def is_same(a: Any, b: Any) -> bool:
    """Whether two states, or two lists of them, are the same."""
    if isinstance(a, torch.Tensor):
        return bool(torch.equal(a, b))
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return all(is_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return state.tolist()
    return state.item() if isinstance(state, np.generic) else state


def _arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _arrays(value) for key, value in state.items()}
    return np.array(state, dtype=np.uint64) if isinstance(state, list) else state
