"""Convert plain containers to a compact form, which stores random states as raw bytes and each string once.

``pickle`` needs 1.5 bytes for each byte of a ``bytes`` object, and writes a string again for every object that contains
it. In the compact form, all long ``bytes`` are in one tensor, and equal ones are stored once. The state of a Mersenne
Twister is split into its words and the rest, because the words change only every 624 numbers, so that equal ones are
stored once. torch's state uses 8 bytes for each 4-byte word; the upper half is left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_MARK = "bytes of amp_trainer"
_MIN_SIZE = 64  # smallest size, in bytes, of an object that is moved to the tensor
_WORDS = 4 * 624
_TORCH, _HEADER = 5056, 24  # size of torch's state, and of the header before its words, in bytes

Names = dict[str, str]
"""Strings that the checkpoint already contains, mapped to themselves."""


def packed(value: Any, names: Names) -> dict[str, Any]:
    """Return the compact form of a value.

    Args:
        value: nested dicts, lists and tuples of plain values.
        names: strings that the checkpoint already contains. The strings of ``value`` are added.
    """
    packer = _Packer(names)
    tree = packer.pack(value)
    return {"tree": tree, _MARK: torch.frombuffer(packer.bytes or bytearray(1), dtype=torch.uint8)}


def unpacked(value: Any) -> Any:
    """Return the value that :func:`packed` was called with; other values are returned unchanged."""
    if not isinstance(value, dict) or _MARK not in value:
        return value
    return _unpack(value["tree"], value[_MARK].numpy().tobytes())


class _Packer:
    """Build the compact form of a value.

    Args:
        names: as for :func:`packed`.

    Attributes:
        bytes: the contents of all long ``bytes`` objects.
    """

    def __init__(self, names: Names) -> None:
        self.bytes = bytearray()
        self._places: dict[bytes, int] = {}
        self._names = names
        self._made: dict[int, Any] = {}  # by id, so that shared objects stay shared

    def pack(self, value: Any) -> Any:
        class_ = type(value)
        if class_ is str:
            return self._names.setdefault(value, value)
        if class_ is bytes:
            # weights_only=True rejects empty bytes
            return value if 0 < len(value) < _MIN_SIZE else self._pack_bytes(value)
        if class_ not in (dict, list, tuple):
            return value
        if id(value) not in self._made:
            packed: Any
            if class_ is dict:
                packed = {self.pack(key): self.pack(item) for key, item in value.items()}
            else:
                packed = class_([self.pack(item) for item in value])
            self._made[id(value)] = packed
        return self._made[id(value)]

    def _pack_bytes(self, value: bytes) -> tuple[Any, ...]:
        is_torch, first, rest = _split(value)
        return (_MARK, is_torch, self._offset_of(first), len(first), self._offset_of(rest), len(rest))

    def _offset_of(self, content: bytes) -> int:
        if content not in self._places:
            self._places[content] = len(self.bytes)
            self.bytes += content
        return self._places[content]


def _split(value: bytes) -> tuple[bool, bytes, bytes]:
    """Return (whether ``value`` is a state of torch's generator, the words of the state, all other bytes)."""
    if len(value) == _TORCH:
        end = _HEADER + 2 * _WORDS
        words = np.frombuffer(value[_HEADER:end], np.uint32)
        if not words[1::2].any():
            return True, words[::2].tobytes(), value[:_HEADER] + value[end:]
    return False, value[:_WORDS], value[_WORDS:]


def _unpack(value: Any, memory: bytes) -> Any:
    class_ = type(value)
    if class_ is tuple and len(value) == 6 and value[0] == _MARK:
        _, is_torch, at, size, rest_at, rest_size = value
        first, rest = memory[at : at + size], memory[rest_at : rest_at + rest_size]
        if not is_torch:
            return first + rest
        words = np.zeros(2 * _WORDS // 4, np.uint32)
        words[::2] = np.frombuffer(first, np.uint32)
        return rest[:_HEADER] + words.tobytes() + rest[_HEADER:]
    if class_ is dict:
        return {key: _unpack(item, memory) for key, item in value.items()}
    return class_([_unpack(item, memory) for item in value]) if class_ in (list, tuple) else value
