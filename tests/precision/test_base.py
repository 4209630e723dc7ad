"""The protocol of plugins: the calls of the Trainer, and their order."""

import inspect
import textwrap
from contextlib import contextmanager

import pytest
import torch

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.errors import PrecisionError
from trainer.precision import LossScaler, Precision, base


def noted(hook):
    """Return the method of the base class, with a record of its calls."""

    def method(self, *arguments):
        self.calls.append(hook)
        return getattr(Precision, hook)(self, *arguments)

    return method


class Noting(Precision):
    """A custom plugin that records its calls."""

    name = "noting"
    for_device, check, convert_module = noted("for_device"), noted("check"), noted("convert_module")
    check_optimizers, convert_batch = noted("check_optimizers"), noted("convert_batch")

    def __init__(self):
        self.calls = []

    def build_scaler(self, device):
        self.calls.append("build_scaler")
        return LossScaler(device.type, init_scale=16.0)

    @contextmanager
    def session(self, module, device):
        self.calls.append("session in")
        yield
        self.calls.append("session out")

    @contextmanager
    def autocast(self):
        self.calls.append("autocast in")
        yield
        self.calls.append("autocast out")


class Stepping(Regression):
    """Records the steps and the backward pass among the plugin's calls."""

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
        return batch_idx

    test_step = predict_step = validation_step


BATCH = ["convert_batch", "autocast in", "training_step", "autocast out", "backward"]
EVAL = ["convert_batch", "autocast in", "validation_step", "autocast out"]


def test_order_of_a_fit(tmp_path):
    plugin, batches = Noting(), loader_of(make_batches(2))
    trainer = make_trainer(tmp_path, precision=plugin, num_sanity_val_steps=1)
    assert (plugin.calls, trainer.scaler.get_scale()) == (["for_device", "check", "build_scaler"], 16.0)
    plugin.calls.clear()
    module = Stepping(plugin.calls)
    trainer.fit(module, batches, batches)
    assert plugin.calls[:3] == ["convert_module", "session in", "check_optimizers"]
    assert plugin.calls[3:-1] == EVAL + BATCH * 2 + EVAL * 2
    assert (plugin.calls[-1], trainer.precision) == ("session out", "noting")
    plugin.calls.clear()
    trainer.validate(module, batches, verbose=False)
    assert plugin.calls == ["convert_module", "session in", *EVAL * 2, "session out"]


def test_worked_example(tmp_path):
    """The example in the module's docstring."""
    example = inspect.getdoc(base).partition("if the GPU has them::")[2]
    names = {"Precision": Precision, "contextmanager": contextmanager, "torch": torch, "Trainer": lambda **kwargs: None}
    exec(textwrap.dedent(example), names)
    seen = []
    module = Regression(change=lambda loss, _: seen.append(torch.get_float32_matmul_precision()) or loss)
    before = torch.get_float32_matmul_precision()
    trainer = make_trainer(tmp_path, precision=names["TensorFloat32"]())
    trainer.fit(module, loader_of(make_batches(2)))
    assert seen == ["high", "high"]
    assert torch.get_float32_matmul_precision() == before != "high"
    assert (trainer.scaler.is_enabled(), trainer.precision) == (False, "tf32")


@pytest.mark.parametrize(("name", "hook"), [("convert_bach", "convert_batch"), ("build_scalar", "build_scaler")])
def test_misspelt_hook_is_refused(name, hook):
    with pytest.raises(PrecisionError, match=f"{name!r}.* Did you mean {hook!r}"):
        type("Own", (Precision,), {name: lambda self, batch: batch})
    own = type("Own", (Precision,), dict.fromkeys((f"_{name}", "round_weights", hook), lambda self, *_: None))
    type("Derived", (own,), {"round_weights": lambda self: None})


def test_base_class_is_32_bit_training():
    plugin, device = Precision(), torch.device("cpu")
    assert plugin.for_device(device) is plugin
    assert (plugin.name, plugin.build_scaler(device).is_enabled()) == ("32-true", False)
    batch, module = object(), torch.nn.Linear(1, 1)
    assert plugin.convert_batch(batch) is batch
    assert plugin.convert_module(module) is module
    with plugin.session(module, device), plugin.autocast(), plugin.autocast():
        assert not torch.is_autocast_enabled("cpu")
    assert repr(plugin) == "Precision('32-true')"
