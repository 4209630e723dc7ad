"""A decoder-only transformer: learned or rotary positions, and normalization before each layer, as in GPT-2."""

import hashlib
import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

INIT_STD = 0.02  # standard deviation of the initial weights, as in GPT-2
ROTARY_BASE = 10_000.0  # base of the wavelengths of rotary positions (arXiv 2104.09864)

Positions = Literal["learned", "rotary"]


class GPT(nn.Module):
    """A decoder-only transformer with normalization before each layer, as in GPT-2.

    The initial weights depend only on the seed and on the names of the parameters (`init_weights`).

    Args:
        vocabulary: number of tokens.
        context: largest length of a sequence.
        width: size of the hidden vectors.
        heads: number of attention heads, which share the width.
        layers: number of blocks.
        dropout: probability that a value (of embeddings, attention or residuals) is set to zero in training.
        tie_weights: let the output layer use the token embedding's weights.
        positions: ``"learned"``: a vector for each position is added to the token's vector; ``"rotary"``: queries and
            keys are rotated by an angle that grows with the position.

    Raises:
        ValueError: ``width`` is not a multiple of ``heads``; ``positions`` is unknown; or positions are rotary and
            the width of a head is odd.
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
        positions: Positions = "learned",
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width is {width} and heads is {heads}, expected a width that is a multiple of heads.")
        if positions not in ("learned", "rotary"):
            raise ValueError(f"positions is {positions!r}, expected 'learned' or 'rotary'.")
        is_rotary = positions == "rotary"
        if is_rotary and (width // heads) % 2:
            raise ValueError(
                f"width is {width} and heads is {heads}, so a head is {width // heads} wide. Expected an even number:"
                " rotary positions rotate pairs of values."
            )
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = None if is_rotary else nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, is_rotary=is_rotary) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        # A tied weight has only one name, because code that copies parameters by name would untie two names.
        self.head = None if tie_weights else nn.Linear(width, vocabulary, bias=False)
        if not self.token.weight.is_meta:
            self.init_weights()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at each position, of shape (batch, length, vocabulary).

        Args:
            tokens: int64, shape (batch, length), with a length of at most ``context``.
        """
        hidden = self.token(tokens)
        if self.position is not None:
            hidden = hidden + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        hidden = self.dropout(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        return F.linear(hidden, self.token.weight) if self.head is None else self.head(hidden)

    @torch.no_grad()
    def init_weights(self, seed: int | None = None) -> None:
        """Initialize as GPT-2: normal weights, smaller ones in layers that add to the residual stream, and biases of 0.

        Each parameter is drawn on its device by a separate generator, with a seed that depends on ``seed`` and the
        parameter's name. So the weights are the same on any number of processes, sharded (DTensors) or not: a process
        draws each whole parameter, one after the other, and keeps its shard. No global random state is changed.

        Args:
            seed: the seed. Default: None, that of ``torch.manual_seed``.
        """
        seed = torch.initial_seed() if seed is None else seed
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            adds = name.endswith(("attention.out.weight", "mlp.2.weight"))
            std = INIT_STD / math.sqrt(2 * len(self.blocks)) if adds else INIT_STD
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            draw = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest, "little") >> 1)
            whole = torch.empty(parameter.shape, device=parameter.device, dtype=torch.float32)
            fill(parameter, whole.normal_(std=std, generator=draw))


def fill(parameter: Tensor, whole: Tensor) -> None:
    """Copy ``whole`` into a parameter, or this process's shard of it into a DTensor. Runs no collective."""
    if isinstance(parameter, DTensor):
        part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(part.to_local())
    else:
        parameter.copy_(whole)


class Block(nn.Module):
    """Attention and a two-layer perceptron. Each normalizes its input, and its output is added to the input.

    Args:
        width: size of the hidden vectors.
        heads: number of attention heads.
        dropout: probability that a value is set to zero in training.
        is_rotary: whether to rotate queries and keys by their position.
    """

    def __init__(self, width: int, heads: int, dropout: float, *, is_rotary: bool = False) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads, dropout, is_rotary=is_rotary)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``hidden`` of shape (batch, length, width) to a tensor of the same shape."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class CausalSelfAttention(nn.Module):
    """Attention of each position to itself and to earlier positions, by torch's ``scaled_dot_product_attention``.

    Args:
        width: size of the hidden vectors.
        heads: number of attention heads, which share the width.
        dropout: probability that an attention weight, or an output, is set to zero in training.
        is_rotary: whether to rotate queries and keys by their position.
    """

    def __init__(self, width: int, heads: int, dropout: float, *, is_rotary: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.is_rotary = is_rotary
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.out_dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``hidden`` of shape (batch, length, width) to a tensor of the same shape."""
        batch, length, width = hidden.shape
        split = self.qkv(hidden).view(batch, length, 3, self.heads, width // self.heads)
        split = split.permute(2, 0, 3, 1, 4)
        query, key, value = split  # each (batch, heads, length, width of a head)
        if self.is_rotary:
            query, key = rotate(split[:2])
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        return self.out_dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


def rotate(vectors: Tensor) -> Tensor:
    """Rotate each pair of values in ``vectors``, shape (..., length, width), by an angle that grows with the position.

    The product of a query and a key then depends only on the distance between their positions. The angles are computed
    in float32, whatever the vectors' dtype, and again in each call, so that no buffer has to be moved, saved or kept in
    float32.
    """
    length, width = vectors.shape[-2:]
    exponents = torch.arange(0, width, 2, device=vectors.device, dtype=torch.float32) / width
    places = torch.arange(length, device=vectors.device, dtype=torch.float32)
    angles = places[:, None] * ROTARY_BASE**-exponents
    cos, sin = angles.cos().to(vectors.dtype), angles.sin().to(vectors.dtype)
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
