"""Training in 16 bits: bitwise equal to a hand-written loop, kept dtypes, and warnings."""

import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryPrecisionRecallCurve

from tests.precision.test_fp32_modules import ByHand
from tests.support import (
    OPTIMIZERS,
    Regression,
    SavesAt,
    adam,
    assert_identical,
    assert_same,
    fit_and_watch,
    loader_of,
    make_batches,
    make_net,
    make_trainer,
    momentum,
    sgd,
    train_by_hand,
)
from trainer.callbacks import GradientAccumulation
from trainer.errors import PrecisionError
from trainer.precision import HalfPrecision, cpu_fp16
from trainer.precision.dtypes import cast

DTYPES = {"16-true": torch.float16, "bf16-true": torch.bfloat16}
both = pytest.mark.parametrize("precision", DTYPES)
vanishing = pytest.mark.filterwarnings("ignore:precision='16-true' keeps weights and gradients in float16")


# --- computation ------------------------------------------------------------------------------------------------------


@vanishing
@both
@pytest.mark.parametrize("optimizer", ["momentum-fused", "adamw"])
@pytest.mark.parametrize("kernels", ["native", "fast"])
def test_weights_equal_a_hand_written_loop(tmp_path, precision, optimizer, kernels):
    make = OPTIMIZERS[optimizer] if optimizer != "adamw" else partial(OPTIMIZERS[optimizer], eps=1e-4)
    batches, dtype = make_batches(6), DTYPES[precision]
    plugin = HalfPrecision(dtype, cpu_kernels=kernels)
    trainer, ours = fit_and_watch(tmp_path, Regression(optimizer=make), batches, precision=plugin)
    with cpu_fp16.fast_fp16_kernels() if (kernels, precision) == ("fast", "16-true") else torch.enable_grad():
        theirs = train_by_hand(make_net().to(dtype), cast(batches, dtype), optimizer=make)
    assert_same(ours, theirs)
    assert (trainer.precision, trainer.scaler.is_enabled()) == (precision, False)
    assert {weight.dtype for weight in ours.weights[-1]} == {dtype}


@vanishing
@pytest.mark.parametrize("precision", [*DTYPES, "64-true"])
def test_new_tensors_have_the_dtype_inside_the_forward_only(tmp_path, precision):
    seen, dtype = {}, {**DTYPES, "64-true": torch.float64}[precision]

    class Looking(Regression):
        def training_step(self, batch, batch_idx):
            seen["training_step"] = torch.zeros(1).dtype, batch[0].dtype
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            seen["validation_step"] = torch.zeros(1).dtype, batch[0].dtype

        def on_before_backward(self, loss):
            seen["on_before_backward"] = torch.zeros(1).dtype, loss.dtype

    data = loader_of(make_batches(2))
    make_trainer(tmp_path, precision=precision).fit(Looking(), data, data)
    both = (dtype, dtype)
    assert seen == {"training_step": both, "validation_step": both, "on_before_backward": (torch.float32, dtype)}


# --- converted and kept dtypes ----------------------------------------------------------------------------------------


class Mixture(LightningModule):
    """A module with parameters and buffers of many dtypes, and metrics."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.frequencies = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.counts = nn.Parameter(torch.arange(3), requires_grad=False)
        self.mean = MeanMetric()
        self.curve = BinaryPrecisionRecallCurve(thresholds=101)


@both
def test_floating_point_parameters_and_buffers_are_converted(precision):
    module, dtype = Mixture(), DTYPES[precision]
    mask, counts = module.mask, module.counts
    assert HalfPrecision(dtype).convert_module(module) is module
    kinds = {name: tensor.dtype for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    kept = {
        "mask": torch.bool, "counts": torch.int64, "frequencies": torch.complex64,
        "net.1.num_batches_tracked": torch.int64, "curve.thresholds": torch.float32,
    }  # fmt: skip
    assert kinds == {name: kept.get(name, dtype) for name in kinds}
    assert (module.mask is mask, module.counts is counts, module.dtype) == (True, True, dtype)
    assert torch.equal(counts, torch.arange(3))
    assert "cache" not in module.state_dict()
    assert module.mean.mean_value.dtype is torch.float32


# --- modules that stay in float32 ----------------------------------------------------------------------------------


@vanishing
@both
@pytest.mark.parametrize("recomputes", [False, True])
def test_fp32_modules_equal_a_hand_written_loop(tmp_path, precision, recomputes):
    class Recomputed(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False) if recomputes else super().forward(x)

    batches, dtype = make_batches(5), DTYPES[precision]
    plugin = HalfPrecision(dtype, fp32_modules=["net.1", "net.4"], cpu_kernels="native")
    module = Regression(Recomputed(*make_net()), optimizer=momentum)
    _, ours = fit_and_watch(tmp_path, module, batches, precision=plugin)
    assert_same(ours, train_by_hand(ByHand((1, 4), dtype), cast(batches, dtype), optimizer=momentum))
    assert {module.net[i].weight.dtype for i in (1, 4)} == {torch.float32}
    assert module.net[0].weight.dtype is dtype
    assert "forward" not in vars(module.net[1])


# --- warnings and refusals -----------------------------------------------------------------------------------------


def test_float16_weights_are_warned_of_once(tmp_path):
    with pytest.warns(UserWarning, match=r"gradients below 6e-8 vanish.*Use precision='16-mixed'") as caught:
        trainer = make_trainer(tmp_path, precision="16-true")
    with warnings.catch_warnings(record=True, action="always") as later:
        trainer.fit(Regression(), loader_of(make_batches(2)))
        make_trainer(tmp_path, precision="bf16-true")
    assert len(caught) == 1
    assert [str(w.message) for w in later if "float16" in str(w.message)] == []


@pytest.mark.parametrize(
    ("optimizer", "warns"),
    [
        (partial(torch.optim.AdamW, fused=True), "AdamW has eps=1e-08"),
        (partial(adam, eps=1e-4), None),
        (sgd, None),
    ],
)
def test_eps_that_float16_cannot_hold(tmp_path, optimizer, warns):
    with warnings.catch_warnings(record=True, action="always") as caught:
        for precision in ("16-true", "bf16-true", "16-mixed"):
            trainer = make_trainer(tmp_path, precision=precision)
            trainer.fit(Regression(optimizer=optimizer), loader_of(make_batches(1)))
    messages = [str(w.message) for w in caught if "eps=" in str(w.message) and "has eps" in str(w.message)]
    assert [text.split(" and float16 weights")[0] for text in messages] == ([warns] if warns else [])
    assert all("Use eps=1e-4" in text for text in messages)


# --- checkpoints ---------------------------------------------------------------------------------------------------


@vanishing
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("32-true", "16-true"), ("bf16-mixed", "bf16-true"), ("bf16-true", "64-true"), ("16-true", "bf16-true"),
    ],
)  # fmt: skip
def test_resuming_in_another_precision(tmp_path, saved, resumed):
    """Weights and momentum are rounded once to the dtype of the resumed run, and training continues."""
    kind, path = {**DTYPES, "64-true": torch.float64}[resumed], tmp_path / "saved.ckpt"
    options = {"precision": saved, "callbacks": [SavesAt(path, batches=4)], "enable_checkpointing": True}
    fit_and_watch(tmp_path, Regression(optimizer=momentum), make_batches(4), **options)
    stored = torch.load(path, weights_only=True)

    class Looking(Regression):
        def on_train_start(self):
            states = self.trainer.optimizers[0].state_dict()["state"].values()
            self.arrived = {name: value.clone() for name, value in self.state_dict().items()}
            self.momenta = [state["momentum_buffer"].clone() for state in states]

    module = Looking(make_net(seed=7), optimizer=momentum)
    trainer = make_trainer(tmp_path, precision=resumed, max_epochs=2)
    trainer.fit(module, loader_of(make_batches(4)), ckpt_path=path)
    assert_identical(module.arrived, {name: value.to(kind) for name, value in stored["state_dict"].items()})
    states = stored["optimizer_states"][0]["state"].values()
    assert_identical(module.momenta, [state["momentum_buffer"].to(kind) for state in states])
    assert trainer.global_step == 8
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    assert not torch.equal(module.net[4].weight, module.arrived["net.4.weight"])


@pytest.mark.parametrize(("precision", "limit"), [("bf16-true", 256), ("16-true", 2048)])
def test_windows_that_would_lose_gradients_are_refused(tmp_path, precision, limit):
    """The gradients of further batches would be rounded away in the sum."""
    match = rf"accumulate_grad_batches={limit + 1} with precision='{precision}', expected at most {limit}.*bf16-mixed"
    quiet = pytest.warns(UserWarning, match="float16") if precision == "16-true" else nullcontext()
    with quiet:
        trainer = make_trainer(tmp_path, precision=precision, accumulate_grad_batches=limit)
    with pytest.raises(PrecisionError, match=match):
        trainer.accumulate_grad_batches = limit + 1
    for given in (
        {"accumulate_grad_batches": limit + 1},
        {"callbacks": [GradientAccumulation(schedule={3: limit + 1})]},
    ):
        with pytest.raises(PrecisionError, match=match), warnings.catch_warnings(action="ignore"):
            make_trainer(tmp_path, precision=precision, **given)
    assert make_trainer(tmp_path, precision="bf16-mixed", accumulate_grad_batches=limit + 1).accumulate_grad_batches
