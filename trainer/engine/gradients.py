"""Gradients: what computes and changes them. No other module touches a parameter's ``grad``.

In a training step, in this order::

    clear(optimizer)                   at a window's first batch, for each optimizer
    backward(scale(loss))              each batch; or, where this process has no loss,
    forward_without_loss(has_run)      before the processes tell each other who has one, and
    backward_without_loss(exchanges)   in the place of the backward pass
    keep(optimizer)                    only where a compiled backward pass (CUDA graphs) would overwrite them
    multiply_(optimizers, factor)      at a window's end, where its mean is not what the shares had expected
    unscale_(optimizer)                for each optimizer: gradients are in true units from here on
    norm(optimizer), clip_(optimizer, ...), local(optimizer)       hooks, callbacks
    step(optimizer)                    leaves the weights alone when a gradient is not finite
    update()                           once: adjusts the loss scale, and says which optimizers skipped, if that is known
    resolve_outcome()                  which optimizers skipped, where it was not; may be asked for much later

``Gradients`` is for engines whose parameters hold their whole gradients: a single device, and DDP. An engine whose
processes hold parts of them has a subclass. That overrides ``local`` and what needs the other parts (``norm``,
``clip_``, ``backward_without_loss``), and tells the scaler (:meth:`Gradients.use_scaler`) how processes agree that a
gradient is not finite. Processes exchange flags, never values: a maximum may drop a NaN (gloo's does).

The loss scaler is the other half of this: torch's ``GradScaler``, whose methods take an optimizer and look at its
parameters' gradients. Ours finds them by ``LossScaler.gradients_of``, which works without an engine, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.engine.optimizer_calls import has_own_zero_grad
from trainer.precision.dtypes import real_view
from trainer.precision.scaler import LossScaler, UpdateOutcome, gradients_of
from trainer.walks import parameters_of

_IS_KEPT = "_is_kept"
"""Marks a gradient that :meth:`Gradients.keep` has made; one in which autograd adds up stays the same tensor."""
_USED_AT = "_used_at"
"""The version that a gradient had when a step used it: an attribute of the gradient."""


class Gradients:
    """The gradients of an engine whose parameters hold the whole of them.

    Args:
        scaler: scales losses, unscales gradients, skips steps that overflowed. A disabled one does nothing.

    Attributes:
        scaler: the one in use; see :meth:`use_scaler`.
        are_parts: whether a process holds no more than parts of parameters and gradients.
    """

    are_parts = False

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler

    def use_scaler(self, scaler: LossScaler) -> LossScaler:
        """Use another scaler from here on. Returns the one before."""
        before, self.scaler = self.scaler, scaler
        return before

    # --- a window's batches ---------------------------------------------------------------------------------

    def clear(self, optimizer: Optimizer) -> None:
        """Drop the gradients.

        As ``optimizer.zero_grad()`` does it, which is called only where the optimizer has its own: torch's takes 4
        microseconds for a profiling scope.
        """
        if has_own_zero_grad(optimizer):
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def scale(self, loss: Tensor) -> Tensor:
        """The loss as its backward pass wants it: times the loss scale."""
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scaled loss to those of the window's earlier batches."""
        loss.backward()  # type: ignore[no-untyped-call]

    def backward_by(self, run: Callable[[Tensor], None], loss: Tensor) -> None:
        """A backward pass inside of ``training_step``: ``run`` on the scaled loss."""
        run(loss)

    def forward_without_loss(self, has_run: bool) -> None:
        """Take part in the other processes' forward pass, in the place of a batch that has no loss.

        Args:
            has_run: whether ``training_step`` was called, and returned None; there was no batch otherwise.
        """

    def backward_without_loss(self, exchanges: bool) -> None:
        """Take part in the other processes' backward pass, in the place of a batch that has no loss. Adds zeros.

        Args:
            exchanges: whether it is one that exchanges gradients: the last of a window.
        """

    def keep(self, optimizer: Optimizer) -> None:
        """Give gradients memory of their own: a CUDA graph's backward pass writes the next ones over those it made.

        Autograd takes a first gradient as ``.grad`` as it is, without a copy. What it adds up in ours stays ours.
        """
        loose = [p for p in parameters_of(optimizer) if p.grad is not None and not hasattr(p.grad, _IS_KEPT)]
        dense = [parameter for parameter in loose if not parameter.grad.is_sparse]
        copies = [torch.empty_like(parameter.grad) for parameter in dense]
        if dense:
            torch._foreach_copy_(copies, [parameter.grad for parameter in dense])
        for parameter, copy in zip(dense, copies, strict=True):
            setattr(copy, _IS_KEPT, True)
            parameter.grad = copy

    def multiply_(self, optimizers: Iterable[Optimizer], factor: float | Tensor) -> None:
        """Multiply all gradients of a window, after its last backward pass. The factor is the same on all processes."""
        gradients = [gradient for optimizer in optimizers for gradient in gradients_of(optimizer)]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    # --- one weight update ----------------------------------------------------------------------------------

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, once for each step, and look whether they are finite."""
        self.scaler.unscale_(optimizer)

    def scale_again(self) -> None:
        """Undo :meth:`unscale_` of gradients that no step has used, because scaled gradients are about to be added."""
        for optimizer, factor in self.scaler.forget_unused():
            self.multiply_([optimizer], factor)

    def mark_used(self, optimizer: Optimizer) -> None:
        """Note that a step has used the gradients of an optimizer: they are not accumulated any further."""
        if (first := self._first(optimizer)) is not None:
            setattr(first, _USED_AT, first._version)  # noqa: SLF001 - counts in-place changes

    def are_used(self, optimizer: Optimizer) -> bool:
        """Return whether a step has used all gradients there are, and no backward pass has changed them since."""
        first = self._first(optimizer)
        return first is None or getattr(first, _USED_AT, None) == first._version  # noqa: SLF001

    def _first(self, optimizer: Optimizer) -> Tensor | None:
        """Return the first gradient, or None if there is none. It stands for all, so that a mark costs little."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    return self.part(parameter.grad)
        return None

    def norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor | None:
        """The norm of all gradients of an optimizer together, a plain 0-dim tensor; None where there are none."""
        gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients_of(optimizer)]
        return torch.nn.utils.get_total_norm(gradients, norm_type) if gradients else None

    def norms(self, optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
        """Each parameter that has a gradient, and that gradient's L2 norm: 0-dim, in float32 or better.

        Of gradients that are spread over processes these are the norms of the whole; all processes call this together.
        """
        found = self.local(optimizer)
        return [(p, norm) for (p, _), norm in zip(found, each_norm([g for _, g in found]), strict=True)]

    def clip_(
        self, optimizer: Optimizer, limit: float, algorithm: str, norm_type: float = 2.0, *, measure: bool = True
    ) -> Tensor | None:
        """Clip the gradients of one optimizer, in place, without a host-device synchronisation.

        Args:
            optimizer: whose gradients; they are unscaled.
            limit: the largest norm, or the largest absolute value. Of complex gradients, real and imaginary parts are
                clipped by value each.
            algorithm: ``"norm"`` or ``"value"``.
            norm_type: which norm.
            measure: whether to return the norm where clipping itself does not need it.

        Returns:
            The norm before clipping, as :meth:`norm` returns it; or None.
        """
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        if not parameters:
            return None
        if algorithm == "norm":
            total = torch.nn.utils.clip_grad_norm_(parameters, limit, norm_type)
            return total if isinstance(total, Tensor) else None  # users' tests put a mock in its place
        norm = self.norm(optimizer, norm_type) if measure else None
        torch.nn.utils.clip_grad_value_([p for p in parameters if not p.is_complex()], limit)
        clamp_([real_view(p.grad) for p in parameters if p.is_complex()], limit)
        return norm

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Step the optimizer, unless a gradient is not finite or there are none."""
        self.scaler.step(optimizer, **kwargs)

    def update(self, accumulating: Sequence[Optimizer] = ()) -> UpdateOutcome | None:
        """Adjust the loss scale, once for all the steps since the last time.

        Args:
            accumulating: optimizers with gradients that no step has used yet, which are multiplied to match the new
                scale. Default: none.

        Returns:
            Their outcome; None where that would wait for the device: see :meth:`resolve_outcome`.
        """
        scaler = self.scaler
        if accumulating:
            self.scale_again()
            change = scaler.update_and_compare()
            if isinstance(change, Tensor) or change != 1.0:
                self.multiply_(accumulating, change)
        else:
            scaler.update()
        return scaler.resolve_outcome() if scaler.knows_outcome else None

    def resolve_outcome(self) -> UpdateOutcome:
        """The outcome that :meth:`update` has not returned. May wait for the device."""
        return self.scaler.resolve_outcome()

    # --- looking at them, keeping them ----------------------------------------------------------------------

    def local(self, optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
        """Each parameter that has a gradient, and as much of the gradient as this process holds, as a plain tensor.

        A complex gradient is returned as a real tensor of shape (..., 2).

        A figure of what is spread over processes is that of one process only: sum it over them before it is told.
        """
        return [(p, real_view(self.part(p.grad))) for p in parameters_of(optimizer) if p.grad is not None]

    def part(self, tensor: Tensor) -> Tensor:
        """As much of a parameter, or of anything else, as this process holds, as a plain tensor."""
        return tensor

    def total(self, counts: Tensor, of: Sequence[Tensor]) -> Tensor:
        """What the processes have counted in their parts, added up: each part once, however many hold a copy of it.

        All processes call this together, with the same parameters. Nothing waits for a GPU.

        Args:
            counts: this process's, of shape (parameters, any).
            of: the parameters.

        Returns:
            The sums, of the same shape.
        """
        return counts

    def leaves(self, module: nn.Module) -> dict[str, Tensor]:
        """What a forward pass computes with, by the parameters' names: where its backward pass brings gradients."""
        return dict(module.named_parameters())

    def idle_loss(self) -> Tensor | None:
        """A forward pass in step with those of the other processes, in the place of a batch that this one lacks.

        Returns:
            A loss without a value: its backward passes are in step with theirs, too. None where they do not wait.
        """
        return None

    def state_dict(
        self, parameters: Iterable[tuple[str, Tensor]], optimizers: Iterable[Optimizer]
    ) -> dict[str, Tensor]:
        """The gradients that no weight update has used yet, by the parameters' names, for a checkpoint.

        Args:
            parameters: of the module, by name.
            optimizers: those whose gradients are waiting.
        """
        self.scale_again()
        waiting = {id(parameter) for optimizer in optimizers for parameter, _ in self.local(optimizer)}
        return {name: p.grad.detach() for name, p in parameters if p.grad is not None and id(p) in waiting}

    def load_state_dict(self, parameters: Iterable[tuple[str, Tensor]], state: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`state_dict` returned. They are scaled, if losses are.

        They are laid out like their parameters, which may have been in another memory format.
        """
        for name, parameter in parameters:
            if name in state:
                gradient = state[name].to(parameter.device)
                if gradient.layout is torch.strided and gradient.stride() != parameter.stride():
                    gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
                parameter.grad = gradient
                self.scaler.expect_scaled(parameter.device)

    @contextmanager
    def set_aside(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """A context for replays: no parameter has a gradient in it, and afterwards each has what it had before."""
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


def each_norm(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The L2 norm of each of these, on their devices, in float32 or better: one kernel for a device and a dtype."""
    values = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        kinds.setdefault((value.device, value.dtype), []).append(index)
    found: dict[int, Tensor] = {}
    for (_, dtype), indices in kinds.items():
        wide = torch.promote_types(dtype, torch.float32)
        norms = torch._foreach_norm([values[i] for i in indices], 2.0, dtype=wide)  # noqa: SLF001 - a kernel in all
        found |= zip(indices, norms, strict=True)
    return [found[index] for index in range(len(values))]


def total_norm(norms: Mapping[Optimizer, Tensor]) -> Tensor | None:
    """The L2 norm of all gradients together, from that of each optimizer's (of its last step); None without any."""
    each = list(norms.values())
    if len(each) < 2:
        return each[0] if each else None
    total: Tensor = torch.linalg.vector_norm(torch.stack(each))
    return total


def zero_loss(parameters: Iterable[Tensor]) -> Tensor:
    """A loss that is 0 and has a gradient of exact zeros for every trainable parameter.

    A process whose ``training_step`` returned None runs its backward over this one, so that the other processes'
    gradient synchronisation finds a partner. An empty slice, not ``parameter * 0``: 0 times inf is nan.
    """
    trainable = [p for p in parameters if p.requires_grad]
    return torch.stack([p.reshape(-1)[:0].sum() for p in trainable]).sum()
