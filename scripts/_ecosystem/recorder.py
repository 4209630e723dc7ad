"""Record the weights, metrics and hook calls of every Trainer."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch

ENTRIES = ("fit", "validate", "test", "predict")


def instrument(run: Any, trainer_class: type, callback_class: type, module_class: type) -> None:
    """Record in ``run`` all runs of ``trainer_class`` and its subclasses."""
    recorder_class = recorder(callback_class)
    hooks = [name for name in dir(module_class) if is_hook(name)]
    original_init = trainer_class.__init__
    depth = 0

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        if not any(isinstance(one, recorder_class) for one in self.callbacks):
            self.callbacks.insert(0, recorder_class(run))

    def entry(name: str) -> Callable[..., Any]:
        original = getattr(trainer_class, name)

        @functools.wraps(original)
        def method(self: Any, model: Any = None, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            for cls in type(model).__mro__ if isinstance(model, module_class) else ():
                if cls is module_class:
                    break
                count_calls(run, cls, hooks)
            for logger in self.loggers:
                record_rows(run, type(logger))
            if depth:
                return original(self, model, *args, **kwargs)
            depth += 1
            run.begin(name)
            try:
                returned = original(self, model, *args, **kwargs)
            finally:
                depth -= 1
            finish(run, self, returned)
            return returned

        return method

    trainer_class.__init__ = init  # type: ignore[method-assign, misc]
    for name in ENTRIES:
        setattr(trainer_class, name, entry(name))


def finish(run: Any, trainer: Any, returned: Any) -> None:
    """Record the state at the end of a run."""
    module = trainer.lightning_module
    run.note("metrics", "callback_metrics", dict(trainer.callback_metrics))
    run.note("metrics", "returned", returned)
    run.note("metrics", "step and epoch", [trainer.global_step, trainer.current_epoch])
    run.note("weights", "module", module.state_dict())
    run.note("weights", "random numbers", random_states())
    if trainer.state.fn == "fit":
        run.note("weights", "optimizers", [one.state_dict() for one in trainer.optimizers])
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        run.note("weights", "schedules", [one.state_dict() for one in schedulers if hasattr(one, "state_dict")])
    run.end()


def random_states() -> dict[str, Any]:
    """Return the next number of each random generator, without advancing the generators."""
    python, numbers, torchs = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        return {"python": random.random(), "numpy": numpy.random.random(), "torch": torch.rand(()).item()}
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)
        torch.set_rng_state(torchs)


def is_hook(name: str) -> bool:
    """Return whether ``name`` is a method of a LightningModule that a Trainer calls."""
    return name.startswith("on_") or name in {
        "setup", "teardown", "prepare_data", "configure_model", "configure_optimizers", "configure_callbacks",
        "configure_gradient_clipping", "training_step", "validation_step", "test_step", "predict_step", "forward",
        "backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "log", "log_dict", "manual_backward",
        "transfer_batch_to_device", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader",
    }  # fmt: skip


def count_calls(run: Any, cls: type, names: list[str]) -> None:
    """Count the calls of the methods that ``cls`` defines. Methods of a class are wrapped only once."""
    if "_ecosystem_counts" in cls.__dict__:
        return
    cls._ecosystem_counts = True  # type: ignore[attr-defined]
    for name in {*names, "training_step", "validation_step", "test_step"}:
        original = cls.__dict__.get(name)
        if not callable(original) or isinstance(original, (staticmethod, classmethod)):
            continue
        setattr(cls, name, counting(run, f"{cls.__name__}.{name}", original))


def counting(run: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        run.calls[name] += 1
        return original(*args, **kwargs)

    return method


def record_rows(run: Any, cls: type) -> None:
    """Record the rows passed to loggers of this class. The class is patched only once."""
    if "_ecosystem_rows" in cls.__dict__:
        return
    cls._ecosystem_rows = True  # type: ignore[attr-defined]
    original = cls.log_metrics  # type: ignore[attr-defined]

    @functools.wraps(original)
    def log_metrics(self: Any, metrics: Any, step: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Lightning adds the epoch, except to single batches of an evaluation, which are logged with batch_idx as step
        run.rows.append(["logger", step if "epoch" in metrics else {"without epoch": step}, dict(metrics)])
        return original(self, metrics, step, *args, **kwargs)

    cls.log_metrics = log_metrics  # type: ignore[attr-defined]


@functools.cache
def recorder(base: type) -> type:
    """Return a callback class that counts all hooks, and records the metrics at the end of epochs."""

    def make(name: str) -> Callable[..., Any]:
        def hook(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
            self.run.calls[f"callback.{name}"] += 1
            if name in ("on_save_checkpoint", "on_load_checkpoint"):
                random_numbers_of_checkpoints(self.run, name, args)
            if name in ("on_validation_end", "on_train_epoch_end", "on_test_end"):
                self.run.seen.append([name, trainer.global_step, dict(trainer.callback_metrics)])

        return hook

    names = [name for name in dir(base) if name.startswith("on_") or name in ("setup", "teardown")]
    return type("Recorder", (base,), {"__init__": remember, **{name: make(name) for name in names}})


def random_numbers_of_checkpoints(run: Any, hook: str, args: tuple[Any, ...]) -> None:
    """Restore the random states of the checkpoint in Lightning's resumed run.

    Our checkpoints contain them. Lightning's do not (see the guide), so the resumed runs would differ. They are
    restored before the dataloaders draw numbers, so that these draw the same numbers as in the uninterrupted run.
    """
    if run.who == "ours":
        return
    key = args[1]["epoch"], args[1]["global_step"]
    if hook == "on_save_checkpoint":
        run.random[key] = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    elif key in run.random and run.entry.endswith("fit"):
        python, numbers, torchs = run.random[key]
        random.setstate(python)
        numpy.random.set_state(numbers)
        torch.set_rng_state(torchs)


def remember(self: Any, run: Any) -> None:
    self.run = run
