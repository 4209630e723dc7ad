"""Installed packages: which code is theirs, which features need them, how to install them. Imports no torch."""

from __future__ import annotations

import shlex
import sys
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

EXTRAS: dict[str, dict[str, str]] = {
    "recipes": {"torchvision": "torchvision", "sklearn": "scikit-learn", "PIL": "pillow"},
    "report": {"jinja2": "jinja2", "matplotlib": "matplotlib"},
    "plots": {"matplotlib": "matplotlib"},
    "tensorboard": {"tensorboard": "tensorboard"},
    "slurm": {"hydra_plugins.hydra_submitit_launcher": "hydra-submitit-launcher", "submitit": "submitit"},
    "optuna": {"optuna": "optuna", "sqlalchemy": "sqlalchemy"},
    "safetensors": {"safetensors": "safetensors"},
    "wandb": {"wandb": "wandb"},
    "mlflow": {"mlflow": "mlflow-skinny", "sqlalchemy": "sqlalchemy", "alembic": "alembic", "filelock": "filelock"},
    "fp8": {"torchao": "torchao"},
    "deepspeed": {"deepspeed": "deepspeed"},
    "ray": {"ray": "ray[train,tune]"},
    "export": {"onnx": "onnx", "onnxscript": "onnxscript", "onnxruntime": "onnxruntime"},
    "finetune": {
        "transformers": "transformers", "peft": "peft", "safetensors": "safetensors", "tokenizers": "tokenizers",
    },
}  # fmt: skip
"""Packages of each extra of ``pyproject.toml``: the name to import, and the name on the package index."""

_NEEDED = (
    "hydra", "lightning", "lightning_utilities", "numpy", "omegaconf", "pytorch_lightning", "rich", "torch",
    "torchmetrics",
)  # fmt: skip
_INSTALLED = {"site-packages", "dist-packages"}


@cache
def is_users_file(file: str) -> bool:
    """Return whether a file of code is the user's: not part of Python, of an installed package, or of this one."""
    return _INSTALLED.isdisjoint(Path(file).parts) and not is_frameworks_file(file)


@cache
def is_frameworks_file(file: str) -> bool:
    """Return whether a file of code belongs to Python, to this package, or to a package that this one needs."""
    path = Path(file).resolve()
    python = Path(sysconfig.get_path("stdlib")).resolve()
    is_python = _INSTALLED.isdisjoint(Path(file).parts) and path.is_relative_to(python)
    return is_python or any(path.is_relative_to(folder) for folder in _packages())


@cache
def is_users_module(name: str) -> bool:
    """Return whether a module is the user's, as in `is_users_file`."""
    root = name.partition(".")[0]
    module = sys.modules.get(root)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return root not in ("trainer", *sys.stdlib_module_names) and (file is None or is_users_file(file))


@cache
def _packages() -> tuple[Path, ...]:
    """Return the folders of this package, and of those that it needs. They may be checkouts of their sources."""
    specs = [find_spec(name) for name in _NEEDED]
    needed = [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin]
    return tuple(folder.resolve() for folder in (Path(__file__).parents[1], *needed))


def is_installed(module: str) -> bool:
    """Return whether ``module`` can be imported. Imports nothing but its parent packages."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def pip_install(extra: str) -> str:
    """Return the command that installs the packages of ``extra``, such as ``pip install torchao``."""
    return shlex.join(["pip", "install", *EXTRAS[extra].values()])


def missing(extra: str, *modules: str) -> str | None:
    """Return the end of a sentence that begins with "X needs", or None if nothing is missing.

    Args:
        extra: a key of ``EXTRAS``.
        modules: the modules of that extra that are needed. Default: all.
    """
    for module in modules or EXTRAS[extra]:
        if not is_installed(module):
            return f"{module.partition('.')[0]}, which is not installed: {pip_install(extra)}"
    return None


def extra_of(module: str) -> str | None:
    """Return the first extra that contains the top-level package of ``module``, or None."""
    package = module.partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if package in modules), None)
