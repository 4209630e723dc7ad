"""Optimizers with ``train()`` and ``eval()``: training weights in training, averages everywhere else."""

import warnings
from itertools import chain

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import distributed

from tests.support import (
    Killed,
    KilledAt,
    Regression,
    SavesEverywhere,
    assert_identical,
    forward_context,
    loader_of,
    loss_of,
    make_batches,
    make_net,
    make_trainer,
    plugin_of,
    scaler_of,
)
from trainer.errors import ConfigurationError, UnsupportedError

BATCHES, EPOCHS, BETA = 6, 3, 0.9


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (arXiv 2405.15682): a parameter is y in training and x in evaluation; the state has z."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "steps": 0, "trains": False})

    def _switch(self, trains, weight):
        for group in self.param_groups:
            if self.mode_of(group)["trains"] is not trains:
                for p in group["params"]:
                    if p in self.state:
                        p.lerp_(self.state[p]["z"], weight)
                self.mode_of(group)["trains"] = trains

    def mode_of(self, group):
        return group

    @torch.no_grad()
    def train(self):
        self._switch(True, 1 - BETA)

    @torch.no_grad()
    def eval(self):
        self._switch(False, 1 - 1 / BETA)

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            assert self.mode_of(group)["trains"]
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    x = p.lerp(z, 1 - 1 / BETA)
                    z.sub_(p.grad, alpha=group["lr"])
                    p.copy_(x.lerp_(z, 1 / group["steps"]).lerp(z, 1 - BETA))


class ModeInAttribute(ScheduleFree):
    """Its state dict does not contain its mode."""

    def __init__(self, params):
        super().__init__(params)
        self.mode = {"trains": False}

    def mode_of(self, group):
        return self.mode


def copy_of(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


class Module(Regression):
    """Records the weights before each training batch, and those that each validation sees."""

    def __init__(self):
        super().__init__(optimizer=ScheduleFree)
        self.trained, self.validated, self.checked = [], [], None

    def training_step(self, batch, batch_idx):
        self.trained.append(copy_of(self.net))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.trainer.sanity_checking:
            self.checked = copy_of(self.net)
        else:
            self.validated.append(copy_of(self.net))


class ModuleWithModeInAttribute(Module):
    def __init__(self):
        super().__init__()
        self.make_optimizer = ModeInAttribute


def by_hand(batches, precision="32-true", window=1):
    """Return the training weights before each batch, and the averages after each, from which training continues."""
    net, scaler, trained, averages = make_net(), scaler_of(precision), [], []
    optimizer = ScheduleFree(net.parameters())
    optimizer.train()
    for i, batch in enumerate(batches * EPOCHS):
        trained.append(copy_of(net))
        with forward_context(precision):
            loss = loss_of(net, batch)
        scaler.scale(loss / window).backward()
        if i % window == window - 1:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        current = copy_of(net)
        optimizer.eval()
        averages.append(copy_of(net))
        optimizer.train()
        net.load_state_dict(current)
    return trained, averages


def fit(folder, *callbacks, gains=None, ckpt_path=None, kind=Module, **arguments):
    folder.mkdir(exist_ok=True)
    module, batches = kind(), make_batches(BATCHES, gains=gains)
    trainer = make_trainer(folder, max_epochs=EPOCHS, callbacks=list(callbacks), **arguments)
    trainer.fit(module, loader_of(batches), loader_of(batches[:1]), ckpt_path=ckpt_path)
    return trainer, module


@pytest.mark.parametrize(
    ("precision", "window"), [("32-true", 1), ("16-mixed", 2)], ids=["32-true", "16-mixed, with a skipped step"]
)
def test_fit_equals_a_hand_written_loop(tmp_path, precision, window):
    """A checkpoint after each batch and in validations does not change the weights, and contains the averages."""
    gains, saver = {3: 1e30} if window == 2 else {}, SavesEverywhere(tmp_path)
    arguments = {"precision": plugin_of(precision), "accumulate_grad_batches": window, "gains": gains}
    trainer, module = fit(tmp_path, saver, enable_checkpointing=True, **arguments)
    trained, averages = by_hand(make_batches(BATCHES, gains=gains), precision, window)
    assert trainer.skipped_steps == EPOCHS * (window == 2)
    assert_identical(module.trained, trained)
    assert_identical(module.validated, averages[BATCHES - 1 :: BATCHES])
    assert_identical(copy_of(module.net), averages[-1])
    for path in saver.files:
        checkpoint = torch.load(path, weights_only=True)
        step = checkpoint["loops"]["amp_trainer"]["progress"]["batches"]
        found = {name.removeprefix("net."): value for name, value in checkpoint["state_dict"].items()}
        assert_identical(found, averages[step - 1])

    _, without = fit(tmp_path / "without", limit_val_batches=0, **arguments)
    assert_identical([*without.trained, copy_of(without.net)], [*trained, averages[-1]])


@pytest.mark.parametrize("kind", [Module, ModuleWithModeInAttribute])
def test_resume_from_each_checkpoint_is_exact(tmp_path, caplog, kind):
    saver, averages, checked = SavesEverywhere(tmp_path), by_hand(make_batches(BATCHES))[1], 0
    trainer, module = fit(tmp_path, saver, kind=kind, enable_checkpointing=True)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    for path in [*saver.files, tmp_path / "end.ckpt"]:
        resumed = fit(tmp_path / "resumed", kind=kind, ckpt_path=path)[1]
        if resumed.checked is not None:  # in the sanity check
            checked += 1
            batches = torch.load(path, weights_only=True)["loops"]["amp_trainer"]["progress"]["batches"]
            assert_identical(resumed.checked, averages[batches - 1])
        assert_identical(copy_of(resumed.net), copy_of(module.net))
        assert_identical(resumed.trained, module.trained[len(module.trained) - len(resumed.trained) :])
    assert checked
    assert "continues with" not in caplog.text  # its counters are not settings


class Switches(Module):
    """Calls ``eval()`` and ``train()`` itself, through Lightning's wrapper."""

    def on_validation_epoch_start(self):
        self.optimizers().eval()

    def on_validation_epoch_end(self):
        self.optimizers().train()


class SwitchesByEpoch(Module):
    """As the documentation of such optimizers recommends."""

    def on_train_epoch_start(self):
        self.trainer.optimizers[0].train()

    def on_train_epoch_end(self):
        self.trainer.optimizers[0].eval()


class SwitchesInEachBatch(Module):
    def on_train_batch_start(self, batch, batch_idx):
        self.optimizers().train()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.optimizers().eval()


@pytest.mark.parametrize("kind", [Switches, SwitchesByEpoch, SwitchesInEachBatch])
def test_module_may_switch_itself(tmp_path, kind):
    trained, averages = by_hand(make_batches(BATCHES))
    saver = SavesEverywhere(tmp_path)
    _, module = fit(tmp_path, saver, kind=kind, enable_checkpointing=True)
    assert_identical(module.trained, trained)
    assert_identical(module.validated, averages[BATCHES - 1 :: BATCHES])
    resumed = fit(tmp_path / "resumed", kind=kind, ckpt_path=saver.files[BATCHES + 2])[1]
    assert_identical([resumed.trained[-1], copy_of(resumed.net)], [trained[-1], averages[-1]])
    for path in saver.files:
        checkpoint = torch.load(path, weights_only=True)
        step = checkpoint["loops"]["amp_trainer"]["progress"]["batches"]
        found = {name.removeprefix("net."): value for name, value in checkpoint["state_dict"].items()}
        assert_identical(found, averages[step - 1])


class Unfreezes(Callback):
    """Adds the parameters of the last layer to the optimizer in the second epoch, as BaseFinetuning does."""

    def setup(self, trainer, module, stage):
        module.make_optimizer = lambda _: ScheduleFree(module.net[:4].parameters())

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            trainer.optimizers[0].add_param_group({"params": list(module.net[4].parameters())})


def test_added_groups_are_averaged(tmp_path):
    trainer, module = fit(tmp_path, Unfreezes())
    weight, average = module.net[4].weight, copy_of(module.net)["4.weight"]
    trainer.optimizers[0].train()
    assert not torch.equal(weight, average)
    assert_identical(module.validated[-1]["4.weight"], average)


class RollsBack(Callback):
    """Returns once to the newest checkpoint, after this number of steps."""

    runs_last = True

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.progress.batches == BATCHES + 3 and len(module.trained) == BATCHES + 3:
            assert trainer.roll_back(BATCHES + 1) is not None


def test_rollback_continues_from_the_training_weights(tmp_path):
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    _, module = fit(tmp_path, saver, RollsBack(), enable_checkpointing=True)
    trained, _ = by_hand(make_batches(BATCHES))
    assert_identical(module.trained[BATCHES + 3], trained[BATCHES + 1])


def test_interrupted_fit_ends_with_the_averages(tmp_path):
    module, batches = Module(), make_batches(BATCHES)
    trainer, averages = make_trainer(tmp_path, callbacks=[KilledAt(4)]), by_hand(batches)[1]
    with pytest.raises(Killed):
        trainer.fit(module, loader_of(batches), loader_of(batches[:1]))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    for path, expected in (None, averages[3]), (tmp_path / "last.ckpt", averages[3]):
        trainer.validate(module, loader_of(batches[:1]), ckpt_path=path, verbose=False)
        assert_identical(module.validated[-1], expected)


@pytest.mark.parametrize("callback", [EMAWeightAveraging(), StochasticWeightAveraging(0.1)])
def test_another_average_is_refused(tmp_path, callback):
    message = rf"Got ScheduleFree with {type(callback).__name__}.*Remove the callback"
    with pytest.raises(ConfigurationError, match=message):
        fit(tmp_path, callback)


def fit_of_a_rank():
    rank, module = distributed.get_rank(), Module()
    warnings.filterwarnings("ignore", ".*(does not have many workers|sync_dist|recommended to use)")
    trainer = make_trainer(None, devices=2, strategy="ddp", max_epochs=EPOCHS, use_distributed_sampler=False)
    trainer.fit(module, loader_of(make_batches(BATCHES, seed=rank)), loader_of(make_batches(1)))
    return module.validated, copy_of(module.net)


@pytest.mark.representative
def test_ddp_equals_a_hand_written_loop(ranks):
    """A step of two ranks is a window of two batches."""
    pairs = zip(*(make_batches(BATCHES, seed=rank) for rank in range(2)), strict=True)
    averages = by_hand([*chain(*pairs)], window=2)[1]
    for validated, last in ranks.call(fit_of_a_rank):
        assert_identical(validated, averages[2 * BATCHES - 1 :: 2 * BATCHES])
        assert_identical(last, averages[-1])


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed"])
def test_shards_are_refused(request, strategy):
    ranks = request.getfixturevalue("ranks_with_deepspeed" if strategy == "deepspeed" else "ranks")
    for result in ranks.call(refused_in_ranks, strategy):
        assert f"Got ScheduleFree, which has `train()` and `eval()`, with strategy={strategy!r}" in result


def refused_in_ranks(strategy):
    module = Module()
    module.log = lambda *_, **__: None
    trainer = make_trainer(None, devices=2, strategy=strategy, precision="bf16-mixed")
    warnings.filterwarnings("ignore")
    with pytest.raises(UnsupportedError) as raised:
        trainer.fit(module, loader_of(make_batches(2)))
    return str(raised.value)
