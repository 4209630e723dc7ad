"""What ``training_step`` may return."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.errors import ConfigurationError
from trainer.loops.step_output import loss_in, outputs_of, weight_in


def test_the_loss_and_the_weight_beside_it():
    loss = torch.tensor(2.0)
    assert loss_in({"loss": loss}) == (loss, None)
    assert loss_in({"loss": loss, "weight": torch.tensor(3)}) == (loss, 3.0)
    assert loss_in(None) == (None, None)
    assert loss_in({"loss": loss, "weight": 0}) == (None, None)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("loss", "must return a Tensor, a dict, or None .* Got str"),
        ({"los": torch.tensor(1.0)}, r"the 'loss' key needs to be present .*Got the keys \['los'\] and loss=None"),
        ({"loss": 1.0}, "hold a tensor. .*loss=1.0"),
    ],
)
def test_something_else(output, message):
    with pytest.raises(ConfigurationError, match=message):
        loss_in(output)


def test_what_the_end_of_the_batch_is_told():
    share = torch.tensor(1.0, requires_grad=True) * 2
    assert outputs_of(None, None) == outputs_of(None, {"extra": 1}) == outputs_of(share, None) == {}
    assert outputs_of(share, share) == {"loss": 2.0}
    assert not outputs_of(share, share)["loss"].requires_grad
    told = outputs_of(share, {"loss": share * 3, "extra": share * 5, "name": "x"})
    assert told == {"loss": 2.0, "extra": 10.0, "name": "x"}
    assert not told["extra"].requires_grad


@pytest.mark.parametrize("output", [torch.tensor(1.0), {"loss": torch.tensor(1.0)}, None])
def test_no_weight(output):
    assert weight_in(output) is None


@pytest.mark.parametrize("weight", [3, 3.0, torch.tensor(3), torch.tensor([[3.0]], dtype=torch.float64)])
def test_a_weight_is_a_number_on_the_host(weight):
    read = weight_in({"weight": weight})
    assert read == 3.0
    assert type(read) is float


def test_a_weight_on_a_device_is_not_read():
    weight = weight_in({"weight": torch.ones(1, dtype=torch.int64, device="meta")})
    assert (weight.shape, weight.dtype, weight.device.type) == ((), torch.float32, "meta")


@pytest.mark.parametrize("weight", [-1, math.inf, math.nan, "3", None, True, torch.ones(2), [3]])
def test_impossible_weights(weight):
    with pytest.raises(ConfigurationError, match=r"Got 'weight': .*expected one number, at least 0"):
        weight_in({"weight": weight})
