"""From recorded batches to a finding: which one fails, where, and what scale it would have taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.data.samples import named_tensors_in
from trainer.engine.protocol import Engine
from trainer.postmortem.probe import Call, Origin, Part, Probe, measure
from trainer.postmortem.recording import RecordedBatch
from trainer.postmortem.replay import backward, in_step, is_idle, optimized, rewind, run, undisturbed
from trainer.postmortem.state import ObjectState
from trainer.precision.autocast_ops import ops_that_differ

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_POWERS = (-128, 127)
"""Exponents that a search for a scale looks at: those of float32, and -128 for "none". 256, so 8 tries always."""


@dataclass
class Finding:
    """What the replay of one batch on one rank has shown.

    Attributes:
        batch_idx: of the batch; zero-based, within the epoch.
        position, window: which batch of its accumulation window it is, from 0, and how many there were.
        rank: of the process.
        scale: what the loss was multiplied by.
        fails: whether a gradient of a parameter is not finite.
        loss: before it is scaled; NaN without a loss.
        first_output: the first call of a module whose output is not finite.
        first_gradient: the first call, in the order of the backward pass, whose incoming gradient is not finite.
        origin: where the first gradient that is not finite was made.
        parameters: those whose gradients are not finite, in the order of the backward pass.
        largest_scale: the largest power of two at which all gradients are finite, on all ranks; 0 where there is none
            (or only such at which the gradients that fail become zeros); inf where it was not determined.
        broken_weights, broken_buffers, broken_batch: names of what was not finite before the step began.
        before: how many gradients, and outputs of modules, were finite before the first that was not.
        in_float32_on_cuda: operations that overflow in a CPU's autocast and not in CUDA's: with CUDA's lists, all
            gradients are finite.
        error: what ended the replay early.
    """

    batch_idx: int
    position: int
    window: int
    rank: int
    scale: float
    fails: bool = False
    loss: float = math.nan
    first_output: Call | None = None
    first_gradient: Call | None = None
    origin: Origin | None = None
    parameters: list[str] = field(default_factory=list)
    largest_scale: float = math.inf
    broken_weights: list[str] = field(default_factory=list)
    broken_buffers: list[str] = field(default_factory=list)
    broken_batch: list[str] = field(default_factory=list)
    before: tuple[int, int] = (0, 0)
    in_float32_on_cuda: list[str] = field(default_factory=list)
    error: str = ""


def examine(trainer: Trainer, recorded: Sequence[RecordedBatch], scale: float) -> Finding | None:
    """Replay the batches of one weight update, find the first that fails, and find out why.

    To be called on all ranks; returns the same on all of them: what the rank has found on which it began, for a module
    that synchronises (``SyncBatchNorm``) takes it to the others. So that these stay in step, all ranks run the same
    number of passes, whatever they find, and also where they have fewer batches or no loss: for a window of one batch,
    a forward and ten backward passes; for one of several, one of each for every batch besides. A single process on a
    CPU looks once more, with CUDA's autocast. Leaves everything as it was
    (:func:`~trainer.postmortem.replay.undisturbed`). None where no rank has a batch.
    """
    engine: Engine = trainer.engine
    batches = in_step(trainer, recorded)
    if not batches:
        return None
    position = 0
    if len(batches) > 1:
        first = torch.tensor(_first_failing(trainer, batches, scale), device=engine.device)
        position = int(engine.reduce(first, "min")) % len(batches)  # where none fails by itself, look at any
    batch = batches[position]
    batch_idx = -1 if batch is None else batch.batch_idx
    finding = Finding(batch_idx, position, len(batches), engine.global_rank, scale)
    try:
        with undisturbed(trainer) as now:
            _look_into(trainer, now, batch, finding)
    except Exception as error:  # a report must not end the run, and the other ranks wait below
        finding.error = f"{type(error).__name__}: {error}".splitlines()[0]
    if engine.world_size == 1:
        return finding
    findings: list[Finding] = engine.broadcast(engine.gather(finding))
    failing = [one for one in findings if one.fails] or [one for one in findings if not math.isnan(one.loss)]
    chosen = min(failing or findings, key=lambda one: one.before)  # of several, the lowest rank
    return replace(
        chosen,
        largest_scale=min(one.largest_scale for one in findings),
        broken_weights=list(dict.fromkeys(name for one in findings for name in one.broken_weights)),  # parts of them
    )


def largest_power(fits: Callable[[float], bool]) -> float:
    """The largest power of two that fits, if those that do are all below those that do not; 0 where none does.

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


def _first_failing(trainer: Trainer, batches: Sequence[RecordedBatch | None], scale: float) -> int:
    """The first batch that has a gradient that is not finite, or whose replay breaks off. Looks at all of them."""
    failing: list[bool] = []
    try:
        with undisturbed(trainer) as now:
            parameters = optimized(trainer)
            for recorded in batches:
                failing.append(_fails(trainer, now, recorded, scale, parameters))
    except Exception:
        failing.append(True)
    return failing.index(True) if True in failing else len(batches)


def _fails(
    trainer: Trainer, now: ObjectState, recorded: RecordedBatch | None, scale: float, parameters: Mapping[str, Tensor]
) -> bool:
    fits: list[bool] = []
    part = trainer.engine.gradients.part
    watched = {} if is_idle(recorded) else parameters
    rewind(trainer, now, recorded)
    run(trainer, recorded, lambda loss: fits.append(_fits(loss, scale, watched, part)))
    return not all(fits)


def _look_into(trainer: Trainer, now: ObjectState, recorded: RecordedBatch | None, finding: Finding) -> None:
    module, engine, parameters = trainer.lightning_module, trainer.engine, optimized(trainer)
    part = engine.gradients.part
    if is_idle(recorded):
        parameters = {}
    rewind(trainer, now, recorded)
    finding.broken_weights = _broken((name, part(parameter)) for name, parameter in module.named_parameters())
    finding.broken_buffers = _broken((name, part(buffer)) for name, buffer in module.named_buffers())
    finding.broken_batch = [] if recorded is None else _broken(named_tensors_in(recorded.batch, "batch"))

    def on_loss(loss: Tensor) -> None:
        failed = finding.fails  # by an earlier loss of a manual step
        probe.start_backward()
        backward(loss, finding.scale, parameters, probe.look)
        probe.end_backward()
        largest = largest_power(lambda scale: _fits(loss, scale, parameters, part))
        if _vanish(loss, largest, parameters, probe.parameters, part):
            largest = 0.0
        if not failed:
            finding.loss = math.nan if is_idle(recorded) else loss.item()
            finding.fails = bool(probe.parameters)
            finding.largest_scale = largest if finding.fails else min(finding.largest_scale, largest)

    probe = Probe(module, part, called=engine.replay_step("training_step") != module.training_step)
    try:
        with probe:
            run(trainer, recorded, on_loss)
    finally:
        finding.first_output, finding.first_gradient = probe.first_output, probe.first_gradient
        finding.origin, finding.parameters = probe.origin(), probe.parameters
        finding.before = probe.gradients_before, probe.outputs_before
    is_alone = engine.world_size == 1  # CUDA's autocast refuses some operations, which would end the replay of one rank
    if is_alone and engine.device.type == "cpu" and getattr(trainer.loop.precision, "autocast_ops", None) == "native":
        with suppress(RuntimeError), ops_that_differ() as ops:
            avoided = not _fails(trainer, now, recorded, finding.scale, parameters) and finding.fails
            finding.in_float32_on_cuda = [op for op, (_, dtype) in ops.items() if dtype == "float32" and avoided]


def _fits(loss: Tensor, scale: float, parameters: Mapping[str, Tensor], part: Part) -> bool:
    """Whether all gradients are finite at this scale."""
    finite: list[Tensor] = []

    def look(name: str, gradient: Tensor) -> None:
        finite.append(part(gradient).isfinite().all())

    backward(loss, scale, parameters, look)
    return not finite or bool(torch.stack(finite).all())  # one host-device synchronisation


def _vanish(loss: Tensor, scale: float, parameters: Mapping[str, Tensor], names: Collection[str], part: Part) -> bool:
    """Whether all the gradients of these names are zeros at this scale; not where there are no names."""
    zero: list[bool] = []

    def look(name: str, gradient: Tensor) -> None:
        if name in names:
            zero.append(not part(gradient).any())

    backward(loss, scale, parameters, look)
    return bool(zero) and all(zero)


def _broken(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    magnitudes = ((name, measure([tensor])) for name, tensor in named)
    return [name for name, magnitude in magnitudes if magnitude is not None and magnitude.not_finite]
