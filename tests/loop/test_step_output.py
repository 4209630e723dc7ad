"""Return values of ``training_step``."""

import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.parity import Classifier, assert_agree, data, plain
from trainer.errors import ConfigurationError
from trainer.loop.accumulation import loss_in, weight_in


def test_loss_and_weight_in_a_dict():
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


class Outputs(OrderedDict):
    """A dict with attributes, as ``ModelOutput`` of transformers."""

    __getattr__ = OrderedDict.__getitem__


class ReturnsMore(Classifier):
    """Returns its loss in one of several forms, with values that have a graph."""

    def __init__(self, automatic, kind):
        super().__init__()
        self.automatic_optimization, self.kind, self.seen = automatic, kind, []

    def training_step(self, batch, batch_idx):
        loss, scores = self.loss(batch), self(batch[0])
        kinds = {
            "tensor": loss,
            "loss last": {"scores": scores, "loss": loss},
            "loss first": {"loss": loss, "n": [loss]},
            "own class": Outputs(scores=scores, loss=loss),
        }
        return kinds.get(self.kind, {"scores": scores})

    validation_step = training_step

    def on_train_batch_end(self, outputs, *_):
        norm = None
        if "scores" in outputs and not self.automatic_optimization:  # an optimizer step changes saved tensors
            outputs["scores"].sum().backward()
            norm = self.net[0].weight.grad.norm()
        self.note(outputs, (norm, type(outputs).__name__))

    def on_validation_batch_end(self, outputs, *_):
        self.note(outputs if isinstance(outputs, dict) else {"": outputs}, None)

    def note(self, outputs, norm):
        graphs = [(key, isinstance(value, Tensor) and value.requires_grad) for key, value in outputs.items()]
        self.seen.append((plain([*outputs.values()]), graphs, plain(norm)))


@pytest.mark.parametrize(
    ("automatic", "kind"),
    [(automatic, kind) for automatic in (True, False) for kind in ("tensor", "loss last", "loss first", "own class")]
    + [(False, "no loss")],
)
def test_outputs_of_on_train_batch_end_equal_lightnings(automatic, kind):
    """Only the loss is detached: a backward pass from another value works, and evaluation changes nothing.

    A mapping of another class keeps it in manual optimization.
    """

    def scenario(make):
        module = ReturnsMore(automatic, kind)
        make(max_epochs=1).fit(module, data(6), data(4))
        return module.seen

    assert len(assert_agree(scenario)) > 4


@pytest.mark.parametrize(
    "weight", [3, 3.0, np.int64(3), np.float32(3), torch.tensor(3), torch.tensor([[3.0]], dtype=torch.float64)]
)
def test_weight_is_a_number_on_the_host(weight):
    read = weight_in({"weight": weight})
    assert read == 3.0
    assert type(read) is float


def test_weight_on_a_device_is_not_read():
    weight = weight_in({"weight": torch.ones(1, dtype=torch.int64, device="meta")}, reads=False)
    assert (weight.shape, weight.dtype, weight.device.type) == ((), torch.float32, "meta")


@pytest.mark.parametrize("weight", [-1, math.inf, math.nan, "3", None, True, np.bool_(True), torch.ones(2), [3]])
def test_impossible_weights(weight):
    with pytest.raises(ConfigurationError, match=r"Got 'weight': .*expected one number, at least 0"):
        weight_in({"weight": weight})
