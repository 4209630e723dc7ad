"""The protocol: what the Trainer asks of a plugin, and in which order."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.precision import LossScaler, Precision


class Noting(Precision):
    """A plugin of a user's own that notes what is asked of it."""

    name = "noting"

    def __init__(self):
        self.calls = []

    def check(self, device):
        self.calls.append(("check", device.type))

    def build_scaler(self, device):
        self.calls.append(("build_scaler", device.type))
        return LossScaler(device.type, init_scale=16.0)

    def convert_module(self, module):
        self.calls.append("convert_module")
        return module

    @contextmanager
    def session(self, module, device):
        self.calls.append("session in")
        yield
        self.calls.append("session out")

    def convert_batch(self, batch):
        self.calls.append("convert_batch")
        return batch

    @contextmanager
    def autocast(self):
        self.calls.append("autocast in")
        yield
        self.calls.append("autocast out")


class Stepping(Regression):
    """Notes the steps and the backward among the plugin's calls."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def training_step(self, batch, batch_idx):
        self.calls.append("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss):
        self.calls.append("backward")

    def validation_step(self, batch, batch_idx):
        self.calls.append("validation_step")

    test_step = predict_step = validation_step


BATCH = ["convert_batch", "autocast in", "training_step", "autocast out", "backward"]
EVAL = ["convert_batch", "autocast in", "validation_step", "autocast out"]


def test_the_order_of_a_fit(tmp_path):
    plugin, batches = Noting(), loader_of(make_batches(2))
    trainer = make_trainer(tmp_path, precision=plugin, num_sanity_val_steps=1)
    assert plugin.calls == [("check", "cpu"), ("build_scaler", "cpu")]
    assert trainer.scaler.get_scale() == 16.0
    plugin.calls.clear()
    module = Stepping(plugin.calls)
    trainer.fit(module, batches, batches)
    around = {"session in", "convert_module", "session out"}
    assert [call for call in plugin.calls if call not in around] == EVAL + BATCH * 2 + EVAL * 2
    assert plugin.calls.count("convert_module") == 1
    assert plugin.calls.index("convert_module") < plugin.calls.index("convert_batch")
    assert plugin.calls.index("session in") < plugin.calls.index("convert_batch")
    assert plugin.calls[-1] == "session out"
    assert trainer.precision == "noting"


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_the_order_of_an_evaluation(tmp_path, stage):
    plugin = Noting()
    trainer = make_trainer(tmp_path, precision=plugin)
    plugin.calls.clear()
    getattr(trainer, stage)(Stepping(plugin.calls), loader_of(make_batches(2)))
    around = {"session in", "convert_module", "session out"}
    assert [call for call in plugin.calls if call not in around] == EVAL * 2
    assert [plugin.calls.count(call) for call in ("session in", "convert_module", "session out")] == [1, 1, 1]


def test_the_session_ends_where_a_run_fails(tmp_path):
    class Failing(Regression):
        def training_step(self, batch, batch_idx):
            raise KeyError("in the forward")

    ended = []

    class Ending(Noting):
        @contextmanager
        def session(self, module, device):
            try:
                yield
            finally:
                ended.append(True)

    plugin = Ending()
    with pytest.raises(KeyError):
        make_trainer(tmp_path, precision=plugin).fit(Failing(), loader_of(make_batches(1)))
    assert ended == [True]


def test_the_worked_example(tmp_path):
    class BFloat16Weights(Precision):
        name = "bf16-true"

        def convert_module(self, module):
            return module.to(torch.bfloat16)

        def convert_batch(self, batch):
            return apply_to_collection(batch, torch.Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t)

    module = Regression()
    trainer = make_trainer(tmp_path, precision=BFloat16Weights())
    trainer.fit(module, loader_of(make_batches(3)))
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert not trainer.scaler.is_enabled()
    assert trainer.precision == "bf16-true"


def test_the_base_class_is_32_bit_training():
    plugin, device = Precision(), torch.device("cpu")
    plugin.check(device)
    assert plugin.name == "32-true"
    assert not plugin.build_scaler(device).is_enabled()
    batch, module = object(), torch.nn.Linear(1, 1)
    assert plugin.convert_batch(batch) is batch
    assert plugin.convert_module(module) is module
    with plugin.session(module, device), plugin.autocast(), plugin.autocast():
        pass
    assert repr(plugin) == "Precision('32-true')"
