"""Read the states of Mersenne Twisters directly from the memory of their objects.

Python and NumPy return the 624 words of a state one by one, which takes 11 microseconds in Python and 24 in NumPy. A
worker process reads the words after each batch. Reading them as bytes takes less than one microsecond. The offset of
the words in an object is determined once, from an object with a known state. If it is not found, for example outside of
CPython, the generator's own method is used.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

_WORDS = 4 * 624  # bytes
_POSITION = struct.Struct("i")
_GAUSS = struct.Struct("i4xd")
"""NumPy draws normal numbers in pairs. The layout of the leftover number: whether there is one, and its value."""


def reader_of(generator: random.Random | np.random.RandomState) -> Callable[[], Any] | None:
    """Return a function that reads the state of a generator for :func:`decoded`, or None if that is not possible.

    It reads the type of the generator, its words and position, and the leftover normal number.
    """
    if type(generator) is random.Random and _PYTHON is not None:
        return _python_reader(generator, _PYTHON)
    if type(generator) is np.random.RandomState and type(_bits_of(generator)) is np.random.MT19937:
        return None if _NUMPY is None else _numpy_reader(generator, _NUMPY)
    return None


def decoded(state: Any) -> Any:
    """Return the result of ``getstate()`` or ``get_state(legacy=False)``, with bytes instead of the words."""
    if not isinstance(state, tuple):
        return state  # from the generator's own method
    kind, memory, gauss = state
    if kind == "python":
        return [random.Random.VERSION, memory[_POSITION.size :] + memory[: _POSITION.size], gauss]
    (position,), (has_gauss, gauss) = _POSITION.unpack_from(memory, _WORDS), _GAUSS.unpack(gauss)
    numbers = {"key": memory[:_WORDS], "pos": position}
    return {"bit_generator": "MT19937", "state": numbers, "has_gauss": has_gauss, "gauss": gauss}


def _python_reader(generator: Any, at: int) -> Callable[[], Any]:
    memory = _memory(id(generator) + at, _POSITION.size + _WORDS)
    return lambda: ("python", memory.raw, generator.gauss_next)


def _numpy_reader(generator: Any, at: int) -> Callable[[], Any]:
    bits = _bits_of(generator)
    lock, memory = bits.lock, _memory(bits.ctypes.state_address, _WORDS + _POSITION.size)
    gauss = _memory(id(generator) + at, _GAUSS.size)

    def read() -> Any:
        if _bits_of(generator) is not bits:  # np.random.set_bit_generator
            return numpy_as_bytes(generator.get_state(legacy=False))
        with lock:
            return "numpy", memory.raw, gauss.raw

    return read


def numpy_as_bytes(state: Any) -> Any:
    """Return a NumPy state with bytes instead of arrays."""
    if isinstance(state, dict):
        return {key: numpy_as_bytes(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return state.tobytes()
    return state.item() if isinstance(state, np.generic) else state


def _bits_of(generator: Any) -> Any:
    return getattr(generator, "_bit_generator", None)


def _memory(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)


def _find_in_python() -> int | None:
    """Return the offset of the position in one of Python's generators. The words follow it."""
    probe = random.Random(1)
    probe.random()
    numbers = array("I", probe.getstate()[1]).tobytes()
    return _find(probe, numbers[_WORDS:] + numbers[:_WORDS])


def _find_in_numpy() -> int | None:
    """Return the offset of the leftover normal number in one of NumPy's legacy generators."""
    bits = np.random.MT19937(1)
    probe = np.random.RandomState(bits)
    probe.standard_normal()
    state: Any = probe.get_state(legacy=False)
    words = state["state"]["key"].tobytes() + _POSITION.pack(state["state"]["pos"])
    is_known = _memory(bits.ctypes.state_address, len(words)).raw == words
    return _find(probe, _GAUSS.pack(state["has_gauss"], state["gauss"])) if is_known else None


def _find(value: Any, memory: bytes) -> int | None:
    if sys.implementation.name != "cpython":
        return None  # an id is not an address
    at = _memory(id(value), type(value).__basicsize__).raw.find(memory)
    return at if at >= 0 else None


_PYTHON, _NUMPY = _find_in_python(), _find_in_numpy()
