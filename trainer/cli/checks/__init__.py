"""``trainer checks``: versions, devices, precisions and speed of this machine; data, layers and memory of a recipe.

Each check is a function that adds to the :class:`Findings`: those in this module and in `precisions` describe the
machine, in one table, and those of `first_look` a recipe. torch is imported only when the command runs, because it may
be broken.
"""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import trainer
from trainer.cli import failure
from trainer.cli.config_checks import validate
from trainer.cli.parsing import Arguments, UsageError
from trainer.cli.tune import plain
from trainer.common import machine
from trainer.common.machine import readable
from trainer.common.terminal import Table, print_line
from trainer.errors import did_you_mean
from trainer.record.provenance import version_of

_PACKAGES = ("torch", "lightning", "torchmetrics", "hydra-core", "omegaconf", "torchvision", "scikit-learn", "optuna")
_RUNS = "outputs"  # the default folder of runs (conf/amp_trainer.yaml)
_LOW_SPACE = 2**30  # bytes, of a disk and of shared memory


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
    devices: list[Any] = field(default_factory=list)
    facts: dict[str, Any] = field(
        default_factory=lambda: {"machine": {}, "problems": [], "remarks": [], "verdict": None}
    )
    tables: list[Table] = field(default_factory=list)

    def remark(self, text: str) -> None:
        """Add a remark."""
        self.facts["remarks"].append(text)

    def problem(self, text: str) -> None:
        """Add a problem, which makes the exit status 1."""
        self.facts["problems"].append(text)

    def about(self, section: str, entries: Mapping[str, Any]) -> None:
        """Add a section to the facts and the table of the machine: texts by name."""
        self.facts["machine"][section] = dict(entries)

    def add(self, name: str, title: str, columns: Mapping[str, Callable[[Any], str]], rows: Sequence[Any]) -> None:
        """Add rows to the facts, and a table.

        Args:
            name: name of the fact.
            title: title of the table.
            columns: functions that return the text of a row, by the heading of the column.
            rows: dicts, which are the fact.
        """
        self.facts[name] = rows
        cells = [[text(row) for text in columns.values()] for row in rows]
        self.tables.append(Table(title, tuple(columns), cells))


def command(arguments: Arguments) -> int:
    """Run ``trainer checks [json]``, or for a recipe ``trainer checks [json] +recipe=NAME [SETTING=VALUE ...]``.

    Returns:
        0, or 1 if there is a problem: torch cannot be imported, or a folder cannot be written. Problems of a recipe are
        a step that fails, values that are not finite, and a label that is out of range.

    Raises:
        UsageError: for a word other than json, or for a recipe with a config that cannot be built.
        Exception: any exception of the recipe's data.
    """
    if arguments.words not in ([], ["json"]):
        given = arguments.words[0]
        raise UsageError(f"Got {given!r}.{did_you_mean(given, ['json'])} Expected the word json, or settings.")
    arguments.check_flags()
    findings = Findings()
    if arguments.overrides:
        config = validate(arguments)
        name, words = config.hydra.runtime.choices.get("recipe") or "unnamed", list(arguments.overrides)
        findings.recipe = Recipe(name, plain(config, Path("outputs")), words=words)
    check_versions(findings)
    if findings.devices:  # otherwise torch is broken
        from trainer.cli.checks import first_look, precisions

        if findings.recipe is None:
            precisions.check_speed(findings)
        else:
            first_look.check_recipe(findings, findings.recipe)
    if findings.recipe is None:
        check_host(findings)
    if arguments.words:
        print(json.dumps(findings.facts, indent=2))
    else:
        show(findings)
    return int(bool(findings.facts["problems"]))


def check_versions(findings: Findings) -> None:
    """List the installed versions and the devices, and check that torch can be imported."""
    versions: dict[str, str | None] = {
        "trainer": trainer.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    versions |= {name: version_of(name) for name in _PACKAGES} | {"NVIDIA driver": (driver := nvidia_driver())}
    findings.about("versions", {name: version for name, version in versions.items() if version})
    try:
        import torch

        from trainer.cli.checks import precisions
    except Exception as error:
        findings.problem(f"torch cannot be imported: {type(error).__name__}: {failure.one_line(error)}")
        findings.facts["verdict"] = "No training is possible before `pip install --force-reinstall torch`."
        return
    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "no CUDA"
    findings.facts["machine"]["versions"]["torch"] = f"{torch.__version__} ({build})"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        findings.devices = precisions.devices()
    findings.facts["remarks"] += [" ".join(str(warning.message).split()) for warning in warned]
    if driver and findings.devices[0].type == "cpu":
        reason = "torch was built without CUDA" if cuda is None else "torch finds no GPU that it can use"
        findings.remark(f"There is an NVIDIA driver, but {reason}.")
    findings.about("devices", {str(device): precisions.describe(device) for device in findings.devices})


def check_host(findings: Findings) -> None:
    """List cores for the dataloaders, memory, and disks."""
    cores, memory, shared = machine.cores(), machine.memory(), machine.shared_memory()
    workers = machine.suggested_workers(cores.usable, sum(device.type == "cuda" for device in findings.devices))
    quota = "" if cores.quota is None else f", a quota of {cores.quota:g}"
    host = {
        "dataloaders": f"num_workers={workers} to begin with ({cores.allowed} of {cores.total} cores allowed{quota})",
        "memory": f"{readable(memory.available)} available of {readable(memory.total)}",
    }
    if memory.limit is not None:
        host["memory limit"] = f"{readable(memory.left)} left of {readable(memory.limit)} (control group)"
    if shared is not None and shared[1] < _LOW_SPACE:
        advice = "Dataloader workers use it: start the container with --shm-size=8g or --ipc=host."
        findings.remark(f"{machine.SHARED_MEMORY} has {readable(shared[1])}. {advice}")
    for disk in {disk.folder: disk for disk in (machine.disk(Path()), machine.disk(Path(_RUNS)))}.values():
        space = f"{readable(disk.free)} of {readable(disk.total)} free"
        if disk.problem is not None:
            advice = "Choose another folder for runs: hydra.run.dir=FOLDER."
            findings.problem(f"{disk.folder} cannot be written: {disk.problem} ({space}). {advice}")
        elif disk.free < _LOW_SPACE:
            findings.remark(f"{disk.folder} has {readable(disk.free)} left: checkpoints may not fit.")
        network = f", on a network ({disk.network})" if disk.network else ""
        host[f"disk {disk.folder}"] = f"{space}, {'not ' * (disk.problem is not None)}writable{network}"
    findings.about("host", host)


def nvidia_driver() -> str | None:
    """Return the version of NVIDIA's driver from ``nvidia-smi``, or None."""
    return next(iter(machine.nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")), None)


def show(findings: Findings) -> None:
    """Print the tables, remarks, problems and the verdict; with ``--quiet`` no tables."""
    rows: list[list[str]] = []
    for section, entries in findings.facts["machine"].items():
        if findings.recipe is None or section == "devices":  # the tables of a recipe fill the screen
            rows += [[], *([name, str(text)] for name, text in ({section: ""} | entries).items())]
    for table in (Table("This machine", (), rows[1:]), *findings.tables):
        if table.rows:
            table.show()
    for remark in findings.facts["remarks"]:
        print_line(f"Note: {remark}")
    for problem in findings.facts["problems"]:
        print_line(f"Broken: {problem}", "red")
    if findings.facts["verdict"]:
        print_line(findings.facts["verdict"], "bold")
