"""Callbacks and diagnosis on a sharded engine (FSDP2) report and do the same as under DDP.

With two ranks a sum has one order, so that weights are bitwise equal, except after a division by a norm.
"""

import re
import time
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from unittest.mock import patch

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import callbacks as stock
from lightning.pytorch.loggers import CSVLogger
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.distributed.worker import fit, whole
from tests.support import needs_fsdp2
from trainer import FSDP2Strategy
from trainer import callbacks as ours
from trainer.callbacks import NonFiniteGuard
from trainer.errors import LossScaleCollapse, NonFiniteError
from trainer.precision import HalfPrecision, MixedPrecision

pytestmark = needs_fsdp2
ENGINES = ("ddp", "fsdp")


class Overflow(nn.Module):
    """Multiplies by a parameter, and overflows in the pass that ``overflows_in`` names.

    Args:
        reduces: whether the forward and backward passes use a collective, as those of SyncBatchNorm.
    """

    def __init__(self, reduces):
        super().__init__()
        self.weight, self.reduces = nn.Parameter(torch.ones(16)), reduces
        self.overflows_in = ""

    def forward(self, x):
        x = x * self.weight
        if self.reduces:
            x = x + distributed.nn.functional.all_reduce(x.mean(0)) / 2
        if self.overflows_in == "forward":
            return (x.half() * 1e6).to(x.dtype)
        if self.overflows_in == "backward":  # the gradient of a root at 0 is inf times 0
            return x + (x - x.detach()).abs().sqrt()
        return x


class Block(nn.Module):
    """Two layers, a buffer that counts, and random numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.dropout(self.linear(x)))


class Net(LightningModule):
    """Blocks, and a parameter of the root with one element, so that one rank has no part of it.

    Args:
        bad: the pass with a value that is not finite, by rank and batch.
        none_at: ranks and batches without a loss.
        reduces: see :class:`Overflow`.
    """

    lr = 0.01

    def __init__(self, bad=(), none_at=(), reduces=False):
        super().__init__()
        torch.manual_seed(0)
        self.bad, self.none_at = dict(bad), set(none_at)
        self.net = nn.Sequential(nn.Linear(6, 16), Block(), Overflow(reduces), Block(), nn.Linear(16, 2))
        self.gain = nn.Parameter(torch.ones(1))

    def outputs(self, x):
        return self.net(x) * self.gain

    def training_step(self, batch, batch_idx):
        position = (self.global_rank, batch_idx)
        if position in self.none_at:
            return None
        self.net[2].overflows_in = self.bad.get(position, "")
        loss = nn.functional.mse_loss(self.outputs(batch[0]).float(), batch[1])
        self.log("loss", loss)
        return loss * float("nan") if self.bad.get(position) == "loss" else loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.outputs(batch[0]).float(), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def train(engine, folder, callbacks=(), module=None, net=None, **arguments):
    """Fit a module, by default ``Net(**net)``. Functions among the callbacks create callbacks."""
    made = [one() if isinstance(one, partial | FunctionType) else one for one in callbacks]
    usual = {"strategy": engine, "callbacks": made, "default_root_dir": folder, "max_epochs": 1}
    return fit(module or Net(**(net or {})), usual | arguments, errors=(NonFiniteError, LossScaleCollapse))


# --- values that are not finite --------------------------------------------------------------------------------


def train_with_reports(engine, folder, **arguments):
    report = ours.OverflowReport()
    found = train(engine, folder, [report], precision="16-mixed", **arguments)
    return found | {"reports": [one.markdown() for one in report.reports]}


class Poison(Callback):
    """Sets an element of the first weight to NaN. On a sharded engine the last rank holds it."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            gradients = trainer.engine.gradients
            weight = gradients.part(pl_module.net[0].weight.data)
            if not gradients.are_parts or trainer.global_rank == trainer.world_size - 1:
                weight[-1, -1] = float("nan")
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "never.ckpt")


class Underflow(Net):
    """The first feature is always 0, so that the gradient of its 16 weights is 0; small gradients underflow."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.gain.mul_(1e-3)

    def outputs(self, x):
        return super().outputs(x * torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0]))


def train_with_monitors(engine, folder):
    monitor, norms = ours.ScaleMonitor(every_n_steps=2), ours.LayerNorms(every_n_steps=2)
    precision = MixedPrecision("float16", init_scale=1.0)  # gradients are as large before they are unscaled
    found = train(engine, folder, [monitor, norms], Underflow(), precision=precision, max_epochs=2)
    return found | {"underflow": [tuple(one) for one in monitor.underflow], "layer_norms": norms.norms}


# --- changes of the step ---------------------------------------------------------------------------------------


class Dtypes(Callback):
    """Records the dtypes of layer outputs, and of the weights used for them."""

    def __init__(self):
        self.outputs, self.weights = {}, {}

    def on_train_start(self, trainer, pl_module):
        for name, part in pl_module.net.named_modules():
            if isinstance(part, nn.Linear):
                part.register_forward_pre_hook(partial(self._record_weight, name))
                part.register_forward_hook(partial(self._record_output, name))

    def _record_weight(self, name, module, args):
        self.weights[name] = str(module.weight.dtype)

    def _record_output(self, name, module, args, output):
        self.outputs[name] = str(output.dtype)


def train_in_float32(engine, folder, precision, policy=None):
    """Run modules in float32. Below a policy, DDP's autocast is the comparison."""
    dtypes = Dtypes()
    sharded = policy is not None and engine == "fsdp"
    strategy = FSDP2Strategy(mixed_precision=policy) if sharded else engine
    found = train(engine, folder, [dtypes], precision=precision, strategy=strategy)
    if policy is not None:
        return {"computed": dtypes.weights if sharded else dtypes.outputs, "global_step": found["global_step"]}
    return found | {"dtypes": dtypes.outputs, "computed": dtypes.weights}


def train_with_advice(engine, folder):
    advisor = ours.AlignmentAdvisor(everywhere=True)
    return train(engine, folder, [advisor]) | {"message": advisor._message_logged}


def train_to_an_anomaly(engine, folder):
    net = {"bad": dict.fromkeys([(0, 2), (1, 2)], "backward")}
    with pytest.raises(RuntimeError) as error:
        train(engine, folder, net=net, precision="16-mixed", detect_anomaly=True)
    return {"error": str(error.value).split(" returned nan")[0]}


def train_compiled(engine, folder):
    callback = ours.Compile(backend="aot_eager")
    found = train(engine, folder, [callback])
    torch.compiler.reset()
    # recomputing single layers saves too little
    assert callback.compiled == (["net"] if engine == "ddp" else ["net.1", "net.2", "net.3"])
    facts = callback.run_facts()["compile"]
    assert (facts["recompilations"], facts["graph_breaks"]) == (0, 0)
    assert facts["compilations"]
    return found


def train_measured(engine, folder):
    throughput, summary = ours.Throughput(warmup_batches=1), ours.RunSummary()
    found = train(engine, folder, [throughput, summary], gradient_clip_val=0.3)
    facts = {name: summary.summary.get(name) for name in ("status", "steps", "samples", "samples_per_step", "devices")}
    return found | {"measured": throughput.measured_batches, "rates": len(throughput.rates), "summary": facts}


# --- averages --------------------------------------------------------------------------------------------------


class Values(Callback):
    """Records the weights of a validation, and whether each rank holds only a part of the average."""

    def __init__(self):
        self.gains = []
        self.held = {}

    def on_validation_batch_end(self, trainer, pl_module, *args, **kwargs):
        self.gains.append(round(float(whole(pl_module)["gain"]), 6))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for callback in trainer.callbacks:
            average = getattr(callback, "_average_model", None)
            if average is not None:
                part = trainer.engine.gradients.part
                self.held = {name: part(p).numel() for name, p in average.named_parameters() if "net.1" in name}


VALIDATES = {"limit_val_batches": 2, "num_sanity_val_steps": 1}


def train_averaged(engine, folder, make, **arguments):
    values = Values()
    found = train(engine, folder, [make, values], **VALIDATES, **{"max_epochs": 2, **arguments})
    return found | {"gains": values.gains, "held": values.held}


# --- Lightning's -----------------------------------------------------------------------------------------------


def train_with_stock_callbacks(engine, folder):
    """Run callbacks that only observe, or end a fit, all in one fit."""
    saver = stock.ModelCheckpoint(folder / "stock", monitor="val_loss", save_last=True)
    callbacks = [
        stock.EarlyStopping("val_loss", min_delta=10.0, patience=2),
        stock.LearningRateMonitor(),
        saver,
        stock.OnExceptionCheckpoint(folder / "stock"),
        stock.ModelSummary(),
        stock.TQDMProgressBar(),
        stock.Timer("00:00:10:00"),
        stock.GradientAccumulationScheduler({0: 1, 1: 2}),
        stock.DeviceStatsMonitor(cpu_stats=False),
        stock.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0])),
    ]
    found = train(
        engine, folder, callbacks, limit_val_batches=2, max_epochs=5, log_every_n_steps=2,
        enable_checkpointing=True, enable_progress_bar=True, enable_model_summary=True,
        logger=CSVLogger(folder, name="stock"),
    )  # fmt: skip
    best = torch.load(saver.best_model_path, weights_only=True)["state_dict"]
    found["metrics"] = {k: v for k, v in found["metrics"].items() if "device" not in k and "/" not in k}
    return found | {"saved": best}


def find_the_learning_rate(engine, folder):
    """The rank that removes the finder's file is ahead of the other, which must read it."""
    load = TorchCheckpointIO.load_checkpoint

    def load_later(*args, **kwargs):
        time.sleep(0.3 * distributed.get_rank())
        return load(*args, **kwargs)

    module, finder = Net(), stock.LearningRateFinder(num_training_steps=20, early_stop_threshold=None)
    with patch.object(TorchCheckpointIO, "load_checkpoint", load_later):
        found = train(engine, folder, [finder], module, max_epochs=-1, max_steps=5)
    return found | {"lr": module.lr}


class Backbone(Net):
    """Has a frozen part, and no random numbers."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        for index in (1, 3):
            self.net[index].dropout = nn.Identity()

    def outputs(self, x):
        return super().outputs(self.backbone(x))


WINDOW = {"accumulate_grad_batches": 2}
FAILING = dict.fromkeys([(1, 1), (1, 3), (1, 4)], "forward")  # in windows of 2, 2 and 1: one batch of each
IN_A_ROW = dict.fromkeys([(1, 0), (1, 1), (1, 2), (1, 3)], "backward")
WITHOUT_RANK_0 = {"bad": FAILING, "none_at": {(0, 4), (0, 1)}}
FP32 = ["net.1.linear", "net.4"]
EMA = partial(stock.EMAWeightAveraging, decay=0.8)
SWA = partial(stock.StochasticWeightAveraging, swa_lrs=0.01, swa_epoch_start=1)

SCENARIOS = {
    "guard skips a gradient": partial(train, callbacks=[NonFiniteGuard("skip")], net={"bad": {(0, 2): "backward"}}),
    "guard stops at a loss": partial(train, callbacks=[NonFiniteGuard("stop")], net={"bad": {(1, 2): "loss"}}),
    "guard, no loss on the other rank": partial(
        train, callbacks=[NonFiniteGuard("stop")],
        net={"bad": {(1, 3): "backward"}, "none_at": {(0, 2), (0, 3)}}, **WINDOW,
    ),
    "weights not finite": partial(train, callbacks=[Poison()]),
    "monitors": train_with_monitors,
    "report": partial(train_with_reports, net={"bad": FAILING, "reduces": True}, **WINDOW),
    "report of the backward pass": partial(  # no loss right after the replay
        train_with_reports, net={"bad": IN_A_ROW, "none_at": {(0, 3)}}
    ),
    "report, None on rank 0": partial(train_with_reports, net=WITHOUT_RANK_0, **WINDOW),
    "report, None on rank 0 so far": partial(
        train_with_reports, net={"bad": {(1, 0): "forward"}, "none_at": {(0, 0)}}
    ),
    "collapse": partial(
        train, callbacks=[ours.OverflowReport(after=None, collapse_after=4), stock.ModelCheckpoint()],
        net={"bad": {(1, i): "forward" for i in range(5)}}, precision="16-mixed", enable_checkpointing=True,
    ),
    "fp32_modules": partial(
        train_in_float32, precision=MixedPrecision("float16", init_scale=1024.0, fp32_modules=["net.1", "net.4"])
    ),
    "fp32_modules of 16-bit weights": partial(
        train_in_float32, precision=HalfPrecision("bfloat16", fp32_modules=FP32)
    ),
    "fp32_modules below a policy": partial(
        train_in_float32, precision=MixedPrecision("bfloat16", fp32_modules=FP32),
        policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    ),
    "alignment": train_with_advice,
    "anomaly": train_to_an_anomaly,
    "checkpointed blocks": partial(train, callbacks=[ours.ActivationCheckpointing("Block")]),
    "compiled": train_compiled,
    "measured": train_measured,
    "EMA, skipped": partial(train_averaged, make=EMA, net={"bad": {(1, 2): "backward"}}, precision="16-mixed"),
    "SWA": partial(train_averaged, make=SWA, max_epochs=3),
    "stock": train_with_stock_callbacks,
    "learning rate": find_the_learning_rate,
}  # fmt: skip
ROUNDED = ("measured", "stock")
"""Scenarios with a division by a norm, or by the sizes of windows."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("callbacks")


@pytest.fixture(scope="module")
def results(ranks, folder):
    """Return the results of each rank for a scenario and an engine, which is run once."""
    return cache(lambda name, engine="fsdp": ranks.call(SCENARIOS[name], engine, folder / name / engine))


@pytest.mark.parametrize("name", SCENARIOS)
def test_fsdp_equals_ddp(results, folder, name):
    for fsdp, ddp in zip(results(name, "fsdp"), results(name, "ddp"), strict=True):
        assert fsdp.keys() == ddp.keys()
        for key, expected in ddp.items():
            found = fsdp[key]
            if key in ("weights", "buffers", "saved"):
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 if name in ROUNDED else 0, equal_nan=True)
            elif key in ("metrics", "layer_norms", "norms"):
                assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)
            elif key == "random":
                assert torch.equal(found, expected)
            elif key not in ("held", "reduced"):
                assert comparable(found, folder / name) == comparable(expected, folder / name)


_FROM_FLOAT32 = r"\| (loss|loss scale|incoming gradient|gradients not finite) \| [^|]* \|"


def comparable(found, folder):
    """Return a text without paths, and without the parts of a report from a replay in float32, which FSDP lacks."""
    text = str(found).replace(str(folder / "fsdp"), str(folder / "ddp"))
    return re.sub(_FROM_FLOAT32, "", text.replace("Not finite in float32 either", "Not finite"))


def test_guard_names_rank_and_layer_on_all_ranks(results):
    for name, *parts in (
        ("guard stops at a loss", "(step 2, batch 2 of rank 1)", "mul in the forward pass, Net.training_step"),
        ("guard, no loss on the other rank", "(step 1, batch 3 of rank 1)", "sqrt in the backward pass, 'net.2' "),
    ):
        for rank in results(name, "fsdp"):
            assert all(part in rank["error"] for part in parts), rank["error"]


def test_weights_with_a_nan_on_one_rank_are_not_saved(results, folder):
    for rank in results("weights not finite", "fsdp"):
        assert "not saved: net.0.weight." in rank["error"]
    assert not list(folder.rglob("never.ckpt"))


@pytest.mark.parametrize("engine", ENGINES)
def test_first_step_without_a_loss_on_one_rank_is_explained_on_both(results, engine):
    (first,), (second,) = (rank["reports"] for rank in results("report, None on rank 0 so far", engine))
    assert first == second
    assert "mul in 'net.2' (Overflow)" in first


def test_reports_name_the_layer(results):
    for name in ("report", "report, None on rank 0"):
        for rank in results(name, "fsdp"):
            (report,) = rank["reports"]
            assert "# Verdict: forward pass overflows in 16 bits" in report
            assert "mul in 'net.2' (Overflow)" in report
            assert "rank 1 |" in report
    for rank in results("report of the backward pass", "fsdp"):
        assert "'net.2' (Overflow)" in rank["reports"][0]
        assert "net.2.weight" in rank["reports"][0]


def test_collapse_stops_all_ranks(results, folder):
    for rank in results("collapse", "fsdp"):
        assert rank["error"].startswith("4 optimizer steps in a row were skipped")
    saved = torch.load(folder / "collapse" / "fsdp" / "checkpoints" / "before_collapse.ckpt", weights_only=True)
    assert saved["state_dict"]["net.0.weight"].shape == (16, 6)


@pytest.mark.parametrize("name", ["checkpointed blocks", "compiled"])
def test_recomputed_and_compiled_blocks_learn_the_same(results, name):
    for found, expected in zip(results(name, "fsdp"), results("alignment", "fsdp"), strict=True):
        for key in ("weights", "buffers"):
            torch.testing.assert_close(found[key], expected[key], rtol=0, atol=1e-6 if name == "compiled" else 0)


@pytest.mark.parametrize("name", ["EMA, skipped", "SWA"])
def test_averages_are_parts_and_used_in_validations(results, name):
    prefix = "" if name == "SWA" else "module."
    for rank in results(name, "fsdp"):
        assert rank["held"] == {f"{prefix}net.1.linear.weight": 128, f"{prefix}net.1.linear.bias": 8}
        # the parameter of the root in the sanity check and in both batches of each validation
        gains = rank["gains"]
        assert gains[0] == 1.0
        assert gains[1] == gains[2] != gains[3] == gains[4]
        assert len(gains) == (7 if name == "SWA" else 5)


def test_parameters_unfrozen_later_equal_those_of_one_process(ranks):
    """DDP does not average gradients of parameters that were frozen when it was created."""
    callback = stock.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)
    arguments = {"max_epochs": 3, "callbacks": [callback]}
    expected = fit(Backbone(), arguments, 1)["weights"]
    for rank in ranks.call(fit, Backbone(), arguments | {"strategy": "fsdp"}):
        torch.testing.assert_close(rank["weights"], expected, rtol=0, atol=1e-6)
