"""From the nodes of a config to objects: all of them are checked (`check`), then made (`make`).

Hydra's own ``instantiate`` would resolve interpolations once more, in what was checked and resolved already; here a
node is plain data, and what was checked is what is called.
"""

from __future__ import annotations

import copy
import inspect
import typing
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from trainer.arguments import describe
from trainer.cli.arguments import UsageError
from trainer.cli.failure import is_about_settings
from trainer.cli.processes import environment
from trainer.cli.schema import mistake, of_hint
from trainer.cli.targets import PACKAGES, Allowlist
from trainer.cli.walk import walk
from trainer.errors import did_you_mean

_SPECIAL = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")

_SAFE_LOADS = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": None}
"""Whatever calls ``torch.load``, such as torchvision for pretrained weights, then loads weights only."""


def build(node: Any, key: str = "", allowlist: Allowlist | None = None) -> Any:
    """The object that ``node`` describes: `check`, then `make`."""
    allowlist = allowlist or Allowlist()
    check(node, key, allowlist)
    return make(node, key, allowlist)


def check(node: Any, key: str, allowlist: Allowlist) -> None:
    """Judge every target in ``node``, then find it, and hold its arguments against its signature. Makes nothing.

    Args:
        node: a plain, resolved dict, list or scalar of a config.
        key: where in the config it stands, for messages; "" for a config.
        allowlist: what the config may name.

    Raises:
        UsageError: a target that does not exist or is not allowed, or arguments that it does not take.
    """
    allowlist.locate_all(node, key)
    for entry in walk(node, key):
        if isinstance(entry.value, dict) and "_target_" in entry.value:
            _check_special(entry.value, entry.key)
            _check_arguments(allowlist.locate(entry.value["_target_"]), entry.value, entry.key)


def _check_special(node: dict[str, Any], key: str) -> None:
    for name in ("_partial_", "_recursive_"):
        if not isinstance(node.get(name, False), bool):
            raise UsageError(f"{key}.{name} is {describe(node[name])}, expected true or false.")
    if not isinstance(node.get("_args_", []), list):
        raise UsageError(f"{key}._args_ is {describe(node['_args_'])}, expected a list.")
    if node.get("_convert_", "all") not in ("all", "partial", "object"):
        raise UsageError(
            f"{key}._convert_ is {describe(node['_convert_'])}, expected all: objects get plain dicts and lists. Where"
            " a class wants OmegaConf's containers, have it call OmegaConf.create."
        )


def _check_arguments(found: Any, node: dict[str, Any], key: str) -> None:
    """Hold a node's arguments against the signature of what it names, as far as that has one."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # built in
        return
    parameters, target = signature.parameters, node["_target_"]
    positional = node.get("_args_", [])
    given = {name: value for name, value in node.items() if name not in _SPECIAL}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [name for name in given if not isinstance(name, str) or (name not in known and not takes_any)]
    if unknown:
        raise UsageError(f"{key}: {target} {_has_no(unknown, known, key)}")
    try:
        signature.bind_partial(*positional, **given)
        if not node.get("_partial_", False):
            signature.bind(*positional, **given)
    except TypeError as error:
        raise UsageError(f"{key}: {target}: {error}. It takes {', '.join(known) or 'none'}.") from error
    hints = _hints(found)
    for name, value in given.items():
        is_unjudged = value is None or value != value or isinstance(value, dict)  # a node becomes an object
        if name not in parameters or is_unjudged or value == parameters[name].default:
            continue  # null is often accepted although the annotation lacks it, and the class refuses NaN itself
        if problem := mistake(f"{key}.{name}", value, of_hint(hints.get(name, Any))):
            raise UsageError(problem)


def _has_no(unknown: list[Any], known: list[str], key: str) -> str:
    """That a target has none of the arguments ``unknown``, and how to do without all of them at once.

    An option or a recipe may have set them, for another target.
    """
    some = f"arguments {', '.join(map(repr, unknown))}" if len(unknown) > 1 else f"argument {unknown[0]!r}"
    near = [(name, did_you_mean(str(name), known)) for name in unknown]
    hints = "".join(f"{hint[:-1]} for {name!r}?" if len(unknown) > 1 else hint for name, hint in near if hint)
    without = f" To do without {'them' if len(unknown) > 1 else 'it'}: {' '.join(f'~{key}.{name}' for name in unknown)}"
    misspelt = len(unknown) == 1 and bool(hints)
    return f"has no {some}.{hints} It takes {', '.join(known) or 'none'}.{'' if misspelt else without}"


def _hints(found: Any) -> Mapping[str, Any]:
    function = found.__init__ if isinstance(found, type) else found  # type: ignore[misc]
    try:
        return typing.get_type_hints(function)
    except Exception:  # annotations of others: any name in them may be missing at run time
        return {}


def make(node: Any, key: str, allowlist: Allowlist, finish: Callable[[partial[Any]], Any] | None = None) -> Any:
    """The object that ``node`` describes, with plain containers inside; ``_partial_: true`` gives a partial.

    Args:
        node: as in `check`, which it has passed.
        key: where in the config it stands, for messages.
        allowlist: that `check` was given; it has found the targets already.
        finish: what becomes of each partial; None: it stays.

    Raises:
        UsageError: something of a known package refuses its arguments.
    """
    if isinstance(node, list):
        return [make(child, f"{key}[{index}]", allowlist, finish) for index, child in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if "_target_" not in node:
        return {name: make(child, f"{key}.{name}", allowlist, finish) for name, child in node.items()}
    positional, named = node.get("_args_", []), {k: child for k, child in node.items() if k not in _SPECIAL}
    if node.get("_recursive_", True):
        positional = make(positional, f"{key}._args_", allowlist, finish)
        named = make(named, key, allowlist, finish)
    else:
        positional, named = copy.deepcopy(positional), copy.deepcopy(named)
    target = node["_target_"]
    made = partial(allowlist.locate(target, key), *positional, **named)
    if node.get("_partial_", False):
        _try_optimizer(made, key, target)
        return made if finish is None else finish(made)
    return _call(made, key, target)


def _call(make: Callable[[], Any], key: str, target: str) -> Any:
    """The object. What is not the user's own may load no pickles meanwhile, and is to blame the config, not itself."""
    root = target.partition(".")[0]
    if root not in PACKAGES:
        return make()
    try:
        with nullcontext() if root == "recipes" else environment(_SAFE_LOADS):  # a folder ./recipes is the user's own
            return make()
    except Exception as error:
        is_about_values = isinstance(error, ValueError) or is_about_settings(error)
        if not is_about_values and (root == "recipes" or not isinstance(error, TypeError)):
            raise
        reason = " ".join(str(error).split()).rstrip(".")
        raise UsageError(f"{key}: {target} refuses its arguments: {reason}.") from error


def _try_optimizer(make: partial[Any], key: str, target: str) -> None:
    """Have one of torch's optimizers judge its arguments now; a module makes it only when the data is there."""
    import torch

    if not (isinstance(make.func, type) and issubclass(make.func, torch.optim.Optimizer)):
        return
    if not make.func.__module__.startswith("torch.optim."):
        return
    try:
        make([torch.nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as error:
        nulls = [f"{name}=null" for name, value in make.keywords.items() if value is None]
        given = f", {', '.join(nulls)} among them" if nulls else ""
        raise UsageError(f"{key}: {target} refuses its arguments{given}: {str(error).rstrip('.')}.") from error
    except RuntimeError:  # fused ones want parameters on their device
        return
