"""Try remedies on recorded batches, and write them in the caller's syntax."""

from __future__ import annotations

import inspect
import math
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.common.module_tree import has_forward, is_dense, is_measurable, plain_name
from trainer.diagnosis.examine import Finding, examine
from trainer.diagnosis.recording import RecordedBatch
from trainer.diagnosis.replay import FLOAT32, UNCHANGED, Variant, backward, replay, run_batch, undisturbed
from trainer.loop.batch_path import ModuleCalls
from trainer.loop.closures import needs_closure
from trainer.loop.run_state import RunState
from trainer.precision.base import Precision
from trainer.precision.underflow import SMALLEST_NORMAL
from trainer.state import random_states

LOW_SCALE = 128.0
"""Smallest loss scale at which small gradients do not vanish."""
_CHAIN = 8
"""Maximum number of modules to try in float32 together."""
_PASSES, _RATES = 8, 8
_DRAWS = 64
"""Number of repetitions of a batch with other random numbers."""
_GROWTH_FACTOR = 100.0
"""The loss of a training that diverges exceeds the usual one by this factor."""
_RELEVANT_RATIO = 1e-4
"""Gradient elements below this share of the parameter's largest one may vanish."""
_USUAL: tuple[tuple[str, Any, Callable[[Any], bool]], ...] = (
    ("maximize", False, lambda value: not value),
    ("momentum", 0.9, lambda value: value < 1),
    ("weight_decay", 0.0, lambda value: value >= 0),
)
"""Settings of optimizers: name, usual value, and whether a value is within the usual range."""

Weights = Mapping[str, Tensor]


def is_cured(finding: Finding | None, variant: Variant) -> bool:
    """Return whether a batch is finite, forward and backward, at a scale at which gradients do not vanish."""
    if finding is None or finding.error or not math.isfinite(finding.loss):
        return False
    return not finding.fails if variant.dtype is not None else finding.largest_scale >= LOW_SCALE


def find_cure(run: RunState, batches: Sequence[RecordedBatch], finding: Finding) -> tuple[Variant, Finding] | None:
    """Try modules in float32, one more as long as a value overflows; then bfloat16 or float32 for the whole model.

    All ranks call this together.

    Returns:
        The first change of the precision that cures the batch, and its replay. None if none does.
    """
    named = {plain_name(name): module for name, module in run.module.named_modules()}
    leaves = {name for name, module in named.items() if name and not [*module.children()] and [*module.parameters()]}

    def tried(variant: Variant) -> tuple[Variant, Finding] | None:
        scale = 1.0 if variant.dtype is not None else finding.scale
        outcome = examine(run, batches, scale, variant)
        return (variant, outcome) if outcome is not None and is_cured(outcome, variant) else None

    chosen: list[str] = []
    latest: Finding | None = finding
    while latest is not None and latest.origin is not None and len(chosen) < _CHAIN:
        origin = latest.origin
        parents = [origin.module.rsplit(".", depth)[0] for depth in range(1, origin.module.count(".") + 1)]
        candidates = [origin.module, *origin.sources, *parents]
        new = next((n for n in candidates if n and not _is_covered(n, chosen) and has_forward(named[n])), None)
        if new is None:
            break
        chosen.append(new)
        latest = examine(run, batches, finding.scale, Variant(modules=tuple(chosen)))
        if is_cured(latest, Variant()):
            break
    else:
        latest = None
    wide = next((c for d in (torch.bfloat16, torch.float32) if (c := tried(Variant(dtype=d)))), None)
    if not is_cured(latest, Variant()) or (wide is not None and all(_is_covered(name, chosen) for name in leaves)):
        return wide
    for name in list(chosen):  # drop those that are not needed
        rest = tuple(other for other in chosen if other != name)
        if rest and tried(Variant(modules=rest)):
            chosen.remove(name)
    patterns = tuple(dict.fromkeys(_with_siblings(name, named) for name in chosen))
    return tried(Variant(modules=patterns)) or tried(Variant(modules=tuple(chosen)))


def underflow(run: RunState, batches: Sequence[RecordedBatch], scale: float) -> dict[str, float]:
    """Return the share of each parameter's gradient that is lost in float16 at this scale, by name; "" is for all.

    Lost elements are zero or subnormal in float16. Only elements that matter in float32 are counted.
    """
    preserved, totals = _counts(run, batches, scale, None), _counts(run, batches, 1.0, torch.float32)
    preserved[""], totals[""] = sum(preserved.values()), sum(totals.values())
    return {name: max(0.0, 1.0 - preserved.get(name, 0) / number) for name, number in totals.items() if number}


def _counts(run: RunState, batches: Sequence[RecordedBatch], scale: float, dtype: torch.dtype | None) -> dict[str, int]:
    engine, part, smallest = run.engine, run.part, 0.0 if dtype is torch.float32 else SMALLEST_NORMAL

    def count(gradient: Tensor) -> int:
        values = part(gradient).abs().float()
        floor = max(values.max().item() * _RELEVANT_RATIO, smallest) if values.numel() else 1.0
        return int((values >= floor).sum()) * (floor > 0)

    passes = replay(run, batches, lambda loss, watched: backward(loss, scale, watched, count), Variant(dtype))
    local = [counts for batch in passes for counts in batch]
    counts_by_batch = [
        counts for process in engine.collectives.broadcast(engine.collectives.gather(local)) for counts in process
    ]
    return {name: sum(batch.get(name, 0) for batch in counts_by_batch) for counts in counts_by_batch for name in counts}


def largest_update(run: RunState, batches: Sequence[RecordedBatch]) -> float:
    """Return the largest change of a weight by one step in float32, divided by the largest weight.

    It is estimated from the learning rate and, for optimizers with ``betas`` and ``eps``, from their normalization. All
    ranks call this together.
    """
    groups = {id(p): group for o in run.optimizers for group in o.param_groups for p in group["params"]}
    named = dict(run.module.named_parameters())
    weights = [parameter.detach() for parameter in filter(is_measurable, named.values())]
    largest = max((weight.abs().max().item() for weight in weights), default=1.0) or 1.0
    updates = [0.0]

    def size_of(gradient: Tensor) -> float:
        return gradient.abs().max().item() if gradient.numel() else 0.0

    for batch in replay(run, batches, lambda loss, watched: backward(loss, 1.0, watched, size_of), FLOAT32):
        for name, size in (item for sizes in batch for item in sizes.items()):
            group = groups[id(named[name])]
            normalized = size / (size + group["eps"]) if size and {"betas", "eps"} <= group.keys() else size
            updates.append(float(group["lr"]) * normalized / largest)
    update = torch.tensor(max(updates), dtype=torch.float32, device=run.device)
    return float(run.collectives.reduce(update, "max")) if run.world_size > 1 else max(updates)


def losses(run: RunState, batches: Sequence[RecordedBatch]) -> list[float]:
    """Return the loss of each batch in float32, with the current weights; nan without a loss."""
    passes = replay(run, batches, lambda loss, _: loss.item(), FLOAT32)
    return [seen[-1] if seen else math.nan for seen in passes]


def tensor_attributes(module: nn.Module) -> dict[str, Tensor]:
    """Return the dense floating-point tensors in attributes of the submodules that are no parameters or buffers."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, owner in module.named_modules()
        for name, value in vars(owner).items()
        if isinstance(value, Tensor) and is_dense(value) and value.is_floating_point()
    }


@contextmanager
def weights_of(run: RunState, weights: Weights) -> Iterator[None]:
    """A context in which the module has other weights, buffers, or tensors in attributes."""
    module = run.module
    named = {**tensor_attributes(module), **dict(module.named_parameters()), **dict(module.named_buffers())}
    current = {name: named[name].detach().clone() for name in weights}
    for name, value in weights.items():
        named[name].data.copy_(value)
    try:
        yield
    finally:
        for name, value in current.items():
            named[name].data.copy_(value)


class Learned(NamedTuple):
    """A setting of the optimizers with which a few steps reduce the loss.

    Attributes:
        name: name of the setting, such as "lr".
        value: its value.
        fault: the setting of the run that is the cause, such as "momentum=1.5"; "" if it is the learning rate.
        before, after: the mean loss before and after the steps.
    """

    name: str
    value: Any
    fault: str
    before: float
    after: float


def try_steps(
    run: RunState, batches: Sequence[RecordedBatch], variant: Variant, settings: Mapping[str, Any], scale: float
) -> tuple[float, float]:
    """Train for a few passes with the current weights. Return the mean loss of the first and of the last one.

    The latter is inf if a loss is not finite, or the mean losses rise. Restores everything afterwards.

    Args:
        run: the state of the run.
        batches: the batches of a pass.
        variant: the change of the precision.
        settings: settings of the parameter groups.
        scale: the loss scale.
    """
    others = {name: value for name, value in settings.items() if name != "lr"}
    rate = settings.get("lr", _highest_rate(run))
    seen = _train(run, batches, rate, sys.float_info.max, others, variant, scale)
    first = seen[: len(batches)]
    return sum(first) / len(batches) if len(first) == len(batches) else math.nan, _last_mean(seen, batches)


def find_setting(run: RunState, batches: Sequence[RecordedBatch], weights: Weights) -> Learned | None:
    """Find a setting of the optimizers with which a few steps reduce the loss.

    Trains for a few steps on the recorded batches in float32, and restores everything afterwards. Tries to correct a
    setting that is outside its usual range. Then tries the current learning rate divided by 10, 100 and so on. To have
    a margin, returns a quarter of the first rate that reduces the loss, if the quarter also reduces it. Returns None if
    no setting helps.
    """
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    highest = _highest_rate(run)
    start = highest if 0 < highest < math.inf else 10.0
    with weights_of(run, weights):
        first = [loss for loss in losses(run, batches) if math.isfinite(loss)]
    if not first:
        return None
    usual, limit = sum(first) / len(first), max(first) + 0.5 * abs(max(first))
    tries: list[tuple[str, Any, str, list[float], dict[str, Any]]] = []
    for name, value, is_usual in _USUAL:
        if (group := next((g for g in groups if name in g and not is_usual(g[name])), None)) is not None:
            tries.append((name, value, f"{name}={group[name]}", [start], {name: value}))
    for rate in (float(f"{start / 10**power:.0e}") for power in range(1, _RATES + 1)):
        tries.append(("lr", rate / 4, "", [rate, rate / 4], {}))  # a margin for batches that were not recorded
    for name, value, fault, rates_to_try, settings in tries:
        with weights_of(run, weights):
            means = [_last_mean(_train(run, batches, rate, limit, settings), batches) for rate in rates_to_try]
        if max(means) < usual - 0.01 * abs(usual):
            return Learned(name, value, fault, usual, means[-1])
    return None


def diverges(run: RunState, batches: Sequence[RecordedBatch]) -> bool:
    """Return whether a few steps in float32, with the settings of the run, make the loss grow far above its median."""
    if not can_step(run):
        return False
    limit = _GROWTH_FACTOR * statistics.median(map(abs, losses(run, batches)))
    return any(not loss <= limit for loss in _train(run, batches, _highest_rate(run), limit, {}))


def _highest_rate(run: RunState) -> float:
    return max(float(group["lr"]) for optimizer in run.optimizers for group in optimizer.param_groups)


def _train(
    run: RunState,
    batches: Sequence[RecordedBatch],
    rate: float,
    limit: float,
    settings: Mapping[str, Any],
    variant: Variant = FLOAT32,
    scale: float = 1.0,
) -> list[float]:
    """Train for a few passes. Return the losses up to the first one that exceeds the limit.

    Args:
        run: the state of the run.
        batches: the batches of a pass.
        rate: the highest learning rate of the parameter groups; the others keep their ratio to it.
        limit: largest loss.
        settings: other settings of the parameter groups.
        variant: the change of the precision. Default: float32.
        scale: loss scale. It is halved, and the step skipped, if a gradient is not finite at a larger scale than 1.
    """
    seen: list[float] = []
    highest = _highest_rate(run)
    with _optimizer_steps(run, scale) as step:
        for group in (group for optimizer in run.optimizers for group in optimizer.param_groups):
            group.update({name: value for name, value in settings.items() if name in group})
            is_usual = math.isfinite(float(group["lr"])) and 0 < highest < math.inf
            group["lr"] = rate * float(group["lr"]) / highest if is_usual else rate
        for recorded in [*batches] * _PASSES:
            *batch_losses, _ = step(recorded, variant, recorded is batches[-1])  # the window may have more batches
            seen += batch_losses[:1] or seen[-1:]  # a batch may have no loss
            if seen and not seen[-1] <= limit:
                break
    return seen


def _last_mean(seen: Sequence[float], batches: Sequence[RecordedBatch]) -> float:
    """Return the mean loss of the last pass, or inf if a loss exceeded the limit, or the mean losses rise."""
    size = len(batches)
    if len(seen) < size * _PASSES:
        return math.inf
    means = [sum(seen[at : at + size]) / size for at in range(0, len(seen), size)]
    falls = max(means) <= means[0] + 0.2 * abs(means[0]) and means[-1] <= min(means) + 0.1 * abs(min(means))
    return means[-1] if falls else math.inf


def repeat(
    run: RunState, batches: Sequence[RecordedBatch], weights: Weights, limit: float
) -> tuple[RecordedBatch | None, Weights]:
    """Train on these batches again, from earlier weights and with new optimizer states.

    If :func:`can_step` is false, gradients are checked, but no step is taken.

    Returns:
        A batch and weights. If a batch has a loss or gradient that is not finite: this batch with its random numbers,
        and the finite weights before it.
        If a loss exceeds the limit, or weights are not finite although all gradients are: None and the current weights.
        If nothing fails: None and {}.
    """
    named = dict(run.module.named_parameters())
    with weights_of(run, weights), _optimizer_steps(run) as step:
        groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
        for recorded in batches:
            for group, own_rate in zip(groups, recorded.rates, strict=False):
                group["lr"] = own_rate
            before = {name: parameter.detach().clone() for name, parameter in named.items()}
            random_state = random_states.capture(run.device)
            *batch_losses, are_finite = step(recorded, UNCHANGED)
            if not all(bool(value.isfinite().all()) for value in before.values()):
                return None, before
            if not (are_finite and all(map(math.isfinite, batch_losses))):
                return recorded._replace(random_state=random_state), before
            if any(not abs(loss) <= limit for loss in batch_losses):
                return None, before
    return None, {}


def failing_draw(run: RunState, batches: Sequence[RecordedBatch]) -> RecordedBatch | None:
    """Repeat batches with other random numbers. Return the first one that fails, with its random numbers, or None."""

    def is_finite(loss: Tensor, watched: Mapping[str, Tensor]) -> bool:
        gradients = backward(loss, 1.0, watched, lambda gradient: bool(gradient.isfinite().all()))
        return bool(loss.isfinite().all()) and all(gradients.values())

    if run.world_size > 1:
        return None
    draws = [*batches] * _DRAWS
    passes = replay(run, draws, is_finite)
    for recorded in draws:
        random_state = random_states.capture(run.device)
        if not all(next(passes)):
            passes.close()
            return recorded._replace(random_state=random_state)
        if random_state == random_states.capture(run.device):
            break  # draws no random numbers
    passes.close()
    return None


def can_step(run: RunState) -> bool:
    """Return whether a step can be taken again: on one process, and without a closure in manual optimization."""
    is_automatic = run.is_automatic
    return run.world_size == 1 and (is_automatic or not any(map(needs_closure, run.optimizers)))


@contextmanager
def _optimizer_steps(run: RunState, scale: float = 1.0) -> Iterator[Callable[..., list[float]]]:
    """Yield a function that takes a step on a batch, and returns its losses, then whether gradients are finite.

    Its arguments are the batch, the variant, and whether to step before the end of the window.

    Afterwards, weights and optimizers are as before.

    Args:
        run: the state of the run.
        scale: loss scale. It is halved, and the step skipped, if a gradient is not finite at a larger scale than 1.
            Default: 1.
    """
    are_finite: list[bool] = []
    states = [optimizer.state for optimizer in run.optimizers]
    parameters = [p for o in run.optimizers for g in o.param_groups for p in g["params"] if p.requires_grad]
    steps, is_manual = can_step(run), not run.is_automatic

    def step(recorded: RecordedBatch, variant: Variant, is_last: bool = False) -> list[float]:
        nonlocal scale
        batch_losses: list[float] = []
        are_finite.clear()

        def on_loss(loss: Tensor) -> None:
            batch_losses.append(loss.item())
            loss = loss if scale == 1.0 else loss.float() * scale
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
                if gradient is not None:
                    gradient = gradient if scale == 1.0 else gradient / scale
                    are_finite.append(bool(_values(gradient).isfinite().all()))
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

        def closure() -> float:
            clear()
            run_batch(run, recorded, on_loss, variant)
            return batch_losses[-1] if batch_losses else 0.0

        with_closure = any(map(needs_closure, run.optimizers)) and steps
        if with_closure:
            type(run.optimizers[0]).step(run.optimizers[0], closure)
        else:
            run_batch(run, recorded, on_loss, variant)
        if scale > 1.0 and not all(are_finite):
            scale /= 2
            clear()
        if not is_manual and not with_closure and (is_last or recorded.mean.window.is_last or not steps):
            for optimizer in run.optimizers if steps else ():
                type(optimizer).step(optimizer)  # without gradients, it changes nothing
            clear()
        return [*batch_losses, all(are_finite)]

    def clear() -> None:
        for parameter in parameters:
            parameter.grad = None

    def take_step(optimizer: Any, closure: Callable[[], Any], **_: Any) -> Any:
        result = closure()
        if steps and (scale == 1.0 or all(are_finite)):
            type(optimizer).step(optimizer)
        return result

    try:
        with undisturbed(run):
            run.engine.module_calls = ModuleCalls(step=take_step)
            for optimizer in run.optimizers:
                optimizer.state = defaultdict(dict)
            yield step
    finally:
        for optimizer, state in zip(run.optimizers, states, strict=True):
            optimizer.state = state


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


# --- in the caller's syntax -----------------------------------------------------------------------------------------


def is_command_line() -> bool:
    """Return whether the run was started by ``python -m trainer``."""
    run = sys.modules.get("trainer.cli.execution")
    return run is not None and run.is_running


class Setting(NamedTuple):
    """An argument of the Trainer or of the optimizers with another value.

    Attributes:
        owner: "trainer" or "optimizer".
        name: name of the argument.
        value: the new value. For ``MixedPrecision``, only its changed arguments.
        code: the value in full, as Python code.
        old: the current value, such as 0.1. None if it is not known, or differs between parameter groups.
        text: the argument in the caller's syntax.
    """

    owner: str
    name: str
    value: Any
    code: str
    old: Any
    text: str

    def __str__(self) -> str:
        return self.text


def precision(current: Precision, **settings: Any) -> Setting:
    """Return the argument that adds these settings to the run's `MixedPrecision`."""
    given = {}
    for name, parameter in list(inspect.signature(type(current).__init__).parameters.items())[2:]:
        if getattr(current, name, parameter.default) != parameter.default and name != "loss_scaling":
            given[name] = getattr(current, name)
    given |= settings
    words = ", ".join(f"{name}={list(value) if isinstance(value, tuple) else value!r}" for name, value in given.items())
    dtype = str(current.dtype).removeprefix("torch.")
    code = f"MixedPrecision({dtype!r}, {words})"
    overrides = " ".join(shlex.quote(f"precision.{name}={_yaml(value)}") for name, value in settings.items())
    return Setting(
        "trainer", "precision", settings, code, None, overrides if is_command_line() else f"precision={code}"
    )


def other_precision(name: str) -> Setting:
    """Return the argument that chooses another precision."""
    text = f"precision={name}" if is_command_line() else f"precision={name!r}"
    return Setting("trainer", "precision", name, repr(name), None, text)


def optimizer_setting(run: RunState, name: str, value: Any) -> Setting:
    """Return an argument of the optimizers, such as ``lr=0.1``."""
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    olds = {group.get("initial_lr", group["lr"]) if name == "lr" else group.get(name) for group in groups}
    code = f"{value:g}" if name == "lr" else repr(value)
    text = f"{'optimizer.' if is_command_line() else ''}{name}={code}"
    return Setting("optimizer", name, value, code, olds.pop() if len(olds) == 1 else None, text)


def clipping() -> str:
    """Return the setting that clips gradients."""
    return f"{'trainer.' if is_command_line() else ''}gradient_clip_val=1.0"


def _yaml(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{','.join(value)}]"
    return {None: "null", True: "true", False: "false"}.get(value, f"{value}")


def _is_covered(name: str, chosen: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in chosen)


def _with_siblings(name: str, named: Mapping[str, Any]) -> str:
    """Return a pattern for a module and its counterparts in other layers; the name itself if it has none."""
    parts = name.split(".")
    for index, word in enumerate(parts[:-1]):
        others = [".".join([*parts[:index], other, *parts[index + 1 :]]) for other in map(str, range(64))]
        if word.isdigit() and sum(type(named.get(other)) is type(named[name]) for other in others) > 1:
            parts[index] = "*"
    return ".".join(parts)
