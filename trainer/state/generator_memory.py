"""States of Mersenne Twisters, read from the memory of their objects.

Python and numpy hand out the 624 words of a state one by one: that takes 11 and 24 microseconds, and a worker process
looks at them after each batch. As bytes they take less than one. Where in an object they lie is looked up once, in one
whose state is known. Where they are not found, as outside of CPython, there is None, and the generator has to be asked.
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
"""Of numpy: whether half of a pair of normal numbers is left over, and that number."""


def reader_of(generator: random.Random | np.random.RandomState) -> Callable[[], Any] | None:
    """What reads the state of a generator, as :func:`decoded` understands it. None where it has to be asked.

    It reads what kind of generator it is, its words and position, and what is left over of normal numbers.
    """
    if type(generator) is random.Random and _PYTHON is not None:
        return _python_reader(generator, _PYTHON)
    if type(generator) is np.random.RandomState and type(_bits_of(generator)) is np.random.MT19937:
        return None if _NUMPY is None else _numpy_reader(generator, _NUMPY)
    return None


def decoded(state: Any) -> Any:
    """What ``getstate()`` or ``get_state(legacy=False)`` returns, with bytes in the place of the words."""
    if not isinstance(state, tuple):
        return state  # the generator has been asked
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
    """A state of numpy's with bytes in place of arrays."""
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
    """Where in one of Python's generators its position is, which the words follow."""
    probe = random.Random(1)
    probe.random()
    numbers = array("I", probe.getstate()[1]).tobytes()
    return _find(probe, numbers[_WORDS:] + numbers[:_WORDS])


def _find_in_numpy() -> int | None:
    """Where in one of numpy's legacy generators what is left of normal numbers is."""
    bits = np.random.MT19937(1)
    probe = np.random.RandomState(bits)
    probe.standard_normal()
    state: Any = probe.get_state(legacy=False)
    words = state["state"]["key"].tobytes() + _POSITION.pack(state["state"]["pos"])
    is_known = _memory(bits.ctypes.state_address, len(words)).raw == words
    return _find(probe, _GAUSS.pack(state["has_gauss"], state["gauss"])) if is_known else None


def _find(thing: Any, memory: bytes) -> int | None:
    if sys.implementation.name != "cpython":
        return None  # an id is no address
    at = _memory(id(thing), type(thing).__basicsize__).raw.find(memory)
    return at if at >= 0 else None


_PYTHON, _NUMPY = _find_in_python(), _find_in_numpy()
