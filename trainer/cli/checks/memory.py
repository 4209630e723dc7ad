"""Predict the memory of a recipe's training on each device, for each strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer.arguments import SWITCH, WHOLE
from trainer.callbacks import fast_settings, sync_detector
from trainer.callbacks.sync_detector import Synchronization
from trainer.cli.arguments import COMPARED_PRECISIONS, UsageError
from trainer.cli.build import make
from trainer.cli.checks import Findings, Recipe
from trainer.cli.checks.fake_step import look, measure
from trainer.cli.checks.steps import undisturbed
from trainer.cli.fused import fusing
from trainer.cli.schema import read_settings, setting
from trainer.cli.targets import Allowlist
from trainer.cli.tune import SIZE, bytes_in
from trainer.engine.sharding import settings as sharding
from trainer.machine import readable
from trainer.precision.registry import resolve_precision
from trainer.record.flops import FlopCounter
from trainer.terminal import Table, command_line

OVERHEAD = 2**30
"""Bytes reserved for memory outside of tensors: CUDA's context, workspaces of its libraries, fragmentation."""

_ASSUMED_DEVICES = 8
_FITS = {True: "yes", False: "no", None: "-"}


@dataclass(frozen=True)
class Settings:
    """The settings ``checks.*``. conf/checks/default.yaml describes them."""

    gpu_memory: int | str | None = setting(None, SIZE, None)
    devices: int | None = setting(None, WHOLE.at_least(1), None)
    steps: bool = setting(True, *SWITCH)


class UnpredictableError(UsageError):
    """The memory cannot be predicted, because the training step depends on values."""


class Need(NamedTuple):
    """The memory that a strategy needs on each device, in bytes.

    Args:
        strategy: single, ddp or fsdp.
        devices: number of devices.
        peak: peak memory in a training step.
        after: memory after the step: weights, gradients and optimizer states.
        precision: name of the precision.
    """

    strategy: str
    devices: int
    peak: int
    after: int
    precision: str = ""


@dataclass
class Prediction:
    """The predicted needs of a recipe.

    Args:
        memory: bytes of a device; None if they are unknown.
        assumptions: sentences about assumptions.
        needs: needs of each strategy.
        others: needs of one device in precisions other than that of the run.
        parameters: number of parameter elements of the module.
        gradients: size of all gradients in bytes.
        synchronizations: lines that synchronize host and GPU.
        ops: by operation, its dtypes under CPU autocast and CUDA autocast, if they differ.
        missed: settings that would make the run faster on a GPU, with their effect.
    """

    memory: int | None
    assumptions: list[str] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)
    others: list[Need] = field(default_factory=list)
    parameters: int = 0
    gradients: int = 0
    synchronizations: dict[tuple[str, int, str], Synchronization] = field(default_factory=dict)
    ops: dict[str, tuple[str, str]] = field(default_factory=dict)
    missed: dict[str, str] = field(default_factory=dict)

    @property
    def fitting(self) -> list[Need]:
        """Return the strategies that fit in the precision of the run."""
        return [need for need in self.needs if self.fits(need)]

    def fits(self, need: Need) -> bool | None:
        """Return whether ``need`` fits into the memory of a device; None if that is unknown."""
        return None if self.memory is None else need.peak + OVERHEAD <= self.memory

    @property
    def verdict(self) -> str:
        """Return a sentence about the strategies that fit."""
        if self.memory is None:
            return "To check which strategies fit, set the memory of a device: checks.gpu_memory=80GiB."
        size = f"{readable(self.memory)} (with {readable(OVERHEAD)} reserved for CUDA)"
        if not self.fitting:
            return (
                f"No strategy fits into {size}. Try a smaller data.batch_size, callbacks=activation_checkpointing,"
                " precision=bf16-mixed, or more devices, such as checks.devices=64."
            )
        names = {"single": "one device", "ddp": "trainer=ddp", "fsdp": "trainer=fsdp"}
        return f"Fits into {size}: {', '.join(names[need.strategy] for need in self.fitting)}."


def read(recipe: Recipe) -> Settings:
    """Return the settings of ``checks``.

    Raises:
        UsageError: if a setting does not exist or is invalid.
    """
    return read_settings(Settings, "checks", recipe.settings["checks"])


def check_memory(found: Findings, recipe: Recipe) -> None:
    """Predict the memory that the training of a recipe takes on each device, and which strategy fits."""
    try:
        prediction = predict(recipe, found.devices)
    except UnpredictableError as error:  # the other checks still run
        found.problem(str(error))
        return
    needs, others = ([one._asdict() | {"fits": prediction.fits(one)} for one in kind] for kind in (
        prediction.needs, prediction.others
    ))  # fmt: skip
    lines = list(prediction.synchronizations.values())
    found.facts |= {
        "memory_of_recipe": {
            "parameters": prediction.parameters, "gpu_memory": prediction.memory, "needs": needs, "others": others,
        },
        "verdict": prediction.verdict,
        "missed": prediction.missed,
        "synchronizations": [vars(line) | {"instead": line.instead} for line in lines],
        "autocast_ops": prediction.ops,
    }  # fmt: skip
    found.facts["remarks"] += prediction.assumptions
    if prediction.missed:
        settings = "; ".join(f"{name} ({gain})" for name, gain in prediction.missed.items())
        found.remark(f"Faster settings on a GPU: {settings}. tuning=fast enables the safe ones.")
    if prediction.ops:
        found.remark("precision.autocast_ops=cuda runs all operations in the dtypes of CUDA autocast here.")
    one, *spread = prediction.needs
    rows = [
        [need.strategy, str(need.devices), need.precision, readable(need.peak), readable(need.after), fits]
        for need in (one, *prediction.others, *spread)
        for fits in [_FITS[prediction.fits(need)]]
    ]
    header = ("strategy", "devices", "precision", "peak of a step", "after it", "fits")
    title = f"Memory on each device, for {prediction.parameters:,} parameters and this batch"
    rows_of_lines = [[f"{Path(one.file).name}:{one.line}", one.code, one.instead] for one in lines]
    ops = [[name, *dtypes] for name, dtypes in prediction.ops.items()]
    found.tables += [
        Table(title, header, rows),
        Table("Host-device synchronizations in each step on a GPU", ("line", "code", "instead"), rows_of_lines),
        Table("Operations that autocast runs in another dtype on CUDA", ("operation", "here", "on CUDA"), ops),
    ]


def predict(recipe: Recipe, devices: list[torch.device]) -> Prediction:
    """Predict the memory of a recipe's training. Sets ``recipe.peak`` and ``recipe.operations``.

    Args:
        recipe: the recipe with its batch.
        devices: devices of this machine. The first is the choice of ``accelerator=auto``.

    Raises:
        UsageError: if the config cannot be built, or a setting of ``checks`` is invalid.
        UnpredictableError: if the step of the recipe cannot run on fake tensors.
    """
    settings = read(recipe)
    gpus = [device for device in devices if device.type == "cuda"]
    memory = bytes_in(settings.gpu_memory)
    assumptions = []
    if memory is not None:
        assumptions.append(f"A device has {readable(memory)} (checks.gpu_memory).")
    elif gpus:
        memory = torch.cuda.get_device_properties(gpus[0]).total_memory
    number = settings.devices or (len(gpus) if len(gpus) > 1 else _ASSUMED_DEVICES)
    if settings.devices is None and len(gpus) < 2:
        assumptions.append(f"DDP and FSDP use {number} devices. Set checks.devices for another number.")
    assumptions.append(
        "The memory is predicted for a step with the first training batch on a GPU. DDP keeps a copy of the"
        " gradients in its buckets; FSDP shards the members of ModuleLists and Sequentials."
    )
    if not sharding.IS_SUPPORTED:
        assumptions.append(f"FSDP needs torch 2.13 or newer; this is {torch.__version__}.")
    prediction = Prediction(memory, assumptions)
    with undisturbed(devices[0]):
        _measure(recipe, devices[0], number, prediction)
    recipe.peak = prediction.needs[0].peak
    return prediction


def _measure(recipe: Recipe, device: torch.device, number: int, prediction: Prediction) -> None:
    """Fill in ``prediction`` from a step on fake tensors."""
    settings = recipe.settings
    assert recipe.loaded is not None
    batch = recipe.loaded.batch
    allowlist = Allowlist.of(settings)
    trainer_class = allowlist.locate(settings["trainer"]["_target_"], "trainer")
    precision = make(settings["precision"], "precision", allowlist).for_device(device)
    nodes = (settings["callbacks"] or {}).items()

    def checkpoint(module: Any) -> None:
        for name, node in nodes:
            if node and str(node.get("_target_", "")).endswith(".ActivationCheckpointing"):
                checkpointing = make(node, f"callbacks.{name}", allowlist)
                checkpointing.on_fit_start(None, module)
                checkpointing.on_train_start(None, module)

    def prepare(module: Any) -> None:
        parameters = list(module.parameters())
        prediction.parameters = sum(parameter.numel() for parameter in parameters)
        prediction.gradients = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
        found = [n for _, n in nodes if n and str(n.get("_target_", "")).endswith(".FastSettings")]
        chosen = make(found[0], "callbacks", allowlist) if found else None
        prediction.missed = dict(fast_settings.missing_settings(module, chosen, precision=precision.name))
        if settings["trainer"].get("benchmark") or settings["trainer"].get("deterministic"):
            prediction.missed.pop("cudnn.benchmark", None)
        checkpoint(module)

    fuse = fusing(trainer_class, "cpu")  # the device of the fake tensors
    build: Callable[[], Any] = partial(make, settings["model"], "model", allowlist, fuse)
    try:
        with FlopCounter() as counter:
            ops = look(build, batch, precision, prediction.synchronizations)
        recipe.operations = counter.total
        single = measure(build, batch, precision, prepare, None)
        ddp = single.peak + prediction.gradients, single.after + prediction.gradients
        prediction.needs += [Need("single", 1, *single, precision.name), Need("ddp", number, *ddp, precision.name)]
        if sharding.IS_SUPPORTED:
            fsdp = measure(build, batch, precision, prepare, number)
            prediction.needs.append(Need("fsdp", number, *fsdp, precision.name))
        for name in COMPARED_PRECISIONS:
            if name != precision.name:
                others = measure(build, batch, resolve_precision(name), checkpoint, None)
                prediction.others.append(Need("single", 1, *others, name))
    except UsageError:
        raise
    except Exception as error:
        raise UnpredictableError(
            f"The memory of this recipe cannot be predicted: {' '.join(str(error).split()).rstrip('.')}. The prediction"
            " runs training_step on fake tensors, so the step must not depend on values (x[mask], mask.nonzero()) or"
            f" use manual optimization. `{command_line('tune', 'batch_size', *recipe.words)}` measures the memory"
            " instead."
            + "".join(
                f" It reads values in {line}."
                for line in sync_detector.format_synchronizations(prediction.synchronizations.values())
            )
        ) from error
    is_rehearsed = getattr(precision, "autocast_ops", "") == "cuda" or device.type != "cpu"
    prediction.ops = {} if is_rehearsed else ops
