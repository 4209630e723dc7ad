"""Export the graph of a module's ``forward`` with ``torch.export`` or ``torch.onnx``, and check its outputs.

The inputs are the module's ``example_input_array`` or, if it has none, the first batch of its data after the transfer
hooks: from validation, else from test, prediction or training. If the batch is a mapping, ``forward`` gets the entries
with the names of its arguments. If it is a list or tuple, ``forward`` gets as many of the first items as it requires. A
tensor is passed unchanged.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from trainer.checkpoint.reading import make_folder
from trainer.cli.parsing import UsageError
from trainer.cli.rehearsal import RehearsalDone, rehearse
from trainer.errors import CheckpointWriteError, TrainerError

if TYPE_CHECKING:
    from trainer.trainer import Trainer

TOLERANCE = 1e-4
"""Largest accepted difference of the outputs, relative to their largest absolute value (at least 1)."""

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of ``forward``, by position and by name."""

_SOURCES = (
    ("validate", "val_dataloader", "validation_step"),
    ("test", "test_dataloader", "test_step"),
    ("predict", "predict_dataloader", "predict_step"),
    ("fit", "train_dataloader", "training_step"),
)
"""Stages of the Trainer to get a batch from, with the dataloader and step methods that they need."""


class ExportError(TrainerError):
    """The module cannot be exported, or the outputs of the file differ from those of the module."""


class _FirstBatch(Callback):
    """Store the first batch, and end the run."""

    batch: Any = None

    def _keep(self, trainer: Trainer, pl_module: Any, batch: Any, *_: Any) -> None:
        self.batch = batch
        raise RehearsalDone

    on_train_batch_start: Any = _keep
    on_validation_batch_start: Any = _keep
    on_test_batch_start: Any = _keep
    on_predict_batch_start: Any = _keep


def export(
    trainer: Trainer, module: LightningModule, data: LightningDataModule | None, checkpoint: str, file: Path
) -> str:
    """Write the graph of ``module.forward`` with the weights of a checkpoint, and check that its outputs are the same.

    Args:
        trainer: a Trainer on one CPU, in float32, without callbacks.
        module: the module.
        data: its data, or None if the module has the dataloaders.
        checkpoint: file or folder.
        file: ends in ``.onnx`` or ``.pt2``.

    Returns:
        A line about the file and the comparison.

    Raises:
        UsageError: if the module has no ``forward``, or its inputs cannot be found.
        ExportError: if the module cannot be exported, or the outputs of the file differ. No file is kept.
        CheckpointWriteError: if the file cannot be written.
    """
    if type(module).forward in (LightningModule.forward, torch.nn.Module.forward):
        raise UsageError(f"{type(module).__name__} has no forward, expected one that returns the outputs to export.")
    batch = _first_batch(trainer, module, data, checkpoint)
    module.eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # exporters warn about their own internals
        example = inputs_of(module, batch)
        # torch.export treats a size of 1 as a constant
        doubled = _rows(example, [0, 0]) if rows_of(example) == 1 else example
        graph, is_dynamic = _graph(module, doubled, example)
        inputs = doubled if is_dynamic else example
        make_folder(file.parent)
        with TemporaryDirectory(prefix=".", dir=file.parent) as folder:
            temporary = Path(folder, file.name)
            try:
                run = (_write_onnx if file.suffix == ".onnx" else _write_graph)(graph, temporary)
            except OSError as error:
                reason = f"{file} was not written: {error.strerror or error}."
                raise CheckpointWriteError(reason, error.errno) from error
            tried = [inputs, *([_rows(inputs, [0])] if is_dynamic else [])]
            try:
                gap = max(compare(run(given), _outputs_of(module, given)) for given in tried)
            except AssertionError as error:
                raise ExportError(
                    f"{file} was not written: its outputs differ from those of forward by more than {TOLERANCE:g} of"
                    f" the largest value. {' '.join(str(error).split())} In eval mode, forward must be deterministic."
                ) from error
            size = temporary.stat().st_size / 2**20
            os.replace(temporary, file)
    sizes = f"any size (checked with {rows_of(inputs)} and 1)" if is_dynamic else f"{rows_of(inputs)}, no other size"
    comparison = f"differ by at most {gap:.1e}" if gap else "are bitwise equal"
    about = f"{size:,.3g} MiB, float32, for batches of {sizes}"
    return f"Wrote {file}: {about}. Its outputs and those of forward {comparison}."


def inputs_of(module: Any, batch: Any) -> Inputs:
    """Return the arguments of ``module.forward``, from ``example_input_array`` or ``batch``.

    Raises:
        UsageError: if ``forward`` cannot be called with them.
    """
    example = getattr(module, "example_input_array", None)
    given, place = (batch, "a batch") if example is None else (example, "example_input_array")
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [p for p in inspect.signature(module.forward).parameters.values() if p.kind not in variadic]
    names = [parameter.name for parameter in parameters]
    needed = [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]
    inputs: Inputs = ((given,), {})
    if isinstance(given, Mapping) and needed and set(needed) <= given.keys():
        inputs = ((), {name: given[name] for name in names if name in given})
    elif isinstance(given, (list, tuple)):
        inputs = (tuple(given[: len(needed)] if example is None else given), {})
    inputs = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), inputs)
    problem = "" if _tensors(inputs) else ", which has no tensor"
    try:
        _outputs_of(module, inputs)
    except Exception as error:
        problem = f": {type(error).__name__}: {' '.join(str(error).split())}"
    if problem:
        types = ", ".join(type(leaf).__name__ for leaf in tree_leaves(given)) or "nothing"
        raise UsageError(
            f"forward({', '.join(names)}) of {type(module).__name__} cannot be called with {place}, a"
            f" {type(given).__name__} of {types}{problem}. Set self.example_input_array in the module to a tensor, a"
            " tuple of arguments, or a mapping of them by name."
        )
    return inputs


def _first_batch(trainer: Trainer, module: LightningModule, data: LightningDataModule | None, checkpoint: str) -> Any:
    """Return the first batch after the transfer hooks, and load the weights into the module."""
    owners = [owner for owner in (data, module) if owner is not None]
    for stage, loader, step in _SOURCES:
        if not is_overridden(step, module) or not any(is_overridden(loader, owner) for owner in owners):
            continue
        first = _FirstBatch()
        weights = {"weights": checkpoint} if stage == "fit" else {"ckpt_path": checkpoint}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks")
            rehearse(trainer, module, first, stage, datamodule=data, **weights)
        if first.batch is None:
            raise UsageError(f"Got 0 batches from {loader}, expected at least one to call forward with.")
        loaded = trainer.loaded_weights
        if loaded is not None and not loaded.complete:
            raise ExportError(f"The checkpoint does not belong to this {type(module).__name__}. {loaded}")
        return first.batch
    raise UsageError(f"Got no dataloader for a batch to call {type(module).__name__}.forward with. Choose data=NAME.")


def _outputs_of(module: Any, inputs: Inputs) -> list[Tensor]:
    return _tensors(module(*inputs[0], **inputs[1]))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def rows_of(inputs: Inputs) -> int:
    """Return the number of samples: the length of the first tensor with a dimension, or 0."""
    return next((len(tensor) for tensor in _tensors(inputs) if tensor.ndim), 0)


def _rows(inputs: Inputs, index: list[int]) -> Inputs:
    rows = rows_of(inputs)
    chosen: Inputs = tree_map_only(Tensor, lambda t: t[index] if t.ndim and len(t) == rows else t, inputs)
    return chosen


def _graph(module: Any, inputs: Inputs, example: Inputs) -> tuple[Any, bool]:
    """Return the graph from torch.export, and whether it accepts batches of any size, or only that of the example."""
    rows, batch = rows_of(inputs), torch.export.Dim("batch", min=1)

    def sizes_of(leaf: Any) -> Any:
        return {0: batch} if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == rows else None

    positional, named = tree_map(sizes_of, inputs)
    names = inspect.signature(module.forward).parameters
    errors = []
    for given, shapes in ((inputs, {**dict(zip(names, positional, strict=False)), **named}), (example, None)):
        fresh = tree_map_only(Tensor, torch.clone, given)  # because torch.export changes attributes of its inputs
        try:
            return torch.export.export(module, *fresh, dynamic_shapes=shapes, strict=False), shapes is not None
        except Exception as error:
            errors.append(error)
    message = f"{type(errors[0]).__name__}: {str(errors[0]).strip()}".partition("\n")[0]
    raise ExportError(f"torch.export failed for {type(module).__name__}.forward: {message}") from errors[0]


def _write_graph(graph: Any, file: Path) -> Callable[[Inputs], list[Tensor]]:
    """Save a graph, and return a function that runs the file."""
    graph.example_inputs = None  # so that the file contains no data
    torch.export.save(graph, file)
    loaded = torch.export.load(file).module()
    return lambda inputs: _outputs_of(loaded, inputs)


def _write_onnx(graph: Any, file: Path) -> Callable[[Inputs], list[Tensor]]:
    """Write a graph as ONNX, and return a function that runs the file with onnxruntime."""
    try:
        torch.onnx.export(graph, f=file, dynamo=True, verbose=False, external_data=False)
        session = import_module("onnxruntime").InferenceSession(str(file), providers=["CPUExecutionProvider"])
    except Exception as error:
        message = " ".join(str(error).split())
        raise ExportError(f"torch.onnx cannot export this graph: {message[:300]}. Use to=model.pt2 instead.") from error

    def run(inputs: Inputs) -> list[Tensor]:
        pairs = zip(session.get_inputs(), _tensors(inputs), strict=True)
        outputs = session.run(None, {argument.name: tensor.numpy() for argument, tensor in pairs})
        return [torch.from_numpy(value) for value in outputs]

    return run


def compare(outputs: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference between the outputs.

    Raises:
        AssertionError: if the difference is above :data:`TOLERANCE`, or shapes or dtypes differ.
    """
    tolerance = TOLERANCE * max(1.0, _largest(expected))
    torch.testing.assert_close(outputs, expected, rtol=0.0, atol=tolerance, equal_nan=True)
    return _largest([output.double() - other.double() for output, other in zip(outputs, expected, strict=True)])


def _largest(tensors: Iterable[Tensor]) -> float:
    """Return the largest finite absolute value, or 0."""
    sizes = (tensor.double().nan_to_num(0, 0, 0).abs() for tensor in tensors if tensor.numel())
    return max((float(size.max()) for size in sizes), default=0.0)
