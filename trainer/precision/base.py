"""The precision protocol: the methods of a precision plugin, in the order in which the Trainer calls them.

===============================  ======================================================================
``for_device(device)``           once, when the Trainer is built: returns the plugin to use, usually
                                 itself. The other methods are called on that plugin.
``check(device)``                once, when the Trainer is built. Raises if the device is not supported.
``build_scaler(device)``         once, when the Trainer is built: returns the scaler for the Trainer's
                                 lifetime.
``init_context()``               while weights are created, in ``configure_model`` and under
                                 ``trainer.init_module()``.
``convert_module(module)``       once a run, before weights are loaded into it and it is moved and wrapped.
``session(module, device)``      once a run: a context around everything from the first to the last batch.
``check_optimizers(optimizers)`` once a fit, after the optimizers are created. Warns or raises.
``convert_batch(batch)``         every batch, before it is moved to the device.
``watch_weights()``              when an epoch begins, and after each row for the loggers: may check
                                 whether the next training step changes weights.
``state_dict()``                 in every checkpoint, for each process; ``load_state_dict(state)`` when a fit is
                                 resumed. For float16 on CPUs, all ranks also load rank 0's state in a session.
``autocast()``                   every forward (train, validate, test, predict): a context around the
                                 step function only; never around a backward.
===============================  ======================================================================

The base class is 32-bit training: by default every method changes nothing, so a plugin overrides only the methods that
it needs. Defining a class with ``names`` adds these names to ``Trainer(precision=...)``. An option
``conf/precision/NAME.yaml`` with the class as its ``_target_`` adds ``NAME`` to the command line. A complete example,
float32 with TensorFloat-32 products if the GPU has them::

    class TensorFloat32(Precision):
        name = "tf32"

        @contextmanager
        def session(self, module, device):
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(before)

    Trainer(precision=TensorFloat32())
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.errors import PrecisionError
from trainer.precision.scaler import LossScaler

_UNCHANGED: AbstractContextManager[None] = nullcontext()


class Precision:
    """32-bit training, and the base class of all precision plugins. See the module docstring for the protocol."""

    name: str = "32-true"
    """Name in ``trainer.precision``, logs and summaries."""
    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Names that ``Trainer(precision=...)`` accepts for this class, each with the arguments of the constructor."""
    dtype: torch.dtype = torch.float32
    """Dtype of matrix products and convolutions. In float8 precisions, bfloat16: the dtype of all other operations."""
    scales_loss: bool = False
    """Whether the loss is scaled, so that steps may overflow."""
    max_accumulation: float = math.inf
    """Largest number of batches in an accumulation window. More gradients in 16 bits would be lost in rounding."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        hooks = [name for name in vars(Precision) if not name.startswith("_")]
        methods = {name for name, value in vars(cls).items() if callable(value) and not name.startswith("_")}
        for name in sorted(methods):
            matches = [] if hasattr(super(cls, cls), name) else get_close_matches(name, hooks, n=1, cutoff=0.8)
            if matches:
                raise PrecisionError(
                    f"{cls.__qualname__} has a method {name!r}, which is not a hook of Precision. Did you mean"
                    f" {matches[0]!r}? Otherwise, give it another name, such as '_{name}'."
                )
        for name in vars(cls).get("names", {}):
            known = PLUGINS.setdefault(name, cls)
            if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise PrecisionError(
                    f"Got the precision name {name!r} for {cls.__qualname__}, but it is that of {known.__qualname__}."
                    " Expected a name that is not taken."
                )
            PLUGINS[name] = cls  # a notebook may define the class again

    @property
    def is_half(self) -> bool:
        """Whether matrix products are computed in 16 bits or fewer."""
        return self.dtype.itemsize <= 2

    def for_device(self, device: torch.device) -> Precision:
        """Return the plugin to use on ``device``: this one, unless it chooses between others."""
        return self

    def check(self, device: torch.device) -> None:
        """Raise or warn if the device does not support this precision.

        Raises:
            PrecisionError: if the device is not supported. The message names an alternative.
        """

    def build_scaler(self, device: torch.device) -> LossScaler:
        """Return the loss scaler for gradients on ``device``.

        Always returns a scaler, so that the loop has one code path. A disabled scaler does nothing.
        """
        return LossScaler(device.type, enabled=False)

    def init_context(self) -> AbstractContextManager[object]:
        """Return the context that creates weights in the dtype that :meth:`convert_module` converts them to."""
        return _UNCHANGED

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module with its parameters in the dtype that this precision keeps them in."""
        return module

    def session(self, module: nn.Module, device: torch.device) -> AbstractContextManager[object]:
        """Return a context that is entered once a run, around all of its batches."""
        return _UNCHANGED

    def check_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise or warn if optimizers do not work with this precision."""

    def convert_batch(self, batch: Any) -> Any:
        """Return the batch in the dtype that the module expects. Mixed precisions do not convert it: autocast casts."""
        return batch

    def watch_weights(self) -> None:
        """Check whether the next training step changes weights, if that affects how it must be computed."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values that a resumed run needs to compute as this one does. Valid inside ``session``."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned; {} if the checkpoint has none."""

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of one forward. Valid inside ``session``. May return the same object every time."""
        return _UNCHANGED

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


PLUGINS: dict[str, type[Precision]] = {}
"""Precision classes by name. Defining a class with ``names`` adds it. Read it from `trainer.precision.registry`, which
imports the classes of this package first."""
