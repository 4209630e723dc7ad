"""How much memory the training of a recipe will take on each device, under each strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.arguments import SWITCH, WHOLE
from trainer.cli.arguments import COMPARED, UsageError
from trainer.cli.checks.findings import Recipe
from trainer.cli.settings import read_settings, setting
from trainer.cli.tune import SIZE, bytes_in
from trainer.machine import readable

if TYPE_CHECKING:
    import torch

    from trainer.callbacks.sync_detector import Wait

OVERHEAD = 2**30
"""Left for what no tensor of the training is in: CUDA's context, workspaces of its libraries, fragments."""

_ASSUMED_DEVICES = 8


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
    import torch

    from trainer.cli.checks.steps import undisturbed
    from trainer.engine.sharding.settings import IS_SUPPORTED

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
    if not IS_SUPPORTED:
        assumptions.append(f"FSDP needs torch 2.13 or newer; this is {torch.__version__}.")
    told = Prediction(memory, assumptions)
    with undisturbed(devices[0]):
        _measure(recipe, devices[0], number, told)
    recipe.peak = told.needs[0].peak
    return told


def _measure(recipe: Recipe, device: torch.device, number: int, told: Prediction) -> None:
    """Fill in what a step without values shows."""
    from trainer.callbacks import fast_settings, sync_detector
    from trainer.cli.build import make
    from trainer.cli.checks.fake_step import look, measure
    from trainer.cli.fused import fusing
    from trainer.cli.targets import Allowlist
    from trainer.engine.sharding.settings import IS_SUPPORTED
    from trainer.precision.registry import resolve_precision
    from trainer.record.flops import FlopCounter

    settings = recipe.settings
    assert recipe.loaded is not None
    batch = recipe.loaded.batch
    allowlist = Allowlist(settings["allowed_packages"], settings.get("ckpt"))
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
        if IS_SUPPORTED:
            told.needs.append(Need("fsdp", number, *measure(build, batch, precision, prepare, number), precision.name))
        for name in COMPARED:
            if name != precision.name:
                others = measure(build, batch, resolve_precision(name), checkpoint, None)
                told.others.append(Need("single", 1, *others, name))
    except UsageError:
        raise
    except Exception as error:
        raise UnpredictableError(
            f"The memory of this recipe cannot be predicted: {' '.join(str(error).split()).rstrip('.')}. Its"
            " training_step is run on tensors without values, so it may not depend on them (x[mask], mask.nonzero())"
            " or train by itself (manual optimization). `python -m trainer tune batch_size` measures instead."
            + "".join(f" It looks at them in {line}." for line in sync_detector.told(list(told.waits.values())))
        ) from error
    is_rehearsed = getattr(precision, "autocast_ops", "") == "cuda" or device.type != "cpu"
    told.ops = {} if is_rehearsed else ops
