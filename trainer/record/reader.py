"""Reads the record of a run, ``run.json`` and ``metrics.csv``, for whoever shows or compares runs. Imports no torch.

Files that are missing, or half written, tell nothing, and are no error.
"""

from __future__ import annotations

import math
import os
import re
import socket
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from trainer import redaction
from trainer.record.curve import Curve, read_rows
from trainer.record.run_file import RUN, read

Value = TypeVar("Value")

_LOWER_IS_BETTER = frozenset((
    "bits", "bpc", "cer", "err", "error", "fid", "frechet", "mae", "mape", "mse", "nll", "perplexity", "ppl",
    "rmse", "wer",
))  # fmt: skip
_HIGHER_IS_BETTER = frozenset((
    "acc", "acc1", "acc5", "accuracy", "ap", "auc", "auprc", "auroc", "bleu", "dice", "f1", "fbeta", "iou",
    "jaccard", "kappa", "map", "mcc", "miou", "ndcg", "precision", "psnr", "r2", "recall", "rouge", "score",
    "ssim", "top1", "top5",
))  # fmt: skip

_ROWS = ("metrics.csv", "*/metrics.csv", "lightning_logs/*/metrics.csv")


class Fact(Generic[Value]):
    """The entry of ``run.json`` that the attribute is called after; None where it has none.

    Args:
        kind: what it is made.
    """

    def __init__(self, kind: Callable[[Any], Value]) -> None:
        self._kind = kind

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, record: RunRecord, owner: type) -> Value | None:
        told = record.facts.get(self._name)
        return None if told is None else self._kind(told)


class RunRecord:
    """What is known of a run. None, or nothing, is what it has not said.

    Args:
        facts: of ``run.json``.
        folder: of the run.
        now: the time (of `time.time`) at which it is looked at; None for this moment.

    Attributes:
        command: What it does, such as "fit".
        recipe: The recipe's name.
        module: The class of the model.
        precision: Such as "16-mixed"; before the Trainer is built the one that was asked for, which may be "auto".
        devices: Such as "2 x NVIDIA A100".
        sharding: Over how many processes, and when gradients are reduced; None where nothing is sharded.
        prefetching: Batches that went to the GPU while the step before them ran, and from where; None for none.
        seed: As it was set.
        job: The number in a sweep.
        error: Why it ended; None where it went through.
        epochs: Completed epochs, those before a resume included.
        steps: Optimizer steps attempted, skipped ones included.
        skipped_steps: How many of these were skipped.
        scale: The loss scale after the last step; None without loss scaling.
        seconds: Wall time: of a fit that of training, validations included; of another command all that it took.
        train_seconds: Time of training without validations.
        samples_per_step: Training samples of an optimizer step over all processes, by an epoch's first batch.
        best_score: What the metric was, at the best checkpoint, that the checkpoints go by.
        metrics: The last value of each metric.
        overrides: The words of its command line that set something.
        environment: What `trainer.record.environment` has found.
        paths: Where it has written what.
        gpu: ``capability`` and ``tf32`` of the GPU; empty on another device.
        throughput: What the callback Throughput has measured; empty without it.
        fast_settings: Which were on, by the callback FastSettings; None without it.
        compile: What the callback Compile has had compiled; empty without it.
    """

    command = Fact(str)
    recipe = Fact(str)
    module = Fact(str)
    precision = Fact(str)
    devices = Fact(str)
    sharding = Fact(str)
    prefetching = Fact(str)
    seed = Fact(str)
    job = Fact(int)
    error = Fact(str)
    epochs = Fact(int)
    steps = Fact(int)
    skipped_steps = Fact(int)
    scale = Fact(float)
    seconds = Fact(float)
    train_seconds = Fact(float)
    samples_per_step = Fact(int)
    best_score = Fact(float)

    def __init__(self, facts: Mapping[str, Any], folder: Path, now: float | None = None) -> None:
        self.facts = facts
        self.folder = folder
        self.now = time.time() if now is None else now
        words = facts.get("overrides")
        self.overrides = [str(word) for word in words] if isinstance(words, list) else []
        self.environment, self.paths = self._mapping("environment"), self._mapping("paths")
        self.gpu, self.throughput = self._mapping("gpu"), self._mapping("throughput")
        self.compile = self._mapping("compile")
        told = facts.get("fast_settings")
        self.fast_settings = [str(name) for name in told] if isinstance(told, list) else None

    @cached_property
    def metrics(self) -> dict[str, float]:
        """See the class."""
        told = self._mapping("metrics").items()
        return {str(name): float(value) for name, value in told if isinstance(value, int | float)}

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
    def samples_per_second(self) -> float | None:
        """Samples per second: of a fit in training, of another command that the callback Throughput has measured."""
        rate = self.facts.get("samples_per_second") or self.throughput.get(self.command or "")
        return None if rate is None else float(rate)

    @property
    def peak_memory(self) -> int | None:
        """Bytes: on a GPU the most that tensors occupied, else the largest size of the process."""
        return next((int(size) for size in self._mapping("peak_memory").values()), None)

    @property
    def memory_is_the_gpus(self) -> bool:
        """Whether the memory is that of a GPU, and not that of the process."""
        return "gpu" in self._mapping("peak_memory")

    @property
    def objective(self) -> tuple[str, str] | None:
        """The metric that the run is judged by, and which way it is better, "min" or "max"; None without one."""
        return self._goal("objective") or self.monitor

    @property
    def monitor(self) -> tuple[str, str] | None:
        """The metric that checkpoints or early stopping go by, likewise."""
        return self._goal("monitor")

    @property
    def objective_value(self) -> float | None:
        """The last value of the objective; None without one that is finite."""
        value = self.metrics.get(self.objective[0]) if self.objective else None
        return value if value is not None and math.isfinite(value) else None

    @property
    def started(self) -> float | None:
        """A time (of `time.time`)."""
        told = self.environment.get("started")
        return float(told) if isinstance(told, int | float) else None

    @property
    def best_checkpoint(self) -> str | None:
        """The name of the file: its folder may have been moved."""
        path = self.paths.get("best_checkpoint")
        return Path(str(path).replace("\\", "/")).name if path else None

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

    def inside(self, file: Path) -> Path:
        """``file``; a link that leads out of the folder, perhaps to a secret, counts as missing, as does a pipe."""
        is_here = Path(os.path.realpath(file)).is_relative_to(os.path.realpath(self.folder))
        return file if is_here and file.is_file() else Path(os.devnull, file.name)

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


def direction_of(name: str) -> str | None:
    """Which way a metric of this name is better, "min" or "max"; None where its name does not say so."""
    words = {*re.split(r"[^a-z0-9]+", name.lower()), *re.split(r"[^a-z]+", name.lower())}
    if "loss" in name.lower() or words & _LOWER_IS_BETTER:
        return "min"
    return "max" if words & _HIGHER_IS_BETTER else None


def without_twins(names: Iterable[str]) -> list[str]:
    """The names of metrics; of one that was logged per step and per epoch there are three, and one says it all."""
    listed = list(names)
    plain = {name: name.removesuffix("_step").removesuffix("_epoch") for name in listed}
    return [name for name in listed if plain[name] == name or plain[name] not in plain]


def changed(file: Path) -> float:
    """When a file was last written, as a time (of `time.time`); 0 without it."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
