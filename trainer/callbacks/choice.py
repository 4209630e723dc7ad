"""Choose modules by name or class."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from trainer.errors import ConfigurationError, did_you_mean
from trainer.walks import has_forward, plain_class, plain_name

Choice = str | type[nn.Module]


def as_choices(modules: Choice | Sequence[Choice]) -> tuple[Choice, ...]:
    """Return one choice, or several, as a tuple.

    Raises:
        ConfigurationError: if there is no choice.
    """
    choices: tuple[Choice, ...] = (modules,) if isinstance(modules, (str, type)) else tuple(modules)
    if not choices:
        raise ConfigurationError(
            "Got modules=[], expected at least one pattern, such as 'net.layer*' or 'TransformerEncoderLayer'."
        )
    return choices


def choose(root: nn.Module, choices: Sequence[Choice], whose: str) -> dict[str, nn.Module]:
    """Return the outermost modules that match, by name. A container that is never called itself stands for its members.

    Args:
        root: the LightningModule, which does not match itself.
        choices: patterns for names or classes, or classes.
        whose: the name of the callback, for the message.

    Raises:
        ConfigurationError: if a choice matches no module.
    """
    chosen: dict[str, nn.Module] = {}
    held: dict[str, set[Choice]] = {}  # choices that containers match, for their members
    matched: set[Choice] = set()
    known: list[str] = []
    for name, module in root.named_modules():
        name = plain_name(name)
        if not name:
            continue
        known += [name, plain_class(module).__name__]
        hits = {choice for choice in choices if _matches(choice, name, module)}
        hits |= held.get(name.rpartition(".")[0], set())
        if not has_forward(module):
            held[name] = hits
            continue
        matched |= hits
        if hits and not any(name == outer or name.startswith(f"{outer}.") for outer in chosen):
            chosen[name] = module
    for choice in choices:
        if choice not in matched:
            written = choice if isinstance(choice, str) else choice.__name__
            raise ConfigurationError(
                f"Got {written!r} among the modules of {whose}, expected a pattern that matches the"
                f" name of a module in {plain_class(root).__name__}, or of its class.{did_you_mean(written, known)}"
            )
    return chosen


def _matches(choice: Choice, name: str, module: nn.Module) -> bool:
    if isinstance(choice, str):
        return fnmatchcase(name, choice) or fnmatchcase(plain_class(module).__name__, choice)
    return isinstance(module, choice)
