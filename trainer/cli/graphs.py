"""The graph of a module's ``forward``, in a file, held against the module: by torch.export, and for ONNX from that.

The inputs are the module's ``example_input_array`` or, without one, the first batch of its data, which passes the hooks
that any batch does: of validation, else of test, prediction or training. A mapping gives ``forward`` the entries that
have the names of its arguments; of a list or tuple it gets as many of the first as it needs; a tensor as it is.
"""

from __future__ import annotations

import inspect
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from trainer.checkpoint.files import make_folder
from trainer.cli.arguments import UsageError
from trainer.errors import CheckpointWriteError, TrainerError

TOLERANCE = 1e-4
"""How far the outputs may be apart: of the largest value, or of 1 where that is less."""

_RUNTIME = "onnxruntime"
_LARGEST_ONNX = 2 * 10**9  # bytes; a file of ONNX, which is one protocol buffer, has to be smaller than 2 GiB
_SECONDS = 1.0  # of measuring
_STAGES = {
    "validate": ("val_dataloader", "validation_step"),
    "test": ("test_dataloader", "test_step"),
    "predict": ("predict_dataloader", "predict_step"),
    "fit": ("train_dataloader", "training_step"),
}
"""Where a batch may come from, and what the module needs for that."""


class ExportError(TrainerError):
    """The module cannot be exported, or what was written computes something else."""


class Inputs(NamedTuple):
    """What ``forward`` is called with.

    Args:
        positional: by position.
        named: by name.
    """

    positional: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def rows(self) -> int:
        """Samples: the length of the first dimension of the first tensor that has one; 0 without one."""
        return next((leaf.shape[0] for leaf in self.tensors if leaf.ndim), 0)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return [leaf for leaf in tree_flatten(tuple(self))[0] if isinstance(leaf, Tensor)]

    def each(self, function: Callable[[Tensor], Any]) -> Inputs:
        """With ``function`` of each tensor in its place."""
        mapped = tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tuple(self))
        return Inputs(*mapped)

    def of_rows(self, index: list[int]) -> Inputs:
        """Those rows of the tensors that have as many as the first has."""
        rows = self.rows
        return self.each(lambda leaf: leaf[index] if leaf.ndim and leaf.shape[0] == rows else leaf)


class _Found(Exception):  # noqa: N818 - no error
    """Ends a run when there is a batch."""


class _FirstBatch(Callback):
    """Ends a run at its first batch, which it keeps."""

    batch: Any = None

    def _keep(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        self.batch = batch
        raise _Found

    on_train_batch_start: Any = _keep
    on_validation_batch_start: Any = _keep
    on_test_batch_start: Any = _keep
    on_predict_batch_start: Any = _keep


def export(trainer: Any, module: LightningModule, data: LightningDataModule | None, checkpoint: str, file: Path) -> str:
    """Write the graph of ``module.forward``, with the weights of a checkpoint, and hold it against the module.

    Args:
        trainer: on one CPU, in float32, without callbacks.
        module: the module.
        data: its data; None where the module has them.
        checkpoint: the file or folder.
        file: ends in ``.onnx`` or ``.pt2``.

    Returns:
        What was written, how it compares, and how fast it is.

    Raises:
        UsageError: the module has no ``forward``, or what it is to be called with cannot be told.
        ExportError: the module cannot be exported, or what was written computes something else, and is not kept.
        CheckpointWriteError: the file cannot be written.
    """
    if type(module).forward in (LightningModule.forward, torch.nn.Module.forward):
        raise UsageError(
            f"export writes what forward computes, and {type(module).__name__} has no forward. Write one, which returns"
            " what the module is used for."
        )
    batch = _first_batch(trainer, module, data, checkpoint)
    module.eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of exporters, on their own insides
        inputs = inputs_of(module, batch)
        if inputs.rows == 1:
            inputs = inputs.of_rows([0, 0])  # of one row torch.export takes the number for a constant
        expected = _called(module, inputs)
        graph, is_dynamic = _graph(module, inputs)
        make_folder(file.parent)
        with TemporaryDirectory(prefix=".", dir=file.parent) as folder:
            part = Path(folder, file.name)
            try:
                run = (_write_onnx if file.suffix == ".onnx" else _write_graph)(graph, part)
            except OSError as error:
                raise CheckpointWriteError(
                    f"{file} was not written: {error.strerror or error}.", error.errno
                ) from error
            checked = {inputs.rows: _difference(run(inputs), expected)}
            if is_dynamic:
                one = inputs.of_rows([0])
                checked[1] = _difference(run(one), _called(module, one))
            worst, largest = max(difference for difference, _ in checked.values()), checked[inputs.rows][1]
            allowed = TOLERANCE * max(1.0, largest)
            if not worst <= allowed:
                raise ExportError(
                    f"{file} was not written: it gives values that are up to {worst:.3g} apart from those of forward,"
                    f" expected at most {allowed:.3g}. A forward in eval mode must give the same values each time."
                )
            speeds = _medians(lambda: run(inputs), lambda: module(*inputs.positional, **inputs.named))
            size = part.stat().st_size
            os.replace(part, file)
    sizes = " and ".join(map(str, checked))
    batches = f"batches of any size, tried with {sizes}" if is_dynamic else f"batches of {inputs.rows}, no other size"
    gap = f"at most {worst:.1e} apart" if worst else "equal to the bit"
    runtime = _runtime(file)
    return (
        f"{file}: {size / 2**20:,.3g} MiB, float32. Inputs: {_described(inputs, is_dynamic)}; {batches}.\n"
        f"  Held against forward: {gap} (tolerance {allowed:.1e}: {TOLERANCE:g} of the largest value, {largest:.3g},"
        f" or of 1).\n"
        f"  A batch of {inputs.rows} takes {speeds[0] * 1e3:.3g} ms, forward itself {speeds[1] * 1e3:.3g} ms (median,"
        f" this CPU{runtime})."
    )


def inputs_of(module: Any, batch: Any) -> Inputs:
    """What ``module.forward`` is called with: ``example_input_array``, or what of ``batch`` goes by the rule on top.

    Raises:
        UsageError: that cannot be told, or ``forward`` does not take it.
    """
    example = getattr(module, "example_input_array", None)
    if example is not None:
        if isinstance(example, Mapping):
            found = Inputs((), dict(example))
        else:
            found = Inputs(tuple(example) if isinstance(example, (list, tuple)) else (example,), {})
    else:
        found = _of_batch(module, batch)
    found = found.each(lambda tensor: tensor.detach().cpu().clone())
    if not found.tensors:
        raise UsageError(_cannot_tell(module, batch, "there is no tensor in it"))
    try:
        _called(module, found)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UsageError(_cannot_tell(module, batch, f"forward raised {type(error).__name__}: {reason}")) from error
    return found


def _of_batch(module: Any, batch: Any) -> Inputs:
    kinds = inspect.Parameter
    parameters = inspect.signature(module.forward).parameters.values()
    names = [one.name for one in parameters if one.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    needed = [
        one.name
        for one in parameters
        if one.default is kinds.empty and one.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    if isinstance(batch, Mapping) and names and set(needed) <= batch.keys():
        return Inputs((), {name: batch[name] for name in names if name in batch})
    if isinstance(batch, (list, tuple)) and 0 < len(needed) <= len(batch):
        return Inputs(tuple(batch[: len(needed)]), {})
    if isinstance(batch, (Tensor, Mapping)) and len(needed) == 1:
        return Inputs((batch,), {})
    raise UsageError(_cannot_tell(module, batch, f"forward takes {', '.join(names) or 'nothing'}"))


def _cannot_tell(module: Any, batch: Any, why: str) -> str:
    if getattr(module, "example_input_array", None) is not None:
        what = "example_input_array is not what forward takes"
    elif isinstance(batch, Mapping):
        what = f"what to call forward with cannot be told from a batch, a mapping of {', '.join(map(str, batch))}"
    elif isinstance(batch, (list, tuple)):
        kinds = ", ".join(type(one).__name__ for one in batch)
        what = f"what to call forward with cannot be told from a batch, a {type(batch).__name__} of {kinds}"
    else:
        what = f"what to call forward with cannot be told from a batch, a {type(batch).__name__}"
    return (
        f"{type(module).__name__}: {what}: {why}. Set self.example_input_array in the module to a tensor, a tuple of"
        " arguments, or a mapping of them by name."
    )


def _first_batch(trainer: Any, module: LightningModule, data: LightningDataModule | None, checkpoint: str) -> Any:
    """The first batch, as the module gets it. After that the module has the weights."""
    for stage, (loader, step) in _STAGES.items():
        owners = [(data, LightningDataModule), (module, LightningModule)]
        has_data = any(owner is not None and _overrides(owner, loader, kind) for owner, kind in owners)
        if not has_data or not _overrides(module, step, LightningModule):
            continue
        keeper = _FirstBatch()
        trainer.callbacks.append(keeper)
        weights = {"weights": checkpoint} if stage == "fit" else {"ckpt_path": checkpoint}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks")
                getattr(trainer, stage)(module, datamodule=data, **weights)
        except _Found:
            pass
        else:
            raise UsageError(f"{loader} has no batch to call forward with, expected at least one.")
        loaded = trainer.loaded_weights
        if loaded is not None and not loaded.complete:
            raise ExportError(f"The checkpoint is not one of this {type(module).__name__}. {loaded}")
        return keeper.batch
    raise UsageError(
        f"There are no data to call the forward of {type(module).__name__} with, expected a val_dataloader, or one for"
        " test, predict or training. Choose data: data=NAME."
    )


def _overrides(owner: Any, name: str, kind: type) -> bool:
    return getattr(type(owner), name, None) is not getattr(kind, name, None)


def _called(module: Any, inputs: Inputs) -> list[Tensor]:
    """What forward returns, tensors alone."""
    return _tensors(module(*inputs.positional, **inputs.named))


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]


def _graph(module: Any, inputs: Inputs) -> tuple[Any, bool]:
    """The graph by torch.export, and whether it takes batches of any size."""
    error: Exception | None = None
    for given in (_shapes(module, inputs), None):
        fresh = inputs.each(torch.clone)  # torch.export leaves marks on them
        try:
            graph = torch.export.export(module, fresh.positional, fresh.named, dynamic_shapes=given, strict=False)
        except Exception as problem:
            error = error or problem
        else:
            return graph, given is not None
    said = str(error).strip().splitlines() or [""]
    raise ExportError(
        f"torch.export cannot make a graph of {type(module).__name__}.forward: {type(error).__name__}: {said[0]}"
    ) from error


def _shapes(module: Any, inputs: Inputs) -> dict[str, Any]:
    """Which dimensions are of any size, by the names of forward's arguments: the first, where it is of the samples."""
    rows, batch = inputs.rows, torch.export.Dim("batch", min=1)

    def of(leaf: Any) -> Any:
        return {0: batch} if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == rows else None

    positional, named = tree_map(of, tuple(inputs))
    names = inspect.signature(module.forward).parameters
    return {**dict(zip(names, positional, strict=False)), **named}


def _write_graph(graph: Any, part: Path) -> Callable[[Inputs], list[Tensor]]:
    """Save a graph; returns what runs the file."""
    graph.example_inputs = None  # data have no place in the file
    torch.export.save(graph, part)
    loaded = torch.export.load(part).module()
    return lambda inputs: _called(loaded, inputs)


def _write_onnx(graph: Any, part: Path) -> Callable[[Inputs], list[Tensor]]:
    """Write a graph as ONNX; returns what runs the file: onnxruntime, or ONNX's own reference without that."""
    size = sum(value.numel() * value.element_size() for value in graph.state_dict.values())
    if size >= _LARGEST_ONNX:
        raise ExportError(
            f"The weights take {size / 2**30:.1f} GiB, and a file of ONNX holds less than 2. Export to=model.pt2."
        )
    try:
        program: Any = torch.onnx.export(graph, dynamo=True, verbose=False)
    except Exception as error:
        said = " ".join(str(error).split())
        raise ExportError(f"torch.onnx cannot write this graph: {said[:300]}. Export to=model.pt2.") from error
    program.save(part, external_data=False)
    return _runner(part)


def _runner(file: Path) -> Callable[[Inputs], list[Tensor]]:
    if find_spec(_RUNTIME) is None:
        session: Any = import_module("onnx.reference").ReferenceEvaluator(str(file))
        names = list(session.input_names)
    else:
        session = import_module(_RUNTIME).InferenceSession(str(file), providers=["CPUExecutionProvider"])
        names = [one.name for one in session.get_inputs()]

    def run(inputs: Inputs) -> list[Tensor]:
        given = [tensor.numpy() for tensor in inputs.tensors]
        return [torch.from_numpy(value) for value in session.run(None, dict(zip(names, given, strict=True)))]

    return run


def _runtime(file: Path) -> str:
    if file.suffix != ".onnx":
        return ""
    if find_spec(_RUNTIME) is None:
        return f"; by ONNX's reference, which is slow: {_RUNTIME} is not installed"
    return f", {_RUNTIME} {version(_RUNTIME)}"


def _difference(found: list[Tensor], expected: list[Tensor]) -> tuple[float, float]:
    """How far apart the outputs are, inf where they are of other shapes or dtypes, and the largest value expected."""
    shapes = [[(one.shape, one.dtype) for one in tensors] for tensors in (found, expected)]
    if shapes[0] != shapes[1]:
        return float("inf"), 0.0
    apart = largest = 0.0
    for one, other in zip(found, expected, strict=True):
        one, other = one.to(torch.float64), other.to(torch.float64)
        if not other.numel():
            continue
        gap = torch.where(one == other, 0.0, (one - other).abs())
        gap = torch.where(one.isnan() & other.isnan(), 0.0, gap)
        apart = max(apart, float(gap.nan_to_num(nan=float("inf")).max()))
        largest = max(largest, float(other[other.isfinite()].abs().max()) if other.isfinite().any() else 0.0)
    return apart, largest


def _medians(*runs: Callable[[], Any]) -> list[float]:
    """Seconds of each, taken in turns."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    ends = time.perf_counter() + _SECONDS
    while len(times[0]) < 3 or time.perf_counter() < ends:
        for run, taken in zip(runs, times, strict=True):
            started = time.perf_counter()
            run()
            taken.append(time.perf_counter() - started)
    return [statistics.median(taken) for taken in times]


def _described(inputs: Inputs, is_dynamic: bool) -> str:
    def one(tensor: Tensor) -> str:
        sizes = [str(size) for size in tensor.shape]
        if is_dynamic and tensor.ndim and tensor.shape[0] == inputs.rows:
            sizes[0] = "batch"
        return f"{str(tensor.dtype).removeprefix('torch.')} ({', '.join(sizes)})"

    return ", ".join(map(one, inputs.tensors))
