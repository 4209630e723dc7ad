"""End a run that an Optuna study prunes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import lightning as L

from trainer.errors import warn
from trainer.record.studies import trial_of


class OptunaPruning(L.Callback):
    """Reports a metric to an Optuna trial after each validation, and stops the run if the pruner decides so.

    A metric that no validation logs is reported at the end of each training epoch.

    ``hydra/sweeper=optuna`` adds this callback to each job. The run ends as with early stopping, so its checkpoints are
    complete. Validations are counted from 0, and the count continues after a resume.

    Args:
        storage: the storage of the study, a URL as in Optuna.
        study_name: the name of the study.
        trial: the number of the trial.
        metric: the name of the optimized metric, as it is logged.
        pruner: ``name`` (median, hyperband, none) and arguments of Optuna's class. Default: None, no pruner.

    Attributes:
        pruned: whether the pruner has stopped the run.
        validations: the number of reports.
    """

    reads_epoch_metrics: ClassVar = True

    def __init__(
        self, storage: str, study_name: str, trial: int, metric: str, pruner: Mapping[str, Any] | None = None
    ) -> None:
        self.storage, self.study_name, self.trial, self.metric = storage, study_name, trial, metric
        self.pruner = pruner
        self.pruned = False
        self.validations = 0
        self._trial: Any = None
        self._known: Any = None  # the metric's value when a validation starts
        self._is_validated = False  # whether validations log the metric; if not, it is reported at the ends of epochs
        self._reported: set[int] = set()  # numbers of reported validations; a trial that runs again has some

    def run_facts(self) -> dict[str, Any]:
        """Return the entries for the record of the run."""
        return {"pruned": True} if self.pruned else {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the study, on rank 0."""
        if not trainer.is_global_zero:
            return
        self._trial = trial_of(self.storage, self.study_name, self.trial, self.pruner)
        known = self._trial.study.get_trials(deepcopy=False)[self.trial]
        self._reported = set(known.intermediate_values)
        if known.state.is_finished():
            warn(
                f"Trial {self.trial} of the study {self.study_name} is over, so this run reports nothing to the study."
            )
            self._trial = None

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the value of the metric, to recognize whether the validation logs it."""
        self._known = self._current(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Report the metric if the validation has logged it."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._is_validated |= self._current(trainer) is not self._known
        if self._is_validated:
            self._report(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Report the metric if no validation logs it."""
        if not self._is_validated:
            self._report(trainer)

    def _current(self, trainer: L.Trainer) -> Any:
        return trainer.callback_metrics.get(self.metric)

    def _report(self, trainer: L.Trainer) -> None:
        stop, value = False, self._current(trainer)
        if self._trial is not None and value is not None:
            if self.validations not in self._reported:  # Optuna would ignore a second value, and warn
                self._trial.report(float(value), step=self.validations)
            stop = bool(self._trial.should_prune())
        self.validations += value is not None
        if trainer.strategy.broadcast(stop):
            self.pruned = trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"validations": self.validations, "is_validated": self._is_validated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the count of reports."""
        self.validations = state_dict["validations"]
        self._is_validated = state_dict.get("is_validated", True)
