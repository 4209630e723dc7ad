"""Profiling: time the calls of a run under the names that Lightning's Trainer uses.

Without a profiler, the loops make their calls directly. (``loaders`` times the fetching of batches, and Lightning the
hooks around a run.) Two actions cover other code than in Lightning: ``run_training_batch`` covers a whole batch, from
its transfer to ``on_train_batch_end``; and ``optimizer_step`` covers only the weight update, without forward and
backward, unless the module overrides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies import Strategy

from trainer.loop.batch_path import BatchPath, TrainingPath
from trainer.loop.overrides import overrides
from trainer.loop.run_state import RunState

Call = Callable[..., Any]


def records(profiler: Profiler) -> bool:
    """Return whether a profiler records anything. ``PassThroughProfiler`` does not, unless a method is overridden."""
    return not isinstance(profiler, PassThroughProfiler) or any(
        overrides(profiler, name) for name in ("profile", "start", "stop")
    )


class Profiling:
    """Wraps the calls of one run for the Trainer's profiler.

    Args:
        run: the state of the run, with the profiler, the module and the strategy.
    """

    def __init__(self, run: RunState) -> None:
        self._profiler = run.profiler
        self._module: LightningModule = run.module
        self._strategy = f"[Strategy]{type(run.trainer.strategy).__name__}"

    @classmethod
    def of(cls, run: RunState) -> Profiling | None:
        """Create the profiling at the start of a run , or return None without a profiler."""
        return cls(run) if records(run.profiler) else None

    def action(self, name: str, call: Call) -> Call:
        """Return ``call``, timed as ``name``."""
        return partial(self._time, name, call)

    def hook(self, owner: Any, name: str, call: Call) -> Call:
        """Return ``call``, timed as the hook ``name`` of a callback, a module or a datamodule."""
        owner_kind, owner_name = "Callback", type(owner).__name__
        if isinstance(owner, (LightningModule, LightningDataModule)):
            owner_kind = "LightningModule" if isinstance(owner, LightningModule) else "LightningDataModule"
        elif isinstance(owner, Strategy):
            owner_kind = "Strategy"
        else:
            owner_name = getattr(owner, "state_key", owner_name)
        return self.action(f"[{owner_kind}]{owner_name}.{name}", call)

    def training_epoch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield ``batches``, and time them as one action."""
        with self._profiler.profile("run_training_epoch"):
            yield from batches

    def watch_fit(self, zero_grad: Call, backward: str, path: TrainingPath) -> TrainingPath:
        """Return a path with timed functions.

        Args:
            zero_grad: the module's ``optimizer_zero_grad``, even if it is the default version.
            backward: the name of the function that is timed as the strategy's backward pass.
            path: the path of a training batch.
        """
        module, strategy = f"[LightningModule]{type(self._module).__name__}", self._strategy
        timed: dict[str, Any] = {backward: self.action(f"{strategy}.backward", getattr(path, backward))}
        return replace(
            path,
            **timed,
            transfer=self.action(f"{strategy}.batch_to_device", path.transfer),
            train_batch=self.action("run_training_batch", path.train_batch),
            step=self.action(f"{strategy}.training_step", path.step),
            zero_grad=zero_grad,
            clip=path.clip and self.action(f"{module}.configure_gradient_clipping", path.clip),
            update_weights=self.action(f"{module}.optimizer_step", path.update_weights),
        )

    def watch_evaluation(self, stage: str, path: BatchPath) -> BatchPath:
        """Return a path with timed functions.

        Args:
            stage: the prefix of the step: ``"validation"``, ``"test"`` or ``"predict"``.
            path: the path of a batch.
        """
        return replace(
            path,
            transfer=self.action(f"{self._strategy}.batch_to_device", path.transfer),
            step=self.action(f"{self._strategy}.{stage}_step", path.step),
        )

    def _time(self, name: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        with self._profiler.profile(name):
            return call(*args, **kwargs)
