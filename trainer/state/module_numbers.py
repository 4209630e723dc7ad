"""Numbers in attributes of modules of other packages, such as the ``p`` of a ``Dropout`` that a run changes."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

from torch import nn

from trainer.errors import join_first
from trainer.state.plain_values import NUMBERS

Saved = dict[int, list[Any]]
"""The class of each changed module by number, and its changed attributes."""


class ModuleNumbers:
    """The numbers, strings and flags in attributes of modules that changed since this instance was created.

    Other attributes are left out, because they may be caches.

    Args:
        modules: the modules. Default: none.
        ignored: attributes that are not saved. Default: none.
    """

    def __init__(self, modules: Iterable[nn.Module] = (), ignored: Set[str] = frozenset()) -> None:
        self._modules, self._ignored = list(modules), ignored
        self._first = list(map(self._numbers, self._modules))

    def read(self) -> Saved:
        """Return the changes."""
        found: Saved = {}
        for number, (module, first) in enumerate(zip(self._modules, self._first, strict=True)):
            changed = {
                name: value
                for name, value in self._numbers(module).items()
                if name not in first or (value is not first[name] and value != first[name])
            }
            if changed:
                found[number] = [type(module).__name__, changed]
        return found

    def write(self, saved: Saved) -> str:
        """Restore the changes, and return a message about those that are not restored; "" if all are restored."""
        lost = []
        for number, (name, changed) in saved.items():
            if number < len(self._modules) and type(self._modules[number]).__name__ == name:
                vars(self._modules[number]).update(changed)
                for attribute in changed:  # counts as changed, because the next process may begin with another value
                    self._first[number].pop(attribute, None)
            else:
                lost += [f"{name}.{attribute}" for attribute in changed]
        if not lost:
            return ""
        return f"These attributes are not restored, because the program has other modules now: {join_first(lost, 5)}."

    def _numbers(self, module: nn.Module) -> dict[str, Any]:
        own = vars(module)
        return {name: own[name] for name in sorted(own.keys() - self._ignored) if type(own[name]) in NUMBERS}
