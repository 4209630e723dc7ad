from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support import (
    OPTIMIZERS,
    Regression,
    assert_same,
    fit_and_watch,
    loader_of,
    make_batches,
    make_net,
    make_trainer,
    momentum,
    native_fp16,
    sgd,
)
from trainer.callbacks import GradientClipping, HalveOnOutOfMemory, NonFiniteGuard
from trainer.errors import ConfigurationError, NonFiniteError
from trainer.loops.splitting import _ranges


def no_room() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Backward(torch.autograd.Function):
    """No room in the backward pass, after the gradients of the layers above are there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, room: int) -> Tensor:
        ctx.fits = len(x) <= room
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if not ctx.fits:
            raise no_room()
        return gradient, None


class Tight(LightningModule):
    """Has room for so many samples, in the forward or in the backward pass."""

    def __init__(self, room: int, phase: str = "forward", optimizer: Any = sgd, weighted: bool = False) -> None:
        super().__init__()
        self.net, self.first = make_net(), nn.Linear(6, 6)
        with torch.no_grad():
            for parameter in self.first.parameters():
                parameter.fill_(0.1)
        self.room, self.phase, self.optimizer, self.weighted = room, phase, optimizer, weighted
        self.sizes: list[int] = []

    def take(self, x: Tensor) -> None:
        self.sizes.append(len(x))
        if self.phase == "forward" and len(x) > self.room:
            raise no_room()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.take(x)
        hidden = self.first(x)
        if self.phase == "backward":
            hidden = Backward.apply(hidden, self.room)
        outputs = self.net(hidden)
        if not self.weighted:
            loss = F.mse_loss(outputs, y)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss
        counts = (y[:, 0] > 0).float() + 1.0  # samples that count once or twice
        loss = ((outputs - y).square().mean(1) * counts).sum() / counts.sum()
        return {"loss": loss, "weight": counts.sum()}

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def batches_of(*sizes: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)] for size in sizes]


def fit(folder: Path, module: LightningModule, batches: Any, *callbacks: Any, **arguments: Any) -> Any:
    trainer = make_trainer(folder, callbacks=list(callbacks), **arguments)
    trainer.fit(module, loader_of(batches))
    return trainer


def assert_close(one: nn.Module, other: nn.Module, tolerance: float = 1e-6) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)


SIZES = (8, 8, 5, 8, 3)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("room", [4, 1])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_parts_train_as_the_whole(tmp_path: Path, phase: str, room: int, window: int, weighted: bool) -> None:
    tight = Tight(room, phase, momentum, weighted)
    halving = HalveOnOutOfMemory()
    with pytest.warns(UserWarning, match=r"batch of 8 samples.*parts of at most"):
        trainer = fit(tmp_path, tight, batches_of(*SIZES), halving, accumulate_grad_batches=window)
    fit(tmp_path, roomy := Tight(8, phase, momentum, weighted), batches_of(*SIZES), accumulate_grad_batches=window)
    assert_close(tight, roomy)
    assert trainer.global_step == -(-len(SIZES) // window)
    assert halving.limit == room
    assert sum(size for size in tight.sizes if size <= room) == sum(SIZES)


def test_the_parts_train_as_the_loop_that_one_writes_by_hand(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="ran out"):
        fit(tmp_path, tight := Tight(3), batches_of(5, 7), HalveOnOutOfMemory())
    net, first = (by_hand := Tight(9)).net, by_hand.first
    optimizer = sgd(by_hand.parameters())
    for x, y in batches_of(5, 7):
        optimizer.zero_grad()
        F.mse_loss(net(first(x)), y).backward()
        optimizer.step()
    assert_close(tight, by_hand, 1e-7)
    assert tight.sizes == [5, 2, 3, 2, 2, 3]


def test_what_has_been_learnt_is_kept(tmp_path: Path) -> None:
    tight, halving = Tight(3), HalveOnOutOfMemory()
    with pytest.warns(UserWarning, match="parts of at most 2") as caught:
        trainer = fit(tmp_path, tight, batches_of(8, 8, 4, 2), halving)
    assert tight.sizes == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    assert len([one for one in caught if "Memory ran out" in str(one.message)]) == 1
    trainer.save_checkpoint(tmp_path / "split.ckpt")

    resumed = make_trainer(tmp_path, max_epochs=2, callbacks=[HalveOnOutOfMemory()])
    resumed.fit(again := Tight(3), loader_of(batches_of(8, 8, 4, 2)), ckpt_path=tmp_path / "split.ckpt")
    assert again.sizes == [2] * 11


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_with_a_scaled_loss(tmp_path: Path, precision: str, phase: str) -> None:
    def plugin() -> Any:
        return native_fp16(init_scale=256.0) if precision == "16-mixed" else precision

    tight = Tight(3, phase, OPTIMIZERS["adam"])
    with pytest.warns(UserWarning, match="ran out"):
        mine = fit(tmp_path, tight, batches_of(*SIZES), HalveOnOutOfMemory(), precision=plugin())
    roomy = Tight(8, phase, OPTIMIZERS["adam"])
    other = fit(tmp_path, roomy, batches_of(*SIZES), precision=plugin())
    assert mine.skipped_steps == other.skipped_steps == 0
    assert mine.scaler.get_scale() == other.scaler.get_scale()
    assert_close(tight, roomy, 1e-2)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_while_there_is_room_every_bit_is_the_same(tmp_path: Path, window: int, precision: str) -> None:
    def train(*callbacks: Any) -> Any:
        module = Regression(make_net(dropout=0.2), momentum)
        arguments = {"precision": precision, "accumulate_grad_batches": window}
        return fit_and_watch(tmp_path, module, make_batches(7), callbacks=list(callbacks), **arguments)[1]

    def clip() -> Any:
        return GradientClipping(max_norm=0.1)

    assert_same(train(clip(), HalveOnOutOfMemory(split=lambda *_: pytest.fail("split"))), train(clip()))


def test_metrics_are_those_of_the_samples(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="ran out"):
        mine = fit(tmp_path, Tight(3), batches_of(5, 4), HalveOnOutOfMemory())
    theirs = fit(tmp_path, Tight(8), batches_of(5, 4))
    torch.testing.assert_close(mine.callback_metrics["loss_epoch"], theirs.callback_metrics["loss_epoch"])


def test_hooks_run_for_each_part_and_gradients_are_cleared_once_a_window(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Hooked(Tight):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            seen.append("zero")

        def on_after_backward(self) -> None:
            seen.append(round(float(sum(p.grad.sum() for p in self.net[4].parameters())), 4))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(round(float(outputs["loss"]), 4))
            seen.append(len(batch[0]))

    with pytest.warns(UserWarning, match="ran out"):
        fit(tmp_path, Hooked(4), batches_of(8), HalveOnOutOfMemory())
    net = Tight(8)
    x, y = batches_of(8)[0]
    expected: list[Any] = ["zero"]
    total = torch.zeros(())
    for part in (slice(0, 4), slice(4, 8)):
        loss = F.mse_loss(net.net(net.first(x[part])), y[part]) / 2
        loss.backward()
        total += loss.detach()
        expected.append(round(float(sum(p.grad.sum() for p in net.net[4].parameters())), 4))  # type: ignore[union-attr]
    assert seen == [*expected, round(float(total), 4), 8]


def test_a_single_sample_that_does_not_fit_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(tmp_path, Tight(0), batches_of(4), HalveOnOutOfMemory())
    assert "nothing left to halve: a single sample does not fit" in caught.value.__notes__[0]
    assert "Memory ran out at batch_idx 0" in caught.value.__notes__[1]


def test_other_errors_are_let_through(tmp_path: Path) -> None:
    class Wrong(Tight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("no memory of it")

    with pytest.raises(RuntimeError, match="no memory of it"):
        fit(tmp_path, Wrong(4), batches_of(4), HalveOnOutOfMemory())


def test_a_batch_whose_length_is_not_known_needs_a_split(tmp_path: Path) -> None:
    class Extra(Tight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert len(batch[2]) == 7
            self.take(batch[0])
            return F.mse_loss(self.net(batch[0]), batch[1])

    def split(batch: Any, start: int, stop: int) -> Any:
        return [batch[0][start:stop], batch[1][start:stop], batch[2]]

    batches = [[*batch, torch.ones(7)] for batch in batches_of(5)]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(tmp_path, Extra(3), batches, HalveOnOutOfMemory())
    assert "has tensors of the lengths [5, 7]" in caught.value.__notes__[0]
    with pytest.warns(UserWarning, match="ran out"):
        fit(tmp_path, module := Extra(3), batches, HalveOnOutOfMemory(split))
    assert module.sizes == [5, 2, 3]


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_what_failed_is_forgotten_before_the_halves_run(
    tmp_path: Path, phase: str, no_gc: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    held: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    class Watched(Tight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            alive.extend(ref() is not None for ref in held)
            activations = batch[0] * 2.0
            held.append(weakref.ref(activations))
            loss = super().training_step((activations, batch[1]), batch_idx)
            return {"loss": loss, "activations": activations}

    with pytest.warns(UserWarning, match="ran out"):
        fit(tmp_path, Watched(2, phase), batches_of(8), HalveOnOutOfMemory())
    assert len(held) == 6
    assert not any(alive)


def test_the_part_that_is_not_finite_is_found(tmp_path: Path) -> None:
    batches = batches_of(8, 8)
    batches[1][0][1, 0] = float("nan")
    with pytest.warns(UserWarning, match="ran out"), pytest.raises(NonFiniteError) as caught:
        fit(tmp_path, Tight(4), batches, HalveOnOutOfMemory(), NonFiniteGuard())
    assert caught.value.batch_idx == 1
    assert "The batch was not finite when it came: batch[0]" in str(caught.value)


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Stepping(Regression):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure)


class Drawing(Regression):
    def training_step(self, dataloader_iter: Any) -> Any:
        raise AssertionError


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@pytest.mark.parametrize("module", [Manual, Stepping, lambda: Regression(optimizer=torch.optim.LBFGS), Drawing])
def test_modules_that_cannot_be_split_are_refused(tmp_path: Path, module: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected automatic optimization"):
        fit(tmp_path, module(), make_batches(2), HalveOnOutOfMemory())


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_limits_that_make_no_sense(limit: Any) -> None:
    with pytest.raises(ConfigurationError, match="limit"):
        HalveOnOutOfMemory(limit=limit)


def test_pieces() -> None:
    assert _ranges(0, 8, None) == [(0, 8)]
    assert _ranges(0, 8, 8) == [(0, 8)]
    assert _ranges(2, 7, 3) == [(2, 4), (4, 7)]
    assert _ranges(0, 7, 3) == [(0, 2), (2, 4), (4, 7)]
