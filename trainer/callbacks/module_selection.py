"""Choose modules by name or class."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from trainer.common.module_tree import has_forward, plain_class, plain_name
from trainer.errors import ConfigurationError, did_you_mean

ModulePattern = str | type[nn.Module]


def as_patterns(modules: ModulePattern | Sequence[ModulePattern]) -> tuple[ModulePattern, ...]:
    """Return one pattern, or several, as a tuple.

    Raises:
        ConfigurationError: if there is no pattern.
    """
    patterns: tuple[ModulePattern, ...] = (modules,) if isinstance(modules, (str, type)) else tuple(modules)
    if not patterns:
        raise ConfigurationError(
            "Got modules=[], expected at least one pattern, such as 'net.layer*' or 'TransformerEncoderLayer'."
        )
    return patterns


def select_modules(root: nn.Module, patterns: Sequence[ModulePattern], callback_name: str) -> dict[str, nn.Module]:
    """Return the outermost modules that match, by name. A container that is never called itself stands for its members.

    Args:
        root: the LightningModule, which is never chosen.
        patterns: patterns for the name of a module or of its class, or classes.
        callback_name: the name of the callback, for the message.

    Raises:
        ConfigurationError: if a pattern matches no module.
    """
    chosen: dict[str, nn.Module] = {}
    held: dict[str, set[ModulePattern]] = {}  # patterns that containers match, for their members
    matched: set[ModulePattern] = set()
    known: list[str] = []
    for name, module in root.named_modules():
        name = plain_name(name)
        if not name:
            continue
        known += [name, plain_class(module).__name__]
        hits = {pattern for pattern in patterns if _matches(pattern, name, module)}
        hits |= held.get(name.rpartition(".")[0], set())
        if not has_forward(module):
            held[name] = hits
            continue
        matched |= hits
        if hits and not any(name == outer or name.startswith(f"{outer}.") for outer in chosen):
            chosen[name] = module
    for pattern in patterns:
        if pattern not in matched:
            written = pattern if isinstance(pattern, str) else pattern.__name__
            raise ConfigurationError(
                f"Got {written!r} among the modules of {callback_name}, expected a pattern that matches the"
                f" name of a module in {plain_class(root).__name__}, or of its class.{did_you_mean(written, known)}"
            )
    return chosen


def _matches(pattern: ModulePattern, name: str, module: nn.Module) -> bool:
    if isinstance(pattern, str):
        return fnmatchcase(name, pattern) or fnmatchcase(plain_class(module).__name__, pattern)
    return isinstance(module, pattern)
