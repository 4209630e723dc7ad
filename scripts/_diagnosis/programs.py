"""Broken and healthy training programs, of the kinds that people report publicly.

A program is a `LightningModule` with the batches it trains on and the arguments of its Trainer. Its base class names
the expected verdict. `PROGRAMS` has all of them by name.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

BATCHES, SIZE, WIDTH, CLASSES = 12, 8, 12, 4
EPOCHS = 6

PROGRAMS: dict[str, type[Program]] = {}


class Program(LightningModule):
    """A small regression that learns; programs override the parts that break.

    Args:
        lr: learning rate. Default: the program's.
    """

    verdict: ClassVar[str]
    """One of data, model, forward, backward, underflow, weights, divergence, healthy."""
    precision: ClassVar[str] = "32-true"
    scaling: ClassVar[dict[str, Any]] = {}
    """Arguments of `MixedPrecision`."""
    arguments: ClassVar[dict[str, Any]] = {}
    """Arguments of the Trainer."""
    lr: ClassVar[float] = 0.05
    optimizer: ClassVar[Any] = torch.optim.SGD
    is_healthy_on_gpu: ClassVar[bool] = False
    """Whether autocast computes the operation in float32 on a GPU, so that it does not overflow there."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__doc__" in vars(cls) and cls.__doc__:
            PROGRAMS[cls.__name__] = cls

    def __init__(self, lr: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rate = type(self).lr if lr is None else lr
        self.build()

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    @classmethod
    def batches(cls) -> list[Any]:
        draw = torch.Generator().manual_seed(1)
        truth = torch.randn(WIDTH, CLASSES, generator=draw) / WIDTH**0.5
        xs = [torch.randn(SIZE, WIDTH, generator=draw) for _ in range(BATCHES)]
        return cls.change([[x, torch.tanh(x @ truth)] for x in xs])

    @classmethod
    def change(cls, batches: list[Any]) -> list[Any]:
        return batches

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.mse_loss(self(x), y)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=self.rate)


class Classifier(Program):
    @classmethod
    def change(cls, batches: list[Any]) -> list[Any]:
        return [[x, y.argmax(dim=1)] for x, y in batches]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(x), y)


class Data(Program):
    verdict = "data"


class Model(Program):
    verdict = "model"


class Forward(Program):
    verdict = "forward"
    precision = "16-mixed"


class Backward(Program):
    verdict = "backward"
    precision = "16-mixed"


class Underflow(Program):
    verdict = "underflow"
    precision = "16-mixed"


class Weights(Program):
    verdict = "weights"


class Divergence(Program):
    verdict = "divergence"


class Healthy(Program):
    verdict = "healthy"


def masks(batches: list[Any], empty: int = 5) -> list[Any]:
    """Add a mask of samples to each batch. The mask of batch ``empty`` selects no sample."""
    return [[x, y, (torch.arange(SIZE) % 3 > 0).float() * (index != empty)] for index, (x, y) in enumerate(batches)]


# --- data -----------------------------------------------------------------------------------------------------------


class NanSample16(Data):
    """One sample is NaN."""

    precision = "16-mixed"

    @classmethod
    def change(cls, batches):
        batches[4][0][3, 2] = math.nan
        return batches


class NanSample32(NanSample16):
    """One sample is NaN, in float32."""

    precision = "32-true"


class NanSampleBf16(NanSample16):
    """One sample is NaN, in bfloat16 with Adam."""

    precision = "bf16-mixed"
    optimizer = torch.optim.Adam
    lr = 0.005


class InfTarget(Data):
    """A target is infinite."""

    precision = "bf16-mixed"

    @classmethod
    def change(cls, batches):
        batches[7][1][0, 1] = math.inf
        return batches


class NanTable(Data):
    """Rows of a table have missing values; batches are dicts."""

    @classmethod
    def change(cls, batches):
        batches[2][0][1, :4] = math.nan
        batches[2][0][6, 5] = math.nan
        return [{"features": x, "target": y, "id": [str(i) for i in range(len(x))]} for x, y in batches]

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch["features"]), batch["target"])


class NanBatch(Data):
    """A whole batch is NaN, as after a division by the standard deviation of constant images."""

    precision = "16-mixed"

    @classmethod
    def change(cls, batches):
        batches[3][0].fill_(math.nan)
        return batches


class NanAccumulated(Data):
    """One NaN sample in an accumulation window, with BatchNorm."""

    arguments = {"accumulate_grad_batches": 3}

    def build(self):
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES))

    @classmethod
    def change(cls, batches):
        batches[4][0][3, 2] = math.nan
        return batches


class LabelTooLarge(Classifier, Data):
    """A label is equal to the number of classes."""

    @classmethod
    def change(cls, batches):
        batches = super().change(batches)
        batches[5][1][2] = CLASSES
        return batches


class LabelNegative(Classifier, Data):
    """Missing labels are -1, which is not the ignored index."""

    precision = "16-mixed"

    @classmethod
    def change(cls, batches):
        batches = super().change(batches)
        batches[1][1][0] = -1
        return batches


class TokenTooLarge(Data):
    """A token is not in the vocabulary of the embedding."""

    def build(self):
        self.embedding = nn.Embedding(50, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    @classmethod
    def change(cls, batches):
        draw = torch.Generator().manual_seed(2)
        changed = [[torch.randint(50, (SIZE, 5), generator=draw), y] for _, y in batches]
        changed[3][0][6, 1] = 50
        return changed

    def forward(self, x):
        return self.head(self.embedding(x).mean(dim=1))


# --- model ----------------------------------------------------------------------------------------------------------


class EmptyMask32(Model):
    """The mask of a loss is empty: 0 / 0."""

    @classmethod
    def change(cls, batches):
        return masks(batches)

    def training_step(self, batch, batch_idx):
        x, y, mask = batch
        losses = (self(x) - y).pow(2).mean(dim=1)
        return (losses * mask).sum() / mask.sum()


class EmptyMask16(EmptyMask32):
    """The mask of a loss is empty, in float16."""

    precision = "16-mixed"


class EmptyMaskOfHalf(EmptyMask16):
    """The mean over a mask without samples, of inputs in float16."""

    @classmethod
    def change(cls, batches):
        return [[x.half(), *rest] for x, *rest in super().change(batches)]


class EmptySelection(EmptyMask32):
    """A boolean mask selects nothing, and the mean squared error of nothing is NaN."""

    def training_step(self, batch, batch_idx):
        x, y, mask = batch
        chosen = mask.bool()
        return F.mse_loss(self(x)[chosen], y[chosen])


class EmptyMaskLast(EmptyMask32):
    """A boolean mask selects nothing, and the mean of nothing is NaN."""

    precision = "bf16-mixed"

    def training_step(self, batch, batch_idx):
        x, y, mask = batch
        losses = (self(x) - y).pow(2).mean(dim=1)
        return losses[mask.bool()].mean()


class LogOfZero(Model):
    """A target probability is 0, in p * log(p)."""

    @classmethod
    def change(cls, batches):
        changed = [[x, y.softmax(dim=1)] for x, y in batches]
        changed[6][1][2] = torch.tensor([1.0, 0.0, 0.0, 0.0])
        return changed

    def training_step(self, batch, batch_idx):
        x, p = batch
        log_q = self(x).log_softmax(dim=1)
        return (p * (torch.log(p) - log_q)).sum(dim=1).mean()


class LogOfZero16(LogOfZero):
    """A target probability is 0, in float16."""

    precision = "16-mixed"


class StdOfOne(Model):
    """The last batch has one sample, and its standard deviation is NaN."""

    precision = "16-mixed"

    @classmethod
    def change(cls, batches):
        batches[-1] = [part[:1] for part in batches[-1]]
        return batches

    def forward(self, x):
        h = self.net[0](x)
        h = (h - h.mean(dim=0)) / (h.std(dim=0) + 1e-5)
        return self.net[2](h.relu())


class StdOfOne32(StdOfOne):
    """The last batch has one sample, in float32."""

    precision = "32-true"


class SoftmaxOfNothing(Model):
    """Attention with a row of the mask that leaves no key."""

    def build(self):
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    @classmethod
    def change(cls, batches):
        draw = torch.Generator().manual_seed(3)
        changed = []
        for index, (x, y) in enumerate(batches):
            keep = torch.rand(SIZE, 6, generator=draw) > 0.3
            keep[:, 0] = True
            if index == 4:
                keep[5] = False
            changed.append([torch.randn(SIZE, 6, WIDTH, generator=draw) + x[:, None], y, keep])
        return changed

    def training_step(self, batch, batch_idx):
        x, y, keep = batch
        scores = self.query(x) @ self.key(x).transpose(1, 2) / WIDTH**0.5
        scores = scores.masked_fill(~keep[:, None, :], -math.inf)
        h = scores.softmax(dim=-1) @ self.value(x)
        return F.mse_loss(self.head(h.mean(dim=1)), y)


class LogSoftmaxOfNothing(Classifier, Model):
    """Log-softmax of a row that is -inf everywhere."""

    precision = "bf16-mixed"

    @classmethod
    def change(cls, batches):
        return [
            [x, y, torch.ones(SIZE, CLASSES).bool() if index != 8 else torch.zeros(SIZE, CLASSES).bool()]
            for index, (x, y) in enumerate(super().change(batches))
        ]

    def training_step(self, batch, batch_idx):
        x, y, allowed = batch
        logits = self(x).masked_fill(~allowed, float("-inf"))
        return -logits.log_softmax(dim=1).gather(1, y[:, None]).mean()


class AllIgnored32(Classifier, Model):
    """All labels of a batch are ignored, and their mean is NaN."""

    @classmethod
    def change(cls, batches):
        batches = super().change(batches)
        batches[5][1].fill_(-100)
        return batches


class AllIgnored16(AllIgnored32):
    """All labels of a batch are ignored, in float16."""

    precision = "16-mixed"


class RootOfZero(Model):
    """A distance written as a root: its gradient at 0 is infinite."""

    @classmethod
    def change(cls, batches):
        batches[3][0][:] = 0.0
        return batches

    def build(self):
        self.net = nn.Linear(WIDTH, CLASSES, bias=False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        length = self(x).pow(2).sum(dim=1).sqrt()
        return F.mse_loss(length, y.norm(dim=1))


class RootOfZero16(RootOfZero):
    """A distance written as a root, in float16."""

    precision = "16-mixed"


class RootOfLearned(Model):
    """The root of a variance that training brings to 0: gradients are finite with the first weights, and NaN later."""

    def training_step(self, batch, batch_idx):
        out = self(batch[0])
        spread = out.var(dim=0) - 0.01
        roots = torch.where(spread > 0, spread.sqrt(), 0.0)
        return roots.sum() + 0.1 * F.mse_loss(out, batch[1])


class WhereNan(Model):
    """The branch that `torch.where` does not take is NaN in the backward pass."""

    precision = "bf16-mixed"

    def build(self):
        self.net = nn.Linear(WIDTH, CLASSES)

    @classmethod
    def change(cls, batches):
        return [[x if index > 1 else x.abs(), y] for index, (x, y) in enumerate(batches)]

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self(x)
        h = torch.where(h > 0, torch.sqrt(h), h)
        return F.mse_loss(h, y)


class CosineOfZero(Model):
    """The cosine of zero vectors, by hand."""

    precision = "16-mixed"

    @classmethod
    def change(cls, batches):
        batches[4][1][2] = 0.0
        return batches

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self(x)
        cosine = (h * y).sum(dim=1) / (h.norm(dim=1) * y.norm(dim=1))
        return 1 - cosine.mean()


class ExpOfLarge(Model):
    """An exponential overflows float32."""

    @classmethod
    def change(cls, batches):
        batches[6][0][2] *= 3000.0
        return batches

    def training_step(self, batch, batch_idx):
        x, y = batch
        rate = torch.exp(self(x))
        return (rate - y * self(x)).mean()


class BceByHand(Classifier, Model):
    """A logarithm of a sigmoid that is exactly 0 or 1."""

    @classmethod
    def change(cls, batches):
        batches = super().change(batches)
        batches[7][0][1] *= 500.0
        return batches

    def training_step(self, batch, batch_idx):
        x, y = batch
        p = torch.sigmoid(self(x))
        t = F.one_hot(y, CLASSES)
        return -(t * torch.log(p) + (1 - t) * torch.log(1 - p)).mean()


class LogitOfOne(Model):
    """The logit of a target that is 1."""

    @classmethod
    def change(cls, batches):
        changed = [[x, torch.sigmoid(y)] for x, y in batches]
        changed[4][1][3, 1] = 1.0
        return changed

    def training_step(self, batch, batch_idx):
        x, p = batch
        return F.mse_loss(self(x), torch.logit(p))


class RootOfNegative(Model):
    """A root of a number that may be negative."""

    precision = "bf16-mixed"

    @classmethod
    def change(cls, batches):
        for index, (x, _) in enumerate(batches):
            x[:, 0] = x[:, 0].abs() * (-1 if index == 9 else 1)
        return batches

    def training_step(self, batch, batch_idx):
        x, y = batch
        scale = x[:, :1] ** 0.5
        return F.mse_loss(self(x) * scale, y)


# --- precision, forward ---------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) * self.scale
        return scores.softmax(dim=-1) @ self.value(x)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.attention(x))
        return x + self.mlp(x)


class UnscaledAttention(Forward):
    """Attention without scaling, on measurements without normalization."""

    def build(self):
        self.scales = nn.Parameter(torch.randn(WIDTH, 16))
        self.blocks = nn.ModuleList([Block(16), Block(16)])
        self.head = nn.Linear(16, CLASSES)

    @classmethod
    def change(cls, batches):
        return [[x * 300.0, y] for x, y in batches]

    def forward(self, x):
        x = x[:, :, None] * self.scales
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x / ((x * x).sum(dim=-1, keepdim=True) + 1e-5)


class OwnNorm(Forward):
    """A norm by hand squares numbers above 256."""

    def build(self):
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), Squares(), nn.Linear(32, CLASSES))

    @classmethod
    def change(cls, batches):
        return [[x * 2000.0, y] for x, y in batches]

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self(x)
        return F.mse_loss(h, y) + 0 * h.sum()


class Total(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(dim=1) / x.shape[1]


class LongSum(Forward):
    """A sum over a long axis before the division."""

    is_healthy_on_gpu = True

    def build(self):
        self.embed = nn.Linear(1, 8)
        self.pool = Total()
        self.head = nn.Linear(8, CLASSES)

    @classmethod
    def change(cls, batches):
        return [[x.mean(dim=1).abs()[:, None, None].expand(-1, 3000, 1) * 200 + 80, y] for x, y in batches]

    lr = 1e-5

    def forward(self, x):
        return self.head(self.pool(self.embed(x)))


class MaskFill(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / WIDTH**0.5
        scores = scores.masked_fill(~keep[:, None, :], -1e9)
        return scores.softmax(dim=-1) @ self.value(x)


class MaskOfBillions(SoftmaxOfNothing, Forward):
    """A mask is filled with -1e9, which float16 cannot represent."""

    precision = "16-mixed"
    verdict = "forward"

    def build(self):
        self.attention = MaskFill()
        self.head = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch, batch_idx):
        x, y, keep = batch
        return F.mse_loss(self.head(self.attention(x, keep).mean(dim=1)), y)


class CastInCode(Forward):
    """The code casts to float16, and sums many numbers."""

    is_healthy_on_gpu = True

    lr = 1e-4

    def build(self):
        self.net, self.head = nn.Linear(WIDTH, 2048), nn.Linear(2048, CLASSES)

    def forward(self, x):
        summed = (self.net(x).abs() * 60).half().cumsum(dim=1)
        return self.head(summed / 65536)


class RawPixels(Forward):
    """Images of 16-bit pixels without normalization."""

    lr = 1e-11

    def build(self):
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4, CLASSES)

    @classmethod
    def change(cls, batches):
        draw = torch.Generator().manual_seed(4)
        return [[torch.randint(65536, (SIZE, 1, 8, 8), generator=draw).float(), y] for _, y in batches]

    def forward(self, x):
        return self.head(self.conv(x).relu().mean(dim=(2, 3)))


class LargeActivations(Forward):
    """Two layers make activations larger than 65504, and a norm makes them small again."""

    def build(self):
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, CLASSES)
        )
        with torch.no_grad():
            self.net[0].weight.mul_(3000.0)
            self.net[1].weight.mul_(3000.0)


class Normalize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).sum(dim=-1, keepdim=True).sqrt() + 1e-8)


class SmallEps(Forward):
    """An epsilon of 1e-8 is 0 in float16, and 0 / 0 is NaN."""

    is_healthy_on_gpu = True

    def build(self):
        self.embed = nn.Linear(WIDTH, 16, bias=False)
        self.norm = Normalize()
        self.head = nn.Linear(16, CLASSES)

    @classmethod
    def change(cls, batches):
        for x, _ in batches[2::3]:
            x[1] *= 1e-5
        return batches

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))


class VarianceByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mean, square = x.mean(dim=-1, keepdim=True), (x * x).mean(dim=-1, keepdim=True)
        return (x - mean) / (square - mean * mean + 1e-3).sqrt()


class VarianceBySquares(Forward):
    """A variance as a difference of squares is negative in float16."""

    def build(self):
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), VarianceByHand(), nn.Linear(32, CLASSES))
        with torch.no_grad():
            self.net[0].bias.fill_(60.0)


class SoftmaxByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        e = torch.exp(x)
        return e / e.sum(dim=-1, keepdim=True)


class ExpInHalf(Forward):
    """A softmax by hand: exp(12) is too large for float16."""

    is_healthy_on_gpu = True

    def build(self):
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), SoftmaxByHand(), nn.Linear(16, CLASSES))
        with torch.no_grad():
            self.net[0].weight.mul_(10.0)


class SquaredPenalty(Forward):
    """A penalty squares activations in training_step."""

    def build(self):
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU())
        self.head = nn.Linear(32, CLASSES)

    @classmethod
    def change(cls, batches):
        return [[x * 400.0, y] for x, y in batches]

    lr = 1e-6

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.body(x)
        return F.mse_loss(self.head(h), y) + 1e-7 * (h * h).mean()


class BceOnProbabilities(Classifier, Forward):
    """A logarithm of a sigmoid that float16 rounds to 1."""

    lr = 0.01

    def build(self):
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))
        with torch.no_grad():
            self.net[2].weight.mul_(16.0)

    def training_step(self, batch, batch_idx):
        x, y = batch
        p = torch.sigmoid(self(x))
        t = F.one_hot(y, CLASSES)
        return -(t * torch.log(p) + (1 - t) * torch.log(1 - p)).mean()


# --- precision, backward --------------------------------------------------------------------------------------------


class HugeLoss(Backward):
    """A loss in other units: its gradients are too large at every scale."""

    lr = 1e-11

    def training_step(self, batch, batch_idx):
        x, y = batch
        return 1e9 * F.mse_loss(self(x).float(), y)


class TwoLosses(Backward):
    """Two losses of very different sizes: no scale fits both."""

    lr = 1e-9

    def build(self):
        self.first = nn.Linear(WIDTH, CLASSES)
        self.second = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch, batch_idx):
        x, y = batch
        large = 1e7 * F.mse_loss(self.first(x).float(), y)
        return large + 1e-3 * F.mse_loss(self.second(x).float(), y)


class _Amplify(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1e7


class Amplifier(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Amplify.apply(x)


class AmplifiedGradient(Backward):
    """A layer multiplies gradients by ten million in the backward pass."""

    lr = 1e-9

    def build(self):
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), Amplifier(), nn.Linear(32, CLASSES))


class SmallDivisor(Backward):
    """A temperature of 1e-6: gradients are a million times as large."""

    lr = 1e-13

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self(x).float() / 1e-6, y / 1e-6)


# --- underflow ------------------------------------------------------------------------------------------------------


class NoScaling(Underflow):
    """Loss scaling is effectively switched off."""

    scaling = {"init_scale": 1.0, "growth_interval": 100_000}
    lr = 100.0

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * 1e-4


class TinyLoss(Underflow):
    """A loss of 1e-9 is too small for the largest usual scale."""

    lr = 1e7

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self(x).float(), y) * 1e-9


class LowScale(Underflow):
    """A low scale, and a mean over many numbers."""

    scaling = {"init_scale": 2.0, "max_scale": 4.0}
    lr = 5.0

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self(x).float(), y) * 1e-3


class TinyHead(Underflow):
    """Gradients become tiny inside of the model."""

    lr = 500.0
    scaling = {"init_scale": 16.0}

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self(x) * 1e-3, y * 1e-3).float()


# --- weights --------------------------------------------------------------------------------------------------------


class BrokenFile32(Weights):
    """A pretrained file has a NaN."""

    def build(self):
        super().build()
        with torch.no_grad():
            self.net[2].weight[1, 3] = math.nan


class BrokenFile16(BrokenFile32):
    """A pretrained file has a NaN, in float16."""

    precision = "16-mixed"


class BrokenEmbedding(Weights):
    """A row of an embedding is infinite."""

    precision = "bf16-mixed"

    def build(self):
        self.embedding = nn.Embedding(50, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        with torch.no_grad():
            self.embedding.weight[7] = math.inf

    @classmethod
    def change(cls, batches):
        draw = torch.Generator().manual_seed(2)
        return [[torch.randint(50, (SIZE, 5), generator=draw), y] for _, y in batches]

    def forward(self, x):
        return self.head(self.embedding(x).mean(dim=1))


class ZeroDividedInit(Weights):
    """An initialization divides by zero."""

    precision = "bf16-mixed"

    def build(self):
        super().build()
        with torch.no_grad():
            weight = self.net[0].weight
            weight.copy_(weight / (weight.std() - weight.std()))


# --- divergence -----------------------------------------------------------------------------------------------------


class RateTooHigh32(Divergence):
    """A learning rate that is too high, with SGD."""

    lr = 20.0

    def build(self):
        self.net = nn.Linear(WIDTH, CLASSES)


class RateTooHigh16(RateTooHigh32):
    """A learning rate that is too high, in float16."""

    precision = "16-mixed"


class RateInfinite(Divergence):
    """A learning rate of inf."""

    precision = "16-mixed"
    lr = math.inf


class RateTooHighAdam(Classifier, Divergence):
    """A learning rate that is too high, with Adam."""

    optimizer = torch.optim.Adam
    lr = 30.0

    def build(self):
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES))


class RateTooHighAdam16(RateTooHighAdam):
    """A learning rate that is too high, with Adam, in float16."""

    precision = "16-mixed"


class ExplodingRnn(Divergence):
    """A recurrent network with exploding gradients."""

    precision = "16-mixed"
    lr = 5.0

    def build(self):
        self.recurrent = nn.Linear(16, 16)
        self.embed = nn.Linear(1, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        h = self.embed(x[:, :1])
        for step in range(1, x.shape[1]):
            h = (self.recurrent(h) + self.embed(x[:, step : step + 1])).relu()
        return self.head(h)


class RawBytes(Divergence):
    """Inputs from 0 to 255 without normalization."""

    precision = "bf16-mixed"
    lr = 0.05

    @classmethod
    def change(cls, batches):
        return [[(x * 64 + 128).clamp(0, 255), y] for x, y in batches]


class Momentum(Divergence):
    """Momentum with a learning rate that is too high, in float16."""

    precision = "16-mixed"
    lr = 1.0

    @classmethod
    def change(cls, batches):
        return [[x * 4, y] for x, y in batches]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.95)


class GrowingRate(Divergence):
    """A schedule that doubles the learning rate every third step."""

    lr = 0.01

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=2.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# --- healthy --------------------------------------------------------------------------------------------------------


class Settling(Healthy):
    """The scale begins far too high."""

    precision = "16-mixed"
    scaling = {"init_scale": 2.0**40}


class Outlier(Healthy):
    """One batch has a loss a hundred times as large."""

    lr = 0.01

    @classmethod
    def change(cls, batches):
        batches[5][1][:] *= 12
        return batches


class InfiniteMask(SoftmaxOfNothing, Healthy):
    """A mask of -inf comes with each batch."""

    precision = "16-mixed"
    verdict = "healthy"
    scaling = {"init_scale": 2.0**30}

    @classmethod
    def change(cls, batches):
        changed = super().change(batches)
        for _, _, keep in changed:
            keep[:, 0] = True
        return [[x, y, torch.zeros(keep.shape).masked_fill(~keep, -math.inf)] for x, y, keep in changed]

    def training_step(self, batch, batch_idx):
        x, y, mask = batch
        scores = self.query(x) @ self.key(x).transpose(1, 2) / WIDTH**0.5 + mask[:, None, :]
        return F.mse_loss(self.head((scores.softmax(dim=-1) @ self.value(x)).mean(dim=1)), y)


class MissingValues(Healthy):
    """Missing values are NaN in the batch, and the model replaces them."""

    precision = "16-mixed"
    scaling = {"init_scale": 2.0**30}

    @classmethod
    def change(cls, batches):
        for x, _ in batches:
            x[::3, 1] = math.nan
        return batches

    def forward(self, x):
        return self.net(x.nan_to_num())


class SparseEmbedding(Healthy):
    """Almost all gradients of an embedding are 0."""

    precision = "16-mixed"
    lr = 0.5

    def build(self):
        self.embedding = nn.Embedding(5000, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    @classmethod
    def change(cls, batches):
        draw = torch.Generator().manual_seed(2)
        return [[torch.randint(5000, (SIZE, 5), generator=draw), y] for _, y in batches]

    def forward(self, x):
        return self.head(self.embedding(x).mean(dim=1))


class Gan(Healthy):
    """A generator's loss grows while its critic learns."""

    def build(self):
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        first, second = self.optimizers()
        fake = self.generator(torch.randn(len(x), 4))
        loss = F.softplus(-self.critic(x + 4)).mean() + F.softplus(self.critic(fake.detach())).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        first.zero_grad()
        self.manual_backward(F.softplus(-self.critic(fake)).mean())
        first.step()

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-4),
            torch.optim.Adam(self.critic.parameters(), lr=5e-3),
        ]


class Wasserstein(Healthy):
    """A critic's loss falls without bound."""

    lr = 0.1

    def training_step(self, batch, batch_idx):
        x, _ = batch
        return self(x).mean() - self(x + 3).mean()


class LargeUnits(Healthy):
    """A loss of ten thousand, in float16."""

    precision = "16-mixed"
    lr = 1e-6

    def training_step(self, batch, batch_idx):
        x, y = batch
        return 1e4 * F.mse_loss(self(x).float(), y)


class DeadUnits(Healthy):
    """Half of the units are dead: their gradients are 0."""

    precision = "16-mixed"

    def build(self):
        super().build()
        with torch.no_grad():
            self.net[0].bias[:16] = -100.0


class WarmUp(Healthy):
    """The weight of a part of the loss grows from 0 to 1."""

    def build(self):
        super().build()
        self.beta = 0.0

    def training_step(self, batch, batch_idx):
        self.beta = min(1.0, self.beta + 0.02)
        h = self(batch[0])
        return F.mse_loss(h, batch[1]) + self.beta * 0.2 * h.exp().mean()


class RareOverflow(Healthy):
    """One batch in twelve overflows, and its step is skipped."""

    precision = "16-mixed"

    @classmethod
    def change(cls, batches):
        return [[x, y, torch.tensor(30_000.0 if index == 8 else 1.0)] for index, (x, y) in enumerate(batches)]

    lr = 1e-3

    def training_step(self, batch, batch_idx):
        x, y, weight = batch
        return F.mse_loss(self(x).float(), y) * weight


class SomeIgnored(Classifier, Healthy):
    """Most labels are ignored."""

    precision = "16-mixed"

    @classmethod
    def change(cls, batches):
        batches = super().change(batches)
        for _, y in batches:
            y[1:] = -100
        return batches


class Plateau(Healthy):
    """A loss that falls, then stays."""

    precision = "bf16-mixed"
    optimizer = torch.optim.Adam
    lr = 0.02
