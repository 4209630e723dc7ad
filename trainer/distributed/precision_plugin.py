"""The precision plugin that Lightning's strategies and optimizer wrappers use.

The loops handle autocast and the scaler. This object only passes on calls that user code makes itself:
``manual_backward``, ``optimizer.step()`` of a wrapped optimizer, ``clip_gradients``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch import Tensor
from torch.optim import Optimizer

from trainer.errors import ConfigurationError, PrecisionError
from trainer.loop.batch_path import ModuleCalls
from trainer.loop.overrides import defines_defaults
from trainer.precision.base import Precision
from trainer.precision.scaler import LossScaler


@defines_defaults
class PrecisionAdapter(LightningPrecision):
    """Adapts our precision plugin to Lightning's interface.

    Args:
        plugin: our plugin.
        scaler: the Trainer's loss scaler.

    Attributes:
        calls: the functions behind calls of user code; set for each fit.
    """

    def __init__(self, plugin: Precision, scaler: LossScaler) -> None:
        self.plugin = plugin
        self._scaler = scaler if scaler.is_enabled() else None
        self.calls = ModuleCalls()

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler; None if it is disabled."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        raise PrecisionError(
            f"Got a {type(scaler).__name__} for `precision_plugin.scaler`, which cannot be replaced. Pass its settings:"
            " Trainer(precision=MixedPrecision(init_scale=..., growth_interval=...)), with MixedPrecision of"
            " trainer.precision, or a subclass that overrides `build_scaler`."
        )

    @property
    def precision(self) -> str:  # type: ignore[override]  # Lightning's is a class attribute of fixed names
        """The name of the precision."""
        return self.plugin.name

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return the context in which the strategy creates weights."""
        return self.plugin.init_context()

    module_init_context = tensor_init_context

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context of the model summary's example forward."""
        return self.plugin.autocast()

    def convert_input(self, data: Any) -> Any:
        """Convert a batch to the dtype that the module expects, for callbacks that run a batch themselves."""
        return self.plugin.convert_batch(data)

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Do nothing: ``backward`` scales the loss and runs the hooks."""
        return tensor

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Return the loss without its graph."""
        return tensor.detach()

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward for ``LightningModule.manual_backward``, and for a strategy's own ``backward``."""
        if self.calls.backward is None:
            model.backward(tensor, *args, **kwargs)
        else:
            self.calls.backward(tensor, lambda scaled: model.backward(scaled, *args, **kwargs))

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run ``LightningOptimizer.step``.

        Raises:
            ConfigurationError: if it is called in automatic optimization while the loss is scaled.
        """
        if self.calls.step is not None:
            return self.calls.step(optimizer, closure, **kwargs)
        if self.scaler is not None:
            raise ConfigurationError(
                "`optimizer.step()` was called outside of manual optimization, while the loss is scaled: the gradients"
                " may still be scaled. Set `self.automatic_optimization = False` to take the steps yourself."
            )
        return super().optimizer_step(optimizer, model, closure, **kwargs)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Run ``LightningModule.clip_gradients``. A no-op before the first fit, and for limits of at most 0."""
        if isinstance(optimizer, LightningOptimizer):  # the type that `self.optimizers()` returns
            optimizer = optimizer.optimizer
        if clip_val > 0 and self.calls.clip is not None:
            self.calls.clip(optimizer, clip_val, GradClipAlgorithmType(gradient_clip_algorithm).value)
