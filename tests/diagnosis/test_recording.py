from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from tests.support import Regression, Skipping, loader_of, loss_of, make_batches, make_trainer, manual_step, sgd
from trainer.callbacks import OverflowReport
from trainer.diagnosis.recording import Recorder, storage_for
from trainer.state import random_states


class Alternating(Regression):
    """Steps two optimizers with each batch, like a GAN."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            manual_step(self, loss_of(self.net, batch), optimizer)

    def configure_optimizers(self):
        return [self.make_optimizer(self.net[0].parameters()), self.make_optimizer(self.net[2:].parameters())]


class Recording(Callback):
    """Records the batches of each update."""

    def __init__(self, keeps_batches=True):
        self.keeps_batches = keeps_batches

    def on_train_start(self, trainer, pl_module):
        self.recorder = Recorder(trainer.run_state, keeps_batches=self.keeps_batches)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.recorder.close()


class Records(Recording):
    """By the step of each update, the indices of its batches."""

    def __init__(self, keeps_batches=True):
        super().__init__(keeps_batches)
        self.updates = {}

    def on_after_optimizer_step(self, trainer, pl_module, optimizer, outcome):
        if optimizer is trainer.optimizers[outcome.optimizers[0]]:
            step = trainer.global_step - len(outcome.optimizers)
            self.updates[step] = [recorded.batch_idx for recorded in self.recorder.closed]


@pytest.mark.parametrize(
    ("module", "window", "expected"),
    [
        (Skipping(), 1, {i: [i] for i in range(6)}),
        (Skipping(), 3, {0: [0, 1, 2], 1: [3, 4, 5]}),
        (Skipping(none_in={1}), 1, {0: [0], 2: [2], 3: [3], 4: [4], 5: [5]}),
        (Skipping(none_in={1, 2, 3}), 2, {0: [0], 2: [4, 5]}),
        (Skipping(weights=[1, 1, 0, 0, 1, 1]), 2, {0: [0, 1], 2: [4, 5]}),
        (Alternating(), 1, {2 * i: [i] for i in range(6)}),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_each_outcome_has_the_batches_of_its_update(tmp_path, late, module, window, expected, fused):
    """With a fused optimizer, the outcome is read after the next forward pass."""
    records = Records()
    module.make_optimizer = partial(sgd, fused=fused)
    trainer = make_trainer(tmp_path, precision="16-mixed", accumulate_grad_batches=window, callbacks=[records])
    trainer.fit(module, loader_of(make_batches(6)))
    assert records.updates == expected


class UsesWeightsTwice(Alternating):
    def training_step(self, batch, batch_idx):
        self.decision = self.trainer.engine.precision.state_dict()["enabled"]
        manual_step(self, loss_of(self.net, batch) + loss_of(self.net, batch), self.optimizers()[0])


def test_diagnosis_inside_a_step_does_not_disable_the_autocast_cache(tmp_path, late):
    """A manual step with a fused optimizer reads the outcome of the last one."""
    module, report = UsesWeightsTwice(optimizer=partial(sgd, fused=True)), OverflowReport()
    trainer = make_trainer(tmp_path, precision="16-mixed", callbacks=[report])
    trainer.fit(module, loader_of(make_batches(6, gains=dict.fromkeys(range(4), 1e30))))
    assert len(report.reports) == 1
    assert module.decision is None  # after more steps


class Stochastic(Regression):
    """Has buffers that a batch changes, and draws random numbers."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3)))
        self.means = []

    def training_step(self, batch, batch_idx):
        self.means.append(self.net[0].running_mean.clone())
        loss = super().training_step(batch, batch_idx)
        self.random_state = torch.get_rng_state()
        return loss


class Restores(Records):
    """Restores the state before each update, and compares it."""

    def on_after_optimizer_step(self, trainer, pl_module, optimizer, outcome):
        first, second = self.recorder.closed
        self.updates[first.step] = (first.mean.window.is_first, second.mean.window.is_first, second.buffers)
        mean = pl_module.net[0].running_mean
        after = mean.clone()
        first.buffers.restore()
        assert torch.equal(mean, pl_module.means[-2])
        mean.copy_(after)[0] = torch.nan
        first.buffers.restore_nonfinite()
        assert mean.tolist() == [pl_module.means[-2][0], *after[1:].tolist()]
        if self.keeps_batches:
            random_states.restore(second.random_state)
            loss_of(pl_module.net, second.batch)
            assert torch.equal(torch.get_rng_state(), pl_module.random_state)
        else:
            assert (first.batch, first.random_state) == (None, {})


@pytest.mark.parametrize("keeps_batches", [True, False])
def test_state_before_each_window(tmp_path, keeps_batches):
    records = Restores(keeps_batches)
    trainer = make_trainer(tmp_path, accumulate_grad_batches=2, callbacks=[records])
    trainer.fit(Stochastic(), loader_of(make_batches(4)))
    assert records.updates == dict.fromkeys(range(2), (True, False, None))


# --- stored batches -----------------------------------------------------------------------------------------------


class Graph:
    """A batch of a class that cannot be looked into."""

    def __init__(self):
        self.x = torch.ones(4)


MIB = torch.zeros(2**20, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("batch", "number"),
    [
        ([MIB, MIB.numpy()], 32),
        ({"text": ["a", "b"], "label": torch.zeros(2)}, 100),
        ([torch.eye(2**11).to_sparse(), None], 100),
        (torch.ones(2**21).to_sparse(), 2),  # indices of 16 MiB and values of 8 MiB
        (torch.zeros(2**26 + 1, dtype=torch.uint8), 1),
        ([MIB, Graph()], 1),
    ],
)
def test_stored_batches_take_limited_memory(batch, number):
    room, stored = storage_for(batch, 100)
    assert room == number
    assert stored(batch) is batch


def test_stored_batches_hold_no_shared_memory():
    shared = torch.ones(3).share_memory_()
    batch = {"shared": shared, "sparse": shared.to_sparse(), "name": "a"}
    _, stored = storage_for(batch, 100)
    copied = stored(batch)
    assert not copied["shared"].is_shared()
    assert copied["shared"].equal(shared)
    assert copied["sparse"].to_dense().equal(shared)
    assert copied["name"] == "a"


def test_evidence_has_the_learning_rates_of_groups_that_on_train_start_replaced(tmp_path):
    """``load_state_dict`` of an optimizer creates new groups."""
    used, found = [], []

    class Loads(Regression):
        def on_train_start(self):
            optimizer = self.optimizers().optimizer
            optimizer.load_state_dict(optimizer.state_dict())

        def training_step(self, batch, batch_idx):
            used.append(self.optimizers().param_groups[0]["lr"])
            return super().training_step(batch, batch_idx)

        def on_train_end(self):
            report = next(one for one in self.trainer.callbacks if isinstance(one, OverflowReport))
            found.extend(batch.rates for batch in report._fit.evidence.batches())

    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    make_trainer(tmp_path).fit(Loads(schedule=schedule, interval="step"), loader_of(make_batches(3)))
    assert len(set(used)) == 3
    assert found == [[rate] for rate in used]
