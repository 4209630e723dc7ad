"""``trainer checks``: versions, devices, precisions and speed of this machine; data, layers and memory of a recipe.

Each check is a function that adds to the :class:`Findings`, in the order of `CHECKS` for the machine and of
`trainer.cli.checks.first_look.CHECKS_OF_RECIPE` for a recipe. torch is imported only when the command runs, because it
may be broken.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import trainer
from trainer import machine
from trainer.cli import failure
from trainer.cli.arguments import Arguments, UsageError
from trainer.cli.tune import plain
from trainer.cli.validate import validate
from trainer.errors import ConfigurationError, did_you_mean
from trainer.machine import readable
from trainer.record.provenance import version_of
from trainer.terminal import Table, command_line, print_line

if TYPE_CHECKING:
    import torch

    from trainer.cli.checks.speed import Speed

_PACKAGES = ("lightning", "torchmetrics", "hydra-core", "omegaconf")
_OPTIONAL = ("torchvision", "scikit-learn", "optuna")
_RUNS = "outputs"  # the default folder of runs (conf/amp_trainer.yaml)
_LOW_SPACE = 2**30  # bytes, of a disk and of shared memory
_DTYPE_OF = {"16": "float16", "bf16": "bfloat16", "32": "float32"}
_OPERATIONS = {"matmul": "matrix products", "convolution": "convolutions"}


class LoadedBatch(NamedTuple):
    """The first batch of a dataloader, and its speed.

    Args:
        batch: the first batch.
        first: seconds until the first batch, including the start of workers.
        seconds: mean seconds per timed batch; None if there is only one batch.
        timed: number of timed batches: those after the first, except batches that workers had already prefetched.
        workers: number of workers; None if it is unknown.
    """

    batch: Any
    first: float
    seconds: float | None
    timed: int
    workers: int | None


@dataclass
class Recipe:
    """The recipe to check, and the results of earlier checks that later ones need.

    Args:
        name: name of the recipe; ``unnamed`` for a config without a recipe.
        settings: its resolved config, changed to a short run.
        data: the data module of `loaded`, or the module if it has the dataloaders.
        loaded: the first batch, and the speed of its dataloader.
        peak: predicted peak memory of a step on one device, in bytes; None if it could not be predicted.
        operations: floating-point operations of a forward pass; None if they could not be counted.
        words: the overrides of the command line.
    """

    name: str
    settings: dict[str, Any]
    data: Any = None
    loaded: LoadedBatch | None = None
    peak: int | None = None
    operations: int | None = None
    words: list[str] = field(default_factory=list)


@dataclass
class Findings:
    """The results of checks.

    Args:
        recipe: the recipe to check; None to check only the machine.
        devices: devices that a Trainer can use; empty if torch cannot be imported.
        facts: all results, as plain containers. ``checks json`` prints them.
        tables: tables for the terminal.
    """

    recipe: Recipe | None = None
    devices: list[torch.device] = field(default_factory=list)
    facts: dict[str, Any] = field(
        default_factory=lambda: {
            "versions": {}, "problems": [], "remarks": [], "devices": [], "precisions": {}, "speed": None,
            "batch": None, "loading": None, "layers": None, "float16": None, "memory_of_recipe": None, "missed": {},
            "synchronizations": [], "autocast_ops": {}, "float16_kernels": {}, "verdict": None,
        }
    )  # fmt: skip
    tables: list[Table] = field(default_factory=list)

    def remark(self, text: str) -> None:
        """Add a remark."""
        self.facts["remarks"].append(text)

    def problem(self, text: str) -> None:
        """Add a problem, which makes the exit status 1."""
        self.facts["problems"].append(text)


def command(arguments: Arguments) -> int:
    """Run ``trainer checks [json]``, or for a recipe ``trainer checks [json] +recipe=NAME [SETTING=VALUE ...]``.

    Returns:
        0, or 1 if there is a problem: torch cannot be imported, or a folder cannot be written. Problems of a recipe are
        an exception in its code, values that are not finite, and a label that is out of range.

    Raises:
        UsageError: for a word other than json; for a recipe, as in `trainer.cli.checks.memory.predict`.
    """
    if arguments.words not in ([], ["json"]):
        given = arguments.words[0]
        raise UsageError(
            f"checks takes one word: json. Got {given!r}.{did_you_mean(given, ['json'])}"
            f" `{command_line('checks', '+recipe=NAME')}` predicts the memory of a recipe."
        )
    arguments.check_flags()
    found = Findings()
    if arguments.overrides:
        config = validate(arguments)
        name, words = config.hydra.runtime.choices.get("recipe") or "unnamed", list(arguments.overrides)
        found.recipe = Recipe(name, plain(config, Path("outputs")), words=words)
    try:
        for check in CHECKS if found.recipe is None else (check_versions, check_devices):
            check(found)
        if found.recipe is not None and found.devices:  # otherwise torch is broken
            from trainer.cli.checks.first_look import CHECKS_OF_RECIPE

            for check_of_recipe in CHECKS_OF_RECIPE:
                check_of_recipe(found, found.recipe)
    except ConfigurationError:
        raise
    except Exception as error:  # raised by the recipe's code
        failure.add_setting_note(error, found.recipe.settings if found.recipe else {})
        failure.print_error(error)
        return 1
    if arguments.words:
        print(json.dumps(found.facts, indent=2))
    else:
        show(found)
    return int(bool(found.facts["problems"]))


def check_versions(found: Findings) -> None:
    """List the installed versions, and check that torch can be imported."""
    versions = {"trainer": trainer.__version__, "python": platform.python_version(), "torch": version_of("torch")}
    versions |= {name: version_of(name) or "not installed" for name in _PACKAGES}
    versions |= {name: version for name in _OPTIONAL if (version := version_of(name))}
    if driver := nvidia_driver():
        versions["NVIDIA driver"] = driver
    versions["system"] = platform.platform()
    try:
        import torch
    except Exception as error:
        found.problem(
            f"torch cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}. Install it again: pip"
            " install --force-reinstall torch."
        )
        found.facts["verdict"] = "No training is possible before torch is repaired."
    else:
        cuda, hip = torch.version.cuda, torch.version.hip
        versions["torch"] = f"{torch.__version__} ({f'CUDA {cuda}' if cuda else f'ROCm {hip}' if hip else 'no CUDA'})"
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found.devices = devices()
        found.facts["remarks"] += [" ".join(str(warning.message).split()) for warning in warned]
        if driver and found.devices[0].type == "cpu":
            reason = "torch was built without CUDA" if cuda is None else "torch finds no GPU that it can use"
            found.remark(f"There is an NVIDIA driver, but {reason}.")
    found.facts["versions"] = versions
    if found.recipe is None:  # the tables of a recipe fill the screen
        found.tables.append(Table("Versions", (), [(name, str(version)) for name, version in versions.items()]))


def check_devices(found: Findings) -> None:
    """List the devices, with name and memory."""
    found.facts["devices"] = [_describe(device) for device in found.devices]
    rows = [[row["device"], row["name"], readable(row["memory"]), row["detail"]] for row in found.facts["devices"]]
    found.tables.append(Table("Devices", ("device", "name", "memory", "about"), rows))


def check_precisions(found: Findings) -> None:
    """List the support of each precision on each kind of device."""
    for name, device in {_name(device): device for device in found.devices}.items():
        from trainer.cli.checks.abilities import PRECISIONS, precision_support

        rows = [precision_support(precision, device) for precision in PRECISIONS]
        found.facts["precisions"][name] = [row._asdict() for row in rows]
        found.tables.append(Table(f"Precisions on {name}", ("precision", "here", "why"), rows))


def check_speed(found: Findings) -> None:
    """Measure the first device, and recommend a precision."""
    if not found.devices:
        return
    import torch

    from trainer.cli.checks.speed import measure
    from trainer.precision import cpu_fp16

    device, cores, threads, load = found.devices[0], machine.cores().usable, torch.get_num_threads(), _load()
    name, speeds = _name(device), measure(device)
    facts = {"device": name, "threads": threads, "load": load, "rows": [vars(row) for row in speeds]}
    found.facts["speed"] = facts
    is_busy = load is not None and device.type == "cpu" and load > cores
    if is_busy:
        found.remark(
            f"Other processes keep the cores busy (load {load:.1f}, cores {cores}), so the measured speeds are not"
            " reliable. Run this again on an idle machine."
        )
    found.facts["verdict"] = verdict(device, {} if is_busy else {row.name: row.ratios for row in speeds})
    on_cpu = f", {threads} thread{'s' * (threads != 1)}" if device.type == "cpu" else ""
    header = ["arithmetic", *(text for words in _OPERATIONS.values() for text in (words, "against float32"))]
    rows = [[row.name, *(text for one in _OPERATIONS for text in _rate(row, one))] for row in speeds]
    found.tables.append(Table(f"Measured speed of {name}{on_cpu}", header, rows))
    if device.type == "cpu":
        ratios = {family: cpu_fp16.measured_ratio(family) for family in cpu_fp16.FAMILIES}
        kernels = cpu_fp16.kernel_facts(cpu_fp16.slow_families(), ratios)
        found.facts["float16_kernels"] = kernels
        found.tables.append(
            Table(
                "float16 kernels with cpu_kernels=auto",
                ("operations", "kernels", "time of torch's kernels against ours"),
                [
                    (family, one["kernels"], "no kernel" if one["ratio"] is None else f"{one['ratio']:.1f}x")
                    for family, one in kernels.items()
                ],
            )
        )


def check_host(found: Findings) -> None:
    """List cores for the dataloaders, memory, and disks."""
    found.tables.append(Table("Host", (), [*_workers(found), *_memory(found), *_disks(found)]))


CHECKS: tuple[Callable[[Findings], None], ...] = (
    check_versions,
    check_devices,
    check_precisions,
    check_speed,
    check_host,
)


# --- with torch -----------------------------------------------------------------------------------------------


def devices() -> list[torch.device]:
    """Return the devices that a Trainer can use; the first is the choice of ``accelerator=auto``."""
    import torch

    found = [torch.device("mps")] if torch.backends.mps.is_available() else []
    found += [torch.device("cuda", index) for index in range(torch.cuda.device_count() * torch.cuda.is_available())]
    return [*found, torch.device("cpu")]


def verdict(device: torch.device, ratios: dict[str, dict[str, float]]) -> str:
    """Return a recommendation for ``device``: the choice of ``precision=auto``, or 32 if it was slower on average.

    Args:
        device: the device.
        ratios: measured speeds against float32, by dtype and operation; empty if they are not reliable.
    """
    from trainer.precision import AutoPrecision

    choice, reason = AutoPrecision().choose(device)
    name = choice.name.removesuffix("-true")
    measured = ratios.get(_DTYPE_OF[name.partition("-")[0]], {})
    if name == "32":
        return (
            f"Use precision=32 here: {reason}. precision=16-mixed computes with true float16 numbers here too, which"
            " shows problems of float16 without a GPU."
        )
    rates = " and ".join(f"{ratio:.1f}x in {_OPERATIONS[operation]}" for operation, ratio in measured.items())
    if measured and prod(measured.values()) < 1:
        return (
            f"Use precision=32 here: precision=auto takes {name}, because {reason}, but it was measured to be slower"
            f" than float32 on average: {rates}."
        )
    return f"Use precision={name} here: {reason}{f'; measured {rates} against float32' if rates else ''}."


def _describe(device: torch.device) -> dict[str, Any]:
    import torch

    from trainer.cli.checks.abilities import instructions

    memory, detail = machine.memory().total, "shares the host's memory"
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        detail = f"compute capability {'.'.join(map(str, torch.cuda.get_device_capability(device)))}"
    elif device.type == "cpu":
        cores = machine.cores()
        counts = (
            f"{cores.usable} of {cores.total} cores usable" if cores.usable < cores.total else f"{cores.total} cores"
        )
        detail = f"{counts}; 16-bit instructions: {', '.join(instructions()) or 'none that torch uses'}"
    return {"device": str(device), "name": _name(device), "memory": memory, "detail": detail}


def _name(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return machine.cpu_name() if device.type == "cpu" else platform.processor()


# --- without torch --------------------------------------------------------------------------------------------


def nvidia_driver() -> str | None:
    """Return the version of NVIDIA's driver from ``nvidia-smi``, or None."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.strip().partition("\n")[0] or None


def _load() -> float | None:
    """Return the mean number of processes that were ready to run in the last minute."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None  # not on Windows


def _workers(found: Findings) -> list[list[str]]:
    cores, gpus = machine.cores(), sum(device.type == "cuda" for device in found.devices)
    suggested = machine.suggested_workers(cores.usable, gpus)
    found.facts["workers"] = {**cores._asdict(), "usable": cores.usable, "suggested": suggested}
    quota = "" if cores.quota is None else f", a quota of {cores.quota:g}"
    allowed = f"{cores.allowed} of {cores.total} cores allowed{quota}"
    return [["dataloaders", f"num_workers={suggested} to begin with ({allowed})"]]


def _memory(found: Findings) -> list[list[str]]:
    memory = machine.memory()
    shared = known[1] if (known := machine.shared_memory()) else None
    found.facts["memory"] = {**memory._asdict(), "usable": memory.usable, "shared": shared}
    if shared is not None and shared < _LOW_SPACE:
        found.remark(
            f"{machine.SHARED_MEMORY} has {readable(shared)}, and batches of dataloader workers travel through it:"
            " start the container with --shm-size=8g or --ipc=host."
        )
    rows = [["memory", f"{readable(memory.available)} available of {readable(memory.total)}"]]
    if memory.limit is not None:
        rows.append(["memory limit", f"{readable(memory.left)} left of {readable(memory.limit)} (control group)"])
    return rows


def _disks(found: Findings) -> list[list[str]]:
    disks = {disk.folder: disk for disk in (machine.disk(Path()), machine.disk(Path(_RUNS)))}
    found.facts["disks"] = [{**disk._asdict(), "folder": str(folder)} for folder, disk in disks.items()]
    rows = []
    for disk in disks.values():
        space = f"{readable(disk.free)} of {readable(disk.total)} free"
        if disk.problem is not None:
            found.problem(
                f"{disk.folder} cannot be written: {disk.problem} ({space}). Runs and checkpoints go there: work in"
                " another folder, or choose one with hydra.run.dir=FOLDER."
            )
        elif disk.free < _LOW_SPACE:
            found.remark(f"{disk.folder} has {readable(disk.free)} left: checkpoints may not fit.")
        network = f", on a network ({disk.network})" if disk.network else ""
        state = "writable" if disk.problem is None else f"not writable: {disk.problem}"
        rows.append(["disk", f"{disk.folder}: {space}, {state}{network}"])
    return rows


# --- output ---------------------------------------------------------------------------------------------------


def show(found: Findings) -> None:
    """Print the tables, remarks, problems and the verdict; with ``--quiet`` no tables."""
    for table in found.tables:
        if table.rows:
            table.show()
    for remark in found.facts["remarks"]:
        print_line(f"Note: {remark}")
    for problem in found.facts["problems"]:
        print_line(f"Broken: {problem}", "red")
    if found.facts["verdict"]:
        print_line(found.facts["verdict"], "bold")


def _rate(row: Speed, operation: str) -> tuple[str, str]:
    """Return the rate of an operation and its ratio to the rate in float32, as texts; "-" if they are unknown."""
    rate, ratio = getattr(row, operation), row.ratios.get(operation)
    text = "-" if rate is None else f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GFLOP/s"
    return text, "-" if ratio is None else f"{ratio:.2f}x"
