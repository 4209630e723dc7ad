"""Find out why a training run breaks: one verdict and one remedy, from replays of the batch.

Callbacks detect that something is wrong, and describe it in a :class:`Case`. :func:`diagnose` explains it. Remedies are
tried on the batch, forward and backward; ``Diagnosis.tried`` is the result, or "" if a remedy was not tried. A remedy
may be a changed line of the user's code (``trainer.diagnosis.rewrite``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.common.module_tree import is_dense
from trainer.common.packages import is_users_file
from trainer.data.samples import batch_size, named_tensors_in, tensors_in
from trainer.diagnosis import remedies, rewrite
from trainer.diagnosis.examine import Finding, examine, samples_not_finite
from trainer.diagnosis.out_of_range import MESSAGE, OutOfRange, RaisedCall
from trainer.diagnosis.recording import RecordedBatch
from trainer.diagnosis.remedies import LOW_SCALE, Weights
from trainer.diagnosis.replay import FLOAT32, UNCHANGED, Variant, has_half_weights, run_batch, undisturbed
from trainer.diagnosis.report_file import Diagnosis
from trainer.diagnosis.trace import Origin
from trainer.errors import join_first
from trainer.loop.run_state import RunState

MAX_UNDERFLOW = 0.3
"""Share of the gradient elements that may be lost in float16."""
_DIVERGENCE_FACTOR = 10.0
"""A loss has grown if it has increased by more than this multiple of the loss with earlier weights."""
_TINY = 2.0**-24
"""Smaller relative changes of a weight are rounded away in float32."""
_MAX_EDITS = 3
"""Maximum number of statements that one remedy changes."""
_LARGE = 1e6
"""If the inputs of an operation exceed this limit, they count as grown without bound."""
_LARGEST_LOSS = 1e30
"""If a remedy makes the loss larger, its ``nan_to_num`` has only replaced an infinity by the largest finite number."""
_BETWEEN_STEPS = (
    "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step",
    "optimizer_zero_grad", "on_before_zero_grad", "on_after_optimizer_step", "lr_scheduler_step", "on_train_batch_end",
    "on_train_batch_start", "on_train_epoch_end", "on_train_epoch_start", "on_validation_start", "on_validation_end",
)  # fmt: skip
"""Hooks between a backward pass and the next forward pass."""
_TRANSFER_HOOKS = ("on_after_batch_transfer", "on_before_batch_transfer")
_FINITE = "the batch is finite with it"
_COMPARED = 5
"""Maximum number of batches to compare."""


@dataclass
class Case:
    """A problem that a callback has detected.

    Attributes:
        step: ``trainer.global_step`` when the weight update began.
        batches: the batches of the accumulation window that failed; [] if they are no longer stored.
        scale: the loss scale of the update.
        recent: the batches before this window, oldest first.
        before: finite weights of an earlier step; {} if no copy is kept.
        first: the first step that may be the cause, because everything before it was finite; -1 if the weights were not
            finite when training began.
        buffers: the largest value of each buffer when training began.
        in_a_row: number of skipped steps in a row up to this step.
        trigger: "loss" (a loss was not finite), "growth" (of the loss), "underflow", "skips" (skipped steps in a row),
            "single skip", "step" (on demand) or "error" (the step ended with an exception).
        known: earlier diagnoses. A failure at the same place as in one of them is not examined any further.
        weights_step: ``trainer.global_step`` of the earlier weights.
        error: the exception that ended the step, or the tensor that torch rejected in the step, or None.
        growth: 0 unless the losses grew or fell without bound before one was not finite. Then a loss shortly before
            that one: positive if they grew, negative if they fell.
        since: the recorded batches from this window on.
    """

    step: int
    batches: Sequence[RecordedBatch]
    scale: float
    recent: Sequence[RecordedBatch] = ()
    before: Weights = field(default_factory=dict)
    first: int = 0
    buffers: Weights = field(default_factory=dict)
    in_a_row: int = 0
    trigger: str = "skips"
    known: Sequence[Diagnosis] = ()
    weights_step: int = 0
    error: BaseException | OutOfRange | None = None
    growth: float = 0.0
    since: Sequence[RecordedBatch] = ()


class Remedy(NamedTuple):
    """A remedy, and the result of trying it.

    Attributes:
        text: the remedy, in the caller's syntax.
        tried: the result of trying it; "" if it was not tried.
        changes: the remedy as data; () if it changes no code and no argument.
    """

    text: str
    tried: str = ""
    changes: tuple[rewrite.Change | rewrite.Removal | remedies.Setting, ...] = ()


def diagnose(run: RunState, case: Case) -> Diagnosis | None:
    """Replay the case and explain it. All ranks call this together.

    Returns:
        The diagnosis. None if nothing is wrong, if only the loss scale is too large, or if the values of weights and
        batch are not the cause of the exception. With the trigger "step", a diagnosis with the largest loss scale that
        fits, instead of None.
    """
    if run.loop.path.draws:
        return _without_replay(run, case)
    if case.error is not None:
        if (rejection := _rejected(run, case)) is not None:
            return _out_of_range(run, case, rejection)
        if "without overflow" not in f"{case.error}" and are_finite(run.module, case.batches[0].batch):
            return None
    if case.trigger == "underflow":
        return None if run.is_sharded else _underflow(run, case)
    finding = examine(run, case.batches, case.scale)
    if finding is None:
        return None if case.trigger == "growth" else _unknown_cause(run, case, None)
    if finding.error and case.error is None and not finding.broken_weights:
        cause = f"The replay of the batch ended with {finding.error}; the run did not."
        return _diagnosis(case, finding, "unknown", cause, "", key=finding.error)
    diagnosis = _explain_or_reuse(run, case, finding)
    if diagnosis is None and case.trigger == "step":
        cause = f"The largest loss scale that fits is {finding.largest_scale:g}."
        return _diagnosis(case, finding, "none", cause, "")
    return diagnosis


def _rejected(run: RunState, case: Case) -> OutOfRange | None:
    """Return the tensor that torch rejects in a replay of the batch, or None."""
    if isinstance(case.error, OutOfRange):
        return case.error
    call = RaisedCall()
    if MESSAGE.search(f"{case.error}"):
        with suppress(Exception), undisturbed(run), call:
            run_batch(run, case.batches[0], lambda loss: None)
    return call.rejection


def _explain_or_reuse(run: RunState, case: Case, finding: Finding) -> Diagnosis | None:
    for earlier in case.known:
        if finding.fails and _origin_of(finding) == _origin_of(earlier.finding):
            return earlier
    if finding.broken_weights:
        return _weights(run, case, finding)
    if not finding.fails and case.trigger == "loss" and case.before:  # the loss may be that of the weights before
        with remedies.weights_of(run, case.before):
            second = examine(run, case.batches, case.scale)
            if second is None or second.fails or run.world_size > 1:
                return None if second is None else _explain(run, case, second)
        return _repeat_steps(run, case, finding)
    return _explain(run, case, finding)


def _origin_of(finding: Finding) -> tuple[Any, ...]:
    """Return the operation, and the tensors that were not finite before it."""
    origin = finding.origin
    place = None if origin is None else (origin.operation, origin.phase, origin.module, origin.file, origin.line)
    return place, [*finding.broken_batch], bool(finding.broken_weights)


def _explain(run: RunState, case: Case, finding: Finding) -> Diagnosis | None:
    """Explain why a batch fails with the current weights."""
    failing = [case.batches[finding.position]] if finding.position < len(case.batches) else []
    if finding.broken_batch and (diagnosis := _data(run, case, finding, failing)) is not None:
        return diagnosis
    if not finding.fails:
        grown = case.trigger == "growth" and _has_diverged(run, case, failing, finding.origin)
        return _divergence(run, case, finding) if grown else None
    if finding.outliers and finding.is_hopeless and (diagnosis := _outliers(run, case, finding, failing)) is not None:
        return diagnosis
    full = _in_float32(run, case)
    fits = finding.largest_scale
    diverged: Diagnosis | None = None
    if (finding.is_hopeless or fits < LOW_SCALE) and _has_diverged(run, case, failing, finding.origin):
        diverged = _divergence(run, case, finding)
    if diverged is not None and (diverged.tried or case.growth or not _rates_are_finite(run)):
        return diverged
    origin = finding.origin
    # whether neither a wider dtype nor another loss scale can make the first non-finite result finite
    is_beyond = origin is None or origin.is_nan or (origin.phase == "backward" and not fits)
    if full.fails if full is not None else is_beyond:
        if (buffers := _buffers(run, case, finding)) is not None:
            return buffers
        model = _model(run, case, full or finding, is_float32=full is not None)
        return model if model.tried or diverged is None else diverged
    if finding.is_hopeless and finding.origin is not None and finding.origin.phase == "forward":
        return _precision(run, case, finding, "forward")
    is_settling = fits >= run.scaler.min_scale and (
        fits >= LOW_SCALE or remedies.underflow(run, case.batches, fits).get("", 0.0) <= MAX_UNDERFLOW
    )
    return None if is_settling else _precision(run, case, finding, "backward")


def _in_float32(run: RunState, case: Case) -> Finding | None:
    """Return the finding of a replay in float32, or None if the module cannot run in float32."""
    if run.is_sharded:
        return None  # if one rank raises in a sharded forward pass, the others wait for it
    full = examine(run, case.batches, 1.0, FLOAT32)
    return None if full is None or full.error else full


# --- one function for each verdict ----------------------------------------------------------------------------------


def _data(run: RunState, case: Case, finding: Finding, failing: Sequence[RecordedBatch]) -> Diagnosis | None:
    left_out = tuple(sorted({index for rows in finding.broken_batch.values() for index in rows}))
    names = " or ".join(finding.broken_batch)
    hook = next((f" after {name}" for name in _TRANSFER_HOOKS if run.loop.hooks.override_of(name) is not None), "")
    cured = examine(run, failing or case.batches, min(case.scale, 1.0), Variant(without=left_out))
    name = next(iter(finding.broken_batch))
    # whether all inputs of the operation that failed first were finite
    is_made = finding.origin is not None and bool(finding.origin.operation)
    if not finding.is_hopeless or cured is None or (cured.is_hopeless and is_made):
        return None  # the model expects such values, or something else is wrong
    tensors = "; ".join(f"{name}, samples {join_first(rows, 8)}" for name, rows in finding.broken_batch.items())
    which, tried = f"; in this batch: {join_first(left_out, 8)}", "without them the batch is finite"
    if cured.is_hopeless:  # the samples are not along the first dimension
        tensors, which, tried = join_first(finding.broken_batch, 4), "", ""
    remedy = f"leave out samples in which {names} is not finite{which}."
    batches = [recorded.batch for recorded in (*case.recent[-_COMPARED:], *failing)]
    left = [batch_size(batch) - len(set().union(*samples_not_finite(batch)[0].values())) for batch in batches]
    if not any(left) and sum(map(batch_size, batches)) > 1:
        remedy, tried = f"use only the finite elements: before the arithmetic, select them by {name}.isfinite().", ""
    return _diagnosis(
        case, finding, "data",
        f"The batch is not finite{hook}: {tensors}.",
        remedy,
        tried=tried, alternative=f"replace the values: {name}.nan_to_num_(0, 0, 0)", key=name,
        samples=finding.broken_batch, figures=_figures(finding, cured) if tried else {},
    )  # fmt: skip


def _outliers(run: RunState, case: Case, finding: Finding, failing: Sequence[RecordedBatch]) -> Diagnosis | None:
    """Explain samples with numbers far above those of the others, if the batch is finite without them."""
    left_out = tuple(sorted({index for rows, _ in finding.outliers.values() for index in rows}))
    cured = examine(run, failing or case.batches, min(case.scale, 1.0), Variant(without=left_out))
    if cured is None or cured.is_hopeless:
        return None
    name, (rows, usual) = next(iter(finding.outliers.items()))
    samples, limit = join_first(rows, 8), 10.0 ** math.ceil(math.log10(max(usual, 1.0)) + 2)
    return _diagnosis(
        case, finding, "data",
        f"{name} is up to {finding.ranges[name]:.3g} in samples {samples}, and up to {usual:.3g} in the others.",
        f"leave out samples in which abs({name}) exceeds {limit:g}; in this batch: {samples}.",
        tried="without them the batch is finite",
        alternative=f"replace the values: {name}.clamp_(-{limit:g}, {limit:g})",
        key=name,
        samples={name: indices for name, (indices, _) in finding.outliers.items()},
        figures=_figures(finding, cured),
    )  # fmt: skip


def _out_of_range(run: RunState, case: Case, rejection: OutOfRange) -> Diagnosis:
    """Explain an index, label or probability that is out of range."""
    batch_idx, bad, low, high = case.batches[0].batch_idx, rejection.rejected, rejection.low, rejection.high
    finding = Finding(batch_idx, 0, 1, run.global_rank, case.scale, fails=True, error=rejection.error)
    values = sorted(set(rejection.values[bad].tolist()))
    tensors = dict(named_tensors_in(case.batches[0].batch, "batch"))
    columns = {
        f"{name}[:, {column}]": tensor[:, column]
        for name, tensor in tensors.items() if tensor.dim() > 1 and not tensor.is_floating_point()
        for column in range(min(tensor.shape[1], 256))
    }  # fmt: skip
    same = [n for n, tensor in (tensors | columns).items() if _have_same_values(tensor, rejection.values)]
    # a part of a tensor, such as its tokens without the last
    same += [
        n for n, tensor in tensors.items() if values == sorted(set(tensor[rejection.rejected_in(tensor)].tolist()))
    ]
    name = same[0] if same else "an index that the step computes"
    samples = rejection.rejected_in((tensors | columns).get(name, rejection.values))
    rows = samples.reshape(len(samples) if samples.dim() else 1, -1).any(dim=1).nonzero().flatten().tolist()
    is_label = rejection.ignored is not None
    besides = f" and not {rejection.ignored}" if is_label and rejection.ignored in rejection.values else ""
    remedy = f"leave out samples in which {name} is outside {low} to {high}{besides}, or correct them."
    is_marker = len(values) == 1 and values[0] != high + 1
    alternative = f"replace {values[0]} in {name} by a number from {low} to {high}" if is_marker else ""
    if values[0] > high and not rejection.values.is_floating_point():
        alternative = "raise the number of classes or embeddings of the model"
    if alternative and samples.dim() and len(rows) > max(1, len(samples) / 4):  # too many to leave out
        remedy = f"{f'pass ignore_index={values[0]} to the loss' if is_marker and is_label else alternative}."
        alternative = ""
    return _diagnosis(
        case, finding, "data",
        f"{name} is out of range in samples {join_first(map(str, rows), 8)}: got {join_first(map(str, values), 4)},"
        f" expected {low} to {high}.",
        remedy, alternative=alternative, key=name, samples={name: rows},
    )  # fmt: skip


def _have_same_values(tensor: Tensor, values: Tensor) -> bool:
    return tensor.numel() == values.numel() and bool((tensor.flatten() == values.flatten()).all())


def _model(run: RunState, case: Case, finding: Finding, *, is_float32: bool) -> Diagnosis:
    origin = finding.origin
    assert origin is not None
    location = f"{Path(origin.file).name}:{origin.line}" if origin.file else origin.place
    hint = f"guard the operation against this input: {rewrite.HINTS.get(origin.name, rewrite.OTHER_HINT)}"
    remedy = _changed_code(run, case, origin, rewrite.propose) or Remedy(hint)
    line = f", {location}: {origin.source}" if origin.file else ""
    return _diagnosis(
        case, finding, "model",
        f"Not finite{' in float32 either' if is_float32 else ''}: {origin.name or 'an operation'} in the"
        f" {origin.phase} pass, {origin.place}{line}",
        remedy, key=location,
    )  # fmt: skip


def _changed_code(
    run: RunState,
    case: Case,
    origin: Origin,
    propose: Callable[[Origin], Iterable[rewrite.Change]],
    variant: Variant = UNCHANGED,
) -> Remedy | None:
    """Return a change of the code that cures the batch, or None.

    If the batch fails at another place with a change, this place is changed, too.

    Args:
        run: the state of the run.
        case: the case.
        origin: the operation that fails.
        propose: returns changes of the code.
        variant: the precision to try the changes in, in addition to float32. Default: the run's.
    """
    is_sharded = run.is_sharded
    if is_sharded and origin.name == "mul":
        # the change of a product raises if a factor is a Python number, and then the other ranks would wait
        return None
    change: rewrite.Change | None = None
    finite: rewrite.Change | None = None
    for _ in range(1 if is_sharded else _MAX_EDITS):
        moved: tuple[rewrite.Change, Origin] | None = None
        for proposal in propose(origin):
            together = proposal if change is None else change.also(proposal)
            failure = _failure_with(run, case, together, variant)
            if failure is None and _learns_with(run, case, together):
                return Remedy(str(together), _FINITE, (together,))
            if failure is None:
                finite = finite or together
                continue
            place = failure.origin
            if moved is None and place is not None and place.file == origin.file:
                moved = (together, place) if (place.name, place.line) != (origin.name, origin.line) else None
        if moved is None:
            break
        change, origin = moved
    return None if finite is None else Remedy(str(finite), _FINITE, (finite,))


def _failure_with(run: RunState, case: Case, change: rewrite.Change, variant: Variant) -> Finding | None:
    """Return None if the batch is finite with the changed code, in float32 and with ``variant``.

    Otherwise return the failing replay. The losses of other batches must stay about the same, because a remedy must not
    change the model.
    """
    others = case.recent[-_COMPARED:] if run.world_size == 1 else []
    failure = Finding(-1, 0, 1, run.global_rank, 1.0, fails=True)
    before = remedies.losses(run, others)
    with change.applied(_classes_in(run.module)) as is_applied:
        if not is_applied:
            return failure
        for precision in (FLOAT32, variant):
            tried = examine(run, case.batches, 1.0, precision)
            if tried is None or tried.is_hopeless or (precision.dtype is not None and tried.fails):
                return tried or failure
            if abs(tried.loss) > _LARGEST_LOSS:
                return failure
        after = remedies.losses(run, others)
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if math.isfinite(a)]
    usual = statistics.median([abs(a) for a, _ in pairs] or [0.0])
    return None if all(abs(a - b) <= 0.1 * max(abs(a), usual) for a, b in pairs) else failure


def _classes_in(module: nn.Module) -> set[type]:
    return {type(submodule) for submodule in module.modules()}


def _learns_with(run: RunState, case: Case, change: rewrite.Change) -> bool:
    """Return whether a few steps with the changed code do not make the loss grow; True if the model is large.

    A limit near 0 makes a batch finite, but its gradient may be so large that the next steps diverge.
    """
    if not case.before:
        return True
    batches = [*case.recent[-_COMPARED:], *case.batches][-8:]
    with change.applied(_classes_in(run.module)):
        return not remedies.diverges(run, batches)


def _precision(run: RunState, case: Case, finding: Finding, phase: str) -> Diagnosis:
    origin = finding.origin
    assert origin is not None
    precision, is_sharded, change = run.precision, run.is_sharded, _without_autocast(run, case, finding, None)
    # whether a number was rounded to 0; nan from another operation than a quotient means a negative number
    is_at_0 = origin.name == "div" or (origin.name in rewrite.FAILS_AT_0 and not origin.is_nan)
    if change is None and phase == "forward" and is_at_0:
        change = _changed_code(run, case, origin, rewrite.propose)
    cure = None if is_sharded or change is not None else remedies.find_cure(run, case.batches, finding)
    largest = "" if origin.inputs is None else f" (its input is up to {origin.inputs.largest:.3g})"
    output_dtype = "" if origin.outputs is None else origin.outputs.dtype
    name = output_dtype if output_dtype in ("float16", "bfloat16") else str(precision.dtype).removeprefix("torch.")
    is_too_large = origin.inputs is not None and origin.inputs.largest > torch.finfo(getattr(torch, name)).max
    verb = "makes nan in" if origin.is_nan and not is_too_large else "overflows"
    cause = f"{origin.name or 'An operation'} in {origin.place} {verb} {name}{largest}."
    if phase == "backward":
        limit = f" above {finding.largest_scale:g}" if finding.largest_scale else ""
        cause = (
            f"No loss scale fits: the gradients of {join_first(finding.parameters, 3)} overflow in {origin.place}"
            f" at every scale{limit}."
        )
    if _fits_with_cuda_ops(run, case):
        cause += f" CUDA's autocast would not overflow: {remedies.precision(precision, autocast_ops='cuda')}."
    wider = "32-true" if precision.dtype is torch.bfloat16 else "bf16-mixed"
    alternative, bfloat16 = _normalization(finding, 1000.0), remedies.other_precision(wider)
    remedy = change or Remedy("")
    figures: dict[str, tuple[float, float]] = {}
    if cure is not None:
        (variant, cured), fits = cure, ""
        figures = _figures(finding, cured)
        setting = bfloat16 if variant.dtype is torch.bfloat16 else remedies.other_precision("32-true")
        if variant.dtype is None:
            modules = getattr(precision, "fp32_modules", ())
            setting = remedies.precision(precision, fp32_modules=(*modules, *variant.modules))
            fits = f", scales up to {cured.largest_scale:g} fit" if run.scaler.is_enabled() else ""
        remedy = Remedy(f"{setting}", f"finite forward and backward{fits}", (setting,))
        with remedies.weights_of(run, case.before):
            is_divergent = alternative and case.before and remedies.diverges(run, case.batches)
        if is_divergent:
            remedy, alternative, figures = Remedy(alternative), remedy.text, {}
        elif variant.dtype is None:
            alternative = alternative or f"{bfloat16}"
    elif change is None:
        remedy = _wider_code(run, case, finding, origin)
    return _diagnosis(case, finding, phase, cause, remedy, alternative=alternative, key=origin.module, figures=figures)


def _wider_code(run: RunState, case: Case, finding: Finding, origin: Origin) -> Remedy:
    """Return the remedy to compute more of the code in 32 bits."""
    bfloat16, wide = remedies.other_precision("bf16-mixed"), Variant(torch.bfloat16)
    if removal := _without_autocast(run, case, finding, torch.bfloat16):
        return removal
    if change := _changed_code(run, case, origin, rewrite.widen):
        return change
    if run.world_size > 1 or has_half_weights(run.module):
        return Remedy(f"{bfloat16}", "", (bfloat16,))
    if change := _changed_code(run, case, origin, rewrite.widen, wide):
        return Remedy(f"{bfloat16}, and {change.text}", change.tried, (bfloat16, *change.changes))
    return Remedy(f"{remedies.other_precision('32-true')}, and no 16-bit dtypes in the code", _FINITE)


def _without_autocast(run: RunState, case: Case, finding: Finding, dtype: torch.dtype | None) -> Remedy | None:
    """Return the remedy to remove the code's own autocast; None if it does not help.

    Args:
        run: the state of the run.
        case: the case.
        finding: the replay that fails.
        dtype: another dtype for the run's autocast. None to keep the dtype.
    """
    variant, scale = Variant(dtype, own_autocast=False), case.scale if dtype is None else 1.0
    if finding.autocast is None or not remedies.is_cured(examine(run, case.batches, scale, variant), variant):
        return None
    removal, bfloat16 = rewrite.Removal(*finding.autocast), remedies.other_precision("bf16-mixed")
    if dtype is None:
        return Remedy(f"{removal}", _FINITE, (removal,))
    return Remedy(f"{removal}, and use {bfloat16}", _FINITE, (removal, bfloat16))


def _weights(run: RunState, case: Case, finding: Finding) -> Diagnosis | None:
    """Explain weights that are not finite before the step."""
    broken = [name for name, value in case.before.items() if not value.isfinite().all()]
    names = broken or finding.broken_weights
    if case.before and not broken:
        return _repeat_steps(run, case, finding)
    if case.first >= 0 and not case.before:
        return _divergence(run, case, finding) if case.growth else _unknown_cause(run, case, finding)
    remedy = (
        f"load other weights. If there are none: torch.nan_to_num_(model.get_parameter({names[0]!r}).data, 0, 0, 0)"
    )
    module, (owner, _, _) = run.module, names[0].rpartition(".")
    parameter = module.get_parameter(names[0])
    if not parameter.isfinite().any() and hasattr(module.get_submodule(owner), "reset_parameters"):
        remedy = f"load other weights. If there are none: model.get_submodule({owner!r}).reset_parameters()"
    trainer: Any = run.trainer
    source = trainer.ckpt_path or getattr(trainer.loaded_weights, "path", None)
    return _diagnosis(
        case, finding, "weights",
        f"Weights were not finite when training began{f', in {source}' if source else ''}: {join_first(names, 4)}.",
        remedy, key=names[0],
        alternative=f"{remedies.other_precision('bf16-mixed')}" if parameter.dtype is torch.float16 else "",
    )  # fmt: skip


def _repeat_steps(run: RunState, case: Case, finding: Finding) -> Diagnosis | None:
    """Repeat the steps since the weights ``case.before``, and explain the first batch that fails.

    If no batch fails, the batches of the failed window are repeated with other random numbers. If no batch fails then
    either, the cause is between two batches: the optimizer, or code that writes to weights.
    """
    batches = [*case.recent, *case.batches]
    repeated = [batch for batch in batches if batch.step >= case.weights_step]
    is_whole = bool(repeated) and repeated[0].step == case.weights_step and remedies.can_step(run)
    is_whole &= all(batch.rates for batch in repeated)
    with remedies.weights_of(run, case.before):
        usual = [abs(loss) for loss in remedies.losses(run, batches) if math.isfinite(loss)]
    limit = _DIVERGENCE_FACTOR * max(usual, default=1.0) if case.growth else math.inf
    recorded, weights = remedies.repeat(run, repeated if is_whole else batches, case.before, limit)
    fails = recorded is None and bool(weights)
    if not weights:
        weights = case.before if finding.broken_weights else {}
        with remedies.weights_of(run, weights):
            recorded = remedies.failing_draw(run, case.batches)
    if recorded is not None:
        with remedies.weights_of(run, weights):
            earlier = examine(run, [recorded], case.scale)
            fails = earlier is not None and earlier.fails
            if earlier is not None and earlier.is_hopeless:
                repeated_case = replace(case, batches=[recorded], step=recorded.step)
                if (verdict := _explain(run, repeated_case, earlier)) is not None:
                    return verdict
    if not finding.broken_weights:
        return None
    if (verdict := _optimizer(run, case, finding)) is not None:
        return verdict
    if fails or case.growth or not _rates_are_finite(run):
        return _divergence(run, case, finding)
    if recorded is not None or not is_whole:
        return _unknown_cause(run, case, finding)
    named = dict(run.module.named_parameters())
    # A step with a gradient that is not finite breaks all trained weights. If all are broken, it is certain only of the
    # frozen ones that other code has broken them.
    certain = [name for name in finding.broken_weights if not named[name].requires_grad]
    if len(finding.broken_weights) < sum(parameter.requires_grad for parameter in named.values()):
        certain = finding.broken_weights
    names = join_first(certain, 4) if certain else "Weights"
    state = "" if not case.weights_step else ", or the optimizer had a state that was not finite"
    hooks = join_first(_hooks_between_steps(run), 3)
    return _diagnosis(
        case, finding, "weights",
        f"{names} became non-finite between the forward passes of steps {case.step - 1} and {case.step}, but stay"
        f" finite if the steps are repeated: code other than the optimizer has changed them{state}.",
        f"find the code{'' if hooks else ', such as a hook or a callback,'} that changes gradients or writes to"
        f" {repr(certain[0]) if certain else 'weights'} after step {case.step - 1}{hooks and ', in '}{hooks}.",
        key=names,
    )  # fmt: skip


def _hooks_between_steps(run: RunState) -> list[str]:
    """Return the user's hooks that run between a backward pass and the next forward pass, each with its line."""
    owners = {type(owner): None for owner in (run.module, *run.callbacks)}
    hooks = [(owner.__name__, getattr(owner, name, None)) for owner in owners for name in _BETWEEN_STEPS]
    codes = {code: owner for owner, hook in hooks if (code := getattr(hook, "__code__", None)) is not None}
    return [
        f"{owner}.{code.co_name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
        for code, owner in codes.items()
        if is_users_file(code.co_filename)
    ]


def _optimizer(run: RunState, case: Case, finding: Finding) -> Diagnosis | None:
    """Explain a step that divides by ``eps``, if ``eps`` is 0 in the dtype of the weights."""
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            eps, dtypes = group.get("eps", 1.0), {parameter.dtype for parameter in group["params"]}
            if dtype := next((dtype for dtype in dtypes if not torch.tensor(eps, dtype=dtype)), None):
                name = str(dtype).removeprefix("torch.")
                wider = remedies.other_precision("16-mixed")
                setting = wider if eps else remedies.optimizer_setting(run, "eps", 1e-8)
                return _diagnosis(
                    case, finding, "underflow",
                    f"{type(optimizer).__name__} divides by eps={eps:g}, which is 0 in the weights' dtype, {name}.",
                    Remedy(f"{setting}", "", (setting,)),
                    alternative=f"{remedies.other_precision('bf16-mixed')}" if eps else "", key="eps",
                )  # fmt: skip
    return None


def _buffers(run: RunState, case: Case, finding: Finding) -> Diagnosis | None:
    """Explain buffers that had nan or inf when training began, and tensors in other attributes that have them now.

    These values are the cause if the batch is finite without them. A value of -inf is not, because it may be part of a
    mask.
    """
    module = run.module
    buffers = dict(module.named_buffers())
    # the values of attributes may differ between ranks, which must replay together
    attributes = remedies.tensor_attributes(module) if run.world_size == 1 else {}
    broken = {
        name: f"model.get_buffer({name!r})"
        for name, largest in case.buffers.items()
        if name in buffers and not largest.isfinite() and largest != -math.inf
    }
    began = " when training began" if broken else ""
    for name, value in attributes.items():
        if (value.isnan() | value.isposinf()).any():
            path, _, attribute = name.rpartition(".")
            broken[name] = f"model{f'.get_submodule({path!r})' if path else ''}.{attribute}"
    if not broken:
        return None
    current, batches = buffers | attributes, [batch._replace(buffers=None) for batch in case.batches]
    usual = {name: int(name.endswith("running_var")) for name in broken}  # BatchNorm divides by a variance
    with remedies.weights_of(run, {name: current[name].nan_to_num(*[number] * 3) for name, number in usual.items()}):
        cured = examine(run, batches, 1.0)
    if cured is None or cured.fails:
        return None
    return _diagnosis(
        case, finding, "weights",
        f"{'Buffers' if began else 'Tensors in attributes'} were not finite{began}: {join_first(broken, 4)}.",
        f"load or compute other {'buffers' if began else 'values'}. If there are none: "
        + "; ".join(
            f"torch.nan_to_num_({code}{f', {usual[name]}' * 3})" for name, code in list(broken.items())[:4]
        ),
        tried="the batch is finite with it", key=next(iter(broken)), figures=_figures(finding, cured),
    )  # fmt: skip


def _divergence(run: RunState, case: Case, finding: Finding) -> Diagnosis:
    if case.growth < 0:
        return _diagnosis(
            case, finding, "divergence",
            f"The loss falls without bound, to {case.growth:.3g}: the steps cannot reach a minimum.",
            "check the sign of the loss, and that each of its terms has a lower limit.",
        )  # fmt: skip
    batches = [*case.recent, *case.batches]
    can_try = case.before and remedies.can_step(run)
    learned = remedies.find_setting(run, batches[-8:], case.before) if can_try else None
    rates = [float(group["lr"]) for optimizer in run.optimizers for group in optimizer.param_groups]
    rate = max([*rates, *(float(lr) for batch in batches for lr in batch.rates)])
    name, value = "lr", rate / 10 if math.isfinite(rate) else 0.01
    cause, tried = f"the learning rate is {rate:g}", ""
    if learned is not None:
        name, value, cause = learned.name, learned.value, learned.fault or cause
        tried = f"a few steps bring the loss from {learned.before:.3g} to {learned.after:.3g}"
    setting = remedies.optimizer_setting(run, name, value)
    text = f"{setting}"
    if name == "lr":
        text = f"{'a schedule that stays at' if run.schedules else 'a lower learning rate,'} {setting}"
    is_scheduled = name == "lr" and setting.old is not None and rate > setting.old
    return _diagnosis(
        case, finding, "divergence",
        f"The steps make the loss grow without bound{', in float32 too' if case.batches else ''}: {cause}.",
        Remedy(text, tried, () if is_scheduled else (setting,)),
        alternative=_normalization(finding, 20.0) or f"clip gradients: {remedies.clipping()}",
        figures={} if learned is None else {"loss": (learned.before, learned.after)},
    )  # fmt: skip


def _underflow(run: RunState, case: Case) -> Diagnosis | None:
    lost = remedies.underflow(run, case.batches, case.scale)
    if lost.get("", 0.0) <= MAX_UNDERFLOW or remedies.largest_update(run, case.batches) < _TINY:
        return None  # little is lost, or the updates would be too small in float32, too
    finding = examine(run, case.batches, case.scale)
    if finding is None or finding.fails:
        return None
    worst = max((name for name in lost if name), key=lambda name: lost[name])
    tried, cap, bfloat16 = "", run.scaler.max_scale, remedies.other_precision("bf16-mixed")
    scale = finding.largest_scale / 16 if math.isfinite(finding.largest_scale) else 2.0**40
    still_lost = remedies.underflow(run, case.batches, scale).get("", 1.0) if scale > case.scale else 1.0
    if still_lost < MAX_UNDERFLOW / 3:
        tried = "the batch is finite at this scale, and little is lost"
        settings = {"init_scale": scale} | ({"max_scale": None} if cap < scale else {})
        setting = remedies.precision(run.precision, **settings)
    else:
        setting = bfloat16
    return _diagnosis(
        case, finding, "underflow",
        f"At a loss scale of {case.scale:g}, {lost['']:.0%} of the gradient is lost in float16; worst: {worst}"
        f" ({lost[worst]:.0%}).",
        Remedy(f"{setting}", tried, (setting,)), alternative=f"{bfloat16}" if tried else "",
        figures={"lost_gradient": (lost[""], still_lost)} if tried else {},
    )  # fmt: skip


def _unknown_cause(run: RunState, case: Case, finding: Finding | None) -> Diagnosis:
    """Return a verdict without a cause, because the batch or the weights before it are no longer stored."""
    finding = finding or Finding(-1, 0, 1, run.global_rank, case.scale, fails=True)
    guard = "nonfinite_guard" if remedies.is_command_line() else "[NonFiniteGuard('stop')]"
    return _diagnosis(
        case, finding, "unknown",
        f"A loss or the weights became non-finite between steps {case.first} and {case.step}; that batch or the weights"
        " before it are no longer stored.",
        f"callbacks={guard} in the next run: it ends at that step and names the cause.",
    )  # fmt: skip


def _without_replay(run: RunState, case: Case) -> Diagnosis | None:
    """Explain losses or gradients that are not finite, or grow, if ``training_step`` draws its own batches."""
    is_certain = case.trigger in ("loss", "growth") or (case.trigger == "skips" and not run.scaler.is_enabled())
    if case.error is not None or not is_certain:
        return None
    finding = Finding(-1, 0, 1, run.global_rank, case.scale, fails=True)
    if case.growth or case.trigger == "growth":
        return _divergence(run, replace(case, before={}, batches=[]), finding)
    return _diagnosis(
        case, finding, "unknown",
        f"A {'gradient' if case.trigger == 'skips' else 'loss'} was not finite at step {case.step}. The step cannot be"
        " repeated to find the cause, because `training_step` draws its own batches (`dataloader_iter`).",
        "use `training_step(self, batch, batch_idx)` in the next run, whose report then names the cause.",
    )  # fmt: skip


# --- shared by the verdicts ------------------------------------------------------------------------------------------


def _diagnosis(case: Case, finding: Finding, kind: str, cause: str, remedy: str | Remedy, **details: Any) -> Diagnosis:
    if isinstance(remedy, Remedy):
        remedy, details["tried"], details["changes"] = remedy
    in_a_row = case.in_a_row
    if case.trigger == "step":  # its outcome is not known yet
        in_a_row = in_a_row + 1 if finding.fails else 0
    return Diagnosis(kind, cause, remedy, finding=finding, step=case.step, in_a_row=in_a_row, **details)


def _figures(finding: Finding, cured: Finding) -> dict[str, tuple[float, float]]:
    """Return the figures of the replays without and with the remedy."""
    return {name: (getattr(finding, name), getattr(cured, name)) for name in ("loss", "largest_scale")}


def _normalization(finding: Finding, limit: float) -> str:
    """Return the advice to normalize the tensors of the batch with values above the limit, or ""."""
    wide = [f"{name} up to {value:.3g}" for name, value in finding.ranges.items() if value > limit]
    return f"normalize the inputs ({join_first(wide, 2)})" if wide else ""


def _fits_with_cuda_ops(run: RunState, case: Case) -> bool:
    """Return whether the batch is finite on a CPU if autocast uses CUDA's lists of operations."""
    autocast_ops = getattr(run.precision, "autocast_ops", "cuda")
    if autocast_ops == "cuda" or run.device.type != "cpu":
        return False
    variant = Variant(cuda=True)
    return remedies.is_cured(examine(run, case.batches, case.scale, variant), variant)


def _rates_are_finite(run: RunState) -> bool:
    return all(math.isfinite(g["lr"]) for optimizer in run.optimizers for g in optimizer.param_groups)


def _has_diverged(run: RunState, case: Case, failing: Sequence[RecordedBatch], origin: Origin | None) -> bool:
    """Return whether most of the recent batches have a much larger loss than with earlier weights, in float32.

    If no loss is finite any more, return True, unless an operation is not defined for its input, such as log(-1).
    """
    if not _rates_are_finite(run):
        return True
    if not case.before or run.world_size > 1:
        return False
    batches = [*case.recent[-_COMPARED:], *failing]
    current_losses = remedies.losses(run, batches)
    with remedies.weights_of(run, case.before):
        earlier_losses = remedies.losses(run, batches)
    pairs = [(a, b) for a, b in zip(current_losses, earlier_losses, strict=True) if math.isfinite(b)]
    if not pairs:
        return False
    usual = statistics.median(abs(b) for _, b in pairs)
    if finite := [(a, b) for a, b in pairs if math.isfinite(a)]:
        worse = [a - b > _DIVERGENCE_FACTOR * max(abs(b), usual) for a, b in finite]
        return sum(worse) > len(worse) / 2
    if origin is None or not origin.is_nan or origin.inputs is None:
        return True
    return bool(origin.inputs.not_finite) or origin.inputs.largest > _LARGE


def are_finite(module: nn.Module, batch: Any = ()) -> bool:
    """Return whether all dense weights and dense tensors of the batch are finite. A host-device synchronization."""
    tensors = filter(is_dense, (*module.parameters(), *tensors_in(batch)))
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
