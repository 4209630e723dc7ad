"""What a config may name as code to call: the allowlist of ``_target_``.

A config is data and may come from somewhere else; a ``_target_`` in it names code to call. So it may name the parts of
known packages that experiments are put together from, the modules in the working directory, and packages that the user
names on the command line; and in none of them what runs, unpickles or writes what it is given. A name is judged as it
is written, before anything is imported, and once more by where the thing it leads to really lives.

This keeps honest mistakes and configs of strangers out. It is no sandbox: what a permitted class does is its own.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.cli.arguments import UsageError
from trainer.errors import did_you_mean

PACKAGES = ("lightning", "recipes", "torch", "torchmetrics", "torchvision", "trainer")
"""Packages a ``_target_`` may name, besides the modules in the working directory and ``allowed_packages``."""

# What of them: modules with everything in them, and single names.
_PARTS = (
    "lightning.fabric.accelerators",
    "lightning.fabric.loggers",
    "lightning.fabric.plugins",
    "lightning.fabric.strategies",
    "lightning.pytorch.accelerators",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.core.datamodule",
    "lightning.pytorch.core.module",
    "lightning.pytorch.demos.boring_classes",
    "lightning.pytorch.loggers",
    "lightning.pytorch.plugins",
    "lightning.pytorch.profilers",
    "lightning.pytorch.strategies",
    "lightning.pytorch.trainer.trainer",
    "lightning.pytorch.tuner",
    "lightning.pytorch.utilities.combined_loader",
    "recipes",
    "torch.amp",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributions",
    "torch.nn",
    "torch.optim",
    "torch.profiler.profiler.schedule",
    "torch.utils.data",
    "torchmetrics",
    "torchvision.datasets",
    "torchvision.models",
    "torchvision.ops",
    "torchvision.transforms",
    "torchvision.tv_tensors",
    "trainer.callbacks",
    "trainer.default_logger",
    "trainer.precision",
    "trainer.trainer",
)

# Single names, known for what they are: not judged by where they live, which for torch's own functions says nothing.
_NAMES = frozenset(
    [
        "torch.Generator",
        "torch.profiler.schedule",
        "trainer.Trainer",
        *(
            f"{package}.{name}"
            for package in ("lightning", "lightning.pytorch")
            for name in ("Callback", "LightningDataModule", "LightningModule", "Trainer")
        ),
        *(
            f"torch.{name}"
            for name in (
                *("arange", "as_tensor", "autocast", "compile", "device", "empty", "eye", "full", "linspace"),
                *("logspace", "manual_seed", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros"),
            )
        ),
    ]
)

# Of these parts classes only: their functions fetch, unpack and write.
_CLASSES_ONLY = ("lightning", "torchvision.datasets", "trainer")

# These run or unpickle what they are given the name of, start programs, or write where they are told to.
_REFUSED = (
    "_pickle",
    "builtins",
    "cloudpickle",
    "code",
    "ctypes",
    "dill",
    "functools",
    "hydra",
    "importlib",
    "io",
    "joblib",
    "lightning.fabric.cli",
    "lightning.pytorch.cli",
    "marshal",
    "multiprocessing",
    "numpy.ctypeslib",
    "numpy.f2py",
    "numpy.lib",
    "numpy.testing",
    "omegaconf",
    "operator",
    "os",
    "pickle",
    "posix",
    "pty",
    "runpy",
    "shelve",
    "shutil",
    "socket",
    "subprocess",
    "sys",
    "timeit",
    "torch._",
    "torch.classes",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic",
    "torch.distributed.launch",
    "torch.distributed.launcher",
    "torch.distributed.rpc",
    "torch.distributed.run",
    "torch.export",
    "torch.fx",
    "torch.hub",
    "torch.jit",
    "torch.multiprocessing",
    "torch.ops",
    "torch.package",
    "torch.serialization",
    "torch.storage",
    "torch.testing",
    "torch.utils.benchmark",
    "torch.utils.bottleneck",
    "torch.utils.bundled_inputs",
    "torch.utils.collect_env",
    "torch.utils.cpp_extension",
    "torch.utils.data.datapipes",
    "torch.utils.data.graph",
    "torch.utils.file_baton",
    "torch.utils.hipify",
    "torch.utils.model_zoo",
    "torchmetrics.utilities",
    "torchvision.datasets.LSUN",
    "torchvision.datasets.LSUNClass",
    "torchvision.datasets.lsun",
    "torchvision.datasets.utils",
    "trainer.cli",
    "trainer.compat",
    "urllib",
)

# Refused in whatever package that is not the user's own folder.
_REFUSED_NAMES = frozenset(
    ("dump", "dumps", "eval", "exec", "load", "loads", "popen", "read_pickle", "save", "savetxt", "savez", "system")
)


def targets(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The key and the ``_target_`` of every node with one, such as ``("model.net", "torch.nn.Linear")``."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield key, str(node["_target_"])
        for name, child in node.items():
            yield from targets(child, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from targets(child, f"{key}[{index}]")


def check_targets(node: Any, key: str = "", allowed_packages: Iterable[str] = ()) -> None:
    """Refuse targets by name alone: imports nothing.

    Args:
        node: plain containers; nodes are found at any depth in them.
        key: where in the config it stands, for messages.
        allowed_packages: packages, or modules, that targets may come from, besides `PACKAGES`.

    Raises:
        UsageError: a target outside the allowed packages, or one that is refused.
    """
    for place, target in targets(node, key):
        _check_name(target, target, place, tuple(allowed_packages))


def locate(target: str, key: str = "", allowed_packages: Iterable[str] = ()) -> Any:
    """The class or function called ``target``; imports the modules it is in.

    Raises:
        UsageError: there is none, it cannot be called, or it lives outside the allowed packages.
    """
    allowed = tuple(allowed_packages)
    _check_name(target, target, key, allowed)
    first, *names = target.split(".")
    found: Any = _import(first)
    if found is None:
        raise UsageError(f"{key}: there is no {target}: no module {first!r}.")
    path = module = first  # `module`: the last one on the way, by its own name
    for name in names:
        if not hasattr(found, name) and hasattr(found, "__path__"):
            _import(f"{path}.{name}")
        if not hasattr(found, name):
            raise UsageError(f"{key}: there is no {target}: {path} has no {name!r}.{did_you_mean(name, dir(found))}")
        found, path = getattr(found, name), f"{path}.{name}"
        if isinstance(found, ModuleType):
            module = found.__name__
            _check_module(module, target, key, allowed)
    if not callable(found):
        raise UsageError(f"{key}: {target} is a {type(found).__name__}, expected a class or a function.")
    if target not in _NAMES:
        _check_home(found, module, target, key, allowed)
    return found


def _check_name(name: str, target: str, key: str, allowed: tuple[str, ...]) -> None:
    """Judge ``name``, which is the ``target`` of the config or what that turns out to be."""
    root, parts = name.partition(".")[0], name.split(".")
    where = key or "The config"
    if not all(part.isidentifier() for part in parts):
        raise UsageError(f"{where} asks for {target!r}, expected the dotted name of a class or a function.")
    named = within(name, allowed)
    own = not named and root not in PACKAGES and _in_working_directory(root)
    is_written = name == target
    private = any(part.startswith("_") if root in PACKAGES and not named else part.startswith("__") for part in parts)
    refused = [prefix for prefix in _REFUSED if prefix != "torch._" or is_written]
    if (
        parts[-1] == "load_from_checkpoint"
        or (not own and parts[-1] in _REFUSED_NAMES)
        or (not own and any(name.startswith(r) if r.endswith("_") else within(name, (r,)) for r in refused))
        or (is_written and private)
    ):
        raise UsageError(
            f"{where} asks for {target}, which runs or unpickles what it reads, or is none of a config's business."
            " A config may not. Write a function or a class of your own that does what you need, and name that."
        )
    if own or named:
        return
    if root not in PACKAGES:
        if is_written and _spec(root) is None:
            own_names = [path.stem for path in Path.cwd().iterdir() if path.suffix == ".py" or path.is_dir()]
            raise UsageError(
                f"{where} asks for {target}, and there is no module {root!r}: no {root}.py in this folder,"
                f" {Path.cwd()}, and no installed package of that name.{did_you_mean(root, (*PACKAGES, *own_names))}"
            )
        what = (
            f"{where} asks for {target}, which is" if is_written else f"{where}: {target} comes from {root}, which is"
        )
        raise UsageError(
            f"{what} neither in {', '.join((*PACKAGES, *allowed))} nor in a module of your"
            f" folder.{did_you_mean(root, (*PACKAGES, *allowed)) if is_written else ''} To allow a package, write"
            f" 'allowed_packages=[{root}]' on the command line."
        )
    if not within(name, _PARTS) and not (is_written and (within(name, _NAMES) or _leads_to_part(name))):
        parent = name.rpartition(".")[0]
        known = sorted({*(part for part in _PARTS if part.startswith(f"{root}.")), *_NAMES})
        raise UsageError(
            f"{where} asks for {target}, which is not among what a config may use of {root}."
            f"{did_you_mean(name, [part for part in known if part.startswith(f'{root}.')])} A class or a function of"
            f" your own may; or, to allow it, write 'allowed_packages=[{parent}]' on the command line."
        )


def _leads_to_part(name: str) -> bool:
    """Whether ``name`` may be short for one in `_PARTS`: its home decides. No module is imported for it."""
    return name.count(".") == 1 and name.startswith(("lightning.", "trainer.")) and name.rpartition(".")[2][0].isupper()


def _check_module(module: str, target: str, key: str, allowed: tuple[str, ...]) -> None:
    """A name can be a detour: ``torch.nn.modules.linear.torch`` is torch, ``torch.os`` is os."""
    if module.partition(".")[0] in PACKAGES and not within(module, allowed):
        return  # what is found there is judged by where it lives
    if not within(module, allowed) and not _in_working_directory(module.partition(".")[0]):
        _check_name(module, target, key, allowed)


def _check_home(found: Any, module: str, target: str, key: str, allowed: tuple[str, ...]) -> None:
    while isinstance(found, partial):
        found = found.func
    home = getattr(found, "__module__", None) or module
    inner = getattr(found, "__qualname__", type(found).__qualname__)
    name = f"{home}.{inner}".replace(".<locals>", "").replace("<lambda>", "function")
    is_torch_builtin = home == "torch" or home.startswith("torch._C") or home == "torch._jit_internal"
    if is_torch_builtin and module == "torch.nn.functional":
        return  # its functions live in all sorts of places
    _check_name(name, target, key, allowed)
    if home.partition(".")[0] not in PACKAGES or within(name, allowed) or within(home, ("recipes",)):
        return
    of_class = "." in inner and "<locals>" not in inner
    makes_one = isinstance(found, type) or (of_class and inner.rpartition(".")[2].startswith("from_"))
    if not makes_one and (of_class or within(home, _CLASSES_ONLY)):
        raise UsageError(
            f"{key}: {target} is a {'method' if of_class else type(found).__name__}, expected a class. Write a"
            " function of your own that calls it, and name that."
        )


def within(name: str, prefixes: Iterable[str]) -> bool:
    """Whether ``name`` is one of ``prefixes``, or in one of them."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _import(module: str) -> ModuleType | None:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and within(module, (error.name,)):
            return None
        ours = module.partition(".")[0] in PACKAGES
        raise UsageError(
            f"{module} needs the package {error.name}, which is not installed."
            + (
                " What our recipes need: pip install 'amp-trainer[recipes]'."
                if ours
                else " Install it, or mend the import."
            )
        ) from error


def _in_working_directory(root: str) -> bool:
    """Whether the top-level module ``root`` is found directly in the working directory."""
    spec = _spec(root) if root.isidentifier() else None
    if spec is None:
        return False
    places = spec.submodule_search_locations or [spec.origin or ""]
    return any(Path(place).parent == Path.cwd() for place in places)


def _spec(root: str) -> ModuleSpec | None:
    """Where the top-level module ``root`` is; nothing of it is imported."""
    try:
        return importlib.util.find_spec(root)
    except ValueError:  # a module without a spec, such as __main__
        return None
