"""The record of a run: the class that collects, writes and reads ``run.json``. Imports no torch.

Files that are missing or half written count as empty, and are not an error.
"""

from __future__ import annotations

import json
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
from typing import Any, Generic, NamedTuple, TypeVar

from trainer.common import redaction
from trainer.common.files import write_text
from trainer.record.curve import Curve, read_rows

Value = TypeVar("Value")

RUN = "run.json"
"""The file that a run keeps in its folder, from its beginning to its end."""

SUCCESSFUL = ("completed", "pruned")
"""The status of a run without an error. A sweeper stops ("prunes") a job that is not promising."""

PRUNING = "++callbacks.pruning={_target_:trainer.callbacks.OptunaPruning,"
"""The beginning of the override that makes a job report to the study of Optuna's sweeper."""

MEASURING = ("++callbacks.throughput._target_=trainer.callbacks.Throughput",)
"""The overrides that ``compare`` adds to measure a job."""

_VERSION = 1
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
    """An attribute of `RunRecord` that reads the entry of ``run.json`` with the same name.

    Args:
        kind: converts the entry; gets None for a missing entry.
        name: the name of the entry. Default: that of the attribute.
    """

    def __init__(self, kind: Callable[[Any], Value], name: str = "") -> None:
        self._kind, self._name = kind, name

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = self._name or name

    def __get__(self, record: RunRecord, owner: type) -> Value:
        return self._kind(record.facts.get(self._name))


def _optional(kind: Callable[[Any], Value]) -> Fact[Value | None]:
    return Fact(lambda value: None if value is None else kind(value))


def _curve(name: str) -> Fact[Curve]:
    return Fact(lambda curves: Curve.of(_mapping(curves).get(name)), "curves")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _texts(value: object) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else []


class GoalValue(NamedTuple):
    """The value of a metric that runs are compared by.

    Args:
        value: None if it is not known, or not finite.
        step: the optimizer step at which it was logged, or None if that is not known.
        is_best: whether it is the value at the best checkpoint or the best of the curve, instead of the last value.
    """

    value: float | None
    step: float | None = None
    is_best: bool = False


class RunRecord:
    """The facts of a run, and the files in its folder that they are written to and read from.

    A value that is not recorded is None, or empty. `load_run` reads the record of a folder; `begin` starts a new one.

    Args:
        facts: the content of ``run.json``. The run, and `RunRecorder`, add to it.
        folder: the run's folder. None if it has none; `write` then does nothing.
        now: the time (of `time.time`) that `duration` refers to. Default: the current time.

    Attributes:
        home: the run's folder, or None if it has none.
        folder: the run's folder, or the working directory if it has none.
        former: the facts of an earlier run in the same folder. Empty unless the record was started by `begin`.
        label: the name of the run among others that it is compared with.
        recipe: name of the recipe.
        module: class of the module.
        precision: such as "16-mixed"; the requested one, possibly "auto", until the Trainer is built.
        devices: such as "2 x NVIDIA A100".
        sharding: number of processes, and when gradients are reduced. None if nothing is sharded.
        prefetching: number of prefetched batches, and whether their memory is pinned. None without prefetching.
        seed: seed of the run.
        job: number of the job in a sweep.
        error: error that ended the run.
        epochs: number of completed epochs, including those before a resume.
        steps: number of attempted optimizer steps, including skipped ones.
        skipped_steps: number of skipped steps.
        nonfinite_losses: number of skipped steps with a non-finite loss. None without such steps.
        scale: loss scale after the last step. None without loss scaling.
        seconds: wall time in seconds; of a fit, the training with its validations.
        train_seconds: time of training without validations, in seconds.
        samples_per_step: number of samples per optimizer step over all processes, from the first batch of an epoch.
        best_score: monitored metric at the best checkpoint.
        environment: the result of `trainer.record.provenance`.
        paths: the files and folders that the run has written.
        gpu: ``capability`` and ``tf32`` of the GPU; empty on another device.
        throughput: measurements of the callback Throughput; empty without it.
        curves: series of the recorder by name.
        losses: the training loss per batch, as returned by ``training_step``.
        skipped: the number of skipped steps so far, at each skipped step.
        elapsed: seconds of training so far.
        memory: memory in bytes: reserved by torch on a GPU, otherwise of the process.
        compile: the modules that the callback Compile has compiled; empty without it.
        overrides: the overrides on the command line.
        fast_settings: the settings that the callback FastSettings enabled. None without it.
    """

    recipe = _optional(str)
    module = _optional(str)
    precision = _optional(str)
    devices = _optional(str)
    sharding = _optional(str)
    prefetching = _optional(str)
    seed = _optional(str)
    job = _optional(int)
    error = _optional(str)
    epochs = _optional(int)
    steps = _optional(int)
    skipped_steps = _optional(int)
    nonfinite_losses = _optional(int)
    scale = _optional(float)
    seconds = _optional(float)
    train_seconds = _optional(float)
    samples_per_step = _optional(int)
    best_score = _optional(float)
    environment = Fact(_mapping)
    paths = Fact(_mapping)
    gpu = Fact(_mapping)
    throughput = Fact(_mapping)
    compile = Fact(_mapping)
    overrides = Fact(_texts)
    fast_settings = _optional(_texts)
    curves = Fact(_mapping)
    losses = _curve("losses")
    skipped = _curve("skipped")
    elapsed = _curve("seconds")
    memory = _curve("memory")

    def __init__(self, facts: dict[str, Any], folder: Path | None, now: float | None = None) -> None:
        self.facts = facts
        self.home, self.folder = folder, folder or Path()
        self.former: dict[str, Any] = {}
        self.label = ""
        self.now = time.time() if now is None else now

    @classmethod
    def begin(cls, folder: Path | None, **facts: Any) -> RunRecord:
        """Start the record of a run in ``folder``, with the facts that are known so far."""
        record = cls({"version": _VERSION, "status": "running", **facts}, folder)
        record.former = {} if folder is None else read_json(folder)
        return record

    def write(self) -> None:
        """Write ``run.json``, one line per fact. Readers see the whole file, or the one before it.

        Raises:
            OSError: if the file cannot be written.
        """
        if self.home is not None:
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(fact)}" for name, fact in self.facts.items())
            write_text(self.folder / RUN, f"{{\n{lines}\n}}\n")

    @property
    def brief(self) -> dict[str, Any]:
        """The facts without the curves and the environment, which are long."""
        return {name: fact for name, fact in self.facts.items() if name not in ("curves", "environment")}

    @property
    def command(self) -> str:
        """The command of the run, such as "fit"."""
        return str(self.facts.get("command") or self.config.get("command") or "fit")

    @property
    def chosen(self) -> list[str]:
        """The overrides that the user wrote, without secrets."""
        words = self.overrides or self._hydra("overrides.yaml")
        return [redaction.word(word) for word in shown(map(str, words if isinstance(words, list) else []))]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The composed config, without secrets; empty if the run was not started on the command line."""
        written = self._hydra("config.yaml")
        if not isinstance(written, dict):
            return {}
        return {str(name): redaction.setting(str(name), value) for name, value in written.items()}

    @property
    def name(self) -> str:
        """The recipe of the run, or the name of its folder."""
        recipes = [word.partition("=")[2] for word in self.chosen if word.lstrip("+").startswith("recipe=")]
        return str(self.recipe or next(iter(recipes), None) or self.folder.resolve().name)

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric."""
        metrics = _mapping(self.facts.get("metrics")).items()
        return {str(name): float(value) for name, value in metrics if isinstance(value, int | float)}

    @property
    def latest(self) -> dict[str, float]:
        """`metrics`, or the last values in ``metrics.csv`` if the run has not recorded any yet."""
        return self.metrics or {name: curve.values[-1] for name, curve in self.rows.items()}

    @property
    def status(self) -> str:
        """The status of the run: "completed", "interrupted", "failed" or "pruned".

        A run that has not recorded its end is "running" if its process exists, "killed" if it does not, and
        "unfinished" if that cannot be determined on this machine.
        """
        status = self.facts.get("status")
        if status and status != "running":
            return str(status)
        alive = self._is_alive()
        return "unfinished" if alive is None else "running" if alive else "killed"

    @property
    def completed(self) -> bool:
        """Whether the run has completed."""
        return self.status == "completed"

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second: of the training in a fit; otherwise measured by the callback Throughput."""
        rate = self.facts.get("samples_per_second") or self.throughput.get(self.command)
        return None if rate is None else float(rate)

    @property
    def peak_memory(self) -> int | None:
        """Peak memory in bytes: of the tensors on a GPU, otherwise of the process."""
        return next((int(size) for size in _mapping(self.facts.get("peak_memory")).values()), None)

    @property
    def memory_is_the_gpus(self) -> bool:
        """Whether `peak_memory` is the peak of a GPU instead of the process."""
        return "gpu" in _mapping(self.facts.get("peak_memory"))

    @property
    def objective(self) -> tuple[str, str] | None:
        """The metric that runs are compared by, and the better direction, "min" or "max"; or None."""
        return self._goal("objective") or self.monitor

    @property
    def monitor(self) -> tuple[str, str] | None:
        """The metric that checkpoints or early stopping monitor, and its direction, or None."""
        return self._goal("monitor")

    def reached(self, goal: tuple[str, str] | None) -> GoalValue:
        """Return the value of a metric at the best checkpoint, or its last value if no checkpoint was chosen by it.

        If the metric is not the objective of this run, but that of others, return the best value of its curve.

        Args:
            goal: the metric, and its better direction, "min" or "max".
        """
        if goal is None:
            return GoalValue(None)
        is_best = goal == self.monitor and self.best_score is not None
        value = self.best_score if is_best else self.latest.get(goal[0])
        curve = self.rows.get(goal[0]) or self.metric_curve(goal[0])
        if goal != self.objective and (values := [point for _, point in curve.points if math.isfinite(point)]):
            value, is_best = (max if goal[1] == "max" else min)(values), True
        if value is None or not math.isfinite(value):
            return GoalValue(None)
        # a row has the index of its update, which is one less than the step of a checkpoint
        curves = (self.metric_curve(goal[0]).points, 0), (self.rows.get(goal[0], Curve()).points, 1)
        matches = ([x + more for x, y in points if math.isclose(y, value, rel_tol=1e-5)] for points, more in curves)
        at = next(filter(None, matches), [])
        return GoalValue(value, (at[0] if is_best else at[-1]) if at else None, is_best)

    def value_of(self, name: str) -> float | None:
        """Return the value of a metric for a table: the objective's value from `reached`, otherwise the last value.

        Args:
            name: the metric.
        """
        is_objective = self.objective is not None and self.objective[0] == name
        value = self.objective_value if is_objective else None
        return self.metrics.get(name) if value is None else value

    @property
    def objective_value(self) -> float | None:
        """The value of the objective that the run has `reached`; None without an objective or a finite value."""
        return self.reached(self.objective).value

    @property
    def result(self) -> float | None:
        """`objective_value` of a run that completed, or None."""
        return self.objective_value if self.completed else None

    @property
    def final_loss(self) -> float | None:
        """Mean training loss over the last tenth of the batches."""
        losses = self.losses.values
        last = losses[-math.ceil(len(losses) / 10) :]
        return sum(last) / len(last) if last else None

    @property
    def started(self) -> float | None:
        """Start of the run (of `time.time`)."""
        started = self.environment.get("started")
        return float(started) if isinstance(started, int | float) else None

    @cached_property
    def step(self) -> int | None:
        """Number of optimizer steps so far, also if the run has not recorded its end."""
        if self.steps is not None and self.status not in ("running", "killed", "unfinished"):
            return self.steps
        seen = [curve.steps[-1] + 1 for curve in self.rows.values() if curve]
        seen += [curve.steps[-1] for curve in (self.losses, self.elapsed) if curve]
        return int(max(seen)) if seen else self.steps

    @cached_property
    def changed(self) -> float:
        """The time (of `time.time`) at which the run last wrote a file."""
        files = [*self.folder.glob("*"), *self.folder.glob("*/*")]
        # without a later report; and without folders, because a later test run may have created one in them
        written = (file for file in files if file.is_file() and not file.name.startswith("report"))
        return max(map(changed, written), default=0.0)

    @property
    def duration(self) -> float | None:
        """Wall time in seconds, also if the run has not recorded its end."""
        if self.status in ("running", "killed"):
            end = self.now if self.status == "running" else self.changed
            return None if self.started is None else end - self.started
        return self.seconds

    @property
    def scales(self) -> Curve:
        """The loss scale at each change; no points without loss scaling."""
        curve = Curve.of(self.curves.get("scales"))
        return curve if self.scale is not None or set(curve.values) != {1.0} else Curve()

    @property
    def scales_to_the_end(self) -> Curve:
        """`scales`, with its last value repeated at the last known step."""
        scales = self.scales
        if not scales:
            return scales
        end = max(curve.steps[-1] for curve in (scales, self.losses, self.skipped, self.elapsed) if curve)
        return Curve([*scales.steps, end], [*scales.values, scales.values[-1]])

    @property
    def skips(self) -> Curve:
        """The loss scale of each skipped step."""
        scales = self.scales
        at = [bisect_right(scales.steps, step) - 1 for step in self.skipped.steps]
        pairs = zip(self.skipped.steps, at, strict=True)
        return Curve.through((step, scales.values[i]) for step, i in pairs if i >= 0)

    @property
    def stages(self) -> dict[str, dict[str, Curve]]:
        """The metrics of epochs and validations, by stage ("train" or "val") and name."""
        stages = _mapping(self.curves.get("metrics"))
        return {
            str(stage): {str(name): Curve.of(series) for name, series in _mapping(metrics).items()}
            for stage, metrics in stages.items()
        }

    def metric_curve(self, name: str) -> Curve:
        """Return the curve of a metric from the validation, or from the training if the validation does not log it."""
        stages = self.stages
        return next((stages[stage][name] for stage in ("val", "train") if name in stages.get(stage, ())), Curve())

    @cached_property
    def rows(self) -> dict[str, Curve]:
        """The columns of the newest ``metrics.csv`` of the run."""
        files = [] if self.home is None else [file for pattern in _ROWS for file in self.home.glob(pattern)]
        return read_rows(self.inside(max(files, key=changed))) if files else {}

    def inside(self, file: Path) -> Path:
        """Return ``file``, or a missing file if it is a pipe or links to a file outside the folder (maybe a secret)."""
        is_here = Path(os.path.realpath(file)).is_relative_to(os.path.realpath(self.folder))
        return file if is_here and file.is_file() else Path(os.devnull, file.name)

    def _hydra(self, name: str) -> Any:
        """Return the content of a file that Hydra has written, or None if it is missing or not readable."""
        from omegaconf import OmegaConf

        if self.home is None:
            return None
        try:
            return OmegaConf.to_container(OmegaConf.load(self.inside(self.home / ".hydra" / name)), resolve=False)
        except Exception:  # an incomplete file can raise many errors
            return None

    def _goal(self, name: str) -> tuple[str, str] | None:
        goal = _mapping(self.facts.get(name))
        metric = goal.get("metric")
        return (metric, "max" if goal.get("mode") == "max" else "min") if isinstance(metric, str) else None

    def _is_alive(self) -> bool | None:
        """Return whether the process of the run exists, or None if that cannot be determined."""
        pid, host = self.environment.get("pid"), self.environment.get("host")
        if not isinstance(pid, int) or pid < 1 or host != socket.gethostname() or sys.platform == "win32":
            return None
        try:
            os.kill(pid, 0)  # sends no signal, except on Windows
        except ProcessLookupError:
            return False
        except OSError:  # a process of another user
            return True
        return True


def shown(overrides: Iterable[str]) -> list[str]:
    """Return the overrides that the user wrote, without those that a command has added."""
    return [word for word in overrides if not word.startswith(("command=", PRUNING, *MEASURING))]


def load_run(path: str | os.PathLike[str]) -> RunRecord:
    """Return the record of the run in the folder ``path``, as it is now; without facts if there is no ``run.json``."""
    folder = Path(path)
    return RunRecord(dict(redaction.containers(read_json(folder))), folder)


def direction_of(name: str) -> str | None:
    """Return whether "min" or "max" is better for a metric of this name, or None if that is unknown."""
    words = {*re.split(r"[^a-z0-9]+", name.lower()), *re.split(r"[^a-z]+", name.lower())}
    if "loss" in name.lower() or words & _LOWER_IS_BETTER:
        return "min"
    return "max" if words & _HIGHER_IS_BETTER else None


def without_step_epoch_variants(names: Iterable[str]) -> list[str]:
    """Return the names of metrics, without ``NAME_step`` and ``NAME_epoch`` if ``NAME`` is among them."""
    listed = list(names)
    plain = {name: name.removesuffix("_step").removesuffix("_epoch") for name in listed}
    return [name for name in listed if plain[name] == name or plain[name] not in plain]


def changed(file: Path) -> float:
    """Return the time (of `time.time`) at which a file was last written, or 0 if it is missing."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def read_json(folder: Path, name: str = RUN) -> dict[str, Any]:
    """Return the content of ``run.json`` in ``folder``, or of another JSON file; {} if it is missing or not readable.

    A pipe counts as missing, and so does a link to a file outside the folder, which may be a secret.
    """
    file = folder / name
    try:
        if not (file.is_file() and file.resolve().is_relative_to(folder.resolve())):
            return {}
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
