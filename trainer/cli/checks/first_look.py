"""Check a recipe: a batch of its data, its layers in float32 and float16, and the bottleneck of training."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import torch

from trainer.cli import failure
from trainer.cli.checks import Findings, LoadedBatch, Recipe, batch, memory, steps
from trainer.cli.checks.steps import LARGEST, SCALE, Layer, Layers, largest_scale
from trainer.cli.schema import read_settings
from trainer.common import machine
from trainer.common.machine import readable
from trainer.common.terminal import command_line
from trainer.errors import join_first

_PICTURES = Path("outputs", "checks")
_ROWS = 8  # largest number of rows in the table of layers
_MAX_LAYERS = 3  # largest number of layers in a sentence
_NEGLIGIBLE_SHARE = 0.05  # a smaller share of time spent waiting for data is negligible


def check_recipe(findings: Findings, recipe: Recipe) -> None:
    """Check a batch of the training data, the memory of a step, and some steps."""
    settings = read_settings(memory.Settings, "checks", recipe.settings["checks"])  # raises before anything is run
    with steps.undisturbed(findings.devices[0]):
        loaded = recipe.loaded = batch.draw(recipe)
    entries = [entry._asdict() for entry in batch.describe(loaded.batch)]
    picture = _PICTURES / f"{recipe.name.replace('/', '_')}.png"
    title = "A batch of the training data"
    try:
        if batch.save_images(loaded.batch, picture):
            title += f"; its images: {picture}"
    except OSError as error:
        findings.remark(f"The images of the batch were not written to {picture}: {error.strerror or error}.")
    findings.add("batch", title, {name.replace("_", " "): itemgetter(name) for name in batch.Entry._fields}, entries)
    findings.facts["remarks"] += batch.suspicious(loaded.batch)
    memory.check_memory(findings, recipe, settings)
    check_steps(findings, recipe, settings.steps)


def check_steps(findings: Findings, recipe: Recipe, is_enabled: bool) -> None:
    """Measure the layers in one step, predict their values in float16, and compare the times of loading and a step."""
    device = findings.devices[-1 if recipe.settings["trainer"]["accelerator"] == "cpu" else 0]
    samples, reason = None, "No step was run: checks.steps=false."
    if is_enabled:
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else machine.memory().usable
        samples, reason = steps.part_for(recipe, device, free or 2**63)
    if reason:
        findings.remark(reason)
    step = None
    if samples is not None:
        seen = Layers(samples)
        try:
            with steps.undisturbed(device):
                # in float32, because float16 could overflow
                steps.fit(recipe, samples, seen, precision={"_target_": "trainer.precision.FullPrecision"})
                if not seen.labels:
                    step = steps.time_step(findings, recipe, samples)
        except Exception as error:
            message = failure.printable(failure.one_line(error))
            raised = f" Raised in {place}" if (place := failure.user_line(error)) else ""
            findings.problem(f"A training step on this batch fails: {type(error).__name__}: {message}{raised}")
        else:
            _report_layers(findings, seen)
    _report_loading(findings, recipe, step)


_COLUMNS: dict[str, Callable[[Any], str]] = {
    "layer": lambda layer: layer["name"] or "(the module itself)",
    "class": lambda layer: layer["kind"],
    "parameters": lambda layer: f"{layer['parameters']:,}" if layer["parameters"] else "-",
    "activations": lambda layer: readable(layer["outputs"]) if layer["outputs"] else "-",
    "largest": lambda layer: _number(layer["activation"] if layer["outputs"] else None),
    "gradient": lambda layer: _number(layer["gradient"]),
    "vanish": lambda layer: _percent(layer["share"]) if layer["nonzero"] else "-",
}


def _report_layers(findings: Findings, seen: Layers) -> None:
    if seen.labels:
        findings.problem(seen.labels)
        return
    largest = sorted(seen.layers, key=lambda layer: (layer.largest, layer.share), reverse=True)[:_ROWS]
    loss = "" if seen.loss is None else f", loss {seen.loss:.4g}"
    parameters = f"{seen.parameters:,} parameters, {seen.trained:,} trained{loss}"
    title = f"{len(largest)} of {len(seen.layers)} layers, in float32: {parameters}"
    rows = {layer.name: vars(layer) | {"share": layer.share} for layer in seen.layers}
    findings.add("layers", title, _COLUMNS, [rows[layer.name] for layer in seen.layers if layer in largest])
    findings.facts |= {"layers": list(rows.values()), "loss": seen.loss}
    if seen.loss is not None and not math.isfinite(seen.loss):
        findings.facts["loss"] = None  # JSON has no NaN
        findings.problem(f"The loss of this batch is {seen.loss} in float32 with the initial weights.")
    if broken := [layer for layer in seen.layers if layer.not_finite]:
        findings.problem(f"In float32, values are not finite in {join_first(map(_name, broken), _MAX_LAYERS)}.")
    elif seen.layers:
        findings.remark(describe_float16(seen.layers))
    if seen.without_gradient:
        names = join_first(seen.without_gradient, _MAX_LAYERS)
        findings.remark(f"{len(seen.without_gradient)} parameters that require gradients get none: {names}.")


def describe_float16(layers: list[Layer]) -> str:
    """Return a prediction about these layers in float16."""
    high, steep = max(layers, key=attrgetter("activation")), max(layers, key=lambda layer: layer.gradient or 0.0)
    by_size = sorted(layers, key=attrgetter("largest"), reverse=True)
    overflowing = [layer for layer in by_size if layer.largest > LARGEST]
    scale = largest_scale(layers)
    nonzero = sum(layer.nonzero for layer in layers) or 1
    lost = sum(layer.vanishing for layer in layers) / nonzero
    lost_scaled = sum(layer.vanishing_scaled for layer in layers) / nonzero
    gradient = f" and the largest gradient {_number(steep.gradient)} in {_name(steep)}" if steep.gradient else ""
    text = (
        f"This batch fits into float16 (largest number {LARGEST:,.0f}): the largest activation is"
        f" {_number(high.activation)} in {_name(high)}{gradient}."
    )
    if overflowing:
        names = ",".join(layer.name for layer in overflowing[:_MAX_LAYERS] if layer.name)
        modules = f"precision.fp32_modules=[{names}] to run these in float32, or " if names else ""
        text = (
            f"float16 overflows in {join_first(map(_name, overflowing), _MAX_LAYERS)}: its largest number is"
            f" {LARGEST:,.0f}, and values reach {_number(overflowing[0].largest)}. Use {modules}bf16-mixed, which has"
            " float32's range."
        )
    if lost:
        worst = max(layers, key=attrgetter("share"))
        text += (
            f" Without a loss scale, {_percent(lost)} of the gradients underflow (below 6e-8;"
            f" {_percent(worst.share)} in {_name(worst)}); with a scale of {SCALE:,.0f}, {_percent(lost_scaled)}."
        )
    if scale is not None and scale < SCALE:
        start = f"With 16-mixed's initial loss scale of {SCALE:,.0f}, gradients overflow"
        text += f" {start}: steps are skipped until the scale is about {scale:,.4g}."
    return f"{text} This was measured on one batch with the initial weights."


def _report_loading(findings: Findings, recipe: Recipe, step: dict[str, Any] | None) -> None:
    loaded, rows = recipe.loaded, [] if step is None else [step]
    assert loaded is not None
    if loaded.seconds is not None:
        workers = "" if loaded.workers is None else f"num_workers={loaded.workers}, "
        about = f"{workers}mean of {loaded.timed}; the first took {_time(loaded.first)}"
        rows.insert(0, {"measured": "loading a batch", "seconds": loaded.seconds, "about": about})
    columns: dict[str, Callable[[Any], str]] = {
        "measured": itemgetter("measured"),
        "time": lambda row: _time(row["seconds"]),
        "about": itemgetter("about"),
    }
    findings.add("loading", "Measured time of loading and of a training step", columns, rows)
    if step is not None and loaded.seconds is not None:
        gpus = sum(device.type == "cuda" for device in findings.devices)
        findings.remark(bottleneck(recipe, loaded, step["seconds"], gpus))


def bottleneck(recipe: Recipe, loaded: LoadedBatch, step: float, gpus: int) -> str:
    """Return a sentence that names the bottleneck, loading or the step (in seconds), with advice."""
    assert loaded.seconds is not None
    overlaps = bool(loaded.workers)  # workers load during a step
    waited = max(0.0, loaded.seconds - step) if overlaps else loaded.seconds
    share = waited / max(waited + step, 1e-9)
    if share < _NEGLIGIBLE_SHARE:
        return (
            f"The training step is the bottleneck: training waits for data {_percent(share)} of the time, so more"
            f" workers do not help. `{command_line('tune', 'batch_size', *recipe.words)}` finds the largest batch."
        )
    limit = "The dataloader is the bottleneck: training" if waited > step else "Training"
    waits = f"{limit} waits for data {_percent(share)} of the time."
    if not overlaps and (workers := machine.suggested_workers(machine.cores().usable, gpus)):
        plus = "" if "num_workers" in (recipe.settings["data"] or {}) else "+"
        return f"{waits} Try {plus}data.num_workers={workers}: workers load batches during a step."
    cheaper = "decode and resize the data in advance, use smaller files, or transform whole batches"
    return f"{waits} More workers help only if there are free cores. Make samples cheaper: {cheaper}."


def _name(layer: Layer) -> str:
    return f"'{layer.name}' ({layer.kind})" if layer.name else f"{layer.kind} itself"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(share: float) -> str:
    return "0%" if share == 0 else "< 0.1%" if share < 0.001 else f"{100 * share:.3g}%"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
