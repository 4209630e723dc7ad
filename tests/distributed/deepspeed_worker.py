"""Small fits of ``test_deepspeed.py`` by DeepSpeed, and the same by DDP."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.distributed.setups import Fitted, Saves, Setup, batches_of, only_these_warnings
from trainer import CheckpointFiles, DeepSpeedStrategy, Trainer
from trainer.errors import TrainerError

SCALING = {"initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 1}


class Watch(Callback):
    """Records each optimizer step."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[bool, float, float, float]] = []
        self.norms: list[float | None] = []

    def on_after_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any, outcome: Any) -> None:
        rate = optimizer.param_groups[0]["lr"]
        self.outcomes.append((outcome.skipped, outcome.scale, outcome.next_scale, rate))
        self.norms.append(None if outcome.grad_norm is None else outcome.grad_norm.item())


def make(strategy: Any, callbacks: Any = (), **arguments: Any) -> Trainer:
    """Return a Trainer for all ranks. A mapping contains the arguments of a ``DeepSpeedStrategy``."""
    precision = arguments.get("precision")
    if precision == "16-mixed":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        CPU_Accelerator.is_fp16_supported = lambda self: True  # on a slow machine any of them may
    if isinstance(strategy, Mapping):
        strategy = DeepSpeedStrategy(
            **strategy, **SCALING if precision == "16-mixed" and "loss_scale" not in strategy else {}
        )
    quiet: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "num_sanity_val_steps": 0, "use_distributed_sampler": False, "max_epochs": 2,
    }  # fmt: skip
    return Trainer(
        accelerator="cpu", devices=torch.distributed.get_world_size(), strategy=strategy, callbacks=[*callbacks],
        **quiet | arguments,
    )  # fmt: skip


def loader(count: int, seed: int = 1) -> DataLoader[Any]:
    """Return the batches of this rank."""
    rank = torch.distributed.get_rank()
    return DataLoader(batches_of(range(rank, rank + 1), count, seed), batch_size=None)


def fit(setup: Setup, strategy: Any, arguments: Mapping[str, Any], ckpt_path: str | None = None) -> dict[str, Any]:
    """Fit, test and predict. Returns the results."""
    with only_these_warnings(), warnings.catch_warnings(record=True) as warned:
        warnings.filterwarnings("always", "The checkpoint was written inside of an accumulation window")
        warnings.filterwarnings("ignore", "You're using the WeightAveraging callback with a model that overrides")
        torch.manual_seed(3)
        arguments, watch = dict(arguments), Watch()
        given = [one() if isinstance(one, partial) else one for one in arguments.pop("callbacks", ())]
        trainer = make(strategy, [watch, *given], **arguments)
        module = Fitted(setup)
        module.test_step = module.predict_step = lambda batch, batch_idx: module.validation_step(batch, batch_idx)
        identity = {name: (id(p), p.dtype, p.device.type) for name, p in module.named_parameters()}
        attributes = {name: set(vars(part)) for name, part in module.named_modules()}
        trainer.fit(module, loader(setup.batches), loader(2, seed=2), ckpt_path=ckpt_path)
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        whole = copy.deepcopy(module.net)
        (tested,) = trainer.validate(module, loader(2, seed=2), verbose=False)
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "warned": [str(one.message) for one in warned or ()],
        "outcomes": watch.outcomes, "norms": watch.norms, "counts": (trainer.global_step, trainer.skipped_steps),
        "val_loss": metrics["val_loss"], "metrics": metrics, "tested": tested["val_loss"],
        "scale": trainer.scaler.get_scale(),
        "is_itself": identity == {name: (id(p), p.dtype, p.device.type) for name, p in module.named_parameters()},
        "left": sorted(
            name for path, part in module.named_modules()
            for name in (set(vars(part)) - attributes[path] - {"forward", "_hparams"})
            | {name for name, hooks in vars(part).items() if "_hooks" in name and hooks}
        ),
        "is_plain": all(type(vars(part)["_parameters"]) is dict for part in whole.modules()),
    }  # fmt: skip


class Thaws(Callback):
    """Unfreezes parameters in the second epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.requires_grad_(trainer.current_epoch > 0)


def refusals(folder: str) -> list[str]:
    """Return the errors of unsupported runs, each followed by a supported one."""
    said = []
    for strategy, setup, arguments in (
        ({"stage": 2}, Setup(manual=True), {}),
        ({"stage": 2}, Setup(optimizers=2), {}),
        ({"stage": 2}, Setup(none=frozenset({(0, 0, 1), (1, 0, 1)})), {}),
        ({"stage": 3}, Setup(weighted="number"), {"accumulate_grad_batches": 2}),
        ({"stage": 2, "config": {"train_micro_batch_size_per_gpu": 3}}, Setup(), {}),
        ({"stage": 2}, Setup(frozen=True), {"callbacks": [Thaws()]}),
        ({"stage": 1}, Setup(fewer=(0, 2)), {}),
    ):
        with only_these_warnings():
            trainer, module, rank = make(strategy, **arguments), Fitted(setup), torch.distributed.get_rank()
            size = 2 if "config" in strategy else None
            batches = batches_of(range(rank, rank + 1), setup.batches_of(rank))
            train = DataLoader(batches, batch_size=size, collate_fn=(lambda given: given[0]) if size else None)
            said.append(error_of(lambda: trainer.fit(module, train)))  # noqa: B023
    with only_these_warnings():
        trainer, module = make({"stage": 2}, max_epochs=1), Fitted(Setup())
        trainer.fit(module, loader(2))
        trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
        said.append(error_of(lambda: trainer.save_checkpoint(f"{folder}/whole.ckpt")))
    return said


def error_of(run: Callable[[], Any]) -> str:
    """Return the message of the error."""
    try:
        run()
    except TrainerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def cannot_resume(setup: Setup, strategy: Any, arguments: Mapping[str, Any], ckpt_path: str) -> str:
    """Return the reason that a fit cannot resume from a checkpoint."""
    return error_of(lambda: fit(setup, strategy, arguments, ckpt_path))


def save(setup: Setup, strategy: Any, form: str, folder: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Fit, and write ``folder/batch_2.ckpt`` as a ``"file"`` or a ``"folder"``."""
    more = {"plugins": [CheckpointFiles(sharded=form == "folder")], "enable_checkpointing": True}
    return fit(setup, strategy, {**arguments, **more, "callbacks": [Saves(folder, batches=[2])]})


def evaluate(strategy: Any) -> float | str:
    """Return the mean loss over three batches of one rank and one batch of the other, or the error."""
    count = 1 + 2 * (torch.distributed.get_rank() == 0)
    with only_these_warnings():
        trainer, seen = make(strategy), []
        said = error_of(lambda: seen.extend(trainer.validate(Fitted(Setup()), loader(count, seed=2), verbose=False)))
    return seen[0]["val_loss"] if seen else said


def end_by_signal(folder: str) -> int:
    """End a fit by a signal in the second batch of one rank. Returns its steps."""

    class Kill(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1 and trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)  # the other rank receives the flag meanwhile

    with only_these_warnings():
        trainer = make({"stage": 2}, [Kill(), ModelCheckpoint(folder, every_n_epochs=5)], enable_checkpointing=True)
        try:
            trainer.fit(Fitted(Setup()), loader(5), loader(2, seed=2))
        except BaseException as error:
            print(repr(error), flush=True)
    return trainer.global_step


class OnMeta(Fitted):
    """Creates its layers on the meta device."""

    def __init__(self) -> None:
        super().__init__(Setup(optimizer="adamw"))
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def init_weights(self) -> None:
        for number, parameter in enumerate(self.parameters()):
            values = torch.arange(parameter.numel(), dtype=torch.float32).view_as(parameter)
            parameter.data.copy_(torch.sin(values + number))


def fit_on_meta(strategy: Any) -> dict[str, Any]:
    """Return the weights of a module created on the meta device."""
    with only_these_warnings():
        make(strategy, max_epochs=1).fit(module := OnMeta(), loader(4), loader(2, seed=2))
    return {name: value.clone() for name, value in module.state_dict().items()}
