"""Apply a remedy as it is printed, and run the program again."""

from __future__ import annotations

import ast
import math
import re
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from _diagnosis.bench import Result, learns, run
from _diagnosis.programs import PROGRAMS, Program
from trainer.precision import MixedPrecision


class Cap(Callback):
    """Keep the learning rate at or below ``limit``."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = min(group["lr"], self.limit)


class Setting(Callback):
    """Change a setting of the optimizer."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group[self.name] = self.value


def edits_in(remedy: str, file: str) -> list[tuple[int, str]]:
    """Return the line numbers and the new statements of a remedy, last line first; "" removes a ``with``.

    Raises:
        ValueError: the remedy is for another file.
    """
    text = re.sub(r"remove torch.autocast in ([^\s,]+)(, and use .*)?", r"in \1 write: ", remedy)
    text = re.sub(r"^precision=\S+, and (?=in )", "", text)
    found = [re.fullmatch(r"(?:in )?(\S+):(\d+) write: (.*)", part) for part in text.split("; and in ")]
    if other := [one[1] for one in found if one is not None and one[1] != file]:
        raise ValueError(f"Got a remedy for {other[0]}, expected one for {file}.")
    return sorted(((int(one[2]), one[3]) for one in found if one is not None), reverse=True)


def remedy_in(text: str) -> str:
    """Return the remedy of the first verdict in a text.

    Raises:
        ValueError: the text has no remedy.
    """
    found = re.search(r"^ *Remedy: (.+?)(?:  \[tried: .*\])?$", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"Got no remedy in: {text!r}")
    return found[1]


@dataclass
class Execution:
    """A program that ran twice.

    Attributes:
        remedy: the remedy in the report of the first run, as printed.
        before, after: the runs without and with the remedy.
    """

    remedy: str
    before: Result
    after: Result

    @property
    def is_cured(self) -> bool:
        """Whether the second run learns and gets no report, and :attr:`is_same` is True."""
        return (
            self.after.error is None and learns(self.after.losses) and self.after.verdict == "healthy" and self.is_same
        )

    @property
    def is_same(self) -> bool:
        """Whether both runs have the same losses up to the first non-finite one, if the remedy replaces a line."""
        if " write: " not in self.remedy or "precision=" in self.remedy:
            return True
        pairs = zip(self.before.losses, self.after.losses, strict=False)
        finite = takewhile(lambda pair: math.isfinite(pair[0]), pairs)
        return all(math.isclose(old, new, rel_tol=0.1) for old, new in finite)


def execute(program: type[Program]) -> Execution:
    """Run a program, apply the remedy of its report, and run it again."""
    with tempfile.TemporaryDirectory() as folder:
        before = run(program, Path(folder))
    remedy = remedy_in(before.text)
    with tempfile.TemporaryDirectory() as folder:
        return Execution(remedy, before, apply(program, remedy, Path(folder)))


def apply(program: type[Program], remedy: str, folder: Path) -> Result:
    """Run the program with the remedy."""
    choice = re.search(r"\bprecision=(.+?)(?=, and in |$)", remedy)
    options = {} if choice is None else {"precision": eval(choice[1], {"MixedPrecision": MixedPrecision})}
    if found := re.search(
        r"leave out samples in which (.+?) (is not finite|is outside (-?\d+) to (\d+)|exceeds ([-+.e\d]+))", remedy
    ):
        return run(program, folder, batches=_without(program.batches(), found))
    if " write: " in remedy or "remove torch.autocast" in remedy:
        file = Path(str(sys.modules[program.__module__].__file__))
        return run(_edited_copy(file, edits_in(remedy, file.name), folder, program.__name__), folder, **options)
    if options:
        return run(program, folder, **options)
    if found := re.fullmatch(r"(momentum|weight_decay|maximize|eps)=(\S+)", remedy):
        return run(program, folder, callbacks=[Setting(found[1], ast.literal_eval(found[2]))])
    if found := re.search(r"a schedule that stays at lr=([-+.e\d]*\d)", remedy):
        return run(program, folder, callbacks=[Cap(float(found[1]))])
    if found := re.search(r"lr=([-+.e\d]*\d)", remedy):
        return run(program, folder, lr=float(found[1]))
    if found := re.search(r"If there are none: (.+)$", remedy):
        return run(program, folder, change=lambda model: exec(found[1], {"torch": torch, "model": model}))
    raise ValueError(f"Got the remedy {remedy!r}, which cannot be applied.")


def edited(text: str, line: int, statement: str) -> str:
    """Return the source with ``statement`` in place of the one that begins at ``line``, or without its ``with``.

    Raises:
        ValueError: no statement begins on the line.
    """
    lines = text.splitlines()
    statements = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.stmt) and one.lineno == line]
    if not statements:
        raise ValueError(f"Got line {line}, on which no statement begins.")
    old = statements[0]
    if isinstance(old, ast.With) and not statement:
        lines[line - 1] = " " * old.col_offset + "if True:"
        return "\n".join(lines) + "\n"
    lines[line - 1 : old.end_lineno] = [" " * old.col_offset + statement]
    return "\n".join(lines) + "\n"


def _edited_copy(file: Path, edits: list[tuple[int, str]], folder: Path, name: str) -> type[Program]:
    copy, text = folder / f"edited_{name.lower()}.py", file.read_text()
    for line, statement in edits:
        text = edited(text, line, statement)
    copy.write_text(text)
    spec = spec_from_file_location(copy.stem, copy)
    assert spec is not None
    assert spec.loader is not None
    module, registered = module_from_spec(spec), dict(PROGRAMS)
    sys.modules[copy.stem] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[copy.stem]
        PROGRAMS.update(registered)
    return getattr(module, name)  # type: ignore[no-any-return]


def _without(batches: list[Any], found: re.Match[str]) -> list[Any]:
    kept = []
    for batch in batches:
        tensors = [eval(name, {"batch": batch}) for name in found[1].split(" or ")]
        rows = torch.cat([tensor.reshape(len(tensor), -1).double() for tensor in tensors], dim=1)
        low, high = (int(found[3]), int(found[4])) if found[3] else (-math.inf, float(found[5] or math.inf))
        index = (rows.isfinite() & (rows >= low) & (rows <= high)).all(dim=1)
        if index.any():
            names = batch.keys() if isinstance(batch, dict) else range(len(batch))
            parts = {name: part[index] if isinstance((part := batch[name]), Tensor) else part for name in names}
            kept.append(parts if isinstance(batch, dict) else list(parts.values()))
    return kept
