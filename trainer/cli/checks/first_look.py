"""The first look at one's own data: a batch, what it does in each layer and would do in float16, and the brake."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer import machine
from trainer.cli import failure
from trainer.cli.checks import batch, loading, memory, steps
from trainer.cli.checks.findings import Findings, Loaded, Recipe
from trainer.cli.checks.layers import LARGEST, SCALE, Layer, Layers, largest_scale, shown
from trainer.cli.checks.steps import Step
from trainer.data.samples import batch_size
from trainer.errors import ConfigurationError, some
from trainer.machine import readable
from trainer.terminal import Table

_PICTURES = Path("outputs", "checks")
_ROWS = 8  # of the table of layers
_NAMED = 3  # layers in a sentence
_LITTLE = 0.05  # share of the time that is not worth a change


def check_batch(found: Findings, recipe: Recipe) -> None:
    """What is in a batch of the recipe's training data, and what is odd about it."""
    memory.read(recipe)  # a mistake in it is told before anything else is done
    with steps.undisturbed(found.devices[0]):
        loaded = loading.draw(recipe)
    entries = batch.describe(loaded.batch)
    picture = _PICTURES / f"{recipe.name.replace('/', '_')}.png"
    try:
        saved = picture if batch.save_images(loaded.batch, picture) else None
    except OSError as error:
        found.remark(f"The images of the batch were not written to {picture}: {error.strerror or error}.")
        saved = None
    found.facts["batch"] = {
        "entries": [entry._asdict() for entry in entries], "images": saved and str(saved)
    }  # fmt: skip
    title = f"A batch of the training data{f'; its images: {saved}' if saved else ''}"
    found.tables.append(Table(title, *_filled(("in it", "shape", "dtype", "range", "content", "not finite"), entries)))
    for sentence in batch.odd(loaded.batch):
        found.remark(sentence)


def check_steps(found: Findings, recipe: Recipe) -> None:
    """What a batch does in the layers, what float16 would make of it, and whether loading or the step is the brake."""
    assert recipe.loaded is not None
    device = found.devices[-1 if recipe.settings["trainer"]["accelerator"] == "cpu" else 0]
    part, why = None, "No step was run: checks.steps=false."
    if memory.read(recipe).steps:
        part, why = steps.part_for(recipe, device, _free(device))
    if why:
        found.remark(why)
    step = None
    if part is not None:
        try:
            with steps.undisturbed(device):
                seen = steps.look_at_layers(recipe, part)
                if not seen.labels:
                    step = steps.time_step(recipe, part, batch_size(recipe.loaded.batch))
        except ConfigurationError:
            raise
        except Exception as error:
            place = failure.where(error)
            said = failure.printable(failure.one_line(error))
            place = f" Raised in {place}" if place else ""
            found.problem(f"A training step on this batch fails: {type(error).__name__}: {said}{place}")
        else:
            _tell_layers(found, seen)
            if step is not None and step.float8:
                found.remark(step.float8)
    _tell_loading(found, recipe, recipe.loaded, step, sum(device.type == "cuda" for device in found.devices))


CHECKS_OF_RECIPE: tuple[Callable[[Findings, Recipe], None], ...] = (check_batch, memory.check_memory, check_steps)


def _free(device: torch.device) -> int:
    """Bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return machine.memory().usable or 2**63


def _tell_layers(found: Findings, seen: Layers) -> None:
    if seen.labels:
        found.problem(seen.labels)
        return
    found.facts["layers"] = {
        "loss": _finite(seen.loss),
        "parameters": seen.parameters,
        "trained": seen.trained,
        "without_gradient": seen.without_gradient,
        "layers": [{**vars(layer), "share": layer.share} for layer in seen.layers],
    }
    rows = [
        [
            layer.name or "(the module itself)", layer.kind, f"{layer.parameters:,}" if layer.parameters else "-",
            readable(layer.outputs) if layer.outputs else "-", _magnitude(layer.activation if layer.outputs else None),
            _magnitude(layer.gradient), _percent(layer.share) if layer.nonzero else "-",
        ]
        for layer in shown(seen.layers, _ROWS)
    ]  # fmt: skip
    texts, numbers = ("layer", "class"), ("parameters", "activations", "largest", "gradient", "vanish")
    of = f"{len(rows)} of {len(seen.layers)} layers" if len(rows) < len(seen.layers) else "The layers"
    frozen = f", {seen.trained:,} trained" if seen.trained < seen.parameters else ""
    loss = "" if seen.loss is None else f", loss {seen.loss:.4g}"
    title = f"{of}, in float32: {seen.parameters:,} parameters{frozen}{loss}"
    found.tables.append(Table(title, (*texts, *numbers), rows, texts, ("class", "activations", "vanish")))
    if seen.loss is not None and not math.isfinite(seen.loss):
        found.problem(f"The loss of this batch is {seen.loss}, in float32 and before any update.")
    broken = [layer for layer in seen.layers if layer.not_finite]
    if broken:
        found.problem(f"In float32 there are values that are not finite in {_names(broken)}.")
    if seen.without_gradient:
        found.remark(
            f"No gradient reaches {len(seen.without_gradient)} of the parameters that are to be trained:"
            f" {some(seen.without_gradient, _NAMED)}."
        )
    if seen.layers and not broken:
        found.facts["float16"] = facts = _float16(seen.layers)
        found.remark(" ".join(facts["told"]))


def _float16(layers: list[Layer]) -> dict[str, Any]:
    """What float16 would do: facts, and sentences."""
    high = max(layers, key=lambda layer: layer.activation)
    steep = max(layers, key=lambda layer: layer.gradient or 0.0)
    over = sorted((one for one in layers if one.largest > LARGEST), key=lambda one: one.largest, reverse=True)
    scale = largest_scale(layers)
    nonzero = sum(layer.nonzero for layer in layers)
    lost, lost_scaled = (
        sum(getattr(layer, name) for layer in layers) / nonzero if nonzero else 0.0
        for name in ("vanishing", "vanishing_scaled")
    )
    told = []
    if over:
        names = ",".join(layer.name for layer in over[:_NAMED] if layer.name)
        told.append(
            f"float16 overflows in {_names(over)}: it ends at {LARGEST:,.0f}, and there are numbers of"
            f" {_magnitude(over[0].largest)}. precision.fp32_modules=[{names}] keeps that in float32; bf16-mixed has"
            " float32's range."
        )
    else:
        gradient = f" and the largest gradient {_magnitude(steep.gradient)} in {_name(steep)}" if steep.gradient else ""
        told.append(
            f"float16 holds this batch: it ends at {LARGEST:,.0f}, and the largest activation is"
            f" {_magnitude(high.activation)} in {_name(high)}{gradient}."
        )
    if lost:
        worst = max(layers, key=lambda layer: layer.share)
        told.append(
            f"Without a loss scale {_percent(lost)} of the gradients would be below 6e-8 and vanish (in {_name(worst)}"
            f" {_percent(worst.share)}); with a scale of {SCALE:,.0f} {_percent(lost_scaled)}."
        )
    if scale is not None and scale < SCALE:
        told.append(
            f"Times 16-mixed's first loss scale, {SCALE:,.0f}, gradients overflow: it skips steps until its scale is"
            f" about {scale:,.4g}."
        )
    told.append("That is of one batch, with the weights that a training begins with.")
    return {
        "largest_activation": high.activation,
        "largest_gradient": steep.gradient,
        "overflowing": [layer.name for layer in over],
        "vanishing": lost,
        "vanishing_scaled": lost_scaled,
        "largest_scale": scale,
        "told": told,
    }


def _tell_loading(found: Findings, recipe: Recipe, loaded: Loaded, step: Step | None, gpus: int) -> None:
    found.facts["loading"] = {
        "seconds": loaded.seconds,
        "first": loaded.first,
        "workers": loaded.workers,
        "timed": loaded.timed,
        "step": None if step is None else step._asdict(),
        "told": (told := _brake(recipe, loaded, step, gpus)),
    }
    workers = "" if loaded.workers is None else f"num_workers={loaded.workers}, "
    about = f"{workers}mean of {loaded.timed}; the first took {_time(loaded.first)}"
    rows = [["loading a batch", _time(loaded.seconds), about]] if loaded.seconds is not None else []
    if step is not None:
        samples = f", measured with {step.samples} samples" if step.samples else ""
        rows.append(["a step", _time(step.seconds), f"{step.precision} on {step.device}{samples}"])
    found.tables.append(Table("Loading against training, measured here and now", (), rows))
    if told:
        found.remark(told)


def _brake(recipe: Recipe, loaded: Loaded, step: Step | None, gpus: int) -> str:
    """Whether training waits for data, and what to try; "" where that was not measured."""
    if step is None or loaded.seconds is None:
        return ""
    beside = bool(loaded.workers)  # workers load while a step runs
    waited = max(0.0, loaded.seconds - step.seconds) if beside else loaded.seconds
    share = waited / max(waited + step.seconds, 1e-9)
    if share < _LITTLE:
        return (
            f"The step is the brake: training waits for data in {_percent(share)} of the time, and more workers gain"
            f" nothing. `python -m trainer tune batch_size +recipe={recipe.name}` finds a batch size that is faster."
        )
    brake = "The data are the brake: training" if waited > step.seconds else "Training"
    waits = f"{brake} waits for data in {_percent(share)} of the time."
    if not beside and (workers := machine.suggested_workers(machine.cores().usable, gpus)):
        data = recipe.settings["data"] or {}
        plus = "" if "num_workers" in data else "+"
        return f"{waits} Try {plus}data.num_workers={workers}: they load while a step runs."
    cheaper = "Try cheaper samples: data decoded, resized and kept once, smaller files, transforms on whole batches."
    if beside:
        return f"{waits} Its {loaded.workers} workers do not keep up: more of them where there are cores. {cheaper}"
    return f"{waits} {cheaper} Workers would take cores from the training itself on this CPU."


# --- in words -------------------------------------------------------------------------------------------------


def _filled(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """A table without the columns that have nothing in any row."""
    kept = [place for place in range(len(header)) if any(row[place] for row in rows)]
    return [header[place] for place in kept], [[row[place] for place in kept] for row in rows]


def _name(layer: Layer) -> str:
    return f"'{layer.name}' ({layer.kind})" if layer.name else f"{layer.kind} itself"


def _names(layers: Sequence[Layer]) -> str:
    return some(map(_name, layers), _NAMED)


def _finite(value: float | None) -> float | None:
    """As JSON has it."""
    return value if value is not None and math.isfinite(value) else None


def _magnitude(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(share: float) -> str:
    return "0%" if share == 0 else "< 0.1%" if share < 0.001 else f"{100 * share:.3g}%"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
