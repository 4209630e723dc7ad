"""Predict the memory of a recipe's training on each device, for each strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from trainer.arguments import SWITCH, WHOLE
from trainer.callbacks import fast_settings
from trainer.cli.build import make
from trainer.cli.checks import Findings, Recipe
from trainer.cli.checks.fake_step import Memory, look, measure
from trainer.cli.checks.steps import undisturbed
from trainer.cli.fused import fusing
from trainer.cli.parsing import COMPARED_PRECISIONS, UsageError
from trainer.cli.schema import setting
from trainer.cli.targets import Allowlist
from trainer.cli.tune import SIZE, bytes_in
from trainer.common.machine import readable
from trainer.common.terminal import command_line
from trainer.diagnosis.sync_detector import Synchronization, format_synchronizations
from trainer.distributed.sharding import settings as sharding
from trainer.precision.registry import resolve_precision
from trainer.record.flops import FlopCounter

OVERHEAD = 2**30
"""Bytes reserved for memory outside of tensors: CUDA's context, workspaces of its libraries, fragmentation."""

_ASSUMED_DEVICES = 8
_LINES: dict[str, Callable[[Any], str]] = {
    "line": lambda line: f"{Path(line['file']).name}:{line['line']}",
    "code": itemgetter("code"),
    "instead": itemgetter("instead"),
}
_STRATEGIES = {"single": "one device", "ddp": "trainer=ddp", "fsdp": "trainer=fsdp"}
_COLUMNS: dict[str, Callable[[Any], str]] = {
    "strategy": itemgetter("strategy"),
    "devices": lambda need: str(need["devices"]),
    "precision": itemgetter("precision"),
    "peak of a step": lambda need: readable(need["peak"]),
    "after it": lambda need: readable(need["after"]),
    "fits": lambda need: {True: "yes", False: "no", None: "-"}[need["fits"]],
}


@dataclass(frozen=True)
class Settings:
    """The settings ``checks.*``. conf/checks/default.yaml describes them."""

    gpu_memory: int | str | None = setting(None, SIZE, None)
    devices: int | None = setting(None, WHOLE.at_least(1), None)
    steps: bool = setting(True, *SWITCH)


def check_memory(findings: Findings, recipe: Recipe, settings: Settings) -> None:
    """Predict the memory that the training of a recipe takes on each device, and which strategy fits.

    Sets ``recipe.peak`` and ``recipe.operations``. The other checks still run if the step cannot run on fake tensors.

    Raises:
        UsageError: if the config cannot be built.
    """
    gpus = [device for device in findings.devices if device.type == "cuda"]
    memory = bytes_in(settings.gpu_memory)
    if memory is None and gpus:
        memory = torch.cuda.get_device_properties(gpus[0]).total_memory
    number = settings.devices or (len(gpus) if len(gpus) > 1 else _ASSUMED_DEVICES)
    if settings.devices is None and len(gpus) < 2:
        findings.remark(f"DDP and FSDP use {number} devices. Set checks.devices for another number.")
    if not sharding.IS_SUPPORTED:
        findings.remark(f"FSDP needs torch 2.13 or newer; this is {torch.__version__}.")
    reads: dict[tuple[str, int, str], Synchronization] = {}
    try:
        with undisturbed(findings.devices[0]):
            parameters, needs = _measure(findings, recipe, number, reads)
    except UsageError:
        raise
    except Exception as error:
        places = "".join(f" It reads values in {line}." for line in format_synchronizations(reads.values()))
        findings.problem(
            f"The memory of this recipe cannot be predicted: {' '.join(str(error).split()).rstrip('.')}. On tensors"
            " without values, a step must not depend on values (x[mask], mask.nonzero()) or use manual optimization."
            f" `{command_line('tune', 'batch_size', *recipe.words)}` measures the memory instead.{places}"
        )
        return
    findings.remark("The memory is predicted for a step with the first training batch on a GPU.")
    for need in needs:
        need["fits"] = None if memory is None else need["peak"] + OVERHEAD <= memory
    recipe.peak = needs[0]["peak"]
    findings.facts["verdict"] = verdict(memory, [need for need in needs if need["precision"] == needs[0]["precision"]])
    findings.add("memory", f"Memory on each device, for {parameters:,} parameters and this batch", _COLUMNS, needs)
    lines = [vars(line) | {"instead": line.instead} for line in reads.values()]
    findings.add("synchronizations", "Host-device synchronizations in each step on a GPU", _LINES, lines)


def verdict(memory: int | None, needs: list[dict[str, Any]]) -> str:
    """Return a sentence about the strategies that fit into ``memory``, in bytes; None if it is unknown."""
    if memory is None:
        return "To check which strategies fit, set the memory of a device: checks.gpu_memory=80GiB."
    size = f"{readable(memory)} (with {readable(OVERHEAD)} reserved for CUDA)"
    if fitting := ", ".join(_STRATEGIES[need["strategy"]] for need in needs if need["fits"]):
        return f"Fits into {size}: {fitting}."
    smaller = "data.batch_size, callbacks=activation_checkpointing, precision=bf16-mixed, or checks.devices=64"
    return f"No strategy fits into {size}. Try a smaller {smaller}."


def _measure(
    findings: Findings, recipe: Recipe, number: int, reads: dict[tuple[str, int, str], Synchronization]
) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of parameters, and the memory of each strategy on each device, from a step on fake tensors.

    Add operations with another dtype on CUDA and settings that would make the run faster to ``findings``, and lines
    that synchronize to ``reads``.
    """
    settings, device = recipe.settings, findings.devices[0]
    assert recipe.loaded is not None
    batch = recipe.loaded.batch
    allowlist = Allowlist.of(settings)
    precision = make(settings["precision"], "precision", allowlist).for_device(device)
    nodes = (settings["callbacks"] or {}).items()
    modules = []

    def callbacks(name: str) -> list[Any]:
        chosen = [(key, node) for key, node in nodes if node and str(node.get("_target_", "")).endswith(f".{name}")]
        return [make(node, f"callbacks.{key}", allowlist) for key, node in chosen]

    def prepare(module: Any) -> None:
        modules.append(module)
        for checkpointing in callbacks("ActivationCheckpointing"):
            checkpointing.on_fit_start(None, module)
            checkpointing.on_train_start(None, module)

    fuse = fusing(allowlist.locate(settings["trainer"]["_target_"], "trainer"), "cpu")  # the device of the fake tensors
    build: Callable[[], Any] = partial(make, settings["model"], "model", allowlist, fuse)
    with FlopCounter() as counter:
        ops = look(build, batch, precision, reads)
    recipe.operations = counter.total
    single = measure(build, batch, precision, prepare, None)
    parameters = list(modules[0].parameters())
    gradients = sum(weight.numel() * weight.element_size() for weight in parameters if weight.requires_grad)
    sizes = [("single", 1, precision.name, single)]
    for name in COMPARED_PRECISIONS:
        if name != precision.name:
            sizes.append(("single", 1, name, measure(build, batch, resolve_precision(name), prepare, None)))
    sizes.append(("ddp", number, precision.name, Memory(single.peak + gradients, single.after + gradients)))
    if sharding.IS_SUPPORTED:
        sizes.append(("fsdp", number, precision.name, measure(build, batch, precision, prepare, number)))
    chosen = next(iter(callbacks("FastSettings")), None)
    missed = dict(fast_settings.missing_settings(modules[0], chosen, precision=precision.name))
    if settings["trainer"].get("benchmark") or settings["trainer"].get("deterministic"):
        missed.pop("cudnn.benchmark", None)
    findings.facts["missed"] = missed
    if missed:
        gains = "; ".join(f"{name} ({gain})" for name, gain in missed.items())
        findings.remark(f"Faster settings on a GPU: {gains}. tuning=fast enables the safe ones.")
    if device.type == "cpu" and getattr(precision, "autocast_ops", "") != "cuda":
        rows = [{"operation": name, "here": here, "on CUDA": cuda} for name, (here, cuda) in ops.items()]
        columns = {name: itemgetter(name) for name in ("operation", "here", "on CUDA")}
        findings.add("autocast_ops", "Operations that autocast runs in another dtype on CUDA", columns, rows)
        if rows:
            findings.remark("precision.autocast_ops=cuda runs all operations in the dtypes of CUDA autocast here.")
    return sum(weight.numel() for weight in parameters), [
        {"strategy": strategy, "devices": devices, "precision": name, **size._asdict()}
        for strategy, devices, name, size in sizes
    ]
