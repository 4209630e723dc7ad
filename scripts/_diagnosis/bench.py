"""Run a program with our Trainer, and read the verdict from its output."""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from _diagnosis import posted  # noqa: F401 - registers its programs
from _diagnosis.programs import EPOCHS, PROGRAMS, Program
from trainer import Trainer
from trainer.callbacks import OverflowReport
from trainer.diagnosis.report_file import Diagnosis
from trainer.precision import MixedPrecision

accelerator = "cpu"
"""The Trainer's ``accelerator``."""

VERDICTS = ("data", "model", "forward", "backward", "underflow", "weights", "divergence", "unknown", "healthy")


def cause(name: str) -> str:
    """Return the right verdict for a program on :data:`accelerator`."""
    program = PROGRAMS[name]
    return "healthy" if program.is_healthy_on_gpu and accelerator == "gpu" else program.verdict


@dataclass
class Result:
    """The outcome of one program.

    Attributes:
        text: all that was printed, warned, logged and raised.
        losses: the loss of each batch.
        error: the exception that ended the run, or None.
        reports: the diagnoses.
    """

    text: str
    losses: list[float] = field(default_factory=list)
    error: BaseException | None = None
    reports: list[Diagnosis] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """Return the verdict that the user reads, or "healthy" without a verdict."""
        found = re.search(r"^ *Verdict: (\w+)", self.text, re.MULTILINE)
        return found[1] if found is not None else "healthy"


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self.losses.append(float(loss.detach()) / trainer.scaler.current_scale)


def run(
    program: type[Program],
    folder: Path,
    *,
    batches: Any = None,
    change: Any = None,
    **arguments: Any,
) -> Result:
    """Train the program with ``arguments`` for the Trainer, after calling ``change`` with the module."""
    heard, losses = io.StringIO(), Losses()
    precision: Any = program.precision
    if program.scaling:
        precision = MixedPrecision("float16", **program.scaling)
    given = {
        "accelerator": accelerator, "precision": precision, "max_epochs": EPOCHS, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "log_every_n_steps": 10, "default_root_dir": str(folder),
    } | program.arguments | arguments  # fmt: skip
    handler, error, report = logging.StreamHandler(heard), None, OverflowReport()
    given["callbacks"] = [losses, report, *given.pop("callbacks", [])]
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero")]
    for logger in loggers:
        logger.addHandler(handler)
    with redirect_stdout(heard), redirect_stderr(heard), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            module = program()
            if change is not None:
                change(module)
            loader = DataLoader(program.batches() if batches is None else batches, batch_size=None)
            Trainer(**given).fit(module, loader)
        except Exception as problem:
            error = problem
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
    text = heard.getvalue() + "".join(f"{one.message}\n" for one in caught)
    if error is not None:
        text += f"{type(error).__name__}: {error}\n"
    return Result(text, losses.losses, error, report.reports)


def report_in(text: str) -> str:
    """Return the first report in the output of a run. The path of its file is shortened to the name."""
    found = re.search(r"^ *Verdict: .*\n(?:  .*\n)*", text, re.MULTILINE)
    return "" if found is None else re.sub(r"(?<=Details: ).*/", "", found[0].rstrip())


def learns(losses: list[float]) -> bool:
    """Return whether the losses of a run are finite to its end, and lower there than at its start."""
    if len(losses) < 12 or not all(map(math.isfinite, losses[12:])):
        return False
    first = sum(losses[:12]) / 12
    return math.isfinite(first) and sum(losses[-12:]) / 12 < first


def matrix(found: dict[str, str]) -> str:
    """Return the confusion matrix as a Markdown table: a row for each cause, a column for each verdict."""
    counts = {row: dict.fromkeys(VERDICTS, 0) for row in VERDICTS if row != "unknown"}
    for name, verdict in found.items():
        counts[cause(name)][verdict] += 1
    lines = ["| cause | " + " | ".join(VERDICTS[:-1]) + " | no report |", "|---|" + "---:|" * len(VERDICTS)]
    lines += [
        f"| {row} | " + " | ".join(str(n or "") for n in verdicts.values()) + " |" for row, verdicts in counts.items()
    ]
    right = sum(verdict == cause(name) for name, verdict in found.items())
    alarms = sum(cause(name) == "healthy" != verdict for name, verdict in found.items())
    return "\n".join([*lines, "", f"{right} of {len(found)} right; {alarms} false alarms."])
