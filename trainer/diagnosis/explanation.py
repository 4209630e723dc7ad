"""Explain the error that ended a run: add the batch, the phase and advice to it.

This explains errors of dataloader workers, out-of-memory errors, timeouts of collectives, losses without a gradient or
with a freed graph, tensors of inference mode, and errors about shapes. The code runs only after an error. The timeouts
of workers are in ``trainer.data.workers``.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn

from trainer.common import machine
from trainer.common.machine import readable
from trainer.data.samples import batch_size, tensors_in
from trainer.data.workers import DEAD_WORKER
from trainer.errors import DataLoaderError, is_out_of_memory
from trainer.loop.run_state import RunState
from trainer.record import memory_usage as memory
from trainer.record.memory_usage import Usage
from trainer.state.progress import STARTED, TRAINED

Folder = Callable[[], Path | None]

_HUNG = re.compile(r"DataLoader timed out after (?P<seconds>[\d.]+) seconds")
_RAISED = re.compile(r"Caught \w+ in (DataLoader worker process \d+|pin memory thread)")
_COLLECTIVE_TIMEOUT = re.compile(
    r"Timed out waiting \d+ms|[Tt]imeout.*(collective|operation)|(collective|operation).*timed? ?out|timeout caused"
)
_NO_GRAPH = re.compile(r"does not require grad and does not have a grad_fn")
_NO_SCALAR = re.compile(r"grad can be implicitly created only for scalar outputs")
_FREED = re.compile(r"backward through the graph a second time")
_INFERENCE = re.compile(r"[Ii]nference tensor")
_BATCH_ERRORS = (IndexError, RuntimeError, TypeError, ValueError)
_SHAPES = re.compile(
    r"shape|sizes? (of|mismatch)|channels|dimension|out of bounds|scalar type|dtype|\d+D", re.IGNORECASE
)


def explain(
    error: BaseException, run: RunState, folder: Folder | None = None, stall: Callable[[], str | None] | None = None
) -> DataLoaderError | None:
    """Add a note to ``error``, which has ended a run, or return a more specific error.

    Args:
        error: the error with its traceback. Errors of datasets, timeouts of collectives, losses without a gradient,
            errors about shapes and out-of-memory errors get a note (``__notes__``), which a traceback shows below the
            message. An out-of-memory error also gets the attribute ``memory``
            (:class:`~trainer.record.memory_usage.Usage`), and the tensors in its traceback are released.
        run: the state of the run, in the state at the error.
        folder: returns the folder of the run, for a snapshot of a GPU's memory. Default: None, no snapshot.
        stall: returns the report of a hang. Default: None, hangs are not detected.

    Returns:
        The error to raise instead of ``error`` if a worker process has died or does not respond. Otherwise None.
    """
    text = str(error)
    if isinstance(error, Exception) and _RAISED.search(text):
        add_note(error, f"It was raised while {_describe_position(run)} was loaded.")
    elif isinstance(error, RuntimeError) and (matched := DEAD_WORKER.search(text)):
        return _worker_error(run, [int(pid) for pid in matched["pids"].split(",")], matched["how"])
    elif isinstance(error, RuntimeError) and (matched := _HUNG.search(text)):
        return _worker_error(run, [], f"have sent nothing for {matched['seconds']} seconds")
    elif isinstance(error, RuntimeError) and _COLLECTIVE_TIMEOUT.search(text):
        _explain_waiting(error, run)
        if stall is not None and (report := stall()) is not None:
            add_note(error, report)
    elif isinstance(error, RuntimeError) and any(pattern.search(text) for pattern in (_NO_GRAPH, _NO_SCALAR, _FREED)):
        _explain_loss(error, run)
    elif isinstance(error, RuntimeError) and _INFERENCE.search(text):
        add_note(
            error,
            "The module uses a tensor that it has kept from `validate`, `test` or `predict`, which run in inference"
            " mode. Use Trainer(inference_mode=False), or do not keep such tensors.",
        )
    elif is_out_of_memory(error):
        _explain_memory(error, run, folder)
        release_tensors(error)
    elif isinstance(error, _BATCH_ERRORS) and _SHAPES.search(text):
        batch = _batch_of(run)
        if batch is not None:  # None outside of a batch, for example if an optimizer refuses its parameters
            add_note(error, f"It was raised by {_describe_position(run)}: {describe_batch(batch)}.")
    return None


def _explain_waiting(error: RuntimeError, run: RunState) -> None:
    """Add advice to the timeout of a collective if processes may have different numbers of batches."""
    loop = run.eval_loop
    if loop is not None and loop.distributed_pass is not None and loop.distributed_pass.is_uneven:
        add_note(
            error,
            f"The process waited at {_describe_position(run)}. Processes may have different numbers of batches"
            f" there. If {loop.stage}_step or a batch hook runs collectives (torch.distributed), give all"
            " processes the same number of batches: Trainer(pad_evaluation=True).",
        )


def _explain_loss(error: RuntimeError, run: RunState) -> None:
    """Add the loss, the expected one and advice to an error of the fit's backward pass."""
    code = type(run.loop).run_backward.__code__
    places = (frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is code)
    frame, module = next(places, None), run.module
    if frame is None:  # the module ran the backward pass itself
        return
    loss = frame.f_locals["loss"]
    name, automatic = type(module).__name__, module.automatic_optimization
    subject = f"`{name}.training_step` {'returned' if automatic else 'passed to `manual_backward`'}"
    given = f"a tensor of shape {list(loss.shape)} and dtype {str(loss.dtype).removeprefix('torch.')}"
    if _FREED.search(str(error)):
        advice = "a loss with a graph of which a part was already freed by another backward pass."
        if automatic:
            advice += (
                " If `training_step` calls `loss.backward()` and `optimizer.step()`, remove these calls, because the"
                " Trainer does both for the returned loss; or set `self.automatic_optimization = False`."
            )
        advice += " If it keeps a tensor of an earlier batch, such as a hidden state, use `tensor.detach()`."
    elif loss.numel() != 1:
        advice = f"{given}, expected a scalar. Reduce it, for example with `loss.mean()`."
    elif not any(parameter.requires_grad for parameter in module.parameters()):
        advice = (
            f"a loss, but no parameter of {name} requires a gradient. Call `requires_grad_(True)` on those to train."
        )
    else:
        advice = (
            f"{given} without a graph, expected a scalar that depends on the trained parameters. Compute it without"
            " `detach()`, `item()`, `torch.tensor(...)`, `torch.no_grad()`, and operations without a gradient, such as"
            " `argmax` and comparisons."
        )
    add_note(error, f"{subject} {advice}")


# --- workers of dataloaders -----------------------------------------------------------------------------------


def _worker_error(run: RunState, pids: list[int], event: str) -> DataLoaderError:
    subject = f"A worker process of a DataLoader (pid {', '.join(map(str, pids))}) "
    lines = [f"{subject if pids else 'The worker processes of a DataLoader '}{event}: at {_describe_position(run)}."]
    if not pids:
        lines += [
            "Either they hang (a lock that was held when the process was forked, a file system or network that does"
            " not answer), or a batch takes that long. Try num_workers=0, so that a hang can be interrupted and shows"
            " its traceback; DataLoader(multiprocessing_context='spawn'); or allow more time with"
            " Trainer(dataloader_timeout=SECONDS); 0 means no limit."
        ]
    elif "Bus error" in event:
        lines += [f"The shared memory is probably full{_shared_memory_left()}.", *_SHARED_MEMORY_ADVICE]
    elif "Killed" in event:
        lines += [
            f"The system kills processes when memory runs out{_shared_memory_left()}. Try fewer workers"
            " (num_workers), a smaller prefetch_factor, a smaller batch, or a dataset that keeps less in memory: each"
            " worker has its own copy.",
            *_SHARED_MEMORY_ADVICE,
        ]
    else:
        lines += [
            "If the worker printed an error, it is above. Try num_workers=0, which shows the traceback, or"
            " DataLoader(multiprocessing_context='spawn') for libraries that do not survive a fork."
        ]
    return DataLoaderError(" ".join(lines), _prefix(run), _batch_idx(run), pids)


_SHARED_MEMORY_ADVICE = (
    "Workers send batches through shared memory. If it is small (64 MB by default in containers; start them with"
    " --shm-size=8g or --ipc=host), torch.multiprocessing.set_sharing_strategy('file_system') may help;"
    " num_workers=0 needs no shared memory.",
)


def _shared_memory_left() -> str:
    known = machine.shared_memory()
    return f" ({machine.SHARED_MEMORY} has {readable(known[0])} left of {readable(known[1])})" if known else ""


# --- memory ---------------------------------------------------------------------------------------------------


def release_tensors(error: BaseException) -> None:
    """Release the local variables in the frames of a traceback, such as activations and the batch.

    The traceback stays readable. Without this, a program that stores the exception, as a notebook does, keeps the
    tensors alive.
    """
    seen: set[int] = set()
    exception: BaseException | None = error
    while exception is not None and id(exception) not in seen:
        seen.add(id(exception))
        traceback.clear_frames(exception.__traceback__)
        exception = exception.__cause__ or exception.__context__


def describe_batch(batch: Any) -> str:
    """Return the structure of a batch as text.

    >>> describe_batch([torch.zeros(4, 3), {"label": torch.zeros(4, dtype=torch.int64)}])
    '[Tensor[4, 3] float32, {label: Tensor[4] int64}]'
    """
    if isinstance(batch, Tensor):
        return f"Tensor{list(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, dict):
        return f"{{{', '.join(f'{name}: {describe_batch(value)}' for name, value in batch.items())}}}"
    if isinstance(batch, (list, tuple)):
        shown = [describe_batch(item) for item in batch[:8]]
        return f"[{', '.join(shown)}{', ...' if len(batch) > 8 else ''}]"
    return type(batch).__name__


def _explain_memory(error: BaseException, run: RunState, folder: Folder | None) -> None:
    """Add a note with the phase, the live tensors and advice, as far as they are known."""
    device, batch, usage = run.device, _batch_of(run), None
    size = (None if batch is None else batch_size(batch)) or None
    with suppress(Exception):
        tensors = [] if batch is None else tensors_in(batch)
        usage = memory.measure(device, run.module, run.optimizers, tensors)
        error.__dict__["memory"] = usage
    phase = _phase(frame for frame, _ in traceback.walk_tb(error.__traceback__))
    moment = "before the first batch" if phase == _SET_UP else f"at {_describe_position(run)}"
    samples = "" if size is None else f", which has {size} sample{'s' * (size != 1)}"
    during = f", in {phase}" if phase else ""
    lines = [f"Memory ran out {moment}{samples}, on {device}{_describe_peak(usage)}{during}."]
    if usage is not None:
        lines.append(_describe_live_tensors(usage, device.type == "cpu"))
    if batch is not None:
        lines[-1] += f" The batch is {describe_batch(batch)}."
    if folder is not None:
        lines += _write_snapshot(run, folder)
    if advice := _advice(run, usage, size):
        lines.append(advice)
    add_note(error, "\n".join(lines))


def _batch_of(run: RunState) -> Any:
    """Return the current batch, or None."""
    metrics = run.active_metrics
    return None if metrics is None else metrics.batch


_SET_UP = "the set-up"
_PHASES: dict[str, tuple[str, str | tuple[str, ...]]] = {
    "_set_up": (_SET_UP, "trainer.run"),
    "transfer_batch_to_device": ("the transfer of the batch", ""),
    "training_step": ("the forward pass", ""),
    "validation_step": ("the forward pass", ""),
    "test_step": ("the forward pass", ""),
    "predict_step": ("the forward pass", ""),
    "backward": ("the backward pass", ""),
    "update_weights": ("the weight update", "trainer.loop"),
    "step": ("the optimizer's step", ("torch.optim", "trainer.loop.gradients", "trainer.distributed")),
}
"""By the name of a function on the stack: the phase, and the prefixes of modules that the function must be in."""


def _phase(frames: Iterable[FrameType]) -> str:
    """Return the phase of the innermost known frame, or "". Frames are given from the outermost."""
    current = ""
    for frame in frames:
        phase, prefixes = _PHASES.get(frame.f_code.co_name, (current, ""))
        if str(frame.f_globals.get("__name__")).startswith(prefixes):
            current = phase
    return current


def _describe_live_tensors(usage: Usage, is_cpu: bool) -> str:
    """Return the live tensors as text: ``Live tensors: weights 4.0 GiB, ...``."""
    names = {"optimizer": "the optimizer's states", "batch": "the batch"}
    parts = [f"{names.get(kind, kind)} {readable(size)}" for kind, size in usage.kinds.items() if size]
    if usage.rest is not None:
        rest = "activations and all else in the process" if is_cpu else "activations and other tensors"
        parts.append(f"{rest} {readable(usage.rest)}")
    text = f"Live tensors: {', '.join(parts) or 'none'}."
    others = [
        f"{label} {readable(size)}"
        for label, size in (
            ("reserved by torch, but unused", usage.unused),
            ("taken outside of torch (CUDA itself, other processes)", usage.elsewhere),
        )
        if size
    ]
    return f"{text} Other memory: {', '.join(others)}." if others else text


def _describe_peak(usage: Usage | None) -> str:
    if usage is None or not usage.total:
        return ""
    if usage.peak is None:
        return f" (of {readable(usage.total)})"
    subject = "the process" if usage.unused is None else "tensors"
    return f" (at the peak, {subject} took {readable(usage.peak)} of {readable(usage.total)})"


def _write_snapshot(run: RunState, folder: Folder) -> list[str]:
    """Write torch's snapshot of the memory if there is one, and return the line that names the file."""
    rank = f"_rank_{run.global_rank}" if run.world_size > 1 else ""
    try:
        place = folder()
        file = None if place is None else place / f"memory_snapshot{rank}.pickle"
        if file is not None and memory.write_snapshot(run.device, file):
            return [f"The allocated blocks are in {file}: open it at https://pytorch.org/memory_viz."]
    except Exception as problem:  # the out-of-memory error is more important
        return [f"A snapshot of the memory could not be written: {problem}."]
    return []


def _advice(run: RunState, usage: Usage | None, size: int | None) -> str:
    """Return the advice, most promising first."""
    training, tries = run.stage is RunningStage.TRAINING, list[str]()
    if usage is not None and usage.is_fragmented and usage.elsewhere is not None and not memory.expands_segments():
        tries.append("PYTORCH_ALLOC_CONF=expandable_segments:True in the environment, which reduces fragmentation.")
    if training and usage is not None and usage.is_mostly_states:
        tries.append(
            "strategy='fsdp' on several devices: weights, gradients and the optimizer's states take most of the memory,"
            " and FSDP divides them among the devices; a smaller batch changes little."
        )
    if size != 1:
        parts = 2 if size is None else next(n for n in range(2, size + 1) if size % n == 0)
        smaller = "a batch of half the size" if size is None else f"batches of {size // parts}"
        tries.append(
            f"{smaller} with accumulate_grad_batches={run.accumulate_grad_batches * parts}, which keeps the"
            " number of samples per step."
            if training
            else "a smaller batch."
        )
    if training and not run.precision.is_half:
        tries.append("precision='bf16-mixed', which halves the memory of activations.")
    if training:
        tries.append(
            "callbacks=[ActivationCheckpointing('net.layer*')], which recomputes activations instead of storing them."
        )
    return " ".join(f"Try {attempt}" for attempt in tries)


# --- where a run is -------------------------------------------------------------------------------------------


def whereabouts(frames: list[FrameType], run: RunState) -> str:
    """Return the phase of a process: ``in the forward pass, in net.blocks.7 (Block), at step 20, batch_idx 17 of ...``.

    Args:
        frames: stack frames of its main thread, from the outermost.
        run: the state of the run.
    """
    module = run.module
    names = {} if module is None else {id(submodule): name for name, submodule in module.named_modules()}
    inside = [
        owner for frame in frames if isinstance(owner := frame.f_locals.get("self"), nn.Module) and names.get(id(owner))
    ]
    parts = [f"in {phase}"] if (phase := _phase(frames)) else []
    parts += [f"in {names[id(owner)]} ({type(owner).__name__})" for owner in inside[-1:]]
    return ", ".join([*parts, f"at step {run.global_step}, {_describe_position(run, with_rank=False)}"])


def _describe_position(run: RunState, *, with_rank: bool = True) -> str:
    """Return the position as text: ``batch_idx 17 of epoch 2 (train_dataloader)``."""
    epoch = f" of epoch {run.epoch}" if run.fn == "fit" else ""
    check = ", in the sanity check" if run.stage is RunningStage.SANITY_CHECKING else ""
    rank = f", on rank {run.global_rank}" if with_rank and run.world_size > 1 else ""
    return f"batch_idx {_batch_idx(run)}{epoch} ({_prefix(run)}_dataloader{check}{rank})"


def _prefix(run: RunState) -> str:
    stage = run.stage
    return "train" if stage is None else str(stage.dataloader_prefix)


def _batch_idx(run: RunState) -> int:
    """Return the index of the current batch or, between two batches, of the next one."""
    loop, progress = run.eval_loop, run.progress
    if loop is not None:
        return int(loop.progress.batches_done)
    return int(progress.batch_idx + (progress.position not in (STARTED, TRAINED)))


def add_note(error: BaseException, text: str) -> None:
    """Add ``text`` to the notes of the error, once. A traceback shows them below the message."""
    if text not in getattr(error, "__notes__", ()):
        error.add_note(text)
