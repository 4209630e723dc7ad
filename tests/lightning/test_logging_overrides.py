"""Modules that override ``log`` under Lightning's Trainer and ours, and ``torch.compile`` of a call."""

import warnings
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch._dynamo.testing import CompileCounter

from tests.parity import Classifier, Learner, data, ours, weights
from tests.support import assert_identical
from trainer import Trainer
from trainer.callbacks import ScaleMonitor

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class Logs(Classifier):
    """Logs in both steps with ``log`` and ``log_dict``; overrides append to ``seen``."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log_dict({"a": loss + 1, "b": loss * 2})
        return loss


class PassesOn(Logs):
    """Overrides ``log`` as all models of pytorch-forecasting."""

    def log(self, *args, **kwargs):
        self.seen.append(args[0] if args else kwargs["name"])
        kwargs.setdefault("batch_size", 2)
        super().log(*args, **kwargs)


def test_log_that_a_test_has_replaced_is_called():
    for target in (LightningModule, Logs()):
        with mock.patch.object(target, "log") as log:
            ours(max_epochs=1).fit(target if isinstance(target, Logs) else Logs(), data(2))
        assert [call.args[0] if call.args else call.kwargs["name"] for call in log.mock_calls] == ["loss", "a", "b"]


@pytest.mark.parametrize("base", [Logs, PassesOn])
def test_log_in_on_after_optimizer_step(base):
    """By the module, by a callback, and by a callback through the module, with options."""

    class After(base):
        def on_after_optimizer_step(self, optimizer, outcome):
            self.log("module", float(self.global_step))
            self.log_dict({"x": 1.0, "y": torch.tensor(2.0)})

    class AfterToo(Callback):
        def on_after_optimizer_step(self, trainer, module, optimizer, outcome):
            self.log("callback", float(trainer.global_step), on_step=True, on_epoch=True)
            module.log("through", float(trainer.global_step), on_epoch=True, on_step=False)
            self.log_dict({"z": 3.0})

    trainer, module = ours(max_epochs=1, callbacks=AfterToo(), gradient_clip_val=0.5), After()
    trainer.fit(module, data(8))
    expected = {"x": 1, "y": 2, "z": 3, "module": 4, "callback": 2.5, "callback_step": 4, "through": 2.5}
    assert {name: trainer.callback_metrics[name].item() for name in expected} == expected
    assert base is Logs or {"module", "callback", "through"} <= set(module.seen)


def test_scale_monitor_logs_past_an_override():
    module = PassesOn()
    trainer = ours(max_epochs=1, precision="16-mixed", callbacks=ScaleMonitor(every_n_steps=1))
    trainer.fit(module, data(4))
    assert {"amp/scale", "amp/skip_rate"} <= set(trainer.callback_metrics)
    assert set(module.seen) == {"loss", "a", "b"}


def test_barebones_trainer_that_clips_does_not_warn_about_logging():
    """Lightning's warning about a bare Trainer is printed for the module's own calls only."""
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, barebones=True, gradient_clip_val=0.1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*self.log")
        trainer.fit(Learner(), data(2))


# --- torch.compile ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A part that logs through its module."""

    def __init__(self, parent):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.parent = [parent]  # no part of it

    def forward(self, features):
        features = self.linear(features).relu()
        self.parent[0].log("activation", features.mean(), on_epoch=True)
        return features


class Compiled(Classifier):
    """Logs with all methods at every step."""

    def __init__(self):
        super().__init__()
        self.block = Block(self)

    def training_step(self, batch, batch_idx):
        features, labels = batch
        loss = nn.functional.cross_entropy(self.net(self.block(features)), labels)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("number", 0.5 * batch_idx, on_step=True)
        self.log("index", batch_idx, on_epoch=True)
        self.log("most", loss, reduce_fx="max", on_step=False, on_epoch=True, batch_size=3)
        self.log_dict({"c": loss, "d": loss})
        return loss


class CompiledOverride(Compiled):
    def log(self, name, value, *args, **kwargs):
        kwargs.setdefault("batch_size", 2)
        super().log(f"of {name}", value, *args, **kwargs)


class CompiledInALoop(Compiled):
    """Logs more names than Dynamo's recompile limit."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for number in range(12):
            self.log(f"loss {number}", loss, on_epoch=True)
        return loss


def compiled(module, part, backend):
    """Compile the module, or a part of it."""
    if part is None:
        return torch.compile(module, backend=backend)
    setattr(module, part, torch.compile(getattr(module, part), backend=backend))
    return module


@pytest.mark.filterwarnings("ignore")  # torch's own, on compiling
@pytest.mark.parametrize(
    ("part", "cls", "graphs"),
    [(None, CompiledOverride, 3), ("training_step", CompiledInALoop, 3), ("block", Compiled, 1)],
)
def test_logging_does_not_recompile(part, cls, graphs):
    """The part's graph, the step's graph, and one more graph after a change of the batch index."""
    found, counter = [], CompileCounter()
    for is_compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module, trainer = cls(), ours(max_epochs=2, gradient_clip_val=1.0)
        trainer.fit(compiled(module, part, counter) if is_compiled else module, data(20))
        found.append([weights(module), trainer.callback_metrics])
    assert 0 < counter.frame_count <= graphs
    assert_identical(*found)
