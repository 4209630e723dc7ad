"""Fits of ``test_sharded_callbacks.py`` with callbacks, by DDP and by FSDP2.

``torchrun ... sharded_callbacks_worker.py FOLDER`` saves the results of each rank to ``FOLDER/rank_R.pt``.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from tests.distributed.sharded import whole
from tests.distributed.worker import BATCH, WORLD_SIZE, Shard, precision_of, samples
from trainer import FSDP2Strategy, Trainer
from trainer.callbacks import (
    ActivationCheckpointing,
    AlignmentAdvisor,
    Compile,
    LayerNorms,
    NonFiniteGuard,
    OverflowReport,
    RunSummary,
    ScaleMonitor,
    Throughput,
)
from trainer.errors import LossScaleCollapse, NonFiniteError
from trainer.precision import HalfPrecision, MixedPrecision

KINDS = ("ddp", "fsdp")


class Overflow(nn.Module):
    """Multiplies by a parameter, and overflows in the forward or backward pass at configured batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.now = ""

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        if self.now == "forward":
            return x.half() * 1e6
        if self.now == "backward":  # the gradient of a root at 0 is inf times 0
            return x + (x - x.detach()).abs().sqrt()
        return x


class Block(nn.Module):
    """Two layers, a buffer that counts, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.dropout(self.linear(x)))


class Net(LightningModule):
    """Blocks, and a parameter of the root with one element, so that one rank has no part of it.

    At ``bad`` = {(rank, batch_idx): place}, a value is not finite. At ``none_at`` there is no loss.
    """

    def __init__(self, bad: Any = (), none_at: Any = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bad, self.none_at = dict(bad), set(none_at)
        self.net = nn.Sequential(nn.Linear(6, 16), Block(), Overflow(), Block(), nn.Linear(16, 2))
        self.gain = nn.Parameter(torch.ones(1))

    def outputs(self, x: Tensor) -> Tensor:
        return self.net(x) * self.gain

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        where = (self.global_rank, batch_idx)
        if where in self.none_at:
            return None
        self.net[2].now = self.bad.get(where, "")
        loss = nn.functional.mse_loss(self.outputs(batch[0]).float(), batch[1])
        self.log("loss", loss)
        return loss * float("nan") if self.bad.get(where) == "loss" else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.outputs(batch[0]).float(), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.outputs(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Seen(Callback):
    """Outcomes, and at the end the whole weights, the buffers and the next random numbers."""

    def __init__(self) -> None:
        self.outcomes: list[bool] = []
        self.state: dict[str, Any] = {}

    def on_after_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any, outcome: Any) -> None:
        self.outcomes.append(outcome.skipped)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.state = {
            "weights": whole(pl_module), "random": torch.get_rng_state(),
            "buffers": {name: value.clone() for name, value in pl_module.named_buffers()},
        }  # fmt: skip


def loader() -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=BATCH // WORLD_SIZE, sampler=Shard(WORLD_SIZE))


def trainer_of(kind: str, callbacks: Any = (), **arguments: Any) -> Trainer:
    if isinstance(arguments.get("precision"), str):
        arguments["precision"] = precision_of(arguments["precision"])
    off = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "limit_val_batches": 0, "max_epochs": 2, "limit_train_batches": 5,
    }  # fmt: skip
    return Trainer(
        accelerator="cpu", devices=WORLD_SIZE, use_distributed_sampler=False, callbacks=callbacks,
        **{"strategy": kind, **off, **arguments},
    )  # fmt: skip


def fit(kind: str, module: LightningModule, *callbacks: Callback, **arguments: Any) -> dict[str, Any]:
    seen, ckpt_path = Seen(), arguments.pop("ckpt_path", None)
    torch.manual_seed(1)
    trainer = trainer_of(kind, [seen, *callbacks], **arguments)
    error = ""
    try:
        trainer.fit(module, loader(), loader() if arguments.get("limit_val_batches") else None, ckpt_path=ckpt_path)
    except (NonFiniteError, LossScaleCollapse) as problem:
        error = str(problem)
    return seen.state | {
        "outcomes": seen.outcomes, "error": error, "skipped_steps": trainer.skipped_steps,
        "global_step": trainer.global_step, "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
    }  # fmt: skip


# --- values that are not finite --------------------------------------------------------------------------------


def reported(kind: str, module: Net, **options: Any) -> dict[str, Any]:
    arguments = {name: options.pop(name) for name in ("accumulate_grad_batches", "precision") if name in options}
    report = OverflowReport(**options)
    found = fit(kind, module, report, **{"precision": "16-mixed", **arguments})
    return found | {"reports": [one.markdown() for one in report.reports]}


class Poison(Callback):
    """Sets an element of the first weight to NaN. On a sharded engine the last rank holds it."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and not trainer.current_epoch:
            gradients = trainer.engine.gradients
            weight = gradients.part(pl_module.net[0].weight.data)
            if not gradients.are_parts or trainer.global_rank == trainer.world_size - 1:
                weight[-1, -1] = float("nan")
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "never.ckpt")


class Unlit(Net):
    """The first feature is always 0, so that the gradient of its 16 weights is 0; small gradients underflow."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.gain.mul_(1e-3)

    def outputs(self, x: Tensor) -> Tensor:
        return super().outputs(x * torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0]))


class Counted(Callback):
    """Counts the elements, zeros and float16 subnormals of the whole gradients of the last step, and their norms."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.found: dict[str, tuple[int, int, int]] = {}
        self.norms: dict[str, float] = {}
        for name, parameter in pl_module.named_parameters():
            size = getattr(parameter.grad, "full_tensor", lambda p=parameter: p.grad)().abs()
            self.norms[name] = float(size.norm())
            zeros = int((size == 0).sum())
            self.found[name] = size.numel(), zeros, int((size < 2.0**-14).sum()) - zeros


def monitored(kind: str) -> dict[str, Any]:
    monitor, norms, counted = ScaleMonitor(every_n_steps=2), LayerNorms(every_n_steps=2), Counted()
    precision = MixedPrecision("float16", init_scale=1.0)  # gradients are as large before they are unscaled
    found = fit(kind, Unlit(), monitor, norms, counted, precision=precision)
    found |= {"underflow": [tuple(one) for one in monitor.underflow], "counted": counted.found}
    return found | {"layer_norms": norms.norms, "whole_norms": counted.norms}


def diagnosis(folder: Path) -> dict[str, Callable[[str], dict[str, Any]]]:
    off = {"after": None, "collapse_after": None, "at_floor": None}
    failing = dict.fromkeys([(1, 1), (1, 3), (1, 4)], "forward")  # in windows of 2, 2 and 1: one batch of each
    window = {"accumulate_grad_batches": 2}
    in_a_row = dict.fromkeys([(1, 0), (1, 1), (1, 2), (1, 3)], "backward")
    return {
        "guard skips a loss": lambda kind: fit(kind, Net({(1, 2): "loss"}), NonFiniteGuard("skip")),
        "guard skips a gradient": lambda kind: fit(kind, Net({(0, 2): "backward"}), NonFiniteGuard("skip")),
        "guard stops at a loss": lambda kind: fit(kind, Net({(1, 2): "loss"}), NonFiniteGuard("stop")),
        "guard stops at a gradient": lambda kind: fit(kind, Net({(1, 2): "backward"}), NonFiniteGuard("stop")),
        "guard, no loss on the other rank": lambda kind: fit(
            kind, Net({(1, 3): "backward"}, none_at={(0, 2), (0, 3)}), NonFiniteGuard("stop"), **window
        ),
        "weights that are not finite": lambda kind: fit(kind, Net(), Poison(), default_root_dir=folder),
        "monitor": monitored,
        "report": lambda kind: reported(kind, Net(failing), dirpath=folder / kind, **window),
        "report of the backward": lambda kind: reported(
            kind, Net(in_a_row, none_at={(0, 3)}), dirpath=folder / kind  # no loss right after the replay
        ),
        "report, none on rank 0": lambda kind: reported(
            kind, Net(failing, none_at={(0, 4), (0, 1)}), dirpath=folder / kind, **window
        ),
        "no report, none on rank 0": lambda kind: reported(
            kind, Net(failing, none_at={(0, 4), (0, 1)}), **off, **window
        ),
        "report on demand": lambda kind: reported(kind, Net(), at_step=2, dirpath=folder / kind),
        "no report": lambda kind: reported(kind, Net(), **off),
        "collapse": lambda kind: fit(
            kind, Net({(1, i): "forward" for i in range(5)}), OverflowReport(collapse_after=4, dirpath=folder / kind),
            ModelCheckpoint(folder / kind / "checkpoints"), precision="16-mixed", enable_checkpointing=True,
        ),
    }  # fmt: skip


# --- changes of the step --------------------------------------------------------------------------------------------


class Dtypes(Callback):
    """Records the dtypes of layer outputs, and of the weights used for them."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}
        self.weights: dict[str, str] = {}
        self._handles: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for name, part in pl_module.net.named_modules():
            if isinstance(part, nn.Linear):
                self._handles.append(part.register_forward_hook(partial(self._see, name)))
                self._handles.append(part.register_forward_pre_hook(partial(self._see_weight, name)))

    def _see(self, name: str, module: Any, args: Any, output: Any) -> None:
        self.seen[name] = str(output.dtype)

    def _see_weight(self, name: str, module: Any, args: Any) -> None:
        self.weights[name] = str(module.weight.dtype)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for handle in self._handles:
            handle.remove()


def in_float32(kind: str, precision: Any = None, **arguments: Any) -> dict[str, Any]:
    dtypes = Dtypes()
    plugin = precision or MixedPrecision("float16", init_scale=1024.0, fp32_modules=["net.1", "net.4"])
    return fit(kind, Net(), dtypes, precision=plugin, **arguments) | {"dtypes": dtypes.seen, "computed": dtypes.weights}


def in_float32_below_a_policy(kind: str) -> dict[str, Any]:
    """Run modules in float32 below a 16-bit mixed-precision policy, and with DDP's autocast for comparison."""
    plugin = MixedPrecision("bfloat16", fp32_modules=["net.1.linear", "net.4"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = in_float32(kind, plugin, strategy=kind if kind == "ddp" else FSDP2Strategy(mixed_precision=policy))
    return {"computed": found["dtypes" if kind == "ddp" else "computed"], "global_step": found["global_step"]}


def advised(kind: str) -> dict[str, Any]:
    advisor = AlignmentAdvisor(everywhere=True)
    found = fit(kind, Net(), advisor, max_epochs=1)
    return found | {"said": advisor._message_logged}


def anomaly(kind: str) -> dict[str, Any]:
    try:
        fit(kind, Net({(rank, 2): "backward" for rank in range(2)}), precision="16-mixed", detect_anomaly=True)
    except RuntimeError as error:
        return {"error": str(error).split(" returned nan")[0]}
    return {}


def compiled(kind: str, modules: list[str] | None = None) -> dict[str, Any]:
    callback = Compile(modules, backend="aot_eager")
    found = fit(kind, Net(), callback, max_epochs=1)
    torch.compiler.reset()
    whole_or_sharded = (
        ["net"] if kind == "ddp" else ["net.1", "net.2", "net.3"]
    )  # recomputing single layers saves too little
    assert callback.compiled == (["net.1", "net.3"] if modules else whole_or_sharded)
    facts = callback.run_facts()["compile"]
    assert (facts["recompilations"], facts["graph_breaks"]) == (0, 0)
    assert facts["compilations"]
    return found


def measured(kind: str) -> dict[str, Any]:
    throughput, summary = Throughput(warmup_batches=1), RunSummary()
    found = fit(kind, Net(), throughput, summary, max_epochs=1, gradient_clip_val=0.3)
    told = {name: summary.summary.get(name) for name in ("status", "steps", "samples", "samples_per_step", "devices")}
    return found | {"measured": throughput.measured_batches, "rates": len(throughput.rates), "told": told}


# --- averages -------------------------------------------------------------------------------------------------------


class Plain(WeightAveraging):
    """An average of every step with foreach."""


class Values(Callback):
    """Records the weights of a validation, and whether each rank holds only a part of the average."""

    def __init__(self) -> None:
        self.gains: list[float] = []
        self.held: dict[str, int] = {}

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        self.gains.append(round(float(whole(pl_module)["gain"]), 6))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for callback in trainer.callbacks:
            average = getattr(callback, "_average_model", None)
            if average is not None:
                part = trainer.engine.gradients.part
                self.held = {name: part(p).numel() for name, p in average.named_parameters() if "net.1" in name}


def averaged(kind: str, make: Callable[[], Callback], **arguments: Any) -> dict[str, Any]:
    values = Values()
    bad = arguments.pop("bad", {})
    found = fit(kind, Net(bad), make(), values, limit_val_batches=2, num_sanity_val_steps=1, **arguments)
    return found | {"gains": values.gains, "held": values.held}


class AtEnd(Callback):
    """Records the whole weights after the average was copied, if it runs after the averaging callback."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = whole(pl_module)


def not_begun(kind: str, folder: Path) -> dict[str, Any]:
    """An average that starts after the last step."""
    path, values, end = folder / kind / "not_begun", Values(), AtEnd()
    found = fit(
        kind, Net(), EMAWeightAveraging(update_starting_at_step=100), values, end,
        ModelCheckpoint(path, filename="{epoch}", save_top_k=-1), enable_checkpointing=True, limit_val_batches=1,
    )  # fmt: skip
    saved = torch.load(path / "epoch=1.ckpt", weights_only=True)
    trained = found["weights"]  # before the average was copied
    return found | {
        "saved": saved["state_dict"], "gains": values.gains, "gain": round(float(trained["gain"]), 6),
        "at end": all(torch.equal(one, end.weights[name]) for name, one in trained.items()),
        "in file": all(torch.equal(saved["state_dict"][name], one) for name, one in trained.items()),
    }  # fmt: skip


def resumed(kind: str, make: Callable[[], Callback], folder: Path) -> dict[str, Any]:
    """Resume from a checkpoint after the first epoch, and compare with the uninterrupted run."""
    path = folder / kind / f"{make().__class__.__name__}"
    files = lambda: ModelCheckpoint(path, filename="{epoch}", save_top_k=-1)  # noqa: E731
    first = fit(kind, Net(), make(), files(), enable_checkpointing=True, limit_val_batches=1, max_epochs=3)
    again = fit(
        kind, Net(), make(), files(), enable_checkpointing=True, limit_val_batches=1, max_epochs=3,
        ckpt_path=path / "epoch=0.ckpt",
    )  # fmt: skip
    saved = torch.load(path / "epoch=1.ckpt", weights_only=True)
    same = all(torch.equal(one, again["weights"][name]) for name, one in first["weights"].items())
    return first | {"resumed is the same": same, "saved": saved["state_dict"], "keys": sorted(saved)}


# --- Lightning's ------------------------------------------------------------------------------------------------


def stock(kind: str, folder: Path) -> dict[str, Any]:
    """Run callbacks that only observe, or end a fit, all in one fit."""
    callbacks = [
        EarlyStopping("val_loss", min_delta=10.0, patience=2),
        LearningRateMonitor(),
        ModelCheckpoint(folder / kind / "stock", monitor="val_loss", save_last=True),
        OnExceptionCheckpoint(folder / kind / "stock"),
        ModelSummary(),
        TQDMProgressBar(),
        Timer("00:00:10:00"),
        GradientAccumulationScheduler({0: 1, 1: 2}),
        DeviceStatsMonitor(cpu_stats=False),
        ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0])),
        LambdaCallback(on_train_end=lambda trainer, module: module.log_at_end.append(trainer.global_step)),
    ]
    module = Net()
    module.log_at_end = []
    found = fit(
        kind, module, *callbacks, limit_val_batches=2, max_epochs=5, log_every_n_steps=2, enable_checkpointing=True,
        enable_progress_bar=True, enable_model_summary=True, logger=CSVLogger(folder / kind, name="stock"),
    )  # fmt: skip
    best = torch.load(callbacks[2].best_model_path, weights_only=True)["state_dict"]
    found["metrics"] = {k: v for k, v in found["metrics"].items() if "device" not in k and "/" not in k}
    return found | {"at end": module.log_at_end, "saved": best}


class Tuned(Net):
    """Has a learning rate to find."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def tuned(kind: str) -> dict[str, Any]:
    """Tune the learning rate if the rank that removes the finder's file is ahead of the other, which must read it."""
    load = TorchCheckpointIO.load_checkpoint

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3 * distributed.get_rank())
        return load(*args, **kwargs)

    module, finder = Tuned(), LearningRateFinder(num_training_steps=20, early_stop_threshold=None)
    with patch.object(TorchCheckpointIO, "load_checkpoint", late):
        found = fit(kind, module, finder, max_epochs=-1, max_steps=5)
    return found | {"found": module.lr}


class Backbone(Net):
    """Has a frozen part, and no random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        for index in (1, 3):
            self.net[index].dropout = nn.Identity()

    def outputs(self, x: Tensor) -> Tensor:
        return self.net(self.backbone(x)) * self.gain

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def finetuning() -> BackboneFinetuning:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)


def finetuned(kind: str) -> dict[str, Any]:
    """Fine-tune by FSDP only: DDP does not average gradients of parameters that were frozen when it was created."""
    return fit("fsdp", Backbone(), finetuning(), max_epochs=3) | {"outcomes": []}


def others(folder: Path) -> dict[str, Callable[[str], dict[str, Any]]]:
    ema = partial(EMAWeightAveraging, decay=0.8)
    swa = partial(StochasticWeightAveraging, swa_lrs=0.01, swa_epoch_start=1)
    multi = partial(Plain, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    return {
        "fp32_modules": in_float32,
        "fp32_modules of 16-bit weights": lambda kind: in_float32(
            kind, HalfPrecision("bfloat16", fp32_modules=["net.1.linear", "net.4"])
        ),
        "fp32_modules below a policy": in_float32_below_a_policy,
        "alignment": advised,
        "anomaly": anomaly,
        "checkpointed blocks": lambda kind: fit(kind, Net(), ActivationCheckpointing("Block")),
        "checkpointed by class": lambda kind: fit(kind, Net(), ActivationCheckpointing(Block)),
        "checkpointed around blocks": lambda kind: fit(kind, Net(), ActivationCheckpointing("net")),
        "checkpointed inside": lambda kind: fit(kind, Net(), ActivationCheckpointing("*.linear")),
        "nothing": lambda kind: fit(kind, Net()),
        "compiled": compiled,
        "compiled blocks": lambda kind: compiled(kind, ["Block"]),
        "measured": measured,
        "EMA": lambda kind: averaged(kind, ema),
        "EMA, skipped": lambda kind: averaged(kind, ema, bad={(1, 2): "backward"}, precision="16-mixed"),
        "averages": lambda kind: averaged(kind, Plain),
        "averages by foreach": lambda kind: averaged(kind, multi),
        "averages, buffers as they are": lambda kind: averaged(kind, partial(multi, use_buffers=False)),
        "SWA": lambda kind: averaged(kind, swa, max_epochs=3),
        "EMA, not begun": lambda kind: not_begun(kind, folder),
        "EMA resumed": lambda kind: resumed(kind, ema, folder),
        "stock": lambda kind: stock(kind, folder),
        "learning rate found": tuned,
        "finetuned": finetuned,
        "SWA resumed": lambda kind: resumed(kind, swa, folder),
    }


def scenarios(folder: Path) -> dict[str, Callable[[str], dict[str, Any]]]:
    """Return all scenarios of an engine by name."""
    return diagnosis(folder) | others(folder)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", ".*smaller than the logging interval")
    only = sys.argv[3:]  # names of scenarios, after the launcher
    found: dict[str, Any] = {}
    for name, run in scenarios(folder).items():
        if not only or any(one in name for one in only):
            print(name, flush=True)
            found[name] = {kind: run(kind) for kind in KINDS}
    torch.save(found, folder / f"rank_{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
