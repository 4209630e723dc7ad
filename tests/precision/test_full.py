from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support import Regression, loader_of, make_batches, make_net, make_trainer
from trainer.errors import PrecisionError
from trainer.precision import DoublePrecision, FullPrecision

CPU = torch.device("cpu")


def test_full_changes_nothing():
    plugin, net, batch = FullPrecision(), make_net(), make_batches(1)[0]
    assert plugin.convert_module(net) is net
    assert all(p.dtype is torch.float32 for p in net.parameters())
    assert plugin.convert_batch(batch) is batch
    with plugin.session(net, CPU), plugin.autocast():
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_default_dtype() is torch.float32
    assert not plugin.build_scaler(CPU).is_enabled()
    assert repr(plugin) == "FullPrecision('32-true')"


def test_double_converts_parameters_buffers_and_batches():
    plugin = DoublePrecision()
    net = plugin.convert_module(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    kinds = {name: tensor.dtype for name, tensor in net.state_dict().items()}
    assert kinds.pop("1.num_batches_tracked") is torch.int64
    assert set(kinds.values()) == {torch.float64}
    x, nested = plugin.convert_batch(
        [torch.ones(2), {"y": torch.ones(2, dtype=torch.float16), "n": torch.ones(2).long()}]
    )
    assert (x.dtype, nested["y"].dtype, nested["n"].dtype) == (torch.float64, torch.float64, torch.int64)


def test_double_makes_new_tensors_double_inside_the_forward_only(tmp_path):
    seen = {}

    class Looking(Regression):
        def training_step(self, batch, batch_idx):
            seen["training_step"] = torch.zeros(1).dtype
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            seen["validation_step"] = torch.zeros(1).dtype
            assert batch[0].dtype is torch.float64

        def on_before_backward(self, loss):
            seen["on_before_backward"] = torch.zeros(1).dtype
            assert loss.dtype is torch.float64

        def on_train_batch_end(self, *args):
            seen["on_train_batch_end"] = torch.zeros(1).dtype

    batches = loader_of(make_batches(2))
    make_trainer(tmp_path, precision="64-true").fit(Looking(), batches, batches)
    assert seen == {
        "training_step": torch.float64,
        "validation_step": torch.float64,
        "on_before_backward": torch.float32,
        "on_train_batch_end": torch.float32,
    }
    assert torch.get_default_dtype() is torch.float32


def test_default_dtype_survives_an_exception(tmp_path):
    class Failing(Regression):
        def training_step(self, batch, batch_idx):
            raise KeyError("in the forward")

    with pytest.raises(KeyError):
        make_trainer(tmp_path, precision="64-true").fit(Failing(), loader_of(make_batches(1)))
    assert torch.get_default_dtype() is torch.float32


def test_double_on_mps_is_refused():
    with pytest.raises(PrecisionError, match=r"no float64.*precision='32-true'"):
        DoublePrecision().check(torch.device("mps"))
