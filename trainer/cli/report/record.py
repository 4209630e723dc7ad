"""What the files of one run tell. Files that are missing, or half written, tell nothing, and are no error."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer import redaction
from trainer.cli.objective import choose, monitored, reached
from trainer.cli.report import private
from trainer.cli.report.curve import Curve, read_rows
from trainer.cli.report.overflow import PATTERN, Overflow, read_overflow
from trainer.cli.results import RESULT, read_result
from trainer.cli.sweep import shown
from trainer.record.environment import ENVIRONMENT

_ENDS = {"finished": "completed"}  # summary.json's word for it
_LOG_LINES = 400
_LOG_BYTES = 200_000
_FILES = 60


@dataclass(frozen=True)
class Record:
    """A run, as its folder tells it.

    Args:
        folder: of the run.
        now: the time (of `time.time`) at which it is looked at.
    """

    folder: Path
    now: float

    @cached_property
    def result(self) -> dict[str, Any]:
        """``result.json``; {} where there is none, or only that of an earlier run in the same folder."""
        return {} if self._is_stale(RESULT) else _tidy(read_result(self._inside(self.folder / RESULT).parent))

    @cached_property
    def summary(self) -> dict[str, Any]:
        """``summary.json``, likewise."""
        return {} if self._is_stale("summary.json") else _tidy(_json(self._inside(self.folder / "summary.json")))

    @cached_property
    def environment(self) -> dict[str, Any]:
        """``environment.json``."""
        found = _tidy(_json(self._inside(self.folder / ENVIRONMENT)))
        if isinstance(command := found.get("command"), list):
            found["command"] = [private.word(str(word)) for word in command]
        return found

    @cached_property
    def points(self) -> dict[str, Any]:
        """``curves.json``."""
        return _json(self._inside(self.folder / "curves.json"))

    @cached_property
    def rows(self) -> dict[str, Curve]:
        """The columns of the newest ``metrics.csv``."""
        files = [*self.folder.glob("metrics.csv"), *self.folder.glob("*/metrics.csv")]
        files += self.folder.glob("lightning_logs/*/metrics.csv")
        return read_rows(self._inside(max(files, key=_changed))) if files else {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """The composed config."""
        written = _yaml(self._inside(self.folder / ".hydra" / "config.yaml"))
        if not isinstance(written, dict):
            return {}
        return {str(name): private.setting(str(name), value) for name, value in written.items()}

    @cached_property
    def overrides(self) -> list[str]:
        """What the command line set, without what is ours."""
        words = self.result.get("overrides") or _yaml(self._inside(self.folder / ".hydra" / "overrides.yaml"))
        listed = words if isinstance(words, list) else []
        return [private.word(word) for word in shown([str(word) for word in listed])]

    @property
    def command(self) -> str:
        """What it did, such as "fit"."""
        return str(self.result.get("command") or self.config.get("command") or "fit")

    @property
    def name(self) -> str:
        """Its recipe, or its folder's name."""
        recipes = [word.partition("=")[2] for word in self.overrides if word.lstrip("+").startswith("recipe=")]
        return str(self.result.get("recipe") or next(iter(recipes), None) or self.folder.resolve().name)

    @property
    def precision(self) -> str:
        """Its precision; empty where that is not known."""
        chosen = [word.partition("=")[2] for word in self.overrides if word.startswith("precision=")]
        known = (self.result.get("trained_in"), self.summary.get("precision"), self.result.get("precision"), *chosen)
        return str(next(filter(None, known), "") or self._choices.get("precision", ""))

    @cached_property
    def status(self) -> str:
        """What became of it.

        "completed", "interrupted", "failed" and "pruned" are its own words. Where it has left none it is "running" when
        its process is there, "killed" when that is gone, and "unfinished" when that cannot be told from here.
        """
        said = self.result.get("status") or self.summary.get("status")
        if said:
            return _ENDS.get(str(said), str(said))
        alive = self._is_alive()
        return "unfinished" if alive is None else "running" if alive else "killed"

    @property
    def error(self) -> str:
        """Why it failed; empty where it did not."""
        return str(self.result.get("error") or self.summary.get("error") or "")

    @cached_property
    def objective(self) -> tuple[str, str] | None:
        """The metric that matters and which way it is better, "min" or "max"; None where nothing says so."""
        for key in ("objective", "monitor"):
            found = self.result.get(key)
            if isinstance(found, dict) and isinstance(found.get("metric"), str):
                return found["metric"], "min" if found.get("mode") == "min" else "max"
        callbacks = self.config.get("callbacks")
        return choose(self.config.get("objective"), monitored(callbacks if isinstance(callbacks, dict) else None))

    @property
    def reached(self) -> dict[str, Any] | None:
        """The objective and its value at the end, as ``result.json`` has them."""
        told = self.result.get("objective")
        return dict(told) if isinstance(told, dict) else reached(self.objective, self.metrics)

    @property
    def objective_value(self) -> float | None:
        """The value of the objective at the end; None without one that is finite."""
        value = (self.reached or {}).get("value")
        return float(value) if isinstance(value, int | float) else None

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric."""
        told = self.result.get("metrics") or self.summary.get("metrics")
        if isinstance(told, dict) and told:
            return {str(name): float(value) for name, value in told.items() if isinstance(value, int | float)}
        return {name: curve.values[-1] for name, curve in self.rows.items()}

    @cached_property
    def step(self) -> int | None:
        """Optimizer steps, so far or in all."""
        told = self.result.get("steps", self.summary.get("steps"))
        if told is not None:
            return int(told)
        seen = [curve.steps[-1] + 1 for curve in self.rows.values() if curve]
        seen += [curve.steps[-1] for curve in (self.losses, self.seconds) if curve]
        return int(max(seen)) if seen else None

    @cached_property
    def losses(self) -> Curve:
        """The training loss of a batch, as ``training_step`` returned it."""
        return Curve.of(self.points.get("losses"))

    @cached_property
    def seconds(self) -> Curve:
        """Time of training."""
        return Curve.of(self._pace.get("seconds"))

    @cached_property
    def memory(self) -> Curve:
        """Bytes."""
        return Curve.of(self._pace.get("memory"))

    @property
    def memory_is_the_gpus(self) -> bool:
        """Whether the memory is a GPU's, and not that of the process."""
        return bool(self._pace.get("on_gpu")) or "gpu" in (self.result.get("peak_memory") or {})

    @property
    def samples_per_step(self) -> int | None:
        """By the first batch."""
        told = self._pace.get("samples_per_step")
        return told if isinstance(told, int) else None

    @property
    def rate(self) -> float | None:
        """Samples per second of training: the callback Throughput's, else the fit's mean."""
        measured = self.result.get("throughput")
        rate = measured.get("samples_per_second") if isinstance(measured, dict) else None
        if rate is None:
            rate = self.summary.get("samples_per_second")
        seconds = self.seconds
        if rate is None and self.samples_per_step and len(seconds) > 1 and seconds.values[-1] > seconds.values[0]:
            steps = seconds.steps[-1] - seconds.steps[0]
            rate = self.samples_per_step * steps / (seconds.values[-1] - seconds.values[0])
        return rate

    @property
    def peak_memory(self) -> float | None:
        """Bytes."""
        peaks = self.result.get("peak_memory")
        told = next(iter(peaks.values()), None) if isinstance(peaks, dict) else None
        return told or self.summary.get("peak_memory_bytes") or max(self.memory.values, default=None)

    @property
    def duration(self) -> float | None:
        """Wall time, in seconds."""
        told = self.result.get("seconds", self.summary.get("seconds"))
        if told is not None:
            return float(told)
        if self.started is None or self.status == "unfinished":
            return None
        return (self.now if self.status == "running" else self.changed) - self.started

    @property
    def started(self) -> float | None:
        """A time (of `time.time`)."""
        told = self.environment.get("started")
        return float(told) if isinstance(told, int | float) else None

    @cached_property
    def changed(self) -> float:
        """When it last wrote something, a time (of `time.time`)."""
        files = [*self.folder.glob("*"), *self.folder.glob("*/*")]
        return max((_changed(file) for file in files if not file.name.startswith("report")), default=0.0)

    @cached_property
    def overflows(self) -> list[Overflow]:
        """Its overflow reports, the first step first."""
        files = [*self.folder.glob(PATTERN), *self.folder.glob(f"*/{PATTERN}")]
        files += self.folder.glob(f"lightning_logs/*/{PATTERN}")
        found = (read_overflow(self._inside(file)) for file in files)
        return sorted((report for report in found if report), key=lambda report: report.step)

    @cached_property
    def log(self) -> list[str]:
        """The last lines of its log."""
        file = self._inside(self.folder / f"{self.command}.log")
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

    @property
    def _choices(self) -> dict[str, Any]:
        """What each group of the config was set to, by default or not."""
        node = _yaml(self.folder / ".hydra" / "hydra.yaml")
        for name in ("hydra", "runtime", "choices"):
            node = node.get(name) if isinstance(node, dict) else None
        return node if isinstance(node, dict) else {}

    @property
    def _pace(self) -> Mapping[str, Any]:
        pace = self.points.get("pace")
        return pace if isinstance(pace, dict) else {}

    def _inside(self, file: Path) -> Path:
        """``file``; a link that leads elsewhere, perhaps to a secret, counts as missing. So does a pipe."""
        is_here = Path(os.path.realpath(file)).is_relative_to(os.path.realpath(self.folder))
        return file if is_here and file.is_file() else Path(os.devnull, file.name)

    def _is_stale(self, name: str) -> bool:
        """Whether the file is that of a run before, in the same folder."""
        return self.started is not None and _changed(self.folder / name) < self.started

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


def read_record(folder: Path) -> Record:
    """The run in ``folder``, as it is now."""
    return Record(folder, time.time())


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _yaml(file: Path) -> Any:
    from omegaconf import OmegaConf

    try:
        return OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except Exception:  # half a file can be wrong in many ways
        return None


def _tidy(told: dict[str, Any]) -> dict[str, Any]:
    return dict(redaction.containers(told))


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
