import pytest
import torch
from torch import nn

from trainer.errors import PrecisionError
from trainer.precision import DoublePrecision


def test_double_converts_parameters_buffers_and_batches():
    plugin = DoublePrecision()
    net = plugin.convert_module(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    kinds = {name: tensor.dtype for name, tensor in net.state_dict().items()}
    assert kinds.pop("1.num_batches_tracked") is torch.int64
    assert set(kinds.values()) == {torch.float64}
    batch = [torch.ones(2), {"y": torch.ones(2, dtype=torch.float16), "n": torch.ones(2).long()}]
    x, nested = plugin.convert_batch(batch)
    assert (x.dtype, nested["y"].dtype, nested["n"].dtype) == (torch.float64, torch.float64, torch.int64)


def test_double_on_mps_is_refused():
    with pytest.raises(PrecisionError, match=r"no float64.*precision='32-true'"):
        DoublePrecision().check(torch.device("mps"))
