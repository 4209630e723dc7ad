"""When a fit stops, validates and logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field

from trainer.errors import ConfigurationError
from trainer.state.progress import FitProgress


class EarlyStop(int):
    """A value of ``should_stop`` for requests that ``EarlyStopping`` may withdraw. It equals True if there are any.

    Attributes:
        callbacks: the ``state_key`` of each callback that requests to stop.
    """

    callbacks: frozenset[str] = frozenset()

    @classmethod
    def of(cls, callbacks: Iterable[str]) -> EarlyStop:
        """Return the requests of these callbacks."""
        keys = frozenset(callbacks)
        stop = cls(bool(keys))
        stop.callbacks = keys
        return stop

    def __or__(self, other: int) -> int:
        """Return the requests unchanged if ``other`` is False, as in ``trainer.should_stop |= False``."""
        return True if other else self


@dataclass(eq=False)
class StoppingConditions:
    """When a fit stops, validates and logs: the public settings, and decisions for the current batch.

    Callbacks and the tuner may change the settings between batches.

    Args:
        progress: the counters that all conditions are compared with.
        max_epochs: total number of epochs; -1 for no limit. None until a fit starts, if not given.
        min_epochs: epochs before ``should_stop`` takes effect. None until a fit starts, if not given.
        max_steps: total number of optimizer steps, including skipped ones; -1 for no limit.
        min_steps: optimizer steps before ``should_stop`` takes effect; None for no minimum.
        check_val_every_n_epoch: epochs between validations; None to count batches over all epochs.
        log_every_n_steps: accumulation windows between two rows of a step's values in the loggers; 0 for no such rows.
            Values of an epoch are logged in any case.
        val_check_seconds: seconds between validations; None to count batches.
        any_rank: takes this process's decision whether it is time to validate; returns the common decision of all
            processes.
        announce: called once with a message if training continues although ``should_stop`` is set.

    Attributes:
        val_check_batch: batches between validations within an epoch; inf to validate at its end. None if the interval
            is a time, and before the first run.
        validates_at_end: whether an epoch's last batch is followed by a validation, independent of its index. True if
            ``val_check_batch`` divides the expected number of batches.
        validates_this_epoch: whether the current epoch has a validation. Set by the fit loop when an epoch starts.
        validated_at: time of the start of the run or, if that is later, the end of the last validation
            (``time.monotonic``).
        should_stop: whether training ends after the current batch, if the minima are met. An :class:`EarlyStop` if only
            ``EarlyStopping`` requests it, and the minima are not met yet.
        check_signals: called after each batch, and before the rest of a resumed epoch, with False, and before each
            epoch with True: handles a signal that has arrived on any process. It may raise. None if there is nothing
            to handle.
    """

    progress: FitProgress
    _: KW_ONLY
    max_epochs: int | None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    check_val_every_n_epoch: int | None = 1
    log_every_n_steps: int = 50
    val_check_seconds: float | None = None
    any_rank: Callable[[bool], bool] = bool
    announce: Callable[[str], object] = str
    val_check_batch: float | None = field(default=None, init=False)
    validates_at_end: bool = field(default=False, init=False)
    validates_this_epoch: bool = field(default=False, init=False)
    validated_at: float = field(default=0.0, init=False)
    should_stop: bool | EarlyStop = field(default=False, init=False)
    check_signals: Callable[[bool], None] | None = field(default=None, init=False)
    _has_announced: bool = field(default=False, init=False)
    _decided: tuple[int, bool] = field(default=(-1, False), init=False)  # batch of the last decision, and the decision

    def fill_in(self, max_epochs: int) -> None:
        """Set the defaults of ``max_epochs`` and ``min_epochs`` when a fit starts."""
        if self.max_epochs is None:
            self.max_epochs = max_epochs
        if self.min_epochs is None:
            self.min_epochs = int(self.min_steps is not None)

    def fit_is_done(self) -> bool:
        """Return whether no further epoch is trained. Called only by the fit loop, before each epoch."""
        if self.check_signals is not None:
            self.check_signals(True)
        return self.ends_fit()

    def epoch_is_done(self) -> bool:
        """Return whether to end the epoch early. Called only by the fit loop, after each batch."""
        if self.check_signals is not None:
            self.check_signals(False)
        return self.ends_epoch()

    def ends_fit(self) -> bool:
        """Return whether no further epoch is trained. Can be called at any time."""
        trained_all = self.max_epochs not in (None, -1) and self.progress.epochs_trained >= self.max_epochs
        return trained_all or self.ends_epoch()

    def is_final_epoch(self) -> bool:
        """Return whether the current epoch is known to be the last."""
        return self.max_epochs not in (None, -1) and self.progress.epochs_trained + 1 >= self.max_epochs

    def ends_epoch(self) -> bool:
        """Return whether to end the current epoch before its last batch. Can be called at any time."""
        stepped_all = self.max_steps != -1 and self.progress.optimizer_steps >= self.max_steps
        if stepped_all or not self.should_stop:
            return stepped_all
        if not (stops := self.may_stop()) and not self._has_announced:
            self._has_announced = True
            self.announce(
                f"Trainer was signaled to stop but the required `min_epochs={self.min_epochs!r}` or"
                f" `min_steps={self.min_steps!r}` has not been met. Training will continue..."
            )
        return stops

    def may_stop(self) -> bool:
        """Return whether ``min_epochs`` and ``min_steps`` are met."""
        progress = self.progress
        return progress.epochs_trained >= (self.min_epochs or 0) and progress.optimizer_steps >= (self.min_steps or 0)

    def epoch_validates(self) -> bool:
        """Return whether the current epoch has a validation."""
        every = self.check_val_every_n_epoch
        return every is None or (self.progress.epoch + 1) % every == 0

    def validation_is_due(self) -> bool:
        """Return whether to validate after the current batch of an epoch with validation."""
        progress = self.progress
        if self.should_stop and self.may_stop():
            return True
        if self.val_check_seconds is not None:
            return self._time_is_up(self.val_check_seconds)
        if self.val_check_batch is None or self.val_check_batch == float("inf"):
            return progress.is_last_batch
        counts_over_epochs = self.check_val_every_n_epoch is None
        number = progress.batches if counts_over_epochs else progress.batches_this_epoch
        if self.validates_at_end and progress.is_last_batch:
            return True
        return number % self.val_check_batch == 0 and progress.batches_this_epoch > 0  # an epoch may have no batch

    def _time_is_up(self, seconds: float) -> bool:
        """Return whether the time between validations is over. The decision stays the same for the whole batch."""
        batch, decision = self._decided
        if batch != self.progress.batches_started:
            # ranks decide together, because their clocks differ: a host-device synchronization on several GPUs
            decision = self.any_rank(time.monotonic() - self.validated_at >= seconds)
            self._decided = self.progress.batches_started, decision
        return decision

    def schedule_validation(self, interval: float, num_batches: float, has_known_end: bool, validates: bool) -> None:
        """Set ``val_check_batch``, or start the clock.

        Args:
            interval: batches between validations (int), or their fraction of an epoch (float).
            num_batches: batches in an epoch; inf if unknown.
            has_known_end: whether this number is exact, so that an interval of 1.0 is also converted to batches.
            validates: whether there will be any validation.

        Raises:
            ConfigurationError: if the interval exceeds the epoch, or is a fraction of an unknown number of batches.
        """
        if self.val_check_seconds is not None:
            self.val_check_batch = None
            self.restart_validation_clock()
        elif isinstance(interval, int):
            if interval > num_batches and self.check_val_every_n_epoch is not None and validates:
                raise ConfigurationError(
                    f"`val_check_interval` ({interval}) must be less than or equal to the number of the training"
                    f" batches ({num_batches}). If you want to disable validation set `limit_val_batches` to 0.0"
                    " instead. If you want to validate based on the total training batches, set"
                    " `check_val_every_n_epoch=None`."
                )
            self.val_check_batch = interval
        elif interval == 1.0 and not has_known_end:
            self.val_check_batch = float("inf")
        elif num_batches == float("inf"):
            raise ConfigurationError(
                "When using an IterableDataset for `train_dataloader`, `Trainer(val_check_interval)` must be time"
                f" based, `1.0` or an int. Got {interval}. An int k specifies checking validation every k training"
                " batches."
            )
        else:
            self.val_check_batch = max(1, int(num_batches * interval))
        if self.val_check_batch is not None and self.check_val_every_n_epoch is not None:
            self.validates_at_end |= num_batches % self.val_check_batch == 0

    def restart_validation_clock(self) -> None:
        """Restart the time to the next validation."""
        self.validated_at, self._decided = time.monotonic(), (-1, False)

    def logging_is_due(self) -> bool:
        """Return whether the loggers get a row for the current optimizer step."""
        every = self.log_every_n_steps
        stops = self.should_stop and self.may_stop()
        return every > 0 and ((self.progress.updates + 1) % every == 0 or bool(stops))
