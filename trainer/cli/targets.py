"""The allowlist of ``_target_`` names in a config, and the lookup of the objects with these names.

A config that the user wrote may name anything, as in Hydra. A config that comes with a checkpoint (``ckpt=RUN``) may be
from another person, so it may only name

1. names that also occur in the configs of the project or on the command line,
2. classes of the modules in `_HOMES` that derive from one of `_BASES`,
3. packages, modules and names in ``allowed_packages``,

and nothing that executes, unpickles or writes its arguments (`_REFUSED`). Names are checked before anything is
imported. Then the object is checked again under the name of the module that defines it, because
``torch.nn.modules.module.torch.os.system`` is ``os.system``. This is not a sandbox: an allowed class may do anything.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from trainer.arguments import describe
from trainer.cli.parsing import UsageError
from trainer.cli.schema import Entry, targets, walk
from trainer.cli.workdir import unresolved_words
from trainer.common import packages
from trainer.errors import did_you_mean

PACKAGES = ("lightning", "recipes", "torch", "torchmetrics", "torchvision", "trainer")
"""Packages with classes for experiments."""

_LIGHTNING = (
    "accelerators", "callbacks", "core", "demos", "loggers", "plugins", "profilers", "strategies", "trainer",
)  # fmt: skip
_HOMES = (
    *("recipes", "torch.nn", "torch.optim", "torchmetrics", "torchvision", "trainer", "lightning.fabric.plugins"),
    *(f"lightning.pytorch.{module}" for module in _LIGHTNING),
)
_BASES = (
    *("torch.nn.Module", "torch.optim.Optimizer", "torch.optim.lr_scheduler.LRScheduler", "torch.utils.data.Dataset"),
    *("lightning.pytorch.Callback", "lightning.pytorch.LightningDataModule", "lightning.pytorch.Trainer"),
    *("lightning.pytorch.accelerators.Accelerator", "lightning.pytorch.loggers.Logger"),
    *(f"lightning.pytorch.plugins.{name}" for name in ("CheckpointIO", "ClusterEnvironment", "LayerSync", "Precision")),
    *("lightning.pytorch.profilers.Profiler", "lightning.pytorch.strategies.Strategy", "trainer.precision.Precision"),
)

_REFUSED = (
    "_pickle", "builtins", "cloudpickle", "code", "ctypes", "dill", "functools", "hydra", "importlib", "io", "joblib",
    "marshal", "multiprocessing", "nt", "numpy.ctypeslib", "numpy.f2py", "numpy.lib", "numpy.testing", "omegaconf",
    "operator", "os", "pickle", "posix", "pty", "runpy", "shelve", "shutil", "socket", "subprocess", "sys", "timeit",
    "urllib", "webbrowser", "lightning.fabric.cli", "lightning.pytorch.cli", "lightning.pytorch.utilities.migration",
    "lightning.pytorch.utilities.upgrade_checkpoint", "torch.classes", "torch.distributed.checkpoint",
    "torch.distributed.elastic", "torch.distributed.launch", "torch.distributed.launcher", "torch.distributed.rpc",
    "torch.distributed.run", "torch.export", "torch.fx", "torch.hub", "torch.jit", "torch.multiprocessing", "torch.ops",
    "torch.package", "torch.serialization", "torch.storage", "torch.testing", "torch.utils.benchmark",
    "torch.utils.bottleneck", "torch.utils.bundled_inputs", "torch.utils.collect_env", "torch.utils.cpp_extension",
    "torch.utils.data.datapipes", "torch.utils.data.graph", "torch.utils.file_baton", "torch.utils.hipify",
    "torch.utils.model_zoo", "torchmetrics.utilities", "torchvision.datasets.LSUN", "torchvision.datasets.LSUNClass",
    "torchvision.datasets.lsun", "torchvision.datasets.utils", "trainer.cli",
)  # fmt: skip
"""Modules and names that execute, unpickle or write their arguments, or start programs."""
_REFUSED_NAMES = (
    "dump", "dumps", "eval", "exec", "load", "loads", "popen", "read_pickle", "save", "savetxt", "savez", "system",
)  # fmt: skip
"""Names of functions that are refused in all modules outside of the working directory."""
_COMPILERS = ("torch.compile", "trainer.callbacks.Compile", "trainer.callbacks.compile.Compile")
"""Targets with ``options`` that can name a compiler to execute."""

_WRITERS = ("callbacks", "logger", "trainer")
"""Config groups with objects that write files."""
_FOLDERS = ("default_root_dir", "dir", "dirpath", "log_dir", "offline_directory", "root_dir", "save_dir")


class Allowlist:
    """Allowlist of ``_target_`` names for the config of one command. Lookups are cached.

    Args:
        packages: packages, modules or names from ``allowed_packages``.
        checkpoint: the file from ``ckpt=`` that the config came with; None for a config that the user wrote.
        named: names in the configs of the project and on the command line.
        keys: keys that the command line sets.
    """

    def __init__(
        self,
        packages: Iterable[str],
        checkpoint: str | None = None,
        named: Iterable[str] = (),
        keys: Iterable[str] = (),
    ) -> None:
        self._packages, self._checkpoint = tuple(packages), checkpoint
        self._named, self._keys = frozenset(named), tuple(keys)
        self._located: dict[str, Any] = {}

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Allowlist:
        """Return the allowlist for a config, with the names of the project if the config came with a checkpoint.

        Args:
            settings: plain containers. `HydraConfig` has to be set.

        Raises:
            UsageError: if ``allowed_packages`` is not a list of names.
        """
        packages, checkpoint = settings["allowed_packages"], settings.get("ckpt")
        if not isinstance(packages, list) or not all(isinstance(package, str) for package in packages):
            raise UsageError(f"allowed_packages is {describe(packages)}, expected a list of packages: [timm].")
        if checkpoint is None:
            return cls(packages)
        hydra = HydraConfig.get()
        words = unresolved_words(hydra.overrides.task)
        folders = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
        files = [file for folder in folders for file in folder.rglob("*.yaml")]
        texts = [*(file.read_text(encoding="utf-8", errors="replace") for file in files), *words]
        named = re.findall(r"_target_['\"]?\s*[:=]\s*['\"]?([\w.]+)", "\n".join(texts))
        return cls(packages, str(checkpoint), named, [word.lstrip("+").partition("=")[0] for word in words])

    def check(self, node: Any, key: str = "") -> None:
        """Check each ``_target_`` in ``node`` by its name. Import nothing.

        Args:
            node: plain containers. A value with an interpolation is not checked.
            key: key of ``node`` in the config, for messages.

        Raises:
            UsageError: if a name is not well-formed or its package is not installed; or if the config came with a
                checkpoint and contains a name, option or folder that is not allowed.
        """
        refused: dict[str, str] = {}
        for entry in walk(node, key):
            if isinstance(entry.value, dict) and "${" not in str(entry.value.get("_target_", "${")):
                target = entry.value["_target_"]
                _check_name(target, entry.key)
                if self._checkpoint is not None:
                    self._check_options(target, entry)
                    if not self._may_name(target, entry.key):
                        refused.setdefault(target, entry.key)
            elif self._checkpoint is not None and isinstance(entry.value, str) and "${" not in entry.value:
                self._check_written(entry)
        self._refuse(refused)

    def locate(self, target: str, key: str = "") -> Any:
        """Return the class or function called ``target``, as in `locate_all`."""
        if target not in self._located:
            self.locate_all({"_target_": target}, key)
        return self._located[target]

    def locate_all(self, node: Any, key: str = "") -> None:
        """Check all ``_target_`` names in ``node``, then import their modules and look them up.

        Args:
            node: plain containers.
            key: key of ``node`` in the config, for messages.

        Raises:
            UsageError: as in `check`, or if a class or function does not exist, is not callable, or is not allowed.
        """
        self.check(node, key)
        refused: dict[str, str] = {}
        for place, target in targets(node, key):
            if target not in self._located:
                self._located[target] = _look_up(target, place)
            if self._checkpoint is not None and not self._may_call(self._located[target], target, place):
                refused.setdefault(target, place)
        self._refuse(refused)

    def _may_name(self, target: str, key: str) -> bool:
        """Return whether the config of a checkpoint may contain ``target``, judging by its name.

        Raises:
            UsageError: if it executes, unpickles or writes its arguments. ``allowed_packages`` cannot allow it.
        """
        root, *parts = target.split(".")
        is_private = any(word.startswith("_" if root in PACKAGES else "__") for word in parts)
        if is_private or _runs_code(target):
            self._refuse_dangerous(target, key)
        if target in self._named or within(target, self._packages):
            return True
        return root in PACKAGES and target.rpartition(".")[2][0].isupper() and not self._is_in_run_folder(root)

    def _may_call(self, value: Any, target: str, key: str) -> bool:
        """Return whether the config of a checkpoint may contain ``target``, after looking up its object."""
        while isinstance(value, partial):
            value = value.func
        inner = getattr(value, "__qualname__", type(value).__qualname__)
        home = f"{getattr(value, '__module__', None) or target.rpartition('.')[0]}.{inner}"
        if _runs_code(home):
            self._refuse_dangerous(target, key)
        if target in self._named or target in self._packages:
            return True
        if within(target, self._packages):
            return home.partition(".")[0] == target.partition(".")[0]
        bases = tuple(_look_up(base, base) for base in _BASES)
        return isinstance(value, type) and within(home, _HOMES) and issubclass(value, bases)

    def _refuse(self, refused: Mapping[str, str]) -> None:
        if refused:
            names = ", ".join(f"{key or 'the config'} is {target}" for target, key in refused.items())
            raise UsageError(
                f"In the config that comes with {self._checkpoint}, {names}. That config may be from another person, so"
                " it may only name classes of torch.nn, torch.optim, lightning, torchmetrics, torchvision, trainer and"
                f" recipes, and names in the configs of this project or on the command line. {self._allow(*refused)}"
            )

    def _allow(self, *targets: str) -> str:
        names = ",".join(dict.fromkeys([*self._packages, *targets]))
        return f"If you trust it, add 'allowed_packages=[{names}]' to the command."

    def _refuse_dangerous(self, target: str, key: str) -> None:
        raise UsageError(
            f"{key or 'The config'} is {target}, which executes, unpickles or writes its arguments: a config that comes"
            f" with a checkpoint may not name it. Use your own config: +recipe=NAME ckpt_path={self._checkpoint}"
        )

    def _check_options(self, target: str, entry: Entry) -> None:
        options = entry.value.get("options")
        if target in _COMPILERS and options is not None and not {"torch", target}.intersection(self._packages):
            raise UsageError(
                f"{entry.key}.options is {describe(options)} in a config that comes with a checkpoint, and can name a"
                f" compiler to execute. {self._allow(target)}"
            )

    def _check_written(self, entry: Entry) -> None:
        """Refuse folders to write to, except in the working directory and in the folder of the run."""
        key, value = entry.key, entry.value
        is_folder = entry.name in _FOLDERS or entry.target.partition(".")[0] in PACKAGES
        is_written = key == "name" or (key.partition(".")[0] in _WRITERS and is_folder)
        if not is_written or within(key, self._keys):
            return
        if _is_outside(f"outputs/{value}" if key == "name" else value):
            expected = "expected a folder in the working directory"
            advice = f"To write there, add it to the command: '{key}={value}'"
            raise UsageError(f"{key} is {value} in a config that comes with a checkpoint, {expected}. {advice}")

    def _is_in_run_folder(self, root: str) -> bool:
        """Return whether the checkpoint is in ``./ROOT``, so that the code in that folder may be another person's."""
        file = Path.cwd() / str(self._checkpoint)
        return any(path.is_relative_to(Path.cwd() / root) for path in (file, file.resolve()))


def _check_name(target: Any, key: str) -> None:
    """Check that ``target`` is a dotted name in an existing package."""
    if not isinstance(target, str) or not all(word.isidentifier() for word in target.split(".")):
        raise UsageError(f"{key}._target_ is {describe(target)}, expected the dotted name of a class or a function.")
    root = target.partition(".")[0]
    if _spec(root) is None:
        modules = [path.stem for path in Path.cwd().iterdir() if path.suffix == ".py" or path.is_dir()]
        reason = f"there is no module {root!r} in {Path.cwd()}, and no such package is installed"
        raise UsageError(f"{key or 'The config'} is {target}, and {reason}.{did_you_mean(root, (*PACKAGES, *modules))}")


def _look_up(target: str, key: str) -> Any:
    path, *names = target.split(".")
    try:
        value: Any = importlib.import_module(path)
        for name in names:
            place = f"{path}.{name}"
            if not hasattr(value, name) and hasattr(value, "__path__") and importlib.util.find_spec(place) is not None:
                importlib.import_module(place)
            if not hasattr(value, name):
                hint = did_you_mean(name, dir(value))
                raise UsageError(f"{key}: there is no {target}: {path} has no {name!r}.{hint}")
            value, path = getattr(value, name), place
    except ModuleNotFoundError as error:
        extra = packages.extra_of(error.name or "")
        advice = packages.pip_install(extra) if extra else "Install it, or correct the import."
        raise UsageError(f"{target} needs the package {error.name}, which is not installed. {advice}") from error
    if not callable(value):
        raise UsageError(f"{key}: {target} is a {type(value).__name__}, expected a class or a function.")
    return value


def within(name: str, prefixes: Iterable[str]) -> bool:
    """Return whether ``name`` is one of ``prefixes``, or in one of them."""
    return any(name == prefix or name.startswith((f"{prefix}.", f"{prefix}[")) for prefix in prefixes)


def _runs_code(name: str) -> bool:
    """Return whether ``name`` is one of `_REFUSED`: it executes, unpickles or writes its arguments."""
    last = name.rpartition(".")[2].lstrip("_")
    spec = _spec(name.partition(".")[0])
    places = [] if spec is None else spec.submodule_search_locations or [spec.origin or ""]
    is_own = any(Path(place).parent == Path.cwd() for place in places)
    return within(name, _REFUSED) or last == "load_from_checkpoint" or (last in _REFUSED_NAMES and not is_own)


def _is_outside(text: str) -> bool:
    """Return whether ``text``, a path or an address, is outside the working directory and the folder of the run."""
    if re.match(r"https?://(?!.*::)", text):
        return False
    if re.match(r"sqlite:///(?!.*[%?:])", text):  # excludes URIs, because SQLite decodes escapes in them
        text = text.removeprefix("sqlite:///")
    path = re.sub(r"^(?:file|local):", "", os.path.expandvars(text), flags=re.IGNORECASE)
    hydra: Any = HydraConfig.get()
    run_folder = OmegaConf.select(hydra, "runtime.output_dir") or "."  # missing before it is created
    try:
        place = (Path.cwd() / Path(path).expanduser()).resolve()
        return "://" in path or not any(place.is_relative_to(Path(folder).resolve()) for folder in (".", run_folder))
    except (RuntimeError, ValueError):  # an unknown home directory, a null byte
        return True


def _spec(root: str) -> ModuleSpec | None:
    """Return the spec of a top-level module without importing it."""
    try:
        return importlib.util.find_spec(root)
    except ValueError:  # a module without a spec, such as __main__
        return None
