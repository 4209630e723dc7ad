"""Descriptions of fits that run on any engine: by our Trainer (:func:`fit`), and by hand (``by_hand.py``).

A :class:`Setup` defines module, batches and faults. :func:`draw` draws one. On an engine with W ranks each rank has its
own batches (with tensor parallelism, each group of ranks that shares one). A single device gets the same batches one
after the other, and W times as many per optimizer step, so that weights differ by rounding only.
"""

import random
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as distributed
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests import support
from tests.support import make_trainer, native_fp16
from trainer import CheckpointFiles, FSDP2Strategy
from trainer.callbacks import GradientAccumulation, GradientClipping, NonFiniteGuard, OverflowReport
from trainer.distributed.engine import _run_idle_forward

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "sgd-fused": partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-2),
    "adamw-fused": partial(torch.optim.AdamW, lr=0.01, eps=1e-2, fused=True),
    "adam-fused": partial(torch.optim.Adam, lr=0.01, eps=1e-2, fused=True),
}
"""A large epsilon, so that the sign of a gradient that is 0 up to rounding does not move a weight by lr."""
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed")
SCALER = {"init_scale": 1024.0, "growth_interval": 3}
CLIPPING = {"norm": 0.3, "inf": 0.1, "value": 0.05}
VAL_BATCHES = 2
Position = tuple[int, int, int]
"""A rank, an epoch, and a batch of that rank in that epoch."""


@dataclass(frozen=True)
class Setup:
    """A fit.

    Attributes:
        precision: precision of the Trainer.
        optimizer: a key of ``OPTIMIZERS``.
        optimizers: number of optimizers that share the parameters.
        manual: whether the module does its backward passes and steps itself.
        batches: batches per rank and epoch.
        windows: batches per accumulation window, in each epoch.
        weighted: whether batches come with weights: None, as numbers, or as tensors.
        unit: unit of those weights.
        none: batches without a loss.
        late: whether these return None after their forward.
        clip: a key of ``CLIPPING``, or None.
        schedule: when the learning rate changes: "step", "epoch", or None.
        overflow: a batch with an infinite gradient, or None.
        whole_overflow: whether all parameters have it, instead of one.
        guard: whether that step is also skipped in float32 and bfloat16.
        val_every: batches of a process between validations; 0 for none.
        frozen: whether some parameters are not trained.
        fewer: a rank, and the number of batches that it has fewer than the others in each epoch, or None.
        sync_each_batch: whether each batch of a window reduces its gradients to shards, under FSDP2.
        noisy: whether there is dropout, a BatchNorm, and a random order of the batches.
    """

    precision: str = "32-true"
    optimizer: str = "sgd"
    optimizers: int = 1
    manual: bool = False
    batches: int = 5
    windows: tuple[int, ...] = (1, 1)
    weighted: str | None = None
    unit: float = 1.0
    none: frozenset[Position] = frozenset()
    late: bool = False
    clip: str | None = None
    schedule: str | None = None
    overflow: Position | None = None
    whole_overflow: bool = False
    guard: bool = False
    val_every: int = 0
    frozen: bool = False
    fewer: tuple[int, int] | None = None
    sync_each_batch: bool = True
    noisy: bool = False

    def weight(self, rank, index):
        """Return the weight of a batch."""
        weight = (1 + (3 * index + 2 * rank) % 5) * (10 if index == 2 else 1)
        return weight * self.unit if self.weighted else 1.0

    def is_none(self, rank, epoch, index):
        """Return whether there is no loss, or no batch."""
        return (rank, epoch, index) in self.none or index >= self.batches_of(rank)

    def batches_of(self, rank):
        """Return the number of batches of this rank."""
        return self.batches - (self.fewer[1] if self.fewer and self.fewer[0] == rank else 0)

    @property
    def is_plain_mean(self):
        """Return whether every window is the mean over its planned number of batches."""
        return not self.weighted and not self.none and not self.fewer


def draw(seed, world_size=2):
    """Draw a set-up. The same seed returns the same set-up."""
    pick = random.Random(seed)

    def maybe(share, *values, otherwise=None):
        return pick.choice(values) if pick.random() < share else otherwise

    precision, manual = pick.choice(PRECISIONS), pick.random() < 0.2
    batches, epochs = pick.randint(1, 6), 2
    position = (pick.randrange(world_size), pick.randrange(epochs), pick.randrange(batches))
    optimizers = pick.choice([1, 1, 1, 2])
    overflow = maybe(0.4, position)
    common = {
        "precision": precision, "manual": manual, "batches": batches, "optimizers": optimizers,
        "optimizer": pick.choice([name for name in OPTIMIZERS if name != "sgd-fused"]),  # refused under FSDP2
        "overflow": overflow, "whole_overflow": pick.random() < 0.5,
        "guard": overflow is not None and precision != "16-mixed", "frozen": pick.random() < 0.2,
        "val_every": maybe(0.5, pick.randint(1, batches), otherwise=0), "clip": maybe(0.5, *CLIPPING),
    }  # fmt: skip
    if manual:
        if common["clip"] == "inf":
            common["clip"] = "norm"
        return Setup(**common)
    window = pick.randint(2, 4)
    none = set()
    if pick.random() < 0.3:
        positions = [(rank, epoch, i) for rank in range(world_size) for epoch in range(epochs) for i in range(batches)]
        none = set(pick.sample(positions, pick.randint(1, max(1, len(positions) // 3))))
    drawn = Setup(
        **common, windows=pick.choice([(1, 1), (window, window), (1, window), (window, 1)]),
        weighted=maybe(0.25, "number", "tensor"), none=frozenset(none - {overflow}), late=pick.random() < 0.5,
        schedule=maybe(0.5, "step", "epoch"), sync_each_batch=pick.random() < 0.5,
        unit=pick.choice([1.0, 4096.0]),
    )  # fmt: skip
    if batches == 1 or pick.random() < 0.7:
        return drawn
    shorter = replace(drawn, fewer=(pick.randrange(world_size), pick.randint(1, batches - 1)))
    return drawn if overflow and overflow[2] >= shorter.batches_of(overflow[0]) else shorter


# --- module and batches ----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width, noisy):
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if noisy else nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.2 if noisy else 0.0)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Parameters with even and uneven shards, and one with a single element, which only one rank holds."""

    def __init__(self, setup):
        super().__init__()
        self.setup = setup
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Linear(6, 16), Block(16, setup.noisy), Block(16, setup.noisy), nn.Linear(16, 3), nn.Tanh(),
                nn.Linear(3, 2),
            )  # fmt: skip
        self.gain = nn.Parameter(torch.ones(1))
        if setup.frozen:
            self.net[1].up.weight.requires_grad_(False)
            self.net[5].bias.requires_grad_(False)

    def forward(self, batch, epoch=-1):
        """Return the loss, which is infinite at the batch of ``Setup.overflow``."""
        x, y, rank, index = batch
        loss = nn.functional.mse_loss(self.net(x).float() * self.gain, y.float())
        if (rank, epoch, index) == self.setup.overflow:
            infinity = torch.tensor(float("inf"))
            return loss * infinity if self.setup.whole_overflow else loss + (self.gain * infinity).sum()
        return loss

    def groups(self):
        """Return the parameters of each optimizer."""
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        if self.setup.optimizers == 1:
            return [list(trained.values())]
        first = [name for name in trained if name.startswith(("gain", "net.0", "net.1"))]
        return [[trained[name] for name in first], [p for name, p in trained.items() if name not in first]]

    def make_optimizers(self):
        """Return one optimizer, or two with different learning rates."""
        made = [OPTIMIZERS[self.setup.optimizer](group) for group in self.groups()]
        for number, optimizer in enumerate(made):
            optimizer.param_groups[0]["lr"] /= 1 + number
        return made


def parallelize(net, mesh):
    """Split the blocks' layers over the mesh's second dimension, and shard the blocks over its first."""
    for block in net:
        if isinstance(block, Block):
            parallelize_module(block, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["data_parallel"])


def data_rank(engine, world_size):
    """Return the index of this rank's share of the data among ``world_size`` shares."""
    return 0 if engine == "single" else distributed.get_rank() * world_size // distributed.get_world_size()


def make_schedule(optimizer):
    """Return the schedule of ``Setup.schedule``."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)


def batch_of(rank, index, seed=1):
    """Return one batch of one rank: features (4, 6), targets (4, 2), and the index of the rank."""
    generator = torch.Generator().manual_seed(1000 * seed + 100 * rank + index)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator), rank, index


def batches_of(ranks, count, seed=1):
    """Return ``count`` batches of each of these ranks, in turn."""
    return [batch_of(rank, index, seed) for index in range(count) for rank in ranks]


class Fitted(Net, LightningModule):
    """A module that trains the set-up with a Trainer."""

    def __init__(self, setup):
        super().__init__(setup)
        self.automatic_optimization = not setup.manual

    def configure_model(self):
        mesh = self._device_mesh
        if mesh is not None and "tensor_parallel" in mesh.mesh_dim_names:
            parallelize(self.net, mesh)

    def training_step(self, batch, batch_idx):
        setup, (_, _, rank, index) = self.setup, batch
        if setup.manual:
            return self.by_hand(batch, batch_idx)
        is_none = setup.is_none(rank, self.current_epoch, index)
        if is_none and not setup.late:
            return None
        loss = self(batch, self.current_epoch)
        if is_none:
            return None
        if setup.weighted is None:
            return loss
        weight = setup.weight(rank, index)
        return {"loss": loss, "weight": torch.tensor(weight) if setup.weighted == "tensor" else weight}

    def by_hand(self, batch, batch_idx):
        optimizers, clip = self.optimizers(), self.setup.clip
        for number, optimizer in enumerate(optimizers if isinstance(optimizers, list) else [optimizers]):
            optimizer.zero_grad()
            self.manual_backward(self(batch, self.current_epoch) * (number + 1))
            if clip is not None:
                self.clip_gradients(optimizer, CLIPPING[clip], clip)
            optimizer.step()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(batch), sync_dist=True, batch_size=4)

    def configure_optimizers(self):
        optimizers = self.make_optimizers()
        if self.setup.schedule is None:
            return optimizers
        interval = self.setup.schedule
        return optimizers, [{"scheduler": make_schedule(o), "interval": interval} for o in optimizers]


# --- results ----------------------------------------------------------------------------------------------------


def whole(value):
    """Return a copy of a tensor, gathered from all ranks if it is sharded. Call it on all ranks."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


class Trace(support.Trace):
    """Picklable results of a fit, with the learning rates of each optimizer step, and without losses.

    Attributes:
        weights: the whole parameters and buffers, at the end of each epoch.
        state: the whole tensors of the optimizers, at the end.
        val_losses: of each validation.
        counts: numbers to be equal, by name.
    """

    def __init__(self):
        super().__init__()
        self.state = {}
        self.val_losses = []
        self.counts = {}

    def take_weights(self, module):
        self.weights.append({name: whole(value) for name, value in module.state_dict().items()})

    def take_state(self, optimizers):
        for number, optimizer in enumerate(optimizers):
            for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
                for name, value in optimizer.state.get(parameter, {}).items():
                    self.state[f"{number}.{index}.{name}"] = whole(torch.as_tensor(value))


class Watch(support.Watch):
    """Records the trace of a Trainer's fit."""

    on_train_batch_end = Callback.on_train_batch_end

    def __init__(self):
        self.trace = Trace()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.trace.rates.append(optimizer.param_groups[0]["lr"])

    def on_after_optimizer_step(self, trainer, pl_module, optimizer, outcome):
        if optimizer is trainer.optimizers[outcome.optimizers[-1]]:  # once for each update
            assert type(outcome.grad_norm) in (Tensor, type(None)), "a norm is one plain number"
            super().on_after_optimizer_step(trainer, pl_module, optimizer, outcome)

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.trace.val_losses.append(trainer.callback_metrics["val_loss"].item())

    def on_train_epoch_end(self, trainer, pl_module):
        self.trace.take_weights(pl_module)

    def on_train_end(self, trainer, pl_module):
        self.trace.take_state(trainer.optimizers)


class Saves(Checkpoint):
    """Writes checkpoints after these batches of a fit, and after these validations."""

    def __init__(self, folder, batches=(), validations=()):
        self.folder, self.batches, self.validations = Path(folder), set(batches), set(validations)
        self.batch = self.validation = 0

    def on_train_batch_end(self, trainer, *_):
        if self.batch in self.batches:
            trainer.save_checkpoint(self.folder / f"batch_{self.batch}.ckpt")
        self.batch += 1

    def on_validation_end(self, trainer, pl_module):
        if self.validation in self.validations and not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"validation_{self.validation}.ckpt")
        self.validation += not trainer.sanity_checking


# --- by our Trainer ---------------------------------------------------------------------------------------------


def strategy_of(setup, engine):
    """Return the strategy of an engine."""
    if engine in ("fsdp", "hsdp"):
        return FSDP2Strategy(replicas=1 + (engine == "hsdp"), sync_each_batch=setup.sync_each_batch)
    if engine == "2d":
        return ModelParallelStrategy(2, 2)
    return "auto" if engine == "single" else engine


@contextmanager
def only_these_warnings():
    """Raise an error for all other warnings, also on these ranks."""
    with warnings.catch_warnings(action="error"):
        for message in (
            ".*does not have many workers", ".*LeafSpec", "`training_step` returned `None`",
            "The number of training batches", "Your `.*_dataloader`'s sampler has shuffling enabled",
            "Detected call of `lr_scheduler.step", ".*smaller than the logging interval",
            "You defined a `validation_step` but have no", "find_unused_parameters=True was specified",
            "Optimizer step .* was skipped",
        ):  # fmt: skip
            warnings.filterwarnings("ignore", message)
        if torch.__version__ < (2, 11):  # raised inside DeepSpeed and sharded checkpoints
            warnings.filterwarnings("ignore", "`torch.jit.script|TypedStorage is deprecated")
        yield


def without_diagnosis():
    """Return the default callback with its diagnosis of skipped steps disabled, which takes longer than a fit."""
    return OverflowReport(after=None, collapse_after=None, at_floor=None)


def fit(setup, engine, world_size=2, ckpt_path=None, callbacks=(), **arguments):
    """Run a set-up on all ranks of ``ddp`` or ``fsdp``, or on ``single``."""
    rank = data_rank(engine, world_size)
    ranks, each = (range(world_size), world_size) if engine == "single" else (range(rank, rank + 1), 1)
    watch = Watch()
    callbacks = [watch, *callbacks]
    if len(set(setup.windows)) > 1:
        callbacks.append(GradientAccumulation(schedule={i: n * each for i, n in enumerate(setup.windows)}))
    elif not setup.manual:
        arguments["accumulate_grad_batches"] = setup.windows[0] * each
    if setup.clip is not None and not setup.manual:
        limit = CLIPPING[setup.clip]
        if setup.clip == "inf":
            callbacks.append(GradientClipping(limit, norm_type=float("inf")))
        else:
            arguments |= {"gradient_clip_val": limit, "gradient_clip_algorithm": setup.clip}
    if setup.guard:
        callbacks.append(NonFiniteGuard("skip"))
    if setup.val_every:
        arguments["val_check_interval"] = setup.val_every * each
    with only_these_warnings():
        torch.manual_seed(5 + rank + 100 * bool(ckpt_path))  # a resumed run is not equal to a run that starts here
        precision = native_fp16(**SCALER) if setup.precision == "16-mixed" else setup.precision
        trainer = make_trainer(
            None, devices=1 if engine == "single" else distributed.get_world_size(),
            precision=precision, num_sanity_val_steps=int(setup.val_every > 0),
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
            use_distributed_sampler=False, max_epochs=len(setup.windows), callbacks=callbacks,
            strategy=strategy_of(setup, engine), **arguments,
        )  # fmt: skip
        module = Fitted(setup)
        if ckpt_path:
            nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in module.parameters())), module.parameters())
        # one device has all, some without a loss
        count = setup.batches if engine == "single" else setup.batches_of(rank)
        train = DataLoader(batches_of(ranks, count), batch_size=None, shuffle=setup.noisy)
        val = DataLoader(batches_of(ranks, VAL_BATCHES, seed=2), batch_size=None) if setup.val_every else None
        trainer.fit(module, train, val, ckpt_path=ckpt_path)
    trace = watch.trace
    trace.counts = {
        "global_step": trainer.global_step, "skipped_steps": trainer.skipped_steps, "scale": trainer.scaler.get_scale()
    }  # fmt: skip
    return trace


class Uneven(LightningModule):
    """Has buffers, which DDP's forward broadcasts, and logs each batch's loss over all ranks."""

    def __init__(self, optimizer="SGD", manual=False, exchanges=""):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        if exchanges == "metric":
            self.mean = MeanMetric(dist_sync_on_step=True)
        elif exchanges:
            self.net[1] = nn.SyncBatchNorm(4)
        self.optimizer, self.automatic_optimization = optimizer, not manual
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch_idx)
        self.log("number", float(batch_idx), on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
        return self.net(batch).square().mean()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch + 0  # fails without a batch

    def configure_optimizers(self):
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.01)


def forward_nothing_on_a_gpu():
    """Run DDP's idle forward as on a GPU, with a wrapper that moves inputs."""
    net = nn.BatchNorm1d(1)
    wrapper = nn.parallel.DistributedDataParallel(net)
    wrapper.device_ids, wrapper.device_type = [0], "cpu"
    net.running_mean.fill_(1.0 + distributed.get_rank())
    _run_idle_forward(wrapper)
    return net.running_mean.tolist()


def classes_after_test(strategy):
    """Test a module with a Trainer that converts BatchNorm to SyncBatchNorm in a fit. Returns the layers' classes."""
    module = Uneven(exchanges="norm")
    module.test_step = lambda batch, batch_idx: module.net(batch)
    with only_these_warnings():
        trainer = make_trainer(None, devices=distributed.get_world_size(), strategy=strategy, sync_batchnorm=True)
        trainer.test(module, DataLoader(torch.ones(8, 6), batch_size=2), verbose=False)
    return [type(part).__name__ for part in module.net]


def fit_and_resume(setup, engine, folder, batches, validations, world_size=2, sharded=False, then=None):
    """Run a set-up with checkpoints at these places, then resume from each, on the engine ``then`` if it is given.

    Returns both, by the checkpoints' names.
    """
    plugins = [CheckpointFiles(sharded=sharded)]
    saves = Saves(folder, batches, validations)
    whole = fit(setup, engine, world_size, callbacks=[saves, without_diagnosis()], plugins=plugins)
    names = [f"batch_{number}" for number in batches] + [f"validation_{number}" for number in validations]
    paths = {name: f"{folder}/{name}.ckpt" for name in names}
    assert all(Path(path).is_dir() is sharded for path in paths.values())
    return whole, {
        name: fit(setup, then or engine, world_size, path, [without_diagnosis()], plugins=plugins)
        for name, path in paths.items()
    }
