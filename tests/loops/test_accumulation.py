"""Accumulation windows in isolation: their borders, and their mean compared to one large batch."""

from __future__ import annotations

from collections import UserList
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.engine.gradients import Gradients
from trainer.errors import ConfigurationError
from trainer.loops.accumulation import AccumulationWindow
from trainer.precision.scaler import LossScaler

FIRST, MIDDLE, LAST = (True, False), (False, False), (False, True)


class Processes:
    """An engine of this rank, and of others with the window weights ``others`` (None for no loss).

    If they have no unit yet, they exchange their first weights before.
    """

    def __init__(self, *others, lack_unit=False):
        self.lack_unit = lack_unit
        self.data_parallel_size = 1 + len(others)
        self.device = torch.device("cpu")
        self.gradients = Gradients(LossScaler("cpu", enabled=False))
        self.others = others
        self.unit = 1.0
        self.sums = 0
        # number of other ranks that correct their losses; None for all, if this one does
        self.correcting: float | None = None

    def begin_sum(self, total, count, corrects):
        others, self.lack_unit = [weights[:1] if self.lack_unit else weights for weights in self.others], False
        there = [weight for weights in others for weight in weights if weight is not None]
        total, count = total + sum(there) / self.unit, count + len(there)
        self.unit *= total / count if count else 1.0
        self.sums += 1
        correcting = corrects * len(there) if self.correcting is None else self.correcting
        return lambda: [total, count, corrects + correcting]


def test_new_number_of_batches_applies_from_the_next_window():
    window = AccumulationWindow(2)
    window.advance(9, False)
    window.batches = 4
    window.advance(8, False)
    assert (window.is_last, window.size) == (True, 2)
    window.advance(7, False)
    assert (window.is_first, window.is_last, window.size) == (True, False, 4)


@pytest.mark.parametrize("batches", [0, -1, 1.5, True, "2"])
def test_impossible_windows(batches):
    with pytest.raises(ConfigurationError, match=r"Got accumulate_grad_batches=.*at least 1"):
        AccumulationWindow(batches)


def test_window_continues_in_the_next_epoch_if_configured():
    window, seen = AccumulationWindow(4, straddles_epochs=True), []
    for epoch in range(3):
        for i in range(3):
            window.advance(3 - i, i == 2, is_final_epoch=epoch == 2)
            seen.append((window.is_first, window.is_last))
    assert seen == [FIRST, MIDDLE, MIDDLE, LAST, FIRST, MIDDLE, MIDDLE, LAST, (True, True)]
    assert window.size == 1  # the window left open by the last epoch


# --- the mean -------------------------------------------------------------------------------------------------------


def accumulate(batches, *, size, engine=None):
    """Return the gradient and the shares of a window with losses ``(p * x).mean()``; None is a batch without a loss."""
    p = nn.Parameter(torch.ones(3))
    engine = engine or Processes()
    optimizer = torch.optim.SGD([p], lr=1.0)
    window, shares = AccumulationWindow(size), []
    window.start_run(engine.data_parallel_size)
    for i, x in enumerate(batches):
        window.advance(len(batches) - i, i + 1 == len(batches))
        weight = None if x is None else float(len(x))
        loss = None if x is None else (p * x).sum(1).mean()
        loss = window.joint_share(loss, weight, engine)
        if loss is not None:
            loss.backward()
        shares.append(None if x is None else loss.item())
    has_update = window.close([optimizer], engine)
    assert has_update is (p.grad is not None or any(w is not None for ws in engine.others for w in ws))
    return p.grad, shares, window


def test_window_of_one_batch_keeps_the_loss():
    window, loss = AccumulationWindow(1), torch.tensor(0.7)
    window.advance(2, False)
    assert window.share(loss) is loss
    assert window.close([], Processes())
    assert window.corrected(loss) is loss


def test_loss_evaluated_again_is_counted_once():
    window, loss = AccumulationWindow(2), torch.tensor(1.0)
    window.advance(2, False)
    window.share(loss, 4.0)
    window.advance(1, True)
    for _ in range(3):
        share = window.share(loss, 8.0)
    assert window.backwards == 2
    window.close([], Processes())
    assert window.corrected(share).item() == pytest.approx(8 / 12)


@pytest.mark.parametrize("weights", [(None, 3.0), (3.0, None)])
def test_weights_for_all_batches_or_for_none(weights):
    window, loss = AccumulationWindow(2), torch.tensor(1.0)
    window.advance(2, False)
    window.share(loss, weights[0])
    window.advance(1, True)
    with pytest.raises(ConfigurationError, match="expected one for all of them or for none"):
        window.share(loss, weights[1])
    window.advance(2, False)  # a new window may be of the other kind
    window.share(loss, weights[1])


# --- several ranks ----------------------------------------------------------------------------------------------------


def test_mean_includes_all_ranks():
    """DDP averages the gradients of two ranks, so that this rank's factor is twice its share."""
    mine, theirs = [torch.randn(n, 3) for n in (3, 5)], [torch.randn(n, 3) for n in (1, 8)]
    gradients, corrections = [], []
    for own, other in ((mine, theirs), (theirs, mine)):
        engine = Processes([float(len(x)) for x in other], lack_unit=True)
        gradient, _, window = accumulate(own, size=2, engine=engine)
        gradients.append(gradient)
        corrections.append(window.correction)
        assert engine.sums == 2  # the unit of a run's first window, and the sums of each
    assert corrections[0] == pytest.approx(corrections[1])  # one factor, which also an average of gradients can take
    assert torch.allclose(sum(gradients) / 2, torch.cat(mine + theirs).mean(0), rtol=1e-6, atol=1e-6)


def test_weights_are_measured_by_the_mean_of_the_last_window():
    engine = Processes([2.0, 6.0])
    window, loss = AccumulationWindow(2), torch.tensor(1.0)
    window.start_run(2)
    for weight in (4.0, 8.0):
        window.advance(9, False)
        window.share(loss, weight)
        assert window.factor == pytest.approx(weight / 2)  # there was no window yet
    window.close([], engine)
    window.advance(7, False)
    window.share(loss, 10.0)
    assert window.factor == pytest.approx(10 / 5 / 2)  # the mean of 4, 8, 2 and 6 is 5
    restored = AccumulationWindow(2)
    restored.start_run(2)
    restored.load_state_dict(window.state_dict(before_batch=False), torch.device("cpu"))
    restored.advance(7, False)
    restored.share(loss, 10.0)
    assert restored.factor == window.factor


def test_first_window_is_measured_by_the_first_batches_of_all():
    """One of the ranks may have no loss. If none has one, the next batches are used."""
    window, loss = AccumulationWindow(3), torch.tensor(1.0)
    window.start_run(3)
    window.advance(9, False)
    assert window.joint_share(None, None, Processes([None], [None])) is None
    window.advance(8, False)
    window.joint_share(loss, 5000.0, engine := Processes([3000.0], [None]))
    assert window.factor == pytest.approx(5000 / 4000 / 3)
    window.advance(7, False)
    window.share(loss, 6000.0)
    assert window.factor == pytest.approx(6000 / 4000 / 3)
    assert engine.sums == 1


@pytest.mark.parametrize("on_a_device", [False, True])
def test_window_of_one_batch_is_corrected_by_its_loss(monkeypatch, on_a_device):
    """One number is multiplied instead of all gradients."""
    multiplied = []
    engine = Processes([9.0])
    monkeypatch.setattr(engine.gradients, "multiply_", lambda optimizers, factor: multiplied.append(factor))
    if on_a_device:
        begin = engine.begin_sum
        engine.device = torch.device("cuda")
        monkeypatch.setattr(
            engine, "begin_sum", lambda *values: lambda: [torch.as_tensor(value) for value in begin(*values)()]
        )
    gradient, (share,), window = accumulate([torch.ones(3, 3)], size=1, engine=engine)
    assert engine.sums == 1
    assert not multiplied
    assert torch.allclose(gradient, torch.full((3,), 2 * 3 / 12))  # 3 of 12 samples, times two processes
    assert share == pytest.approx(3 * 2 * 3 / 12)
    assert float(window.factor) == pytest.approx(2 * 3 / 12)
    assert window.correction == 1.0


def test_half_precision_loss_is_multiplied_once():
    """The weight, which may be 100,000 tokens, is not multiplied first."""
    engine = Processes([1e5])
    window = AccumulationWindow(1)
    window.start_run(2)
    window.advance(1, True)
    loss = torch.tensor(2.0, dtype=torch.float16)
    assert window.joint_share(loss, 1e5, engine).item() == 2.0


@pytest.mark.parametrize(("weight", "correction"), [(1.0, 2.0), (4.0, 1.0)])
def test_rank_without_a_loss_scales_gradients_like_the_others(weight, correction):
    """Ranks with weights have multiplied their losses, and multiply no gradients."""
    engine = Processes([weight])
    engine.correcting = float(weight != 1.0)
    window = AccumulationWindow(1)
    window.start_run(2)
    window.advance(1, True)
    assert window.joint_share(None, None, engine) is None
    assert window.close([], engine)
    assert engine.sums == 1
    assert window.correction == correction


@pytest.mark.parametrize("weight", [None, 3.0])
def test_weights_on_some_ranks_only_are_refused_on_all(weight):
    """One rank would multiply its loss, the other its gradients."""
    engine = Processes([3.0 if weight is None else 1.0])
    engine.correcting = float(weight is None)
    window = AccumulationWindow(1)
    window.start_run(2)
    window.advance(1, True)
    with pytest.raises(ConfigurationError, match="a 'weight' for some batches"):  # noqa: PT012
        window.joint_share(torch.tensor(1.0), weight, engine)
        window.close([], engine)


class Windows(Callback):
    """Records the size of each window, saves after some batches, and may change the number of batches at the first."""

    def __init__(self, saves: int | None = None, changes_to: int | None = None) -> None:
        self.saves, self.changes_to, self.sizes = saves, changes_to, UserList[int]()  # not restored

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.changes_to is not None:
            trainer.accumulate_grad_batches = self.changes_to
        if batch_idx:
            self.on_train_epoch_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.progress.batches == self.saves:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "saved.ckpt")

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self.sizes.append(trainer.loop.window.size)


@pytest.mark.parametrize(
    ("saved_after", "changes_to", "given", "sizes"),
    [
        (2, None, 3, [3, 1, 3, 3]),
        (3, None, 3, [2, 2, 3, 3]),  # an open window keeps its size
        (6, None, 3, [3, 3]),
        (3, 3, 2, [3, 3, 3]),  # a change during the saved run is restored
        (6, 3, 2, [3, 3]),
    ],
)
def test_resumed_run_accumulates_as_its_code(
    tmp_path: Path, saved_after: int, changes_to: int | None, given: int, sizes: list[int]
) -> None:
    data, saves, resumed = loader_of(make_batches(6)), Windows(saved_after, changes_to), Windows()
    make_trainer(tmp_path, callbacks=[saves], accumulate_grad_batches=2, max_epochs=2).fit(Regression(), data)
    trainer = make_trainer(tmp_path, callbacks=[resumed], accumulate_grad_batches=given, max_epochs=2)
    trainer.fit(Regression(), data, ckpt_path=tmp_path / "saved.ckpt")
    assert resumed.sizes == sizes
