"""Rank 0 of a simulated process group of any size, for ``simulate_ranks`` and tests."""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as distributed
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes.language_model import LanguageModel
from scripts._scale import kind_of
from trainer import FSDP2Strategy, Trainer
from trainer.cli.checks.fake_step import without_values
from trainer.common import collectives
from trainer.data.unpadded import Span
from trainer.lightning.loader_set import DataSource

TOKENS, VOCABULARY, MEASURED = 1024, 50304, 2
"""Tokens per batch; size of the vocabulary; index of the measured batch."""


def pretend(ranks: int) -> None:
    """Initialize a fake process group with this world size. Collectives return the data of rank 0."""
    os.environ |= {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    ours: Any = collectives.Collectives
    ours.num_collectives = lambda self: 0  # a fake group does not count them
    ours.async_max = lambda self, count, purpose: None  # needs a gloo group
    ours.any_rank_on_host = lambda self, *flags: list(flags)
    DataSource._spans_over_ranks = lambda self, batches: [Span(n, n) for n in batches]  # type: ignore[method-assign]


class Buckets(nn.Module):
    """Stand in for torch's DDP: allocate its buckets, and all-reduce a bucket when all its gradients are computed."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
        sizes = [distributed._DEFAULT_FIRST_BUCKET_BYTES, 25 << 20]
        found, _limits = distributed._compute_bucket_assignment_by_size(trained, sizes, [False] * len(trained))
        for indices in found:
            members = [trained[index] for index in indices]
            flat, waiting = torch.empty(sum(one.numel() for one in members)), set(range(len(members)))
            for number, parameter in enumerate(members):
                parameter.register_post_accumulate_grad_hook(partial(self.take, flat, waiting, number, len(members)))

    @staticmethod
    def take(flat: Tensor, waiting: set[int], number: int, count: int, parameter: Tensor) -> None:
        waiting.discard(number)
        if not waiting:
            waiting.update(range(count))
            distributed.all_reduce(flat)

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


class Model(LanguageModel):
    """A GPT without logging. Its weights have no values, so they need no initialization."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = self.make_net()

    def log(self, *args: Any, **kwargs: Any) -> None:
        pass


class Batches:
    def __len__(self) -> int:
        return MEASURED + 1

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield torch.zeros(1, TOKENS, dtype=torch.int64), torch.zeros(1, TOKENS, dtype=torch.int64)


class Collectives(TorchDispatchMode):
    """Count collectives, and the bytes of the larger side of each: the gathered tensors, or the tensors to reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        room, _, name = function.name().partition("::")
        if room in ("c10d", "_c10d_functional") and "wait" not in name:
            tensors = [one for one in tree_leaves((args, result)) if isinstance(one, Tensor)]
            self.counts[kind_of(name)] += 1
            self.bytes[kind_of(name)] += max((one.numel() * one.element_size() for one in tensors), default=0)
        return result


class Seen(Exception):  # noqa: N818 - no error
    """Stop the fit after the measured batch."""


class Look(Callback):
    """Build the module without values, and measure one batch."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.stack, self.mode = ExitStack(), Collectives()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # other threads are not counted
        _, self.living = self.stack.enter_context(without_values())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == MEASURED:
            self.living.peak = self.living.current
            self.mode.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == MEASURED:
            self.mode.__exit__(None, None, None)
            self.found = {"peak": self.living.peak, "after": self.living.current}
            self.found |= {"counts": dict(self.mode.counts), "bytes": dict(self.mode.bytes)}
            self.found["parameters"] = sum(parameter.numel() for parameter in pl_module.parameters())
            raise Seen


def step(engine: str, ranks: int, width: int, heads: int, layers: int) -> dict[str, Any]:
    """Run one bf16-mixed step of rank 0 with clipping and AdamW. The process cannot be used afterwards."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    pretend(ranks)
    plain: Any = DDPStrategy
    plain.model_to_device = lambda self: None  # the model is already on the CPU
    plain._setup_model = lambda self, model: Buckets(model)
    policy = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    options: dict[str, Any] = {"hsdp": {"replicas": ranks // 8}, "policy": {"mixed_precision": policy}}
    strategy: Any = FSDP2Strategy(**options[engine]) if engine in options else engine
    optimizer = partial(torch.optim.AdamW, lr=1e-3, foreach=True)  # as on a GPU
    model = Model(
        optimizer, context=TOKENS, vocabulary=VOCABULARY, tokenizer="none", width=width, heads=heads, layers=layers,
        positions="rotary",
    )  # fmt: skip
    look = Look()
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=1, precision="bf16-mixed", logger=False,
        gradient_clip_val=1.0, limit_val_batches=0, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, enable_checkpointing=False, callbacks=[look],
    )  # fmt: skip
    try:
        trainer.fit(model, Batches())
    except BaseException as error:  # the tear-down fails, because it needs values
        if not look.found:
            raise error
    return look.found
