"""The ``log`` that replaces a module's own, in isolation. Recorded values are in ``test_metrics.py``."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, default_collate

from tests.parity import Learner
from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.common.session import Session
from trainer.metrics.logging import ModuleLog, attach_log
from trainer.metrics.metrics import MetricStore


def stand_in(module, *, world_size=1):
    store = MetricStore(True)
    store.begin_batch([torch.zeros(3, 2)])
    vars(module)["_current_fx_name"] = "training_step"
    collectives = SimpleNamespace(reduce=lambda tensor, op, group: tensor)
    values = {"loggers": [], "callbacks": [], "world_size": world_size}
    values["first_batch_size"] = lambda index: None
    return SimpleNamespace(active_metrics=store, collectives=collectives, **values)


def test_epoch_values_on_several_processes_should_be_synchronised():
    module = Learner()
    log = ModuleLog(module, stand_in(module, world_size=2))
    with pytest.warns(UserWarning, match=r"recommended to use `self.log\('x', ..., sync_dist=True\)`"):
        log("x", torch.tensor(1.0), on_epoch=True)
    log("y", torch.tensor(1.0), on_epoch=True, sync_dist=True)
    log("z", torch.tensor(1.0), on_epoch=True, rank_zero_only=True)
    log("step", torch.tensor(1.0))


def test_sync_dist_alone_does_not_reduce_over_the_epoch():
    module = Learner()
    trainer = stand_in(module)
    ModuleLog(module, trainer)("x", 1.0, sync_dist=True)
    (entry,) = trainer.active_metrics.entries.values()
    assert entry.options.sync_dist is False


def test_parts_with_their_own_log_keep_it():
    class Overrides(LightningModule):
        def log(self, *args, **kwargs): ...

    module = Learner()
    module.child, module.other = Learner(), Overrides()
    with Session() as session:
        attach_log(module, stand_in(module), session, barebones=False)
        assert isinstance(vars(module)["log"], ModuleLog)
        assert vars(module.child)["log"] is vars(module)["log"]
        assert "log" not in vars(module.other)
    assert not any("log" in vars(part) for part in (module, module.child))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda log: pickle.loads(pickle.dumps(log))])
def test_copies_are_detached_from_the_trainer(duplicate):
    module = Learner()
    trainer = stand_in(module)
    log = duplicate(ModuleLog(module, trainer))
    with pytest.warns(UserWarning, match="reference is not registered on the model yet"):
        log("x", 1.0)
    assert not trainer.active_metrics.entries


def test_collection_of_devices_is_reduced_on_one():
    """0-dim values of one name may be on several devices."""
    module = Learner()
    trainer = stand_in(module)
    log = ModuleLog(module, trainer)
    for value in (1.0, torch.tensor(3.0, device="meta")):
        log("x", value, on_epoch=True, batch_size=1)
    (entry,) = trainer.active_metrics.entries.values()
    assert entry.epoch_value().device.type == "meta"


@pytest.mark.filterwarnings("ignore:.*the value needs to be floating to be reduced. Converting it to torch.float64.")
@pytest.mark.parametrize("identity", [16777217, torch.tensor(16777217), torch.tensor(16777217, dtype=torch.int32)])
@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "max"])
def test_numbers_and_integer_tensors_keep_their_digits(tmp_path, reduce_fx, identity):
    class Logs(Regression):
        def training_step(self, batch, batch_idx):
            for name, value in (("id", identity), ("time", 1764349653.25), ("rate", 0.1)):
                self.log(name, value, on_step=True, on_epoch=True, reduce_fx=reduce_fx, batch_size=4)
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(tmp_path)
    trainer.fit(Logs(), loader_of(make_batches(1)))
    for suffix in ("", "_step", "_epoch"):
        found = [trainer.callback_metrics[f"{name}{suffix}"] for name in ("id", "time", "rate")]
        assert [value.item() for value in found] == [16777217, 1764349653.25, 0.1]
        assert {value.dtype for value in found} == {torch.float64}


class Samples(Regression):
    """Its batches are lists of samples."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def log_index(self, batch, batch_idx):
        for name in ("index", "other"):
            self.log(name, float(batch_idx), on_step=False, on_epoch=True, **self.options)

    def training_step(self, batch, batch_idx):
        self.log_index(batch, batch_idx)
        return self.net(torch.stack([sample[0] for sample in batch])).square().mean()

    validation_step = test_step = log_index


class Tensors(Samples):
    """Its batches are tensors."""

    def training_step(self, batch, batch_idx):
        return super().training_step([batch], batch_idx)


def samples(number, collate=list):
    return DataLoader([(torch.ones(6), torch.ones(6))] * number, batch_size=4, collate_fn=collate)


def test_inferred_batch_size_that_is_not_the_loaders_is_one_warning(tmp_path):
    trainer = make_trainer(tmp_path, max_epochs=2)
    with pytest.warns(UserWarning, match=r"inferred a batch size of 6 .* batch_size=4\.") as caught:
        trainer.fit(Samples(), samples(8), samples(8))
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="inferred a batch size of 6"):
        trainer.test(Samples(), samples(8), verbose=False)


@pytest.mark.parametrize(
    ("module", "number", "collate"),
    [
        (Tensors(), 6, default_collate),  # the last batch has two samples
        (Samples(batch_size=4), 8, list),
        (Samples(reduce_fx="max"), 8, list),
        (Tensors(), 3, default_collate),  # the first batch has three samples
    ],
)
def test_batch_size_that_is_right_given_or_not_needed_is_no_warning(tmp_path, module, number, collate):
    data = samples(number, collate)
    make_trainer(tmp_path).fit(module, data, data)
