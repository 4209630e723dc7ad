"""More about an error that has ended a run: which batch it was, and what to do about workers and about memory.

Nothing here runs while all goes well. How long workers are waited for is in ``trainer.data.workers``.
"""

from __future__ import annotations

import gc
import re
import traceback
from typing import Any

import torch
from torch import Tensor

from trainer import machine
from trainer.data.samples import batch_size
from trainer.data.workers import DEAD_WORKER
from trainer.errors import DataLoaderError, is_out_of_memory
from trainer.machine import readable

_HUNG = re.compile(r"DataLoader timed out after (?P<seconds>[\d.]+) seconds")
_RAISED = re.compile(r"Caught \w+ in (DataLoader worker process \d+|pin memory thread)")
_WAITED = re.compile(r"Timed out waiting \d+ms|[Tt]imeout.*(collective|operation)|(collective|operation).*timed? ?out")
_ABOUT_BATCHES = (IndexError, RuntimeError, TypeError, ValueError)
_SHAPES = re.compile(
    r"shape|sizes? (of|mismatch)|channels|dimension|out of bounds|scalar type|dtype|\d+D", re.IGNORECASE
)


def explain(error: BaseException, trainer: Any) -> DataLoaderError | None:
    """Say more about ``error``, which has ended a run.

    Args:
        error: with its traceback. Where a dataset has raised it, or memory has run out, it is given a note
            (``__notes__``), which a traceback shows below the message: it stays what it is for those who catch it.
            One about memory lets go of what its traceback held.
        trainer: whose run it was; still in the state in which the error found it.

    Returns:
        What to raise in its place, where a worker process has died or does not answer; None for ``error`` itself.
    """
    text = str(error)
    if isinstance(error, Exception) and _RAISED.search(text):
        add_note(error, f"It was raised while {_where(trainer)} was loaded.")
    elif isinstance(error, RuntimeError) and (found := DEAD_WORKER.search(text)):
        return _about_worker(trainer, [int(pid) for pid in found["pids"].split(",")], found["how"])
    elif isinstance(error, RuntimeError) and (found := _HUNG.search(text)):
        return _about_worker(trainer, [], f"have sent nothing for {found['seconds']} seconds")
    elif isinstance(error, RuntimeError) and _WAITED.search(text):
        _explain_waiting(error, trainer)
    elif is_out_of_memory(error):
        add_note(error, _about_memory(trainer))
        let_go(error)
    elif isinstance(error, _ABOUT_BATCHES) and _SHAPES.search(text) and trainer.active_metrics is not None:
        add_note(error, f"It was raised by {_where(trainer)}: {describe_batch(trainer.active_metrics.batch)}.")
    return None


def _explain_waiting(error: RuntimeError, trainer: Any) -> None:
    """An exchange in vain, while processes may have different numbers of batches."""
    loop = trainer.eval_loops.get(trainer.state.stage)
    if loop is not None and loop.pace is not None and loop.pace.is_uneven:
        add_note(
            error,
            f"It was waited at {_where(trainer)}. Processes may have different numbers of batches there. If"
            f" {loop.stage}_step or a hook of the batch exchanges something with the others (torch.distributed), have"
            " all evaluate equally many: Trainer(pad_evaluation=True).",
        )


# --- workers of dataloaders -----------------------------------------------------------------------------------


def _about_worker(trainer: Any, pids: list[int], how: str) -> DataLoaderError:
    who = f"A worker process of a DataLoader (pid {', '.join(map(str, pids))}) "
    lines = [f"{who if pids else 'The worker processes of a DataLoader '}{how}: at {_where(trainer)}."]
    if not pids:
        lines += [
            "Either they hang (a lock that was held when the process was forked, a file system or network that does"
            " not answer), or a batch takes that long. Try num_workers=0, where a hang can be interrupted and shows"
            " its traceback; DataLoader(multiprocessing_context='spawn'); or allow more time, by"
            " Trainer(dataloader_timeout=seconds), 0 for no limit."
        ]
    elif "Bus error" in how:
        lines += [f"The shared memory is probably full{_shared_memory_left()}.", *_ABOUT_SHARED_MEMORY]
    elif "Killed" in how:
        lines += [
            f"The system kills processes when memory runs out{_shared_memory_left()}. Try fewer workers"
            " (num_workers), a smaller prefetch_factor, a smaller batch, or a dataset that holds less: each worker"
            " has its own copy.",
            *_ABOUT_SHARED_MEMORY,
        ]
    else:
        lines += [
            "Its own message, if it left one, is above. Try num_workers=0, which shows the traceback, or"
            " DataLoader(multiprocessing_context='spawn') for libraries that do not survive a fork."
        ]
    return DataLoaderError(" ".join(lines), _prefix(trainer), _batch_idx(trainer), pids)


_ABOUT_SHARED_MEMORY = (
    "Batches travel through shared memory: where that is small (a container's is 64 MB by default; start it with"
    " --shm-size=8g or --ipc=host), torch.multiprocessing.set_sharing_strategy('file_system') may help, and"
    " num_workers=0 does.",
)


def _shared_memory_left() -> str:
    known = machine.shared_memory()
    return f" ({machine.SHARED_MEMORY} has {readable(known[0])} left of {readable(known[1])})" if known else ""


# --- memory ---------------------------------------------------------------------------------------------------


def let_go(error: BaseException) -> None:
    """Drop what the frames of a traceback hold: the activations and the batch that there was no room for.

    The traceback stays readable. Who keeps the exception (a notebook does) would keep all of them otherwise.
    """
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__


def free_memory(device: torch.device) -> None:
    """Give back what nobody uses any more; for the moment after an error about memory."""
    if device.type == "cpu":
        gc.collect(1)  # what a step has left behind; all of it takes a second, and the system has room to swap
        return
    gc.collect()
    if device.type in ("cuda", "mps", "xpu"):
        torch.get_device_module(device).empty_cache()


def describe_batch(batch: Any) -> str:
    """What a batch consists of.

    >>> describe_batch([torch.zeros(4, 3), {"label": torch.zeros(4, dtype=torch.int64)}])
    '[Tensor[4, 3] float32, {label: Tensor[4] int64}]'
    """
    if isinstance(batch, Tensor):
        return f"Tensor{list(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, dict):
        return f"{{{', '.join(f'{name}: {describe_batch(part)}' for name, part in batch.items())}}}"
    if isinstance(batch, (list, tuple)):
        shown = [describe_batch(part) for part in batch[:8]]
        return f"[{', '.join(shown)}{', ...' if len(batch) > 8 else ''}]"
    return type(batch).__name__


def _about_memory(trainer: Any) -> str:
    device = trainer.engine.device
    metrics = trainer.active_metrics
    size = None if metrics is None else batch_size(metrics.batch) or None
    samples = "" if size is None else f", which has {size} sample{'s' * (size != 1)}"
    lines = [f"Memory ran out at {_where(trainer)}{samples}, on {device}{_peak(device)}."]
    training = trainer.training
    windows = trainer.accumulate_grad_batches
    if training and size != 1:
        smaller = "a smaller batch" if size is None else f"batches of {size // 2}"
        lines.append(
            f"Try {smaller} with accumulate_grad_batches={windows * 2}, which learns from as many samples a step; or"
            " callbacks=[HalveOnOutOfMemory()] (trainer.callbacks), which does the same by itself when memory runs out."
        )
    elif size != 1:
        lines.append("Try a smaller batch.")
    if training and str(trainer.precision).startswith(("32", "64")):
        lines.append("precision='bf16-mixed' halves what activations take.")
    if training:
        lines.append(
            "callbacks=[ActivationCheckpointing('net.layer*')] computes activations a second time in the place of"
            " keeping them."
        )
    return "\n".join([lines[0], " ".join(lines[1:])]).rstrip()


def _peak(device: torch.device) -> str:
    if device.type == "cuda":
        used, held = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        total = torch.cuda.get_device_properties(device).total_memory
        return f" (at its peak tensors took {readable(used)}, torch held {readable(held)}, of {readable(total)})"
    if device.type == "mps":
        used, total = torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory()
        return f" (torch holds {readable(used)}, recommended are up to {readable(total)})"
    used, most = machine.peak_memory(), machine.memory().most
    return f" (at its peak the process took {readable(used)}, of {readable(most)})" if used and most else ""


# --- where a run is -------------------------------------------------------------------------------------------


def _where(trainer: Any) -> str:
    """``batch_idx 17 of epoch 2 (train_dataloader)``."""
    epoch = f" of epoch {trainer.current_epoch}" if trainer.state.fn == "fit" else ""
    check = ", in the sanity check" if trainer.sanity_checking else ""
    rank = f", on rank {trainer.global_rank}" if trainer.world_size > 1 else ""
    return f"batch_idx {_batch_idx(trainer)}{epoch} ({_prefix(trainer)}_dataloader{check}{rank})"


def _prefix(trainer: Any) -> str:
    stage = trainer.state.stage
    return "train" if stage is None else str(stage.dataloader_prefix)


def _batch_idx(trainer: Any) -> int:
    """Of the batch that runs, or else of the next one."""
    loop, progress = trainer.eval_loops.get(trainer.state.stage), trainer.progress
    return int(progress.batch_idx + (not progress.in_batch) if loop is None else loop.progress.batches_done)


def add_note(error: BaseException, text: str) -> None:
    """Let a traceback show ``text`` below the error's message, once."""
    if text not in getattr(error, "__notes__", ()):
        error.add_note(text)
