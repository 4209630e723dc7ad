"""Draw faults from the source code, apply them, and mark their places with probes."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

KINDS = ("sign", "off by one", "missing call", "wrong order", "wrong dtype")

_SIGNS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")}
_BOUNDS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
_DTYPES = {"float32": "float16", "float16": "bfloat16", "bfloat16": "float32", "float64": "float32", "int64": "int32"}
_CASTS = {"float": "half", "half": "float", "double": "float"}
_SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Lambda)


@dataclass(frozen=True)
class Fault:
    """One change of the source code.

    Args:
        kind: One of :data:`KINDS`.
        file: Path relative to the checkout.
        function: Qualified name of the enclosing function.
        line: Number of the first changed line.
        statement: Number of the line of the changed statement. A probe before it records that the change is reached.
        before: The text that is replaced, as whole lines.
        after: The replacement, with the same number of lines.
    """

    kind: str
    file: str
    function: str
    line: int
    statement: int
    before: str
    after: str

    def __str__(self) -> str:
        changed = [
            pair for pair in zip(self.before.splitlines(), self.after.splitlines(), strict=True) if len(set(pair)) > 1
        ]
        old, new = (" | ".join(side.strip() for side in sides) for sides in zip(*changed, strict=True))
        return f"{self.file}:{self.line} {self.function}: {self.kind}\n    - {old}\n    + {new}"

    def apply(self, source: str) -> str:
        """Return the source with the fault."""
        lines, size = source.splitlines(keepends=True), len(self.before.splitlines())
        found = "".join(lines[self.line - 1 : self.line - 1 + size])
        assert found == self.before, f"{self.file}:{self.line} has changed since the faults were drawn"
        return "".join([*lines[: self.line - 1], self.after, *lines[self.line - 1 + size :]])


def draw(root: Path, number: int, seed: int, package: str = "trainer") -> list[Fault]:
    """Draw faults: every kind equally often, and from the subpackages in turn.

    Args:
        root: The checkout.
        number: Number of faults to draw.
        seed: Seed of the draw. The same source and seed give the same faults.
        package: Folder of the source.
    """
    by_room: dict[str, dict[str, list[Fault]]] = {}
    for path in sorted((root / package).rglob("*.py")):
        inner = path.relative_to(root / package)
        room = inner.parts[0] if len(inner.parts) > 1 else "."
        for fault in candidates(path.read_text(), str(path.relative_to(root))):
            by_room.setdefault(room, {}).setdefault(fault.kind, []).append(fault)
    generator, drawn = random.Random(seed), list[Fault]()
    rooms = sorted(by_room)
    generator.shuffle(rooms)
    turn = 0
    while len(drawn) < number and any(kinds for kinds in by_room.values()):
        kind = KINDS[len(drawn) % len(KINDS)]
        for shift in range(len(rooms)):
            found = by_room[rooms[(turn + shift) % len(rooms)]].get(kind)
            if found:
                drawn.append(found.pop(generator.randrange(len(found))))
                turn += shift + 1
                break
        else:
            break
    return drawn


def same_in(source: str, fault: Fault) -> Fault | None:
    """Return the same fault in another version of its file, or None if the changed lines are not in that function."""
    for other in candidates(source, fault.file):
        if (other.kind, other.function, other.before, other.after) == (
            fault.kind,
            fault.function,
            fault.before,
            fault.after,
        ):
            return other
    return None


def with_probes(source: str, faults: dict[int, Fault]) -> str:
    """Return the source with a call before the statement of each fault, which records that a test reaches it.

    The module that is called, ``mutation_probe``, must be in the package: programs that tests start may import from no
    other folder.

    Args:
        source: Source of the file that all these faults are in.
        faults: The faults by number.
    """
    lines = source.splitlines(keepends=True)
    for number, fault in sorted(faults.items(), key=lambda pair: -pair[1].statement):
        line = lines[fault.statement - 1]
        indent = line[: len(line) - len(line.lstrip())]
        lines.insert(
            fault.statement - 1, f"{indent}__import__('trainer.mutation_probe').mutation_probe.reach({number})\n"
        )
    return "".join(lines)


def candidates(source: str, file: str) -> Iterator[Fault]:
    """Return all faults that can be drawn from the bodies of a file's functions."""
    lines = source.splitlines(keepends=True)

    def fault(kind: str, function: str, statement: int, first: int, last: int, change: Callable[[str], str]) -> Fault:
        before = "".join(lines[first - 1 : last])
        return Fault(kind, file, function, first, statement, before, change(before))

    for function, body in _bodies(ast.parse(source), ""):
        for statement, following in zip(body, [*body[1:], None], strict=True):
            at = statement.lineno
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Call)
                and _is_worth_it(statement.value)
            ):
                size = statement.end_lineno - at  # type: ignore[operator]
                indent = " " * statement.col_offset
                text = f"{indent}pass\n" + "\n" * size
                yield fault("missing call", function, at, at, statement.end_lineno or at, lambda _, text=text: text)  # type: ignore[misc]
            if following is not None and _can_be_exchanged(statement, following):
                middle = statement.end_lineno or at
                first, second = lines[at - 1 : middle], lines[middle : following.end_lineno]
                text = "".join([*second, *first])
                yield fault("wrong order", function, at, at, following.end_lineno or middle, lambda _, text=text: text)  # type: ignore[misc]
            for kind, line, start, end, old, new in _edits(statement):
                row = lines[line - 1].encode()  # positions are in bytes
                place = row.find(old.encode(), start, end)
                if place >= 0:
                    text = (row[:place] + new.encode() + row[place + len(old.encode()) :]).decode()
                    yield fault(kind, function, at, line, line, lambda _, text=text: text)  # type: ignore[misc]


def _bodies(tree: ast.AST, prefix: str) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Return the lists of statements in functions, each with the function's qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _lists(node, f"{prefix}{node.name}")
            yield from _bodies(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from _bodies(node, f"{prefix}{node.name}.")
        elif not isinstance(node, ast.expr):
            yield from _bodies(node, prefix)


def _lists(node: ast.AST, name: str) -> Iterator[tuple[str, list[ast.stmt]]]:
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        parts = getattr(node, field, [])
        if not isinstance(parts, list) or not parts:
            continue
        if isinstance(parts[0], ast.stmt):
            is_elif = field == "orelse" and isinstance(node, ast.If) and isinstance(parts[0], ast.If)
            if not (is_elif and len(parts) == 1):  # a probe cannot stand before `elif`
                yield name, parts
        for part in parts:
            if not isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from _lists(part, name)


def _is_worth_it(call: ast.Call) -> bool:
    """Return whether leaving out the call is a fault. Calls that log, and calls of ``super()``, do not count."""
    text = ast.unparse(call.func)
    return not text.startswith("super()") and not text.endswith(("debug", "info", "warn", "warning", "print"))


def _can_be_exchanged(first: ast.stmt, second: ast.stmt) -> bool:
    """Return whether both statements are simple and have a call, and the second uses no name that the first assigns."""
    simple = (ast.Expr, ast.Assign, ast.AugAssign)
    if not (isinstance(first, simple) and isinstance(second, simple)) or first.end_lineno == second.lineno:
        return False
    if not any(isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) for one in (first, second)):
        return False
    if not all(any(isinstance(node, ast.Call) for node in ast.walk(one)) for one in (first, second)):
        return False
    assigned = {node.id for node in ast.walk(first) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return not any(isinstance(node, ast.Name) and node.id in assigned for node in ast.walk(second))


def _edits(statement: ast.stmt) -> Iterator[tuple[str, int, int, int, str, str]]:
    """Return changes within the expressions of one statement: kind, line, range of bytes, old and new text."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, _SKIPPED):
            continue
        annotation = getattr(node, "annotation", None)
        for child in ast.iter_child_nodes(node):
            if child is not annotation and (child is statement or not isinstance(child, ast.stmt)):
                waiting.append(child)
        if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS and not _is_text(node):
            yield from _between("sign", node.left, node.right, *_SIGNS[type(node.op)])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield "sign", node.lineno, node.col_offset, node.col_offset + 1, "-", "+"
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _BOUNDS:
            yield from _between("off by one", node.left, node.comparators[0], *_BOUNDS[type(node.ops[0])])
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            old, new = str(node.value), str(node.value + 1)
            yield "off by one", node.lineno, node.col_offset, node.end_col_offset or 0, old, new
        elif isinstance(node, ast.Attribute) and node.lineno == node.end_lineno:
            table = _DTYPES if isinstance(node.value, ast.Name) and node.value.id == "torch" else _CASTS
            if node.attr in table:
                start = (node.end_col_offset or 0) - len(node.attr)
                yield "wrong dtype", node.lineno, start, node.end_col_offset or 0, node.attr, table[node.attr]


def _between(
    kind: str, left: ast.expr, right: ast.expr, old: str, new: str
) -> Iterator[tuple[str, int, int, int, str, str]]:
    if left.end_lineno == right.lineno:
        yield kind, right.lineno, left.end_col_offset or 0, right.col_offset, old, new


def _is_text(node: ast.BinOp) -> bool:
    """Return whether an operand is a string or container, so that exchanging the operator raises immediately."""
    kinds = (ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple, ast.Dict, ast.Set)
    return any(
        isinstance(side, kinds) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )
