"""``hydra/sweeper=optuna``: a sweep with jobs that Optuna chooses from the results of earlier jobs. Imports no torch.

The search space uses Hydra's sweep syntax: ``interval(1e-4, 1e-1)``, ``tag(log, interval(...))``,
``int(interval(8, 256))``, ``range(1, 5)``, ``choice(a, b)`` or ``a,b``, ``glob(*)``. A trial is a job of the sweep with
its own process and folder; while it runs, `trainer.callbacks.OptunaPruning` reports to the study. The study is a file
in the folder of the sweep, so that the same sweep in the same folder resumes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Quote, QuotedString, RangeSweep
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import ArgumentError

from trainer.arguments import WHOLE
from trainer.cli.objective import choose, monitored, not_logged
from trainer.cli.parsing import UsageError, canonical_precisions
from trainer.cli.schema import check_settings
from trainer.record.run_record import PRUNING, RUN, RunRecord
from trainer.record.studies import make_pruner, make_sampler
from trainer.record.sweep_record import load_sweep

_OTHER_NAME = "Choose another name: hydra.sweeper.study_name=NAME."
_JOB, _FOLDER = "job", "folder"
"""User attributes of a trial: number of its job, and folder of its sweep."""


class OptunaSweeper(Sweeper):
    """Choose the jobs of a sweep with Optuna.

    Args:
        n_trials: total number of trials of the study, including pruned and failed ones.
        n_jobs: number of trials that are started at a time; the launcher runs them.
        sampler: ``name`` (tpe, random, grid), ``seed``, and arguments of Optuna's class.
        pruner: ``name`` (median, hyperband, none), and arguments of Optuna's class.
        study_name: name of the study in the storage.
        storage: URL as in Optuna. Default: None, ``study.db`` in the folder of the sweep.
        params: search space by key. The command line has precedence.
    """

    hydra_context: HydraContext
    config: DictConfig
    launcher: Launcher

    def __init__(
        self,
        n_trials: int,
        n_jobs: int,
        sampler: Mapping[str, Any],
        pruner: Mapping[str, Any],
        study_name: str,
        storage: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        self.n_trials, self.n_jobs, self.study_name, self.storage = n_trials, n_jobs, study_name, storage
        self.sampler, self.pruner, self.params = dict(sampler), dict(pruner), dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Create the launcher. Hydra calls this before the sweep.

        Raises:
            UsageError: if a number is out of range.
        """
        numbers = {"n_trials": self.n_trials, "n_jobs": self.n_jobs}
        check_settings("hydra.sweeper", numbers, dict.fromkeys(numbers, (WHOLE.at_least(1),)))
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        """Run trials until the study has ``n_trials``.

        Args:
            arguments: the overrides of the command line.

        Raises:
            UsageError: if there is no objective or no search space, or the study has another mode or search space.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._fixed, self._space = self._parameters(arguments)
        chosen = choose(self.config.get("objective"), monitored(self.config.get("callbacks")))
        if chosen is None:
            advice = "Set objective.metric=val_loss, or another logged metric, and objective.mode=min or max."
            raise UsageError(f"Got hydra/sweeper=optuna without a metric to optimize. {advice}")
        self._metric, mode = chosen
        # these raise errors about the settings, before there is a folder or a study
        make_sampler(self.sampler, 0), make_pruner(self.pruner)
        self._points = self._grid() if self.sampler["name"] == "grid" else []
        folder = Path(str(self.config.hydra.sweep.dir)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        written: Any = OmegaConf.to_container(self.config.hydra.sweeper, resolve=False)
        default = f"sqlite:///{(folder / 'study.db').as_posix()}"
        self._storage = str(written["storage"] or default)  # not resolved, because its interpolations may be secrets
        self._folder, self._study = folder, self._open(self.storage or default, mode)
        self._report_results()
        for trial in self._own_trials(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL):
            if (run := self._jobs().get(trial.user_attrs[_JOB])) is not None:
                (run.folder / RUN).touch()  # so that the summary at the end includes it
        running = self._own_trials(TrialState.RUNNING)
        self._interrupted = [(trial.user_attrs[_JOB], self._words(trial)) for trial in running]
        returns = []
        while batch := self._next():
            try:
                returns.append(self.launcher.launch([words for _, words in batch], initial_job_idx=batch[0][0]))
            finally:
                self._report_results()
            self._check_metric()
        return returns

    def _check_metric(self) -> None:
        """Check that a completed job has logged the metric, if one has completed.

        Raises:
            UsageError: if no completed job has logged it.
        """
        done = [run for run in self._jobs().values() if run.completed]
        if done and not any(self._metric in run.metrics for run in done):
            clause = f"job {done[-1].job} did not log"
            raise UsageError(not_logged("objective.metric", self._metric, clause, done[-1].metrics))

    def _parameters(self, arguments: list[str]) -> tuple[list[str], dict[str, tuple[str, BaseDistribution]]]:
        """Return the overrides of all jobs, and the search space: key and distribution by parameter name."""
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        params = dict(self.params)
        if "precision" in params:
            params["precision"] = canonical_precisions(str(params["precision"]))
        fixed: dict[str, str] = {}
        space: dict[str, tuple[str, BaseDistribution]] = {}
        for override in parser.parse_overrides([*(f"{key}={value}" for key, value in params.items()), *arguments]):
            key = override.get_key_element()
            name = key.lstrip("+")
            fixed.pop(name, None)
            space.pop(name, None)
            if override.is_sweep_override():
                space[name] = key, _distribution(override)
            else:
                value = override.get_value_element_as_str()
                fixed[name] = f"{key}={value}" if not override.is_delete() else str(override.input_line)
        if not space:
            example = "'optimizer.lr=tag(log, interval(1e-4, 1e-1))'"
            raise UsageError(f"Got hydra/sweeper=optuna without a search space, expected a setting such as {example}.")
        return list(fixed.values()), space

    def _open(self, storage: str, mode: str) -> optuna.Study:
        direction = StudyDirection.MINIMIZE if mode == "min" else StudyDirection.MAXIMIZE
        try:
            study = optuna.create_study(
                storage=storage, study_name=self.study_name, direction=direction, load_if_exists=True
            )
        except (ImportError, ArgumentError) as error:  # no driver of this database, or a malformed URL
            expected = "expected a URL such as sqlite:///study.db"
            raise UsageError(f"hydra.sweeper.storage is {self._storage}, {expected}: {error}") from error
        if study.direction != direction:
            raise UsageError(
                f"objective.mode is {mode}, but the study {self.study_name} in {self._storage} was created to"
                f" {study.direction.name.lower()} its metric. {_OTHER_NAME}"
            )
        trials = len(study.get_trials(deepcopy=False))
        study.sampler, study.pruner = make_sampler(self.sampler, trials), make_pruner(self.pruner)
        if self._points:
            self.n_trials = min(self.n_trials, len(self._points))
            for point in self._points if trials == 0 else ():
                study.enqueue_trial(dict(zip(self._space, point, strict=True)))
        return study

    def _grid(self) -> list[tuple[Any, ...]]:
        values = []
        for name, (_, distribution) in self._space.items():
            if isinstance(distribution, CategoricalDistribution):
                values.append(list(distribution.choices))
            elif isinstance(distribution, IntDistribution) and not distribution.log:
                values.append(list(range(distribution.low, distribution.high + 1, distribution.step)))
            else:
                advice = f"such as {name}=1,2,5. Or choose another sampler: hydra.sweeper.sampler.name=tpe."
                raise UsageError(f"{name} is an interval, but the sampler grid needs a list of values, {advice}")
        return list(itertools.product(*values))

    def _own_trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials of this sweep, with any state by default. Other sweeps may use the same study."""
        trials = self._study.get_trials(deepcopy=False, states=states or None)
        return [trial for trial in trials if trial.user_attrs.get(_FOLDER) == str(self._folder)]

    def _jobs(self) -> dict[int | None, RunRecord]:
        return {run.job: run for run in load_sweep(self._folder).runs}

    def _next(self) -> list[tuple[int, list[str]]]:
        """Return numbers and overrides of the jobs to run next, with consecutive numbers; empty at the end.

        Trials of an interrupted sweep, which may have any numbers, are run one at a time.
        """
        if self._interrupted:
            return [self._interrupted.pop(0)]
        trials = self._study.get_trials(deepcopy=False)
        left = self.n_trials - sum(trial.state != TrialState.WAITING for trial in trials)
        first = 1 + max((trial.user_attrs[_JOB] for trial in self._own_trials()), default=-1)
        return [self._begin(first + index) for index in range(min(left, self.n_jobs))]

    def _begin(self, job: int) -> tuple[int, list[str]]:
        distributions = {name: distribution for name, (_, distribution) in self._space.items()}
        try:
            trial = self._study.ask(distributions)
        except ValueError as error:  # a choice with other values than in earlier trials
            study = f"The study {self.study_name} in {self._storage}"
            raise UsageError(f"{study} has another search space: {error} {_OTHER_NAME}") from error
        trial.set_user_attr(_FOLDER, str(self._folder))
        trial.set_user_attr(_JOB, job)
        return job, self._words(self._study.get_trials(deepcopy=False)[trial.number])

    def _words(self, trial: FrozenTrial) -> list[str]:
        """Return the overrides of the job of a trial."""
        chosen = [f"{self._space[name][0]}={value}" for name, value in trial.params.items() if name in self._space]
        pruner = ",".join(f"{name}:{_quoted(v) if isinstance(v, str) else v}" for name, v in self.pruner.items())
        texts = {"storage": self._storage, "study_name": self.study_name, "metric": self._metric}
        words = ",".join(f"{name}:{_quoted(value)}" for name, value in texts.items())
        # adds the callback that reports to the study
        return [*self._fixed, *chosen, f"{PRUNING}{words},trial:{trial.number},pruner:{{{pruner}}}}}"]

    def _report_results(self) -> None:
        """Report the results of finished jobs to the study. Trials of interrupted jobs keep the state ``RUNNING``."""
        jobs = self._jobs()
        for trial in self._own_trials(TrialState.RUNNING):
            run = jobs.get(trial.user_attrs[_JOB])
            if run is None:
                continue
            if (value := run.result) is not None:
                self._study.tell(trial.number, value)
            elif run.status == "pruned":
                self._study.tell(trial.number, state=TrialState.PRUNED)
            elif run.status in ("completed", "failed"):
                self._study.tell(trial.number, state=TrialState.FAIL)


def _distribution(override: Override) -> BaseDistribution:
    """Return the values of a sweep over one setting as a distribution of Optuna."""
    sweep: Any = override.value()
    log = "log" in getattr(sweep, "tags", ())
    try:
        if isinstance(sweep, IntervalSweep):
            start: Any = sweep.start
            end: Any = sweep.end
            is_whole = isinstance(start, int) and isinstance(end, int)
            return (IntDistribution if is_whole else FloatDistribution)(start, end, log=log)
        if isinstance(sweep, RangeSweep):
            values = sorted(sweep.range())
            if all(isinstance(value, int) for value in values):
                step = 1 if log else abs(int(sweep.step))
                return IntDistribution(int(values[0]), int(values[-1]), log=log, step=step)
            return FloatDistribution(values[0], values[-1], step=abs(float(sweep.step)))
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    except (ValueError, IndexError) as error:
        raise UsageError(f"Cannot choose from {override.input_line!r}: {error}.") from error


def _quoted(text: str) -> str:
    return str(QuotedString(text, Quote.single).with_quotes())
