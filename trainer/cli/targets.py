"""What a config may name as code to call: the rule for ``_target_``.

A config is data and may come from somebody else; a ``_target_`` in it names code to call. It may name:

1. the parts of known packages that experiments are put together from (`_PARTS`, `_NAMES`);
2. modules in the working directory, but not in the folder of a run that ``ckpt`` names;
3. packages that the user has installed from a folder of their own (`trainer.cli.trusted.is_installed_from_folder`);
4. packages that the user trusts: by ``trainer trust NAME``, by an environment variable, or on the command line.

In all but the user's own folder, what runs, unpickles or writes what it is given is refused by name. A name is judged
as it is written, before anything is imported, and once more by where the thing that it leads to lives.

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

from trainer import packages
from trainer.cli import trusted
from trainer.cli.arguments import UsageError
from trainer.cli.leaves import leaves
from trainer.errors import did_you_mean

PACKAGES = ("lightning", "recipes", "torch", "torchmetrics", "torchvision", "trainer")
"""Packages of which a ``_target_`` may name parts."""

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
    "trainer.compat.deepspeed",
    "trainer.compat.fsdp",
    "trainer.precision",
    "trainer.trainer",
)

# Single names, known for what they are: not judged by where they live, which for torch's own functions says nothing.
_NAMES = frozenset(
    [
        "torch.Generator",
        "torch.profiler.schedule",
        "trainer.DeepSpeedStrategy",
        "trainer.FSDP2Strategy",
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
    for leaf in leaves(node, key):
        if leaf.name == "_target_":
            yield leaf.key.removesuffix("_target_").removesuffix("."), str(leaf.value)


class Allowlist:
    """Whom the config of one command may name. Each name is judged once.

    Args:
        packages: packages, or modules, that the command line allows; those that the user trusts come on top.
        checkpoint: the file that ``ckpt`` names. A folder here that it lies in is a run's: what else is in there may
            have come with it.
    """

    def __init__(self, packages: Iterable[str] = (), checkpoint: str | None = None) -> None:
        self.packages = (*packages, *trusted.packages())
        self._of_runs = _folders_here(checkpoint)
        self._refusals: dict[tuple[str, str], str | None] = {}  # by name and target
        self._located: dict[str, Any] = {}

    def check(self, node: Any, key: str = "") -> None:
        """Judge every target in ``node`` by its name. Imports nothing.

        Args:
            node: plain containers; nodes are found at any depth in them.
            key: where in the config it stands, for messages.

        Raises:
            UsageError: a target that a config may not name.
        """
        for place, target in targets(node, key):
            self.judge(target, place)

    def judge(self, target: str, key: str, name: str = "") -> None:
        """Judge one target by its name. Imports nothing.

        Args:
            target: such as ``torch.nn.Linear``.
            key: of the node that names it, for messages.
            name: what it has turned out to be; "" for as it is written.

        Raises:
            UsageError: a config may not name it.
        """
        name = name or target
        if (name, target) not in self._refusals:
            self._refusals[name, target] = self._refusal(name, target)
        if (refusal := self._refusals[name, target]) is not None:
            raise UsageError(f"{key or 'The config'}{refusal}")

    def locate(self, target: str, key: str = "") -> Any:
        """The class or function called ``target``; imports the modules it is in.

        Raises:
            UsageError: there is none, it cannot be called, or a config may not name it.
        """
        if target not in self._located:
            self._located[target] = self._look_up(target, key)
        return self._located[target]

    def _look_up(self, target: str, key: str) -> Any:
        self.judge(target, key)
        first, *names = target.split(".")
        found: Any = _import(first)
        if found is None:
            raise UsageError(f"{key}: there is no {target}: no module {first!r}.")
        path = module = first  # `module`: the last one on the way, by its own name
        for name in names:
            if not _has(found, name, path) and hasattr(found, "__path__"):
                _import(f"{path}.{name}")
            if not _has(found, name, path):
                near = did_you_mean(name, dir(found))
                raise UsageError(f"{key}: there is no {target}: {path} has no {name!r}.{near}")
            found, path = getattr(found, name), f"{path}.{name}"
            if isinstance(found, ModuleType):
                module = found.__name__
                self._judge_module(module, target, key)
        if not callable(found):
            raise UsageError(f"{key}: {target} is a {type(found).__name__}, expected a class or a function.")
        if target not in _NAMES:
            self._judge_home(found, module, target, key)
        return found

    def _refusal(self, name: str, target: str) -> str | None:
        """Why a config may not name it, behind the key that does; None where it may."""
        root, parts = name.partition(".")[0], name.split(".")
        asks = f" asks for {target}"
        if not all(part.isidentifier() for part in parts):
            return f" asks for {target!r}, expected the dotted name of a class or a function."
        is_trusted, is_known, is_written = within(name, self.packages), root in PACKAGES, name == target
        if root in self._of_runs and not is_trusted:
            return (
                f"{asks}, which is in the folder of the run that ckpt names. A run brings its settings along, and no"
                f" code. If you trust what is in there, write 'allowed_packages=[{root}]' on the command line."
            )
        is_own = not is_trusted and not is_known and _in_working_directory(root)
        if (
            parts[-1] == "load_from_checkpoint"  # of a user's own module, too
            or _is_private(parts, is_known and not is_trusted, is_written)
            or (not is_own and _runs_code(name, is_written))
        ):
            return (
                f"{asks}, which runs or unpickles what it reads, or is none of a config's business. A config may not."
                " Write a function or a class of your own that does what you need, and name that."
            )
        if is_own or is_trusted or (not is_known and trusted.is_installed_from_folder(root)):
            return None
        if not is_known:
            return self._unknown(root, target, is_written)
        if within(name, _PARTS) or (is_written and (within(name, _NAMES) or _leads_to_part(name))):
            return None
        known = [part for part in sorted({*_PARTS, *_NAMES}) if part.startswith(f"{root}.")]
        return (
            f"{asks}, which is not among what a config may use of {root}.{did_you_mean(name, known)} A class or a"
            f" function of your own may; or, to allow it, write 'allowed_packages=[{name.rpartition('.')[0]}]' on the"
            " command line."
        )

    def _unknown(self, root: str, target: str, is_written: bool) -> str:
        if is_written and _spec(root) is None:
            own = [path.stem for path in Path.cwd().iterdir() if path.suffix == ".py" or path.is_dir()]
            return (
                f" asks for {target}, and there is no module {root!r}: no {root}.py in this folder, {Path.cwd()}, and"
                f" no installed package of that name.{did_you_mean(root, (*PACKAGES, *own))}"
            )
        near = did_you_mean(root, (*PACKAGES, *self.packages)) if is_written else ""
        what = f" asks for {target}, which is of" if is_written else f": {target} comes from"
        return (
            f"{what} the package {root}: neither a module of your folder nor a package that you trust.{near} To trust"
            f" it, from now on, in every config: python -m trainer trust {root}"
        )

    def _judge_module(self, module: str, target: str, key: str) -> None:
        """A name can be a detour: ``torch.nn.modules.linear.torch`` is torch, ``torch.os`` is os."""
        root = module.partition(".")[0]
        is_judged_by_home = root in PACKAGES and not within(module, self.packages)
        if not is_judged_by_home and not within(module, self.packages) and not _in_working_directory(root):
            self.judge(target, key, module)

    def _judge_home(self, found: Any, module: str, target: str, key: str) -> None:
        while isinstance(found, partial):
            found = found.func
        home = getattr(found, "__module__", None) or module
        inner = getattr(found, "__qualname__", type(found).__qualname__)
        name = f"{home}.{inner}".replace(".<locals>", "").replace("<lambda>", "function")
        is_torch_builtin = home == "torch" or home.startswith("torch._C") or home == "torch._jit_internal"
        if is_torch_builtin and module == "torch.nn.functional":
            return  # its functions live in all sorts of places
        self.judge(target, key, name)
        if home.partition(".")[0] not in PACKAGES or within(name, self.packages) or within(home, ("recipes",)):
            return
        of_class = "." in inner and "<locals>" not in inner
        makes_one = isinstance(found, type) or (of_class and inner.rpartition(".")[2].startswith("from_"))
        if not makes_one and (of_class or within(home, _CLASSES_ONLY)):
            raise UsageError(
                f"{key}: {target} is a {'method' if of_class else type(found).__name__}, expected a class. Write a"
                " function of your own that calls it, and name that."
            )


def _is_private(parts: list[str], is_known: bool, is_written: bool) -> bool:
    """Whether a name as it is written has a part that is nobody's business, such as ``__globals__``."""
    return is_written and any(part.startswith("_" if is_known else "__") for part in parts)


def _runs_code(name: str, is_written: bool) -> bool:
    """Whether ``name`` is among what runs, unpickles or writes what it is given, in whatever package."""
    refused = [prefix for prefix in _REFUSED if prefix != "torch._" or is_written]
    return name.rpartition(".")[2] in _REFUSED_NAMES or any(
        name.startswith(prefix) if prefix.endswith("_") else within(name, (prefix,)) for prefix in refused
    )


def is_refused(name: str) -> bool:
    """Whether no config may name ``name``, whoever trusts it."""
    return _runs_code(name, is_written=True)


def _leads_to_part(name: str) -> bool:
    """Whether ``name`` may be short for one in `_PARTS`: its home decides. No module is imported for it."""
    return name.count(".") == 1 and name.startswith(("lightning.", "trainer.")) and name.rpartition(".")[2][0].isupper()


def _folders_here(checkpoint: str | None) -> set[str]:
    """The top-level folders of the working directory that a checkpoint is in, as it is written and by where it lies."""
    if checkpoint is None:
        return set()
    found, here = Path(checkpoint).absolute(), Path.cwd()
    places = [(found, here), (found.resolve(), here.resolve())]
    return {file.relative_to(cwd).parts[0] for file, cwd in places if file.is_relative_to(cwd) and file != cwd}


def within(name: str, prefixes: Iterable[str]) -> bool:
    """Whether ``name`` is one of ``prefixes``, or in one of them."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _import(module: str) -> ModuleType | None:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and within(module, (error.name,)):
            return None
        raise _needs(module, error) from error


def _has(found: Any, name: str, path: str) -> bool:
    """Return whether ``found`` has an attribute ``name``. A package may import the attribute only now."""
    try:
        return hasattr(found, name)
    except ModuleNotFoundError as error:
        raise _needs(f"{path}.{name}", error) from error


def _needs(target: str, error: ModuleNotFoundError) -> UsageError:
    extra = packages.extra_of(error.name or "")
    advice = packages.pip_install(extra) if extra else "Install it, or correct the import."
    return UsageError(f"{target} needs the package {error.name}, which is not installed. {advice}")


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
