"""Build objects from the nodes of a config: check all nodes (`check`), then build them (`make`).

``hydra.utils.instantiate`` is not used, because it would resolve interpolations again after the check. Here, a node is
plain, resolved data, so that exactly the checked names and arguments are used.

Hydra 1.4's ``instantiate`` takes the allowed names (``_execution_whitelist_``) and no longer resolves everything first.
Once 1.4 is the oldest supported version, the recursion in `make` goes. `check` (arguments are checked before anything
is built), ``finish`` and the keys in errors stay.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from shlex import quote
from typing import Any

from trainer.arguments import NUMBER, SWITCH, WHOLE, Kind
from trainer.cli.failure import is_about_settings
from trainer.cli.parsing import UsageError
from trainer.cli.processes import environment
from trainer.cli.schema import TEXT_ADVICE, check_settings, mistake, walk
from trainer.cli.targets import PACKAGES, Allowlist
from trainer.errors import did_you_mean

_LIST = Kind("a list", lambda value: isinstance(value, list))
_SPECIAL = {"_partial_": SWITCH, "_recursive_": SWITCH, "_args_": (_LIST,), "_convert_": ("all", "partial", "object")}
"""Accepted values of Hydra's keys. Objects always get plain containers."""
_HYDRA_KEYS = ("_target_", *_SPECIAL)

_NUMBERS = {"bool": SWITCH, "int": (WHOLE,), "float": (NUMBER,)}
"""Accepted values of arguments by their annotation. Only text is checked: other values are left to the class."""

_SAFE_LOADS = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": None}
"""Environment variables that make every ``torch.load`` use ``weights_only=True``, also in code of torchvision."""


def check(node: Any, key: str, allowlist: Allowlist) -> None:
    """Check each ``_target_`` in ``node``, and its arguments against its signature. Build nothing.

    Args:
        node: a plain, resolved dict, list or scalar of a config.
        key: key of ``node`` in the config, for messages; "" for the config itself.
        allowlist: the names that the config may call.

    Raises:
        UsageError: if a target does not exist or is not allowed, or does not accept its arguments.
    """
    allowlist.locate_all(node, key)
    for entry in walk(node, key):
        if isinstance(entry.value, dict) and "_target_" in entry.value:
            _check_arguments(allowlist.locate(entry.value["_target_"]), entry.value, entry.key)


def _check_arguments(target: Any, node: dict[str, Any], key: str) -> None:
    """Check Hydra's keys in a node, and its arguments against the signature of ``target``, if it has one."""
    check_settings(key, {name: value for name, value in node.items() if name in _SPECIAL}, _SPECIAL)
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # a built-in function
        return
    parameters, target = signature.parameters, node["_target_"]
    positional = node.get("_args_", [])
    given = {name: value for name, value in node.items() if name not in _HYDRA_KEYS}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [name for name in given if not isinstance(name, str) or (name not in known and not takes_any)]
    if unknown:  # a recipe or an option may have set them for another target
        hints = "".join(did_you_mean(str(name), known) for name in unknown)
        removal = f"To remove it: {' '.join(f'~{key}.{name}' for name in unknown)}"
        names = f"{', '.join(map(repr, unknown))}.{hints} Its arguments: {', '.join(known) or 'none'}"
        raise UsageError(f"{key}: {target} has no argument {names}. {removal}")
    try:
        signature.bind_partial(*positional, **given)
        if not node.get("_partial_", False):
            signature.bind(*positional, **given)
    except TypeError as error:
        missing = re.fullmatch(r"missing a required argument: '(\w+)'", str(error))
        value = f"${{{missing[1]}}}" if missing and missing[1] in ("optimizer", "scheduler") else "VALUE"
        advice = f" Set it: {quote(f'+{key}.{missing[1]}={value}')}" if missing else ""
        raise UsageError(f"{key}: {target}: {error}. Its arguments: {', '.join(known) or 'none'}.{advice}") from error
    for name, value in given.items():
        annotation = parameters[name].annotation if isinstance(value, str) and name in parameters else None
        accepts = _NUMBERS.get(inspect.formatannotation(annotation).strip("'").removesuffix(" | None"), ())
        if problem := mistake(f"{key}.{name}", value, accepts):  # such as an environment variable
            raise UsageError(problem)


def make(node: Any, key: str, allowlist: Allowlist, finish: Callable[[partial[Any]], Any] | None = None) -> Any:
    """Return the object that ``node`` describes, or a partial if the node has ``_partial_: true``.

    Containers among the arguments are plain dicts and lists.

    Args:
        node: a node that passed `check`.
        key: key of ``node`` in the config, for messages.
        allowlist: the one that was passed to `check`. It caches the targets.
        finish: called with each partial; returns the object to use instead. By default, the partial is used.

    Raises:
        UsageError: if a class or function of a known package rejects its arguments.
    """
    if isinstance(node, list):
        return [make(child, f"{key}[{index}]", allowlist, finish) for index, child in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if "_target_" not in node:
        return {name: make(child, f"{key}.{name}", allowlist, finish) for name, child in node.items()}
    positional, named = node.get("_args_", []), {k: child for k, child in node.items() if k not in _HYDRA_KEYS}
    if node.get("_recursive_", True):
        positional = make(positional, f"{key}._args_", allowlist, finish)
        named = make(named, key, allowlist, finish)
    else:
        positional, named = copy.deepcopy(positional), copy.deepcopy(named)
    target = node["_target_"]
    call = partial(allowlist.locate(target, key), *positional, **named)
    if node.get("_partial_", False):
        _try_optimizer(call, key, target)
        return call if finish is None else finish(call)
    return _call(call, key, target)


def _call(make: partial[Any], key: str, target: str) -> Any:
    """Return ``make()``. If a known package raises an error about its arguments, raise a `UsageError` with the key.

    During the call, ``torch.load`` uses ``weights_only=True``, except in ``recipes`` and the user's code.
    """
    root = target.partition(".")[0]
    if root not in PACKAGES:
        return make()
    try:
        with nullcontext() if root == "recipes" else environment(_SAFE_LOADS):  # ./recipes is code of the user
            return make()
    except Exception as error:
        is_about_values = isinstance(error, ValueError) or is_about_settings(error)
        if not is_about_values and (root == "recipes" or not isinstance(error, TypeError)):
            raise
        reason, values = " ".join(str(error).split()).rstrip("."), make.keywords.values()
        nulls = [name for name, value in make.keywords.items() if value is None and isinstance(error, TypeError)]
        given = f" with {', '.join(nulls)}=null" if nulls else ""
        advice = TEXT_ADVICE if isinstance(error, TypeError) and any(isinstance(value, str) for value in values) else ""
        raise UsageError(f"{key}: {target} rejects its arguments{given}: {reason}.{advice}") from error


def _try_optimizer(make: partial[Any], key: str, target: str) -> None:
    """Check the arguments of a torch optimizer by constructing one, because the module constructs its own later."""
    import torch

    is_class = isinstance(make.func, type) and issubclass(make.func, torch.optim.Optimizer)
    if is_class and make.func.__module__.startswith("torch.optim."):
        with suppress(RuntimeError):  # fused optimizers require parameters on a device that they support
            _call(partial(make, [torch.nn.Parameter(torch.zeros(1))]), key, target)
