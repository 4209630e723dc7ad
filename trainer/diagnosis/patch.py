"""Write a remedy as a patch of the program's files, and try it on the steps after the failing batch."""

from __future__ import annotations

import ast
import difflib
import hashlib
import inspect
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from inspect import currentframe
from itertools import islice
from operator import attrgetter
from pathlib import Path
from traceback import walk_stack
from typing import Any, NamedTuple

import torch

from trainer.common.packages import is_users_file
from trainer.diagnosis import remedies
from trainer.diagnosis.diagnose import Case, are_finite
from trainer.diagnosis.remedies import Setting
from trainer.diagnosis.replay import FLOAT32, UNCHANGED, Variant
from trainer.diagnosis.report_file import Diagnosis
from trainer.diagnosis.rewrite import Change, Removal, place
from trainer.loop.run_state import RunState
from trainer.precision.names import match
from trainer.precision.registry import PLUGINS

_BATCHES = 8
"""Maximum number of batches to try a remedy on."""
_HOPS = 4
"""Maximum number of names between a literal and the argument that gets its value."""
_POSITION = attrgetter("lineno", "end_lineno", "col_offset", "end_col_offset")
_PACKAGES = ("lightning", "pytorch_lightning")


class Site(NamedTuple):
    """A call in the program: its file, and its position as in ``ast``."""

    file: str
    line: int
    end_line: int
    column: int
    end_column: int


@dataclass
class CallSites:
    """The calls with which the program creates its Trainers and its optimizers."""

    trainers: list[Site] = field(default_factory=list)
    optimizers: list[Site] = field(default_factory=list)


@dataclass
class Patch:
    """A remedy, written for the program's files.

    Attributes:
        text: unified diff with paths relative to the folder; "" if the remedy cannot be written as one.
        line: the remedy as an instruction with the place; "" if it changes no code and no argument.
        note: an explanation, or the reason that there is no diff; may be "".
        digests: SHA-256 of each file that the diff changes, before the change, by its path relative to the folder.
        edits: the diff as new texts for parts of these files, each between two byte offsets, the last one first.
    """

    text: str = ""
    line: str = ""
    note: str = ""
    digests: dict[str, str] = field(default_factory=dict)
    edits: dict[str, list[_Edit]] = field(default_factory=dict)


class _NoDiffError(Exception):
    """The remedy cannot be written as a diff, for the given reason."""


class _Edit(NamedTuple):
    """New text for a part of a file, between two byte offsets."""

    start: int
    end: int
    text: str


def call_site() -> Site | None:
    """Return the innermost call in the program's code that has led to the caller, or None."""
    for frame, _ in islice(walk_stack(currentframe()), 2, None):
        if is_users_file(file := frame.f_code.co_filename) and Path(file).is_file():
            positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
            return None if None in positions else Site(file, *positions)  # type: ignore[arg-type]
    return None


def make_patch(report: Diagnosis, sites: CallSites, folder: Path) -> Patch:
    """Write the remedy of a report as a patch of the files in a folder, and of no others.

    Args:
        report: the report.
        sites: the calls that create the Trainer and the optimizers.
        folder: the folder that the paths in the patch are relative to.
    """
    patch = Patch(line="; ".join(_lines(report, sites)))
    before, after = report.figures.get("steps", (0.0, 0.0))
    try:
        if not after <= before + 0.1 * abs(before):
            raise _NoDiffError(f"the loss goes from {before:.3g} to {after:.3g} in a few steps with it")
        if report.changes and not (report.tried or "steps" in report.figures):
            raise _NoDiffError("the change could not be tried")
        files = _Files(folder.resolve(), {site.file for site in (*sites.trainers, *sites.optimizers)})
        for change in report.changes:
            if isinstance(change, Change):
                files.replace_statements(change)
            elif isinstance(change, Removal):
                files.remove_with(change)
            elif change.owner == "trainer":
                patch.note = files.set_precision(change, sites.trainers)
            else:
                for site in dict.fromkeys(sites.optimizers):
                    files.set_argument(change, site)
                if not sites.optimizers:
                    raise _NoDiffError("no call in the program creates an optimizer")
        patch.text, patch.digests, patch.edits = files.diff(), files.digests(), files.edits()
    except _NoDiffError as reason:
        patch.note = f"No patch was written, because {reason}."
    return patch


def _lines(report: Diagnosis, sites: CallSites) -> Iterator[str]:
    for change in report.changes:
        if not isinstance(change, Setting):
            yield f"{change}"
            continue
        calls = sites.trainers if change.owner == "trainer" else sites.optimizers
        where = " and ".join(dict.fromkeys(place(site.file, site.line) for site in calls))
        name = "Trainer" if change.owner == "trainer" else "the optimizer"
        yield f"{f'in {where} ' if where else ''}pass {change.name}={change.code} to {name}"


class _Files:
    """The program's files, and their edits.

    Args:
        folder: the folder of the files that may be changed.
        files: files to search in addition to the modules that are loaded.
    """

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        self._folder = folder
        self._edits: dict[Path, set[_Edit]] = {}
        self._data: dict[Path, bytes] = {}
        self._trees: dict[Path, ast.Module] = {}
        loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        for file in (*files, *loaded):
            if file and self._is_own(path := Path(file).resolve()):
                self._parse(path)

    def _is_own(self, path: Path) -> bool:
        return (
            path.suffix == ".py" and path.is_relative_to(self._folder) and is_users_file(f"{path}") and path.is_file()
        )

    def _parse(self, path: Path) -> ast.Module:
        if path not in self._trees:
            if not self._is_own(path):
                raise _NoDiffError(f"{path} is not a Python file of the program's folder")
            try:
                self._data[path] = path.read_bytes()
                self._trees[path] = ast.parse(self._data[path])
            except (OSError, SyntaxError, ValueError) as error:
                raise _NoDiffError(f"{path} cannot be read: {error}") from None
        return self._trees[path]

    def _span(self, path: Path, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """Return the byte offsets of a node."""
        starts = [0]
        for line in self._data[path].split(b"\n"):
            starts.append(starts[-1] + len(line) + 1)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def _edit(self, path: Path, span: tuple[int, int], text: str) -> None:
        self._edits.setdefault(path, set()).add(_Edit(*span, text))

    def _replace(self, path: Path, node: ast.expr | ast.stmt | ast.keyword, text: str) -> None:
        self._edit(path, self._span(path, node), text)

    def replace_statements(self, change: Change) -> None:
        """Write new statements in place of old ones."""
        path = Path(change.file).resolve()
        self._parse(path)
        for old, new in change.replaced():
            self._replace(path, old, new)

    def remove_with(self, removal: Removal) -> None:
        """Remove a ``with`` statement, or its context, but not its body."""
        path = Path(removal.file).resolve()
        withs = [node for node in ast.walk(self._parse(path)) if isinstance(node, ast.With)]
        old = next((node for node in withs if node.lineno <= removal.line < node.body[0].lineno), None)
        if old is None:
            raise _NoDiffError(f"torch.autocast is not in a `with` statement in {place(*removal)}")
        others = [item for item in old.items if "autocast" not in ast.unparse(item.context_expr)]
        if others:
            first, last = old.items[0].context_expr, old.items[-1].optional_vars or old.items[-1].context_expr
            span = self._span(path, first)[0], self._span(path, last)[1]
            self._edit(path, span, ", ".join(map(ast.unparse, others)))
            return
        texts = [node for node in ast.walk(old) if isinstance(node, (ast.Constant, ast.JoinedStr))]
        inside = {n for node in texts for n in range(node.lineno + 1, (node.end_lineno or 0) + 1)}
        span = self._span(path, old)
        shift, lines = old.body[0].col_offset - old.col_offset, self._data[path][: span[1]].decode().split("\n")
        codes = {n: lines[n - 1].partition("#")[0].rstrip() for n in range(removal.line, old.body[0].lineno)}
        colon = next(n for n, code in codes.items() if code.endswith(":"))
        body = range(colon + 1, (old.end_lineno or 0) + 1)
        kept = [lines[n - 1] if n in inside else lines[n - 1].removeprefix(" " * shift) for n in body]
        self._edit(path, span, "\n".join(kept)[old.col_offset :])

    def set_argument(self, setting: Setting, site: Site) -> None:
        """Write the value of an argument at the call, or the literal that the argument gets its value from."""
        path = Path(site.file).resolve()
        call = self._call(path, site)
        is_direct = _last_name(call.func) == "Trainer" or hasattr(torch.optim, _last_name(call.func))
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        value = given.get(setting.name)
        if value is None and is_direct and setting.owner == "optimizer":
            names = list(inspect.signature(getattr(torch.optim, _last_name(call.func))).parameters)
            position = names.index(setting.name) if setting.name in names else len(call.args)
            value = call.args[position] if position < len(call.args) else None
        if value is not None and _fits(value, setting):
            self._replace(path, value, setting.code)
            return
        if value is None and is_direct and None not in given:
            arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
            end = max((self._span(path, argument)[1] for argument in arguments), default=self._span(path, call)[1] - 1)
            self._edit(path, (end, end), f"{', ' if arguments else ''}{setting.name}={setting.code}")
            return
        literals = self._literals({setting.name} if value is None else _names_in(value), setting)
        if len(literals) != 1:
            several = "several literals set" if literals else "no literal in the program's files sets"
            old = "" if setting.old is None else f"={setting.old}"
            raise _NoDiffError(f"{several} {setting.name}{old}")
        if literals[0][0] != path and "(" in setting.code:
            raise _NoDiffError(f"{literals[0][0].name} would need its import, too")
        self._replace(*literals[0], setting.code)

    def _call(self, path: Path, site: Site) -> ast.Call:
        for node in ast.walk(self._parse(path)):
            if isinstance(node, ast.Call) and _POSITION(node) == site[1:]:
                return node
        raise _NoDiffError(f"no call was found in {place(site.file, site.line)}")

    def _literals(self, names: set[str], setting: Setting) -> list[tuple[Path, ast.expr]]:
        """Return the literals that fit the setting and are bound to one of the names with the fewest names between."""
        bound = [
            (path, *pair) for path, tree in self._trees.items() for node in ast.walk(tree) for pair in _bound(node)
        ]
        for _ in range(_HOPS):
            values = [(path, value) for path, name, value in bound if name in names]
            if literals := [(path, value) for path, value in values if _fits(value, setting)]:
                return literals
            names = names.union(*(_names_in(value) for _, value in values))
        return []

    def set_precision(self, setting: Setting, sites: list[Site]) -> str:
        """Write the Trainer's precision, and return a note. ``MixedPrecision`` needs this project's Trainer."""
        if len(set(sites)) != 1:
            raise _NoDiffError(f"{len(set(sites))} calls create a Trainer")
        path = Path(sites[0].file).resolve()
        call = self._call(path, sites[0])
        note = "" if isinstance(setting.value, str) else self._import_trainer(path, call)
        given = {keyword.arg: keyword for keyword in call.keywords}
        plugins = given.get("plugins")
        if plugins is not None and "MixedPrecision(" in ast.unparse(plugins.value):
            if isinstance(plugins.value, ast.List) and len(plugins.value.elts) > 1:
                raise _NoDiffError("the Trainer has several plugins")
            self._replace(path, plugins, f"precision={setting.code}")
        elif "precision" in given and not isinstance(setting.value, str):
            self._replace(path, given["precision"].value, setting.code)
        else:
            self.set_argument(setting, sites[0])
        return note

    def _import_trainer(self, path: Path, call: ast.Call) -> str:
        """Write the imports of this project's Trainer and ``MixedPrecision``, and return a note."""
        scopes: list[Any] = [node for node in ast.walk(self._trees[path]) if isinstance(node, ast.FunctionDef)]
        scopes = [self._trees[path], *(node for node in scopes if node.lineno <= call.lineno <= (node.end_lineno or 0))]
        statements = [node for scope in scopes for node in scope.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        theirs = [node for node in statements if _packages_of(node) & {*_PACKAGES}]
        ours = [alias.name for node in statements if "trainer" in _packages_of(node) for alias in node.names]
        if "Trainer" not in ours:
            if not theirs or _last_name(call.func) != "Trainer":
                raise _NoDiffError(f"{ast.unparse(call.func)} in {place(f'{path}', call.lineno)} is not Lightning's")
            if not isinstance(call.func, ast.Name):
                self._replace(path, call.func, "Trainer")
        lines = [] if "Trainer" in ours else ["from trainer import Trainer"]
        lines += [] if "MixedPrecision" in ours else ["from trainer.precision import MixedPrecision"]
        anchor = max(theirs or statements, key=lambda node: node.lineno)
        end, indent = self._span(path, anchor)[1], f"\n{' ' * anchor.col_offset}"
        self._edit(path, (end, end), "".join(f"{indent}{line}" for line in lines))
        if first := [node for node in theirs if "pytorch_lightning" in _packages_of(node)]:
            start = self._span(path, first[0])[0]
            self._edit(path, (start, start), f"import trainer.pytorch_lightning\n{' ' * first[0].col_offset}")
        if "Trainer" in ours:
            return ""
        return (
            "Lightning's Trainer does not have this precision, so the patch also imports `trainer.Trainer`, which takes"
            " the same arguments."
        )

    def diff(self) -> str:
        """Return the edits as a unified diff."""
        parts: list[str] = []
        for path in sorted(self._edits):
            data = self._data[path]
            for edit in sorted(self._edits[path], reverse=True):
                data = data[: edit.start] + edit.text.encode() + data[edit.end :]
            try:
                ast.parse(data)
            except SyntaxError:
                raise _NoDiffError(f"{path} would no longer be Python code") from None
            name = self._name(path)
            end = "\t" if " " in name else ""  # for names with spaces
            old, new = (text.decode().split("\n") for text in (self._data[path], data))
            before, after = ([*(f"{line}\n" for line in text[:-1]), *text[-1:]] for text in (old, new))
            before, after = ([line for line in text if line] for text in (before, after))
            for line in difflib.unified_diff(before, after, f"a/{name}{end}", f"b/{name}{end}"):
                parts.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
        return "".join(parts)

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each file with edits."""
        return {self._name(path): hashlib.sha256(self._data[path]).hexdigest() for path in self._edits}

    def edits(self) -> dict[str, list[_Edit]]:
        """Return the edits of each file, the last one first."""
        return {self._name(path): sorted(new, reverse=True) for path, new in self._edits.items()}

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()


def _fits(value: ast.expr, setting: Setting) -> bool:
    """Return whether an expression is a literal with the current value of a setting."""
    try:
        literal = ast.literal_eval(value)
    except ValueError:
        return False
    if setting.owner == "trainer":
        return isinstance(literal, (int, str)) and match(literal, PLUGINS) is not None
    return setting.old is not None and type(literal) in (bool, int, float) and bool(literal == setting.old)


def _bound(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a node binds, with their values: arguments, defaults, entries of dicts, assignments."""
    if isinstance(node, ast.Call):
        flags = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        for keyword in node.keywords:
            names = flags if _last_name(node.func) == "add_argument" and keyword.arg == "default" else [keyword.arg]
            yield from ((name.lstrip("-").replace("-", "_"), keyword.value) for name in names if name)
    elif isinstance(node, ast.arguments):
        positional = [*node.posonlyargs, *node.args]
        pairs = [
            *zip(positional[::-1], node.defaults[::-1], strict=False),
            *zip(node.kwonlyargs, node.kw_defaults, strict=True),
        ]
        yield from ((name.arg, value) for name, value in pairs if value is not None)
    elif isinstance(node, ast.Dict):
        pairs_of_dict = zip(node.keys, node.values, strict=True)
        yield from (
            (key.value, value)
            for key, value in pairs_of_dict
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        )
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from ((name, node.value) for name in [_last_name(target)] if name)


def _last_name(node: ast.expr) -> str:
    """Return the last name in ``name``, ``owner.name`` or ``owner["name"]``."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return f"{node.slice.value!s}"
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _names_in(value: ast.expr) -> set[str]:
    texts = {node.value for node in ast.walk(value) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return texts | {name for node in ast.walk(value) if isinstance(node, ast.expr) and (name := _last_name(node))}


def _packages_of(statement: ast.Import | ast.ImportFrom) -> set[str]:
    names = (
        [statement.module or ""] if isinstance(statement, ast.ImportFrom) else [alias.name for alias in statement.names]
    )
    return {name.partition(".")[0] for name in names}


def try_steps(run: RunState, case: Case, report: Diagnosis) -> None:
    """Try the changes of a report on a few steps, from the weights before the failing batch; restore everything.

    The steps repeat the failing batch and the recorded ones after it and before it. ``report.figures["steps"]`` becomes
    the mean losses of the first and of the last pass. They are inf if a loss is not finite or the losses rise, and nan
    if a step fails. Nothing is tried if steps cannot be repeated (:func:`~trainer.diagnosis.remedies.can_step`).
    """
    batches = [*(case.since or case.batches), *case.recent[::-1]][:_BATCHES]
    if not report.changes or not batches or not remedies.can_step(run) or not (case.before or are_finite(run.module)):
        return
    variant, scale, settings = UNCHANGED, case.scale, dict[str, Any]()
    with ExitStack() as stack:
        for change in report.changes:
            if isinstance(change, Change):
                stack.enter_context(change.applied({type(submodule) for submodule in run.module.modules()}))
            elif isinstance(change, Removal):
                variant = variant._replace(own_autocast=False)
            elif change.owner == "optimizer":
                settings[change.name] = change.value
            elif change.value == "16-mixed":
                return  # the optimizer steps with float16 weights
            elif isinstance(change.value, str):
                wide = Variant(torch.bfloat16) if change.value == "bf16-mixed" else FLOAT32
                variant, scale = wide._replace(own_autocast=variant.own_autocast), 1.0
            else:
                variant = variant._replace(modules=change.value.get("fp32_modules", ()))
                scale = change.value.get("init_scale", scale)
        stack.enter_context(remedies.weights_of(run, case.before))
        steps = math.nan, math.nan
        with suppress(Exception):  # the user's code may fail if it runs twice
            steps = remedies.try_steps(run, batches, variant, settings, scale)
    report.figures = {**report.figures, "steps": steps}
