"""A GPT that reads and writes text: of any size, on one device or sharded over many."""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from recipes.data.text import NO_TARGET, VOCABULARY
from recipes.data.tokenizers import Tokenizer, load_tokenizer
from recipes.gpt import GPT, Block, CausalSelfAttention, Positions
from recipes.schedules import with_schedule

__all__ = [
    "Block", "CausalSelfAttention", "GPT", "LanguageModel", "Perplexity", "Ratio", "TextSamples", "TextWriter",
    "characters", "printable", "sum_of_losses",
]  # fmt: skip


class LanguageModel(L.LightningModule):
    """Trains a `GPT` to predict the next token.

    A batch is ``(tokens, targets)``, both int64 of shape (batch, length); targets of -100 are ignored. The
    loss is the mean over the other targets, and ``training_step`` returns their number as the batch's weight: with
    ``accumulate_grad_batches``, the update equals that of one large batch, however many targets each batch has.

    It logs ``train_loss`` at every step and, over an epoch, ``val_loss`` and ``test_loss``, in nats per token, and
    ``val_perplexity`` and ``test_perplexity``, e to the power of the loss. If tokens are bytes, it also logs
    ``train_bpc``, ``val_bpc`` and ``test_bpc``: bits per character, the sum of all bits divided by the number of
    characters (a character beyond ASCII has several bytes; the end of a document counts as one character).

    `configure_model` creates the network on its device, or on the meta device if a strategy shards it first. Then
    `init_weights` initializes the shard of each rank: the whole weights are the same for any number of ranks.

    Args:
        optimizer: called with parameter groups and returns the optimizer, such as
            ``functools.partial(torch.optim.AdamW, lr=1e-3)``; in a config, ``_partial_: true``. Its
            ``weight_decay`` applies only to matrices, not to biases and normalization layers.
        scheduler: called with the optimizer and the number of optimizer steps of the run; returns a schedule that is
            stepped after every optimizer step (see `recipes.schedules`). Default: None, a constant learning rate.
        context: largest number of tokens that the model processes at once.
        vocabulary: number of tokens; None: that of the tokenizer. Default: 256, for bytes.
        tokenizer: tokenizer of prompts and generated text, a folder with a ``tokenizer.json`` or that file; None:
            bytes.
        width: size of the hidden vectors.
        heads: number of attention heads, which share the width.
        layers: number of blocks.
        dropout: probability that a value is set to zero in training.
        tie_weights: let the output layer use the token embedding's weights.
        positions: ``"learned"`` or ``"rotary"`` (see `GPT`).
        sample_length: number of tokens that `predict_step` generates.
        temperature: sampling temperature. Below 1, likely tokens become likelier; 0 always selects the most likely one.
        sample_seed: seed of the sampling.

    Attributes:
        net: the `GPT`, after `configure_model`.

    Raises:
        ValueError: an argument of the `GPT` is invalid; raised by `configure_model`.
    """

    net: GPT

    def __init__(
        self,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        scheduler: Callable[[Optimizer, int], LRScheduler] | None = None,
        *,
        context: int,
        vocabulary: int | None = VOCABULARY,
        tokenizer: str | None = None,
        width: int = 96,
        heads: int = 3,
        layers: int = 3,
        dropout: float = 0.0,
        tie_weights: bool = False,
        positions: Positions = "learned",
        sample_length: int = 500,
        temperature: float = 0.7,
        sample_seed: int = 0,
    ) -> None:
        super().__init__()
        vocabulary = load_tokenizer(tokenizer).vocabulary if vocabulary is None else vocabulary
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        self.make_net = partial(
            GPT,
            vocabulary,
            context,
            width=width,
            heads=heads,
            layers=layers,
            dropout=dropout,
            tie_weights=tie_weights,
            positions=positions,
        )
        self.context = context
        self.tokenizer_path = tokenizer
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.sample_length = sample_length
        self.temperature = temperature
        self.sample_seed = sample_seed
        self.reads_bytes = tokenizer is None
        for stage in ("val", "test"):
            setattr(self, f"{stage}_loss", Ratio())
            setattr(self, f"{stage}_perplexity", Perplexity())
        for stage in ("train", "val", "test") if self.reads_bytes else ():
            setattr(self, f"{stage}_bpc", Ratio())

    def configure_model(self) -> None:
        """Create the network on torch's default device. A second call is a no-op.

        Under a strategy that shards, the network stays on the meta device; after sharding, the strategy allocates the
        shards and calls `init_weights`.
        """
        if hasattr(self, "net"):
            return
        device, strategy = torch.get_default_device(), getattr(self._trainer, "strategy", None)
        with torch.device("meta"):  # no random initialization, which `init_weights` would overwrite
            self.net = self.make_net()
        is_sharded_first = getattr(strategy, "restore_checkpoint_after_setup", False)
        if device.type != "meta" and not is_sharded_first:
            self.net.to_empty(device=device)
            self.init_weights()

    def init_weights(self) -> None:
        """Initialize the network's weights. They are the same on every process, sharded or not."""
        seed = [torch.initial_seed()]
        if dist.is_available() and dist.is_initialized():
            dist.broadcast_object_list(seed)  # without `seed_everything`, each rank has a different seed
        self.net.init_weights(seed[0])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer for prompts and generated text."""
        return load_tokenizer(self.tokenizer_path)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token, of shape (batch, length, vocabulary)."""
        return self.net(tokens)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the mean loss of a batch, a scalar, and the number of targets as its weight."""
        nats, count = self._count(batch)
        loss = nats / count
        self.log("train_loss", loss, prog_bar=True)
        if self.reads_bytes:
            self._log_ratio("train_bpc", nats.detach() / math.log(2), characters(batch[1]))
        return {"loss": loss, "weight": count}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``val_loss``, ``val_perplexity`` and, if tokens are bytes, ``val_bpc``."""
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``test_loss``, ``test_perplexity`` and, if tokens are bytes, ``test_bpc``."""
        self._evaluate("test", batch)

    def predict_step(self, batch: Sequence[str], batch_idx: int) -> list[str]:
        """Return each prompt with its continuation."""
        return [prompt + self.write(prompt, seed=self.sample_seed + batch_idx) for prompt in batch]

    @torch.no_grad()
    def write(self, prompt: str = "", *, seed: int = 0) -> str:
        """Return the continuation of ``prompt``: ``sample_length`` tokens, or fewer if a document ends.

        If the weights are sharded, all ranks must call it with the same arguments.

        Args:
            prompt: the beginning; an empty one begins a document.
            seed: seed of the sampling. No global random state is used.
        """
        end = self.tokenizer.end
        begin = self.tokenizer.begin or [end]
        draw = torch.Generator(self.device).manual_seed(seed)
        stream = [*begin, *self.tokenizer.encode([prompt])[0]]
        start = len(stream)
        for _ in range(self.sample_length):
            tokens = torch.tensor([stream[-self.context :]], device=self.device)
            logits = self(tokens)[0, -1].float()
            if self.temperature > 0:
                choice = torch.multinomial((logits / self.temperature).softmax(0), 1, generator=draw)
            else:
                choice = logits.argmax()
            stream.append(int(choice))  # host-device synchronization: the next token depends on it
            if stream[-1] == end:
                stream.pop()
                break
        return self.tokenizer.decode(stream[start:])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer, with weight decay only on matrices, and the schedule, if there is one."""
        parameters = list(self.net.parameters())  # tied weights occur once
        groups = [
            {"params": [parameter for parameter in parameters if parameter.ndim >= 2]},
            {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
        ]
        return with_schedule(self.make_optimizer(groups), self.make_scheduler, self)

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        nats, count = self._count(batch)
        self._log_ratio(f"{stage}_loss", nats, count)
        self._log_ratio(f"{stage}_perplexity", nats, count)
        if self.reads_bytes:
            self._log_ratio(f"{stage}_bpc", nats / math.log(2), characters(batch[1]))

    def _count(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of all targets, in nats, and the number of targets."""
        tokens, targets = batch
        return sum_of_losses(self.net(tokens), targets)

    def _log_ratio(self, name: str, amount: Tensor, count: Tensor) -> None:
        metric = getattr(self, name)
        metric.update(amount, count)
        self.log(name, metric, on_step=False, on_epoch=True, prog_bar=True)


def sum_of_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of all targets, in nats, and the number of targets; both scalars.

    Args:
        logits: logits of the next token, shape (batch, length, vocabulary).
        targets: int64, shape (batch, length); -100 is ignored.
    """
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
    return nats, (targets != NO_TARGET).sum()


def characters(targets: Tensor) -> Tensor:
    """Return the number of characters that begin in these bytes, a scalar. In UTF-8, all other bytes are 10xxxxxx."""
    return ((targets != NO_TARGET) & (targets & 0b1100_0000 != 0b1000_0000)).sum()


class Ratio(Metric):
    """The sum of all amounts divided by the sum of all counts, over all ranks.

    torchmetrics' `MeanMetric` is not used: its check for NaN synchronizes host and device in each batch, and without
    the check (``nan_strategy="disable"``), torchmetrics 1.9 ignores the weights.
    """

    full_state_update = False
    amount: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("amount", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, amount: Tensor, count: Tensor) -> None:
        """Add an amount and a count; both are scalars."""
        self.amount += amount
        self.count += count

    def compute(self) -> Tensor:
        """Return the ratio, a float32 scalar."""
        return self.amount / self.count


class Perplexity(Ratio):
    """The exponential of the mean loss in nats. (torchmetrics' `Perplexity` would compute the loss again.)"""

    def compute(self) -> Tensor:
        """Return the perplexity, a float32 scalar."""
        return super().compute().exp()


class TextSamples(Callback):
    """Generates a text after each validation, and appends it to ``written.txt``.

    Args:
        dirpath: folder of the file.
        prompt: the beginning of the text; an empty one begins a document.
    """

    def __init__(self, dirpath: str, prompt: str = "") -> None:
        self.path = Path(dirpath) / "written.txt"
        self.prompt = prompt

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Generate a text on all processes, because each may hold a shard of the weights. The first one writes it."""
        assert isinstance(pl_module, LanguageModel)
        if trainer.sanity_checking:
            return
        text = self.prompt + pl_module.write(self.prompt, seed=pl_module.sample_seed)
        if trainer.is_global_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{'-' * 80}\nafter {trainer.global_step} steps:\n{text}\n")


class TextWriter(BasePredictionWriter):
    """Writes the predictions into ``samples.txt`` and prints them.

    With several processes, each writes a separate file, ``samples_0.txt`` and so on.

    Args:
        dirpath: folder of the file.
    """

    def __init__(self, dirpath: str) -> None:
        super().__init__(write_interval="batch")
        self.path = Path(dirpath) / "samples.txt"

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin a new file."""
        if trainer.world_size > 1:
            self.path = self.path.with_name(f"samples_{trainer.global_rank}.txt")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("", encoding="utf-8")

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Sequence[str] | Tensor,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Append the texts of a batch, or a classifier's probabilities, separated by lines of dashes."""
        with self.path.open("a", encoding="utf-8") as file:
            for result in prediction:
                text = result if isinstance(result, str) else " ".join(f"{share:.4f}" for share in result)
                separator = "\n" + "-" * 80 + "\n" if file.tell() else ""
                file.write(f"{separator}{text}\n")
                print(printable(text))


def printable(text: str) -> str:
    """Return ``text`` with "?" for control characters and for characters that the terminal cannot encode."""
    shown = "".join(char if char.isprintable() or char == "\n" else "?" for char in text)
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, errors="replace").decode(encoding)
