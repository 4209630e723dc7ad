"""``fit(weights=...)`` on two ranks, sharded and unsharded, starts with the weights of the file."""

import warnings

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

from tests.distributed.ranks import RankError
from tests.distributed.worker import BATCH, Regression, Shard, samples, whole
from tests.support import make_trainer, needs_fsdp2
from trainer.checkpoint import conversion
from trainer.distributed.sharding.state_dicts import gathered

pytestmark = needs_fsdp2


class Net(Regression):
    """Parameters of uneven shards, a buffer, and a head.

    Args:
        seed: of the weights.
        outputs: of the head, which are averaged.
        late: whether ``configure_model`` makes the layers, on the meta device.
    """

    def __init__(self, seed=0, outputs=2, late=False):
        super().__init__()
        self.seed, self.outputs = seed, outputs
        self.net = None
        if not late:
            self._make()

    def _make(self):
        torch.manual_seed(self.seed)
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.BatchNorm1d(16, momentum=0.0), nn.Linear(16, self.outputs)
        )

    def configure_model(self):
        if self.net is None:
            with torch.device("meta"):
                self._make()

    def training_step(self, batch, batch_idx):
        features, target = batch
        return nn.functional.mse_loss(self.net(features).mean(1, keepdim=True), target[:, :1])


class Start(Callback):
    """Records the whole weights and buffers at the start of training, and those of the average."""

    def on_train_start(self, trainer, pl_module):
        buffers = {name: buffer.clone() for name, buffer in pl_module.named_buffers()}
        self.average = self.weights = whole(pl_module) | buffers
        for callback in trainer.callbacks:
            if isinstance(callback, EMAWeightAveraging):
                average = gathered(dict(callback._average_model.module.state_dict()), True)
                self.average = {name: value.clone() for name, value in average.items()}


def fit(path, strategy, late=False, outputs=2):
    """Return the weights at the start, and the report on loading."""
    start = Start()
    averages = strategy == "fsdp" or not late  # under DDP, `setup` copies the weights, which must exist
    callbacks = [start, EMAWeightAveraging(update_starting_at_epoch=9)] if averages else [start]
    with warnings.catch_warnings(action="ignore"):
        trainer = make_trainer(
            path.parent, devices=2, strategy=strategy, limit_train_batches=2, limit_val_batches=0,
            use_distributed_sampler=False, callbacks=callbacks,
        )  # fmt: skip
        module = Net(seed=torch.distributed.get_rank() + 5, late=late, outputs=outputs)
        trainer.fit(module, DataLoader(samples(), batch_size=BATCH // 2, sampler=Shard(2)), weights=path)
    return {"start": start.weights, "average": start.average, "facts": trainer.loaded_weights.facts}


def save(folder, form):
    """Return a file or folder of weights, and its contents."""
    module = Net(seed=3)
    module.net[2].running_mean.fill_(0.5)
    state = module.state_dict()
    file = folder / ("a.safetensors" if form == "safetensors" else "a.ckpt")
    if form == "safetensors":
        save_file(state, file)
    elif form == "other names":
        torch.save({f"model.{name}": value for name, value in state.items()}, file)
    else:
        torch.save({"state_dict": state}, file)
    if form == "folder":
        conversion.split(file, folder / "sharded.ckpt")
        file = folder / "sharded.ckpt"
    return file, state


@pytest.mark.parametrize(
    ("form", "strategy", "late"),
    [
        ("checkpoint", "ddp", True),
        ("checkpoint", "fsdp", False),
        ("folder", "ddp", False),
        ("folder", "fsdp", True),
        ("safetensors", "fsdp", True),
        ("other names", "fsdp", True),
    ],
)
def test_ranks_and_averages_start_with_the_weights_of_the_file(ranks, tmp_path, form, strategy, late):
    file, state = save(tmp_path, form)
    found = ranks.call(fit, file, strategy, late)
    for rank in found:
        for start in (rank["start"], rank["average"]):
            torch.testing.assert_close(start, state, rtol=0, atol=0)
        assert rank["facts"]["parameters"] == [6 * 16 + 16 + 32 + 16 * 2 + 2] * 2
    assert found[0]["facts"] == found[1]["facts"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_head_of_another_size_keeps_its_weights(ranks, tmp_path, strategy):
    file, state = save(tmp_path, "folder")
    for rank in ranks.call(fit, file, strategy, False, 7):
        assert rank["facts"]["differing"] == {
            "net.3.weight": "(2, 16) in the file and (7, 16) in the module",
            "net.3.bias": "(2,) in the file and (7,) in the module",
        }
        assert torch.equal(rank["start"]["net.0.weight"], state["net.0.weight"])
        assert rank["start"]["net.3.weight"].shape == (7, 16)


def test_file_without_matching_names_ends_both_ranks(ranks, tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(RankError) as caught:
        ranks.call(fit, tmp_path / "a.pt", "fsdp")
    assert str(caught.value).count("No weight in") == 2
