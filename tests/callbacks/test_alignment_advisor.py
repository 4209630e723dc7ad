"""Sizes that are not aligned for Tensor Cores: detection and warnings."""

import logging

import pytest
import torch
from torch import nn

from tests.support import Regression, imports_inductor, loader_of, make_batches, make_trainer
from trainer.callbacks import AlignmentAdvisor, alignment_advisor
from trainer.callbacks.alignment_advisor import Misaligned, misaligned
from trainer.precision import MixedPrecision


@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        (nn.Linear(100, 513), {"in_features": 100, "out_features": 513}),
        (nn.Conv2d(3, 64, 7), None),  # an image
        (nn.Conv1d(4, 60, 3), {"out_channels": 60}),
        (nn.ConvTranspose2d(64, 3, 3), {"out_channels": 3}),
        (nn.Conv2d(64, 128, 3, groups=16), {"in_channels per group": 4}),
        (nn.Conv2d(24, 12, 1, groups=3), {"out_channels per group": 4}),
        (nn.Conv2d(30, 30, 3, groups=30), None),  # depthwise
        (nn.LazyLinear(8), None),
        (nn.Embedding(10, 7), None),
        (nn.MultiheadAttention(12, 2), {"in_features": 12, "out_features": 12}),
    ],
    ids=str,
)
def test_checked_sizes(layer, sizes):
    found = list(misaligned(nn.ModuleDict({"layer": layer})))
    assert [each.sizes for each in found] == ([] if sizes is None else [sizes])


@imports_inductor
def test_line_names_the_layer_its_size_and_the_next_multiple():
    net = nn.ModuleDict({"body": nn.Sequential(nn.Linear(12, 10)), "stem": torch.compile(nn.Conv2d(20, 8, 1))})
    assert [str(each) for each in misaligned(net)] == [
        "body.0 (Linear): in_features 12 -> 16, out_features 10 -> 16",
        "stem (Conv2d): in_channels 20 -> 24",
    ]
    assert str(Misaligned("a", "Linear", {"out_features": 1001})) == "a (Linear): out_features 1001 -> 1008"


def messages_of(folder, caplog, *, times=1, precision="bf16-mixed", **arguments):
    """Return the messages of the advisor in ``times`` fits."""
    trainer = make_trainer(folder, precision=precision, callbacks=[AlignmentAdvisor(**arguments)])
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for _ in range(times):
            trainer.fit(Regression(), loader_of(make_batches(1)))
    return [record.getMessage() for record in caplog.records if "Tensor Cores" in record.getMessage()]


MESSAGE = """\
Tensor Cores are fastest if sizes of 16-bit products are multiples of 8. 2 layers have other sizes, which can be padded:
  net.0 (Linear): in_features 6 -> 8
  net.4 (Linear): out_features 3 -> 8"""


@pytest.mark.filterwarnings("ignore:Nothing to do")
def test_one_message_once(tmp_path, caplog):
    assert messages_of(tmp_path, caplog, everywhere=True, times=2) == [MESSAGE]


@pytest.mark.parametrize(("precision", "half", "cores"), [("32-true", 0, 1), ("16-mixed", 1, 0), ("bf16-true", 1, 1)])
def test_advisor_warns_on_tensor_cores_in_16_bits(tmp_path, caplog, monkeypatch, precision, half, cores):
    devices = []
    monkeypatch.setattr(alignment_advisor, "tensor_cores", lambda device: devices.append(device) or cores)
    assert messages_of(tmp_path, caplog, precision=precision) == [MESSAGE] * (half and cores)
    assert devices == [torch.device("cpu")] * half
    assert messages_of(tmp_path, caplog, precision=precision, everywhere=True) == [MESSAGE]


def test_layers_that_stay_in_float32_are_left_out(tmp_path, caplog):
    chosen = MixedPrecision("bfloat16", fp32_modules=["net.4"])
    [message] = messages_of(tmp_path, caplog, precision=chosen, everywhere=True)
    assert "net.0" in message
    assert "net.4" not in message


@pytest.mark.whole
@pytest.mark.gpu
@pytest.mark.parametrize("given", [None, AlignmentAdvisor(max_lines=3)])
def test_default_on_a_gpu(tmp_path, given):
    def advisors(precision):
        trainer = make_trainer(tmp_path, accelerator="gpu", devices=1, precision=precision, callbacks=given)
        return [callback for callback in trainer.callbacks if isinstance(callback, AlignmentAdvisor)]

    assert len(advisors("16-mixed")) == 1
    assert len(advisors("32-true")) == (given is not None)
