"""``trainer checks``: what is installed, what the machine has, and which precision to use; of a recipe the data, the
layers, and the memory.

Each check is a function that adds to the `Findings`: `CHECKS` lists those of the machine in the order in which they are
told, `trainer.cli.checks.first_look.CHECKS_OF_RECIPE` those of a recipe. What there is to know comes from ``machine``
(cores, memory, disks), ``abilities`` (what a device computes in), ``speed`` (how fast), ``memory`` (of a training), and
``first_look`` (data and layers of a recipe). torch is imported only when the command runs: it may be what is broken.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trainer
from trainer import machine
from trainer.cli import failure
from trainer.cli.arguments import Arguments, UsageError
from trainer.cli.checks.findings import Findings, Recipe
from trainer.cli.tune import plain
from trainer.cli.validate import validate
from trainer.errors import ConfigurationError, did_you_mean
from trainer.machine import readable
from trainer.record.environment import version_of
from trainer.terminal import Table, tell

if TYPE_CHECKING:
    import torch

_PACKAGES = ("lightning", "torchmetrics", "hydra-core", "omegaconf", "torchvision", "scikit-learn", "optuna")
_OPTIONAL = ("torchvision", "scikit-learn", "optuna")
_DRIVER = "NVIDIA driver"
_RUNS = "outputs"  # where runs, and their checkpoints, go by default (conf/amp_trainer.yaml)
_LITTLE_DISK, _LITTLE_SHARED = 2**30, 2**30
_DTYPE_OF = {"16": "float16", "bf16": "bfloat16", "32": "float32"}
_OPERATIONS = {"matmul": "matrix products", "convolution": "convolutions"}


def command(arguments: Arguments) -> int:
    """``trainer checks [json]``, and of a recipe ``trainer checks [json] +recipe=NAME [SETTING=VALUE ...]``.

    Returns:
        0, or 1 when something is broken: torch cannot be imported, or nothing can be written.

    Raises:
        UsageError: a word other than json; of a recipe what `trainer.cli.checks.memory.predict` refuses.
    """
    if arguments.words not in ([], ["json"]):
        given = arguments.words[0]
        raise UsageError(
            f"checks takes one word: json. Got {given!r}.{did_you_mean(given, ['json'])} What memory a recipe needs is"
            " told by `python -m trainer checks +recipe=NAME`."
        )
    arguments.check_flags()
    found = Findings()
    if arguments.overrides:
        config = validate(arguments)
        found.recipe = Recipe(config.hydra.runtime.choices.get("recipe") or "unnamed", plain(config, Path("outputs")))
    try:
        for check in CHECKS if found.recipe is None else (check_versions, check_devices):
            check(found)
        if found.recipe is not None and found.devices:  # or torch is broken
            from trainer.cli.checks.first_look import CHECKS_OF_RECIPE

            for check_of_recipe in CHECKS_OF_RECIPE:
                check_of_recipe(found, found.recipe)
    except ConfigurationError:
        raise
    except Exception as error:  # of the recipe's own code
        failure.explain_path(error, found.recipe.settings if found.recipe else {})
        failure.tell(error)
        return 1
    if arguments.words:
        print(json.dumps(found.facts, indent=2))
    else:
        show(found)
    if found.facts["problems"]:
        return 1
    if found.recipe is not None and found.recipe.failure is not None:
        raise found.recipe.failure
    return 0


def check_versions(found: Findings) -> None:
    """What is installed, and whether torch can be imported."""
    known = {name: version_of(name) for name in ("torch", *_PACKAGES)}
    versions = {"trainer": trainer.__version__, "python": platform.python_version()}
    versions |= {name: text or "not installed" for name, text in known.items() if text or name not in _OPTIONAL}
    driver = nvidia_driver()
    versions |= ({_DRIVER: driver} if driver else {}) | {"system": platform.platform()}
    try:
        import torch
    except Exception as error:
        problem = f"torch cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}."
        found.problem(f"{problem} Install it anew: pip install --force-reinstall torch.")
        found.facts["verdict"] = "Nothing can be trained here before torch is mended."
    else:
        cuda, hip = torch.version.cuda, torch.version.hip
        build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "no CUDA"
        versions["torch"] = f"{torch.__version__} ({build})"
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found.devices = devices()
        found.facts["remarks"] += [" ".join(str(warning.message).split()) for warning in said]
        if driver and found.devices[0].type == "cpu":
            why = "torch was built without CUDA" if cuda is None else "torch finds no GPU it can use"
            found.remark(f"There is an NVIDIA driver, but {why}.")
    found.facts["versions"] = versions
    if found.recipe is None:  # one screen is for what is looked at
        found.tables.append(Table("Versions", (), list(versions.items())))


def check_devices(found: Findings) -> None:
    """The devices, and what they have."""
    found.facts["devices"] = [_describe(device) for device in found.devices]
    rows = [[row["device"], row["name"], readable(row["memory"]), row["detail"]] for row in found.facts["devices"]]
    found.tables.append(Table("Devices", ("device", "name", "memory", "about"), rows, ("device", "name", "about")))


def check_precisions(found: Findings) -> None:
    """What each precision does on each kind of device."""
    for name, device in {_name(device): device for device in found.devices}.items():
        from trainer.cli.checks.abilities import PRECISIONS, ability

        rows = [ability(precision, device) for precision in PRECISIONS]
        found.facts["precisions"][name] = [vars(row) for row in rows]
        cells = [[row.precision, row.how, row.why] for row in rows]
        found.tables.append(Table(f"Precisions on {name}", ("precision", "here", "why"), cells))


def check_speed(found: Findings) -> None:
    """How fast the first device is, and which precision to use on it."""
    if not found.devices:
        return
    import torch

    from trainer.cli.checks.speed import measure

    device, cores, threads, load = found.devices[0], machine.cores().usable, torch.get_num_threads(), _load()
    speeds = measure(device, found.seconds)
    found.facts["speed"] = {
        "device": _name(device), "threads": threads, "load": load, "rows": [vars(row) for row in speeds]
    }  # fmt: skip
    is_busy = load is not None and device.type == "cpu" and load > cores
    if is_busy:
        found.remark(
            f"Other processes keep the cores busy (load {load:.1f}, cores {cores}): the measured speeds mean"
            " little. Run this again when the machine is idle."
        )
    found.facts["verdict"] = verdict(device, {} if is_busy else {row.name: row.ratios for row in speeds})
    on_cpu = f", {threads} thread{'s' * (threads != 1)}" if device.type == "cpu" else ""
    numbers = [name for words in _OPERATIONS.values() for name in (words, "against float32")]
    cells = [[_rate(getattr(row, name)), _ratio(row.ratios.get(name))] for row in speeds for name in _OPERATIONS]
    rows = [[row.name, *cells[2 * place], *cells[2 * place + 1]] for place, row in enumerate(speeds)]
    title, first = f"Measured speed of {_name(device)}{on_cpu}", ["arithmetic"]
    found.tables.append(Table(title, [*first, *numbers], rows, first))


def check_host(found: Findings) -> None:
    """Cores for the dataloaders, memory, and disks."""
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
    """The devices that a Trainer can run on; the first is the one that ``accelerator=auto`` takes."""
    import torch

    found = [torch.device("mps")] if torch.backends.mps.is_available() else []
    found += [torch.device("cuda", index) for index in range(torch.cuda.device_count() * torch.cuda.is_available())]
    return [*found, torch.device("cpu")]


def verdict(device: torch.device, ratios: dict[str, dict[str, float]]) -> str:
    """Which precision to use on ``device``, and why.

    It is the one that ``precision=auto`` takes, unless a measurement speaks against it.

    Args:
        device: where.
        ratios: measured speeds against float32, by dtype and operation; empty where they mean nothing.
    """
    from trainer.precision import AutoPrecision

    choice, reason = AutoPrecision().choose(device)
    name = choice.name.removesuffix("-true")
    measured = ratios.get(_DTYPE_OF[name.partition("-")[0]], {})
    if name == "32":
        return (
            f"Use precision=32 here: {reason}. precision=16-mixed computes with true float16 numbers here too, which"
            " finds float16's problems before a GPU does."
        )
    rates = " and ".join(f"{ratio:.1f}x in {_OPERATIONS[operation]}" for operation, ratio in measured.items())
    if measured and max(measured.values()) < 1:
        return (
            f"Use precision=32 here: precision=auto takes {name}, for {reason}, but it was measured to be slower than"
            f" float32: {rates}."
        )
    return f"Use precision={name} here: {reason}{f'; measured {rates} against float32' if rates else ''}."


def _describe(device: torch.device) -> dict[str, Any]:
    import torch

    from trainer.cli.checks.abilities import instructions

    if device.type == "cuda":
        memory: int | None = torch.cuda.get_device_properties(device).total_memory
        detail = f"compute capability {'.'.join(map(str, torch.cuda.get_device_capability(device)))}"
    else:
        memory, detail = machine.memory().total, "shares the host's memory"
    if device.type == "cpu":
        cores = machine.cores()
        of = f"{cores.usable} of {cores.total} cores usable" if cores.usable < cores.total else f"{cores.total} cores"
        detail = f"{of}; 16-bit instructions: {', '.join(instructions()) or 'none that torch uses'}"
    name = platform.processor() if device.type == "mps" else _name(device)
    return {"device": str(device), "name": name, "memory": memory, "detail": detail}


def _name(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return machine.cpu_name() if device.type == "cpu" else device.type.upper()


# --- without torch --------------------------------------------------------------------------------------------


def nvidia_driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of NVIDIA's driver; None where there is none.

    Args:
        file: where Linux tells; elsewhere ``nvidia-smi`` is asked.
    """
    try:
        found = re.search(r"Module\D*?(?:for \S+\s+)?(\d+[\d.]+)", file.read_text(encoding="utf-8"))
        return found[1] if found else None
    except OSError:
        tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.strip().partition("\n")[0] or None


def _load() -> float | None:
    """How many processes have wanted a core in the last minute, on average."""
    try:
        return round(os.getloadavg()[0], 1)
    except (AttributeError, OSError):  # Windows
        return None


def _workers(found: Findings) -> list[list[str]]:
    cores, gpus = machine.cores(), sum(device.type == "cuda" for device in found.devices)
    suggested = machine.suggested_workers(cores.usable, gpus)
    found.facts["workers"] = {**vars(cores), "usable": cores.usable, "suggested": suggested}
    quota = "" if cores.quota is None else f", a quota of {cores.quota:g}"
    allowed = f"{cores.allowed} of {cores.total} cores allowed{quota}"
    return [["dataloaders", f"num_workers={suggested} to begin with ({allowed})"]]


def _memory(found: Findings) -> list[list[str]]:
    memory = machine.memory()
    shared = known[1] if (known := machine.shared_memory()) else None
    found.facts["memory"] = {**vars(memory), "usable": memory.usable, "shared": shared}
    if shared is not None and shared < _LITTLE_SHARED:
        found.remark(
            f"{machine.SHARED_MEMORY} has {readable(shared)}, and batches of dataloader workers travel through it:"
            " start the container with --shm-size=8g or --ipc=host."
        )
    rows = [["memory", f"{readable(memory.available)} available of {readable(memory.total)}"]]
    if memory.limit is not None:
        rows.append(["memory limit", f"{readable(memory.left)} left of {readable(memory.limit)} (control group)"])
    return rows


def _disks(found: Findings) -> list[list[str]]:
    here, runs = machine.disk(Path()), machine.disk(Path(_RUNS))
    is_one = here.folder.stat().st_dev == runs.folder.stat().st_dev and here.problem == runs.problem
    disks = {"disk": here} if is_one else {"disk": here, "checkpoints": runs}
    found.facts["disks"] = [{**vars(disk), "folder": str(disk.folder), "for": name} for name, disk in disks.items()]
    rows = []
    for name, disk in disks.items():
        if disk.problem is not None:
            found.problem(
                f"Nothing can be written into {disk.folder}: {disk.problem} ({readable(disk.free)} of"
                f" {readable(disk.total)} free). Runs and checkpoints go there: work in another folder, or choose one"
                " with hydra.run.dir=FOLDER."
            )
        elif disk.free < _LITTLE_DISK:
            found.remark(f"{disk.folder} has {readable(disk.free)} left: checkpoints may not fit.")
        network = f", on a network ({disk.network})" if disk.network else ""
        state = "writable" if disk.problem is None else f"not writable: {disk.problem}"
        space = f"{readable(disk.free)} free of {readable(disk.total)}"
        rows.append([name, f"{disk.folder}: {space}, {state}{network}"])
    return rows


# --- in words -------------------------------------------------------------------------------------------------


def show(found: Findings) -> None:
    """Print what was found for a person; with ``--quiet`` the verdict, and what is wrong."""
    for table in found.tables:
        if table.rows:
            table.show()
    remarks = [(f"Note: {remark}", "") for remark in found.facts["remarks"]]
    problems = [(f"Broken: {problem}", "red") for problem in found.facts["problems"]]
    verdict = [(found.facts["verdict"], "bold")] if found.facts["verdict"] else []
    for line, style in [*remarks, *problems, *verdict]:
        tell(line, style)


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1e12:.1f} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.1f} GFLOP/s"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
