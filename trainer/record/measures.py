"""Measure the facts of a run from its Trainer, batches and device. Most functions also accept Lightning's Trainer."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.common import machine
from trainer.common.module_tree import parameters_of
from trainer.loggers import adapter
from trainer.loop.run_state import RunState, state_of
from trainer.precision.cpu_fp16 import kernel_facts
from trainer.precision.devices import peak_memory

if TYPE_CHECKING:
    import lightning.pytorch as pl


_MIN_SKIPPED = 3
"""Minimum number of skipped steps for a message, if no other steps were taken. Fewer are normal at the start."""


def facts_of(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the current facts of a Trainer for ``run.json``, including the ``run_facts`` of its callbacks."""
    device = device_of(trainer)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    facts = {
        "precision": str(trainer.precision),
        "devices": f"{trainer.world_size} x {name}",
        "gpu": tensor_cores_of(device),
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "skipped_steps": getattr(trainer, "skipped_steps", None),  # `lightning.Trainer` does not count them
        "scale": loss_scale(trainer),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "peak_memory": {"gpu" if device.type == "cuda" else "process": peak} if (peak := peak_memory(device)) else {},
        "monitor": monitor_of(trainer),
        "best_score": best_score_of(trainer),
    }
    progress = getattr(trainer, "progress", None)  # `lightning.Trainer` has none
    if number := getattr(progress, "nonfinite_losses", 0):
        facts["nonfinite_losses"] = number
    if (sharding := getattr(trainer.strategy, "sharding", None)) is not None:
        facts["sharding"] = sharding
    prefetching = getattr(getattr(trainer, "data", None), "prefetching", None)  # `lightning.Trainer` has none
    if prefetching is not None and prefetching.from_pinned is not None:
        unpinned = "memory that is not pinned: DataLoader(pin_memory=True)"
        facts["prefetching"] = f"1 batch, from {'pinned memory' if prefetching.from_pinned else unpinned}"
    kernels = getattr(getattr(getattr(trainer, "engine", None), "precision", None), "kernels", None)
    if kernels is not None and (described := kernel_facts(kernels.fast, kernels.ratios)):
        facts["float16_kernels"] = described
    if (loaded := getattr(trainer, "loaded_weights", None)) is not None:
        facts["weights"] = loaded.facts
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        facts |= getattr(callback, "run_facts", dict)()
    return facts


def reason_without_updates(trainer: pl.Trainer) -> str | None:
    """Return the message for a fit that updated no weight, with the reason, or None.

    Returns None for a ``fast_dev_run``, for fewer than three skipped steps, which are normal at the start, and if no
    optimizer has a parameter.
    """
    progress = getattr(trainer, "progress", None)  # `lightning.Trainer` has none
    if progress is None or progress.has_learned or state_of(trainer).fast_dev_run:
        return None
    if not progress.skipped_steps and any(map(parameters_of, trainer.optimizers)):
        return _reason_without_steps(state_of(trainer))
    if progress.skipped_steps < _MIN_SKIPPED:
        return None
    steps, scale = trainer.global_step, loss_scale(trainer)
    reason = f"No weight was updated: all {steps} optimizer steps were skipped, because gradients were not finite."
    if (report := last_diagnosis(trainer)) is not None:
        return f"{reason} {report.cause}"
    if scale is None or scale <= state_of(trainer).scaler.min_scale:
        return reason
    start = f"MixedPrecision(init_scale={scale:g}), on the command line precision.init_scale={scale:g}"
    return f"{reason} The loss scale is still decreasing: train longer, or start there: {start}."


def _reason_without_steps(run: RunState) -> str | None:
    progress, module = run.progress, run.module
    if not progress.batches:
        is_requested = run.limits.should_stop or not progress.epochs_trained  # limit_train_batches=0, max_epochs=0
        reason = f"no batch was trained in {progress.epochs_trained} epochs"
    elif module.automatic_optimization:
        is_requested = not progress.optimizer_steps  # stopped within the first accumulation window
        advice = "Return the loss, or set `self.automatic_optimization = False` if it steps the optimizers itself"
        reason = f"`training_step` returned no loss with a weight above 0 in {progress.batches} batches. {advice}"
    else:
        is_requested = False
        reason = f"the module stepped no optimizer in {progress.batches} batches (`automatic_optimization = False`)"
    return None if is_requested else f"The Trainer has updated no weight: {reason}."


def last_diagnosis(trainer: pl.Trainer) -> Any | None:
    """Return the last diagnosis of the run (`trainer.diagnosis.report_file.Diagnosis`), or None without one."""
    reports = [report for callback in trainer.callbacks for report in getattr(callback, "reports", ())]  # type: ignore[attr-defined]
    return reports[-1] if reports else None


def device_of(trainer: pl.Trainer) -> torch.device:
    """Return the device of this process."""
    return trainer.strategy.root_device


def data_parallel_size_of(trainer: pl.Trainer) -> int:
    """Return the number of processes with different batches."""
    engine = getattr(trainer, "engine", None)  # `lightning.Trainer` has none
    return int(trainer.world_size if engine is None else engine.data_parallel_size)


def loss_scale(trainer: pl.Trainer) -> float | None:
    """Return the scale of the next loss, or None without loss scaling."""
    scaler = trainer.scaler  # None under `lightning.Trainer` without loss scaling
    return scaler.get_scale() if scaler is not None and scaler.is_enabled() else None


def monitor_of(trainer: pl.Trainer) -> dict[str, str] | None:
    """Return the metric that the checkpoints (otherwise early stopping) monitor, and its mode, or None."""
    callbacks: tuple[Any, ...] = trainer.checkpoint_callback, trainer.early_stopping_callback
    for callback in callbacks:
        if getattr(callback, "monitor", None):
            return {"metric": callback.monitor, "mode": callback.mode}
    return None


def best_score_of(trainer: pl.Trainer) -> float | None:
    """Return the monitored metric at the best checkpoint, or None if it is not finite or there is no such file."""
    checkpoints = trainer.checkpoint_callback
    score = getattr(checkpoints, "best_model_score", None)
    if score is None or not math.isfinite(score) or not _exists(getattr(checkpoints, "best_model_path", None)):
        return None
    return float(score)


def paths_of(trainer: pl.Trainer) -> dict[str, str | list[str]]:
    """Return the absolute paths of the existing checkpoints and of the loggers' folders.

    ``best_model_path`` of a ModelCheckpoint without a monitored metric is its newest file. Here that file is the last
    checkpoint.
    """
    checkpoints = trainer.checkpoint_callback
    best, last = (getattr(checkpoints, f"{name}_model_path", None) for name in ("best", "last"))
    if not getattr(checkpoints, "monitor", None):
        best, last = None, last or best
    paths: dict[str, str | list[str]] = {}
    for name, path in {"best_checkpoint": best, "last_checkpoint": last}.items():
        if _exists(path):
            paths[name] = os.path.abspath(str(path))
    # CSV and TensorBoard loggers share one folder.
    folders = (os.path.abspath(folder) for folder in folders_of_loggers(trainer))
    if loggers := [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]:
        paths["loggers"] = loggers
    return paths


def _exists(path: str | None) -> bool:
    """Return whether a checkpoint was written. A URL counts as written."""
    return bool(path) and ("://" in str(path) or os.path.exists(str(path)))


def folder_of_files(trainer: pl.Trainer, given: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder for a callback's files. No communication.

    It is ``given``, otherwise the folder of the first logger with a local folder, otherwise
    ``trainer.default_root_dir``. None if that is a URL.
    """
    folder = str(given or next(iter(folders_of_loggers(trainer)), trainer.default_root_dir))
    return None if "://" in folder else Path(folder).absolute()


def folder_of_run(trainer: pl.Trainer) -> Path | None:
    """Return the folder of ``run.json``, or else the first logger's folder. None if neither is on this machine.

    On ranks above zero, loggers do not count, because only rank zero opens them. No communication.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if (find := getattr(callback, "folder_of_record", None)) and (folder := find(trainer)) is not None:
            return Path(folder)
    folders = folders_of_loggers(trainer) if trainer.is_global_zero else []
    return Path(folders[0]).absolute() if folders else None


def folder_of_reports(trainer: pl.Trainer) -> Path | None:
    """Return the folder for reports about an overflow, an out-of-memory error or a hang.

    The folder of the run, else the ``default_root_dir`` that the user passed to the Trainer, except in a
    ``fast_dev_run``. None if there is neither: then the report is only printed.
    """
    if (folder := folder_of_run(trainer)) is not None:
        return folder
    is_given = getattr(trainer, "default_root_dir_given", True)  # `lightning.Trainer` does not have it
    writes = is_given and not trainer.fast_dev_run  # type: ignore[attr-defined]
    return folder_of_files(trainer, trainer.default_root_dir) if writes else None


def folders_of_loggers(trainer: pl.Trainer) -> list[str]:
    """Return the folders of this machine that the loggers write to."""
    return [folder for logger in trainer.loggers if (folder := adapter(logger).folder)]


def training_loss(trainer: pl.Trainer, outputs: Any, *, keep: bool = False) -> Tensor | None:
    """Return the loss of a batch as returned by ``training_step``, from the outputs in ``on_train_batch_end``.

    The loss in the outputs is multiplied by ``trainer.loss_share``; the result is not.

    Args:
        trainer: the Trainer.
        outputs: a dict with a "loss", a tensor, or another object.
        keep: whether the tensor is kept after the batch. It is then copied, unless ``self.log`` has copied it, because
            CUDA graphs reuse the memory of their outputs. Default: False.

    Returns:
        A tensor with one element on its device, or None if there is no loss.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    share = getattr(trainer, "loss_share", 1.0 / trainer.accumulate_grad_batches)  # the value for `lightning.Trainer`
    if not isinstance(share, float) or share != 1.0:
        batch_loss: Tensor = loss.detach() / share
        return batch_loss
    if not keep:
        return loss
    metrics = getattr(trainer, "active_metrics", None)  # `lightning.Trainer` has none
    return loss.detach().clone() if metrics is None else metrics.copy_of(loss)


def memory_in_use(device: torch.device) -> int:
    """Return the bytes that torch has reserved on a GPU, otherwise the physical memory of the process."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else machine.memory_in_use()


def tensor_cores_of(device: torch.device) -> dict[str, Any] | None:
    """Return the GPU's compute capability and the operations in TensorFloat-32, or None on another device."""
    if device.type != "cuda":
        return None
    # reading allow_tf32 raises if the user has set fp32_precision
    float32 = {
        "matrix products": torch.backends.cuda.matmul.fp32_precision,
        "convolutions": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]  # made at run time
    }
    return {
        "capability": list(torch.cuda.get_device_capability(device)),
        "tf32": [operation for operation, precision in float32.items() if precision == "tf32"],
    }
