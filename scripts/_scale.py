"""Parts of ``benchmark_scale`` that run in each process: the model, the hand-written loops, and the counters."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from trainer import CheckpointFiles, Trainer
from trainer.precision import MixedPrecision

AUTOCAST = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
MAX_NORM = 1.0
CLASSES = 16
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time, "all": time.process_time}
clock = CLOCKS["wall"]
"""The clock of the steps; see ``--clock``."""


class Block(nn.Module):
    """A residual block of a transformer, without its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Stack ``layers`` blocks between two linear layers. The forward returns the loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float(), y)


class Module(LightningModule):
    """Wrap the same network for a Trainer."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.net = Net(layers, width)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(*batch)
        return loss

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.net)


class Batches:
    """Yield this rank's batches from memory. (Lightning would treat a plain list as a list of dataloaders.)"""

    def __init__(self, count: int, width: int, size: int = 8) -> None:
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        g = torch.Generator().manual_seed(rank)
        few = [(torch.randn(size, width, generator=g), torch.randint(CLASSES, (size,), generator=g)) for _ in range(8)]
        self.batches = [few[i % len(few)] for i in range(count)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """Return a fused AdamW."""
    return torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)


def shard(net: Net) -> None:
    """Shard each block and the root, as in a hand-written program."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)


def by_hand(
    net: Net, batches: Iterable[Any], engine: str, precision: str, clips: bool, warmup: int
) -> tuple[float, torch.optim.Optimizer]:
    """Train with a hand-written loop. Returns the seconds after ``warmup`` batches, and the optimizer."""
    model: nn.Module = net
    if engine == "fsdp":
        shard(net)
    elif engine == "ddp":
        model = DistributedDataParallel(net)
    optimizer = optimizer_of(net)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "16-mixed", init_scale=1024.0)
    autocast, start = torch.autocast("cpu", AUTOCAST.get(precision), enabled=precision in AUTOCAST), 0.0
    for i, (x, y) in enumerate(batches):
        if i == warmup:
            start = clock()
        with autocast:
            loss = model(x, y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
    return clock() - start, optimizer


class Stopwatch(Callback):
    """Measure the seconds of a fit after its first ``warmup`` batches."""

    def __init__(self, warmup: int) -> None:
        self.warmup, self.start, self.end = warmup, 0.0, 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.warmup:
            self.start = clock()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.end = clock()


def make_trainer(engine: str, precision: str, clips: bool, callbacks: list[Any], **arguments: Any) -> Trainer:
    """Return a Trainer that writes no files."""
    given: Any = MixedPrecision("float16", cpu_kernels="native", init_scale=1024.0)
    return Trainer(
        accelerator="cpu", devices=distributed.get_world_size(), strategy=engine, max_epochs=1, logger=False,
        precision=given if precision == "16-mixed" else precision, gradient_clip_val=MAX_NORM if clips else None,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        enable_checkpointing=False, callbacks=callbacks, **arguments,
    )  # fmt: skip


def by_trainer(module: Module, batches: Any, engine: str, precision: str, clips: bool, warmup: int) -> float:
    """Train with our Trainer. Returns the seconds after ``warmup`` batches."""
    watch = Stopwatch(warmup)
    make_trainer(engine, precision, clips, [watch]).fit(module, batches)
    return watch.end - watch.start


class Counts(Callback):
    """Count the collectives of the last batch of a fit, in total and for each operation on gradients.

    Attributes:
        counts: number of collectives in the whole batch, by kind.
        during: number of collectives, by the method of ``Gradients``.
        state: bytes of parameters, gradients and optimizer states on this rank.
    """

    METHODS = ("unscale_", "clip_", "step", "update")

    def __init__(self, last: int) -> None:
        self.last = last
        self.counts: dict[str, int] = {}
        self.during: dict[str, int] = {}
        self.state: dict[str, int] = {}
        self._mode = CommDebugMode()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.last:
            gradients = trainer.loop.gradients
            for name in self.METHODS:
                setattr(gradients, name, self._counting(name, getattr(gradients, name)))
            self._mode.__enter__()

    def _counting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            before = self._mode.get_total_counts()
            result = method(*args, **kwargs)
            self.during[name] = self.during.get(name, 0) + self._mode.get_total_counts() - before
            return result

        return counted

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.last:
            self._mode.__exit__(None, None, None)
            self.counts = counts_of(self._mode)
            self.state = state_of(pl_module, trainer.optimizers[0])
            for name in self.METHODS:
                delattr(trainer.loop.gradients, name)


def counts_of(mode: CommDebugMode) -> dict[str, int]:
    """Count collectives by kind."""
    found: Counter[str] = Counter()
    for operation, number in mode.get_comm_counts().items():
        found[kind_of(str(operation).rpartition(".")[2])] += number
    return {name: number for name, number in sorted(found.items()) if number}


def kind_of(name: str) -> str:
    """Return the name of a collective for an operator of torch."""
    kinds = {"gather": "all-gather", "scatter": "reduce-scatter", "reduce": "all-reduce"}
    return next((kind for part, kind in kinds.items() if part in name), name)


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer states on this rank."""
    parameters = list(module.parameters())
    return {
        "parameters": sum(map(bytes_of, parameters)),
        "gradients": sum(bytes_of(p.grad) for p in parameters if p.grad is not None),
        "optimizer": sum(bytes_of(v) for one in optimizer.state.values() for v in one.values() if v.dim()),
    }


def bytes_of(tensor: Any) -> int:
    """Return the bytes of the local part of a tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.numel() * local.element_size())


def count(engine: str, precision: str, clips: bool, layers: int = 4, width: int = 64) -> dict[str, dict[str, int]]:
    """Count the collectives of a step of our Trainer and of one by hand, and the bytes on this rank."""
    ours = Counts(last=2)
    make_trainer(engine, precision, clips, [ours]).fit(Module(layers, width), Batches(3, width))
    net, mode = Net(layers, width), CommDebugMode()

    def batches() -> Iterator[Any]:
        for i, batch in enumerate(Batches(3, width)):
            if i == 2:
                mode.__enter__()
            yield batch

    by_hand(net, batches(), engine, precision, clips, warmup=9)
    mode.__exit__(None, None, None)
    return {"counts": ours.counts, "during": ours.during, "state": ours.state, "by hand": counts_of(mode)}


class Started(Exception):  # noqa: N818 - no error
    """Stop the fit after the checkpoint is loaded."""


class Starts(Callback):
    """End a fit before its first batch."""

    def on_train_batch_start(self, *_: Any) -> None:
        raise Started


def save_and_load(engine: str, folder: str, layers: int, width: int, sharded: bool) -> tuple[float, float, int]:
    """Return the seconds to save a checkpoint, the additional seconds of a fit that loads it, and its bytes."""
    files = CheckpointFiles(sharded=sharded)
    path = Path(folder) / f"{engine}{'_sharded' if sharded else ''}.ckpt"
    batches, times = Batches(1, width), []
    trainer = make_trainer(engine, "32-true", False, [SavesAtEnd(path, times)], plugins=[files])
    trainer.fit(Module(layers, width), batches)
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
    for given in (None, path):
        distributed.barrier()
        start = time.perf_counter()
        again = make_trainer(engine, "32-true", False, [Starts()], plugins=[CheckpointFiles(sharded=sharded)])
        with suppress(Started):
            again.fit_loop.max_epochs = 2
            again.fit(Module(layers, width), batches, ckpt_path=given)
        distributed.barrier()
        times.append(time.perf_counter() - start)
    return times[0], times[2] - times[1], size


class SavesAtEnd(Callback):
    """Save a checkpoint at the end of a fit, and measure the time."""

    def __init__(self, path: Path, times: list[float]) -> None:
        self.path, self.times = path, times

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        distributed.barrier()
        start = time.perf_counter()
        trainer.save_checkpoint(self.path)
        distributed.barrier()
        self.times.append(time.perf_counter() - start)
