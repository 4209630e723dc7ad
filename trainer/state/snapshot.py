"""The snapshot: one walk finds the objects of the user's program, and reads and writes their state as plain data.

Each object is known by its path from a root, such as ``module.encoder.dropout`` or ``Counts.history``. The path is the
same in each process that runs the same program. The state of an object is a dict of its values by name. Names with a
colon are not attributes: ``:training``, ``:requires_grad`` and ``:tensor NAME`` of a module, and ``:state`` of a random
generator, or of an object that saves itself. A value is stored as follows:

===========================================  ===============================================================
value                                        stored
===========================================  ===============================================================
number, string, None                         itself
list, tuple, set, dict, deque                ``[tag, items]``; the items of a dict are its keys and values
tensor                                       ``["tensor", dtype, shape, bytes, device]``
NumPy array or scalar                        ``["array", dtype, shape, bytes]``
an object of the walk                        ``["object", path]``
a random generator that was created later    ``["generator", id, state]``
``:tensor NAME``; tensors without a limit    ``["weights", tensor, device]``
anything else: *held*                        ``["held", reason]``
===========================================  ===============================================================

Most programs do not override ``on_save_checkpoint``, to which Lightning leaves these attributes. The first values are
recorded after ``on_train_start``, because a resumed run calls this hook, too. Objects are known by path and not by
number, so that a resume with another callback restores the others. Objects of installed packages are left out, because
their caches and handles look like state; a package that defines the LightningModule counts as the user's.
"""

from __future__ import annotations

import zlib
from abc import ABC
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cached_property, partial
from io import IOBase
from itertools import chain
from types import MethodType, ModuleType
from typing import Any, Generic, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer.common.module_tree import bytes_of, is_dense, plain_name
from trainer.state import generators
from trainer.state.containers import items_of

State = dict[str, list[Any]]
"""The name of the class, and the values by name, of each object by path."""

STATELESS: set[Any] = {object, ABC, Generic, Protocol}
"""Base classes without a state."""
NUMBERS = (bool, int, float, complex, str, bytes, type(None))
MAX_NUMBERS = 2**22
"""Containers, tensors and arrays with more numbers than this are held."""
UNLIMITED = 2**62
"""Limit of an object that saves itself, and of metric objects. Their tensors are saved as they are, and always."""
_MAX_OBJECTS = 20_000
_MAX_ITEMS = 1000
"""Containers with more items than this are not searched for objects."""
_MAX_COMPARED = 2**14
"""Largest number of items that are compared in a container that is held."""
_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "dict": dict, "deque": deque}
_CREATED = (list, tuple, set, dict)
"""The containers that are created again. Others are changed in place, so that they keep their class."""
_LEAVES = {*NUMBERS, Tensor, nn.Parameter, np.ndarray, type, ModuleType}
OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of a module that torch sets."""


class Lost(NamedTuple):
    """A value that is not restored.

    Attributes:
        name: the class of the object, and the name of the value.
        reason: ``"iterator"``, ``"generator"`` or ``"value"`` if it was held; ``"buffer"`` or ``"missing"`` if this
            process has no such object.
    """

    name: str
    reason: str


class _Held(NamedTuple):
    """A value that only this process can restore. Two are equal if the value has not changed in between."""

    mark: Any
    reason: str = "value"


class Rules(NamedTuple):
    """The objects of the walk, and the limits of their values.

    Attributes:
        ignored: returns the attributes of an object that are not part of its state, or None if it is not searched. Of
            modules that are not searched, the numbers, strings and flags are read.
        saves_itself: returns whether an object is saved by its ``state_dict`` and ``load_state_dict`` instead. Default:
            no object is.
        load: calls ``load_state_dict`` of such an object.
        limit: returns the largest number of numbers in an attribute of an object. Default: 4 million.
        elsewhere: returns the storages (:func:`memory_of`) of tensors that are saved elsewhere. Default: none.
        trained: returns the storages of tensors that optimizers train. They are held in containers. Default: none.
        of_data: whether the objects belong to a dataloader: the walk follows attributes of all objects to find random
            generators, iterators count as unchanged, and an object saves itself only if it has a held value. Default:
            False.
        saves_states: whether objects that save themselves have whole states. Default: True. If False, they are held.
        device: the device of tensors that were on a GPU, if they do not exist yet. Default: the CPU.
        saves_weights: whether changed weights of modules outside of the roots are saved. Default: True. If False, they
            are held.
        saves_buffers: whether the roots' persistent buffers are saved, too. Default: False.
    """

    ignored: Callable[[Any], Container[str] | None]
    saves_itself: Callable[[Any], bool] = lambda _: False
    load: Callable[[Any, Any], Any] = lambda value, state: value.load_state_dict(state)
    limit: Callable[[Any], int] = lambda _: MAX_NUMBERS
    elsewhere: Callable[[], Set[int]] = frozenset[int]
    trained: Callable[[], Set[int]] = frozenset[int]
    device: torch.device = torch.device("cpu")
    of_data: bool = False
    saves_states: bool = True
    saves_weights: bool = True
    saves_buffers: bool = False


NO_RULES = Rules(lambda _: None)


class Snapshot:
    """The objects that can be reached from ``roots``, and the changes of their state since this instance was created.

    A state contains the values that have changed, and always the states of random generators, of objects that save
    themselves, and non-persistent buffers of modules among the roots.

    Args:
        roots: the objects to begin with, by the first part of their paths. Default: none.
        rules: which objects and values are read.
        without: objects that are not entered. Default: none.

    Attributes:
        objects: the objects, by path.
    """

    def __init__(
        self, roots: Mapping[str, Any] | None = None, rules: Rules = NO_RULES, without: Iterable[Any] = ()
    ) -> None:
        self._rules = rules
        self._roots = {path: root for path, root in (roots or {}).items() if root is not None}
        self._memory: tuple[Set[int], Set[int]] | None = None  # the results of `elsewhere` and `trained`, if needed
        modules = [root for root in self._roots.values() if isinstance(root, nn.Module)]
        self._inside = {id(submodule) for root in modules for submodule in root.modules()}
        self._ignored: dict[str, Container[str] | None] = {}
        self._itself: set[str] = set()  # the paths of objects that save themselves
        self._paths: dict[int, str] = {}
        self.objects = self._walk({*map(id, without)})
        self._paths = {id(value): path for path, value in self.objects.items()}
        self._given = {path: dict(vars(value)) for path, value in self.objects.items() if path in self._ignored}
        self._first = {
            path: {n: () if has(v, "weights") else v for n, v in self._values(path, value) if n != ":state"}
            for path, value in self.objects.items()
        }

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Snapshot, ()  # a spawned process begins its own

    def __bool__(self) -> bool:
        return bool(self.objects)

    # --- read and write ---------------------------------------------------------------------------------------

    def read(self, *, attributes_only: bool = False, modes: Mapping[nn.Module, bool] | None = None) -> State:
        """Return the changes of the objects.

        Args:
            attributes_only: whether to leave out tensors and flags of modules, states of metric objects, and the states
                of objects that save themselves. Default: False.
            modes: the ``training`` flags of modules to read instead of the current ones. Default: None.
        """
        self._memory = None
        state: State = {}
        for path, holder in chain(self.objects.items(), self._new_modules()):
            if attributes_only and path in self._itself:
                continue
            values, first = {}, self._first.get(path, {})
            for name, value in self._values(path, holder):
                if name == ":training":
                    value = (modes or {}).get(holder, value)
                if attributes_only and (has(value, "weights") or (name[0] == ":" and not generators.is_random(holder))):
                    continue
                if name not in first or value != first[name]:
                    values[name] = self._stored(path, holder, name, value)
            if self._rules.of_data and any(value[:1] == ["held"] for value in values.values() if type(value) is list):
                with suppress(Exception):  # its method may need arguments
                    itself = self._encode(holder.state_dict(), MAX_NUMBERS)
                    values = values if isinstance(itself, _Held) else {":state": itself}
            if values:
                state[path] = [class_name(holder), values]
        return state

    def current(self, state: State) -> State:
        """Return copies of the current values of the objects and names in ``state``."""
        self._memory, memo = None, dict[int, Any]()
        current = State()
        for path, (name, names) in state.items():
            if self._has(path, name):
                holder = self.objects[path]
                values = {n: self._stored("", holder, n, v) for n, v in self._values(path, holder) if n in names}
                current[path] = [name, {n: deepcopy(v, memo) if n[0] == ":" else v for n, v in values.items()}]
        return current

    def write(self, state: State, *, skip: Container[tuple[str, str]] = (), resets: bool = False) -> list[Lost]:
        """Restore a state that :meth:`read` returned. Return the values that are not restored.

        Values of roots that do not exist any more are left out.

        Args:
            state: the state.
            skip: paths and names of values to leave unchanged. Default: none.
            resets: whether attributes that are not in the state get their first value. Default: False.
        """
        lost: list[Lost] = []
        created: dict[int, Any] = {}  # generators by number
        kinds = set(map(class_name, self.objects.values()))
        for path, holder in self.objects.items() if resets else ():
            if path in self._given:
                self._reset(path, holder, state.get(path, ["", {}])[1])
        for path, (class_, values) in state.items():
            is_known = class_ in kinds or any(path.startswith(f"{root}.") for root in self._roots)
            for name, value in values.items():
                reason = "buffer" if name.startswith(":tensor ") else "missing" if is_known else ""
                if self._has(path, class_):
                    reason = "" if (path, name) in skip else self._set(path, self.objects[path], name, value, created)
                if reason:
                    lost.append(Lost(_shown(class_, name), reason))
        return lost

    @contextmanager
    def as_in(self, state: State, *, rewinds: bool = True) -> Iterator[set[tuple[str, str]]]:
        """Return a context with the state. Its exit restores the values that have not changed inside.

        Args:
            state: the state.
            rewinds: whether random generators are restored even if they were used inside. Default: True.

        Returns:
            A set that gets the paths and names of the values in ``state`` that have changed inside.
        """
        before = self.current(state)
        self.write(state)
        written, changed = self.current(state), set[tuple[str, str]]()
        try:
            yield changed
        finally:
            changed |= differences(written, self.current(state))
            kept = {(path, ":state") for path, value in self.objects.items() if rewinds and generators.is_random(value)}
            self.write(before, skip=changed - kept)
            for path, name in differences(written, before) - changed:
                if name not in before[path][1]:
                    vars(self.objects[path]).pop(name, None)

    def for_hooks(self, state: State) -> State:
        """Return the values in a state that hooks may change when they load a checkpoint.

        These exclude ``requires_grad``, which ``configure_optimizers`` reads, and the persistent buffers of the roots,
        which their state dicts restore.
        """

        def may_change(path: str, name: str) -> bool:
            holder = self.objects.get(path)
            if not name.startswith(":tensor ") or id(holder) not in self._inside:
                return name != ":requires_grad"
            return name.partition(" ")[2] in getattr(holder, "_non_persistent_buffers_set", ())

        return selected(state, may_change)

    def missing(self, state: State) -> list[str]:
        """Return the classes of the objects in ``state`` that this process does not have."""
        return list(dict.fromkeys(name for path, (name, _) in state.items() if not self._has(path, name)))

    def _has(self, path: str, name: str) -> bool:
        return path in self.objects and (path in self._roots or class_name(self.objects[path]) == name)

    # --- the walk ---------------------------------------------------------------------------------------------

    def _walk(self, seen: set[int]) -> dict[str, Any]:
        objects: dict[str, Any] = {}
        queue = deque((holder, f"{path}{name and '.'}{name}", True) for path, name, holder in self._parts())
        while queue and len(seen) < _MAX_OBJECTS:
            value, path, may_search = queue.popleft()
            if id(value) in seen or isinstance(value, (Tensor, np.ndarray, type, ModuleType)):
                continue
            seen.add(id(value))
            if generators.is_random(value):
                objects[path] = value
                continue
            children: list[tuple[Any, Any]] = list(enumerate(items_of(value, _MAX_ITEMS)))
            if type(value) not in _CONTAINERS.values():
                path, is_module = plain_name(path), isinstance(value, nn.Module)
                if not is_module and self._rules.saves_itself(value) and self._can_save(value):
                    objects[path] = value
                    self._itself.add(path)
                    continue
                ignored = self._rules.ignored(value) if may_search else None
                attributes = _attributes_of(value) if ignored is not None or self._rules.of_data else []
                children += vars(value).get("_modules", {}).items() if is_module else ()  # a scripted one has none
                children += [child for child in attributes if self._rules.of_data or child[0] not in (ignored or ())]
                holds = ignored is not None or (is_module and not self._rules.of_data)
                if self._rules.of_data:  # the objects in objects that are not searched are not part of the data
                    may_search = ignored is not None
                    holds |= any(generators.is_random(child) for _, child in attributes)
                if holds and type(value).__dictoffset__ and isinstance(vars(value), dict):
                    objects[path], self._ignored[path] = value, ignored
            searched = ((name, child) for name, child in children if type(child) not in _LEAVES)
            queue.extend((child, f"{path}.{name}", may_search) for name, child in searched)
        return objects

    def _can_save(self, value: Any) -> bool:
        """Return whether an object saves itself. If its attributes are not searched, it is held otherwise."""
        with suppress(Exception):  # its method may need arguments
            is_plain = not isinstance(self._encode(value.state_dict(), UNLIMITED), _Held)
            return is_plain or self._rules.ignored(value) is None
        return False

    def _new_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the submodules of the roots that were created during the run. Their buffers are saved, too."""
        for path, name, module in self._parts():
            if isinstance(module, nn.Module) and id(module) not in self._inside:
                yield plain_name(f"{path}.{name}"), module

    def _parts(self) -> Iterator[tuple[str, str, Any]]:
        """Yield the roots and their submodules, each with the root's path and its name."""
        for path, root in self._roots.items():
            for name, holder in root.named_modules() if isinstance(root, nn.Module) else (("", root),):
                yield path, name, holder

    # --- values -----------------------------------------------------------------------------------------------

    def _values(self, path: str, holder: Any) -> Iterator[tuple[str, Any]]:
        """Yield the names and the encoded values of an object."""
        if generators.is_random(holder):
            yield ":state", generators.state_of(holder)
        elif path in self._itself:
            encoded: Any = _Held(None)
            with suppress(Exception):
                encoded = self._encode(holder.state_dict() if self._rules.saves_states else holder, UNLIMITED)
            yield ":state", encoded
        else:  # it is a module if it is not known: one that was created during the run
            is_known = path in self._ignored
            limit = self._rules.limit(holder)
            for name, value in _state_of(holder, self._ignored[path] if is_known else self._rules.ignored(holder)):
                yield name, self._encode(value, limit)
            if isinstance(holder, nn.Module):
                of_module = self._of_module(holder, is_inside=not is_known or id(holder) in self._inside)
                yield from (pair for pair in of_module if is_known or pair[0].startswith(":tensor "))

    def _of_module(self, module: nn.Module, *, is_inside: bool) -> Iterator[tuple[str, Any]]:
        """Yield the flags and tensors of a module; of a tensor outside of the roots, the checksum."""
        yield ":training", module.training
        parameters = list(module.named_parameters(recurse=False))
        if parameters:
            yield ":requires_grad", {name: tensor.requires_grad for name, tensor in parameters}
        non_persistent = module._non_persistent_buffers_set
        for name, buffer in module._buffers.items() if is_inside else ():
            is_saved = name in non_persistent or (buffer is not None and self._rules.saves_buffers)
            if is_saved and (buffer is None or not (is_lazy(buffer) or buffer.is_meta)):
                yield f":tensor {name}", _weights(buffer)
        for name, tensor in () if is_inside else (*parameters, *module.named_buffers(recurse=False)):
            is_plain = type(tensor) in (Tensor, nn.Parameter) and is_dense(tensor) and not tensor.is_meta
            if is_plain and not self._is_elsewhere(tensor):
                yield f":tensor {name}", ["checksum", zlib.crc32(bytes_of(tensor).data)]

    def _stored(self, path: str, holder: Any, name: str, value: Any) -> Any:
        """Return the encoded value as it is stored. With a path, mark containers and tensors that were replaced."""
        if isinstance(value, list) and value[0] == "checksum":
            tensor = getattr(holder, name.partition(" ")[2])
            return _weights(tensor) if self._rules.saves_weights else ["held", "value"]
        is_plain = type(value) is list and value[0] in (*_CONTAINERS, "tensor", "array") and not has(value, "weights")
        if path in self._given and name[0] != ":" and is_plain:
            now = vars(holder)[name]
            if now is not self._given[path].get(name):
                value = ["new", value] if type(now) in _CREATED or not _tag_of(now) else _Held(None)
        return ["held", value.reason] if isinstance(value, _Held) else value

    def _encode(self, value: Any, limit: int) -> Any:
        return self._encoded(value, [limit], is_item=False)

    def _encoded(self, value: Any, left: list[int], *, is_item: bool) -> Any:
        """Encode a value with at most ``left[0]`` numbers, and subtract its numbers from them."""
        class_ = type(value)
        if class_ in NUMBERS:
            return value
        if (path := self._paths.get(id(value))) is not None:
            return ["object", path]
        if name := _tag_of(value):
            if class_ in _CREATED or not is_item or left[0] > MAX_NUMBERS:
                return self._encoded_items(name, value, left)
        elif isinstance(value, (Tensor, np.ndarray, np.generic)):
            count = value.numel() if isinstance(value, Tensor) else value.size
            is_trained = is_item and left[0] <= MAX_NUMBERS and self._is_trained(value)
            if not is_trained and count <= left[0] and (encoded := self._encoded_numbers(value, left[0])) is not None:
                left[0] -= count
                return encoded
        elif generators.is_random(value):
            if generators.can_create(value):
                return ["generator", id(value), generators.state_of(value)]
            return _Held(id(value), "generator")
        elif isinstance(value, Iterator) and not isinstance(value, IOBase) and not self._rules.of_data:
            return _Held(object(), "iterator")  # its position cannot be read: it counts as changed
        return _Held((id(value), self._version(value)))

    def _encoded_items(self, name: str, value: Any, left: list[int]) -> Any:
        left[0] -= 2 * len(value) if name == "dict" else len(value)
        if left[0] < 0:
            return _Held((id(value), self._version(value)))
        items = [item for pair in value.items() for item in pair] if name == "dict" else list(value)
        encoded = [item if type(item) in NUMBERS else self._encoded(item, left, is_item=True) for item in items]
        reasons = {item.reason for item in encoded if type(item) is _Held}
        if not reasons:
            return [name, encoded]
        mark = object() if "iterator" in reasons else (id(value), self._version(value))
        return _Held(mark, next(iter(reasons - {"value"}), "value"))

    def _encoded_numbers(self, value: Any, left: int) -> list[Any] | None:
        if not isinstance(value, Tensor):
            is_plain = type(value) is np.ndarray or isinstance(value, np.generic)
            if not is_plain or value.dtype.hasobject or value.dtype.names:
                return None
            return ["array", value.dtype.str, list(value.shape), value.tobytes()]
        if left > MAX_NUMBERS:
            return _weights(value.detach().clone() if value.numel() <= MAX_NUMBERS else value)
        device = value.device.type
        is_excluded = (
            type(value) not in (Tensor, nn.Parameter) or device == "meta" or (device != "cpu" and self._rules.of_data)
        )
        if is_excluded or not is_dense(value) or self._is_elsewhere(value):
            return None
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), bytes_of(value).tobytes(), device]

    def _version(self, value: Any, depth: int = 3) -> int:
        """Return a number that changes if a tensor, or an item of a container, is changed in place."""
        if isinstance(value, Tensor):
            is_fixed = self._rules.of_data or value.is_inference() or self._is_elsewhere(value)
            return 0 if is_fixed else value._version
        if not _tag_of(value):
            return 0
        items = items_of(value, 0 if self._rules.of_data or not depth else _MAX_COMPARED)
        return hash((len(value), *((id(item), self._version(item, depth - 1)) for item in items)))

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        return bool(memory_of([tensor]) & self._known_memory()[0])

    def _is_trained(self, value: Any) -> bool:
        """Return whether an optimizer may train a tensor, so that it must not be created again."""
        if not isinstance(value, Tensor):
            return False
        return (value.requires_grad and value.is_leaf) or bool(memory_of([value]) & self._known_memory()[1])

    def _known_memory(self) -> tuple[Set[int], Set[int]]:
        if self._memory is None:
            self._memory = self._rules.elsewhere(), self._rules.trained()
        return self._memory

    # --- restoring --------------------------------------------------------------------------------------------

    def _reset(self, path: str, holder: Any, saved: Container[str]) -> None:
        first, given, attributes = self._first[path], self._given[path], vars(holder)
        for name, value in list(self._values(path, holder)):
            if name in first and name not in saved and name[0] != ":" and value != first[name]:
                is_held = isinstance(first[name], _Held)
                attributes[name] = given[name] if is_held else self._decoded(first[name], attributes.get(name), {})

    def _set(self, path: str, holder: Any, name: str, value: Any, created: dict[int, Any]) -> str:
        """Restore one value, and return why it cannot be restored, or ""."""
        if type(value) is list and value[:1] == ["held"]:
            return str(value[1])
        if not self._rules.of_data:
            self._first[path].pop(name, None)  # it counts as changed: the next process may begin with another value
        try:
            if generators.is_random(holder):
                generators.set_state(holder, value)
            elif name == ":state":
                self._rules.load(holder, self._decoded(value, None, created))
            elif name.startswith(":tensor "):
                return _set_tensor(holder, name.partition(" ")[2], value[1], may_create=id(holder) in self._inside)
            elif name == ":training":
                holder.training = value
            elif name == ":requires_grad":
                for parameter in value.keys() & holder._parameters.keys():
                    holder._parameters[parameter].requires_grad_(value[parameter])
            else:
                vars(holder)[name] = self._decoded(value, vars(holder).get(name), created)
        except LookupError:  # it refers to an object that this process does not have
            return "missing"
        return ""

    def _decoded(self, value: Any, current: Any, created: dict[int, Any]) -> Any:
        """Return the stored value. If possible, ``current`` is changed to it in place and returned."""
        if type(value) is not list:
            return value
        tag, content = value[:2]
        if tag == "object":
            return self.objects[content]
        if tag == "weights":
            return content.to(self._device_of(value))
        if tag == "new":  # the attribute was set to another object during the run
            return self._decoded(content, None, created)
        if tag == "generator":
            if content not in created:
                created[content] = generators.create(value[2])
            return created[content]
        if tag in ("tensor", "array"):
            return _array_of(value, current) if tag == "array" else self._tensor_of(value, current)
        items = [self._decoded(item, None, created) for item in content]
        container: Any = dict(zip(items[::2], items[1::2], strict=True)) if tag == "dict" else _CONTAINERS[tag](items)
        if tag == "tuple" or not isinstance(current, type(container)):
            return container
        current.clear()
        current.extend(container) if tag in ("list", "deque") else current.update(container)
        return current

    def _tensor_of(self, value: list[Any], current: Any) -> Tensor:
        """Return a tensor: ``current`` with its values, if shape and dtype are the same."""
        dtype, numbers = getattr(torch, value[1]), bytearray(value[3])
        tensor = torch.frombuffer(numbers, dtype=torch.uint8).view(dtype) if numbers else torch.empty(0, dtype=dtype)
        tensor = tensor.view(value[2])
        if not isinstance(current, Tensor):
            return tensor.to(self._device_of(value))
        if (dtype, tensor.shape) == (current.dtype, current.shape):
            current.detach().copy_(tensor)
            return current
        if current.requires_grad:
            raise LookupError("an optimizer trains this tensor, which has another shape now")
        return tensor.to(self._device_of(value))

    def _device_of(self, value: list[Any]) -> Any:
        return "cpu" if value[-1] == "cpu" else self._rules.device


def differences(state: State, other: State) -> set[tuple[str, str]]:
    """Return the paths and names of the values in ``state`` that differ from those in ``other``."""
    return {
        (path, name)
        for path, (_, values) in state.items()
        for name, value in values.items()
        if path not in other or name not in other[path][1] or not _is_same(value, other[path][1][name])
    }


def selected(state: State, keeps: Callable[[str, str], bool]) -> State:
    """Return a state with the values for which ``keeps`` returns True for their path and name."""
    return {
        path: [class_, {name: value for name, value in values.items() if keeps(path, name)}]
        for path, (class_, values) in state.items()
    }


def lost_in(state: Any) -> list[Lost]:
    """Return the held values in a state of :meth:`Snapshot.read`."""
    return [
        Lost(_shown(class_, name), value[1])
        for class_, values in state.values()
        for name, value in values.items()
        if type(value) is list and value[:1] == ["held"]
    ]


def _shown(class_: str, name: str) -> str:
    """Return the name of a value for messages."""
    class_ = class_.removeprefix("torch.")
    return class_ if name == ":state" else f"{class_}.{name.rpartition(' ')[2]}"


def memory_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return numbers for the memory of tensors: one for those that share it."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if is_dense(tensor)}


def class_name(value: Any) -> str:
    """Return a name that stays the same if the class moves to another module, or FSDP wraps it."""
    owner = next(base for base in type(value).__mro__ if not base.__module__.startswith("torch.distributed."))
    return f"torch.{owner.__qualname__}" if owner.__module__.startswith("torch.") else owner.__qualname__


def has(value: Any, tag: str) -> bool:
    """Return whether an encoded value contains one with a tag, such as ``"tensor"``."""
    return type(value) is list and (value[:1] == [tag] or any(has(item, tag) for item in value))


def _state_of(holder: Any, ignored: Container[str] | None) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that belong to the state of an object: numbers or generators if it is not searched."""
    class_ = type(holder)
    for name, value in vars(holder).items():
        if ignored is None:
            is_state = generators.is_random(value) if not isinstance(holder, nn.Module) else type(value) in NUMBERS
            if is_state and name not in OF_MODULES:
                yield name, value
        elif name not in ignored:
            of_class = getattr(class_, name, None)
            is_method = callable(value) and (callable(of_class) or _is_of_trainer(value))
            if not is_method and not isinstance(of_class, cached_property):
                yield name, value


def _is_of_trainer(function: Any) -> bool:
    """Return whether a function is one that the Trainer sets on an object during a run, such as ``log``."""
    function = function.func if isinstance(function, partial) else function
    return str(getattr(function, "__module__", "")).startswith(("trainer.", "lightning."))


def _tag_of(value: Any) -> str:
    """Return the tag of a container; "" for other values, and for named tuples, which cannot be created by items."""
    tag = next((name for name, container in _CONTAINERS.items() if isinstance(value, container)), "")
    return "" if tag == "tuple" and type(value) is not tuple else tag


def _is_same(first: Any, other: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        is_like = (first.shape, first.dtype, is_dense(first)) == (other.shape, other.dtype, True)
        return is_like and bytes_of(first).tobytes() == bytes_of(other).tobytes()
    if isinstance(first, (list, tuple)) and type(first) is type(other):
        return len(first) == len(other) and all(map(_is_same, first, other))
    if isinstance(first, dict) and isinstance(other, dict):
        return first.keys() == other.keys() and all(_is_same(value, other[name]) for name, value in first.items())
    return type(first) is type(other) and bool(first == other or first is other or (first != first and other != other))


def _attributes_of(value: Any) -> list[tuple[str, Any]]:
    """Return what the walk follows in an object that holds random generators of a dataloader."""
    if isinstance(value, partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, MethodType):
        return [("self", value.__self__)]
    attributes = object.__getattribute__(value, "__dict__") if type(value).__dictoffset__ else None
    return list(attributes.items()) if isinstance(attributes, dict) else []


def _array_of(value: list[Any], current: Any) -> Any:
    """Return an array or a NumPy scalar: ``current`` with its values, if shape and dtype are the same."""
    array = np.frombuffer(value[3], dtype=value[1]).reshape(value[2]).copy()
    if not isinstance(current, np.ndarray):
        return array[()]
    if (array.dtype, array.shape) != (current.dtype, current.shape):
        return array
    np.copyto(current, array)
    return current


def _weights(tensor: Tensor | None) -> list[Any]:
    return ["weights", None, "cpu"] if tensor is None else ["weights", _local(tensor), tensor.device.type]


def _local(tensor: Tensor) -> Tensor:
    """Return a detached tensor; of a DTensor, the part of this process."""
    detached = tensor.detach()
    return getattr(detached, "_local_tensor", detached)


def _set_tensor(module: nn.Module, name: str, saved: Tensor | None, *, may_create: bool) -> str:
    """Restore a tensor of a module, and return why it cannot be restored, or ""."""
    owner: Any = module._parameters if name in module._parameters else module._buffers
    current: Any = owner[name] if name in owner else None  # noqa: SIM401 - that of a scripted module has no `get`
    is_used = not (current is None or is_lazy(current) or current.is_meta)
    if saved is not None and is_used:
        with suppress(RuntimeError):  # it is expanded, or an inference tensor
            if (local := _local(current)).shape == saved.shape:
                local.copy_(saved)
                return ""
    if owner is module._parameters or not may_create:
        return "missing"
    if name not in owner:
        vars(module).pop(name, None)  # a plain attribute that the run has turned into a buffer
        module._non_persistent_buffers_set.add(name)
    owner[name] = None if saved is None else saved.to(current.device if is_used else "cpu")
    return ""
