"""The one door through which a config becomes objects.

A config is data and may come from somewhere else; a ``_target_`` in it names code to call. So only known
packages may be named, and nothing in them that runs or unpickles what it reads. This keeps honest mistakes
and plain attacks out; it is no sandbox.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.cli.arguments import UsageError
from trainer.errors import did_you_mean

PACKAGES = ("lightning", "recipes", "torch", "torchmetrics", "torchvision", "trainer")
"""Packages a ``_target_`` may name, besides the modules in the working directory and ``allowed_packages``."""

# These run or unpickle what they are given the name of, or start programs.
_REFUSED = (
    "lightning.fabric.cli",
    "lightning.pytorch.cli",
    "torch._",
    "torch.classes",
    "torch.distributed.launch",
    "torch.distributed.run",
    "torch.export.load",
    "torch.hub",
    "torch.jit",
    "torch.load",
    "torch.multiprocessing",
    "torch.ops",
    "torch.package",
    "torch.serialization",
    "torch.utils.cpp_extension",
    "torch.utils.model_zoo",
    "trainer.cli",
)


def build(node: Any, key: str = "", allowed_packages: Iterable[str] = ()) -> Any:
    """The object that ``node`` describes, with plain containers inside; ``_partial_: true`` gives a partial.

    Args:
        node: a plain, resolved dict, list or scalar of a config.
        key: where in the config it stands, for messages.
        allowed_packages: top-level packages that targets may come from, besides `PACKAGES`.

    Raises:
        UsageError: a target that does not exist or is not allowed.
    """
    from hydra.utils import instantiate

    check_targets(node, key, allowed_packages)
    for place, target in targets(node, key):
        locate(target, place, allowed_packages)
    return instantiate(node, _convert_="all") if isinstance(node, (dict, list)) else node


def targets(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The key and the ``_target_`` of every node with one, such as ``("model.net", "torch.nn.Linear")``."""
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield key, node["_target_"]
        for name, child in node.items():
            yield from targets(child, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from targets(child, f"{key}[{index}]")


def check_targets(node: Any, key: str = "", allowed_packages: Iterable[str] = ()) -> None:
    """Refuse targets by name alone: imports nothing.

    Raises:
        UsageError: a target outside the allowed packages, or one that is refused.
    """
    allowed = (*PACKAGES, *allowed_packages)
    for place, target in targets(node, key):
        root = target.partition(".")[0]
        if root not in allowed and not _in_working_directory(root):
            raise UsageError(
                f"{place or 'The config'} asks for {target}, which is neither in {', '.join(allowed)} nor in"
                f" a module of your folder.{did_you_mean(root, allowed)} To allow a package, write"
                f" 'allowed_packages=[{root}]'."
            )
        _refuse_dangerous(target, target, place)


def locate(target: str, key: str = "", allowed_packages: Iterable[str] = ()) -> Any:
    """The class or function called ``target``; imports the modules it is in.

    Raises:
        UsageError: there is none, it cannot be called, or it lives outside the allowed packages.
    """
    first, *names = target.split(".")
    found: Any = _import(first)
    if found is None:
        raise UsageError(f"{key}: there is no {target}: no module {first!r}.")
    path = first
    for name in names:
        if not hasattr(found, name) and hasattr(found, "__path__"):
            _import(f"{path}.{name}")
        if not hasattr(found, name):
            raise UsageError(f"{key}: there is no {target}: {path} has no {name!r}.{did_you_mean(name, dir(found))}")
        found, path = getattr(found, name), f"{path}.{name}"
    if not callable(found):
        raise UsageError(f"{key}: {target} is a {type(found).__name__}, expected a class or a function.")
    # A name can be a detour: torch.os.system is os.system.
    home = getattr(found, "__module__", None) or first
    root = home.partition(".")[0]
    if root not in (*PACKAGES, *allowed_packages) and not _in_working_directory(root):
        raise UsageError(
            f"{key}: {target} comes from {root}, which is not allowed. To allow it, write 'allowed_packages=[{root}]'."
        )
    _refuse_dangerous(f"{home}.{getattr(found, '__qualname__', '')}", target, key)
    return found


def _import(module: str) -> ModuleType | None:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            return None
        raise UsageError(
            f"{module} needs the package {error.name}, which is not installed. What our recipes need:"
            " pip install 'amp-trainer[recipes]'."
        ) from error


def _refuse_dangerous(name: str, target: str, key: str) -> None:
    # torch's own functions are at home in torch._C, so private modules are refused by the name that was
    # written.
    refused = [prefix for prefix in _REFUSED if prefix != "torch._" or name == target]
    if name.rpartition(".")[2] == "load_from_checkpoint" or any(
        name == prefix or name.startswith(prefix if prefix.endswith("_") else f"{prefix}.") for prefix in refused
    ):
        raise UsageError(
            f"{key or 'The config'} asks for {target}, which runs or unpickles what it reads. A config may"
            " not. Write a function or a class of your own that does what you need, and name that."
        )


def _in_working_directory(root: str) -> bool:
    """Whether the top-level module ``root`` is found directly in the working directory."""
    if not root.isidentifier():
        return False
    try:
        spec = importlib.util.find_spec(root)
    except ValueError:  # a module without a spec, such as __main__
        return False
    if spec is None:
        return False
    places = spec.submodule_search_locations or [spec.origin or ""]
    return any(Path(place).parent == Path.cwd() for place in places)
