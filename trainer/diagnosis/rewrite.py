"""Propose lines of code that guard operations, and run them instead of the lines that fail."""

from __future__ import annotations

import ast
import copy
import linecache
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from trainer.diagnosis.trace import Origin

HINTS = {
    "div": "a denominator of 0: add .clamp(min=1e-6) to it",
    "log": "the logarithm of 0: add .clamp(min=1e-6) to its input",
    "sqrt": "a root at 0 has an infinite gradient: add .clamp(min=1e-6) to its input",
    "pow": "a root of a number that is not positive: add .clamp(min=1e-6) to it",
    "exp": "an exponential of a large number: add .clamp(max=20) to its input",
    "acos": "its gradient at 1 is infinite: clamp its input to 1 - 1e-6",
    "logit": "the logit of 0 or 1: pass eps=1e-6",
    "std": "the standard deviation of one sample: pass correction=0",
    "var": "the variance of one sample: pass correction=0",
    "softmax": "a row of nothing but -inf: leave one element unmasked, or fill with -1e4",
    "log_softmax": "a row of nothing but -inf: leave one element unmasked, or fill with -1e4",
    "mean": "the mean of no elements: skip the batch, or divide the sum by max(number, 1)",
    "multi_head_attention_forward": "a query with all of its keys masked: leave one key unmasked",
    "scaled_dot_product_attention": "a query with all of its keys masked: leave one key unmasked",
    "linalg_eigh": "eigenvectors of equal eigenvalues have no gradient: add different values near 1e-6 to the diagonal",
    "ctc_loss": "a target is longer than its input: pass zero_infinity=True",
    "mse_loss": "the mean of no elements: skip the batch, or divide the sum by max(number, 1)",
    "mul": "a factor is not finite, or 0 times inf is nan: correct a constant factor, and clamp one that is computed",
    "cosh": "it grows like an exponential: add .clamp(min=-20, max=20) to its input",
    "linalg_svd": "singular vectors of equal singular values have no gradient: add different values near 1e-6 to the"
    " diagonal",
    "logdet": "the determinant is not positive: use torch.linalg.slogdet, and keep the matrix regular",
    "weight_norm": "the norm of its weight is 0: initialize the weight with other values than 0",
    "linear": "its input or weight is too large: initialize the weights with a smaller deviation, or add a"
    " normalization",
    "matmul": "its inputs are too large: initialize the weights with a smaller deviation, or add a normalization",
    "cross_entropy": "all labels are ignored or have weight 0: divide the sum by the number of labels, at least 1; or"
    " a label has a logit of -inf: fill with -1e4",
}
OTHER_HINT = "limit its input to numbers with a finite result and a finite gradient"
_LOW, _FILL, _ONE = {"min": 1e-6}, {"min": -1e4}, {"min": -1 + 1e-6, "max": 1 - 1e-6}
_HIGHER = {"min": 0.01}  # smaller gradients
_HIGH, _WIDE = {"max": 20.0}, {"min": -20.0, "max": 20.0}
_CLAMPS: dict[str, dict[str, float]] = {
    "log": _LOW, "log2": _LOW, "log10": _LOW, "sqrt": _LOW, "rsqrt": _LOW, "pow": _LOW, "reciprocal": _LOW,
    "exp": _HIGH, "exp2": _HIGH, "expm1": _HIGH, "cosh": _WIDE, "sinh": _WIDE, "lgamma": _LOW, "digamma": _LOW,
    "softmax": _FILL, "log_softmax": _FILL, "acos": _ONE, "asin": _ONE, "atanh": _ONE, "erfinv": _ONE,
    "log1p": {"min": -1 + 1e-6},
}  # fmt: skip
_HALF = ("half", "float16", "bfloat16")
_ARGUMENTS: dict[str, tuple[str, Any]] = {
    "ctc_loss": ("zero_infinity", True), "logit": ("eps", 1e-6), "std": ("correction", 0), "var": ("correction", 0),
}  # fmt: skip
FAILS_AT_0 = [name for name, limits in _CLAMPS.items() if limits is _LOW]
"""Functions that are not finite, or have no finite gradient, at 0."""
_KINDS = 3
_MEAN_LOSSES = ("cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


class Change(NamedTuple):
    """Statements that replace others.

    Attributes:
        file: the file of the code.
        edits: for each replaced statement, the line on which it begins, and what turns it into the new one. A line may
            occur several times.
    """

    file: str
    edits: tuple[tuple[int, ast.NodeTransformer], ...]

    def __str__(self) -> str:
        """Return the edits as text: "in FILE:LINE write: STATEMENT". In a notebook, the line of the cell is given."""
        return "in " + "; and in ".join(f"{place(self.file, old.lineno)} write: {new}" for old, new in self.replaced())

    def replaced(self) -> list[tuple[ast.stmt, str]]:
        """Return each statement that changes, and the new one."""
        old = _statements(_parse_file(self.file))
        new = {id(statement): statement for statement in self._edited(copy.deepcopy(old))}
        pairs = zip(old, map(ast.unparse, new.values()), strict=True)
        return [(before, after) for before, after in pairs if after != ast.unparse(before)]

    def also(self, other: Change) -> Change:
        """Return both changes together. They must be in the same file."""
        return self._replace(edits=(*self.edits, *other.edits))

    def _edited(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        for statement in statements:
            for line, transformer in self.edits:
                if statement.lineno == line:
                    transformer.visit(statement)
                    for node in ast.walk(statement):
                        ast.copy_location(node, statement)
        return statements

    @contextmanager
    def applied(self, owners: Iterable[type]) -> Iterator[bool]:
        """A context in which the new statements run; yields False if a function that contains them is not found.

        Args:
            owners: classes that may have the functions as methods, or inherit them.
        """
        tree = _parse_file(self.file)
        self._edited(_statements(tree))
        wanted = {line for line, _ in self.edits}
        codes = [c for c in _codes_in(compile(tree, self.file, "exec")) if wanted & {n for *_, n in c.co_lines()}]
        by_key = {_key(code): code for code in codes}
        functions = [function for function in _functions_of(self.file, owners) if _key(function.__code__) in by_key]
        before = [function.__code__ for function in functions]
        try:
            for function in functions:
                function.__code__ = by_key[_key(function.__code__)]
            yield wanted <= {n for function in functions for *_, n in function.__code__.co_lines()}
        finally:
            for function, code in zip(functions, before, strict=True):
                function.__code__ = code


class Removal(NamedTuple):
    """A ``with torch.autocast(...)`` that is removed, but not its body."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"remove torch.autocast in {place(self.file, self.line)}"


def place(file: str, line: int) -> str:
    """Return a place as text: "FILE:LINE", or "line LINE of the cell" in a notebook."""
    path = Path(file)
    is_cell = file.startswith("<") or path.parent.name.startswith("ipykernel_")
    return f"line {line} of the cell" if is_cell else f"{path.name}:{line}"


def propose(origin: Origin) -> Iterator[Change]:
    """Yield statements that guard the operation, the most usual first; none if no rule covers it."""
    for statement in _statements(_parse_file(origin.file)):
        if statement.lineno <= origin.line <= (statement.end_lineno or 0):
            guards = [_Guard(origin.name, kind, origin.module.rpartition(".")[2]) for kind in range(_KINDS)]
            changes = [change for guard in guards for change in _changed(origin.file, statement, guard)]
            yield from {str(change): change for change in changes}.values()


def widen(origin: Origin) -> Iterator[Change]:
    """Yield at most eight changes of statements that cast to 16 bits: they use float32 instead.

    Statements up to the line of the operation come first, from the nearest.
    """
    file = origin.file
    casts = [change for statement in _statements(_parse_file(file)) for change in _changed(file, statement, _Widen())]
    yield from sorted(casts, key=lambda cast: (cast.edits[0][0] > origin.line, abs(cast.edits[0][0] - origin.line)))[:8]


def _parse_file(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)) if file else "")
    except SyntaxError:  # not Python code
        return ast.parse("")


def _statements(tree: ast.Module) -> list[ast.stmt]:
    """Return the statements that contain no other statement."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and not isinstance(node, ast.Match)
    ]


def _changed(file: str, statement: ast.stmt, transformer: ast.NodeTransformer) -> Iterator[Change]:
    old, new = ast.unparse(statement), ast.unparse(transformer.visit(copy.deepcopy(statement)))
    if new != old:
        yield Change(file, ((statement.lineno, transformer),))


class _Widen(ast.NodeTransformer):
    """Replaces dtypes and casts of 16 bits by float32."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and not node.args:
            node.func.attr = {"half": "float", "bfloat16": "float"}.get(node.func.attr, node.func.attr)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in _HALF:
            node.attr = "float32"
        return node


class _Guard(ast.NodeTransformer):
    """Guards the calls and operators of one name.

    Args:
        name: the name of the operation.
        kind: which guard to use: 0 for the most usual one. With 1, the lower limit is 0.01, an exponential fits
            float16, a mean of nothing becomes 0, and the second factor of a product is limited. With 2, a quotient by
            about 0 becomes 0, the first factor is limited, and so are the logits of a cross-entropy.
        module: the name of the module that calls the operation; "" for the LightningModule.
    """

    def __init__(self, name: str, kind: int, module: str) -> None:
        self._name = name
        self._kind = kind
        self._module = module

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if self._name == "div" and isinstance(node.op, ast.Div):
            node.right = self._divisor(node.right)
        if self._name in ("pow", "sqrt") and isinstance(node.op, ast.Pow) and _is_root(node.right):
            node.left = self._above_0(node.left)
        if self._name == "mul" and isinstance(node.op, ast.Mult):
            if not self._kind:
                return _expression(f"({ast.unparse(node)}).nan_to_num(0.0)")
            name = "right" if self._kind == 1 else "left"
            setattr(node, name, _limited(getattr(node, name)))
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if self._name == "div" and isinstance(node.op, ast.Div):
            node.value = self._divisor(node.value)
        return node

    def _divisor(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Constant):
            return node
        text = ast.unparse(node)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "len":  # a Python number
            return _expression(f"max({text}, 1)")
        return (
            _expression(f"torch.where(({text}).abs() < 1e-06, torch.inf, {text})")
            if self._kind == 2
            else self._above_0(node)
        )

    def _above_0(self, node: ast.expr) -> ast.expr:
        return _clamped(node, _HIGHER if self._kind == 1 else _LOW)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        is_module = bool(self._module) and called == self._module
        if is_module or (self._kind and called == self._name in (*_MEAN_LOSSES, "mean")):
            if self._name == "cross_entropy" and self._kind == 2 and node.args:
                node.args[0] = _clamped(node.args[0], _FILL)
                return node
            has_rule = self._name in (*_MEAN_LOSSES, "mean")
            return _expression(f"{ast.unparse(node)}.nan_to_num(0.0)") if has_rule else node
        if called != self._name:
            return node
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        given = {keyword.arg for keyword in node.keywords}
        if called in _CLAMPS:
            limits = {"max": 10.0} if self._kind and called == "exp" else _CLAMPS[called]
            limits = _HIGHER if self._kind == 1 and limits is _LOW else limits
            if called == "pow" and not _is_root(node.args[-1]):
                return node
            if isinstance(owner, ast.Name) and owner.id in ("torch", "F", "functional"):
                node.args[0] = _clamped(node.args[0], limits)
            elif isinstance(node.func, ast.Attribute):
                node.func.value = _clamped(node.func.value, limits)
        elif called == "div" and node.args:
            node.args[-1] = self._divisor(node.args[-1])
        elif called in _ARGUMENTS:
            name, value = _ARGUMENTS[called]
            keywords = [keyword for keyword in node.keywords if keyword.arg not in (name, "unbiased")]
            node.keywords = [*keywords, ast.keyword(name, ast.Constant(value))]
        elif called == "mean" and not node.args and not given and owner is not None:
            return _expression("({0}).sum() / max(({0}).numel(), 1)".format(ast.unparse(owner)))
        elif called in _MEAN_LOSSES and len(node.args) > 1 and "reduction" not in given:
            second = ast.unparse(node.args[1])
            ignored = next(
                (ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "ignore_index"), "-100"
            )
            has_labels = called == "cross_entropy"
            number = f"({second} != {ignored}).sum().clamp(min=1)" if has_labels else f"max({second}.numel(), 1)"
            if weight := next((ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "weight"), ""):
                number = f"{weight}[{second}].sum().clamp(min=1e-6)"
            node.keywords.append(ast.keyword("reduction", ast.Constant("sum")))
            return _expression(f"{ast.unparse(node)} / {number}")
        return node


def _is_root(exponent: ast.expr) -> bool:
    """Return whether a power with this exponent, or its gradient, may not be finite for a base of 0 or below."""
    try:
        value = ast.literal_eval(exponent)
    except ValueError:
        return True
    return not (isinstance(value, (int, float)) and value >= 0 and float(value).is_integer())


def _limited(node: ast.expr) -> ast.expr:
    """Limit a factor of a product to the range from -10,000 to 10,000. Finite constants are returned unchanged."""
    text = ast.unparse(node)
    if re.fullmatch(r"-?((math|torch|np|numpy)\.)?inf|float\(.*inf.*\)", text):
        return ast.Constant(-1e4 if "-" in text else 1e4)
    return node if isinstance(node, ast.Constant) else _clamped(node, {"min": -1e4, "max": 1e4})


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _clamped(node: ast.expr, limits: dict[str, float]) -> ast.expr:
    words = ", ".join(f"{name}={value}" for name, value in limits.items())
    return _expression(f"({ast.unparse(node)}).clamp({words})")


def _key(code: CodeType) -> tuple[Any, ...]:
    return code.co_qualname, code.co_firstlineno, code.co_freevars


def _functions_of(file: str, owners: Iterable[type]) -> list[FunctionType]:
    spaces: list[Mapping[str, Any]] = [vars(cls) for owner in owners for cls in owner.__mro__]
    modules = [vars(module) for module in list(sys.modules.values()) if getattr(module, "__file__", None) == file]
    classes = [vars(item) for module in modules for item in list(module.values()) if isinstance(item, type)]
    spaces += [*modules, *classes]
    values = [getattr(item, "__func__", item) for space in spaces for item in list(space.values())]  # of static methods
    functions = [value for value in values if isinstance(value, FunctionType)]
    unique = {id(function): function for function in functions}.values()
    return [function for function in unique if function.__code__.co_filename == file]


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_in(constant)
