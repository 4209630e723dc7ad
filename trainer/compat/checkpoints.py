"""Which file ``ckpt_path`` means, and what older versions of Lightning wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint

from trainer.compat import registry
from trainer.compat.restored_paths import refuse_foreign
from trainer.compat.signals import requeued_checkpoint
from trainer.errors import ConfigurationError

VERSION_KEY = "pytorch-lightning_version"


def up_to_date(checkpoint: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """``checkpoint`` as the installed Lightning would have written it, where an older one did; in place."""
    is_lightnings = isinstance(checkpoint, dict) and VERSION_KEY in checkpoint
    return _pl_migrate_checkpoint(checkpoint, path) if is_lightnings else checkpoint


def select_path(trainer: Any, given: str | Path | None, *, model_given: bool) -> str | Path | None:
    """The file to load for a run that was called with ``ckpt_path=given``; None for none.

    What the user has assigned to ``trainer.ckpt_path`` counts where nothing is given; otherwise what is given does.

    Args:
        trainer: which state's function is about to run.
        given: a path, a URL, ``"best"``, ``"last"``, ``"hpc"``, ``"registry..."`` or None.
        model_given: whether the run was given a module; if not, None means ``"best"``.

    Raises:
        ConfigurationError: there is no such file.
    """
    if trainer.ckpt_path_is_assigned:
        if not given:
            assigned: str | Path = trainer.ckpt_path
            return assigned
        rank_zero_warn(
            f"`trainer.ckpt_path = {trainer.ckpt_path!r}` was called but then you passed"
            f" `trainer.fit(ckpt_path={given!r})`. The latter will be loaded."
        )
        trainer.ckpt_path = None
    fn: str = trainer.state.fn.value
    on_exception = [callback for callback in trainer.callbacks if isinstance(callback, OnExceptionCheckpoint)]
    if given is None:
        given = _by_default(trainer, fn, model_given, has_on_exception=bool(on_exception))
        if given is None:
            return None
    if given == "best":
        given = _best(trainer, fn)
    elif given == "last":
        given = _last(trainer, fn, on_exception)
        if given is None:
            return None
    elif given == "hpc":
        given = requeued_checkpoint(trainer)
        if given is None:
            raise ConfigurationError(
                f'`.{fn}(ckpt_path="hpc")` is set but no HPC checkpoint was found: expected a file hpc_ckpt_*.ckpt in'
                f" {trainer.default_root_dir}. Please pass an exact checkpoint path to `.{fn}(ckpt_path=...)`"
            )
    else:
        given = registry.fetch(given, trainer)
    if not given:
        raise ConfigurationError(
            f"`.{fn}()` found no path for the best weights: {given!r}. Please specify a path for a checkpoint"
            f" `.{fn}(ckpt_path=PATH)`"
        )
    return given


def _by_default(trainer: Any, fn: str, model_given: bool, *, has_on_exception: bool) -> str | None:
    if SLURMEnvironment.detect() and requeued_checkpoint(trainer) is not None:
        return "hpc"
    advice = (
        f" You can pass `.{fn}(ckpt_path='best')` to use the best model or `.{fn}(ckpt_path='last')` to use the last"
        " model. If you pass a value, this warning will be silenced."
    )
    if has_on_exception and trainer.state.fn is TrainerFn.FITTING:
        rank_zero_warn(
            f"`.{fn}(ckpt_path=None)` was called with an `OnExceptionCheckpoint`. The last model of the previous `fit`"
            f" call will be used.{advice}"
        )
        return "last"
    if model_given:
        return None
    tip = " There is also an on-exception checkpoint available, however it is used by default only when fitting."
    rank_zero_warn(
        f"`.{fn}(ckpt_path=None)` was called without a model. The best model of the previous `fit` call will be used."
        f"{tip if has_on_exception else ''}{advice}"
    )
    return "best"


def _best(trainer: Any, fn: str) -> str | Path | None:
    if len(trainer.checkpoint_callbacks) > 1:
        rank_zero_warn(
            f'`.{fn}(ckpt_path="best")` is called with Trainer configured with multiple `ModelCheckpoint` callbacks.'
            " It will use the best checkpoint path from first checkpoint callback."
        )
    callback = trainer.checkpoint_callback
    if callback is None:
        raise ConfigurationError(
            f'`.{fn}(ckpt_path="best")` is set but `ModelCheckpoint` is not configured. Add one to the callbacks, or'
            " pass the path of a file."
        )
    path: str | Path | None = getattr(callback, "best_model_path", None)
    refuse_foreign(trainer, path, fn)
    if not path and hasattr(callback, "best_model_path"):
        if trainer.fast_dev_run:
            raise ConfigurationError(
                f'You cannot execute `.{fn}(ckpt_path="best")` with `fast_dev_run=True`. Please pass an exact'
                f" checkpoint path to `.{fn}(ckpt_path=...)`"
            )
        raise ConfigurationError(
            f'`.{fn}(ckpt_path="best")` is set but `ModelCheckpoint` is not configured to save the best model.'
            " Add ModelCheckpoint(monitor=...) to the callbacks, or pass the path of a file."
        )
    return path


def _last(trainer: Any, fn: str, on_exception: list[OnExceptionCheckpoint]) -> str | None:
    candidates: set[Any] = {callback.ckpt_path for callback in on_exception}
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            candidates |= callback._find_last_checkpoints(trainer)
    times = {path: fs.modified(path) for path in candidates if path and (fs := get_filesystem(path)).exists(path)}
    if not times:
        rank_zero_warn(  # not an error: so it can be there before the first run
            f'.{fn}(ckpt_path="last") is set, but there is no last checkpoint available. No checkpoint will be loaded.'
            " HINT: Set `ModelCheckpoint(..., save_last=True)`."
        )
        return None
    newest: str = max(times, key=times.__getitem__)
    return newest
