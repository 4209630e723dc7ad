"""``predict ckpt=SWEEP`` of a sweep over folds: predict with the model of each fold, and average the predictions."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.parsing import Arguments, UsageError
from trainer.cli.workdir import path_override
from trainer.common.files import from_here
from trainer.record.find_checkpoint import CONFIG
from trainer.record.sweep_record import load_sweep

if TYPE_CHECKING:
    from torch import Tensor

_PREDICTIONS = "predictions.pt"


def predict(arguments: Arguments, run: Callable[[Arguments], int]) -> int | None:
    """Run ``predict`` with each job of the best folds, and write ``predictions.csv`` and ``predictions.pt``.

    Args:
        arguments: the command line.
        run: runs a command line, and returns its exit status.

    Returns:
        The exit status, or None if ``ckpt`` is not the folder of a sweep over folds.

    Raises:
        UsageError: if ``-m`` is given, or the predictions cannot be averaged.
    """
    given = [word for word in arguments.overrides if word.lstrip("+").startswith("ckpt=")]
    path = Path(given[-1].partition("=")[2].strip("'\" ")).expanduser() if given else None
    if path is None or arguments.shows or not path.is_dir() or (path / CONFIG).is_file():
        return None
    best = load_sweep(path).folds
    if best is None:
        return None
    if arguments.multirun:
        raise UsageError(f"Got -m with ckpt={path}, a sweep over folds, but this averages one prediction. Remove -m.")
    chosen = [word for word in arguments.overrides if word.startswith("hydra.run.dir=")]
    folder = path / "predict" / time.strftime("%Y-%m-%d_%H-%M-%S")
    if chosen:
        folder = Path(chosen[-1].partition("=")[2].strip("'\"")).expanduser()
    others = [word for word in arguments.overrides if word not in (*given, *chosen)]
    folders = [folder / str(job.job) for job in best[1]]
    for job, place in zip(best[1], folders, strict=True):
        words = [*others, f"ckpt={job.folder}", path_override("hydra.run.dir", place)]
        if status := run(replace(arguments, overrides=words, flags={**arguments.flags})):
            return status
    _write(_mean([_read(place) for place in folders]), folder)
    print(f"The mean of {len(folders)} jobs is in {from_here(folder)}/predictions.csv.")
    return 0


def _read(folder: Path) -> Tensor:
    """Return the predictions of a job, with all batches in one tensor."""
    import torch

    file = folder / _PREDICTIONS
    if not file.is_file():
        raise UsageError(
            f"There is no {from_here(file)}, because a callback of the config writes the predictions, or there were"
            " several processes. Remove the callback (~callbacks.NAME), or set trainer.devices=1."
        )
    batches = torch.load(file, weights_only=True)
    if not batches or any(not isinstance(b, torch.Tensor) or not b.is_floating_point() or b.ndim > 2 for b in batches):
        raise UsageError(
            f"The predictions in {from_here(file)} cannot be averaged. Expected from predict_step a floating-point"
            " tensor: probabilities of shape (batch, classes), or numbers."
        )
    return torch.cat(batches)


def _mean(predictions: Sequence[Tensor]) -> Tensor:
    import torch

    if len({tensor.shape for tensor in predictions}) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in predictions)
        raise UsageError(
            f"The predictions of the jobs have the shapes {shapes}, expected one. predict_dataloader must return the"
            " same samples in each fold."
        )
    return torch.stack([tensor.double() for tensor in predictions]).mean(0).to(predictions[0].dtype)


def _write(mean: Tensor, folder: Path) -> None:
    import torch

    torch.save([mean], folder / _PREDICTIONS)
    rows = mean.float().reshape(len(mean), -1)
    width = rows.shape[1]
    header = [f"value_{column}" for column in range(width)] if width > 1 else ["value"]
    values = rows.tolist()
    if width > 1 and bool((rows >= 0).all()) and torch.allclose(rows.sum(1), torch.ones(len(rows)), atol=1e-2):
        header, best = ["class", "probability"], rows.max(1)
        values = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    with (folder / "predictions.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["sample", *header])
        for sample, row in enumerate(values):
            table.writerow([sample, *(f"{value:.6g}" for value in row)])
