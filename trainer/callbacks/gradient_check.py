"""Check with finite differences that the gradient of each parameter is the derivative of the loss."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError, gradcheck
from torch.func import functional_call

from trainer.data.samples import part_of
from trainer.errors import ConfigurationError, GradientCheckError, did_you_mean, expect
from trainer.postmortem.replay import silence, undisturbed
from trainer.terminal import Table

_ROWS = 20


class GradientCheck(Callback):
    """Compares each parameter's gradient with finite differences of the loss, on the first batch; then ends the fit.

    For mistakes in a backward pass written by hand, or in one that an operation changed in place. Run it from the
    command line with ``+debug=gradcheck``, or with ``Trainer(precision="64-true", callbacks=[GradientCheck()])``.

    ``torch.autograd.gradcheck`` compares the loss that ``training_step`` returns, as a function of one parameter at a
    time, along two directions: that of its gradient (the strongest signal) and a random one (what the gradient leaves
    out). The point is not the weights themselves but one near to them, since weights of exactly zero, as they are
    often initialised, put every activation behind them on the kink of a ReLU. Away from such ties a kink is met by
    chance only: a parameter that fails is checked again at other points, and is wrong where it fails at all of them.

    Every evaluation starts from the same random numbers (dropout) and buffers (BatchNorm), and ``self.log`` is silent
    meanwhile; weights, buffers and random states are afterwards as they were. Compiled modules run uncompiled. Prints
    a table: each parameter, the verdict, and the largest relative error.

    Args:
        samples: how many of the batch are used, the first ones.
        parameters: patterns (``fnmatch``) for the names of the parameters to check; frozen ones are left out.
        eps: the step of the finite differences, in the units of the parameter; default torch's.
        rtol: the largest relative error; default torch's.
        atol: the largest absolute error, in units of the loss (or of 1, where the loss is smaller). Smaller than
            torch's 1e-5, which is more than many gradients of a large network.
        attempts: points at which a parameter must fail before it is called wrong.
        jitter: how far from the weights the points are: standard deviation, as a share of the parameter's root mean
            square (of 1, where it is all zeros).

    Raises:
        ConfigurationError: parameters that are not float64, manual optimization, a pattern that matches nothing, a
            ``training_step`` that gives no loss, or not the same one twice.
        GradientCheckError: a gradient is wrong; names the parameters, and the numbers.
    """

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
        self.results: dict[str, GradientVerdict] = {}
        """What came out, for each parameter in the module's order."""

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Check on the first batch."""
        if trainer.should_stop:
            return
        trainer.should_stop = True
        names = self._choose(trainer, pl_module)
        rank_zero_info(f"Comparing the gradients of {len(names)} parameters with finite differences.")
        began = time.monotonic()
        with undisturbed(trainer):
            silence(pl_module)  # it would log hundreds of times a batch
            loss = _Loss(trainer, pl_module, part_of(batch, 0, self.samples), batch_idx)
            self._check_repeatable(loss)
            self.results = self._check(loss, names)
        if trainer.is_global_zero:
            _print(self.results, time.monotonic() - began)
        wrong = {name: verdict for name, verdict in self.results.items() if not verdict.passed}
        if wrong:
            raise GradientCheckError(_explain(wrong, self.attempts))

    def _choose(self, trainer: Any, module: LightningModule) -> list[str]:
        if not module.automatic_optimization:
            raise ConfigurationError(
                f"Got {type(module).__name__} with manual optimization, expected a training_step that returns its loss:"
                " GradientCheck compares that with finite differences. Check the parts in a module of their own."
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

    def _check_repeatable(self, loss: _Loss) -> None:
        parameters = loss.parameters_near(0.0, seed=0)
        first, second = loss.at(parameters).item(), loss.at(parameters).item()
        if not math.isfinite(first):
            raise ConfigurationError(
                f"Got a loss of {first!r} on {self.samples} samples, expected a finite one. Try more of them:"
                " GradientCheck(samples=...)."
            )
        if abs(first - second) > 2 * self.eps * self._tolerance(first):  # what finite differences would make of it
            raise ConfigurationError(
                f"Got a loss of {first!r} and then of {second!r} for the same weights, samples and random numbers,"
                " expected the same one: training_step changes something that it depends on (other than buffers), or"
                " uses an operation that is not deterministic (Trainer(deterministic=True) finds it)."
            )

    def _tolerance(self, loss: float) -> float:
        return self.atol * max(1.0, abs(loss))

    def _check(self, loss: _Loss, names: Sequence[str]) -> dict[str, GradientVerdict]:
        results: dict[str, GradientVerdict] = {}
        suspects = list(names)
        for attempt in range(self.attempts):
            point = loss.parameters_near(self.jitter, seed=attempt)
            start, gradients = loss.differentiate(point)
            for name in suspects:
                directions = [_unit(_noise(point[name], attempt + self.attempts))]
                gradient = gradients[name]
                if gradient is not None and gradient.norm() > 0:
                    directions.insert(0, _unit(gradient))
                along = _LossAlong(loss, point, name, directions)
                results[name] = self._check_along(along, gradient, self._tolerance(start))
            suspects = [name for name in suspects if not results[name].passed]
        return results

    def _check_along(self, along: _LossAlong, gradient: Tensor | None, atol: float) -> GradientVerdict:
        steps = torch.zeros(len(along.directions), dtype=torch.float64, requires_grad=True)
        problem = None
        try:
            gradcheck(
                along, steps, eps=self.eps, atol=atol, rtol=self.rtol, nondet_tol=atol, check_undefined_grad=False
            )
        except GradcheckError as error:
            problem = str(error)
        worst = (0.0, 0.0, -1.0)
        for index, direction in enumerate(along.directions):
            analytic = 0.0 if gradient is None else torch.sum(gradient * direction).item()
            numeric = along.slope(index, self.eps)
            difference = abs(analytic - numeric)
            error_here = difference / max(abs(analytic), abs(numeric)) if difference > atol else 0.0
            worst = max(worst, (analytic, numeric, error_here), key=lambda numbers: numbers[2])
        return GradientVerdict(problem is None, gradient is not None, *worst, problem)


class GradientVerdict(NamedTuple):
    """What came out for one parameter: the numbers of the direction with the larger error."""

    passed: bool
    has_gradient: bool
    """False where ``backward`` leaves no gradient: then the loss must not depend on the parameter."""
    backward: float
    """The derivative of the loss that ``backward`` gives."""
    finite_difference: float
    """The same, by finite differences."""
    relative_error: float
    """Of the two; 0 where they differ by less than the absolute tolerance."""
    problem: str | None
    """What ``torch.autograd.gradcheck`` said."""


class _Loss:
    """The loss of one batch as a function of the parameters; everything else stays as it is.

    Args:
        trainer: whose precision the forward runs in.
        module: the LightningModule.
        batch: the samples.
        batch_idx: their index.
    """

    def __init__(self, trainer: Any, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step = _TrainingStep(module)
        self._precision = trainer.precision_plugin
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        takes_index = "batch_idx" in inspect.signature(module.training_step).parameters
        self._arguments = (batch, batch_idx) if takes_index else (batch,)

    def at(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The loss (0-dim, float64)."""
        values = {f"module.{name}": value for name, value in parameters.items()}
        values |= {f"module.{name}": buffer.clone() for name, buffer in self._buffers.items()}  # as they were
        with isolate_rng(), self._precision.forward_context():
            output = functional_call(self._step, values, self._arguments)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.dtype is not torch.float64:
            found = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ConfigurationError(
                f"Got {found} as the loss of training_step, expected one float64 number. Finite differences need"
                " float64 all the way: a cast such as x.float() in the forward pass loses it."
            )
        return loss.reshape(())

    def parameters_near(self, jitter: float, seed: int) -> dict[str, Tensor]:
        """The trainable parameters, moved a little."""
        moved = {}
        for name, parameter in self._parameters.items():
            size = parameter.detach().pow(2).mean().sqrt()
            size = torch.where(size > 0, size, torch.ones_like(size))
            noise = _noise(parameter, seed)
            moved[name] = (parameter.detach() + jitter * size * noise).requires_grad_()
        return moved

    def differentiate(self, parameters: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor | None]]:
        """The loss, and the gradients that one backward pass gives; None where it does not get to."""
        loss = self.at(parameters)
        if not loss.requires_grad:
            raise ConfigurationError(
                "Got a loss that needs no gradient, expected one computed from trainable parameters: training_step has"
                " detached it, or computed it under no_grad."
            )
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        dense = [g if g is None or g.layout is torch.strided else g.to_dense() for g in gradients]
        return loss.item(), dict(zip(parameters, dense, strict=True))


class _LossAlong:
    """The loss as a function of steps (a vector) along directions from one parameter's value.

    At the start it has a graph, for the derivative; elsewhere only its value is asked for, and kept.
    """

    def __init__(self, loss: _Loss, point: Mapping[str, Tensor], name: str, directions: Sequence[Tensor]) -> None:
        self.directions = directions
        self._loss = loss
        self._point = point
        self._name = name
        self._values: dict[tuple[float, ...], Tensor] = {}

    def __call__(self, steps: Tensor) -> Tensor:
        place = tuple(steps.tolist())
        if not any(place):
            return self._at(steps)
        if place not in self._values:
            with torch.no_grad():
                self._values[place] = self._at(steps)
        return self._values[place]

    def slope(self, index: int, eps: float) -> float:
        """The central difference along one direction."""
        steps = torch.zeros(len(self.directions), dtype=torch.float64)
        steps[index] = eps
        return (self(steps) - self(-steps)).item() / (2 * eps)

    def _at(self, steps: Tensor) -> Tensor:
        value = self._point[self._name].detach()
        for step, direction in zip(steps, self.directions, strict=True):
            value = value + step * direction
        return self._loss.at({**self._point, self._name: value})


class _TrainingStep(nn.Module):
    """``training_step`` as a forward, in the form that ``functional_call`` takes."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module.training_step(*arguments)


def _noise(like: Tensor, seed: int) -> Tensor:
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    return noise.to(like.device)


def _unit(direction: Tensor) -> Tensor:
    unit: Tensor = direction / direction.norm()
    return unit


def _print(results: Mapping[str, GradientVerdict], seconds: float) -> None:
    worst_first = sorted(results, key=lambda name: (results[name].passed, -results[name].relative_error))
    shown = [name for i, name in enumerate(worst_first) if i < _ROWS or not results[name].passed]
    title = f"Gradients against finite differences: {len(results)} parameters in {seconds:.1f} s"
    if len(shown) < len(results):
        title += f"; the {len(shown)} with the largest errors are shown"
    rows = []
    for name, verdict in ((name, results[name]) for name in shown):
        word = "wrong" if not verdict.passed else "ok" if verdict.has_gradient else "ok, unused"
        numbers = (verdict.backward, verdict.finite_difference, verdict.relative_error)
        rows.append([name, word, *(f"{number:.3g}" for number in numbers)])
    texts = ("parameter", "verdict")
    Table(title, (*texts, "backward", "finite difference", "relative error"), rows, texts).show()


def _explain(wrong: Mapping[str, GradientVerdict], attempts: int) -> str:
    lines = []
    for name, verdict in wrong.items():
        gave = f"backward gives {verdict.backward:.6g}" if verdict.has_gradient else "backward gives no gradient"
        lines.append(f"  {name}: {gave}, finite differences {verdict.finite_difference:.6g}")
    nearest = list(wrong)[-1]
    return "\n".join(
        [
            f"The gradients of {len(wrong)} parameters are not the derivatives of the loss, at {attempts} points:",
            *lines,
            f"Look at the operations through which the loss depends on {nearest!r} (in a chain of layers the last wrong"
            " one is nearest to the mistake): at the backward of a custom autograd.Function, at a tensor changed in"
            " place, at a detach() too many. Where the loss stops gradients on purpose (detach, a straight-through"
            " estimator) or has kinks everywhere (rounding, argmax), the two differ by design: choose other parameters"
            " with GradientCheck(parameters=[...]).",
        ]
    )
