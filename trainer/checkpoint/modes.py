"""Changes that a run makes to a module in addition to its weights: frozen parameters, submodules in eval mode."""

from __future__ import annotations

from typing import Any

from torch import nn

Modes = dict[str, dict[str, bool]]
"""Values by attribute, and by the name of the parameter or module."""


def modes_of(module: nn.Module) -> Modes:
    """Return ``requires_grad`` of parameters, and ``training`` and ``track_running_stats`` of modules."""
    parts = list(module.named_modules())
    return {
        "requires_grad": {name: parameter.requires_grad for name, parameter in module.named_parameters()},
        "training": {name: part.training for name, part in parts},
        "track_running_stats": {
            name: part.track_running_stats
            for name, part in parts
            if isinstance(getattr(part, "track_running_stats", None), bool)
        },
    }


def changes(modes: Modes, first: Modes) -> Modes:
    """Return the values in ``modes`` that differ from those of the same names in ``first``."""
    return {
        attribute: {name: value for name, value in current.items() if first[attribute].get(name) not in (None, value)}
        for attribute, current in modes.items()
    }


def restore(module: nn.Module, changed: Modes) -> None:
    """Set changed values again. Names that the module does not have are ignored."""
    owners: dict[str, dict[str, Any]] = {
        "requires_grad": dict(module.named_parameters()),
        "training": dict(module.named_modules()),
        "track_running_stats": dict(module.named_modules()),
    }
    for attribute, values in changed.items():
        for name in values.keys() & owners[attribute].keys():
            setattr(owners[attribute][name], attribute, values[name])
