"""Find the recorded batch that fails, the operation that fails first, and the largest loss scale that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trainer.common.module_tree import is_dense
from trainer.data.samples import batch_size, named_tensors_in
from trainer.diagnosis.recording import RecordedBatch
from trainer.diagnosis.replay import (
    UNCHANGED,
    Variant,
    backward,
    in_step,
    optimized,
    own_autocast,
    replay,
    rewind,
    run_batch,
    undisturbed,
)
from trainer.diagnosis.replay_state import ObjectState
from trainer.diagnosis.trace import Origin, Trace, measure
from trainer.loop.run_state import RunState

_POWERS = (-128, 127)
"""Lowest and highest exponent in the search for a scale: those of float32, and -128 for "none". The search takes 8
tests, because there are 256 exponents."""

OUTLIER_FACTOR = 1e4
"""In an outlier, the largest number exceeds 1 and the median of all samples' largest numbers by this factor."""

Part = Callable[[Tensor], Tensor]


@dataclass
class Finding:
    """The result of the replay of one batch on one rank.

    Attributes:
        batch_idx: index of the batch in the epoch, zero-based; -1 if there is no batch.
        position, window: zero-based position of the batch in its accumulation window, and number of batches in the
            window.
        rank: rank of the process.
        scale: loss scale of the replay.
        fails: whether the loss or a gradient of a parameter is not finite, or the replay ended with an exception.
        loss: the loss before scaling; nan without a loss.
        origin: the operation that made the first number that is not finite, or None.
        parameters: names of the parameters with gradients that are not finite, in the order of the backward pass.
        largest_scale: the largest power of two at which all gradients are finite, on all ranks. 0 if there is none, or
            if the failing gradients are all zero at this scale; inf if it was not determined.
        broken_weights: names of the parameters that were not finite before the step began.
        broken_batch: tensors of the batch that were not finite, each with the indices of the samples.
        outliers: tensors of the batch with much larger numbers in a few samples, each with the indices of these samples
            and the largest number of the others.
        ranges: largest absolute value of each floating-point tensor of the batch.
        error: the exception that ended the replay early.
        autocast: the file and line in which the code first enters a 16-bit autocast of its own; None if it enters none.
    """

    batch_idx: int
    position: int
    window: int
    rank: int
    scale: float
    fails: bool = False
    loss: float = math.nan
    origin: Origin | None = None
    parameters: list[str] = field(default_factory=list)
    largest_scale: float = math.inf
    broken_weights: list[str] = field(default_factory=list)
    broken_batch: dict[str, list[int]] = field(default_factory=dict)
    outliers: dict[str, tuple[list[int], float]] = field(default_factory=dict)
    ranges: dict[str, float] = field(default_factory=dict)
    error: str = ""
    autocast: tuple[str, int] | None = None

    @property
    def is_hopeless(self) -> bool:
        """Whether the batch fails at every loss scale."""
        return self.fails and (not self.largest_scale or not math.isfinite(self.loss) or bool(self.error))


def examine(
    run: RunState, recorded: Sequence[RecordedBatch], scale: float, variant: Variant = UNCHANGED
) -> Finding | None:
    """Replay the batches of one weight update, find the first one that fails, and the operation that fails first.

    All ranks call this together, and get the same result: the finding of the rank where the failure began, or None if
    no rank has a batch. All ranks run the same number of passes, even if they have fewer batches or
    no loss: one forward and ten backward passes of one batch and, if the window has several batches, one more forward
    and backward pass of each. Restores the state of the run (:func:`~trainer.diagnosis.replay.undisturbed`).
    """
    engine = run.engine
    batches = in_step(run, recorded)
    if not batches:
        return None
    position = 0
    if len(batches) > 1:
        first = torch.tensor(_first_failing(run, recorded, scale, variant), device=engine.device)
        position = int(engine.collectives.reduce(first, "min")) % len(
            batches
        )  # if no batch fails by itself, examine the first
    batch = batches[position]
    batch_idx = -1 if batch is None else batch.batch_idx
    finding = Finding(batch_idx, position, len(batches), engine.global_rank, scale)
    try:
        with undisturbed(run) as state:
            _look_into(run, state, batch, finding, variant)
    except Exception as error:  # a report must not end the run, and the other ranks wait below
        finding.error = f"{type(error).__name__}: {error}".splitlines()[0]
    findings: list[Finding] = engine.collectives.broadcast(engine.collectives.gather(finding))
    failing = [result for result in findings if result.fails]
    failing = failing or [result for result in findings if not math.isnan(result.loss)]
    # collectives of the backward pass may spread the failure to other ranks, so choose the rank where it began
    chosen = min(
        failing or findings, key=lambda result: (not result.broken_batch, math.isfinite(result.loss), result.rank)
    )
    return replace(
        chosen,
        largest_scale=min(result.largest_scale for result in findings),
        # each rank has checked its part of the weights
        broken_weights=list(dict.fromkeys(name for result in findings for name in result.broken_weights)),
    )


def largest_power(fits: Callable[[float], bool]) -> float:
    """Return the largest power of two that fits, or 0 if none does. If a power fits, all smaller ones must fit.

    Always runs eight tests, so that all ranks run the same number of passes.
    """
    low, high = _POWERS
    while low < high:
        middle = (low + high + 1) // 2
        if fits(2.0**middle):
            low = middle
        else:
            high = middle - 1
    return 2.0**low if low > _POWERS[0] else 0.0


def _first_failing(run: RunState, batches: Sequence[RecordedBatch], scale: float, variant: Variant) -> int:
    """Return the index of the first batch that raises, or has a loss or gradient that is not finite. Runs all batches.

    If no batch fails, return their number, including batches that only other ranks have.
    """
    failing: list[bool] = []
    part = run.part

    def is_finite(loss: Tensor, watched: Mapping[str, Tensor]) -> bool:
        return _fits(loss, scale, watched, part) and bool(loss.isfinite().all())

    try:
        for flags in replay(run, batches, is_finite, variant):
            failing.append(not all(flags))
    except Exception:
        failing.append(True)
    return failing.index(True) if True in failing else len(failing)


def _look_into(
    run: RunState, state: ObjectState, recorded: RecordedBatch | None, finding: Finding, variant: Variant
) -> None:
    module, parameters = run.module, optimized(run)
    part = run.part
    if recorded is None:
        parameters = {}
    rewind(run, state, recorded)
    finding.broken_weights = [
        name
        for name, parameter in module.named_parameters()
        if is_dense(parameter) and (magnitude := measure([part(parameter)])) is not None and magnitude.not_finite
    ]
    if recorded is not None:
        finding.broken_batch, finding.ranges = samples_not_finite(recorded.batch)
        finding.outliers = _outlying_samples(recorded.batch)

    def on_loss(loss: Tensor) -> None:
        failed, trace.is_on = finding.fails, False  # at an earlier loss of a manual step
        with trace.follow(loss):
            trace.is_on = not failed
            finite = backward(loss, finding.scale, parameters, lambda gradient: bool(part(gradient).isfinite().all()))
            trace.is_on = False
        broken = [name for name, is_finite in finite.items() if not is_finite]
        finding.parameters += broken
        largest = largest_power(lambda scale: _fits(loss, scale, parameters, part))
        zero = backward(loss, largest, parameters, lambda gradient: not part(gradient).any())
        if broken and all(zero[name] for name in broken):
            largest = 0.0
        if not failed:
            finding.loss = math.nan if recorded is None else loss.item()
            finding.fails = bool(finding.parameters) or not (recorded is None or math.isfinite(finding.loss))
            finding.largest_scale = largest if finding.fails else min(finding.largest_scale, largest)
        trace.is_on = True

    trace = Trace(module, part)
    try:
        with trace, own_autocast() as places:
            run_batch(run, recorded, on_loss, variant)
        finding.autocast = next(iter(places), None)
    except Exception:
        finding.fails, finding.largest_scale, finding.origin = True, 0.0, trace.fallback()
        raise
    if finding.fails:
        is_forward = not math.isfinite(finding.loss) or (not finding.largest_scale and trace.forward is not None)
        origin = trace.forward or trace.without_gradient if is_forward else trace.backward
        finding.origin = origin or trace.fallback()


def samples_not_finite(batch: Any) -> tuple[dict[str, list[int]], dict[str, float]]:
    """Return the indices of the nonfinite samples in each nonfinite tensor, and the largest value of each tensor."""
    broken: dict[str, list[int]] = {}
    ranges: dict[str, float] = {}
    size = batch_size(batch)
    for name, tensor in named_tensors_in(batch, "batch"):
        if (magnitude := measure([tensor])) is None:
            continue
        ranges[name] = magnitude.largest
        if magnitude.not_finite and tensor.dim() and len(tensor) == size:
            broken[name] = (~tensor.reshape(size, -1).isfinite().all(dim=1)).nonzero().flatten().tolist()
        elif magnitude.not_finite:  # it belongs to all samples
            broken[name] = [*range(size)]
    return broken, ranges


def _outlying_samples(batch: Any) -> dict[str, tuple[list[int], float]]:
    """Return the samples with a number far above those of the others, such as a fill value (``Finding.outliers``)."""
    outliers: dict[str, tuple[list[int], float]] = {}
    size = batch_size(batch)
    for name, tensor in named_tensors_in(batch, "batch"):
        if (
            is_dense(tensor)
            and tensor.is_floating_point()
            and tensor.dim()
            and len(tensor) == size > 2 < tensor.numel()
        ):
            largest = tensor.detach().reshape(size, -1).abs().amax(dim=1).double()
            rows = (largest > OUTLIER_FACTOR * largest.median().clamp(min=1)) & largest.isfinite()
            if rows.any():
                outliers[name] = rows.nonzero().flatten().tolist(), float(largest[~rows].max())
    return outliers


def _fits(loss: Tensor, scale: float, parameters: Mapping[str, Tensor], part: Part) -> bool:
    """Return whether all gradients are finite at this scale."""
    finite = backward(loss, scale, parameters, lambda gradient: part(gradient).isfinite().all())
    return not finite or bool(torch.stack([*finite.values()]).all())  # one host-device synchronization
