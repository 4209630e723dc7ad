"""Compute and change gradients. In the steps of a fit, only engines and the loss scaler access a parameter's ``grad``.

In a training step, in this order::

    clear(optimizer)                   at the first batch of an accumulation window, for each optimizer
    forward_without_loss(has_run)      each batch without a loss in this process: completes the forward pass
    backward_without_loss(...)         each batch without a loss in this process: instead of the backward pass
    backward(scale(loss))              each other batch
    keep(optimizer)                    only if a compiled backward pass (CUDA graphs) would overwrite the gradients
    multiply_(optimizers, factor)      at a window's end, if the losses were not multiplied by their exact weights
    unscale_(optimizer)                for each optimizer: gradients are unscaled from here on. Runs before
                                       `on_after_backward` if code may read or change gradients there
    norm(optimizer), clip_(optimizer, ...), local(optimizer)       hooks, callbacks
    step(optimizer)                    with an enabled scaler, does nothing if a gradient is not finite
    update()                           once: adjusts the loss scale, and returns the outcome if it is known
    resolve_outcome()                  the outcome otherwise; may be called much later

``Gradients`` has the operations of engines with whole gradients in each process: a single device, and DDP. An engine
with sharded gradients has a subclass that overrides ``part`` and the methods that need the other parts, such as
``norm`` and ``clip_``. The subclass also gives the scaler (:meth:`Gradients.use_scaler`) a function that all-reduces a
flag: whether a gradient is not finite. It reduces only a flag, because a maximum of values may drop a NaN (in gloo).

The loss scaler has the interface of torch's ``GradScaler``: its methods take an optimizer and read the gradients of its
parameters. Our scaler finds them with ``LossScaler.gradients_of``, which also works without an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.common.module_tree import parameters_of
from trainer.precision.dtypes import real_view
from trainer.precision.scaler import LossScaler, UpdateOutcome, gradients_of

_ZERO_GRAD = Optimizer.zero_grad
_KEPT_MARK = "_is_kept"
"""Marks a gradient made by :meth:`Gradients.keep`. Autograd accumulates into it, so it stays the same tensor."""
_USED_AT = "_used_at"
"""Attribute of a gradient: its version when a step used it."""


def has_own_zero_grad(optimizer: Optimizer) -> bool:
    """Return whether the optimizer overrides torch's ``zero_grad``."""
    return type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in optimizer.__dict__


class Gradients:
    """The gradients of an engine with whole gradients in each process.

    Args:
        scaler: scales losses, unscales gradients, and skips steps that overflowed. A disabled scaler does nothing.

    Attributes:
        scaler: the current scaler; see :meth:`use_scaler`.
        are_parts: whether a process holds only parts of parameters and gradients.
    """

    are_parts = False

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler

    def use_scaler(self, scaler: LossScaler) -> LossScaler:
        """Replace the scaler. Return the previous one."""
        before, self.scaler = self.scaler, scaler
        return before

    # --- batches of an accumulation window ----------------------------------------------------------------------

    def clear(self, optimizer: Optimizer) -> None:
        """Set the gradients to None.

        Calls ``optimizer.zero_grad()`` only if the optimizer overrides it, because torch's version takes 4 microseconds
        for a profiling scope.
        """
        if has_own_zero_grad(optimizer):
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the loss scale, as the input of the backward pass."""
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scaled loss to those of the window's earlier batches."""
        loss.backward()  # type: ignore[no-untyped-call]

    def backward_by(self, run: Callable[[Tensor], None], loss: Tensor) -> None:
        """Call ``run(loss)``, a backward pass that ``training_step`` requested. The loss is scaled."""
        run(loss)

    def forward_without_loss(self, has_run: bool) -> None:
        """Take part in the other processes' forward pass if this process has no loss.

        Args:
            has_run: whether ``training_step`` was called and returned None. If False, there was no batch.
        """

    def backward_without_loss(self, syncs_gradients: bool) -> None:
        """Take part in the other processes' backward pass if this process has no loss. Adds zeros.

        Args:
            syncs_gradients: whether this backward pass synchronizes gradients, as the last of a window does.
        """

    def keep(self, optimizer: Optimizer) -> None:
        """Copy gradients to separate memory, because the backward pass of a CUDA graph overwrites its outputs.

        Autograd uses the first gradient as ``.grad`` without a copy. Later gradients are added to our copy in place.
        """
        loose = [p for p in parameters_of(optimizer) if p.grad is not None and not hasattr(p.grad, _KEPT_MARK)]
        dense = [parameter for parameter in loose if not parameter.grad.is_sparse]
        copies = [torch.empty_like(parameter.grad) for parameter in dense]
        if dense:
            torch._foreach_copy_(copies, [parameter.grad for parameter in dense])
        for parameter, copy in zip(dense, copies, strict=True):
            setattr(copy, _KEPT_MARK, True)
            parameter.grad = copy

    def multiply_(self, optimizers: Iterable[Optimizer], factor: float | Tensor) -> None:
        """Multiply the gradients of a window after its last backward pass, by the same factor on all processes."""
        gradients = [gradient for optimizer in optimizers for gradient in gradients_of(optimizer)]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    # --- one optimizer step -------------------------------------------------------------------------------------

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, once for each step, and check whether they are finite."""
        self.scaler.unscale_(optimizer)

    def scale_again(self) -> list[tuple[Optimizer, Tensor]]:
        """Undo :meth:`unscale_` for gradients that no step has used, because scaled gradients will be added to them.

        Returns:
            The optimizers of these gradients, with the factors, which are not finite after an overflow.
        """
        unused = self.scaler.forget_unused()
        for optimizer, factor in unused:
            shards = [self.part(gradient) for gradient in gradients_of(optimizer)]
            values = [shard.coalesce().values() if shard.is_sparse else shard for shard in shards]
            values = [value for value in values if value.numel()]  # torch raises for the norm of an empty shard
            if values:
                # gradients that `zero_grad(set_to_none=False)` has cleared stay 0, although 0 times inf is NaN
                are_cleared = torch.nn.utils.get_total_norm(values, inf).to(factor.device) == 0
                self.multiply_([optimizer], factor.masked_fill(are_cleared, 0.0))
        return unused

    def mark_used(self, optimizer: Optimizer) -> None:
        """Record that a step has used the gradients of an optimizer, so that they are not accumulated any further."""
        if (first := self.first(optimizer)) is not None:
            setattr(first, _USED_AT, first._version)  # noqa: SLF001 - counts in-place changes

    def are_used(self, optimizer: Optimizer) -> bool:
        """Return whether a step has used all existing gradients, and no backward pass has changed them since."""
        first = self.first(optimizer)
        return first is None or getattr(first, _USED_AT, None) == first._version  # noqa: SLF001

    def first(self, optimizer: Optimizer) -> Tensor | None:
        """Return the first gradient, or None without gradients. Only this one is marked, so that marking is cheap."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    return self.part(parameter.grad)
        return None

    def norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor | None:
        """Return the total norm of an optimizer's gradients as a plain 0-dim tensor, or None without gradients."""
        gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients_of(optimizer)]
        return norm_of(gradients, norm_type) if gradients else None

    def norms(self, optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter that has a gradient, with the gradient's L2 norm: 0-dim, in float32 or higher.

        If gradients are sharded, the norm is that of the whole gradient, and all processes must call this method.
        """
        gradients = self.local(optimizer)
        return [(p, norm) for (p, _), norm in zip(gradients, each_norm([g for _, g in gradients]), strict=True)]

    def clip_(
        self, optimizer: Optimizer, limit: float, algorithm: str, norm_type: float = 2.0, *, measure: bool = True
    ) -> Tensor | None:
        """Clip the gradients of one optimizer in place, without a host-device synchronization.

        Args:
            optimizer: an optimizer with unscaled gradients.
            limit: the largest norm, or the largest absolute value. Complex gradients are clipped by value in their real
                and imaginary parts separately.
            algorithm: ``"norm"`` or ``"value"``.
            norm_type: order of the norm. Default: 2.
            measure: whether to return the norm even if clipping does not need it. Default: True.

        Returns:
            The norm before clipping, as :meth:`norm` returns it, or None.
        """
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        if not parameters:
            return None
        if algorithm == "norm" and any(p.grad.dtype is torch.float16 for p in parameters):
            norm = self.norm(optimizer, norm_type)
            assert norm is not None
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
            return norm
        if algorithm == "norm":
            total = torch.nn.utils.clip_grad_norm_(parameters, limit, norm_type)
            return total if isinstance(total, Tensor) else None  # users' tests replace it with a mock
        norm = self.norm(optimizer, norm_type) if measure else None
        plain = [p for p in parameters if not (p.is_complex() or p.grad.is_sparse)]
        if plain:
            torch.nn.utils.clip_grad_value_(plain, limit)
        for parameter in (p for p in parameters if p.grad.is_sparse):
            parameter.grad = parameter.grad.coalesce()  # sums the values of an element
            clamp_([real_view(parameter.grad.values())], limit)
        clamp_([real_view(p.grad) for p in parameters if p.is_complex() and not p.grad.is_sparse], limit)
        return norm

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Step the optimizer. An enabled scaler skips the step if a gradient is not finite, or without gradients."""
        self.scaler.step(optimizer, **kwargs)

    def update(self, accumulating: Sequence[Optimizer] = ()) -> UpdateOutcome | None:
        """Adjust the loss scale, once for all steps since the last call.

        Args:
            accumulating: optimizers with gradients that no step has used yet, which are multiplied to match the new
                scale. Default: none.

        Returns:
            The outcome of the steps, or None if reading it would synchronize with the device: see
                :meth:`resolve_outcome`.
        """
        scaler = self.scaler
        if accumulating:
            self.scale_again()
            change = scaler.update_and_compare()
            if isinstance(change, Tensor) or change != 1.0:
                self.multiply_(accumulating, change)
        else:
            scaler.update()
        return scaler.resolve_outcome() if scaler.outcome_is_on_host else None

    def resolve_outcome(self) -> UpdateOutcome:
        """Return the outcome that :meth:`update` did not return. May synchronize with the device."""
        return self.scaler.resolve_outcome()

    # --- inspection and checkpoints -----------------------------------------------------------------------------

    def local(self, optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter that has a gradient, with the part of the gradient in this process, as a plain tensor.

        A complex gradient is returned as a real tensor of shape (..., 2).

        If gradients are sharded, a statistic of the part is local to this process: reduce it over the processes before
        it is reported.
        """
        return [(p, real_view(self.part(p.grad))) for p in parameters_of(optimizer) if p.grad is not None]

    def part(self, tensor: Tensor) -> Tensor:
        """Return the part of a parameter, or of another tensor, in this process, as a plain tensor."""
        return tensor

    def total(self, counts: Tensor, of: Sequence[Tensor]) -> Tensor:
        """Sum the counts of all processes. Each part counts once, even if several processes hold a copy of it.

        All processes must call it together, with the same parameters. Does not synchronize with a GPU.

        Args:
            counts: counts of this process, of shape (parameters, any).
            of: the parameters.

        Returns:
            The sums, of the same shape.
        """
        return counts

    def leaves(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the tensors that a forward pass uses and that receive gradients, by the names of the parameters."""
        return dict(module.named_parameters())

    def idle_loss(self) -> Tensor | None:
        """Run the collectives of the other processes' forward pass in a replay, if this process has no batch.

        Returns:
            A loss of 0 with a backward pass that runs the collectives of the other processes' backward pass, or None if
            a replay needs no collectives because this process has whole parameters.
        """
        return None

    def state_dict(
        self, parameters: Iterable[tuple[str, Tensor]], optimizers: Iterable[Optimizer]
    ) -> dict[str, Tensor]:
        """Return the gradients that no optimizer step has used yet, by the parameters' names, for a checkpoint.

        Args:
            parameters: parameters of the module, by name.
            optimizers: the optimizers with such gradients.
        """
        self.scale_again()
        unused = {id(parameter) for optimizer in optimizers for parameter, _ in self.local(optimizer)}
        return {name: p.grad.detach() for name, p in parameters if p.grad is not None and id(p) in unused}

    def can_load(self, parameters: Iterable[tuple[str, Tensor]], state: Mapping[str, Tensor]) -> bool:
        """Return whether :meth:`load_state_dict` can restore all gradients, which must have the shapes of the parts."""
        parts = {name: self.part(parameter) for name, parameter in parameters}
        return all(name in parts and gradient.shape == parts[name].shape for name, gradient in state.items())

    def load_state_dict(self, parameters: Iterable[tuple[str, Tensor]], state: Mapping[str, Tensor]) -> None:
        """Restore the gradients that :meth:`state_dict` returned. They are scaled if losses are scaled.

        They get the memory layout of their parameters, because they may have been saved in another memory format.
        """
        for name, parameter in parameters:
            if name in state:
                gradient = state[name].to(parameter.device)
                if gradient.layout is torch.strided and gradient.stride() != parameter.stride():
                    gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
                parameter.grad = gradient
                self.scaler.expect_scaled(parameter.device)

    def names(self, parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Return the names of the parameters with a dense gradient of their dtype."""
        gradients = [(name, parameter.dtype, parameter.grad) for name, parameter in parameters]
        return [name for name, dtype, g in gradients if g is not None and (g.dtype, g.layout) == (dtype, torch.strided)]

    def load_zeros(
        self, parameters: Iterable[tuple[str, Tensor]], names: Container[str], optimizers: Iterable[Optimizer]
    ) -> None:
        """Set the gradients with these names to 0, as if the optimizers had used them."""
        for name, parameter in parameters:
            if name in names:
                parameter.grad = torch.zeros_like(parameter)
        for optimizer in optimizers:
            self.mark_used(optimizer)

    @contextmanager
    def set_aside(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Remove the gradients of all parameters during a replay, and restore them afterwards. A context manager."""
        held = [(parameter, parameter.grad) for parameter in parameters]
        try:
            for parameter, _ in held:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in held:
                parameter.grad = gradient


def clamp_(tensors: list[Tensor], limit: float) -> None:
    """Clamp the elements of real tensors on one device to at most ``limit`` in absolute value, in place."""
    if tensors:
        torch._foreach_clamp_min_(tensors, -limit)
        torch._foreach_clamp_max_(tensors, limit)


def norm_of(tensors: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the total norm of dense tensors as torch's ``get_total_norm``, but that of float16 tensors in float32.

    In float16, a norm above 65504 is inf, even if all elements are finite.

    Args:
        tensors: the tensors; at least one.
        norm_type: order of the norm. Default: 2.
    """
    half = [tensor for tensor in tensors if tensor.dtype is torch.float16]
    if not half:
        return torch.nn.utils.get_total_norm(tensors, norm_type)
    norms = torch._foreach_norm(half, norm_type, dtype=torch.float32)  # noqa: SLF001 - one kernel for all
    if len(half) < len(tensors):
        others = [tensor for tensor in tensors if tensor.dtype is not torch.float16]
        norms = (*norms, torch.nn.utils.get_total_norm(others, norm_type))
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(half[0].device) for norm in norms]), norm_type)
    return total


def each_norm(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each tensor on its device, in float32 or higher: one kernel per device and dtype."""
    values = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        kinds.setdefault((value.device, value.dtype), []).append(index)
    norm_by_index: dict[int, Tensor] = {}
    for (_, dtype), indices in kinds.items():
        wide = torch.promote_types(dtype, torch.float32)
        norms = torch._foreach_norm([values[i] for i in indices], 2.0, dtype=wide)  # noqa: SLF001 - one kernel for all
        norm_by_index |= zip(indices, norms, strict=True)
    return [norm_by_index[index] for index in range(len(values))]


def total_norm(norms: Mapping[Optimizer, Tensor], norm_type: float = 2.0) -> Tensor | None:
    """Return the norm of all gradients, from each optimizer's norm in its last step, or None without norms.

    Args:
        norms: the norms by optimizer.
        norm_type: their order. Default: 2.
    """
    each = list(norms.values())
    if len(each) < 2:
        return each[0] if each else None
    total: Tensor = torch.linalg.vector_norm(torch.stack(each), norm_type)
    return total


def zero_loss(parameters: Iterable[Tensor]) -> Tensor:
    """Return a loss that is 0 and has a gradient of exact zeros for every trainable parameter.

    A process with a ``training_step`` that returned None runs its backward pass on this loss, so that gradient
    synchronization of the other processes can complete. Uses an empty slice instead of ``parameter * 0``, because 0
    times inf is nan.
    """
    trainable = [p for p in parameters if p.requires_grad]
    return torch.stack([p.reshape(-1)[:0].sum() for p in trainable]).sum()
