"""Weight averages that have not been updated yet: until the first update, the average is the current weights."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from tests.support import (
    Regression,
    SavesAt,
    SavesEverywhere,
    assert_identical,
    loader_of,
    make_batches,
    make_trainer,
    plugin_of,
)

BATCHES, EPOCHS = 4, 3


class Module(Regression):
    """Has BatchNorm's buffers, and records the state that each validation sees."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
        self.validated = []

    def validation_step(self, batch, batch_idx):
        self.validated.append(copy_of(self))


class Custom(WeightAveraging):
    """Updates under a configured condition."""

    def __init__(self, first, **options):
        super().__init__(**options)
        self.first = first

    def should_update(self, step_idx=None, epoch_idx=None):
        return step_idx is not None and step_idx >= self.first


class OwnHook(WeightAveraging):
    """Updates the average itself, after each batch from the given one on."""

    def __init__(self, first):
        super().__init__(avg_fn=get_ema_avg_fn(0.5))
        self.first = first

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step > self.first:
            self._average_model.update_parameters(pl_module)


def copy_of(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def trained(states):
    """Return a callback that adds the state after each batch, before any average is copied into the module."""
    return LambdaCallback(on_train_batch_end=lambda trainer, module, *_: states.append(copy_of(module)))


def fit(folder, callback, *, kind=Module, ckpt_path=None, gains=None, saves=True, **arguments):
    folder.mkdir(exist_ok=True)
    module, states, saver = kind(), [], SavesEverywhere(folder)
    trainer = make_trainer(
        folder, max_epochs=EPOCHS, callbacks=[trained(states), callback, *([saver] if saves else [])],
        num_sanity_val_steps=1, enable_checkpointing=saves, **arguments,
    )  # fmt: skip
    batches = make_batches(BATCHES, gains=gains)
    trainer.fit(module, loader_of(batches), loader_of(batches[:1]), ckpt_path=ckpt_path)
    return trainer, module, states, saver


NEVER = {
    "a late step": (lambda: EMAWeightAveraging(decay=0.5, update_starting_at_step=1000), {}),
    "its own hook": (lambda: OwnHook(99), {"precision": "bf16-mixed"}),
    "a run that is stopped before": (lambda: Custom(7), {"max_steps": 6}),
    "skipped": (WeightAveraging, {"precision": plugin_of("16-mixed"), "gains": dict.fromkeys(range(BATCHES), 1e30)}),
}


@pytest.mark.parametrize("kind", NEVER)
def test_average_before_its_first_update_is_the_current_weights(tmp_path, kind):
    """Checked in each validation, each checkpoint, at the end of the fit, and in later saves and validations."""
    make, arguments = NEVER[kind]
    trainer, module, states, saver = fit(tmp_path, make(), **arguments)
    assert_identical(module.validated[1:], states[BATCHES - 1 :: BATCHES])  # without the sanity check
    assert_identical(dict(module.state_dict()), states[-1])
    assert len(saver.files) >= 6
    for path in saver.files:
        checkpoint = torch.load(path, weights_only=True)
        state = states[checkpoint["loops"]["amp_trainer"]["progress"]["batches"] - 1]
        assert checkpoint["averaging_state"]["n_averaged"] == 0
        assert_identical([dict(checkpoint[name]) for name in ("state_dict", "current_model_state")], [state] * 2)

    with torch.no_grad():
        module.net[0].weight.mul_(2)  # as if other weights had been loaded
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert_identical(torch.load(tmp_path / "after.ckpt", weights_only=True)["state_dict"], module.state_dict())
    trainer.validate(module, loader_of(make_batches(1)), verbose=False)
    assert_identical(module.validated[-1], dict(module.state_dict()))


@pytest.mark.parametrize("use_buffers", [True, False])
def test_late_average_equals_torchs(tmp_path, use_buffers):
    """The first 6 of 12 steps are left out: one validation before, two after."""
    options = {"use_buffers": use_buffers, "avg_fn": get_ema_avg_fn(0.5)}
    _, module, states, _ = fit(tmp_path, Custom(6, **options), saves=False)
    average, expected = AveragedModel(current := Module(), **options), [states[3]]
    for i, state in enumerate(states[6:], 6):
        current.load_state_dict(state)
        average.update_parameters(current)
        if i % BATCHES == BATCHES - 1:
            expected.append(copy_of(average.module))
    assert_identical(module.validated[1:], expected)
    assert_identical(copy_of(module), expected[-1])


@pytest.mark.filterwarnings("ignore:.*but loading a checkpoint outside the 'fit' stage")
@pytest.mark.parametrize("from_file", [True, False])
def test_average_of_a_fit_is_not_used_in_later_evaluations(tmp_path, from_file):
    """They use the average in a checkpoint, or the weights of the given module, and leave them in the module."""
    callback = Custom(0, avg_fn=get_ema_avg_fn(0.5))
    trainer, _, _, saver = fit(tmp_path, callback)
    path, module = saver.files[0], Module()
    expected = torch.load(path, weights_only=True)["state_dict"] if from_file else copy_of(module)
    trainer.validate(module, loader_of(make_batches(1)), ckpt_path=path if from_file else None, verbose=False)
    assert_identical(module.validated[-1], expected)
    assert_identical(module.state_dict(), expected)
    assert callback._average_model.n_averaged == BATCHES * EPOCHS


@pytest.mark.whole
def test_resume_before_the_first_update_of_the_average_is_exact(tmp_path):
    """Weights and validations equal those of the uninterrupted run bit for bit, from each checkpoint."""
    _, whole, _, saver = fit(tmp_path / "whole", Custom(6, avg_fn=get_ema_avg_fn(0.5)))
    assert len(saver.files) == 12 + 3 * 3
    for path in saver.files[:16:3]:
        _, module, _, _ = fit(tmp_path / "resumed", Custom(6, avg_fn=get_ema_avg_fn(0.5)), ckpt_path=path, saves=False)
        assert_identical(module.state_dict(), whole.state_dict(), path.name)
        for mine, expected in zip(reversed(module.validated), reversed(whole.validated[1:]), strict=False):
            assert_identical(mine, expected, path.name)


class SavesTrained(Module):
    """Saves only the weights of its last layer, which are the only ones that it trains."""

    strict_loading = False

    def __init__(self):
        super().__init__()
        self.net[:3].requires_grad_(False)


class RemovesOthers(SavesTrained):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if "net.3" in name}


class KeepsOthers(SavesTrained):
    def state_dict(self, *args, **options):
        return {name: value for name, value in super().state_dict(*args, **options).items() if "net.3" in name}


@pytest.mark.parametrize("kind", [RemovesOthers, KeepsOthers])
def test_resume_with_a_part_of_the_weights_is_exact(tmp_path, kind):
    average = partial(EMAWeightAveraging, decay=0.5)
    _, whole, _, saver = fit(tmp_path / "whole", average(), kind=kind)
    _, module, _, _ = fit(tmp_path / "resumed", average(), kind=kind, ckpt_path=saver.files[5], saves=False)
    assert_identical(module.net[3].state_dict(), whole.net[3].state_dict())


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.parametrize("limits", [{"max_epochs": EPOCHS}, {"max_epochs": -1, "max_steps": 6}])
def test_stochastic_weight_averaging_without_an_update_keeps_the_weights(tmp_path, limits):
    """It would start after the last epoch. A batch norm has one more epoch, in which no weight changes."""
    swa, module, states = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=9), Module(), []
    if "max_steps" in limits:
        module.net[1] = nn.Identity()
    trainer = make_trainer(tmp_path, callbacks=[trained(states), swa], **limits)
    trainer.fit(module, loader_of(make_batches(BATCHES)), loader_of(make_batches(1)))
    state = states[min(len(states), trainer.global_step) - 1]
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, state[name]), name
    assert not torch.equal(module.net[0].weight, Module().net[0].weight)
    assert "transfer_weights" not in vars(swa)


@pytest.mark.parametrize(("start", "step"), [(1, 2), (2, 5)])
def test_stochastic_weight_averaging_resumes_inside_its_first_epoch(tmp_path, start, step):
    """Its schedule steps at the end of the resumed epoch."""

    def run(*callbacks, ckpt=None):
        module = Module()
        module.net[1] = nn.Identity()
        swa = StochasticWeightAveraging(swa_lrs=0.2, swa_epoch_start=start, annealing_epochs=2)
        saves = bool(callbacks)
        trainer = make_trainer(tmp_path, callbacks=[swa, *callbacks], max_epochs=4, enable_checkpointing=saves)
        trainer.fit(module, loader_of(make_batches(BATCHES)), loader_of(make_batches(1)), ckpt_path=ckpt)
        return module

    whole, resumed = run(SavesAt(tmp_path / "a.ckpt", step)), run(ckpt=tmp_path / "a.ckpt")
    assert_identical(resumed.state_dict(), whole.state_dict())


class OwnTransfer(StochasticWeightAveraging):
    transfers = 0

    def transfer_weights(self, *modules):  # not a static method
        self.transfers += 1
        super().transfer_weights(*modules)


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
def test_overridden_methods_are_called_in_each_fit(tmp_path):
    """A method of a subclass that overrides a static method, and methods that are set on the callback."""
    swa = OwnTransfer(swa_lrs=0.05, swa_epoch_start=1)
    average, updates = WeightAveraging(), []
    hook = average.on_train_batch_end
    average.on_train_batch_end = lambda *args: (updates.append(0), hook(*args))
    average.should_update = should = lambda step_idx=None, epoch_idx=None: step_idx == 1
    for number in (1, 2):
        fit(tmp_path, swa, saves=False)
        fit(tmp_path, average, saves=False, precision=plugin_of("16-mixed"))
        assert swa.transfers == number
        assert len(updates) == BATCHES * EPOCHS * number
        assert average.should_update is should
        assert average._average_model.n_averaged == 1
