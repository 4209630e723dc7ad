"""Random generators that an object may hold: read, restore and create them from plain data."""

from __future__ import annotations

import random
from array import array
from typing import Any, get_args

import numpy as np
import torch

RandomGenerator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
KINDS = get_args(RandomGenerator)
OF_PROCESS: tuple[RandomGenerator, ...] = vars(random)["getstate"].__self__, vars(np.random)["get_state"].__self__
"""The generators of ``random.random`` and ``np.random.rand``."""


def is_random(value: Any) -> bool:
    """Return whether a value is a random generator that has a state; ``random.SystemRandom`` has none."""
    return isinstance(value, KINDS) and not isinstance(value, random.SystemRandom)


def state_of(generator: RandomGenerator) -> Any:
    """Return the state of a generator: numbers, bytes, lists and dicts."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return [version, array("I", numbers).tobytes(), gauss]
    if isinstance(generator, np.random.RandomState):
        return _with_bytes(generator.get_state(legacy=False))
    return _with_bytes(generator.bit_generator.state)


def set_state(generator: RandomGenerator, state: Any) -> None:
    """Restore a state that :func:`state_of` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        version, numbers, gauss = state
        generator.setstate((version, tuple(array("I", numbers)), gauss))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_with_arrays(state))
    else:
        generator.bit_generator.state = _with_arrays(state)


def can_create(generator: Any) -> bool:
    """Return whether :func:`create` returns a generator of the same class and device."""
    return type(generator) in KINDS and getattr(generator, "device", torch.device("cpu")).type == "cpu"


def create(state: Any) -> RandomGenerator:
    """Return a new generator with a state that :func:`state_of` returned."""
    generator: RandomGenerator
    if isinstance(state, bytes):
        generator = torch.Generator()
    elif isinstance(state, list):
        generator = random.Random()
    else:
        bits = getattr(np.random, state["bit_generator"])()
        generator = np.random.RandomState(bits) if "has_gauss" in state else np.random.Generator(bits)
    set_state(generator, state)
    return generator


def _with_bytes(state: Any) -> Any:
    """Return a NumPy state with bytes instead of arrays."""
    if isinstance(state, dict):
        return {key: _with_bytes(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return state.tobytes()
    return state.item() if isinstance(state, np.generic) else state


def _with_arrays(state: dict[str, Any]) -> dict[str, Any]:
    """Invert :func:`_with_bytes`."""
    dtype = np.uint32 if state["bit_generator"] == "MT19937" else np.uint64

    def array_of(value: Any) -> Any:
        return np.frombuffer(value, dtype=dtype) if isinstance(value, bytes) else value

    numbers = {key: array_of(value) for key, value in state["state"].items()}
    return {**{key: array_of(value) for key, value in state.items()}, "state": numbers}
