"""Attributes of a Trainer used by the installed Lightning's modules, callbacks, loggers and tuner, from its sources."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import lightning.pytorch

SOURCES = Path(lightning.pytorch.__file__).parent
PARTS = (
    "core",
    "callbacks",
    "loggers",
    "tuner",
    "strategies",
    "profilers",
    "plugins",
    "utilities",
    "overrides",
    "cli.py",
)
TRAINERS = {"trainer", "_trainer"}
"""Names of variables and attributes that refer to a Trainer, except attributes of packages."""
PACKAGES = {"pl", "lightning", "torch"}


@dataclass
class Use:
    """One attribute, or a chain of them, of a Trainer.

    Attributes:
        places: ``file:line`` of each use.
        is_written: whether any of them sets it.
    """

    places: list[str] = field(default_factory=list)
    is_written: bool = False


@functools.cache
def installed() -> dict[str, Use]:
    """Return the attributes used by the installed Lightning."""
    uses: dict[str, Use] = {}
    for part in PARTS:
        path = SOURCES / part
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            name = file.relative_to(SOURCES).as_posix()
            for chain, line, is_written in used_in(file.read_text()):
                use = uses.setdefault(chain, Use())
                use.places.append(f"{name}:{line}")
                use.is_written |= is_written
    return dict(sorted(uses.items()))


def used_in(source: str) -> Iterator[tuple[str, int, bool]]:
    """Return the chains of attributes of a Trainer in ``source``: (chain, line, whether it is set)."""
    tree = ast.parse(source)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    decorators = {id(decorator) for function in functions for decorator in function.decorator_list}
    seen: set[int] = decorators  # `@trainer.setter` is not an attribute of a Trainer
    for scope in [*functions, tree]:
        aliases = _aliases_in(scope)
        for node in ast.walk(scope):
            if id(node) in seen:
                continue
            if isinstance(node, ast.Attribute) and id(node) not in inner:
                seen.add(id(node))
                if chain := _chain_of(node, aliases):
                    yield chain, node.lineno, isinstance(node.ctx, ast.Store)
            elif isinstance(node, ast.Call) and (chain := _named_in(node, aliases)):
                seen.add(id(node))
                yield chain, node.lineno, getattr(node.func, "id", "") == "setattr"


def _aliases_in(scope: ast.AST) -> dict[str, str]:
    """Return variables assigned from a part of a Trainer: ``loop = trainer.fit_loop``."""
    aliases: dict[str, str] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            chain = _chain_of(node.value, aliases)
            if chain and node.targets[0].id not in TRAINERS:
                aliases[node.targets[0].id] = chain
    return aliases


def _named_in(call: ast.Call, aliases: dict[str, str]) -> str:
    """Return the chain of ``getattr(trainer, "name")``, or None for ``hasattr`` and ``getattr`` with a default."""
    if getattr(call.func, "id", "") not in ("getattr", "setattr") or len(call.args) < 2:
        return ""
    owner, name = call.args[:2]
    has_default = getattr(call.func, "id", "") == "getattr" and len(call.args) > 2
    if has_default or not isinstance(name, ast.Constant):
        return ""
    prefix = _path_to(owner, aliases)
    return "" if prefix is None else ".".join([*prefix, str(name.value)])


def _chain_of(node: ast.AST, aliases: dict[str, str]) -> str:
    """Return ``fit_loop.max_epochs`` for ``self.trainer.fit_loop.max_epochs``, or None without a Trainer."""
    return ".".join(_path_to(node, aliases) or [])


def _path_to(node: ast.AST, aliases: dict[str, str]) -> list[str] | None:
    """Return the attributes from a Trainer to ``node``: empty for the Trainer itself, None for others."""
    if isinstance(node, ast.Name):
        if node.id in TRAINERS:
            return []
        return aliases[node.id].split(".") if node.id in aliases else None
    if not isinstance(node, ast.Attribute):
        return None
    if node.attr in TRAINERS and not (isinstance(node.value, ast.Name) and node.value.id in PACKAGES):
        return []
    before = _path_to(node.value, aliases)
    return None if before is None else [*before, node.attr]
