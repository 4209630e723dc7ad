"""Compare a run with the first run of a comparison, and check the thresholds. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.arguments import NUMBER, SWITCH, TEXT
from trainer.cli.objective import not_logged
from trainer.cli.schema import setting
from trainer.record.run_record import RunRecord, direction_of

MIN_SPEEDUP = 1.5
"""Smallest expected speed-up over 32 bits. Below it, the GPU hardly used its Tensor Cores, or was not busy."""

MIN_MEMORY_SAVING = 0.3
"""Smallest expected saving, as a share of the peak memory in 32 bits. If activations dominate, it is 30 to 50%."""

_SAVED = (
    " Mixed precision keeps weights, gradients and optimizer states in 32 bits, and copies of the weights in 16 bits."
    " Only activations become smaller; their share grows with the batch size."
)
_SAME_SPEED = 1.05  # smaller ratios are reported as equal


@dataclass(frozen=True)
class Thresholds:
    """The settings ``compare.*``. conf/compare/default.yaml describes them."""

    metric: str | None = setting(None, TEXT._replace(words="the name of a metric"), None)
    mode: str | None = setting(None, "max", "min", None)
    accuracy_tolerance: float | None = setting(1.0, NUMBER, None)
    min_speedup: float | str | None = setting("auto", NUMBER, "auto", None)
    min_memory_saving: float | str | None = setting("auto", NUMBER, "auto", None)
    strict: bool = setting(False, *SWITCH)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one run.

    Args:
        text: a clause for each compared figure.
        met: whether it meets all thresholds.
        advice: possible reasons for each missed threshold.
        speedup: samples per second divided by those of the first run; None if one of them is unknown.
        memory_saving: 1 minus the peak memory divided by that of the first run; None if one of them is unknown.
    """

    text: str
    met: bool
    advice: tuple[str, ...] = ()
    speedup: float | None = None
    memory_saving: float | None = None


def choose_metric(runs: Sequence[RunRecord], thresholds: Thresholds) -> tuple[tuple[str, str] | None, str | None]:
    """Return the name and mode of the metric to compare, and a remark if no run has logged ``compare.metric``.

    The metric is the first of these that a run has logged: ``compare.metric``; the objective of the runs; an accuracy;
    another validation score; a validation loss.
    """
    logged = list(dict.fromkeys(name for run in runs for name in run.metrics))
    names = [name for name in logged if not name.endswith(("_step", "_epoch"))] or logged
    remark = None
    if thresholds.metric in logged:
        return (thresholds.metric, thresholds.mode or direction_of(thresholds.metric) or "max"), None
    if thresholds.metric is not None:
        remark = not_logged("compare.metric", thresholds.metric, "no run logged", logged)
    for run in runs:
        if run.objective is not None and run.objective[0] in logged:
            return (run.objective[0], thresholds.mode or run.objective[1]), remark
    validation = [name for name in names if name.startswith("val")]
    accuracies = [name for name in [*validation, *names] if "acc" in name.lower()]
    scores = [name for name in validation if direction_of(name) != "min"]
    name = next(iter([*accuracies, *scores, *validation]), None)
    return (None if name is None else (name, thresholds.mode or direction_of(name) or "max")), remark


def assess(run: RunRecord, first: RunRecord, goal: tuple[str, str] | None, thresholds: Thresholds) -> Verdict:
    """Compare a completed run with the first run, which has completed too."""
    clauses: list[str] = []
    advice: list[str] = []
    if goal is not None:
        clause, missed = _assess_quality(run, first, *goal, thresholds.accuracy_tolerance)
        clauses.append(clause)
        advice += [missed] if missed else []
    rate, first_rate = run.samples_per_second, first.samples_per_second
    speedup = rate / first_rate if rate and first_rate else None
    if speedup is not None:
        wanted = _threshold(thresholds.min_speedup, MIN_SPEEDUP, run, first)
        clauses.append(_speed(speedup))
        if wanted is not None and speedup < wanted:
            reasons = _slowness_reasons(run, first) if run.memory_is_the_gpus else ()
            advice.append(" ".join([f"Less than {wanted:g}x as fast as {first.label}.", *reasons]))
    memory, first_memory = run.peak_memory, first.peak_memory
    saving = 1 - memory / first_memory if memory and first_memory else None
    if saving is not None:
        wanted = _threshold(thresholds.min_memory_saving, MIN_MEMORY_SAVING, run, first)
        if wanted is not None or run.memory_is_the_gpus:
            clauses.append(_memory(saving))
        if wanted is not None and saving < wanted:
            advice.append(f"Saves less than {wanted:.0%} of the memory.{_SAVED * run.memory_is_the_gpus}")
    text = f"{', '.join(clauses)}." if clauses else "no figure was measured in both runs."
    return Verdict(text, met=not advice, advice=tuple(advice), speedup=speedup, memory_saving=saving)


def _is_half(run: RunRecord) -> bool:
    """Return whether the precision of a run computes in 16 bits."""
    return str(run.precision).startswith(("16", "bf16", "fp8"))


def _threshold(setting: float | str | None, on_gpu: float, run: RunRecord, first: RunRecord) -> float | None:
    """Return the threshold, or None for no threshold.

    "auto" means ``on_gpu`` if both runs used GPUs and only ``run`` is in 16 bits, otherwise no threshold.
    """
    if setting == "auto":
        on_gpus = run.memory_is_the_gpus and first.memory_is_the_gpus
        return on_gpu if on_gpus and _is_half(run) and not _is_half(first) else None
    assert not isinstance(setting, str)
    return setting


def _assess_quality(
    run: RunRecord, first: RunRecord, name: str, mode: str, tolerance: float | None
) -> tuple[str, str | None]:
    """Return a clause about the metric and, if it is worse by more than ``tolerance``, advice.

    The difference is in points for a score in [0, 1], otherwise in percent.
    """
    value, reference = run.value_of(name), first.value_of(name)
    if value is None or reference is None:
        return f"no {name} to compare", f"{name} was not logged by both runs."
    difference, unit = (0.0 if value == reference else value - reference), "%"
    if "loss" not in name.lower() and 0 <= value <= 1 and 0 <= reference <= 1:
        difference, unit = 100 * difference, " points"
    elif difference:  # also if it is NaN
        difference = 100 * difference / abs(reference) if reference else math.copysign(math.inf, value)
    difference = round(difference, 4)  # further digits exceed float32's precision
    worse = -difference if mode == "max" else difference
    if not math.isfinite(difference):
        is_worse = tolerance is not None and (worse > tolerance or not math.isfinite(value))
        clause = f"{name} is {value:g} ({first.label}: {reference:g})"
        return clause, f"{name} cannot be compared with {first.label}'s." if is_worse else None
    size = f"{math.ceil(abs(difference) * 10) / 10:.1f}{unit}"  # rounded up, so that "within" is true
    if size.startswith("0.0"):
        return f"the same {name} as {first.label}", None
    if tolerance is None or abs(difference) <= tolerance:
        return f"{name} within {size} of {first.label}", None
    side = "above" if difference > 0 else "below"
    clause = f"{name} {size} {side} {first.label}"
    if worse <= tolerance:
        return clause, None
    advice = "To exclude chance, compare with another seed (seed=7). Look at the skipped steps and the loss curves."
    return clause, f"{name} is worse by more than {tolerance:g}{unit}. {advice}"


def _speed(ratio: float) -> str:
    if ratio >= _SAME_SPEED:
        return f"{ratio:.2f}x faster"
    return f"{1 / ratio:.2f}x slower" if ratio <= 1 / _SAME_SPEED else "as fast"


def _memory(saving: float) -> str:
    if abs(saving) < 0.005:
        return "as much memory"
    return f"{abs(saving):.1%} {'less' if saving > 0 else 'more'} memory"


def _slowness_reasons(run: RunRecord, first: RunRecord) -> Iterable[str]:
    """Iterate over reasons why 16 bits are not faster on a GPU: recorded ones first, then usual ones."""
    waiting = run.throughput.get("waiting")
    if waiting is not None and waiting > 0.2:
        yield f"The loop waited for batches {waiting:.0%} of the time: use more data.num_workers or cheaper transforms."
    if tf32 := first.gpu.get("tf32"):
        yield f"{first.label} used Tensor Cores too: TF32 in {' and '.join(tf32)}."
    yield (
        "Usual reasons: a GPU without Tensor Cores for this precision (compute capability below 7.0, or below 8.0 for"
        " bfloat16), layer sizes that are not multiples of 8, batches that do not keep the GPU busy (data.batch_size,"
        " torch.compile), or most of the work in 32 bits (precision.fp32_modules, operations in float32)."
    )
