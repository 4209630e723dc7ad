"""Load the weights of another module: they are matched by name and shape."""

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
from trainer.common.module_tree import plain_name
from trainer.errors import ConfigurationError, join_first
from trainer.record.find_checkpoint import find_weights

if TYPE_CHECKING:
    from trainer.checkpoint.shards import Template

_MAX_NAMES = 4  # names of each kind


@dataclass(frozen=True)
class LoadedWeights:
    """The result of loading a file into a module. Its text has one line for each kind of difference.

    Attributes:
        path: the file or folder.
        loaded: names of the module's parameters and buffers that were loaded, tied ones included.
        missing: names that the file does not have; these stay unchanged.
        differing: the differences by name, such as ``"(10, 64) in the file and (257, 64) in the module"``; these stay
            unchanged.
        unused: names in the file that the module does not have.
        prefixes: the prefixes of names in the file and in the module; ``("", "")`` if the names are the same.
        converted: number of converted tensors, by conversion, such as ``"float16 to float32"``.
        parameters: number of elements loaded into the module's parameters, and their total number.
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
        """Whether all parameters and buffers of the module were loaded. The file may contain more."""
        return not self.missing and not self.differing

    @property
    def facts(self) -> dict[str, Any]:
        """The entry of ``run.json``."""
        facts = {name: list(getattr(self, name)) for name in ("parameters", "missing", "unused", "prefixes")}
        return {
            "path": self.path,
            "tensors": [len(self.loaded), self._tensors],
            "differing": dict(self.differing),
        } | facts

    @property
    def _tensors(self) -> int:
        return len(self.loaded) + len(self.missing) + len(self.differing)

    def __str__(self) -> str:
        numbers, of = self.parameters
        about = f"{len(self.loaded)} of {self._tensors} tensors, {numbers:,} of {of:,} parameters"
        lines = [f"Weights from {self.path}: {about}."]
        in_file, in_module = self.prefixes
        if in_file and in_module:
            lines.append(f"Names in the file start with {in_file!r}, those of the module with {in_module!r}.")
        elif in_file:
            lines.append(f"Names in the file start with {in_file!r}, those of the module do not.")
        elif in_module:
            lines.append(f"Names in the module start with {in_module!r}, those of the file do not.")
        if self.converted:
            lines.append(f"Converted: {', '.join(f'{count} from {cast}' for cast, count in self.converted.items())}.")
        if self.differing:
            shown = [f"{name} is {difference}" for name, difference in self.differing.items()]
            lines.append(f"Left as they were, because they differ: {join_first(shown, _MAX_NAMES, '; ')}.")
        if self.missing:
            names = join_first(self.missing, _MAX_NAMES)
            lines.append(f"Left as they were, because the file does not have them: {names}.")
        if self.unused:
            lines.append(f"Not used, because the module does not have them: {join_first(self.unused, _MAX_NAMES)}.")
        return "\n  ".join(lines)


def load_weights(module: nn.Module, path: str | Path, weights_only: bool | None = None) -> LoadedWeights:
    """Load only weights into a module: parameters and buffers with the same name and shape.

    Names may differ by a prefix, such as ``"model."``, and by the prefixes of torch.compile. Values are converted to
    the dtype of the module. Weights that are not loaded stay unchanged; the result lists them with the reason.
    ``on_load_checkpoint`` is not called. The checkpoint of a run with ``WeightAveraging`` contains the average.

    Use ``Trainer.fit(weights=...)`` for modules that create parameters in ``configure_model`` or on the meta device.

    Args:
        module: the module, such as a LightningModule.
        path: a checkpoint (a file or a folder), the folder of a run, a safetensors file, or a state dict that
            ``torch.save`` has written. From the folder of a run, the best checkpoint is loaded, or the last one if
            there is no best. A state dict may be under the key ``state_dict``, ``model_state_dict`` or ``model``.
        weights_only: False to read a file with more than tensors and plain containers, which may execute any code.
            Only use it for trusted files. Default: None, like True.

    Raises:
        ConfigurationError: if the file does not exist or has no weights for the module, or if the module is on the
            meta device.
        CheckpointError: if the file is damaged, or has no weights.
        UnsafeCheckpointError: if the file has more than tensors and plain containers.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        advice = "Create them on another device, or let the fit load the weights: Trainer.fit(weights=PATH)."
        raise ConfigurationError(f"Got a {type(module).__name__} with parameters on the meta device. {advice}")
    file = find_weights(path)

    def load(state: dict[str, Any], strict: bool) -> None:
        module.load_state_dict(state["state_dict"], strict=strict)

    return load_into(module, file, load, weights_only)


def load_into(
    module: nn.Module,
    file: Path,
    load: Callable[[dict[str, Any], bool], None],
    weights_only: bool | None = None,
    template: Template | None = None,
) -> LoadedWeights:
    """Load weights as :func:`load_weights` does, into a module that may be sharded.

    Args:
        module: the module.
        file: from :func:`trainer.record.find_checkpoint.find_weights`.
        load: loads ``{"state_dict": ...}``; its second argument is ``strict``.
        weights_only: as for :func:`load_weights`.
        template: the tensors to read a folder into, if parameters are sharded.
    """
    state_dict: dict[str, Any] = module.state_dict(keep_vars=True)
    targets = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
    weights = read(file, weights_only, template)
    names, prefixes = paired(weights, targets)
    values = {name: weights[name_in_file] for name, name_in_file in names.items()}
    differing = {name: reason for name, value in values.items() if (reason := _difference(value, targets[name]))}
    chosen = {name: value for name, value in values.items() if name not in differing}
    if not chosen:
        raise ConfigurationError(_no_match_error(file, weights, targets, differing, module))
    changed = [(value, targets[name]) for name, value in chosen.items() if value.dtype != targets[name].dtype]
    converted = Counter(f"{_dtype_name(value)} to {_dtype_name(target)}" for value, target in changed)
    load({"state_dict": chosen}, False)
    tied = {id(targets[name]) for name in chosen}
    loaded = [name for name, value in targets.items() if name in chosen or id(value) in tied]
    left = {name: reason for name, reason in differing.items() if name not in loaded}
    missing = [name for name in targets if name not in {*loaded, *left}]
    unused = [name for name in weights if name not in set(names.values())]
    parameters = {id(value): value for value in targets.values() if isinstance(value, nn.Parameter)}
    numbers = (
        sum(parameter.numel() for key, parameter in parameters.items() if key in tied),
        sum(parameter.numel() for parameter in parameters.values() if not is_lazy(parameter)),
    )
    return LoadedWeights(str(file), tuple(loaded), tuple(missing), left, tuple(unused), prefixes, converted, numbers)


def paired(file_names: Iterable[str], module_names: Iterable[str]) -> tuple[dict[str, str], tuple[str, str]]:
    """Match the names of a file to those of a module.

    Names match directly, or after a prefix is removed. The prefix may be of any length if it is removed on one side. If
    prefixes are removed on both sides, each is the first word with its dot. Such a pair is accepted only if, on each
    side, at least half of the names with the prefix match. This count ignores names without another dot after the
    prefix. Of all possible prefixes, those with the most matches are used. Names of wrappers are ignored.

    Args:
        file_names: names in the file.
        module_names: names of the module.

    Returns:
        The name in the file by the name in the module; and the prefixes in the file and in the module.

    >>> paired(["model.0.weight", "loss.weight"], ["0.weight", "0.bias"])
    ({'0.weight': 'model.0.weight'}, ('model.', ''))
    """
    in_file = {plain_name(name): name for name in file_names}
    in_module = {plain_name(name): name for name in module_names}
    ways = Counter({("", ""): sum(name in in_file for name in in_module)})  # the first one wins a tie
    ways.update((start, "") for name in in_file for start, rest in _prefix_splits(name) if rest in in_module)
    ways.update(("", start) for name in in_module for start, rest in _prefix_splits(name) if rest in in_file)
    parts_in_file, parts_in_module = _parts(in_file), _parts(in_module)
    for before, behind in product(parts_in_file, parts_in_module):
        common = len(parts_in_file[before] & parts_in_module[behind])
        if 2 * common >= max(len(parts_in_file[before]), len(parts_in_module[behind])) and before != behind:
            ways[before, behind] = common
    (before, behind), _ = ways.most_common(1)[0]
    pairs = {
        in_module[name]: in_file[before + name.removeprefix(behind)]
        for name in in_module
        if name.startswith(behind) and before + name.removeprefix(behind) in in_file
    }
    return pairs, (before, behind)


def _prefix_splits(name: str) -> Iterable[tuple[str, str]]:
    """Yield the splits of a name into prefix and rest: ``("a.", "b.c")`` and ``("a.b.", "c")`` for ``a.b.c``."""
    parts = name.split(".")
    return ((".".join(parts[:n]) + ".", ".".join(parts[n:])) for n in range(1, len(parts)))


def _parts(names: Iterable[str]) -> dict[str, set[str]]:
    """Group names by their first word with its dot. A group contains the rest of each name, if that contains a dot."""
    groups: dict[str, set[str]] = {}
    for name in names:
        word, dot, rest = name.partition(".")
        if "." in rest:
            groups.setdefault(word + dot, set()).add(rest)
    return groups


def _difference(saved: Tensor, target: Any) -> str | None:
    """Return the reason why a tensor of the file cannot be loaded, or None."""
    if not is_lazy(target) and saved.shape != target.shape:
        return f"{tuple(saved.shape)} in the file and {tuple(target.shape)} in the module"
    if saved.dtype != target.dtype and _dtype_category(saved) != _dtype_category(target):  # such as quantized weights
        return f"{_dtype_name(saved)} in the file and {_dtype_name(target)} in the module"
    return None


def _dtype_category(tensor: Tensor) -> tuple[bool, bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex(), tensor.is_quantized


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _no_match_error(
    file: Path, weights: Mapping[str, Any], targets: Mapping[str, Any], differing: Mapping[str, str], module: nn.Module
) -> str:
    name = type(module).__name__
    if not targets:
        advice = "If configure_model creates them, load the weights in the fit: Trainer.fit(weights=PATH)."
        return f"Got weights={file} for a {name} without parameters. {advice}"
    if differing:
        shown = join_first((f"{key} is {difference}" for key, difference in differing.items()), _MAX_NAMES, "; ")
        return f"No weight of {file} fits into the {name}: {shown}. Build the module with the sizes of the file."
    return (
        f"No weight in {file} has a name of the {name}. Got {join_first(weights, _MAX_NAMES)};"
        f" expected {join_first(targets, _MAX_NAMES)}. Rename the weights in the file, or choose another file."
    )
