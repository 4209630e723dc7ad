"""Hooks on every module: what goes in and comes out, forward and backward, and where it first is not finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from trainer.data.batches import identity
from trainer.data.samples import tensors_in
from trainer.module_tree import plain_class
from trainer.precision.dtypes import real_view

Part = Callable[[Tensor], Tensor]
"""Makes of a tensor as much as this process holds of it."""


class Magnitude(NamedTuple):
    """The elements of one tensor, or of several together.

    Attributes:
        largest: largest absolute value of the finite ones; 0 without finite ones.
        not_finite: how many are inf or nan.
        elements: how many there are.
        dtype: such as ``"float16"``; of several tensors, of the first with an element that is not finite.
    """

    largest: float
    not_finite: int
    elements: int
    dtype: str

    def joined(self, other: Magnitude) -> Magnitude:
        """The statistics of both."""
        dtype = other.dtype if other.not_finite and not self.not_finite else self.dtype
        counts = (self.not_finite + other.not_finite, self.elements + other.elements)
        return Magnitude(max(self.largest, other.largest), *counts, dtype)


@dataclass
class Call:
    """One call of a module.

    Attributes:
        name: the module's qualified name, as in ``named_modules()``; "" for the LightningModule.
        kind: its class.
        number: which call of this module in this step; 1 for the first, 0 for ``training_step`` itself.
        caller: the call that it was made in; None for ``training_step``.
        inputs, outputs: of the forward; None where there was no floating-point tensor.
        gradient_in: with respect to the outputs: what comes in backward.
        gradient_out: with respect to the inputs: what is handed on.
    """

    name: str
    kind: str
    number: int = 1
    caller: Call | None = None
    inputs: Magnitude | None = None
    outputs: Magnitude | None = None
    gradient_in: Magnitude | None = None
    gradient_out: Magnitude | None = None


class Origin(NamedTuple):
    """Where the first gradient that is not finite was made.

    Attributes:
        call: in the backward of this call.
        after: not of one of the modules in it, but of its own code, right before this one's turn in backward.
            None where the call is itself the place.
        parameter: it is that of this parameter; None where it is that of an input.
    """

    call: Call
    after: Call | None = None
    parameter: str | None = None


class Probe:
    """Watches a forward pass of a module and of everything in it, and backward passes until one is not finite.

    Args:
        module: the LightningModule. Its metrics are left out: no module uses what they return.
        part: as much of a tensor as this process holds, as a plain tensor.
        called: whether ``training_step`` runs by a call of the module, the first one.

    Attributes:
        first_output: the first call, in the order in which they return, whose output is not finite.
        first_gradient: the first call, in the order of the backward pass, whose ``gradient_in`` is not finite.
        parameters: names of the parameters whose gradients are not finite, in the order of the backward pass.
        gradients_before, outputs_before: how many gradients, and outputs, were finite before the first that was not.
    """

    def __init__(self, module: nn.Module, part: Part = identity, *, called: bool = False) -> None:
        self.step = Call("", plain_class(module).__name__, number=0)
        self._part = part
        self._starts_by_call = called
        self.first_output: Call | None = None
        self.first_gradient: Call | None = None
        self.parameters: list[str] = []
        self.gradients_before = self.outputs_before = 0
        self._first: tuple[Call, str] | None = None  # the first gradient that is not finite, and what it is of
        self._root = module
        self._open = [self.step]
        self._calls: Counter[str] = Counter()
        self._latest: dict[str, Call] = {}
        self._in_forward = True
        self._watches_gradients = False
        self._handles: list[Any] = []

    def __enter__(self) -> Probe:
        metrics = tuple(f"{name}." for name, part in self._root.named_modules() if isinstance(part, Metric))
        for name, part in self._root.named_modules():
            if isinstance(part, (Metric, torch.jit.ScriptModule)) or name.startswith(metrics):
                continue
            self._handles += [
                part.register_forward_pre_hook(partial(self._enter_forward, name), with_kwargs=True),
                part.register_forward_hook(self._leave_forward, always_call=True),
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def start_backward(self) -> None:
        """From here on watch gradients, if all were finite so far; what runs forward now is a recomputation."""
        self._in_forward, self._watches_gradients = False, not self.parameters

    def end_backward(self) -> None:
        """Watch no more gradients; the forward goes on."""
        self._in_forward, self._watches_gradients = True, False

    def look(self, name: str, gradient: Tensor) -> None:
        """Record the gradient of a parameter; to be called while the backward pass runs."""
        magnitude = self._measured(gradient)
        if magnitude is None or not magnitude.not_finite:
            return
        self.parameters.append(name)
        if self._first is None:
            owner = name.rpartition(".")[0]
            call = self._latest.get(owner) or Call(owner, plain_class(self._root.get_submodule(owner)).__name__)
            self._first = (call, name)

    def origin(self) -> Origin | None:
        """Where the first gradient that is not finite was made; None where all were finite."""
        if self._first is None:
            return None
        call, what = self._first
        if what == "input":
            return Origin(call)
        if what != "output":
            return Origin(call, parameter=what)
        # the module received it: it was made in the code of the innermost caller that was given a finite one
        caller = call.caller
        while caller is not None and caller.gradient_in is not None and caller.gradient_in.not_finite:
            caller = caller.caller
        return Origin(caller or self.step, after=call)

    def _enter_forward(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._in_forward:
            return None
        if self._starts_by_call:
            self._starts_by_call = False
            self._open.append(self.step)
            return None
        self._calls[name] += 1
        call = Call(name, plain_class(module).__name__, self._calls[name], self._open[-1])
        call.inputs = self._measured_all(tensors_in((args, kwargs)))
        self._open.append(call)
        self._latest[name] = call
        return self._tapped(call, args), {key: self._tapped(call, value) for key, value in kwargs.items()}

    def _leave_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._in_forward:
            return
        call = self._open.pop()
        if call is self.step:
            return
        call.outputs = self._measured_all(tensors_in(output))
        if self.first_output is None:
            self.first_output = call if call.outputs is not None and call.outputs.not_finite else None
            self.outputs_before += self.first_output is None
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                hook = tensor.register_hook(partial(self._take_gradient, call, "output"))  # type: ignore[no-untyped-call]
                self._handles.append(hook)

    def _tapped(self, call: Call, value: Any) -> Any:
        """``value`` with an edge of its own in the graph: the gradient of an input that others use as well is a sum."""
        if isinstance(value, Tensor):
            if not (value.requires_grad and value.layout is torch.strided):
                return value
            alias = value.view_as(value)
            if alias.requires_grad:
                alias.register_hook(partial(self._take_gradient, call, "input"))  # type: ignore[no-untyped-call]
            return alias
        return tuple(self._tapped(call, item) for item in value) if type(value) is tuple else value

    def _take_gradient(self, call: Call, what: str, gradient: Tensor) -> None:
        magnitude = self._measured(gradient)
        if magnitude is None:
            return
        if what == "output":
            call.gradient_in = magnitude if call.gradient_in is None else call.gradient_in.joined(magnitude)
        else:
            call.gradient_out = magnitude if call.gradient_out is None else call.gradient_out.joined(magnitude)
        if magnitude.not_finite:
            self._first = self._first or (call, what)
            if what == "output":
                self.first_gradient = self.first_gradient or call

    def _measured(self, gradient: Tensor) -> Magnitude | None:
        magnitude = self._measured_all([gradient]) if self._watches_gradients else None
        if magnitude is not None and self._first is None:
            self.gradients_before += not magnitude.not_finite
        return magnitude

    def _measured_all(self, tensors: Iterable[Tensor]) -> Magnitude | None:
        return measure(map(self._part, tensors))


def measure(tensors: Iterable[Tensor]) -> Magnitude | None:
    """Measure the elements of the floating-point and complex tensors among these. Returns None without such a tensor.

    Synchronizes. A complex tensor counts as a real one of shape (..., 2).
    """
    found: Magnitude | None = None
    for tensor in map(real_view, tensors):
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or not tensor.numel():
            continue
        values = tensor.detach()
        finite = values.isfinite()
        largest = values.abs().where(finite, torch.zeros((), dtype=values.dtype, device=values.device)).max().item()
        count, dtype = values.numel(), str(values.dtype).removeprefix("torch.")
        one = Magnitude(largest, count - int(finite.sum().item()), count, dtype)
        found = one if found is None else found.joined(one)
    return found
