"""``trainer checks``: what is installed, what the machine has, and which precision to use on it.

This module writes it down; what there is to know comes from ``machine`` (cores, memory, disks), ``abilities`` (what a
device computes in) and ``speed`` (how fast). torch is imported only when the command runs, for it may be what is
broken.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trainer
from trainer import machine
from trainer.cli.arguments import Arguments, UsageError
from trainer.cli.processes import is_quiet
from trainer.errors import did_you_mean

if TYPE_CHECKING:
    import torch
    from rich.console import Console

_PACKAGES = ("lightning", "torchmetrics", "hydra-core", "omegaconf", "torchvision", "scikit-learn", "optuna")
_OPTIONAL = ("torchvision", "scikit-learn", "optuna")
_MISSING, _DRIVER = "not installed", "NVIDIA driver"
_RUNS = "outputs"  # where runs, and their checkpoints, go by default (conf/amp_trainer.yaml)
_SHARED_MEMORY = Path("/dev/shm")
_LITTLE_DISK, _LITTLE_SHARED = 2**30, 2**30
_DTYPE_OF = {"16": "float16", "bf16": "bfloat16", "32": "float32"}


def command(arguments: Arguments) -> int:
    """``trainer checks [json]``.

    Returns:
        0, or 1 when something is broken: torch cannot be imported, or nothing can be written.

    Raises:
        UsageError: settings, or a word other than json.
    """
    if arguments.overrides or arguments.words not in ([], ["json"]):
        given = (arguments.words if arguments.words not in ([], ["json"]) else arguments.overrides)[0]
        raise UsageError(
            f"checks takes no settings, and one word: json. Got {given!r}.{did_you_mean(given, ['json'])} It looks at"
            " the machine, not at a recipe."
        )
    facts = gather()
    if arguments.words:
        print(json.dumps(facts, indent=2))
    else:
        show(facts)
    return 1 if facts["problems"] else 0


def gather(seconds: float = 2.0) -> dict[str, Any]:
    """Everything that is told, as plain containers.

    Args:
        seconds: for measuring speed.
    """
    busy = _load()
    facts: dict[str, Any] = {"versions": _versions(), "problems": [], "remarks": []}
    _about_torch(facts, seconds, busy)
    _about_host(facts)
    return facts


# --- with torch -----------------------------------------------------------------------------------------------


def _about_torch(facts: dict[str, Any], seconds: float, busy: float | None) -> None:
    facts |= {"devices": [], "precisions": {}, "speed": None, "verdict": None}
    try:
        import torch
    except Exception as error:
        problem = f"torch cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}."
        facts["problems"].append(f"{problem} Install it anew: pip install --force-reinstall torch.")
        facts["verdict"] = "Nothing can be trained here before torch is mended."
        return
    from trainer.cli.checks.abilities import PRECISIONS, ability
    from trainer.cli.checks.speed import measure

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = devices()
    facts["versions"]["torch"] = f"{torch.__version__} ({_build(torch.version.cuda, torch.version.hip)})"
    facts["devices"] = [_describe(device) for device in found]
    facts["remarks"] += [" ".join(str(warning.message).split()) for warning in said]
    if _DRIVER in facts["versions"] and found[0].type == "cpu":
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no GPU it can use"
        facts["remarks"].append(f"There is an NVIDIA driver, but {why}.")

    for device in _distinct(found):
        rows = [ability(precision, device) for precision in PRECISIONS]
        facts["precisions"][_name(device)] = [vars(row) for row in rows]
    first = found[0]
    speeds = [vars(row) for row in measure(first, seconds)]
    facts["speed"] = {"device": _name(first), "threads": torch.get_num_threads(), "load": busy, "rows": speeds}
    cores = machine.cores().usable
    is_busy = busy is not None and first.type == "cpu" and busy > cores
    if is_busy:
        facts["remarks"].append(
            f"Other processes keep the cores busy (load {busy:.1f}, cores {cores}): the measured speeds mean"
            " little. Run this again when the machine is idle."
        )
    facts["verdict"] = verdict(first, {} if is_busy else {row["name"]: row["ratios"] for row in speeds})


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


_OPERATIONS = {"matmul": "matrix products", "convolution": "convolutions"}


def _describe(device: torch.device) -> dict[str, Any]:
    import torch

    from trainer.cli.checks.abilities import instructions

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return {
            "device": str(device),
            "name": properties.name,
            "memory": properties.total_memory,
            "detail": f"compute capability {capability}",
        }
    memory = machine.memory().total
    if device.type == "mps":
        return {"device": "mps", "name": platform.processor(), "memory": memory, "detail": "shares the host's memory"}
    cores = machine.cores()
    words = [f"{cores.usable} of {cores.total} cores usable" if cores.usable < cores.total else f"{cores.total} cores"]
    words.append(f"16-bit instructions: {', '.join(instructions()) or 'none that torch uses'}")
    return {"device": "cpu", "name": machine.cpu_name(), "memory": memory, "detail": "; ".join(words)}


def _name(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return machine.cpu_name() if device.type == "cpu" else device.type.upper()


def _distinct(found: Sequence[torch.device]) -> list[torch.device]:
    """One device of every name."""
    return list({_name(device): device for device in reversed(found)}.values())[::-1]


# --- without torch --------------------------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    found = {"trainer": trainer.__version__, "python": platform.python_version(), "torch": _version("torch")}
    found |= {name: _version(name) for name in _PACKAGES}
    found = {name: text for name, text in found.items() if text != _MISSING or name not in _OPTIONAL}
    driver = nvidia_driver()
    return found | ({_DRIVER: driver} if driver else {}) | {"system": platform.platform()}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return _MISSING


def _build(cuda: str | None, hip: str | None) -> str:
    return f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "no CUDA"


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


def _about_host(facts: dict[str, Any]) -> None:
    cores, memory = machine.cores(), machine.memory()
    gpus = sum(device["device"].startswith("cuda") for device in facts["devices"])
    facts["workers"] = {**vars(cores), "usable": cores.usable}
    facts["workers"]["suggested"] = machine.suggested_workers(cores.usable, gpus)
    facts["memory"] = {**vars(memory), "usable": memory.usable}
    here, runs = machine.disk(Path()), machine.disk(Path(_RUNS))
    is_one = here.folder.stat().st_dev == runs.folder.stat().st_dev and here.problem == runs.problem
    disks = {"disk": here} if is_one else {"disk": here, "checkpoints": runs}
    facts["disks"] = [{**vars(disk), "folder": str(disk.folder), "for": name} for name, disk in disks.items()]
    for disk in disks.values():
        if disk.problem is not None:
            facts["problems"].append(_about_writing(disk))
        elif disk.free < _LITTLE_DISK:
            facts["remarks"].append(f"{disk.folder} has {size(disk.free)} left: checkpoints may not fit.")
    shared = _shared_memory()
    facts["memory"]["shared"] = shared
    if shared is not None and shared < _LITTLE_SHARED:
        facts["remarks"].append(
            f"{_SHARED_MEMORY} has {size(shared)}, and batches of dataloader workers travel through it: start the"
            " container with --shm-size=8g or --ipc=host."
        )


def _about_writing(disk: machine.Disk) -> str:
    return (
        f"Nothing can be written into {disk.folder}: {disk.problem} ({size(disk.free)} of {size(disk.total)} free)."
        " Runs and checkpoints go there: work in another folder, or choose one with hydra.run.dir=FOLDER."
    )


def _shared_memory() -> int | None:
    return shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else None


# --- in words -------------------------------------------------------------------------------------------------


def size(number: float | None) -> str:
    """Bytes as one reads them."""
    if number is None:
        return "unknown"
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def show(facts: dict[str, Any]) -> None:
    """Print ``facts`` for a person; with ``--quiet`` the verdict, and what is wrong."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160)
    _table(console, "Versions", None, [[name, text] for name, text in facts["versions"].items()])
    devices = [[row["device"], row["name"], size(row["memory"]), row["detail"]] for row in facts["devices"]]
    if devices:
        _table(console, "Devices", ["device", "name", "memory", "about"], devices)
    for name, rows in facts["precisions"].items():
        cells = [[row["precision"], row["how"], row["why"]] for row in rows]
        _table(console, f"Precisions on {name}", ["precision", "here", "why"], cells)
    if facts["speed"]:
        _table(console, *_speed(facts["speed"]))
    _table(console, "Host", None, _host(facts))
    for remark in facts["remarks"]:
        console.print(f"Note: {remark}", markup=False, highlight=False, soft_wrap=True)
    for problem in facts["problems"]:
        console.print(f"Broken: {problem}", style="red", markup=False, highlight=False, soft_wrap=True)
    console.print(facts["verdict"], style="bold", markup=False, highlight=False, soft_wrap=True)


def _table(console: Console, title: str, header: list[str] | None, rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if is_quiet():
        return
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, show_header=header is not None)
    for name in header or [""] * len(rows[0]):
        table.add_column(Text(name), overflow="fold", justify="right" if name in _NUMBERS else "left")
    styles = {"unsupported": "red", "emulated": "yellow"}
    for cells in rows:
        table.add_row(*map(Text, cells), style=next((styles[cell] for cell in cells if cell in styles), None))
    console.print(table)


_NUMBERS = ("memory", "matrix products", "convolutions", "against float32")


def _speed(speed: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    on_cpu = speed["device"] == machine.cpu_name()
    threads = f", {speed['threads']} thread{'s' * (speed['threads'] != 1)}" if on_cpu else ""
    rows = []
    for row in speed["rows"]:
        cells = [row["name"]]
        for operation in ("matmul", "convolution"):
            cells += [_rate(row[operation]), _ratio(row["ratios"].get(operation))]
        rows.append(cells)
    header = ["arithmetic", "matrix products", "against float32", "convolutions", "against float32"]
    return f"Measured speed of {speed['device']}{threads}", header, rows


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1e12:.1f} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.1f} GFLOP/s"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _host(facts: dict[str, Any]) -> list[list[str]]:
    workers, memory = facts["workers"], facts["memory"]
    quota = "" if workers["quota"] is None else f", a quota of {workers['quota']:g}"
    rows = [
        [
            "dataloaders",
            f"num_workers={workers['suggested']} to begin with ({workers['allowed']} of {workers['total']} cores"
            f" allowed{quota})",
        ],
        ["memory", f"{size(memory['available'])} available of {size(memory['total'])}"],
    ]
    if memory["limit"] is not None:
        rows.append(["memory limit", f"{size(memory['left'])} left of {size(memory['limit'])} (control group)"])
    for disk in facts["disks"]:
        network = f", on a network ({disk['network']})" if disk["network"] else ""
        state = "writable" if disk["problem"] is None else f"not writable: {disk['problem']}"
        rows.append(
            [
                disk["for"],
                f"{disk['folder']}: {size(disk['free'])} free of {size(disk['total'])}, {state}{network}",
            ]
        )
    return rows
