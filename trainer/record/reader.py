"""Reads the record of a run, ``run.json`` and ``metrics.csv``, for whoever shows or compares runs. Imports no torch.

Files that are missing, or half written, tell nothing, and are no error.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer import redaction
from trainer.record.curve import Curve, read_rows
from trainer.record.run_file import RUN, read

_ROWS = ("metrics.csv", "*/metrics.csv", "lightning_logs/*/metrics.csv")


@dataclass(frozen=True)
class RunRecord:
    """What is known of a run. None, or nothing, is what it has not said.

    Args:
        facts: of ``run.json``.
        folder: of the run.
        now: the time (of `time.time`) at which it is looked at.
    """

    facts: Mapping[str, Any]
    folder: Path
    now: float = field(default_factory=time.time)

    # --- what it is and how it went ---------------------------------------------------------------------------

    @property
    def command(self) -> str | None:
        """What it does, such as "fit"."""
        return self._text("command")

    @property
    def recipe(self) -> str | None:
        """The recipe's name."""
        return self._text("recipe")

    @property
    def precision(self) -> str | None:
        """Such as "16-mixed"; before the Trainer is built the one that was asked for, which may be "auto"."""
        return self._text("precision")

    @property
    def devices(self) -> str | None:
        """Such as "2 x NVIDIA A100"."""
        return self._text("devices")

    @property
    def overrides(self) -> list[str]:
        """The words of its command line that set something."""
        words = self.facts.get("overrides")
        return [str(word) for word in words] if isinstance(words, list) else []

    @property
    def job(self) -> int | None:
        """Its number in a sweep."""
        return self._integer("job")

    @cached_property
    def status(self) -> str:
        """What became of it.

        "completed", "interrupted", "failed" and "pruned" are its own words. Where it has left none it is "running" when
        its process is there, "killed" when that is gone, and "unfinished" when that cannot be told from here.
        """
        said = self.facts.get("status")
        if said and said != "running":
            return str(said)
        alive = self._is_alive()
        return "unfinished" if alive is None else "running" if alive else "killed"

    @property
    def completed(self) -> bool:
        """Whether it came to its end."""
        return self.status == "completed"

    @property
    def error(self) -> str:
        """Why it ended; empty where it went through."""
        return str(self.facts.get("error") or "")

    # --- counters ---------------------------------------------------------------------------------------------

    @property
    def epochs(self) -> int | None:
        """Completed epochs, those before a resume included."""
        return self._integer("epochs")

    @property
    def steps(self) -> int | None:
        """Optimizer steps attempted, skipped ones included."""
        return self._integer("steps")

    @property
    def skipped_steps(self) -> int | None:
        """How many of these were skipped."""
        return self._integer("skipped_steps")

    @property
    def scale(self) -> float | None:
        """The loss scale after the last step; None without loss scaling."""
        return self._number("scale")

    # --- time and memory --------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float | None:
        """Wall time: of a fit that of training, validations included; of another command all that it took."""
        return self._number("seconds")

    @property
    def train_seconds(self) -> float | None:
        """Time of training without validations."""
        return self._number("train_seconds")

    @property
    def samples_per_step(self) -> int | None:
        """Training samples of an optimizer step over all processes, by an epoch's first batch."""
        return self._integer("samples_per_step")

    @property
    def samples_per_second(self) -> float | None:
        """Training samples per second: by the callback Throughput, else the mean of the fit."""
        return self._number("samples_per_second")

    @property
    def peak_memory(self) -> int | None:
        """Bytes: on a GPU the most that tensors occupied, else the largest size of the process."""
        sizes = self._mapping("peak_memory").values()
        return next((int(size) for size in sizes), None)

    @property
    def memory_is_the_gpus(self) -> bool:
        """Whether the memory is that of a GPU, and not that of the process."""
        return "gpu" in self._mapping("peak_memory")

    @property
    def throughput(self) -> Mapping[str, Any]:
        """What the callback Throughput has measured; empty without it."""
        return self._mapping("throughput")

    @property
    def gpu(self) -> Mapping[str, Any]:
        """``capability`` and ``tf32`` of the GPU; empty on another device."""
        return self._mapping("gpu")

    # --- metrics ----------------------------------------------------------------------------------------------

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric."""
        return {
            str(name): float(value)
            for name, value in self._mapping("metrics").items()
            if isinstance(value, int | float)
        }

    @property
    def monitor(self) -> tuple[str, str] | None:
        """The metric that checkpoints or early stopping go by, and which way it is better, "min" or "max"."""
        return self._goal("monitor")

    @property
    def objective(self) -> tuple[str, str] | None:
        """The metric that the run is judged by, and which way it is better; None where nothing says so."""
        return self._goal("objective") or self.monitor

    @property
    def objective_value(self) -> float | None:
        """The last value of the objective; None without one that is finite."""
        value = self.metrics.get(self.objective[0]) if self.objective else None
        return value if value is not None and math.isfinite(value) else None

    # --- curves -----------------------------------------------------------------------------------------------

    @cached_property
    def losses(self) -> Curve:
        """The training loss of a batch, as ``training_step`` returned it."""
        return self._curve("losses")

    @cached_property
    def scales(self) -> Curve:
        """The loss scale where it changes; no points without loss scaling."""
        found = self._curve("scales")
        return found if self.scale is not None or set(found.values) != {1.0} else Curve()

    @cached_property
    def skipped(self) -> Curve:
        """At each skipped step, how many there have been so far."""
        return self._curve("skipped")

    @property
    def scales_to_the_end(self) -> Curve:
        """`scales`, and the last of them again at the last step that is known of."""
        scales = self.scales
        if not scales:
            return scales
        end = max(curve.steps[-1] for curve in (scales, self.losses, self.skipped, self.elapsed) if curve)
        return Curve([*scales.steps, end], [*scales.values, scales.values[-1]])

    @property
    def skips(self) -> Curve:
        """At each skipped step, the loss scale that it was computed with."""
        scales = self.scales
        at = [bisect_right(scales.steps, step) - 1 for step in self.skipped.steps]
        found = [(step, scales.values[i]) for step, i in zip(self.skipped.steps, at, strict=True) if i >= 0]
        return Curve([step for step, _ in found], [scale for _, scale in found])

    @cached_property
    def elapsed(self) -> Curve:
        """Seconds of training."""
        return self._curve("seconds")

    @cached_property
    def memory(self) -> Curve:
        """Bytes: what torch has reserved on a GPU, else the memory of the process."""
        return self._curve("memory")

    @cached_property
    def stages(self) -> dict[str, dict[str, Curve]]:
        """The metrics that were logged for an epoch or a validation, by stage ("train" or "val") and name."""
        stages = self._mapping("curves").get("metrics")
        found = stages.items() if isinstance(stages, Mapping) else ()
        return {
            str(stage): {str(name): Curve.of(series) for name, series in metrics.items()}
            for stage, metrics in found
            if isinstance(metrics, Mapping)
        }

    def metric_curve(self, name: str) -> Curve:
        """A metric over the steps, of the validation or, without that, of the training."""
        return next(
            (self.stages[stage][name] for stage in ("val", "train") if name in self.stages.get(stage, ())), Curve()
        )

    @cached_property
    def rows(self) -> dict[str, Curve]:
        """The columns of the newest ``metrics.csv`` of the run."""
        files = [file for pattern in _ROWS for file in self.folder.glob(pattern)]
        return read_rows(self.inside(max(files, key=changed))) if files else {}

    # --- where it was run ---------------------------------------------------------------------------------------

    @property
    def environment(self) -> Mapping[str, Any]:
        """What `trainer.record.environment` has found."""
        return self._mapping("environment")

    @property
    def started(self) -> float | None:
        """A time (of `time.time`)."""
        told = self.environment.get("started")
        return float(told) if isinstance(told, int | float) else None

    @property
    def best_checkpoint(self) -> str | None:
        """The name of the file: its folder may have been moved."""
        path = self._mapping("paths").get("best_checkpoint")
        return Path(str(path).replace("\\", "/")).name if path else None

    def inside(self, file: Path) -> Path:
        """``file``; a link that leads out of the folder, perhaps to a secret, counts as missing, as does a pipe."""
        is_here = Path(os.path.realpath(file)).is_relative_to(os.path.realpath(self.folder))
        return file if is_here and file.is_file() else Path(os.devnull, file.name)

    # --- how ----------------------------------------------------------------------------------------------------

    def _text(self, name: str) -> str | None:
        value = self.facts.get(name)
        return None if value is None else str(value)

    def _integer(self, name: str) -> int | None:
        value = self.facts.get(name)
        return None if value is None else int(value)

    def _number(self, name: str) -> float | None:
        value = self.facts.get(name)
        return None if value is None else float(value)

    def _mapping(self, name: str) -> Mapping[str, Any]:
        value = self.facts.get(name)
        return value if isinstance(value, Mapping) else {}

    def _goal(self, name: str) -> tuple[str, str] | None:
        goal = self._mapping(name)
        metric = goal.get("metric")
        return (metric, "max" if goal.get("mode") == "max" else "min") if isinstance(metric, str) else None

    def _curve(self, name: str) -> Curve:
        return Curve.of(self._mapping("curves").get(name))

    def _is_alive(self) -> bool | None:
        """Whether the process of the run is there; None where that cannot be told."""
        pid, host = self.environment.get("pid"), self.environment.get("host")
        if not isinstance(pid, int) or pid < 1 or host != socket.gethostname() or sys.platform == "win32":
            return None
        try:
            os.kill(pid, 0)  # sends nothing; on Windows it would
        except ProcessLookupError:
            return False
        except OSError:  # somebody else's
            return True
        return True


def read_run(folder: Path) -> RunRecord:
    """The record of the run in ``folder``, as it is now; without any fact where there is none."""
    return RunRecord(dict(redaction.containers(read(folder))), folder)


def jobs_of(sweep: Path, since: float = 0.0) -> list[RunRecord]:
    """The jobs below ``sweep``, by their numbers, but for those whose record is older than ``since``."""
    folders = [file.parent for file in sweep.rglob(RUN) if changed(file) >= since]
    jobs = [run for run in map(read_run, folders) if run.job is not None]
    return sorted(jobs, key=lambda run: run.job or 0)


def changed(file: Path) -> float:
    """When a file was last written, as a time (of `time.time`); 0 without it."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
