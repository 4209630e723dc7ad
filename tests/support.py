"""What tests share: a quiet Trainer, a small module, and the loop that one would write by hand in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from trainer import Trainer
from trainer.precision import MixedPrecision

AUTOCAST_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}

sgd = partial(torch.optim.SGD, lr=0.1)
momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)
adam = partial(torch.optim.Adam, lr=0.01)
adamw = partial(torch.optim.AdamW, lr=0.01)
OPTIMIZERS = {
    "sgd": sgd,
    "sgd-fused": partial(sgd, fused=True),
    "momentum": momentum,
    "momentum-fused": partial(momentum, fused=True),
    "adam": adam,
    "adam-fused": partial(adam, fused=True),
    "adamw": adamw,
    "adamw-fused": partial(adamw, fused=True),
}


def make_trainer(folder: Any, **arguments: Any) -> Trainer:
    """A Trainer that writes nothing and says nothing, on the CPU, for one epoch unless told otherwise."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
        "max_epochs": 1,
    }
    return Trainer(**(quiet | arguments))


def make_net(seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
    """A small regression net with a normalisation; with ``dropout``, one that draws random numbers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


def make_batches(number: int, seed: int = 1, gains: dict[int, float] | None = None) -> list[list[Tensor]]:
    """Batches (x, y, gain); a batch's loss is multiplied by its gain, 1 unless ``gains`` names its index."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator)
    return [[draw(4, 6), draw(4, 3), torch.tensor((gains or {}).get(i, 1.0))] for i in range(number)]


def loader_of(batches: Iterable[Any], **options: Any) -> DataLoader[Any]:
    """A dataloader whose items are the batches as they are."""
    return DataLoader(list(batches), batch_size=None, **options)


def loss_of(net: nn.Module, batch: list[Tensor]) -> Tensor:
    """The loss of one batch."""
    x, y, gain = batch
    return F.mse_loss(net(x), y) * gain


class Regression(LightningModule):
    """Fits ``make_net`` by automatic optimization.

    Args:
        net: what is trained; the first of its kind where none is given.
        optimizer: makes one of the parameters.
        schedule: makes a learning-rate schedule of the optimizer; None for none.
        **how: the schedule's other keys (interval, frequency, monitor).
    """

    def __init__(
        self,
        net: nn.Module | None = None,
        optimizer: Callable[..., Any] = sgd,
        schedule: Callable[..., Any] | None = None,
        **how: Any,
    ) -> None:
        super().__init__()
        self.net = make_net() if net is None else net
        self.make_optimizer, self.make_schedule, self.how = optimizer, schedule, how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.net.parameters())
        if self.make_schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.make_schedule(optimizer), **self.how}}


@dataclass
class Trace:
    """What happened in a training, one entry a batch (or, from ``skipped`` on, one a weight update)."""

    losses: list[float] = field(default_factory=list)
    weights: list[list[Tensor]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    next_scales: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def after_batch(self, loss: Tensor, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.losses.append(loss.item())
        self.weights.append([p.detach().clone() for p in net.parameters()])
        self.rates.append(optimizer.param_groups[0]["lr"])


class Watch(Callback):
    """Records a :class:`Trace` of a fit of a :class:`Regression`."""

    def __init__(self) -> None:
        self.trace = Trace()

    def on_after_optimizer_step(self, trainer: Any, module: Any, optimizer: Any, outcome: Any) -> None:
        assert outcome is trainer.step_outcome
        self.trace.skipped.append(outcome.skipped)
        self.trace.scales.append(outcome.scale)
        self.trace.next_scales.append(outcome.next_scale)
        if outcome.grad_norm is not None:
            self.trace.norms.append(outcome.grad_norm.item())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trace.after_batch(outputs.get("loss", torch.tensor(torch.nan)), module.net, trainer.optimizers[0])


def train_by_hand(
    net: nn.Module,
    batches: Iterable[Any],
    *,
    precision: str = "32-true",
    optimizer: Callable[..., Any] = sgd,
    scaler: torch.amp.GradScaler | None = None,
    epochs: int = 1,
    window: int = 1,
    clip: Callable[[Iterable[Tensor]], Tensor | None] | None = None,
    schedule: Callable[..., Any] | None = None,
    interval: str = "step",
    before_step: Callable[[Any], None] = lambda optimizer: None,
) -> Trace:
    """The oracle: the loop that one writes by hand with ``torch.amp``, and what happened in it.

    Trains where ``net`` and ``batches`` are.
    """
    trace, dtype, kind = Trace(), AUTOCAST_DTYPES.get(precision), next(net.parameters()).device.type
    if scaler is None:
        scaler = torch.amp.GradScaler(kind, enabled=precision == "16-mixed")
    stepper = optimizer(net.parameters())
    scheduler = None if schedule is None else schedule(stepper)
    for _ in range(epochs):
        number = len(batches)  # type: ignore[arg-type]
        for i, batch in enumerate(batches):
            if i % window == 0:
                stepper.zero_grad()
            size = min(window, number - i + i % window)
            with torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = loss_of(net, batch)
            if size > 1:
                loss = loss / size
            scaler.scale(loss).backward()
            closes = i % window == size - 1
            if closes:
                scaler.unscale_(stepper)
                before_step(stepper)
                norm = None if clip is None else clip(net.parameters())
                scale = scaler.get_scale()
                scaler.step(stepper)
                scaler.update()
                skipped = scaler.get_scale() < scale
                trace.skipped.append(skipped)
                trace.scales.append(scale)
                trace.next_scales.append(scaler.get_scale())
                if norm is not None:
                    trace.norms.append(norm.item())
                if scheduler is not None and interval == "step" and not skipped:
                    scheduler.step()
            if scheduler is not None and interval == "epoch" and i + 1 == number:
                scheduler.step()
            trace.after_batch(loss, net, stepper)
    return trace


def fit_and_watch(folder: Any, module: LightningModule, batches: Any, **arguments: Any) -> tuple[Trainer, Trace]:
    """Fit ``module`` on ``batches`` (a list of them, or a dataloader); returns the Trainer and what happened."""
    watch = Watch()
    trainer = make_trainer(folder, **arguments | {"callbacks": [*arguments.get("callbacks", ()), watch]})
    trainer.fit(module, loader_of(batches) if isinstance(batches, list) else batches)
    return trainer, watch.trace


def assert_same(ours: Trace, theirs: Trace) -> None:
    """Bit for bit, NaN equal to NaN."""
    for name in ("losses", "rates", "skipped", "scales", "next_scales", "norms"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert len(mine) == len(other), name
        assert all(a == b or (a != a and b != b) for a, b in zip(mine, other, strict=True)), (name, mine, other)
    assert len(ours.weights) == len(theirs.weights)
    for step, (mine, other) in enumerate(zip(ours.weights, theirs.weights, strict=True)):
        for a, b in zip(mine, other, strict=True):
            assert torch.equal(a, b), f"weights differ after batch {step}"


def native_fp16(**options: Any) -> MixedPrecision:
    """16-mixed on torch's own CPU kernels, whatever the model's size."""
    return MixedPrecision("float16", cpu_kernels="native", **options)
