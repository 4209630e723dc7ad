"""Several runs: the jobs of a sweep, or any runs that are compared. Imports no torch."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from trainer.record.run_record import RUN, RunRecord, changed, load_run, without_step_epoch_variants

_NO_METRICS = ("amp/", "lr-", "grad_norm")
"""Prefixes of values that callbacks log and that do not measure the quality of a model."""
_METRICS = 4
_REPEATED = re.compile(r"[+~]*(\w+\.)*(seed|fold)=")
"""Start of overrides for seeds and folds. Runs that differ only by these are repetitions."""
_FOLD = re.compile(r"[+~]*(\w+\.)*fold=")
_LONG = re.compile(r"(?<![\w.])\d+\.\d{5,}(?:e[+-]?\d+)?(?![\w.])")  # numbers drawn by a sweeper


class Sweep:
    """Several runs, and the best of them.

    Args:
        runs: in the order of the table.

    Attributes:
        runs: as given.
    """

    def __init__(self, runs: Sequence[RunRecord]) -> None:
        self.runs = list(runs)

    @property
    def goal(self) -> tuple[str, str] | None:
        """The objective of the completed runs, and "min" or "max"; None if they have different ones, or none."""
        goals = {run.objective for run in self.runs if run.result is not None}
        return goals.pop() if len(goals) == 1 else None

    @property
    def best(self) -> RunRecord | None:
        """The completed run that has reached the best value of `goal`, the first of equals, or None without a goal.

        It is one of `folds` if there are any.
        """
        folds = self.folds
        return best_of([run for run in self.runs if run.completed] if folds is None else folds[1], self.goal)

    @property
    def repetitions(self) -> dict[tuple[str, ...], list[RunRecord]]:
        """The completed runs with a seed or a fold that not all runs have, by their other overrides."""
        groups = dict[tuple[str, ...], list[RunRecord]]()
        for run, overrides in zip(self.runs, self.own(), strict=True):
            others = tuple(word for word in overrides if not _REPEATED.match(word))
            if run.completed and len(others) < len(overrides):
                groups.setdefault(others, []).append(run)
        return groups

    @property
    def folds(self) -> tuple[tuple[str, ...], list[RunRecord]] | None:
        """The `repetitions` over folds with the best mean of the objective, and their overrides; None without folds.

        Only those with the most completed runs are compared, because each fold has other samples.
        """
        groups = {words: runs for words, runs in self.repetitions.items() if len(runs) > 1}
        if not any(_FOLD.match(word) for overrides in self.own() for word in overrides) or not groups:
            return None
        most = max(map(len, groups.values()))
        groups = {words: runs for words, runs in groups.items() if len(runs) == most}
        if len(groups) == 1:
            return next(iter(groups.items()))
        means = {words: mean for words, runs in groups.items() if (mean := self.mean(runs)) is not None}
        best = max if self.goal is not None and self.goal[1] == "max" else min
        words = best(means, key=lambda words: means[words][0], default=None)
        return None if words is None else (words, groups[words])

    def mean(self, runs: Sequence[RunRecord]) -> tuple[float, float] | None:
        """Return the mean and the standard deviation (n - 1) of the objective over at least two runs.

        Return None without an objective, or if a run has no finite value.
        """
        values = [value for run in runs if (value := run.reached(self.goal).value) is not None]
        return (fmean(values), stdev(values)) if len(values) == len(runs) else None

    @property
    def metrics(self) -> list[str]:
        """The metrics that tables show: the objectives first."""
        objectives = [run.objective[0] for run in self.runs if run.objective]
        return worth_showing({name for run in self.runs for name in run.latest}, objectives)[:_METRICS]

    def titled(self, name: str) -> str:
        """Return the title of the column of a metric: ``best NAME`` if its values are those of best checkpoints."""
        goals = [(run, run.objective) for run in self.runs if run.objective and run.objective[0] == name]
        return f"best {name}" if any(run.reached(goal).is_best for run, goal in goals) else name

    @property
    def common(self) -> list[str]:
        """The overrides that all runs have, and the recipe that they all have."""
        first, *others = [_words_of(run) for run in self.runs] or [[]]
        return [word for word in first if all(word in words for words in others)]

    def own(self) -> list[list[str]]:
        """Return for each run its overrides that not all runs have; all of them if there is only one run."""
        common = set(self.common) if len(self.runs) > 1 else set()
        return [[word for word in _words_of(run) if word not in common] for run in self.runs]

    def table(self) -> list[dict[str, Any]]:
        """Return a dict for each run, such as for ``pandas.DataFrame``, with its metrics as columns.

        The other columns are ``job``, ``status``, ``overrides`` (those that not all runs have), ``objective`` (its
        value), ``seconds``, ``folder``, ``best_checkpoint`` and ``last_checkpoint``.
        """
        return [
            {
                "job": run.job,
                "status": run.status,
                "overrides": " ".join(overrides),
                "objective": run.objective_value,
                **run.metrics,
                "seconds": run.seconds,
                "folder": str(run.folder),
                "best_checkpoint": run.paths.get("best_checkpoint"),
                "last_checkpoint": run.paths.get("last_checkpoint"),
            }
            for run, overrides in zip(self.runs, self.own(), strict=True)
        ]

    def set_labels(self) -> None:
        """Set the label of each run: the overrides that not all runs have, else its precision or the folder's name.

        A number is added to labels that are equal.
        """
        for run, overrides in zip(self.runs, self.own(), strict=True):
            words = " ".join(re.sub(r"^precision=|^\+*recipe=", "", word) for word in overrides if len(self.runs) > 1)
            run.label = _LONG.sub(lambda match: f"{float(match[0]):.4g}", words) or run.precision or run.folder.name
        counts = Counter(run.label for run in self.runs)
        for number, run in enumerate(self.runs, start=1):
            run.label += f" [{number}]" if counts[run.label] > 1 else ""


def _words_of(run: RunRecord) -> list[str]:
    """Return the overrides of a run, with the recipe of a run that has it from another one (``ckpt=``)."""
    words = run.chosen
    if run.recipe is None or any(word.lstrip("+").startswith("recipe=") for word in words):
        return words
    return [f"+recipe={run.recipe}", *words]


def best_of(runs: Iterable[RunRecord], goal: tuple[str, str] | None) -> RunRecord | None:
    """Return the run that has reached the best value of a metric (`RunRecord.reached`), the first of equals.

    Args:
        runs: the runs.
        goal: the metric, and "min" or "max". None: no run is the best.
    """
    rated = [(value, run) for run in runs if (value := run.reached(goal).value) is not None]
    best = max if goal is not None and goal[1] == "max" else min
    return best(rated, key=lambda pair: pair[0])[1] if rated else None


def load_sweep(path: str | os.PathLike[str], since: float = 0.0) -> Sweep:
    """Return the jobs below the folder ``path``, sorted by their numbers.

    Args:
        path: the folder of a sweep or a comparison.
        since: a time (of `time.time`). Jobs with an older record are left out. Default: 0, no job is left out.
    """
    folders = [file.parent for file in Path(path).rglob(RUN) if changed(file) >= since]
    jobs = [run for run in map(load_run, folders) if run.job is not None]
    return Sweep(sorted(jobs, key=lambda run: run.job or 0))


def worth_showing(names: Iterable[str], objectives: Iterable[str] = ()) -> list[str]:
    """Return the objectives, then the metrics of validation and test, or all others if these are missing."""
    wanted, whole = set(objectives), sorted(names)
    metrics = [name for name in without_step_epoch_variants(whole) if not name.startswith(_NO_METRICS)]
    evaluated = [name for name in metrics if name.startswith(("val", "test"))]
    others = [name for name in evaluated or metrics or whole if name not in wanted]
    return [*(name for name in whole if name in wanted), *others]
