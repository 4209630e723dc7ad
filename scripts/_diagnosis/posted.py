"""Programs as people post them when their training breaks: whole models with their usual losses."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _diagnosis.programs import Backward, Data, Divergence, Forward, Healthy, Model, Program, Underflow, Weights

BATCHES, SIZE, WIDTH, CLASSES = 12, 8, 12, 4


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- data -----------------------------------------------------------------------------------------------------------


class MissingSeries(Data):
    """A loss multiplies missing values of a time series by 0, and 0 * nan is nan."""

    def build(self):
        self.gru = nn.GRU(3, 16, batch_first=True)
        self.head = nn.Linear(16, 3)

    @classmethod
    def batches(cls):
        draw, batches = generator(), []
        for _ in range(BATCHES):
            series = torch.randn(SIZE, 11, 3, generator=draw).cumsum(dim=1) * 0.3
            series[torch.rand(series.shape, generator=draw) < 0.02] = math.nan
            batches.append([series])
        return batches

    def training_step(self, batch, batch_idx):
        (series,) = batch
        is_observed = ~series.isnan()
        states, _ = self.gru(series[:, :-1].nan_to_num())
        errors = (self.head(states) - series[:, 1:]) ** 2
        return (errors * is_observed[:, 1:]).sum() / is_observed[:, 1:].sum()


class LogOfPrice(Data):
    """A dataset takes the logarithm of a price, and one price is 0."""

    precision = "bf16-mixed"
    optimizer = torch.optim.AdamW
    lr = 1e-3

    @classmethod
    def change(cls, batches):
        for index, (x, _) in enumerate(batches):
            price = x.abs()
            if index in (3, 9):
                price[2, 5] = 0.0
            x.copy_(price.log())
        return batches


class CategoryTooLarge(Data):
    """A category of a table has no row in its embedding."""

    precision = "16-mixed"
    counts = (5, 7, 3)

    def build(self):
        self.embeddings = nn.ModuleList(nn.Embedding(count, 4) for count in self.counts)
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    @classmethod
    def batches(cls):
        draw, batches = generator(), []
        for index in range(BATCHES):
            categories = torch.stack([torch.randint(n, (SIZE,), generator=draw) for n in cls.counts], dim=1)
            if index == 9:
                categories[5, 1] = 7
            batches.append({"categories": categories, "target": torch.randn(SIZE, CLASSES, generator=draw)})
        return batches

    def training_step(self, batch, batch_idx):
        categories = batch["categories"]
        embedded = [embedding(categories[:, column]) for column, embedding in enumerate(self.embeddings)]
        return F.mse_loss(self.net(torch.cat(embedded, dim=1)), batch["target"])


class Observation(Data):
    """An observation of a policy is NaN, and torch.distributions raises an error."""

    lr = 0.2

    @classmethod
    def change(cls, batches):
        batches[7][0][2, 3] = math.nan
        return [{"observations": x, "actions": y.argmax(dim=1)} for x, y in batches]

    def training_step(self, batch, batch_idx):
        policy = torch.distributions.Categorical(logits=self(batch["observations"]), validate_args=True)
        return -policy.log_prob(batch["actions"]).mean()


# --- model ----------------------------------------------------------------------------------------------------------


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.out = nn.Conv2d(9, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.up(self.middle(self.down(x))), x], dim=1))


class GeneralizedDice(Model):
    """The weight of a class in the generalized Dice loss is 1 / 0 if a batch does not have the class."""

    precision = "16-mixed"
    optimizer = torch.optim.Adam
    lr = 0.01

    def build(self):
        self.net = UNet()

    @classmethod
    def batches(cls):
        draw, batches = generator(), []
        for index in range(BATCHES):
            mask = (torch.rand(SIZE, 1, 16, 16, generator=draw) > 0.7).float() * (index != 6)
            batches.append({"image": mask + 0.3 * torch.randn(mask.shape, generator=draw), "mask": mask})
        return batches

    def training_step(self, batch, batch_idx):
        p = self.net(batch["image"]).sigmoid()
        p = torch.cat([p, 1 - p], dim=1)
        target = torch.cat([batch["mask"], 1 - batch["mask"]], dim=1)
        weights = 1 / target.sum(dim=(0, 2, 3)) ** 2
        intersection = (weights * (p * target).sum(dim=(0, 2, 3))).sum()
        union = (weights * (p + target).sum(dim=(0, 2, 3))).sum()
        return 1 - 2 * intersection / union


class LanguageModel(Program):
    lr = 1.0

    def build(self):
        self.embedding = nn.Embedding(40, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 24, batch_first=True)
        self.head = nn.Linear(24, 40)

    @classmethod
    def batches(cls):
        draw = generator()
        starts = [torch.randint(1, 40, (SIZE, 1), generator=draw) for _ in range(BATCHES)]
        return cls.change([(start + torch.arange(9)) % 39 + 1 for start in starts])

    def training_step(self, batch, batch_idx):
        x, y = batch[:, :-1], batch[:, 1:]
        states, _ = self.lstm(self.embedding(x))
        losses = F.cross_entropy(self.head(states).flatten(0, 1), y.flatten(), ignore_index=0, reduction="none")
        count = (y != 0).sum()
        return losses.sum() / count


class OnlyPadding(LanguageModel, Model):
    """A batch that is only padding has no token to divide by."""

    verdict = "model"
    precision = "16-mixed"

    @classmethod
    def change(cls, batches):
        batches[7].zero_()
        return batches


class ContrastiveByHand(Model):
    """A contrastive loss divides by a temperature of 0.01 before the exponential."""

    lr = 0.01

    @classmethod
    def batches(cls):
        draw, batches = generator(), []
        for _ in range(BATCHES):
            x = torch.randn(SIZE, WIDTH, generator=draw)
            batches.append([x + 0.1 * torch.randn(x.shape, generator=draw) for _ in range(2)])
        return batches

    def training_step(self, batch, batch_idx):
        a, b = batch
        z = F.normalize(torch.cat([self(a), self(b)]), dim=1)
        similarity = torch.exp(z @ z.t() / 0.01)
        positive = torch.cat([similarity.diag(len(a)), similarity.diag(-len(a))])
        negative = (similarity * (1 - torch.eye(2 * len(a), device=a.device))).sum(dim=1)
        return -torch.log(positive / negative).mean()


class ContrastiveByHand16(ContrastiveByHand):
    """A contrastive loss with a temperature of 0.01, in float16."""

    precision = "16-mixed"


class DegenerateBoxes(Model):
    """The intersection over union of two boxes without an area."""

    precision = "bf16-mixed"
    lr = 0.01

    def build(self):
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 4))

    @classmethod
    def batches(cls):
        draw, batches = generator(), []
        for index in range(BATCHES):
            x, corner = torch.randn(SIZE, WIDTH, generator=draw), torch.rand(SIZE, 2, generator=draw)
            size = torch.rand(SIZE, 2, generator=draw) + 0.2
            if index == 3:
                size[4], x[4] = 0.0, -100 * x[4]
            batches.append([x, torch.cat([corner, corner + size], dim=1)])
        return batches

    def training_step(self, batch, batch_idx):
        x, target = batch
        p = self(x).float()
        p = torch.cat([p[:, :2], p[:, :2] + (p[:, 2:] + 0.5).relu()], dim=1)
        p = p + 0.3 * (target - p).detach()
        sides = (torch.min(p[:, 2:], target[:, 2:]) - torch.max(p[:, :2], target[:, :2])).clamp(min=0)
        overlap = sides[:, 0] * sides[:, 1]
        areas = [(box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1]) for box in (p, target)]
        iou = overlap / (areas[0] + areas[1] - overlap)
        return (1 - iou).mean()


class TargetTooLong(Model):
    """CTC has no path if a target is longer than its input, and the loss is infinite."""

    precision = "16-mixed"
    lr = 0.1

    def build(self):
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 10))

    @classmethod
    def batches(cls):
        draw, batches = generator(), []
        for index in range(BATCHES):
            x, y = torch.randn(SIZE, 12, 6, generator=draw), torch.randint(1, 10, (SIZE, 10), generator=draw)
            lengths, counts = torch.full((SIZE,), 12), torch.randint(2, 6, (SIZE,), generator=draw)
            if index == 4:
                lengths[2], counts[2] = 3, 10
            batches.append([x, y, lengths, counts])
        return batches

    def training_step(self, batch, batch_idx):
        x, y, lengths, counts = batch
        log_p = self.net(x).log_softmax(dim=-1).transpose(0, 1)
        return F.ctc_loss(log_p, y, lengths, counts)


class PolicyRatio(Model):
    """The ratio of two policies overflows, and inf * 0 is nan."""

    lr = 0.01

    @classmethod
    def batches(cls):
        draw, batches = generator(), []
        for index in range(BATCHES):
            batch = {
                "observations": torch.randn(SIZE, WIDTH, generator=draw),
                "actions": torch.randint(CLASSES, (SIZE,), generator=draw),
                "log_probs": -2 * torch.rand(SIZE, generator=draw),
                "advantages": torch.randn(SIZE, generator=draw),
            }
            if index == 5:
                batch["log_probs"][3], batch["advantages"][3] = -200.0, 0.0
            batches.append(batch)
        return batches

    def training_step(self, batch, batch_idx):
        policy = torch.distributions.Categorical(logits=self(batch["observations"]))
        ratio = (policy.log_prob(batch["actions"]) - batch["log_probs"]).exp()
        advantages = batch["advantages"]
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -gain.mean() - 0.01 * policy.entropy().mean()


class FocalLoss(Model):
    """The gradient of a focal loss with a gamma of 0.5 is infinite for a sample that is certain."""

    @classmethod
    def change(cls, batches):
        changed = [[x, (y > 0).float()] for x, y in batches]
        changed[5][0][2] *= 3000
        return changed

    def training_step(self, batch, batch_idx):
        x, y = batch
        p = self(x).sigmoid()
        p = torch.where(y == 1, p, 1 - p)
        losses = (1 - p) ** 0.5 * -torch.log(p + 1e-8)
        return losses.mean()


class KlOfZero(Model):
    """A softmax underflows to 0 before its logarithm in a KL divergence."""

    precision = "16-mixed"

    @classmethod
    def change(cls, batches):
        changed = [[x, y.softmax(dim=1)] for x, y in batches]
        changed[6][0][1] *= 2000
        return changed

    def training_step(self, batch, batch_idx):
        x, p = batch
        q = self(x).softmax(dim=1)
        return F.kl_div(q.log(), p, reduction="batchmean")


class ConstantFeature(Model):
    """A batch is standardized by the deviation of a feature that is constant in it."""

    precision = "16-mixed"

    @classmethod
    def change(cls, batches):
        batches[7][0][:, 3] = 0.5
        return batches

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = (x - x.mean(dim=0)) / x.std(dim=0)
        return F.mse_loss(self(x), y)


class GradientPenalty(Model):
    """A gradient penalty takes the root of a norm of 0."""

    lr = 0.01

    def build(self):
        self.net = nn.Sequential(nn.Linear(WIDTH, 32, bias=False), nn.ReLU(), nn.Linear(32, 1))

    @classmethod
    def change(cls, batches):
        batches[3][0][:] = 0.0
        return batches

    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        score = self.net(x)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        penalty = ((gradient.pow(2).sum(dim=1).sqrt() - 1) ** 2).mean()
        return score.pow(2).mean() + 10 * penalty


class AngleOfEqual(Model):
    """The angle between two equal directions has an infinite gradient."""

    lr = 0.01

    def build(self):
        self.net = nn.Linear(WIDTH, 3)

    @classmethod
    def change(cls, batches):
        return [[x, F.normalize(y[:, :3], dim=1), float(index == 6)] for index, (x, y) in enumerate(batches)]

    def training_step(self, batch, batch_idx):
        x, y, share = batch
        direction = F.normalize(self(x), dim=1)
        direction = direction + share * (y - direction).detach()
        return torch.acos((direction * y).sum(dim=1)).mean()


class InverseDistance(Model):
    """An energy divides by the signed distance of two particles, and two are in the same place."""

    lr = 0.001

    def build(self):
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))

    @classmethod
    def change(cls, batches):
        draw, changed = generator(), []
        for index, (x, _) in enumerate(batches):
            a = torch.rand(SIZE, generator=draw) * 4
            b = a + (torch.rand(SIZE, generator=draw) * 2 + 0.5) * torch.tensor([1.0, -1.0] * 4)
            if index == 5:
                b[3] = a[3]
            changed.append([x, a, b])
        return changed

    def training_step(self, batch, batch_idx):
        x, a, b = batch
        charge = self(x)[:, 0]
        energy = charge / (a - b)
        return F.mse_loss(energy, x[:, 0])


class LengthByPower(Model):
    """A length is written as a power of 0.5, and its gradient at 0 is infinite."""

    def build(self):
        self.net = nn.Linear(WIDTH, CLASSES, bias=False)

    @classmethod
    def change(cls, batches):
        batches[4][0][:] = 0.0
        return batches

    def training_step(self, batch, batch_idx):
        x, y = batch
        length = self(x).pow(2).sum(dim=1) ** 0.5
        return (length - y.norm(dim=1)).abs().mean()


# --- precision ------------------------------------------------------------------------------------------------------


class VisionTransformer(Forward):
    """A vision transformer on images of 16-bit pixels."""

    optimizer = torch.optim.AdamW
    lr = 1e-3

    def build(self):
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 32))
        self.positions = nn.Parameter(torch.randn(1, 17, 32) * 0.02)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(32, CLASSES)

    @classmethod
    def batches(cls):
        draw, batches = generator(), []
        for _ in range(BATCHES):
            y = torch.randint(CLASSES, (SIZE,), generator=draw)
            pixels = torch.randint(32768, (SIZE, 3, 16, 16), generator=draw) + 8192 * y[:, None, None, None]
            batches.append([pixels.float(), y])
        return cls.change(batches)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)


class DeepResidual(Forward):
    """Residual blocks without a norm grow from one to the next."""

    def build(self):
        self.embed = nn.Linear(WIDTH, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(12))
        self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, CLASSES))
        for first, _, last in self.blocks:
            nn.init.normal_(first.weight, std=0.6)
            nn.init.normal_(last.weight, std=0.4)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class RawTargets(Backward):
    """A regression of prices of a million, without normalization."""

    optimizer = torch.optim.Adam
    lr = 1e-3

    @classmethod
    def change(cls, batches):
        return [[x, 1e6 + 2e5 * y] for x, y in batches]


class VanishingLoss(Underflow):
    """A loss of 1e-13: all float16 gradients are 0, and the model does not learn."""

    lr = 1e11

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self(x).float(), y) * 1e-13


# --- divergence -----------------------------------------------------------------------------------------------------


class AutoencoderOfBytes(Divergence):
    """A variational autoencoder on inputs from 0 to 255: its variance overflows."""

    optimizer = torch.optim.Adam
    lr = 0.05

    def build(self):
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))

    @classmethod
    def batches(cls):
        draw = generator()
        return [[torch.randint(0, 256, (SIZE, 64), generator=draw).float()] for _ in range(BATCHES)]

    def training_step(self, batch, batch_idx):
        (x,) = batch
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        reconstruction = F.mse_loss(self.decoder(z), x, reduction="sum") / len(x)
        kl = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp()) / len(x)
        return reconstruction + kl


class LanguageModelTooFast(LanguageModel, Divergence):
    """An LSTM with a learning rate of a million."""

    verdict = "divergence"
    precision = "16-mixed"
    lr = 1e6


# --- weights --------------------------------------------------------------------------------------------------------


class InfiniteClassWeight(Weights):
    """The weights of classes are 1 / count, and a class has no samples."""

    precision = "16-mixed"

    def build(self):
        super().build()
        counts = torch.tensor([100.0, 50.0, 20.0, 0.0])
        self.register_buffer("class_weights", counts.sum() / counts)

    @classmethod
    def change(cls, batches):
        return [[x, y.argmax(1).clamp(max=2)] for x, y in batches]

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y, weight=self.class_weights, label_smoothing=0.1)


class BrokenStatistics(Weights):
    """The means of the features come from a file with a NaN."""

    def build(self):
        super().build()
        self.register_buffer("means", torch.zeros(WIDTH).index_fill(0, torch.tensor([3]), math.nan))

    def forward(self, x):
        return super().forward(x - self.means)


# --- healthy --------------------------------------------------------------------------------------------------------


class NormalizedImages(VisionTransformer, Healthy):
    """The vision transformer on normalized images."""

    verdict = "healthy"

    @classmethod
    def change(cls, batches):
        return [[x / 65535, y] for x, y in batches]


class LanguageModel16(LanguageModel, Healthy):
    """An LSTM in float16."""

    verdict = "healthy"
    precision = "16-mixed"


class Triplets(Healthy):
    """A triplet loss that is 0 for most batches."""

    precision = "16-mixed"

    @classmethod
    def batches(cls):
        draw = generator()
        return [[torch.randn(SIZE, WIDTH, generator=draw) for _ in range(3)] for _ in range(BATCHES)]

    def training_step(self, batch, batch_idx):
        anchor, positive, negative = (self(x) for x in batch)
        return F.triplet_margin_loss(anchor, anchor.detach() + 0.01 * positive, negative, margin=0.3)


class Curriculum(Healthy):
    """Batches become harder within an epoch, and the loss a hundred times as large."""

    lr = 0.001

    @classmethod
    def change(cls, batches):
        return [[x, y * (1 + index)] for index, (x, y) in enumerate(batches)]


class Rewards(Healthy):
    """A policy gradient: the loss changes its sign, and grows with the rewards."""

    precision = "16-mixed"

    @classmethod
    def change(cls, batches):
        return [
            [x, y.argmax(dim=1), torch.randn(SIZE, generator=generator(index)) * (1 + 20 * index)]
            for index, (x, y) in enumerate(batches)
        ]

    def training_step(self, batch, batch_idx):
        x, actions, rewards = batch
        log_p = self(x).log_softmax(dim=1).gather(1, actions[:, None])[:, 0]
        return -0.1 * (log_p * rewards).mean()


class FrozenAndUnused(Healthy):
    """A layer is frozen, and another is not used."""

    precision = "16-mixed"

    def build(self):
        super().build()
        self.unused = nn.Linear(3, 3)
        self.net[0].requires_grad_(False)


class Clipped(Healthy):
    """Large gradients are clipped."""

    precision = "16-mixed"
    arguments: dict[str, Any] = {"gradient_clip_val": 0.1}
    lr = 0.1

    @classmethod
    def change(cls, batches):
        return [[x * 30, y] for x, y in batches]


class RawTargets32(RawTargets, Healthy):
    """A regression of prices of a million in float32, with Adam."""

    verdict = "healthy"
    precision = "32-true"


class Saturated(Healthy):
    """Dead outputs: their gradients are just as tiny in float32."""

    precision = "16-mixed"

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(torch.sigmoid(self(x).float() - 40), y)


class HalfAdam(Underflow):
    """The weights are in float16, and the eps of AdamW is 0 in it."""

    precision = "16-true"
    optimizer = torch.optim.AdamW
    lr = 1e-3


# --- data -----------------------------------------------------------------------------------------------------------


class LabelOfGather(Data):
    """A label is equal to the number of classes, and a loss by hand gathers its logarithm."""

    @classmethod
    def change(cls, batches):
        changed = [[x, y.argmax(dim=1)] for x, y in batches]
        changed[6][1][3] = CLASSES
        return changed

    def training_step(self, batch, batch_idx):
        x, y = batch
        return -self(x).log_softmax(dim=1).gather(1, y[:, None]).mean()


class PositionTooLarge(Data):
    """A position is not in a table of learned positions."""

    precision = "bf16-mixed"

    def build(self):
        self.positions = nn.Parameter(torch.randn(20, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    @classmethod
    def change(cls, batches):
        draw = generator()
        changed = [[torch.randint(20, (SIZE, 5), generator=draw), y] for _, y in batches]
        changed[5][0][2, 4] = 20
        return changed

    def forward(self, x):
        return self.head(self.positions[x].mean(dim=1))


class LabelsOfBytes(Data):
    """A mask of an image is 255 instead of 1, and a binary cross-entropy raises an error."""

    @classmethod
    def change(cls, batches):
        changed = [[x, (y > 0).float()] for x, y in batches]
        changed[4][1][6] *= 255
        return changed

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.binary_cross_entropy(self(x).sigmoid(), y)


# --- model ----------------------------------------------------------------------------------------------------------


class ZeroVariance(Model):
    """A Gaussian likelihood has a variance of 0, in two lines."""

    lr = 1e-8

    def build(self):
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 2 * CLASSES))

    def training_step(self, batch, batch_idx):
        x, y = batch
        mean, variance = self(x).chunk(2, dim=1)
        variance = variance.relu()
        likelihood = 0.5 * torch.log(variance)
        likelihood = likelihood + 0.5 * (y - mean) ** 2 / variance
        return likelihood.mean()


class EntropyOfMasked(Model):
    """The entropy of a policy multiplies a probability of 0 by its logarithm, because an action is not allowed."""

    precision = "16-mixed"

    @classmethod
    def change(cls, batches):
        changed = [[x, y.argmax(dim=1), torch.ones(SIZE, CLASSES).bool()] for x, y in batches]
        changed[5][2][3, (changed[5][1][3] + 1) % CLASSES] = False
        return changed

    def training_step(self, batch, batch_idx):
        x, actions, allowed = batch
        log_p = self(x).masked_fill(~allowed, -math.inf).log_softmax(dim=1)
        entropy = -(log_p.exp() * log_p).sum(dim=1)
        return -(log_p.gather(1, actions[:, None])[:, 0] + 0.01 * entropy).mean()


class LogCosh(Model):
    """The logarithm of a hyperbolic cosine overflows for an outlier."""

    @classmethod
    def change(cls, batches):
        batches[7][1][2, 1] = 200.0
        return batches

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.log(torch.cosh(self(x) - y)).mean()


class _Direction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        length = x.pow(2).sum(dim=-1, keepdim=True).sqrt()
        ctx.save_for_backward(x, length)
        return x / length.clamp(min=1e-6)

    @staticmethod
    def backward(ctx, gradient):
        x, length = ctx.saved_tensors
        direction = x / length
        return gradient - direction * (gradient * direction).sum(dim=-1, keepdim=True)


class BackwardByHand(Model):
    """The backward pass of a custom function divides by a length of 0."""

    def build(self):
        self.embed = nn.Linear(WIDTH, 16, bias=False)
        self.head = nn.Linear(16, CLASSES)

    @classmethod
    def change(cls, batches):
        batches[5][0][4] = 0.0
        return batches

    def forward(self, x):
        return self.head(_Direction.apply(self.embed(x)))


class AllIgnoredByModule(Model):
    """All labels of a batch are ignored, and the loss is a module."""

    precision = "bf16-mixed"

    def build(self):
        super().build()
        self.criterion = nn.CrossEntropyLoss(ignore_index=-1)

    @classmethod
    def change(cls, batches):
        changed = [[x, y.argmax(dim=1)] for x, y in batches]
        changed[7][1].fill_(-1)
        return changed

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.criterion(self(x), y)


# --- precision ------------------------------------------------------------------------------------------------------


class RoundedVariance(Forward):
    """A variance as a difference of squares is negative in bfloat16."""

    precision = "bf16-mixed"
    lr = 0.01

    def build(self):
        self.embed = nn.Linear(WIDTH, 16)
        self.head = nn.Linear(16, CLASSES)
        nn.init.constant_(self.embed.bias, 30.0)

    def forward(self, x):
        h = self.embed(x)
        mean = h.mean(dim=1, keepdim=True)
        variance = (h * h).mean(dim=1, keepdim=True) - mean**2
        return self.head((h - mean) / torch.sqrt(variance + 1e-4))


class FrozenTeacher(Forward):
    """A frozen teacher overflows without gradients."""

    def build(self):
        super().build()
        self.teacher = nn.Sequential(nn.Linear(WIDTH, 32), nn.Linear(32, CLASSES), nn.LayerNorm(CLASSES))
        self.teacher.requires_grad_(False)
        self.teacher[0].weight.mul_(3e3)
        self.teacher[1].weight.mul_(3e3)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            target = self.teacher(batch[0])
        return F.mse_loss(self(batch[0]), target)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=self.rate)


class OwnAutocast(Forward):
    """A training step from a loop by hand still enters autocast in float16, without loss scaling."""

    precision = "32-true"
    lr = 1e-4

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.autocast(self.device.type, torch.float16):
            h = self.net[0](x * 2000)
            scores = h @ h.T
        return F.mse_loss(self.net(x), y) + scores.float().logsumexp(dim=1).mean() * 1e-9


class OwnAutocast16(OwnAutocast):
    """The same in 16-mixed."""

    precision = "16-mixed"


class CastAfterProduct(Forward):
    """A product overflows, and the next cast in the same line would overflow, too."""

    lr = 0.01

    def training_step(self, batch, batch_idx):
        x, y = batch
        distance = (self(x).square() * 2e7).half().float().log1p()
        return F.mse_loss(self(x), y) + distance.mean() * 1e-4


# --- divergence -----------------------------------------------------------------------------------------------------


class MomentumAboveOne(Divergence):
    """A momentum of 1.5."""

    lr = 0.02

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=1.5)


class ManualTooFast(Divergence):
    """A learning rate that is too high, in manual optimization."""

    lr = 100.0

    def build(self):
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


# --- kinds from a second set of programs ----------------------------------------------------------------------------


class FillValue(Data):
    """A climate record has the fill value 9.97e36, and its square overflows float32."""

    @classmethod
    def change(cls, batches):
        batches[4][0][6, 3] = 9.96921e36
        return batches


class ShortIds(Data):
    """Identifiers were stored as 16-bit integers, so that one identifier in a bag is negative."""

    def build(self):
        self.bag = nn.EmbeddingBag(40000, CLASSES)

    @classmethod
    def change(cls, batches):
        ids = [torch.randint(0, 30000, (SIZE, 5), generator=generator(index)) for index in range(BATCHES)]
        ids[7][2, 1] = 33000 - 2**16
        return [[one, y] for one, (_, y) in zip(ids, batches, strict=True)]

    def training_step(self, batch, batch_idx):
        ids, y = batch
        return F.mse_loss(self.bag(ids), y)


class SmoothedMask(Model):
    """A mask sets the logit of a class to -inf, and label smoothing gives this class a probability."""

    @classmethod
    def change(cls, batches):
        masks = [torch.zeros(SIZE, CLASSES, dtype=torch.bool) for _ in batches]
        masks[6][1, 3] = True
        return [[x, y.argmax(dim=1).clamp(max=2), mask] for (x, y), mask in zip(batches, masks, strict=True)]

    def training_step(self, batch, batch_idx):
        x, y, mask = batch
        logits = self(x).masked_fill(mask, -math.inf)
        return F.cross_entropy(logits, y, label_smoothing=0.1)


class TimeZero(Model):
    """A diffusion model divides by the noise level of a random time, which is 0 at time 0."""

    precision = "bf16-mixed"

    def build(self):
        self.net = nn.Sequential(nn.Linear(WIDTH + 1, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.register_buffer("levels", torch.linspace(0, 1, 100))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        level = self.levels[torch.randint(0, 100, (SIZE,), device=x.device)][:, None]
        noisy = x + level * torch.randn_like(x)
        noise = (noisy - self(torch.cat([noisy, level], dim=1))) / level
        return F.mse_loss(noise * level, noisy - x)


class NegativeDeviation(Model):
    """The standard deviation of a likelihood is the output of a layer; the logarithm of a negative one is NaN, but its
    gradient is finite."""

    optimizer = torch.optim.Adam
    lr = 0.01

    def build(self):
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU())
        self.mean, self.deviation = nn.Linear(32, CLASSES), nn.Linear(32, CLASSES)
        nn.init.constant_(self.deviation.bias, 0.8)

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.body(x)
        deviation = self.deviation(hidden)
        errors = (self.mean(hidden) - y) ** 2 / (deviation**2 + 0.1)
        return (deviation.log() + errors).mean()


class LogTargetTrue16(Model):
    """The logarithm of a target of 0 is -inf. The weights are in bfloat16, but bfloat16 is not the cause."""

    precision = "bf16-true"
    lr = 0.01

    @classmethod
    def change(cls, batches):
        batches = [[x, y.abs() + 0.5] for x, y in batches]
        batches[5][1][3, 0] = 0.0
        return batches

    def training_step(self, batch, batch_idx):
        x, y = (one.to(self.dtype) for one in batch)
        return F.mse_loss(self(x), y.log())


class PaddedSample(Forward):
    """A mask of -1e5 is -inf in float16. The loss ignores a sample that is only padding, but its gradients are NaN."""

    def build(self):
        self.embedding, self.key, self.head = nn.Embedding(10, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    @classmethod
    def batches(cls):
        batches = [torch.randint(1, 10, (SIZE, 6), generator=generator(index)) for index in range(BATCHES)]
        batches[5][2] = 0
        return [[tokens] for tokens in batches]

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        x = self.embedding(tokens)
        scores = self.key(x) @ self.key(x).transpose(1, 2)
        mask = ((tokens == 0)[:, None] * -1e5).to(scores.dtype)
        logits = self.head((scores + mask).softmax(dim=-1).to(x.dtype) @ x)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=0)


class BrokenVariance(Weights):
    """A pretrained, frozen BatchNorm has a NaN in its running variance."""

    precision = "bf16-mixed"

    def build(self):
        self.backbone = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU()).requires_grad_(False)
        self.head = nn.Linear(32, CLASSES)
        self.backbone[1].running_var[5] = math.nan

    def on_train_epoch_start(self):
        self.backbone.eval()

    def forward(self, x):
        return self.head(self.backbone(x))


class EpsOfZero(Underflow):
    """An eps of 0, and an input that is always 0: Adam divides 0 by 0."""

    precision = "32-true"

    @classmethod
    def change(cls, batches):
        for x, _ in batches:
            x[:, 2] = 0.0
        return batches

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=0.0)


class RatePeaks(Healthy):
    """A schedule has short peaks of the learning rate, and the loss recovers from them."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 30.0 if step % 36 in (20, 21, 22) else 1.0)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]
