"""Apply a remedy as it is printed, and run the program again."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from importlib.util import module_from_spec, spec_from_file_location
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from _diagnosis.bench import Result, learns, run
from _diagnosis.programs import PROGRAMS, Program
from trainer.diagnosis.patch import CallSites, make_patch
from trainer.diagnosis.remedies import Setting
from trainer.diagnosis.report_file import Diagnosis
from trainer.precision import MixedPrecision


class Rates(Callback):
    """Keep the learning rate at or below a limit, or change another setting of the optimizer."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for group in trainer.optimizers[0].param_groups:
            group[self.name] = min(group["lr"], self.value) if self.name == "lr" else self.value


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
    """Run a program, apply the remedy of its first report, and run it again.

    Raises:
        ValueError: the program has no report.
    """
    with tempfile.TemporaryDirectory() as folder:
        before = run(program, Path(folder))
    if not before.reports:
        raise ValueError(f"Got no remedy in: {before.text!r}")
    with tempfile.TemporaryDirectory() as folder:
        return Execution(before.reports[0].remedy, before, apply(program, before.reports[0], Path(folder)))


def apply(program: type[Program], report: Diagnosis, folder: Path) -> Result:
    """Run the program with the remedy of a report."""
    remedy, options = report.remedy, dict[str, Any]()
    if found := re.search(
        r"leave out samples in which (.+?) (is not finite|is outside (-?\d+) to (\d+)|exceeds ([-+.e\d]+))", remedy
    ):
        return run(program, folder, batches=_without(program.batches(), found))
    if found := re.search(r"If there are none: (.+)$", remedy):
        return run(program, folder, change=lambda model: exec(found[1], {"torch": torch, "model": model}))
    for setting in [change for change in report.changes if isinstance(change, Setting)]:
        if setting.owner == "trainer":
            options["precision"] = eval(setting.code, {"MixedPrecision": MixedPrecision})
        else:
            options |= {"callbacks": [Rates(setting.name, setting.value)]}
    if found := re.search(r"a schedule that stays at lr=([-+.e\d]*\d)", remedy):
        options["callbacks"] = [Rates("lr", float(found[1]))]
    code = tuple(change for change in report.changes if not isinstance(change, Setting))
    if not (code or options):
        raise ValueError(f"Got the remedy {remedy!r}, which cannot be applied.")
    code_only = replace(report, changes=code, figures={}, tried=report.tried or "not tried")
    return run(_patched_copy(program, code_only, folder) if code else program, folder, **options)


def _patched_copy(program: type[Program], report: Diagnosis, folder: Path) -> type[Program]:
    file = Path(str(sys.modules[program.__module__].__file__))
    patch = make_patch(report, CallSites(), file.parent)
    copy = folder / file.name
    copy.write_text(file.read_text())
    subprocess.run(["git", "apply"], input=patch.text, text=True, cwd=folder, check=True)
    spec = spec_from_file_location(f"patched_{program.__name__.lower()}", copy)
    assert spec is not None
    assert spec.loader is not None
    module, registered = module_from_spec(spec), dict(PROGRAMS)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
        PROGRAMS.update(registered)
    return getattr(module, program.__name__)  # type: ignore[no-any-return]


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
