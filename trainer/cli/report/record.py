"""What the page says of one run: its record, and the other files in its folder.

Files that are missing, or half written, tell nothing, and are no error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer import redaction
from trainer.cli.report import private
from trainer.cli.report.figures import Matrix, Picture, figures_in
from trainer.cli.sweep import shown
from trainer.record.reader import RunRecord, changed, read_run

NOT_A_RUNS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading raises where files say something that no run writes."""

_OVERFLOWS = "overflow_report_step_*.md"
_LOG_LINES = 400
_LOG_BYTES = 200_000
_FILES = 60


def unreadable(folder: Path, error: Exception) -> str:
    """What to say of a folder in which reading has raised one of `NOT_A_RUNS`."""
    return (
        f"The files in {folder} say something that a run does not write ({type(error).__name__}: {error}). They were"
        " changed, or come from another version."
    )


@dataclass(frozen=True)
class Overflow:
    """What `trainer.callbacks.OverflowReport` has written of a step.

    Args:
        step: the optimizer step.
        title: one line.
        verdict: what happened.
        advice: what to try, most promising first.
        rows: labels and what stands beside them.
    """

    step: int
    title: str
    verdict: str
    advice: list[str] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)


def read_overflow(file: Path) -> Overflow | None:
    """Read a report; None where the file is none, cannot be read, or has nothing in it yet."""
    number = re.fullmatch(r"overflow_report_step_(\d+)\.md", file.name)
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    title = next((line[2:] for line in lines if line.startswith("# ")), "")
    if number is None or not title:
        return None
    cells = [line.strip("| ").split(" | ", 1) for line in lines if re.match(r"\| \S.* \| ", line)]
    told = [line for line in lines if line and not line.startswith(("# ", "- ", "|"))]
    return Overflow(
        int(number[1]),
        title,
        "\n".join(told),
        [line[2:] for line in lines if line.startswith("- ")],
        [(label, value) for label, value in cells],
    )


class Run:
    """A run, as its folder tells it.

    Args:
        folder: of the run.

    Attributes:
        record: what ``run.json`` and ``metrics.csv`` say.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record: RunRecord = read_run(folder)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The composed config."""
        written = self._hydra("config.yaml")
        if not isinstance(written, dict):
            return {}
        return {str(name): private.setting(str(name), value) for name, value in written.items()}

    @cached_property
    def overrides(self) -> list[str]:
        """What the command line set, without what is ours."""
        words = self.record.overrides or self._hydra("overrides.yaml")
        listed = words if isinstance(words, list) else []
        return [private.word(word) for word in shown([str(word) for word in listed])]

    @property
    def command(self) -> str:
        """What it did, such as "fit"."""
        return str(self.record.command or self.config.get("command") or "fit")

    @property
    def name(self) -> str:
        """Its recipe, or its folder's name."""
        recipes = [word.partition("=")[2] for word in self.overrides if word.lstrip("+").startswith("recipe=")]
        return str(self.record.recipe or next(iter(recipes), None) or self.folder.resolve().name)

    @property
    def precision(self) -> str:
        """Its precision; empty where that is not known."""
        return self.record.precision or ""

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric; of a run that goes on those of the last rows, where it has not told others."""
        return self.record.metrics or {name: curve.values[-1] for name, curve in self.record.rows.items()}

    @cached_property
    def step(self) -> int | None:
        """Optimizer steps, so far or in all."""
        run = self.record
        if run.steps is not None and run.status in ("completed", "pruned", "failed", "interrupted"):
            return run.steps
        seen = [curve.steps[-1] + 1 for curve in run.rows.values() if curve]
        seen += [curve.steps[-1] for curve in (run.losses, run.elapsed) if curve]
        return int(max(seen)) if seen else run.steps

    @property
    def duration(self) -> float | None:
        """Wall time, in seconds."""
        run = self.record
        if run.status in ("running", "killed"):
            return None if run.started is None else (run.now if run.status == "running" else self.changed) - run.started
        return run.seconds

    @cached_property
    def changed(self) -> float:
        """When it last wrote something, a time (of `time.time`)."""
        files = [*self.folder.glob("*"), *self.folder.glob("*/*")]
        return max((changed(file) for file in files if not file.name.startswith("report")), default=0.0)

    @property
    def command_line(self) -> list[str]:
        """The words that it was started with."""
        words = self.record.environment.get("command")
        return [private.word(str(word)) for word in words] if isinstance(words, list) else []

    @cached_property
    def overflows(self) -> list[Overflow]:
        """Its overflow reports, the first step first."""
        files = [*self.folder.glob(_OVERFLOWS), *self.folder.glob(f"*/{_OVERFLOWS}")]
        files += self.folder.glob(f"lightning_logs/*/{_OVERFLOWS}")
        found = (read_overflow(self.record.inside(file)) for file in files)
        return sorted((report for report in found if report), key=lambda report: report.step)

    @cached_property
    def figures(self) -> tuple[list[Matrix], list[Picture], list[str]]:
        """Its confusion matrices and pictures, and what is said of those that cannot be shown."""
        return figures_in(self.record)

    @cached_property
    def log(self) -> list[str]:
        """The last lines of its log."""
        file = self.record.inside(self.folder / f"{self.command}.log")
        try:
            with file.open("rb") as stream:
                stream.seek(max(0, file.stat().st_size - _LOG_BYTES))
                text = stream.read().decode("utf-8", errors="replace")
        except OSError:
            return []
        return [redaction.text(line) for line in text.splitlines()[-_LOG_LINES:]]

    @property
    def warnings(self) -> list[str]:
        """What the log has of warnings and errors, the time in front left out."""
        marks = ("[WARNING] - ", "[ERROR] - ", "[CRITICAL] - ")
        said = [line.partition(mark)[2] for line in self.log for mark in marks if mark in line]
        return [text for text in dict.fromkeys(said) if text != "The run failed."]  # its error is told elsewhere

    @cached_property
    def files(self) -> list[tuple[Path, int]]:
        """What is in its folder, and how large, in bytes."""
        found = []
        for file in sorted((*self.folder.glob("*"), *self.folder.glob("*/*"), *self.folder.glob(".hydra/*"))):
            hidden = file.name.startswith(".") or file.suffix == ".html"
            try:
                if file.is_file() and not hidden:
                    found.append((file, file.stat().st_size))
            except OSError:
                continue
        return list(dict.fromkeys(found))[:_FILES]

    def _hydra(self, name: str) -> Any:
        """A file that Hydra has written; None where it is missing."""
        from omegaconf import OmegaConf

        try:
            return OmegaConf.to_container(
                OmegaConf.load(self.record.inside(self.folder / ".hydra" / name)), resolve=False
            )
        except Exception:  # half a file can be wrong in many ways
            return None
