"""What a profiler times, under the names that Lightning's Trainer uses.

Without a profiler, the loops make their calls directly. (The fetching of batches is timed in ``loaders``, the hooks
around a run by Lightning.) Two actions hold something else than with Lightning:
``run_training_batch`` is all of a batch, from its transfer to ``on_train_batch_end``; and ``optimizer_step`` of a
module that leaves it to the loop is the weight update alone, without forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies import Strategy

from trainer.compat.overrides import overrides
from trainer.loops.evaluation import EvalLoop
from trainer.loops.fit import FitLoop
from trainer.loops.hooks import Hook, Hooks
from trainer.loops.manual_optimization import ManualOptimization

Call = Callable[..., Any]


def records(profiler: Profiler) -> bool:
    """Return whether a profiler records anything. ``PassThroughProfiler`` does not, unless a method is overridden."""
    return not isinstance(profiler, PassThroughProfiler) or any(
        overrides(profiler, name) for name in ("profile", "start", "stop")
    )


class Profiling:
    """Puts the Trainer's profiler around the calls of one run.

    Args:
        trainer: whose profiler, module and strategy.
    """

    def __init__(self, trainer: Any) -> None:
        self._profiler = trainer.profiler
        self._module: LightningModule = trainer.lightning_module
        self._strategy = f"[Strategy]{type(trainer.strategy).__name__}"

    @classmethod
    def of(cls, trainer: Any) -> Profiling | None:
        """For the run of ``trainer`` that begins; None without a profiler."""
        return cls(trainer) if records(trainer.profiler) else None

    def action(self, name: str, call: Call) -> Call:
        """``call``, timed as ``name``."""
        return partial(self._time, name, call)

    def hook(self, owner: Any, name: str, call: Call) -> Call:
        """``call``, timed as the hook ``name`` of a callback, a module or a datamodule."""
        kind, who = "Callback", type(owner).__name__
        if isinstance(owner, (LightningModule, LightningDataModule)):
            kind = "LightningModule" if isinstance(owner, LightningModule) else "LightningDataModule"
        elif isinstance(owner, Strategy):
            kind = "Strategy"
        else:
            who = getattr(owner, "state_key", who)
        return self.action(f"[{kind}]{who}.{name}", call)

    def training_epoch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """``batches``, timed until the last one is through."""
        with self._profiler.profile("run_training_epoch"):
            yield from batches

    def clipping(self, call: Call) -> Call:
        """``call``, timed as the module's clipping of gradients."""
        return self.action(f"[LightningModule]{type(self._module).__name__}.configure_gradient_clipping", call)

    def watch_fit(self, loop: FitLoop, hooks: Hooks, path: object) -> None:
        """Time what a prepared fit loop does with a batch. Each run sets it anew, but for ``update_weights``."""
        module, strategy = f"[LightningModule]{type(self._module).__name__}", self._strategy
        loop.transfer = self.action(f"{strategy}.batch_to_device", loop.transfer)
        loop.train = self.action("run_training_batch", loop.train)
        loop.training_step = self.action(f"{strategy}.training_step", loop.training_step)
        loop.optimizer_zero_grad = hooks.of_module("optimizer_zero_grad")
        if loop.add_gradients != loop.run_backward:  # the strategy's, which calls the module's
            loop.add_gradients = self.action(f"{strategy}.backward", loop.add_gradients)
        else:
            backward = loop.backward or self._module.backward
            loop.backward = Hook("backward", hooks.scope, module=self.action(f"{strategy}.backward", backward))
        vars(loop)["update_weights"] = self.action(f"{module}.optimizer_step", partial(FitLoop.update_weights, loop))
        if isinstance(path, ManualOptimization):
            loop.engine.module_calls = loop.engine.module_calls._replace(step=self.action("optimizer_step", path.step))

    def watch_evaluation(self, loop: EvalLoop) -> None:
        """Time what a prepared evaluation loop does with a batch."""
        loop.transfer = self.action(f"{self._strategy}.batch_to_device", loop.transfer)
        loop.step = self.action(f"{self._strategy}.{loop.stage}_step", loop.step)

    def _time(self, name: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        with self._profiler.profile(name):
            return call(*args, **kwargs)
