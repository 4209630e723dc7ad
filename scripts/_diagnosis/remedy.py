"""Applies a remedy as it is printed, and runs the program again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from _diagnosis import programs
from _diagnosis.bench import Result, run
from trainer.postmortem.rewrite import Change
from trainer.precision import MixedPrecision


class Cap(Callback):
    """A schedule that stays at a learning rate."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = min(group["lr"], self.limit)


def remedy_in(text: str) -> str:
    """Return the remedy of the first verdict in a text."""
    found = re.search(r"^ *Remedy: (.+?)(?:  \[tried: .*\])?$", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"Got no remedy in: {text!r}")
    return found[1]


def apply(program: type[programs.Program], remedy: str, folder: Path) -> Result:
    """Run the program with the remedy."""
    if found := re.search(r"leave out the samples with (\S+) (not finite|outside (\d+) to (\d+))", remedy):
        return run(program, folder, batches=_without(program.batches(), found))
    if found := re.search(r"in (\S+):(\d+) write: (.+)", remedy):
        change = Change(str(programs.__file__), int(found[2]), "", found[3])
        with change.applied([program]) as is_applied:
            assert is_applied
            return run(program, folder)
    if found := re.search(r"^(precision=.+)$", remedy):
        return run(
            program, folder, precision=eval(found[1].removeprefix("precision="), {"MixedPrecision": MixedPrecision})
        )
    if found := re.search(r"a schedule that stays at lr=([-+.e\d]*\d)", remedy):
        return run(program, folder, callbacks=[Cap(float(found[1]))])
    if found := re.search(r"lr=([-+.e\d]*\d)", remedy):
        return run(program, folder, lr=float(found[1]))
    if found := re.search(r"If there are none: (.+)$", remedy):
        return run(program, folder, change=lambda model: exec(found[1], {"torch": torch, "model": model}))
    raise ValueError(f"Got the remedy {remedy!r}, which is none that can be applied.")


def _without(batches: list[Any], found: re.Match[str]) -> list[Any]:
    kept = []
    for batch in batches:
        tensor: Tensor = eval(found[1], {"batch": batch})
        rows = tensor.reshape(len(tensor), -1)
        good = rows.isfinite() if found[3] is None else (rows >= int(found[3])) & (rows <= int(found[4]))
        index = good.all(dim=1)
        if index.any():
            names = batch.keys() if isinstance(batch, dict) else range(len(batch))
            parts = {name: part[index] if isinstance((part := batch[name]), Tensor) else part for name in names}
            kept.append(parts if isinstance(batch, dict) else list(parts.values()))
    return kept
