"""Programs of ``scripts/benchmark_diagnosis`` without an alarm, and the form of a report."""

import re

import pytest
import torch
from _diagnosis.bench import run
from _diagnosis.programs import PROGRAMS
from lightning.pytorch import Callback
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")


NIGHTLY = {"Settling", "MissingValues", "Outlier", "ManualTooFast", "BackwardByHand", "AllIgnoredByModule"}
"""Programs that ``scripts/test --all`` leaves out."""


def programs(*rows):
    return [pytest.param(*row, marks=[pytest.mark.nightly] * (row[0] in NIGHTLY), id=row[0]) for row in rows]


QUIET = "Settling", "InfiniteMask", "MissingValues", "RareOverflow", "Gan", "Outlier", "Saturated", "RatePeaks"


@pytest.mark.parametrize("name", programs(*zip(QUIET)))
def test_no_alarm(tmp_path, name):
    assert run(PROGRAMS[name], tmp_path).verdict == "healthy"


HEALTHY = PROGRAMS["Plateau"]


class MissingLabels(HEALTHY):
    """Each sample has a missing label, which ``torch.where`` hides only in the forward pass."""

    @classmethod
    def change(cls, batches):
        return [[x, y.masked_fill(torch.arange(4) == 2, torch.nan)] for x, y in batches]

    def training_step(self, batch, batch_idx):
        return torch.where(batch[1].isnan(), 0.0, (self(batch[0]) - batch[1]) ** 2).mean()


class UnusedNan(HEALTHY):
    """A tensor that is not used is NaN in all samples; the logarithm of 0 is the cause."""

    @classmethod
    def change(cls, batches):
        batches[5][0][2, 1] = 0.0
        return [[x.abs(), y, torch.full((len(x),), torch.nan)] for x, y in batches]

    def training_step(self, batch, batch_idx):
        return super().training_step([batch[0].log(), batch[1]], batch_idx)


class RelativeError(HEALTHY):
    """A target is 0."""

    @classmethod
    def change(cls, batches):
        batches = [[x, y.abs() + 0.5] for x, y in batches]
        batches[5][1][2, 1] = 0.0
        return batches

    def training_step(self, batch, batch_idx):
        return ((self(batch[0]) - batch[1]).abs() / batch[1]).mean()


class Rounded(HEALTHY):
    """A probability is rounded to 1."""

    precision = "bf16-mixed"

    def training_step(self, batch, batch_idx):
        p = torch.sigmoid(self(batch[0]) + 7.0)
        return -torch.log(1 - p).mean()


class Tokens(HEALTHY):
    """The labels are the next tokens; token 6 of 8 in one sample is out of range."""

    ids = torch.arange(8).repeat(8, 1) % 4
    ids[3, 6] = 4

    @classmethod
    def batches(cls):
        return [[cls.ids]] * 4

    def training_step(self, batch, batch_idx):
        rows = nn.functional.one_hot(batch[0][:, :-1], 12).float()
        return nn.functional.cross_entropy(self(rows).flatten(0, 1), batch[0][:, 1:].flatten())


class Border(Tokens):
    """Each sample has a number that marks no label."""

    ids = Tokens.ids.clone().fill_(1)
    ids[:, -1] = 255


class Padding(Tokens):
    """Each sample is padded with an index that no embedding has."""

    ids = Border.ids.clamp(max=-1)

    def training_step(self, batch, batch_idx):
        return nn.functional.embedding(batch[0], self.net[0].weight).mean()


class Breaks(Callback):
    """Write NaN to weights at a step."""

    def __init__(self, step, name="net.0.weight"):
        self.step, self.name = step, name

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            pl_module.get_parameter(self.name).data.div_(0.0).sub_(torch.inf)


class Scheduled(PROGRAMS["Plateau"]):
    factor = staticmethod(lambda step: 1 / (1 + step))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize(
    ("program", "step", "precision", "names"),
    [
        (PROGRAMS["Plateau"], 10, "bf16-mixed", "weights"),
        (Scheduled, 61, "32-true", "weights"),  # after the copy of the weights at step 50
        (PROGRAMS["Plateau"], 61, "16-mixed", "'net.0.weight'"),  # skipped steps do not change other weights
    ],
)
def test_weights_that_other_code_breaks(tmp_path, program, step, precision, names):
    text = run(program, tmp_path, callbacks=[Breaks(step)], precision=precision).text
    assert f"between the forward passes of steps {step - 1} and {step}, but stay finite" in text
    assert "code other than the optimizer has changed them" in text
    assert f"writes to {names} after step {step - 1}, in Breaks.on_train_batch_start (test_diagnose.py:" in text


class Spike(Scheduled):
    factor = staticmethod(lambda step: 1e30 if step == 3 else 1.0)


class SpikeOfTensor(Spike):
    """Has a learning rate that changes in place, and is not recorded."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=torch.tensor(0.01))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SpikeOfHook(PROGRAMS["Plateau"]):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_batch_start(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = 1e28 if self.global_step == 3 else 0.01


@pytest.mark.parametrize(
    ("program", "verdict"),
    [(Spike, "divergence"), (SpikeOfHook, "divergence"), (SpikeOfTensor, "unknown")],
)
def test_rate_that_was_too_high_for_one_step_is_no_other_code(tmp_path, program, verdict):
    text = run(program, tmp_path).text
    assert f"Verdict: {verdict}" in text
    assert ("the learning rate is 1e+28" in text) is (verdict == "divergence")


def test_two_statements_are_changed_together(tmp_path):
    text = run(PROGRAMS["ZeroVariance"], tmp_path).text
    first, second = re.search(r"Remedy: in (.*?); and in (.*?)  \[tried", text).groups()
    assert first.endswith("write: likelihood = 0.5 * torch.log(variance.clamp(min=1e-06))")
    assert second.endswith("(y - mean) ** 2 / variance.clamp(min=1e-06)")


@pytest.mark.parametrize(
    ("name", "cause", "remedy"),
    programs(
        ("MomentumAboveOne", "in float32 too: momentum=1.5.", "momentum=0.9  [tried: a few steps"),
        ("ManualTooFast", "the learning rate is 100.", "a lower learning rate, lr=0.25  [tried: a few steps"),
        ("PositionTooLarge", "batch[0] is out of range in samples 2: got 20, expected 0 to 19.", "leave out samples"),
        ("EntropyOfMasked", "mul in the forward pass", "posted.py:"),
        ("BackwardByHand", "div in the backward pass", "direction = x / length.clamp(min=1e-06)"),
        ("OwnAutocast16", "matmul in OwnAutocast16.training_step", "remove torch.autocast in posted.py:"),
        ("CastAfterProduct", "mul in CastAfterProduct", "precision='bf16-mixed', and in posted.py:"),
        ("FillValue", "batch[0] is up to 9.97e+36 in samples 6, and up to 3.27", "abs(batch[0]) exceeds 1000; in this"),
        ("ShortIds", "out of range in samples 2: got -32536, expected 0 to 39999", "outside 0 to 39999"),
        ("SmoothedMask", "cross_entropy in the forward pass", "F.cross_entropy(logits.clamp(min=-10000.0), y"),
        ("TimeZero", "div in the forward pass", "/ level.clamp(min=1e-06)  [tried: the batch is finite"),
        ("NegativeDeviation", "log in the forward pass", "deviation.clamp(min=1e-06).log()"),
        ("LogTargetTrue16", "Not finite in float32 either: log", "y.clamp(min=1e-06).log()"),
        ("PaddedSample", "softmax in PaddedSample.training_step makes nan in float16", "precision='bf16-mixed'"),
        ("BrokenVariance", "backbone.1.running_var", "running_var'), 1, 1, 1)  [tried: the batch is finite"),
        ("EpsOfZero", "AdamW divides by eps=0", "Remedy: eps=1e-08"),
        ("AllIgnoredByModule", "'criterion' (CrossEntropyLoss)", "self.criterion(self(x), y).nan_to_num(0.0)"),
    ),
)
def test_cause_and_remedy(tmp_path, name, cause, remedy):
    lines = run(PROGRAMS[name], tmp_path).text.splitlines()
    assert cause in next(line for line in lines if line.startswith("  ")), lines
    assert remedy in next(line for line in lines if line.startswith("  Remedy: ")), lines


class Frozen(HEALTHY):
    def build(self):
        super().build()
        self.net[2].requires_grad_(False)


class WrongSign(HEALTHY):
    optimizer, lr = torch.optim.SGD, 0.1

    def training_step(self, batch, batch_idx):
        return -super().training_step(batch, batch_idx)


class Shrinks(HEALTHY):  # a parameter reaches 0: a lower learning rate does not help, and the losses do not grow
    lr = 0.05

    def build(self):
        super().build()
        self.width = nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        width = self.width.relu()
        return width.log() + ((self(batch[0]) - batch[1]) * 0 / width).square().mean()


class RawTable(HEALTHY):
    optimizer = torch.optim.SGD

    @classmethod
    def change(cls, batches):
        return [[x * 1e4, y * 1e5] for x, y in batches]


class Images(HEALTHY):
    @classmethod
    def batches(cls):
        batches = [[torch.randn(3, size) for size in (4, 5, 6)] for _ in range(12)]
        batches[5][1][2, 0] = torch.nan
        return batches

    def training_step(self, batch, batch_idx):
        return self(torch.stack([torch.cat([one.mean(dim=1)] * 4) for one in batch])).square().mean()


class Standardized(HEALTHY):
    def build(self):
        super().build()
        self.net[0].means = torch.zeros(self.net[0].in_features).index_fill(0, torch.tensor([2]), torch.nan)

    def forward(self, x):
        return super().forward(x - self.net[0].means)


class Half(PROGRAMS["FrozenTeacher"]):
    precision = "32-true"

    def build(self):
        super().build()
        self.teacher.half()

    def training_step(self, batch, batch_idx):
        return (self(batch[0]) - self.teacher(batch[0].half())).square().mean()


class Decorated(HEALTHY):
    def training_step(self, batch, batch_idx):
        return (self.scores(batch[0]).float() - 1).square().mean() * 1e-9

    @torch.autocast("cpu", torch.float16)
    def scores(self, x):
        h = self(x * 3000)
        return h @ h.T


VERDICTS = [
    (MissingLabels, {}, "data", "use only the finite elements: before the arithmetic, select them by batch[1].isf"),
    (UnusedNan, {}, "model", "[batch[0].clamp(min=1e-06).log(), batch[1]]"),
    (RelativeError, {}, "model", "batch[1].clamp(min=0.01)).mean()"),
    (Rounded, {}, "forward", "write: return -torch.log((1 - p).clamp(min=1e-06)).mean()"),
    (Tokens, {}, "data", "leave out samples in which batch[0] is outside 0 to 3, or correct them."),
    (Border, {}, "data", "pass ignore_index=255 to the loss."),
    (Padding, {}, "data", "replace -1 in batch[0] by a number from 0 to 31."),
    (Frozen, {"callbacks": [Breaks(10, "net.2.bias")]}, "weights", "net.2.bias became non-", "writes to 'net.2.bias'"),
    (WrongSign, {}, "divergence", "The loss falls without bound"),
    (Shrinks, {}, "model", "(min=1e-06).log() + ((self(batch[0]) - batch[1]) * 0 / width.clamp(min=1e-06))"),
    (PROGRAMS["RoundedVariance"], {}, "", "makes nan in bfloat16", "If that does not help: precision='32-true'"),
    (RawTable, {"precision": "16-mixed"}, "", "normalize the inputs (batch[0] up", "If that does not help: precision="),
    # in epochs shorter than the interval; with finite gradients in the other batches of a window
    (PROGRAMS["TinyLoss"], {"log_every_n_steps": 20, "enable_checkpointing": True}, "underflow: small", "(step 19,"),
    (PROGRAMS["AllIgnored16"], {"accumulate_grad_batches": 4}, "model: the computation is the cause (step 1, batch 5)"),
    (Images, {}, "", "is not finite: batch[1].\n", "leave out samples in which batch[1] is not finite.\n"),
    (Standardized, {}, "", "Tensors in attributes were not finite: net.0.means.",
     "torch.nan_to_num_(model.get_submodule('net.0').means, 0, 0, 0)  [tried: the batch is finite with it]"),
    (Half, {}, "", "linear in 'teacher.1' (Linear) overflows float16"),
    (Decorated, {}, "", "matmul in Decorated.training_step overflows", "remove torch.autocast in test_diagnose.py:"),
]  # fmt: skip


@pytest.mark.parametrize("row", VERDICTS, ids=lambda row: row[0].__name__)
def test_verdict_and_remedy(tmp_path, row):
    program, arguments, verdict, *parts = row
    text = run(program, tmp_path, **arguments).text
    assert f"Verdict: {verdict}" in text
    for part in parts:
        assert part in text


def test_error_after_a_gradient_that_was_not_finite(tmp_path):
    class Eigenvectors(HEALTHY):
        def training_step(self, batch, batch_idx):
            z = self(batch[0])
            covariance = z.T @ z if batch_idx != 5 else torch.eye(z.shape[1]) + 0 * z.sum()
            _, vectors = torch.linalg.eigh(covariance)  # raises an error if a number is NaN
            return (vectors[0] * torch.arange(len(vectors))).sum() ** 2

    result = run(Eigenvectors, tmp_path)
    assert "Verdict: model: the computation is the cause (step 5, batch 5)" in result.text
    assert "linalg_eigh in the backward pass" in result.text
    assert isinstance(result.error, torch.linalg.LinAlgError)
