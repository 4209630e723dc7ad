"""A module gets weights that another has learned: those that belong together are found by their names and shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer.checkpoint.weights import read
from trainer.errors import ConfigurationError, some
from trainer.record.find_checkpoint import find_weights
from trainer.walks import plain_name

if TYPE_CHECKING:
    from trainer.checkpoint.shards import Template

_SHOWN = 4  # names of each kind


@dataclass(frozen=True)
class LoadedWeights:
    """What of a file has got into a module. As text: in words, one line for each kind of difference.

    Attributes:
        path: the file or folder.
        loaded: names of the module's parameters and buffers that were loaded, tied ones included.
        missing: names of those that the file does not have; they are as they were.
        differing: those of which the file has something else, by name, with what it is, such as ``"(10, 64) in the
            file and (257, 64) in the module"``; they are as they were.
        unused: names in the file of what the module does not have.
        prefixes: what names begin with in the file, and in the module, before they are the same; ``("", "")`` where
            they are.
        converted: how many tensors were converted, by ``"float16 to float32"``.
        parameters: how many numbers were loaded into the module's parameters, and how many there are.
    """

    path: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    differing: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    prefixes: tuple[str, str] = ("", "")
    converted: Mapping[str, int] = field(default_factory=dict)
    parameters: tuple[int, int] = (0, 0)

    @property
    def complete(self) -> bool:
        """Whether the module has got all that it has; there may be more in the file."""
        return not self.missing and not self.differing

    @property
    def facts(self) -> dict[str, Any]:
        """What ``run.json`` says of it."""
        return {
            "path": self.path,
            "tensors": [len(self.loaded), len(self.loaded) + len(self.missing) + len(self.differing)],
            "parameters": list(self.parameters),
            "missing": list(self.missing),
            "differing": dict(self.differing),
            "unused": list(self.unused),
            "prefixes": list(self.prefixes),
        }

    def __str__(self) -> str:
        numbers, of = self.parameters
        tensors = len(self.loaded) + len(self.missing) + len(self.differing)
        lines = [
            f"Weights from {self.path}: {len(self.loaded)} of {tensors} tensors, {numbers:,} of {of:,} parameters."
        ]
        in_file, in_module = self.prefixes
        if in_file and in_module:
            lines.append(f"Names in the file begin with {in_file!r} where those of the module have {in_module!r}.")
        elif in_file:
            lines.append(f"Names in the file begin with {in_file!r}, which those of the module do not.")
        elif in_module:
            lines.append(f"Names in the module begin with {in_module!r}, which those of the file do not.")
        if self.converted:
            lines.append(f"Converted: {', '.join(f'{count} from {what}' for what, count in self.converted.items())}.")
        if self.differing:
            shown = [f"{name} is {what}" for name, what in self.differing.items()]
            lines.append(f"Left as they were, because they differ: {some(shown, _SHOWN, '; ')}.")
        if self.missing:
            lines.append(f"Left as they were, because the file does not have them: {some(self.missing, _SHOWN)}.")
        if self.unused:
            lines.append(f"Not used, because the module does not have them: {some(self.unused, _SHOWN)}.")
        return "\n  ".join(lines)


def load_weights(module: nn.Module, path: str | Path, weights_only: bool | None = None) -> LoadedWeights:
    """Load weights, and nothing else, into a module: parameters and buffers that have the same name and shape.

    Names may differ by what they begin with, such as ``"model."``. What torch.compile puts into them does not count.
    Values are converted to the dtype that the module has. What is not loaded stays as it is, and
    the result says what and why. ``on_load_checkpoint`` is not called. Of a run with ``WeightAveraging`` the checkpoint
    has the average.

    For modules that make their parameters in ``configure_model``, or on the meta device: ``Trainer.fit(weights=...)``.

    Args:
        module: the module, such as a LightningModule.
        path: a checkpoint, file or folder; the folder of a run, for its best checkpoint, else the last; a state dict
            that ``torch.save`` has written, alone or under ``state_dict``, ``model_state_dict`` or ``model``; a file
            of safetensors.
        weights_only: False to read a file that holds more than tensors and plain containers, which may run any code:
            for files of your own.

    Raises:
        ConfigurationError: there is no such file, or nothing in it belongs to the module, or the module has no memory.
        CheckpointError: it is damaged, or holds no weights.
        UnsafeCheckpointError: it holds more than tensors and plain containers.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ConfigurationError(
            f"Got a {type(module).__name__} with parameters on the meta device, which have no memory. Make them on"
            " another one; or have a fit load the weights, when it has given them memory: Trainer.fit(weights=PATH)."
        )
    found = find_weights(path)

    def load(state: dict[str, Any], strict: bool) -> None:
        module.load_state_dict(state["state_dict"], strict=strict)

    return load_into(module, found, load, weights_only)


def load_into(
    module: nn.Module,
    file: Path,
    load: Callable[[dict[str, Any], bool], None],
    weights_only: bool | None = None,
    template: Template | None = None,
) -> LoadedWeights:
    """As :func:`load_weights`, of a module that may be sharded.

    Args:
        module: whose names and shapes count.
        file: from :func:`trainer.record.find_checkpoint.find_weights`.
        load: gets ``{"state_dict": ...}``, and False: not strict.
        weights_only: as for :func:`load_weights`.
        template: what tensors of a folder are read into, where parameters are sharded.
    """
    now: dict[str, Any] = module.state_dict(keep_vars=True)
    wanted = {name: value for name, value in now.items() if isinstance(value, Tensor)}
    weights = read(file, weights_only, template)
    names, prefixes = paired(weights, wanted)
    differing = {
        mine: said for mine, theirs in names.items() if (said := _difference(weights[theirs], wanted[mine])) is not None
    }
    chosen = {mine: weights[theirs] for mine, theirs in names.items() if mine not in differing}
    if not chosen:
        raise ConfigurationError(_of_nothing(file, weights, wanted, differing, module))
    converted = Counter(
        f"{_kind(weights[theirs])} to {_kind(wanted[mine])}"
        for mine, theirs in names.items()
        if mine in chosen and weights[theirs].dtype != wanted[mine].dtype
    )
    load({"state_dict": chosen}, False)
    tied = {id(wanted[name]) for name in chosen}
    loaded = [name for name, value in wanted.items() if name in chosen or id(value) in tied]
    left = {name: said for name, said in differing.items() if name not in loaded}
    parameters = {id(value): value for value in wanted.values() if isinstance(value, nn.Parameter)}
    return LoadedWeights(
        str(file),
        tuple(loaded),
        tuple(name for name in wanted if name not in {*loaded, *left}),
        left,
        tuple(name for name in weights if name not in set(names.values())),
        prefixes,
        dict(converted),
        (
            sum(parameter.numel() for key, parameter in parameters.items() if key in tied),
            sum(parameter.numel() for parameter in parameters.values() if not is_lazy(parameter)),
        ),
    )


def paired(theirs: Iterable[str], mine: Iterable[str]) -> tuple[dict[str, str], tuple[str, str]]:
    """Which name in a file belongs to which of a module.

    The names are the same; or they are once what they begin with is taken away, on one side all of it that the other
    does not have, on both sides a word and its dot: whichever makes the most pairs. On both sides it has to be the half
    of what begins so, and more than a name such as ``weight`` that is left. Names of wrappers do not count.

    Args:
        theirs: names in the file.
        mine: names of the module.

    Returns:
        Their name by mine; and what names begin with in the file, and in the module.

    >>> paired(["model.0.weight", "loss.weight"], ["0.weight", "0.bias"])
    ({'0.weight': 'model.0.weight'}, ('model.', ''))
    """
    in_file, in_module = {plain_name(name): name for name in theirs}, {plain_name(name): name for name in mine}
    ways = Counter({("", ""): sum(name in in_file for name in in_module)})  # the first of those that are equally good
    ways.update((start, "") for name in in_file for start, rest in _divisions(name) if rest in in_module)
    ways.update(("", start) for name in in_module for start, rest in _divisions(name) if rest in in_file)
    parts, own = _parts(in_file), _parts(in_module)
    for before, behind in product(parts, own):
        common = len(parts[before] & own[behind])
        if 2 * common >= max(len(parts[before]), len(own[behind])) and before != behind:
            ways[before, behind] = common
    (before, behind), _ = ways.most_common(1)[0]
    pairs = {
        in_module[name]: in_file[before + name.removeprefix(behind)]
        for name in in_module
        if name.startswith(behind) and before + name.removeprefix(behind) in in_file
    }
    return pairs, (before, behind)


def _divisions(name: str) -> Iterable[tuple[str, str]]:
    """Of ``a.b.c`` ``("a.", "b.c")`` and ``("a.b.", "c")``."""
    parts = name.split(".")
    return ((".".join(parts[:n]) + ".", ".".join(parts[n:])) for n in range(1, len(parts)))


def _parts(names: Iterable[str]) -> dict[str, set[str]]:
    """Names by the word, and its dot, that they begin with, without it; where there are dots in what is left."""
    found: dict[str, set[str]] = {}
    for name in names:
        word, dot, rest = name.partition(".")
        if "." in rest:
            found.setdefault(word + dot, set()).add(rest)
    return found


def _difference(theirs: Tensor, mine: Any) -> str | None:
    """What keeps a tensor of the file from being loaded; None if nothing does."""
    if not is_lazy(mine) and theirs.shape != mine.shape:
        return f"{tuple(theirs.shape)} in the file and {tuple(mine.shape)} in the module"
    if theirs.dtype != mine.dtype and _sort(theirs) != _sort(mine):  # such as weights that were quantised
        return f"{_kind(theirs)} in the file and {_kind(mine)} in the module"
    return None


def _sort(tensor: Tensor) -> tuple[bool, bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex(), tensor.is_quantized


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _of_nothing(
    file: Path, weights: Mapping[str, Any], wanted: Mapping[str, Any], differing: Mapping[str, str], module: nn.Module
) -> str:
    if not wanted:
        return (
            f"Got weights={file} for a {type(module).__name__} without parameters. If it makes them in configure_model,"
            " have a fit load the weights, which comes after that: Trainer.fit(weights=PATH)."
        )
    if differing:
        shown = [f"{name} is {what}" for name, what in differing.items()]
        return (
            f"Nothing of {file} fits into the {type(module).__name__}: {some(shown, _SHOWN, '; ')}. Build the module"
            " with the sizes that the file has, or leave weights out."
        )
    return (
        f"No name in {file} is one of the {type(module).__name__}'s. It has {some(weights, _SHOWN)}; expected"
        f" {some(wanted, _SHOWN)}. Rename them in the file, or name another one."
    )
