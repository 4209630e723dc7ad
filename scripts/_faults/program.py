"""The program that a case starts, kills, and starts again: one training run, described by JSON.

``python -m _faults.program '{"folder": ..., "setup": {...}}'`` runs as a normal process; the server runs the same code
in a fork.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from _faults import training
from _faults.training import Classifier, Diary, Setup


def main(options: dict[str, Any]) -> None:
    """Train with ``options``, and write ``final_<rank>.pt``.

    Options:
        who: ``"ours"`` or ``"lightning"``.
        folder: output folder.
        setup: the fields of :class:`training.Setup` that are not the defaults.
        start: ``"auto"``: from the newest checkpoint if there is one; a path: from that checkpoint; None: from the
            beginning.
        into: folder of checkpoints; default ``folder``.
        saves: ``"steps"``: every two optimizer steps, and the best ones; ``"each"``: after every batch, validation
            and epoch; ``"none"``.
        fault: the fault; see :class:`Fault`.
        rank, ranks: rank and world size. torchrun sets the rank itself.
        first_ranks: world size without which the run does not begin: if torchrun starts fewer processes and there is
            no checkpoint, the process fails, and torchrun starts it again when the others have joined. Default: any.
        trainer: more arguments of the Trainer.
        final: name of the final file; default ``final``.
        callbacks: names of our callbacks, with their arguments.
        files: arguments of our ``CheckpointFiles``.
    """
    warnings.filterwarnings("ignore", ".*does not have many workers.*|.*Checkpoint directory.*exists")
    folder, rank, ranks = Path(options["folder"]), options.get("rank", 0), options.get("ranks", 1)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        rank = int(os.environ["RANK"])
        first = options.get("first_ranks", 1)
        if int(os.environ["WORLD_SIZE"]) < first and not any(folder.rglob("*.ckpt")):
            sys.exit(f"begins only with {first} processes, started with {os.environ['WORLD_SIZE']}")
    setup, who = Setup(**options.get("setup", {})), options["who"]
    setup = replace(setup, overflows=tuple(setup.overflows))
    torch.set_num_threads(1)
    seed_everything(7, workers=True, verbose=False)
    fault = Fault(options.get("fault") or {}, setup, rank)
    module = Classifier(setup, Diary(folder, rank, setup.pace))
    callbacks = [
        *training.Averaging.callbacks(setup),
        *savers(Path(options.get("into", folder)), setup, options.get("saves", "steps")),
        fault,
    ]
    arguments: dict[str, Any] = training.arguments_of(setup) | {
        "accelerator": "cpu", "devices": ranks, "strategy": "ddp" if ranks > 1 else "auto", "default_root_dir": folder,
        "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1,
        **options.get("trainer", {}),
    }  # fmt: skip
    start = options.get("start", "auto")
    if who == "ours":
        import trainer.callbacks
        from trainer import Trainer

        for name, given in options.get("callbacks", {}).items():
            callbacks.insert(0, getattr(trainer.callbacks, name)(**given))
        if "files" in options:
            arguments["plugins"] = [trainer.CheckpointFiles(**options["files"])]
        arguments["resume"], start = ("auto", None) if start == "auto" else (None, start)
    else:
        from lightning.pytorch import Trainer  # type: ignore[assignment]

        start = "last" if start == "auto" else start  # from last.ckpt if it exists
    arguments.setdefault("logger", [TensorBoardLogger(folder), CSVLogger(folder)])
    trainer = Trainer(**arguments, callbacks=callbacks)
    train, val = training.training_data(setup, ranks, fault.in_dataset), training.validation_data(setup)
    trainer.fit(module, train, val, ckpt_path=start)
    name = options.get("final", "final")
    torch.save(training.state_of(trainer, module), folder / f"{name}_{rank}.part")
    os.replace(folder / f"{name}_{rank}.part", folder / f"{name}_{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def savers(folder: Path, setup: Setup, how: str) -> list[Callback]:
    """Return the callbacks that write checkpoints."""
    if how == "each":
        return [Everywhere(folder)]
    if how == "none":
        return []
    newest = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=2, save_last=True)
    best = ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=2, filename="{step}")
    return [newest, best] if setup.validate_every else [newest]


class Everywhere(Checkpoint):
    """Write ``each/<batches>-<where>.ckpt`` after every batch, validation and epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.batches = folder / "each", 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.batches += 1
        self.save(trainer, "a-batch")

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.save(trainer, "b-validation")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.save(trainer, "c-epoch")

    def save(self, trainer: Any, where: str) -> None:
        """Write a checkpoint."""
        trainer.save_checkpoint(self.folder / f"{self.batches:03d}-{where}.ckpt")


class Fault(Callback):
    """Cause one fault in this process.

    ``kind`` is one of:

    ``signal``: this process gets ``signals`` (on rank ``rank`` only) at the start of batch ``at``.
    ``signal in save``: the same while checkpoint number ``at`` is written, after ``delay`` seconds.
    ``file limit``: from checkpoint number ``at`` on, no file may be larger than ``bytes``.
    ``nan``, ``raise``, ``memory``: batch ``at`` is NaN; an exception is raised in it (on rank ``rank``); the module
    runs out of memory in it.
    ``worker``: a worker gets ``signals`` before it makes its sample number ``at``; if there are no signals, it hangs.

    With ``lives``, the fault is caused only in the first ``lives`` starts by torchrun.
    """

    def __init__(self, what: dict[str, Any], setup: Setup, rank: int) -> None:
        self.what, self.setup_ = what, setup
        self.kind, self.at = what.get("kind"), what.get("at", 0)
        life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        self.is_here = rank == what.get("rank", rank) and life < what.get("lives", life + 1)
        self.saves = self.samples = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.is_here or trainer.current_epoch * self.setup_.batches + batch_idx != self.at:
            return
        if self.kind == "signal":
            send(self.what["signals"])
        elif self.kind == "nan":
            batch[0].fill_(torch.nan)
        elif self.kind == "raise":
            raise ArithmeticError("the fault suite raises this")
        elif self.kind == "memory":
            pl_module.register_forward_pre_hook(_no_memory)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.saves += 1
        if self.saves != self.at or not self.is_here:
            return
        if self.kind == "signal in save":
            later(self.what.get("delay", 0.0), self.what["signals"])
        elif self.kind == "file limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.what["bytes"], resource.RLIM_INFINITY))

    @property
    def in_dataset(self) -> Callable[[int], None] | None:
        """Return the function called for each sample, or None without a fault."""
        return self.before_sample if self.kind == "worker" else None

    def before_sample(self, index: int) -> None:
        """Cause the fault if this process is a worker, before it makes a sample."""
        self.samples += 1
        if self.samples == self.at and torch.utils.data.get_worker_info() is not None:
            send(self.what["signals"])
            if not self.what["signals"]:
                time.sleep(3600)


def send(names: list[str]) -> None:
    """Send signals to this process."""
    for name in names:
        os.kill(os.getpid(), getattr(signal, name))


def later(delay: float, names: list[str]) -> None:
    """Send signals to this process after ``delay`` seconds from another process, even if this one is busy."""
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(delay)
        for name in names:
            os.kill(pid, getattr(signal, name))
        os._exit(0)


def _no_memory(module: Any, inputs: Any) -> None:
    if module.training:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
