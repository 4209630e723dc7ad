"""Less memory for more time: activations are forgotten in the forward pass and computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.callbacks.choice import Choice, as_choices, choose
from trainer.callbacks.run_callback import RunCallback
from trainer.engine.forwards import OwnForward


class ActivationCheckpointing(RunCallback):
    """Applies ``torch.utils.checkpoint`` to the named modules while a fit lasts.

    A chosen module keeps its inputs only; in the backward pass its forward runs a second time, under the same autocast
    and with the same random numbers. Training gives the same bits as without, at the cost of that second forward. The
    module, its weights and the keys of its ``state_dict`` stay what they are: only its ``forward`` is exchanged, while
    training runs. A forward without gradients (validation) runs as always.

    A forward that changes buffers changes them once: the second one sees them as the first did, and what it makes of
    them is dropped. So BatchNorm's running statistics, or the vectors of ``spectral_norm``, come out as without
    checkpointing (torch's ``checkpoint`` alone updates them twice). Anything else that a forward does to the outside
    happens twice: Python attributes it counts up, and hooks of the modules inside. ``self.log`` of a LightningModule
    inside a chosen one fails in the second forward: log from ``training_step``.

    Args:
        modules: which ones, as one choice or several: a pattern for a module's name in the LightningModule
            (``"net.layer*"``, see ``fnmatch``; ``*`` matches dots too), a pattern for the name of its class
            (``"Bottleneck"``), or a class. A container that is never called itself (``nn.ModuleList``) stands for what
            it holds. A module inside a chosen one is part of it, not chosen again.

    Raises:
        ConfigurationError: no choice at all; or, when the fit starts, one that matches no module.
    """

    def __init__(self, modules: Choice | Sequence[Choice]) -> None:
        self.modules = as_choices(modules)
        self._chosen: list[nn.Module] = []
        self._checkpointed: list[_CheckpointedForward] = []

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Find the modules early, so that a wrong name is refused before the run starts."""
        self._chosen = list(choose(pl_module, self.modules, "ActivationCheckpointing").values())

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Replace their forward."""
        self._checkpointed = [_CheckpointedForward(module) for module in self._chosen]

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Leave the modules as they were; before the precision does, which may have exchanged a forward earlier."""
        self._let_go(trainer)

    def _let_go(self, trainer: Any) -> None:
        for checkpointed in self._checkpointed:
            checkpointed.undo()
        self._checkpointed = []
        self._chosen = []


class _CheckpointedForward(OwnForward):
    """A module's ``forward``, checkpointed.

    Args:
        module: whose forward.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._buffers = [(owner, name) for owner in module.modules() for name, _ in owner.named_buffers(recurse=False)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a compiled graph writes to buffers once, at its end
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        # torch keeps the random state of a device if a positional argument has a tensor there: a parameter always does
        there = next(self._module.parameters(), None)
        contexts: dict[str, Any] = {"context_fn": self._contexts} if self._buffers else {}
        return checkpoint(self._run, args, kwargs, there, use_reentrant=False, **contexts)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], there: Tensor | None) -> Any:
        return self._forward(*args, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        return nullcontext(), _BuffersAsNow(self._buffers)


class _BuffersAsNow:
    """A context, for any number of times, in which buffers have the values they had when it was made.

    What is written to them inside goes to copies.

    Args:
        buffers: their modules and names.
    """

    def __init__(self, buffers: Sequence[tuple[nn.Module, str]]) -> None:
        self._buffers = buffers
        self._values: list[Tensor] = [getattr(owner, name).detach().clone() for owner, name in buffers]
        self._originals: list[Tensor] = []

    def __enter__(self) -> None:
        self._originals = [getattr(owner, name) for owner, name in self._buffers]
        for (owner, name), value in zip(self._buffers, self._values, strict=True):
            setattr(owner, name, value.clone())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for (owner, name), original in zip(self._buffers, self._originals, strict=True):
            setattr(owner, name, original)
        self._originals = []
