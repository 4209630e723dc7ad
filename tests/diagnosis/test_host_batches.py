"""An index that is out of range on a GPU, which reports it later and can then no longer be read."""

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torchmetrics import MeanMetric

from tests.support import loader_of, make_trainer
from trainer.callbacks import OverflowReport

ROWS, LATE = 5, 2
"""Number of embeddings, and number of batches after which the GPU reports the index."""


class Tokens(LightningModule):
    """Embeds tokens. A GPU raises ``LATE`` batches after the batch with the index, as a real one does."""

    def __init__(self, fails_on_cpu=()):
        super().__init__()
        self.embed, self.seen, self.mean = nn.Embedding(ROWS, 3), 0, MeanMetric()
        self.tied, self.fails_on_cpu = self.embed.weight, fails_on_cpu

    def on_train_start(self):
        self.offset = torch.zeros(3, device=self.device)  # no parameter, and no buffer

    def training_step(self, batch, batch_idx):
        tokens = batch[0]
        if tokens.is_cuda:
            self.seen += bool(self.seen or (tokens >= ROWS).any())
            if self.seen > LATE:
                raise RuntimeError("CUDA error: device-side assert triggered")
            tokens = tokens.clamp(max=ROWS - 1)
        else:
            assert not self.embed.weight.any(), "the weights cannot be read"
            if batch_idx in self.fails_on_cpu:
                raise NotImplementedError("this batch needs a GPU")
        loss = (self.embed(tokens) + self.offset).sum()
        self.mean(loss)
        self.log("mean", self.mean)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder, module, bad=(3,)):
    """Train on batches of 4 tokens. The batches ``bad`` have a 7 as sample 2."""
    batches = [[torch.tensor([0, 1, 7 if index in bad else 2, 4])] for index in range(8)]
    report = OverflowReport()
    trainer = make_trainer(folder, accelerator="gpu", devices=1, callbacks=[report])
    with pytest.raises(RuntimeError, match="device-side assert"):
        trainer.fit(module, loader_of(batches))
    assert not trainer.loop.path.wrappers
    return report


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("bad", [(3,), (1, 2)])
def test_batch_that_ended_the_context_is_named(tmp_path, bad):
    (report,) = fit(tmp_path, Tokens(), bad).reports
    assert report.kind == "data"
    assert "batch[0] is out of range in samples 2: got 7, expected 0 to 4." in report.cause
    assert report.finding.batch_idx == bad[-1]


@pytest.mark.usefixtures("cuda")
def test_only_the_newest_batches_are_stored(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.diagnosis.recording._BYTES", 2 * 4 * 8)  # two batches of 4 tokens
    assert fit(tmp_path, Tokens()).reports == []


@pytest.mark.usefixtures("cuda")
def test_large_model_is_not_run_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.diagnosis.host_batches._MAX_WEIGHTS", ROWS * 3 * 4 - 1)
    assert fit(tmp_path, Tokens()).reports == []


@pytest.mark.usefixtures("cuda")
def test_module_that_needs_a_gpu_gets_no_verdict(tmp_path):
    assert fit(tmp_path, Tokens(fails_on_cpu=range(8))).reports == []


@pytest.mark.usefixtures("cuda")
def test_another_error_does_not_hide_the_index_of_an_earlier_batch(tmp_path):
    (report,) = fit(tmp_path, Tokens(fails_on_cpu=[4, 5])).reports
    assert report.finding.batch_idx == 3
