"""A small GPT that reads and writes bytes."""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from recipes.data.text import END, NO_TARGET, VOCABULARY
from recipes.schedules import with_schedule

INIT_STD = 0.02  # of the weights at the start, as in GPT-2


class GPT(nn.Module):
    """A decoder-only transformer: learned positions, and normalisation before each layer, as in GPT-2.

    Args:
        vocabulary: number of tokens.
        context: the longest sequence.
        width: size of the hidden vectors.
        heads: of the attention; they share the width.
        layers: number of blocks.
        dropout: probability that a value is set to zero in training: of embeddings, attention and residuals.
        tie_weights: let the output layer use the token embedding's weights.

    Raises:
        ValueError: ``width`` is no multiple of ``heads``.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        *,
        width: int,
        heads: int,
        layers: int,
        dropout: float = 0.0,
        tie_weights: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width is {width} and heads is {heads}, expected a width that is a multiple of heads.")
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialise()
        if tie_weights:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at each place, of shape (batch, length, vocabulary).

        Args:
            tokens: int64, shape (batch, length), with a length of at most ``context``.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.token(tokens) + self.position(positions))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    def _initialise(self) -> None:
        """As GPT-2: normal weights, and smaller ones where a layer adds to the residual stream."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim >= 2:
                adds = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=INIT_STD / math.sqrt(2 * len(self.blocks)) if adds else INIT_STD)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added to its input.

    Args:
        width: size of the hidden vectors.
        heads: of the attention.
        dropout: probability that a value is set to zero in training.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """From and to shape (batch, length, width)."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class CausalSelfAttention(nn.Module):
    """Every place looks at itself and at those before it, by torch's ``scaled_dot_product_attention``.

    Args:
        width: size of the hidden vectors.
        heads: that share the width.
        dropout: probability that an attention weight, or an output, is set to zero in training.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.out_dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """From and to shape (batch, length, width)."""
        batch, length, width = hidden.shape
        split = self.qkv(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width of a head)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        return self.out_dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


class LanguageModel(L.LightningModule):
    """Trains a `GPT` on bytes, to predict the next one.

    A batch is ``(tokens, targets)``, both int64 of shape (batch, length); places whose target is -100 do not count. The
    loss is the mean over those that do, and ``training_step`` returns their number as the batch's weight: with
    ``accumulate_grad_batches`` the update is that of one big batch, however many targets each part has.

    Logged are ``train_loss`` at every step, ``val_loss`` and ``test_loss`` over an epoch, in nats per byte; and over an
    epoch ``train_bpc``, ``val_bpc`` and ``test_bpc``: bits per character, which are the sum of all bits over the number
    of characters (a character beyond ASCII has several bytes; the end of a document counts as one).

    Args:
        optimizer: called with parameter groups and returns the optimizer, such as
            ``functools.partial(torch.optim.AdamW, lr=1e-3)``; in a config, ``_partial_: true``. Its ``weight_decay`` is
            for matrices: biases and normalisations have none.
        scheduler: called with the optimizer and the number of optimizer steps of the run, returns a schedule
            that is stepped after every optimizer step (see `recipes.schedules`). None: the rate stays.
        context: tokens that the model sees at most.
        width: size of the hidden vectors.
        heads: of the attention; they share the width.
        layers: number of blocks.
        dropout: probability that a value is set to zero in training.
        tie_weights: let the output layer use the token embedding's weights.
        sample_length: bytes that `predict_step` writes.
        temperature: of what is written: below 1 likely bytes become likelier; 0 takes the likeliest.
        sample_seed: of what is written, and of nothing else.
    """

    def __init__(
        self,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        scheduler: Callable[[Optimizer, int], LRScheduler] | None = None,
        *,
        context: int,
        width: int = 96,
        heads: int = 3,
        layers: int = 3,
        dropout: float = 0.0,
        tie_weights: bool = False,
        sample_length: int = 500,
        temperature: float = 0.7,
        sample_seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        self.net = GPT(
            VOCABULARY, context, width=width, heads=heads, layers=layers, dropout=dropout, tie_weights=tie_weights
        )
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.sample_length = sample_length
        self.temperature = temperature
        self.sample_seed = sample_seed
        for name in ("train_bpc", "val_loss", "val_bpc", "test_loss", "test_bpc"):
            setattr(self, name, Ratio())

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte, of shape (batch, length, 256)."""
        return self.net(tokens)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The mean loss of a batch, a scalar, and the number of targets that it is the mean of."""
        nats, count, characters = self._count(batch)
        loss = nats / count
        self.log("train_loss", loss, prog_bar=True)
        self._log_ratio("train_bpc", nats.detach() / math.log(2), characters)
        return {"loss": loss, "weight": count}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_bpc``."""
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``test_loss`` and ``test_bpc``."""
        self._evaluate("test", batch)

    def predict_step(self, batch: Sequence[str], batch_idx: int) -> list[str]:
        """A continuation of each prompt, with the prompt in front."""
        return [prompt + self.write(prompt, seed=self.sample_seed + batch_idx) for prompt in batch]

    @torch.no_grad()
    def write(self, prompt: str = "", *, seed: int = 0) -> str:
        """What the model writes after ``prompt``: ``sample_length`` bytes, or fewer where a document ends.

        Args:
            prompt: what it continues; an empty one begins a document.
            seed: of the choice. No global random state is touched.
        """
        draw = torch.Generator(self.device).manual_seed(seed)
        stream = [END, *prompt.encode()]
        start = len(stream)
        for _ in range(self.sample_length):
            tokens = torch.tensor([stream[-self.net.context :]], device=self.device)
            logits = self(tokens)[0, -1].float()
            if self.temperature > 0:
                choice = torch.multinomial((logits / self.temperature).softmax(0), 1, generator=draw)
            else:
                choice = logits.argmax()
            stream.append(int(choice))  # waits for the device: the next byte depends on it
            if stream[-1] == END:
                stream.pop()
                break
        return bytes(stream[start:]).decode(errors="replace")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer, with weight decay on matrices alone, and the schedule, if there is one."""
        parameters = list(self.net.parameters())  # tied weights once
        groups = [
            {"params": [parameter for parameter in parameters if parameter.ndim >= 2]},
            {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
        ]
        return with_schedule(self.make_optimizer(groups), self.make_scheduler, self)

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        nats, count, characters = self._count(batch)
        self._log_ratio(f"{stage}_loss", nats, count)
        self._log_ratio(f"{stage}_bpc", nats / math.log(2), characters)

    def _count(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The sum of the losses of all targets, in nats; how many these are; and how many characters."""
        tokens, targets = batch
        logits = self(tokens).flatten(0, 1)
        nats = F.cross_entropy(logits, targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
        counts = targets != NO_TARGET
        # In UTF-8 the bytes after a character's first are those that begin with the bits 10.
        characters = counts & (targets & 0b1100_0000 != 0b1000_0000)
        return nats, counts.sum(), characters.sum()

    def _log_ratio(self, name: str, amount: Tensor, count: Tensor) -> None:
        metric = getattr(self, name)
        metric.update(amount, count)
        self.log(name, metric, on_step=False, on_epoch=True, prog_bar=True)


class Ratio(Metric):
    """All amounts over all counts, also over processes.

    (torchmetrics' `MeanMetric` would look for NaN, for which a GPU stalls at every batch; and where it is told not to,
    ``nan_strategy="disable"``, torchmetrics 1.9 ignores the weights.)
    """

    full_state_update = False
    amount: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("amount", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, amount: Tensor, count: Tensor) -> None:
        """Add an amount, and what it is for; both scalars."""
        self.amount += amount
        self.count += count

    def compute(self) -> Tensor:
        """The ratio, a float32 scalar."""
        return self.amount / self.count


class TextWriter(BasePredictionWriter):
    """Writes what ``predict`` has made into ``samples.txt``, and to the terminal.

    Of several processes each writes a file of its own, ``samples_0.txt`` and so on.

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
        prediction: Sequence[str],
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Append the texts of a batch, with a line of dashes between two of them."""
        with self.path.open("a", encoding="utf-8") as file:
            for text in prediction:
                separator = "\n" + "-" * 80 + "\n" if file.tell() else ""
                file.write(f"{separator}{text}\n")
                print(printable(text))


def printable(text: str) -> str:
    """``text`` with "?" for what a terminal would obey, or cannot show: an untrained model writes any bytes."""
    shown = "".join(char if char.isprintable() or char == "\n" else "?" for char in text)
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, errors="replace").decode(encoding)
