"""``optimizer=muon``: the parameters of each optimizer, and fits that equal a hand-written loop."""

import warnings
from itertools import chain
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from lightning.pytorch import LightningModule
from omegaconf import OmegaConf
from torch import distributed, nn

import recipes
from recipes.image_classification import ImageClassifier
from recipes.language_model import LanguageModel
from recipes.schedules import cosine, with_schedule
from tests.support import (
    assert_identical,
    forward_context,
    loader_of,
    loss_of,
    make_batches,
    make_trainer,
    needs_fsdp2,
    plugin_of,
    scaler_of,
)
from trainer.common.module_tree import parameters_of

MUON = instantiate(OmegaConf.load(Path(recipes.__file__).parents[1] / "conf/optimizer/muon.yaml"))
BATCHES, EPOCHS = 6, 2


class Module(LightningModule):
    """Two hidden matrices, of 6 x 17 and 17 x 12, and a last layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(6, 17), nn.LayerNorm(17), nn.ReLU(), nn.Linear(17, 12), nn.ReLU(), nn.Linear(12, 3)
        )

    def training_step(self, batch, batch_idx):
        return loss_of(self.net, batch)

    def configure_optimizers(self):
        return with_schedule(MUON(self.parameters(), lr=0.01), cosine, self)


def hidden_names(module):
    """Return the names of the parameters of Muon, after a check that AdamW has all others."""
    module.configure_model()
    made = module.configure_optimizers()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    muon, adamw = ([names[id(p)] for group in one.param_groups for p in group["params"]] for one in made)
    assert [type(one) for one in made] == [torch.optim.Muon, torch.optim.AdamW]
    assert sorted(muon + adamw) == sorted(names.values())
    return muon


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_of_a_language_model(tied):
    module = LanguageModel(MUON, context=8, width=12, layers=1, tie_weights=tied)
    block = [f"net.blocks.0.{name}.weight" for name in ("attention.qkv", "attention.out", "mlp.0", "mlp.2")]
    assert sorted(hidden_names(module)) == sorted(block)
    muon, adamw = module.configure_optimizers()
    assert [group["weight_decay"] for group in (*muon.param_groups, *adamw.param_groups)] == [0.01, 0.01, 0.0]


def test_parameters_of_other_networks():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 4), nn.Linear(4, 2))
    assert hidden_names(ImageClassifier(net, MUON, num_classes=2)) == ["net.2.weight"]
    module = Module()
    module.configure_optimizers = lambda: MUON(module.parameters()).optimizers(module)
    assert hidden_names(module) == ["net.0.weight", "net.3.weight"]
    classifier = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.Linear(6, 2))
    (muon, _) = MUON(classifier.parameters()).optimizers(classifier)
    assert [p is classifier[1].weight for p in muon.param_groups[0]["params"]] == [True]


def test_network_without_hidden_matrices_is_refused():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    with pytest.raises(ValueError, match=r"ImageClassifier has none.*Use optimizer=adamw"):
        ImageClassifier(net, MUON, num_classes=2).configure_optimizers()


def by_hand(batches, precision="32-true", window=1, limit=0.1):
    """Return the weights of a loop with both optimizers, each with its own clipping and schedule."""
    module, scaler = Module(), scaler_of(precision)
    matrices, steps = [module.net[0].weight, module.net[3].weight], EPOCHS * len(batches) // window
    others = [p for p in module.parameters() if not any(p is one for one in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.01, weight_decay=0.01),
    ]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, T_max=steps) for one in optimizers]
    for i, batch in enumerate(batches * EPOCHS):
        with forward_context(precision):
            loss = loss_of(module.net, batch)
        scaler.scale(loss / window).backward()
        if i % window < window - 1:
            continue
        scale = scaler.get_scale()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), limit)
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        if scaler.get_scale() >= scale:
            with warnings.catch_warnings(action="ignore"):  # the order of steps if the first one was skipped
                for schedule in schedules:
                    schedule.step()
    return dict(module.state_dict())


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_fit_equals_a_hand_written_loop(tmp_path, precision):
    """With 16-mixed, a step is skipped."""
    module, batches = Module(), make_batches(BATCHES, gains={3: 1e30} if precision == "16-mixed" else {})
    trainer = make_trainer(
        tmp_path, precision=plugin_of(precision), accumulate_grad_batches=2, gradient_clip_val=0.1, max_epochs=EPOCHS
    )
    trainer.fit(module, loader_of(batches))
    assert trainer.skipped_steps == EPOCHS * (precision == "16-mixed")
    assert_identical(dict(module.state_dict()), by_hand(batches, precision, window=2))


def fit_of_a_rank(strategy):
    warnings.filterwarnings("ignore", ".*does not have many workers")
    module, batches = Module(), make_batches(BATCHES, seed=distributed.get_rank())
    trainer = make_trainer(
        None, devices=2, strategy=strategy, gradient_clip_val=0.1, max_epochs=EPOCHS, use_distributed_sampler=False
    )
    trainer.fit(module, loader_of(batches))
    return dict(module.state_dict())


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=needs_fsdp2)])
def test_two_ranks_equal_a_hand_written_loop(ranks, strategy):
    """With FSDP2, up to the rounding of Muon's bfloat16: each matrix is orthogonalized as a whole, not its shards."""
    pairs = zip(*(make_batches(BATCHES, seed=rank) for rank in range(2)), strict=True)
    expected, initial = by_hand([*chain(*pairs)], window=2), Module().state_dict()
    for found in ranks.call(fit_of_a_rank, strategy):
        if strategy == "ddp":
            assert_identical(found, expected)
        for name, value in expected.items():
            error, change = (found[name] - value).norm(), (value - initial[name]).norm()
            assert error < 0.02 * change, name
