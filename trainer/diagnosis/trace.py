"""Find the operation, module and line that make the first number that is not finite, forward or backward."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from traceback import walk_stack
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric

from trainer.common.module_tree import is_dense, plain_class, plain_name
from trainer.common.packages import is_frameworks_file, is_users_file
from trainer.data.batches import identity
from trainer.data.samples import tensors_in
from trainer.precision.dtypes import real_view

_REPLAY = (str(Path(__file__).with_name("replay.py")), "run")
"""File and name of the function that runs a batch again."""
_FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)')
_FILLS = (
    "masked_fill", "masked_fill_", "fill_", "full", "full_like", "where", "__setitem__", "tensor", "__get__",
    "empty", "empty_like", "new_empty",
)  # fmt: skip
"""Operations that write an infinity on purpose, or nothing."""
_LOSSES = ("cross_entropy", "nll_loss", "nll_loss_nd")
"""Losses that become infinite if a mask has set the logit of a label to -inf."""
_EQUIVALENT_NAMES = {
    "truediv": "div", "rtruediv": "div", "true_divide": "div", "divide": "div", "rdiv": "div", "div_": "div",
    "rpow": "pow", "pow_": "pow", "float_power": "pow", "nll_loss": "cross_entropy", "nll_loss_nd": "cross_entropy",
    "log_softmax_int": "log_softmax",
}  # fmt: skip
_MODULE = "trainer_module"
_NODES = 300
"""Maximum number of graph nodes to search for the modules that computed the inputs of an operation."""


class Magnitude(NamedTuple):
    """The elements of one tensor, or of several together.

    Attributes:
        largest: largest absolute value of the finite ones; 0 if no value is finite.
        not_finite: number of elements that are inf or nan.
        elements: number of elements.
        dtype: such as ``"float16"``. Of several tensors, the dtype of the first that is not finite, else of the first.
    """

    largest: float
    not_finite: int
    elements: int
    dtype: str


class Origin(NamedTuple):
    """The operation that makes the first number that is not finite.

    Attributes:
        operation: such as ``"div"``; in a backward pass, the node of the graph, such as ``"SqrtBackward0"``.
        phase: ``"forward"`` or ``"backward"``.
        module: qualified name of the innermost module in whose code it runs; "" for the LightningModule.
        kind: class of the module.
        sources: names of the modules that computed its inputs.
        file, line: of the user's code; "" and 0 if unknown.
        inputs, outputs: the elements of its inputs and of its outputs; None without a floating-point tensor.
        is_nan: whether it made nan, not only inf.
    """

    operation: str
    phase: str
    module: str
    kind: str
    sources: tuple[str, ...] = ()
    file: str = ""
    line: int = 0
    inputs: Magnitude | None = None
    outputs: Magnitude | None = None
    is_nan: bool = False

    @property
    def name(self) -> str:
        """The plain name of the operation: "div" for ``DivBackward0``, ``__truediv__`` or ``true_divide``."""
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub(r"Backward\d*$", "", self.operation)).lower().strip("_")
        return _EQUIVALENT_NAMES.get(words, words)

    @property
    def place(self) -> str:
        """The module, with its class."""
        if not self.module:
            return f"{self.kind}.training_step"
        return f"{self.module!r} ({self.kind})"

    @property
    def source(self) -> str:
        """The line of code; "" if unknown."""
        return linecache.getline(self.file, self.line).strip() if self.file else ""


@dataclass
class _FirstNonfinite:
    """The first operations that made a nan and an inf."""

    nan: Origin | None = None
    inf: Origin | None = None
    has_infinity: bool = False  # among the inputs of the first nan

    @property
    def origin(self) -> Origin | None:
        return self.inf if self.nan is None or (self.inf is not None and self.has_infinity) else self.nan


class Trace(TorchFunctionMode):
    """Watches every operation of a forward pass, and with :meth:`follow` those of a backward pass.

    Args:
        module: the LightningModule. Operations of its metrics are left out.
        part: returns the part of a tensor that this process holds, as a plain tensor.

    Attributes:
        backward: the first operation of the backward pass that made a number that is not finite, or None.
    """

    def __init__(self, module: nn.Module, part: Any = identity) -> None:
        super().__init__()
        self._part = part
        self._root = module
        self._names = {id(submodule): plain_name(name) for name, submodule in module.named_modules()}
        self._kinds = {plain_name(name): plain_class(submodule).__name__ for name, submodule in module.named_modules()}
        self._open: list[str] = []  # names of modules in their forward
        self._found = {phase: _FirstNonfinite() for phase in ("forward", "without gradient", "backward")}
        self.backward: Origin | None = None
        self.is_on = True
        self._is_backward = False
        self._stack = ExitStack()
        self.raised: tuple[str, ...] = ()

    def __enter__(self) -> Trace:
        for module in self._root.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # does not accept hooks
            for handle in (
                module.register_forward_pre_hook(self._enter_module, prepend=True),
                module.register_forward_hook(self._leave_module, always_call=True),
            ):
                self._stack.callback(handle.remove)
        self._stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))  # nodes keep their lines
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(error_type, error, trace)  # type: ignore[no-untyped-call]
        self._stack.close()

    @property
    def forward(self) -> Origin | None:
        """The operation of the forward pass that is the origin of a loss that is not finite, or None."""
        return self._found["forward"].origin

    @property
    def without_gradient(self) -> Origin | None:
        """The same, of operations without gradients, such as those in custom autograd functions."""
        return self._found["without gradient"].origin

    def fallback(self) -> Origin:
        """Return an origin without an operation: the module that raised an exception, or the LightningModule."""
        name = self.raised[0] if self.raised else ""
        return Origin("", "forward", name, self._kinds[name], self.raised[1:])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_on:
            return func(*args, **kwargs)
        given = [tensor for tensor in tensors_in((args, list(kwargs.values()))) if tensor.is_floating_point()]
        phase = "backward" if self._is_backward else "forward" if torch.is_grad_enabled() else "without gradient"
        first = self._found[phase]
        before = None if first.nan is not None else self._nonfinite_kinds(given)
        output = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        for tensor in tensors_in(output) if isinstance(output, (Tensor, tuple, list)) else ():
            _tag_module(tensor, self._open[-1] if self._open else "")
            if before is not None and tensor.is_floating_point() and first.nan is None:
                self._check_output(first, name, before, tensor, given)
        return output

    def _check_output(
        self, first: _FirstNonfinite, name: str, before: tuple[bool, bool, bool], output: Tensor, given: list[Tensor]
    ) -> None:
        has_nan, has_plus, has_minus = before
        now_nan, now_plus, now_minus = self._nonfinite_kinds([output])
        if name in _FILLS:
            return
        if now_nan and not has_nan:
            # softmax itself makes nan from a row of nothing but -inf
            first.has_infinity = has_plus or (has_minus and "softmax" not in name)
            first.nan = self._record_origin(name, output, given, True)
        elif (
            (now_plus or now_minus)
            and not (has_plus or has_nan)
            and (not has_minus or name in _LOSSES)
            and first.inf is None
        ):
            first.inf = self._record_origin(name, output, given, False)

    def _record_origin(self, name: str, output: Tensor, given: list[Tensor], is_nan: bool) -> Origin:
        caller = sys._getframe(3)  # noqa: SLF001 - the code that called the operation
        module = self._open[-1] if self._open else ""
        sources = _modules_behind(tensor.grad_fn for tensor in given)
        return Origin(
            name,
            "backward" if self._is_backward else "forward",
            module,
            self._kinds[module],
            sources,
            *_place_in((f.f_code.co_filename, line, f.f_code.co_name) for f, line in walk_stack(caller)),
            measure(map(self._part, given)),
            measure([self._part(output)]),
            is_nan,
        )

    def _nonfinite_kinds(self, tensors: Iterable[Tensor]) -> tuple[bool, bool, bool]:
        """Return whether there is a nan, an inf, a -inf. Synchronizes."""
        has_nan = has_plus = has_minus = False
        for tensor in tensors:
            values = self._part(tensor.detach())
            if is_readable(values) and not values.isfinite().all():
                has_nan |= bool(values.isnan().any())
                has_plus |= bool(values.isposinf().any())
                has_minus |= bool(values.isneginf().any())
        return has_nan, has_plus, has_minus

    def follow(self, loss: Tensor) -> ExitStack:
        """Watch the backward pass of ``loss`` until the returned stack is closed."""
        stack, seen = ExitStack(), set[Any]()
        self._is_backward = True
        stack.callback(setattr, self, "_is_backward", False)
        waiting: list[tuple[Any, str]] = [(loss.grad_fn, "")]
        while waiting:
            node, tag = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            tag = node.metadata.setdefault(_MODULE, tag)
            if isinstance(node, BackwardCFunction):  # its Python code runs between these two hooks
                stack.callback(node.register_prehook(self._enter_function).remove)
                stack.callback(node.register_hook(self._leave_function).remove)
            stack.callback(node.register_hook(self._hook(node)).remove)
            waiting += [(next_node, tag) for next_node, _ in node.next_functions]
        return stack

    def _enter_function(self, gradients: Any) -> None:
        super().__enter__()  # type: ignore[no-untyped-call]

    def _leave_function(self, inputs: Any, outputs: Any) -> None:
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _hook(self, node: Any) -> Any:
        def hook(inputs: Any, outputs: Any) -> None:  # gradients with respect to the operation's inputs and outputs
            if self.backward is not None or not self.is_on:
                return
            grad_output = measure(map(self._part, tensors_in(outputs)))
            grad_input = measure(map(self._part, tensors_in(inputs)))
            if not any(magnitude is not None and magnitude.not_finite for magnitude in (grad_output, grad_input)):
                return
            if (inner := self._found["backward"].origin) is not None:  # in the code of a custom autograd function
                self.backward = inner._replace(module=(name := node.metadata[_MODULE]), kind=self._kinds[name])
                return
            module, frames = node.metadata[_MODULE], _FRAME.findall("".join(node.metadata.get("traceback_", [])))
            place = _place_in((file, int(line), name) for file, line, name in reversed(frames))
            sources = _modules_behind(next_node for next_node, _ in node.next_functions)
            self.backward = Origin(
                node.name().replace("torch::autograd::", ""), "backward", module, self._kinds[module],
                sources, *place, grad_output, grad_input,
            )  # fmt: skip

        return hook

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if (name := self._names.get(id(module))) is not None and self.is_on:
            for tensor in tensors_in(args):  # custom autograd functions do not go through `__torch_function__`
                _tag_module(tensor, self._open[-1] if self._open else "")
            self._open.append(name)
            self.raised = ()
        if isinstance(module, Metric):
            self.is_on = False

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, Metric):
            self.is_on = True
        if (name := self._names.get(id(module))) is None or not self.is_on or not self._open:
            return
        if output is None and not self.raised:
            self.raised = tuple(reversed(self._open))
        self._open.pop()
        for tensor in tensors_in(output):
            _tag_module(tensor, name)


def _tag_module(tensor: Tensor, module: str) -> None:
    node: Any = tensor.grad_fn
    if node is not None:
        node.metadata.setdefault(_MODULE, module)


def _modules_behind(nodes: Iterable[Any]) -> tuple[str, ...]:
    """Return the modules that computed the results of these nodes, the nearest first."""
    names: dict[str, None] = {}
    waiting, seen = list(nodes), set[Any]()
    while waiting and len(seen) < _NODES:
        node = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if name := node.metadata.get(_MODULE):
            names[name] = None
        else:
            waiting += [next_node for next_node, _ in node.next_functions]
    return tuple(names)


def is_readable(tensor: Tensor) -> bool:
    """Return whether a tensor is dense and has its memory, which FSDP frees between its uses.

    Tensors inside the transforms of ``torch.func``, such as ``vmap``, have no memory.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001 - torch has no public function for this
        return False
    return is_dense(tensor) and (not tensor.numel() or tensor.untyped_storage().size() > 0)


def _place_in(frames: Iterable[tuple[str, int, str]]) -> tuple[str, int]:
    """Return file and line of the innermost frame of the user's code in a replay; without one, of another package.

    Args:
        frames: file, line and function of each frame, the innermost first.
    """
    of_package = ("", 0)
    for file, line, _ in takewhile(lambda frame: frame[::2] != _REPLAY, frames):
        if is_users_file(file):
            return file, line
        if not of_package[0] and not is_frameworks_file(file):
            of_package = file, line
    return of_package


def measure(tensors: Iterable[Tensor]) -> Magnitude | None:
    """Measure the elements of the floating-point and complex tensors among these, or return None without such tensors.

    Synchronizes. A complex tensor counts as a real one of shape (..., 2).
    """
    values = [view.detach() for view in map(real_view, tensors) if view.is_floating_point() and is_readable(view)]
    if not (values := [value for value in values if value.numel()]):
        return None
    largest = max(value.where(value.isfinite(), 0.0).abs().max().item() for value in values)
    broken = [int((~value.isfinite()).sum()) for value in values]
    dtype = next((value.dtype for value, number in zip(values, broken, strict=True) if number), values[0].dtype)
    return Magnitude(largest, sum(broken), sum(value.numel() for value in values), str(dtype).removeprefix("torch."))
