"""States of Mersenne Twisters, read from the memory of their objects.

Python and numpy hand out the 624 words of a state one by one: that takes 11 and 24 microseconds, and a worker process
needs them for each batch. As bytes they take one, and a look whether they have changed takes less. Where in an object
they lie is looked up once, in one whose state is known. Where they are not found, as outside of CPython, there is None,
and the generator has to be asked.
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
_SEEN = ctypes.c_char * 64
"""The position and the words beside it. Each draw moves the position; when it comes round, all words are new."""
_GAUSS = struct.Struct("i4xd")
"""Of numpy: whether half of a pair of normal numbers is left over, and that number."""


def python_state(generator: random.Random) -> list[Any] | None:
    """What ``getstate()`` returns, with bytes in the place of the numbers."""
    if _PYTHON is None or type(generator) is not random.Random:
        return None
    memory = ctypes.string_at(id(generator) + _PYTHON, _POSITION.size + _WORDS)
    words = memory[_POSITION.size :] + memory[: _POSITION.size]
    return [generator.VERSION, words, generator.gauss_next]  # type: ignore[attr-defined]  # typeshed leaves it out


def numpy_state(generator: np.random.RandomState) -> dict[str, Any] | None:
    """What ``get_state(legacy=False)`` returns, with bytes in the place of the array."""
    bits = _bits_of(generator)
    if _NUMPY is None or type(generator) is not np.random.RandomState or type(bits) is not np.random.MT19937:
        return None
    memory = _words_of(bits)
    has_gauss, gauss = _GAUSS.unpack(ctypes.string_at(id(generator) + _NUMPY, _GAUSS.size))
    (position,) = _POSITION.unpack_from(memory, _WORDS)
    numbers = {"key": memory[:_WORDS], "pos": position}
    return {"bit_generator": "MT19937", "state": numbers, "has_gauss": has_gauss, "gauss": gauss}


def mark_of(generator: random.Random | np.random.RandomState) -> Callable[[], object] | None:
    """What returns something else after the generator has been drawn from, or was set to another state."""
    if isinstance(generator, random.Random):
        return None if _PYTHON is None or python_state(generator) is None else _python_mark(generator, _PYTHON)
    return None if _NUMPY is None or numpy_state(generator) is None else _numpy_mark(generator, _NUMPY)


def _python_mark(generator: Any, at: int) -> Callable[[], object]:
    words = _SEEN.from_address(id(generator) + at)
    return lambda: (words.raw, generator.gauss_next)


def _numpy_mark(generator: Any, at: int) -> Callable[[], object]:
    bits = _bits_of(generator)
    words = _SEEN.from_address(bits.ctypes.state_address + _WORDS + _POSITION.size - ctypes.sizeof(_SEEN))
    gauss = (ctypes.c_char * _GAUSS.size).from_address(id(generator) + at)
    # an object is like nothing else: with another source of bits, it has changed each time
    return lambda: (words.raw, gauss.raw) if _bits_of(generator) is bits else object()


def _bits_of(generator: Any) -> Any:
    return getattr(generator, "_bit_generator", None)


def _words_of(bits: np.random.MT19937) -> bytes:
    with bits.lock:
        return ctypes.string_at(bits.ctypes.state_address, _WORDS + _POSITION.size)


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
    return _find(probe, _GAUSS.pack(state["has_gauss"], state["gauss"])) if _words_of(bits) == words else None


def _find(thing: Any, memory: bytes) -> int | None:
    if sys.implementation.name != "cpython":
        return None  # an id is no address
    at = ctypes.string_at(id(thing), type(thing).__basicsize__).find(memory)
    return at if at >= 0 else None


_PYTHON, _NUMPY = _find_in_python(), _find_in_numpy()
