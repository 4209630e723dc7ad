"""Activation checkpointing: recompute activations in the backward pass instead of storing them, to save memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.callbacks.module_selection import ModulePattern, as_patterns, select_modules
from trainer.common.run_callback import RunCallback
from trainer.common.session import OwnForward, Session
from trainer.state.generators import OF_PROCESS, RandomGenerator, is_random, set_state, state_of


class ActivationCheckpointing(RunCallback):
    """Applies ``torch.utils.checkpoint`` to the chosen modules during a fit.

    A chosen module stores only its inputs. Its forward runs a second time in the backward pass, under the same autocast
    and with the same random numbers. Training is bitwise equal to training without checkpointing, at the cost of the
    second forward. Only the ``forward`` of the module is replaced, during training; the module, its weights and the
    keys of its ``state_dict`` do not change. A forward without gradients (validation) is not checkpointed.

    The random generators that are restored for the second forward are torch's global ones and those that the first
    forward of the module in the fit has used: Python's, NumPy's, and generators in attributes of the module or of
    modules inside it. Under ``torch.compile``, only torch's are restored.

    A forward that updates buffers updates them once: the second forward reads the same values as the first, and its
    updates are dropped. So BatchNorm's running statistics, or the vectors of ``spectral_norm``, are the same as without
    checkpointing (torch's ``checkpoint`` alone updates them twice). All other side effects of a forward happen twice,
    such as Python counters and hooks of the modules inside. If a LightningModule inside a chosen module calls
    ``self.log``, the second forward fails: log in ``training_step`` instead.

    Args:
        modules: one or several of: a pattern for the module's name in the LightningModule (``"net.layer*"``, see
            ``fnmatch``; ``*`` also matches dots), a pattern for the name of its class (``"Bottleneck"``), or a class. A
            container that is never called itself (``nn.ModuleList``) stands for its members. A module inside a chosen
            one is part of it, and is not chosen again.

    Raises:
        ConfigurationError: if ``modules`` is empty or, when the fit starts, if a pattern matches no module.
    """

    def __init__(self, modules: ModulePattern | Sequence[ModulePattern]) -> None:
        self.modules = as_patterns(modules)
        self._chosen: list[nn.Module] = []
        self._session = Session()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Choose the modules early, so that a wrong name is refused before the run starts."""
        self._chosen = list(select_modules(pl_module, self.modules, "ActivationCheckpointing").values())

    def on_train_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Replace the forward of the chosen modules."""
        for module in self._chosen:
            self._session.replace(module, "forward", _CheckpointedForward(module))

    def on_train_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Restore the modules, before the precision plugin restores forwards that it replaced earlier."""
        self._clean_up(trainer)

    def _clean_up(self, trainer: pl.Trainer) -> None:
        self._session.close()
        self._chosen = []


class _CheckpointedForward(OwnForward):
    """The checkpointed ``forward`` of a module.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._buffers = [(owner, name) for owner in module.modules() for name, _ in owner.named_buffers(recurse=False)]
        generators = [value for owner in module.modules() for value in vars(owner).values() if is_random(value)]
        self._generators: list[RandomGenerator] = [*OF_PROCESS, *generators]  # later, those that a forward has used
        self._has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a compiled graph writes to buffers once, at its end
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        # torch saves the random state of a device only if a positional argument contains a tensor on that device;
        # therefore a parameter is passed
        first_parameter = next(self._module.parameters(), None)
        states = [(generator, state_of(generator)) for generator in self._generators]
        contexts: dict[str, Any] = {}
        if self._buffers or states:
            contexts["context_fn"] = lambda: (nullcontext(), _Snapshot(self._buffers, states))
        output = checkpoint(self._run, args, kwargs, first_parameter, use_reentrant=False, **contexts)
        if not self._has_run:
            self._has_run = True
            self._generators = [generator for generator, state in states if state_of(generator) != state]
        return output

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], first_parameter: Tensor | None) -> Any:
        return self._forward(*args, **kwargs)


class _Snapshot:
    """A reusable context in which buffers and random generators are as they were when the context was created.

    Writes to buffers inside the context go to copies, and the generators are restored at its end.

    Args:
        buffers: the buffers, each as a module and a name.
        states: the generators, each with its state.
    """

    def __init__(self, buffers: Sequence[tuple[nn.Module, str]], states: Sequence[tuple[RandomGenerator, Any]]) -> None:
        self._buffers, self._states = buffers, states
        self._values: list[Tensor] = [getattr(owner, name).detach().clone() for owner, name in buffers]
        self._originals: list[Tensor] = []
        self._later: list[Any] = []

    def __enter__(self) -> None:
        self._originals = [getattr(owner, name) for owner, name in self._buffers]
        self._later = [state_of(generator) for generator, _ in self._states]
        for (owner, name), value in zip(self._buffers, self._values, strict=True):
            setattr(owner, name, value.clone())
        for generator, state in self._states:
            set_state(generator, state)

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for (owner, name), original in zip(self._buffers, self._originals, strict=True):
            setattr(owner, name, original)
        for (generator, _), state in zip(self._states, self._later, strict=True):
            set_state(generator, state)
        self._originals, self._later = [], []
