"""How much memory the training of a recipe will take on each device, under each strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer.arguments import SWITCH, WHOLE
from trainer.callbacks import fast_settings, sync_detector
from trainer.callbacks.sync_detector import Wait
from trainer.cli.arguments import COMPARED_PRECISIONS, UsageError
from trainer.cli.build import make
from trainer.cli.checks.fake_step import look, measure
from trainer.cli.checks.findings import Findings, Recipe
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
"""Left for what no tensor of the training is in: CUDA's context, workspaces of its libraries, fragments."""

_ASSUMED_DEVICES = 8
_FITS = {True: "yes", False: "no", None: "-"}


@dataclass(frozen=True)
class Settings:
    """The settings ``checks.*``; conf/checks/default.yaml says what they mean."""

    gpu_memory: int | str | None = setting(None, SIZE, None)
    devices: int | None = setting(None, WHOLE.at_least(1), None)
    steps: bool = setting(True, *SWITCH)


class UnpredictableError(UsageError):
    """The memory cannot be told without a step on real numbers."""


class Need(NamedTuple):
    """What a strategy needs on each device, in bytes.

    Args:
        strategy: single, ddp or fsdp.
        devices: how many.
        peak: in a training step, the most at a time.
        after: behind the step: weights, gradients, and the optimizer's states.
        precision: in which; "" for the run's.
    """

    strategy: str
    devices: int
    peak: int
    after: int
    precision: str = ""


@dataclass
class Prediction:
    """What a recipe needs.

    Args:
        memory: of a device; None where nobody has said it.
        assumptions: what was taken for granted, as sentences.
        needs: of each strategy.
        others: what one device needs in other precisions than the run's.
        parameters: of the module, how many; and the bytes of all gradients.
        waits: lines that make the host wait for a GPU.
        ops: operations that CUDA's autocast computes in another dtype than the CPU's here, by name: the two dtypes.
        missed: settings that would make the run faster on a GPU, and what each is good for.
    """

    memory: int | None
    assumptions: list[str] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)
    others: list[Need] = field(default_factory=list)
    parameters: int = 0
    gradients: int = 0
    waits: dict[tuple[str, int, str], Wait] = field(default_factory=dict)
    ops: dict[str, tuple[str, str]] = field(default_factory=dict)
    missed: dict[str, str] = field(default_factory=dict)

    @property
    def fitting(self) -> list[Need]:
        """The strategies that fit, in the run's precision."""
        return [need for need in self.needs if self.fits(need)]

    def fits(self, need: Need) -> bool | None:
        """Whether that fits into a device; None where it is not known how much one has."""
        return None if self.memory is None else need.peak + OVERHEAD <= self.memory

    @property
    def verdict(self) -> str:
        """Which strategies fit."""
        if self.memory is None:
            return "To be told what fits, name the memory of a device: checks.gpu_memory=80GiB."
        size = f"{readable(self.memory)}, of which {readable(OVERHEAD)} are left to CUDA"
        if not self.fitting:
            return (
                f"Nothing fits into {size}. Try a smaller data.batch_size, callbacks=activation_checkpointing,"
                " precision=bf16-mixed, or more devices, such as checks.devices=64."
            )
        names = {"single": "one device", "ddp": "trainer=ddp", "fsdp": "trainer=fsdp"}
        return f"{', '.join(names[need.strategy] for need in self.fitting)}: fits into {size}."


def read(recipe: Recipe) -> Settings:
    """The settings of ``checks``.

    Raises:
        UsageError: one that does not exist, or makes no sense.
    """
    return read_settings(Settings, "checks", recipe.settings["checks"])


def check_memory(found: Findings, recipe: Recipe) -> None:
    """Predict the memory that the training of a recipe takes on each device, and which strategy fits."""
    try:
        prediction = predict(recipe, found.devices)
    except UnpredictableError as error:  # the other checks still run
        recipe.failure = error
        return
    needs, others = ([one._asdict() | {"fits": prediction.fits(one)} for one in kind] for kind in (
        prediction.needs, prediction.others
    ))  # fmt: skip
    waits = list(prediction.waits.values())
    found.facts |= {
        "memory_of_recipe": {
            "parameters": prediction.parameters, "gpu_memory": prediction.memory, "needs": needs, "others": others,
        },
        "verdict": prediction.verdict,
        "missed": prediction.missed,
        "host_waits": [vars(wait) | {"instead": wait.instead} for wait in waits],
        "autocast_ops": prediction.ops,
    }  # fmt: skip
    found.facts["remarks"] += prediction.assumptions
    if prediction.missed:
        settings = "; ".join(f"{name} ({gain})" for name, gain in prediction.missed.items())
        found.remark(f"Left on the table on a GPU: {settings}. tuning=fast turns on what is safe.")
    if prediction.ops:
        found.remark("precision.autocast_ops=cuda computes those operations here as on CUDA.")
    one, *spread = prediction.needs
    rows = [
        [need.strategy, str(need.devices), need.precision, readable(need.peak), readable(need.after), fits]
        for need in (one, *prediction.others, *spread)
        for fits in [_FITS[prediction.fits(need)]]
    ]
    header = ("strategy", "devices", "precision", "peak of a step", "after it", "fits")
    title = f"Memory on each device, for {prediction.parameters:,} parameters and this batch"
    lines = [[f"{Path(wait.file).name}:{wait.line}", wait.code, wait.instead] for wait in waits]
    ops = [[name, *dtypes] for name, dtypes in prediction.ops.items()]
    found.tables += [
        Table(title, header, rows, ("strategy", "precision", "fits")),
        Table("Lines that make the host wait for a GPU in each step", ("line", "code", "instead"), lines),
        Table("Operations that autocast computes in another dtype on CUDA", ("operation", "here", "on CUDA"), ops),
    ]


def predict(recipe: Recipe, devices: list[torch.device]) -> Prediction:
    """Predict what the training of a recipe needs.

    Args:
        recipe: with its batch. Takes note of the peak on one device, and of the operations of a forward pass.
        devices: of this machine; the first is the one that ``accelerator=auto`` takes.

    Raises:
        UsageError: a config that cannot be built, or a setting of ``checks`` that makes no sense.
        UnpredictableError: a recipe whose step cannot be run without values.
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
        assumptions.append(f"There are {number} devices, unless checks.devices says another number.")
    assumptions.append(
        "The batch is the first of the training data, and all of it as on a GPU. DDP keeps a copy of the gradients for"
        " its exchange; FSDP shards the members of ModuleLists and Sequentials."
    )
    if not sharding.IS_SUPPORTED:
        assumptions.append(f"FSDP needs torch 2.13 or newer; this is {torch.__version__}.")
    told = Prediction(memory, assumptions)
    with undisturbed(devices[0]):
        _measure(recipe, devices[0], number, told)
    recipe.peak = told.needs[0].peak
    return told


def _measure(recipe: Recipe, device: torch.device, number: int, told: Prediction) -> None:
    """Fill in what a step without values shows."""
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
        told.parameters = sum(parameter.numel() for parameter in parameters)
        told.gradients = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
        ours = [n for _, n in nodes if n and str(n.get("_target_", "")).endswith(".FastSettings")]
        chosen = make(ours[0], "callbacks", allowlist) if ours else None
        told.missed = dict(fast_settings.missed(module, chosen, precision=precision.name))
        if settings["trainer"].get("benchmark") or settings["trainer"].get("deterministic"):
            told.missed.pop("cudnn.benchmark", None)
        checkpoint(module)

    fuse = fusing(trainer_class, "cpu")  # where the tensors without values say they are
    build: Callable[[], Any] = partial(make, settings["model"], "model", allowlist, fuse)
    try:
        with FlopCounter() as counter:
            ops = look(build, batch, precision, told.waits)
        recipe.operations = counter.total
        peak, after = measure(build, batch, precision, prepare, None)
        told.needs.append(Need("single", 1, peak, after, precision.name))
        told.needs.append(Need("ddp", number, peak + told.gradients, after + told.gradients, precision.name))
        if sharding.IS_SUPPORTED:
            told.needs.append(Need("fsdp", number, *measure(build, batch, precision, prepare, number), precision.name))
        for name in COMPARED_PRECISIONS:
            if name != precision.name:
                others = measure(build, batch, resolve_precision(name), checkpoint, None)
                told.others.append(Need("single", 1, *others, name))
    except UsageError:
        raise
    except Exception as error:
        raise UnpredictableError(
            f"The memory of this recipe cannot be predicted: {' '.join(str(error).split()).rstrip('.')}. Its"
            " training_step is run on tensors without values, so it may not depend on them (x[mask], mask.nonzero())"
            f" or train by itself (manual optimization). `{command_line('tune', 'batch_size', *recipe.words)}`"
            " measures instead."
            + "".join(f" It looks at them in {line}." for line in sync_detector.format_waits(list(told.waits.values())))
        ) from error
    is_rehearsed = getattr(precision, "autocast_ops", "") == "cuda" or device.type != "cpu"
    told.ops = {} if is_rehearsed else ops
