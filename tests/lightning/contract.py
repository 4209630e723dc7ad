"""Attributes of a Trainer used by the installed Lightning's modules, callbacks, loggers and tuner, from its sources."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import lightning.pytorch

SOURCES = Path(lightning.pytorch.__file__).parent
PARTS = ("core", "callbacks", "loggers", "tuner", "strategies", "profilers", "plugins", "utilities", "overrides")
ATTRIBUTE = re.compile(r"(?!pl\.|lightning\.|torch\.)(?:[\w.]+\.)?_?trainer\.(?!setter)([\w.]+)")
NAMED = re.compile(r"(?:get|(s)et)attr\((?:[\w.]+\.)?_?trainer((?:\.\w+)*), '(\w+)'(?(1), .*)\)")


def installed():
    """Return the places (``file:line``) of each attribute that the installed Lightning uses, and those that it sets."""
    places, written = defaultdict(list), set()
    for file in [SOURCES / "cli.py", *(file for part in PARTS for file in sorted((SOURCES / part).rglob("*.py")))]:
        for chain, line, is_written in used_in(file.read_text()):
            places[chain].append(f"{file.relative_to(SOURCES).as_posix()}:{line}")
            written |= {chain} if is_written else set()
    return dict(sorted(places.items())), written


def used_in(source):
    """Return the chains of attributes of a Trainer in ``source``: (chain, line, whether it is set)."""
    tree = ast.parse(source)
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
        aliases = {}  # `loop = trainer.fit_loop`

        def chain_of(node):
            first, _, rest = ast.unparse(node).partition(".")
            text = f"trainer.{aliases[first]}.{rest}" if first in aliases else f"{first}.{rest}"  # noqa: B023
            return found[1] if (found := ATTRIBUTE.fullmatch(text)) else None

        for node in ast.walk(scope):
            if isinstance(node, ast.Attribute) and (chain := chain_of(node)):
                yield chain, node.lineno, isinstance(node.ctx, ast.Store)
            elif isinstance(node, ast.Call) and (found := NAMED.fullmatch(ast.unparse(node))):
                yield f"{found[2]}.{found[3]}".removeprefix("."), node.lineno, bool(found[1])
            elif isinstance(node, ast.Assign) and scope is not tree and (chain := chain_of(node.value)):
                aliases[ast.unparse(node.targets[0])] = chain
