"""Return values of ``training_step``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from tests.parity import Classifier, data, plain, run_both
from tests.support import AUTOCAST_DTYPES, Regression, loader_of, make_batches, make_net, make_trainer, native_fp16, sgd
from trainer.errors import ConfigurationError
from trainer.loops.step_output import loss_in, outputs_of, weight_in


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


def test_outputs_of_on_train_batch_end():
    share = torch.tensor(1.0, requires_grad=True) * 2
    assert outputs_of(None, None) == outputs_of(None, {"extra": 1}) == outputs_of(share, None) == {}
    assert outputs_of(share, share) == {"loss": 2.0}
    assert not outputs_of(share, share)["loss"].requires_grad
    outputs = outputs_of(share, {"loss": share * 3, "extra": share * 5, "name": "x"})
    assert outputs == {"loss": 2.0, "extra": 10.0, "name": "x"}
    assert list(outputs) == ["loss", "extra", "name"]
    assert not outputs["loss"].requires_grad
    assert outputs["extra"].requires_grad


class ReturnsMore(Classifier):
    """Returns its loss in one of several forms, with values that have a graph."""

    def __init__(self, automatic: bool, kind: str) -> None:
        super().__init__()
        self.automatic_optimization, self.kind, self.seen = automatic, kind, []

    def output(self, batch: Any) -> Any:
        loss, scores = self.loss(batch), self(batch[0])
        kinds = {
            "tensor": loss,
            "loss last": {"scores": scores, "loss": loss},
            "loss first": {"loss": loss, "n": [loss]},
        }
        return kinds.get(self.kind, {"scores": scores})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.output(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.output(batch)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        norm = None
        if "scores" in outputs and not self.automatic_optimization:  # an optimizer step changes saved tensors
            outputs["scores"].sum().backward()
            norm = self.net[0].weight.grad.norm()
        self.note(outputs, norm)

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.note(outputs if isinstance(outputs, dict) else {"": outputs}, None)

    def note(self, outputs: dict[str, Any], norm: Any) -> None:
        items = {
            key: (plain(value), isinstance(value, Tensor) and value.requires_grad) for key, value in outputs.items()
        }
        self.seen.append((list(items.items()), plain(norm)))


@pytest.mark.parametrize(
    ("automatic", "kind"),
    [(automatic, kind) for automatic in (True, False) for kind in ("tensor", "loss last", "loss first")]
    + [(False, "no loss")],
)
def test_outputs_of_on_train_batch_end_equal_lightnings(automatic: bool, kind: str) -> None:
    """Only the loss is detached: a backward pass from another value works, and evaluation changes nothing."""

    def scenario(make: Any) -> Any:
        module = ReturnsMore(automatic, kind)
        make(max_epochs=1).fit(module, data(6), data(4))
        return module.seen

    theirs, mine = run_both(scenario)
    assert mine == theirs
    assert len(mine) > 4


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_manual_optimization_may_run_backward_from_an_output(tmp_path: Any, precision: str) -> None:
    """The loss is computed from ``outputs["pred"]`` in ``on_train_batch_end``, which also steps."""

    class LateLoss(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"pred": self.net(batch[0])}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(mse_loss(outputs["pred"].float(), batch[1]))
            optimizer.step()

    batches, module, net = make_batches(5), LateLoss(make_net()), make_net()
    module.automatic_optimization = False
    trainer = make_trainer(tmp_path, precision=native_fp16() if precision == "16-mixed" else precision)
    trainer.fit(module, loader_of(batches))
    optimizer, scaler = sgd(net.parameters()), torch.amp.GradScaler("cpu", enabled=precision == "16-mixed")
    dtype = AUTOCAST_DTYPES.get(precision)
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            pred = net(batch[0])
        scaler.scale(mse_loss(pred.float(), batch[1])).backward()
        scaler.step(optimizer)
        scaler.update()
    for (name, a), b in zip(module.net.named_parameters(), net.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert trainer.scaler.get_scale() == scaler.get_scale()


@pytest.mark.parametrize("output", [torch.tensor(1.0), {"loss": torch.tensor(1.0)}, None])
def test_no_weight(output):
    assert weight_in(output) is None


@pytest.mark.parametrize("weight", [3, 3.0, torch.tensor(3), torch.tensor([[3.0]], dtype=torch.float64)])
def test_weight_is_a_number_on_the_host(weight):
    read = weight_in({"weight": weight})
    assert read == 3.0
    assert type(read) is float


def test_weight_on_a_device_is_not_read():
    weight = weight_in({"weight": torch.ones(1, dtype=torch.int64, device="meta")}, reads=False)
    assert (weight.shape, weight.dtype, weight.device.type) == ((), torch.float32, "meta")


@pytest.mark.parametrize("weight", [-1, math.inf, math.nan, "3", None, True, torch.ones(2), [3]])
def test_impossible_weights(weight):
    with pytest.raises(ConfigurationError, match=r"Got 'weight': .*expected one number, at least 0"):
        weight_in({"weight": weight})
