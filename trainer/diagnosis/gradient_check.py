"""Check with finite differences that the gradient of each parameter is the derivative of the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from trainer.common.terminal import print_line
from trainer.data.samples import samples_of
from trainer.diagnosis.replay import refuse_drawn_batches, silence, undisturbed
from trainer.diagnosis.replay_state import BufferState
from trainer.errors import ConfigurationError, GradientCheckError, counted, did_you_mean, expect, join_first
from trainer.loop.run_state import state_of

Loss = Callable[[], Tensor]
"""Returns the loss (0-dim, float64) at the current weights."""


class GradientCheck(Callback):
    """Compare each parameter's gradient with finite differences of the loss on the first batch, and stop the fit.

    Finds mistakes in a backward pass that was written by hand or broken by an in-place operation. Run it from the
    command line with ``+debug=gradcheck``, or with ``Trainer(precision="64-true", callbacks=[GradientCheck()])``.

    The loss that ``training_step`` returns is differentiated with respect to one parameter at a time, along two
    directions: the direction of its gradient (the strongest signal) and a random one (which detects the components that
    the gradient lacks). The check runs near the weights instead of at them, because weights that are initialized to
    exactly zero put every activation behind them on the kink of a ReLU. A parameter that fails is checked again at
    other points, and is reported if it fails at all of them.

    Every evaluation starts from the same random numbers (dropout) and buffers (BatchNorm), and ``self.log`` is a no-op
    during the check. Weights, buffers and random states are restored. Compiled modules run uncompiled. If the gradients
    are right, the fit trains the first batch and ends, unless ``min_epochs`` or ``min_steps`` requires more.

    Args:
        samples: number of samples to use, from the start of the batch.
        parameters: patterns (``fnmatch``) for the names of the parameters to check. Frozen ones are left out.
        eps: the step of the finite differences, in the units of the parameter.
        rtol: the largest relative error.
        atol: the largest absolute error, relative to the loss (to 1 if the loss is smaller). The default is less
            than torch's 1e-5, which exceeds many gradients of a large network.
        attempts: number of points at which a parameter must fail to be reported.
        jitter: standard deviation of the distance between the points and the weights, as a share of the parameter's
            root mean square (of 1 if the parameter is all zeros).

    Attributes:
        problems: for each parameter that failed, by name: the derivative from finite differences ("numerical") and the
            product of the direction and the gradient ("analytical"), along the direction that failed.

    Raises:
        ConfigurationError: if parameters are not float64, a pattern matches no parameter, the module uses manual
            optimization, or ``training_step`` does not return the same float64 loss twice.
        GradientCheckError: if a gradient is wrong. The message lists the parameters, with both derivatives.
    """

    unsupported_with: ClassVar = dict.fromkeys(
        ("fsdp", "deepspeed"), "needs whole gradients. Check them on one device: strategy='auto', devices=1."
    )

    def __init__(
        self,
        samples: int = 4,
        parameters: str | Sequence[str] = "*",
        eps: float = 1e-6,
        rtol: float = 1e-3,
        atol: float = 1e-8,
        attempts: int = 3,
        jitter: float = 0.01,
    ) -> None:
        for name, number in {"samples": samples, "eps": eps, "rtol": rtol, "atol": atol, "attempts": attempts}.items():
            expect(number > 0, "a number above 0", **{name: number})
        self.samples = samples
        self.parameters = (parameters,) if isinstance(parameters, str) else tuple(parameters)
        self.eps = eps
        self.rtol = rtol
        self.atol = atol
        self.attempts = attempts
        self.jitter = jitter
        self.problems: dict[str, str] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Check the gradients on the first batch."""
        if trainer.should_stop:
            return
        trainer.should_stop = True
        refuse_drawn_batches(state_of(trainer), "GradientCheck")
        names = self._choose(trainer, pl_module)
        compared = counted(len(names), "parameter")
        rank_zero_info(f"Comparing the gradients of {compared} with finite differences.")
        with undisturbed(state_of(trainer)):
            silence(pl_module)  # it would log hundreds of times per batch
            loss = _loss_of(trainer, pl_module, samples_of(batch, range(self.samples)), batch_idx)
            unused = self._check(loss, names, dict(pl_module.named_parameters()))
        if self.problems:
            raise GradientCheckError(self._report())
        if trainer.is_global_zero:
            remark = f" The loss does not depend on {join_first(unused, 5)}." if unused else ""
            print_line(f"The gradients of {compared} agree with finite differences of the loss.{remark}")

    def _choose(self, trainer: pl.Trainer, module: LightningModule) -> list[str]:
        if not module.automatic_optimization:
            raise ConfigurationError(
                f"Got {type(module).__name__} with manual optimization, expected a training_step that returns its loss,"
                " which GradientCheck compares with finite differences. Check the parts in a separate module."
            )
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for pattern in self.parameters:
            if not any(fnmatchcase(name, pattern) for name in trainable):
                raise ConfigurationError(
                    f"Got {pattern!r} among the parameters of GradientCheck, expected a pattern that matches the name"
                    f" of a trainable parameter of {type(module).__name__}.{did_you_mean(pattern, trainable)}"
                )
        chosen = [name for name in trainable if any(fnmatchcase(name, pattern) for pattern in self.parameters)]
        for name in chosen:
            if trainable[name].dtype is not torch.float64:
                raise ConfigurationError(
                    f"Got precision={trainer.precision!r}, in which {name!r} is {trainable[name].dtype}; expected"
                    " '64-true': finite differences of float32 are mostly rounding. On the command line:"
                    " +debug=gradcheck."
                )
        return chosen

    def _check(self, loss: Loss, names: Sequence[str], parameters: Mapping[str, Tensor]) -> list[str]:
        """Fill ``problems``. Return the names of the parameters that get no gradient."""
        first, second = loss().item(), loss().item()
        if not abs(first - second) <= 2 * self.eps * self.atol * max(1.0, abs(first)):
            raise ConfigurationError(
                f"Got a loss of {first!r} and then of {second!r} for the same weights, {self.samples} samples and"
                " random numbers, expected two equal, finite losses: training_step changes something that it depends on"
                " (other than buffers), or an operation is not deterministic (Trainer(deterministic=True) finds it)."
            )
        atol = self.atol * max(1.0, abs(first))
        weights = {name: p.detach().clone() for name, p in parameters.items() if p.requires_grad}
        self.problems, gradient_of = dict.fromkeys(names, ""), dict[str, Tensor | None]()
        for attempt in range(self.attempts):
            for name, weight in weights.items():
                size = weight.pow(2).mean().sqrt()
                noise = self.jitter * torch.where(size > 0, size, 1.0) * _noise(weight, attempt)
                parameters[name].data.copy_(weight + noise)
            gradients = torch.autograd.grad(loss(), [parameters[name] for name in weights], allow_unused=True)
            gradient_of = dict(zip(weights, gradients, strict=True))
            problems = {n: self._problem(loss, parameters[n].data, gradient_of[n], atol) for n in self.problems}
            self.problems = {name: problem for name, problem in problems.items() if problem}
        return [name for name in names if gradient_of[name] is None]

    def _problem(self, loss: Loss, value: Tensor, gradient: Tensor | None, atol: float) -> str:
        """Return both derivatives along the first direction in which they differ, or "" if the gradient is right."""
        gradient = torch.zeros_like(value) if gradient is None else gradient.to_dense()
        point = value.clone()

        def loss_at(distance: float, unit: Tensor) -> float:
            value.copy_(point + distance * unit)
            return loss().item()

        for name, direction in (("a random direction", _noise(value, self.attempts)), ("the gradient", gradient)):
            unit = direction / (direction.norm() or 1.0)
            numerical = (loss_at(self.eps, unit) - loss_at(-self.eps, unit)) / (2 * self.eps)
            analytical = (unit * gradient).sum().item()
            value.copy_(point)
            if not abs(analytical - numerical) <= atol + self.rtol * abs(numerical):
                return f"along {name}, numerical: {numerical:.6g}, analytical: {analytical:.6g}"
        return ""

    def _report(self) -> str:
        lines = "".join(f"  {name}: {problem}\n" for name, problem in self.problems.items())
        return (
            f"The gradients of {counted(len(self.problems), 'parameter')} are not the derivatives of the loss, at"
            f" {counted(self.attempts, 'point')}:\n{lines}Look at the operations through which the loss depends on"
            f" {list(self.problems)[-1]!r} (in a chain of layers the last wrong one is nearest to the mistake): at the"
            " backward of a custom autograd.Function, a tensor that is changed in place, a detach(). If the loss stops"
            " gradients on purpose (detach, a straight-through estimator) or has kinks everywhere (rounding, argmax),"
            " gradients and derivatives differ by design: choose other parameters with GradientCheck(parameters=[...])."
        )


def _loss_of(trainer: pl.Trainer, module: LightningModule, batch: Any, batch_idx: int) -> Loss:
    """Build the function that computes the loss of one batch, with the current buffers and random numbers."""
    buffers = BufferState(module.buffers())
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    arguments = (batch, batch_idx) if takes_index else (batch,)

    def loss() -> Tensor:
        buffers.restore()
        with isolate_rng(), trainer.precision_plugin.forward_context():
            output = module.training_step(*arguments)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.dtype is torch.float64 and loss.requires_grad):
            given = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ConfigurationError(
                f"Got {given} as the loss of training_step, expected one float64 number that requires a gradient. A"
                " cast such as x.float() changes the dtype; detach() and no_grad() remove the gradient."
            )
        return loss.reshape(())

    return loss


def _noise(like: Tensor, seed: int) -> Tensor:
    """Draw normal numbers that are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device)
