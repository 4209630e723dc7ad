"""Accumulation windows in isolation: their borders, and their mean compared to one large batch."""

from collections import UserList
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.errors import ConfigurationError
from trainer.loop.accumulation import AccumulationWindow, WeightedMean


class Processes:
    """An engine of this rank, and of others with the window weights ``others`` (None for no loss).

    ``correcting`` is the number of other ranks that correct their losses; None for all, if this one does.
    """

    device = torch.device("cpu")
    gradients = SimpleNamespace(multiply_=lambda optimizers, factor: None)

    def __init__(self, *others, correcting=None):
        self.collectives, self.data_parallel_size = self, 1 + len(others)
        self.others, self.correcting, self.unit, self.sums = others, correcting, 1.0, 0

    def begin_sum(self, total, count, corrects):
        there = [weight for weights in self.others for weight in weights if weight is not None]
        total, count = total + sum(there) / self.unit, count + len(there)
        self.unit *= total / count if count else 1.0
        self.sums += 1
        correcting = corrects * len(there) if self.correcting is None else self.correcting
        return lambda: [total, count, corrects + correcting]


def opened(size, engine):
    """Return the mean of a window at its first batch."""
    mean = WeightedMean(AccumulationWindow(size), engine)
    mean.start_run()
    advance(mean, size, size == 1)
    return mean


def advance(mean, batches_left, is_last):
    mean.window.advance(batches_left, is_last)
    mean.begin_batch()


@pytest.mark.parametrize("batches", [0, -1, 1.5, True, "2"])
def test_impossible_windows(batches):
    with pytest.raises(ConfigurationError, match=r"Got accumulate_grad_batches=.*at least 1"):
        AccumulationWindow(batches)


@pytest.mark.parametrize("weights", [(None, 3.0), (3.0, None)])
def test_weights_for_all_batches_or_for_none(weights):
    mean, loss = opened(2, Processes()), torch.tensor(1.0)
    mean.share(loss, weights[0])
    advance(mean, 1, True)
    with pytest.raises(ConfigurationError, match="expected one for all of them or for none"):
        mean.share(loss, weights[1])
    advance(mean, 2, False)  # a new window may be of the other kind
    mean.share(loss, weights[1])


# --- several ranks ----------------------------------------------------------------------------------------------------


def test_weights_are_measured_by_the_mean_of_the_last_window():
    engine, loss = Processes([2.0, 6.0]), torch.tensor(1.0)
    mean = opened(2, engine)
    mean.share(loss, 4.0)
    assert mean.factor == pytest.approx(4 / 2)  # there was no window yet
    advance(mean, 8, False)
    mean.share(loss, 8.0)
    assert mean.factor == pytest.approx(8 / 2)
    mean.close([])
    advance(mean, 7, False)
    mean.share(loss, 10.0)
    assert mean.factor == pytest.approx(10 / 5 / 2)  # the mean of 4, 8, 2 and 6 is 5
    restored = WeightedMean(AccumulationWindow(2), engine)
    restored.start_run()
    restored.load_state_dict(mean.state_dict(is_open=False))
    advance(restored, 7, False)
    restored.share(loss, 10.0)
    assert restored.factor == mean.factor


def test_first_window_is_measured_by_the_first_batches_of_all():
    """One of the ranks may have no loss. If none has one, the next batches are used."""
    engine, loss = Processes([None], [None]), torch.tensor(1.0)
    mean = opened(3, engine)
    assert mean.joint_share(None, None) is None
    advance(mean, 8, False)
    engine.others = [3000.0], [None]
    mean.joint_share(loss, 5000.0)
    assert mean.factor == pytest.approx(5000 / 4000 / 3)
    advance(mean, 7, False)
    mean.share(loss, 6000.0)
    assert mean.factor == pytest.approx(6000 / 4000 / 3)
    assert engine.sums == 2


@pytest.mark.parametrize("on_a_device", [False, True])
def test_window_of_one_batch_is_corrected_by_its_loss(on_a_device):
    engine = Processes([9.0])
    mean = opened(1, engine)
    engine.gradients = None  # one number is multiplied instead of all gradients
    if on_a_device:
        begin, engine.device = engine.collectives.begin_sum, torch.device("cuda")
        engine.collectives.begin_sum = lambda *values: lambda: [torch.as_tensor(value) for value in begin(*values)()]
    share = mean.joint_share(torch.tensor(3.0), 3.0)
    assert mean.close([])
    assert (engine.sums, mean.correction) == (1, 1.0)
    assert float(share) == pytest.approx(3.0 * 2 * 3 / 12)  # 3 of 12 samples, times two processes


@pytest.mark.parametrize(("weight", "correction"), [(1.0, 2.0), (4.0, 1.0)])
def test_rank_without_a_loss_scales_gradients_like_the_others(weight, correction):
    """Ranks with weights have multiplied their losses, and multiply no gradients."""
    engine = Processes([weight], correcting=float(weight != 1.0))
    mean = opened(1, engine)
    assert mean.joint_share(None, None) is None
    assert mean.close([])
    assert (engine.sums, mean.correction) == (1, correction)


@pytest.mark.parametrize("weight", [None, 3.0])
def test_weights_on_some_ranks_only_are_refused_on_all(weight):
    """One rank would multiply its loss, the other its gradients."""
    mean = opened(1, Processes([3.0 if weight is None else 1.0], correcting=float(weight is None)))
    with pytest.raises(ConfigurationError, match="a 'weight' for some batches"):  # noqa: PT012
        mean.joint_share(torch.tensor(1.0), weight)
        mean.close([])


class Windows(Callback):
    """Records the size of each window, saves after some batches, and may change the number of batches at the first."""

    def __init__(self, saves=None, changes_to=None):
        self.saves, self.changes_to, self.sizes = saves, changes_to, UserList()  # not restored

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.changes_to is not None:
            trainer.accumulate_grad_batches = self.changes_to

    def on_train_batch_end(self, trainer, *_):
        if trainer.progress.batches == self.saves:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "saved.ckpt")

    def on_before_optimizer_step(self, trainer, *_):
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
def test_resumed_run_accumulates_as_its_code(tmp_path, saved_after, changes_to, given, sizes):
    data, saves, resumed = loader_of(make_batches(6)), Windows(saved_after, changes_to), Windows()
    make_trainer(tmp_path, callbacks=[saves], accumulate_grad_batches=2, max_epochs=2).fit(Regression(), data)
    trainer = make_trainer(tmp_path, callbacks=[resumed], accumulate_grad_batches=given, max_epochs=2)
    trainer.fit(Regression(), data, ckpt_path=tmp_path / "saved.ckpt")
    assert resumed.sizes == sizes
