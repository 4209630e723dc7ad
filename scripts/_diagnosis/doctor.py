"""Write the programs as scripts that use plain Lightning, run ``trainer doctor`` on them, and apply its patches."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from _diagnosis import posted, programs
from _diagnosis.bench import VERDICTS, cause, learns
from _diagnosis.frameworks import Outcome, Scaler, run_lightning, run_pytorch
from _diagnosis.programs import EPOCHS, PROGRAMS, Program
from trainer.cli import main
from trainer.precision import cuda_autocast_ops

SCRIPT = "train.py"
_IMPORTS = """\
from __future__ import annotations

import math
from typing import Any, ClassVar

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
"""
_OURS = """\
from trainer import Trainer
from trainer.precision import MixedPrecision
"""
_MAIN = '''
class Losses(L.Callback):
    """Write the losses to a file."""

    def __init__(self) -> None:
        self.file = open("losses.txt", "w")

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        scale = trainer.scaler.current_scale if hasattr(trainer, "scaler") else 1.0
        print(float(loss.detach()) / scale, file=self.file, flush=True)


def main() -> None:
    trainer = {trainer}(
        accelerator="cpu",
        precision={precision},
        max_epochs={epochs},
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=10,{arguments}
        callbacks=[Losses()],
    )
    trainer.fit({name}(), DataLoader({name}.batches(), batch_size=None))


if __name__ == "__main__":
    main()
'''


def script_of(program: type[Program]) -> str:
    """Return a script that trains a program, with the sources of all that it uses.

    Programs with other loss scales than the default use our Trainer, because it refuses Lightning's plugins.
    """
    sources: dict[str, str] = {}
    names: dict[str, set[str]] = {}
    for module in (programs, posted):
        text = Path(str(module.__file__)).read_text()
        lines = text.splitlines()
        for node in ast.parse(text).body:
            for name in _defined(node):
                first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
                sources[name] = "\n".join(lines[first - 1 : node.end_lineno])
                names[name] = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    used, new = set[str](), {program.__name__}
    while new:
        used |= new
        new = {name for one in new for name in names[one] if name in sources} - used
    own = program.scaling
    settings = ", ".join(f"{name}={value!r}" for name, value in own.items())
    main = _MAIN.format(
        trainer="Trainer" if own else "L.Trainer", name=program.__name__, epochs=EPOCHS,
        precision=f'MixedPrecision("float16", {settings})' if own else f'"{program.precision}"',
        arguments="".join(f"\n        {name}={value!r}," for name, value in program.arguments.items()),
    )  # fmt: skip
    definitions = dict.fromkeys(source for name, source in sources.items() if name in used)
    return "\n\n".join([_IMPORTS + _OURS * bool(own), *definitions, main])


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]


@dataclass
class Run:
    """One run of a script in ``trainer doctor``.

    Attributes:
        status: exit status.
        text: the output.
        losses: the losses of all batches.
        found: the content of ``doctor.json``; {} without a verdict.
    """

    status: int
    text: str
    losses: list[float]
    found: dict[str, Any]

    @property
    def verdict(self) -> str:
        return str(self.found.get("verdict", "healthy"))

    @property
    def has_change(self) -> bool:
        """Whether the remedy changes code or an argument."""
        return bool(self.found.get("patch", {}).get("line"))


@dataclass
class Entry:
    """The results of a program.

    Attributes:
        name: the program.
        before: the run of the program.
        applies: whether there is a patch that applies.
        after: the run of the patched program; None if the patch does not apply.
        named_by: the tools with output that names the cause or the place.
    """

    name: str
    before: Run
    applies: bool = False
    after: Run | None = None
    named_by: set[str] = field(default_factory=set)

    @property
    def is_right(self) -> bool:
        return self.before.verdict == cause(self.name)

    @property
    def learns(self) -> bool:
        """Whether the patched program learns without a verdict."""
        after = self.after
        return after is not None and after.status == 0 and learns(after.losses)

    @property
    def is_worse(self) -> bool:
        """Whether the patched program has fewer finite losses, or does not learn and ends with larger ones."""
        if self.after is None or self.learns:
            return False
        old, new = ([loss for loss in run.losses if math.isfinite(loss)] for run in (self.before, self.after))
        return len(new) < len(old) or (bool(old) and statistics.mean(new[-12:]) > statistics.mean(old[-12:]))

    def __str__(self) -> str:
        mark = " ! " if not self.is_right or (self.before.has_change and not self.learns) else "   "
        state = "no change" if not self.before.has_change else "no patch"
        if self.applies:
            state = "learns" if self.learns else "worse" if self.is_worse else "does not learn"
        patch = self.before.found.get("patch", {})
        note = patch.get("note", "") if state == "no patch" else ""
        return f"{mark} {self.name:24} {self.before.verdict:12} {state:16} {patch.get('line', '')} {note}".rstrip()


def run_doctor(folder: Path) -> Run:
    """Run the script of a folder in ``trainer doctor``."""
    for name in ("doctor.json", "doctor.patch", "losses.txt"):
        (folder / name).unlink(missing_ok=True)
    status, text = _in_child(folder, partial(main, ["doctor", SCRIPT]))
    losses, found = folder / "losses.txt", folder / "doctor.json"
    return Run(
        status, text,
        [float(one) for one in losses.read_text().split()] if losses.exists() else [],
        json.loads(found.read_text()) if found.exists() else {},
    )  # fmt: skip


def try_program(name: str) -> Entry:
    """Run a program, apply the patch of ``trainer doctor``, and run it again. Run it in :data:`TOOLS`, too."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        (folder / SCRIPT).write_text(script_of(PROGRAMS[name]))
        entry = Entry(name, run_doctor(folder))
        for tool in TOOLS:
            _, text = _in_child(folder, partial(_run_tool, tool, PROGRAMS[name]))
            if _is_named(cause(name), entry.before.found, text):
                entry.named_by.add(tool)
        if (folder / "doctor.patch").exists():
            done = subprocess.run(["git", "apply", "doctor.patch"], cwd=folder, capture_output=True, check=False)
            entry.applies = not done.returncode
        if entry.applies:
            entry.after = run_doctor(folder)
        return entry


def table(entries: list[Entry]) -> str:
    """Return a Markdown table with a row for each cause."""
    heads = ["cause", "programs", "right verdicts", "remedies in code", "patches", "learn", "worse", *TOOLS]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in [*VERDICTS, "all"]:
        own = [entry for entry in entries if row in (cause(entry.name), "all")]
        if not own or row == "healthy":
            continue
        counts = [len(own), sum(one.is_right for one in own), sum(one.before.has_change for one in own)]
        counts += [sum(one.applies for one in own), sum(one.learns for one in own), sum(one.is_worse for one in own)]
        counts += [sum(tool in one.named_by for one in own) for tool in TOOLS]
        lines.append(f"| {row} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def is_good(entries: list[Entry]) -> bool:
    """Return whether 95% of the verdicts are right, 80% of the patches make the program learn, and none is worse."""
    changed = [entry for entry in entries if entry.before.has_change]
    return (
        sum(entry.is_right for entry in entries) >= 0.95 * len(entries)
        and sum(entry.learns for entry in changed) >= 0.8 * len(changed)
        and not any(entry.is_worse for entry in entries)
    )


def _in_child(folder: Path, run: Callable[[], int]) -> tuple[int, str]:
    """Run a function in a fork of this process, in a folder. Return its result and its output."""
    sys.stdout.flush(), sys.stderr.flush()
    output = folder / "output.txt"
    if not (child := os.fork()):
        status = 99
        try:
            os.chdir(folder)
            file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(file, 1), os.dup2(file, 2)
            status = run()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, output.read_text()


# --- the tools of other projects ------------------------------------------------------------------------------------


def _run_tool(tool: str, program: type[Program]) -> int:
    """Train a program with a tool. As in ``frameworks.py``, with a float16 scaler and CUDA's autocast lists."""
    kind = runpy.run_path(SCRIPT)[program.__name__]
    scaler = Scaler("cpu", enabled=kind.precision == "16-mixed", **kind.scaling)
    with cuda_autocast_ops() if scaler.is_enabled() else nullcontext():
        TOOLS[tool](kind(), scaler, DataLoader(kind.batches(), batch_size=None), Outcome())
    return 0


def _run_anomaly_mode(*arguments: Any) -> None:
    with torch.autograd.set_detect_anomaly(True):
        run_pytorch(*arguments)


def _run_detect_anomaly(*arguments: Any) -> None:
    with torch.autograd.set_detect_anomaly(True):  # run_lightning passes it to the Trainer
        run_lightning(*arguments)


def _run_debug_underflow_overflow(program: Program, *arguments: Any) -> None:
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(program, max_frames_to_save=1)
    run_pytorch(program, *arguments)


TOOLS: dict[str, Callable[..., None]] = {
    "torch's anomaly mode": _run_anomaly_mode,
    "Lightning's `detect_anomaly`": _run_detect_anomaly,
    "Hugging Face's `DebugUnderflowOverflow`": _run_debug_underflow_overflow,
}
"""Other tools to run a program in. Each function trains it."""


def _is_named(verdict: str, found: dict[str, Any], text: str) -> bool:
    """Return whether the output of a tool names the cause of a program, or the place.

    For data: the range that an index exceeds, or an input that is not finite. For weights: a weight that is not
    finite. For the computation and an overflow in 16 bits: the line that the verdict names or the patch changes, or the
    module. A divergence must be named as such, or by the learning rate, and an underflow by the gradients.
    """
    first = re.search(r"^(\S+) has (nans|infs)$", text, re.MULTILINE)  # printed by Hugging Face's tool
    if verdict == "data":
        is_input = first is not None and first[1].startswith("input")
        return is_input or bool(re.search(r"out of (range|bounds)|found invalid values", text))
    if verdict == "weights":
        return first is not None and not first[1].startswith(("input", "output"))
    if verdict in ("divergence", "underflow"):
        return bool(re.search(r"learning rate|diverge|gradients? underflow", text))
    place = found.get("place") or {}
    lines = {str(place.get("line"))} | set(re.findall(rf"{SCRIPT}:(\d+)", found.get("patch", {}).get("line", "")))
    forward = text.partition("Traceback (most recent call last)")[0]  # the call that anomaly mode prints
    if lines & set(re.findall(rf'{SCRIPT}", line (\d+)', forward)[-1:]):
        return True
    module = re.search(r"^ +([\w.]+) \w+\n[ \d]", forward, re.MULTILINE)
    return first is not None and module is not None and module[1] == place.get("module")
