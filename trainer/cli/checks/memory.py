"""How much memory the training of a recipe will take on each device, under each strategy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.arguments import WHOLE
from trainer.cli.arguments import Arguments, UsageError
from trainer.cli.settings import read_settings
from trainer.cli.tune import SIZE, bytes_in, plain
from trainer.machine import readable

if TYPE_CHECKING:
    import torch

    from trainer.callbacks.sync_detector import Wait
    from trainer.cli.checks.fake_step import Memory

OVERHEAD = 2**30
"""Left for what no tensor of the training is in: CUDA's context, workspaces of its libraries, fragments."""

_ASSUMED_DEVICES = 8
_ACCEPTS: dict[str, tuple[Any, ...]] = {"gpu_memory": (SIZE, None), "devices": (WHOLE.at_least(1), None)}


@dataclass(frozen=True)
class Settings:
    """The settings ``checks.*``; conf/checks/default.yaml says what they mean."""

    gpu_memory: int | str | None = None
    devices: int | None = None


class Need(NamedTuple):
    """What a strategy needs on each device, in bytes.

    Args:
        strategy: single, ddp or fsdp.
        devices: how many.
        peak: in a training step, the most at a time.
        after: behind the step: weights, gradients, and the optimizer's states.
    """

    strategy: str
    devices: int
    peak: int
    after: int


@dataclass(frozen=True)
class Prediction:
    """What a recipe needs.

    Args:
        needs: of each strategy.
        parameters: of the module.
        memory: of a device; None where nobody has said it.
        assumptions: what was taken for granted, as sentences.
        waits: lines that make the host wait for a GPU.
        missed: settings that would make the run faster on a GPU, and what each is good for.
        ops: operations that CUDA's autocast computes in another dtype than the CPU's here, by name: the two dtypes.
    """

    needs: list[Need]
    parameters: int
    memory: int | None
    assumptions: list[str]
    waits: list[Wait] = field(default_factory=list)
    ops: dict[str, tuple[str, str]] = field(default_factory=dict)
    missed: dict[str, str] = field(default_factory=dict)

    @property
    def fitting(self) -> list[Need]:
        """Those that fit."""
        return [need for need in self.needs if self.memory is not None and need.peak + OVERHEAD <= self.memory]

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


def predict(arguments: Arguments, devices: list[torch.device]) -> Prediction:
    """Predict what the training of a config needs.

    Args:
        arguments: the command line.
        devices: of this machine; the first is the one that ``accelerator=auto`` takes.

    Raises:
        UsageError: what ``fit`` would refuse, a setting of ``checks`` that makes no sense, or a recipe whose step
            cannot be run without values.
    """
    from omegaconf import OmegaConf

    from trainer.cli.validate import validate

    config = validate(arguments)
    node: Any = OmegaConf.to_container(config.checks, resolve=True)
    settings = read_settings(Settings, "checks", node, _ACCEPTS)
    resolved = plain(config, Path("outputs"))
    import torch

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
    waits: dict[tuple[str, int, str], Wait] = {}
    missed: dict[str, str] = {}
    with _quiet():
        single, sharded, gradients, parameters, ops = _measure(resolved, devices[0], number, waits, missed)
    needs = [
        Need("single", 1, single.peak, single.after),
        Need("ddp", number, single.peak + gradients, single.after + gradients),
        Need("fsdp", number, sharded.peak, sharded.after),
    ]
    return Prediction(needs, parameters, memory, assumptions, list(waits.values()), ops, missed)


def _measure(
    settings: dict[str, Any],
    device: torch.device,
    number: int,
    waits: dict[tuple[str, int, str], Wait],
    missed: dict[str, str],
) -> tuple[Memory, Memory, int, int, dict[str, tuple[str, str]]]:
    """On one device; sharded; the bytes of all gradients; the number of parameters; operations that differ on CUDA."""
    from trainer.callbacks import fast_settings
    from trainer.callbacks.sync_detector import told
    from trainer.cli.build import check, make
    from trainer.cli.checks.fake_step import look, measure
    from trainer.cli.folders import merge_recipes
    from trainer.cli.fused import fusing
    from trainer.cli.targets import Allowlist

    if settings["data"] is None or settings["model"] is None:
        raise UsageError("checks predicts the memory of a recipe: name one, with +recipe=NAME.")
    merge_recipes()
    allowlist = Allowlist(settings["allowed_packages"], settings.get("ckpt"))
    check({name: settings[name] for name in ("precision", "callbacks", "data", "model")}, "", allowlist)
    trainer_class = allowlist.locate(settings["trainer"]["_target_"], "trainer")
    data = make(settings["data"], "data", allowlist)
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    precision = make(settings["precision"], "precision", allowlist).for_device(device)
    seen: dict[str, int] = {}

    def prepare(module: Any) -> None:
        parameters = list(module.parameters())
        seen["parameters"] = sum(parameter.numel() for parameter in parameters)
        seen["gradients"] = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
        nodes = (settings["callbacks"] or {}).items()
        ours = [n for _, n in nodes if n and str(n.get("_target_", "")).endswith(".FastSettings")]
        chosen = make(ours[0], "callbacks", allowlist) if ours else None
        missed.update(fast_settings.missed(module, chosen, precision=precision.name))
        if settings["trainer"].get("benchmark") or settings["trainer"].get("deterministic"):
            missed.pop("cudnn.benchmark", None)
        for name, node in nodes:
            if node and str(node.get("_target_", "")).endswith(".ActivationCheckpointing"):
                checkpointing = make(node, f"callbacks.{name}", allowlist)
                checkpointing.on_fit_start(None, module)
                checkpointing.on_train_start(None, module)

    fuse = fusing(trainer_class, "cpu")  # where the tensors without values say they are
    build: Callable[[], Any] = partial(make, settings["model"], "model", allowlist, fuse)
    try:
        ops = look(build, batch, precision, waits)
        single = measure(build, batch, precision, prepare, None)
        sharded = measure(build, batch, precision, prepare, number)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"The memory of this recipe cannot be predicted: {' '.join(str(error).split()).rstrip('.')}. Its"
            " training_step is run on tensors without values, so it may not depend on them (x[mask], mask.nonzero())"
            " or train by itself (manual optimization). `python -m trainer tune batch_size` measures instead."
            + "".join(f" It looks at them in {line}." for line in told(list(waits.values())))
        ) from error
    is_rehearsed = getattr(precision, "autocast_ops", "") == "cuda" or device.type != "cpu"
    return single, sharded, seen["gradients"], seen["parameters"], {} if is_rehearsed else ops


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of code that wonders about tensors without values
        yield
