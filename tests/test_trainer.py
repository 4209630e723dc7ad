"""The Trainer: its arguments, and the lifetime of a run from set-up to tear-down."""

import inspect
import pickle
from collections import Counter
from copy import deepcopy

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import LambdaCallback, Timer
from torch.utils.data import DataLoader

from tests.parity import Classifier, Learner, assert_agree, assert_same_weights, data, looks_in, ours, run_both
from tests.support import stream_of
from trainer import Trainer
from trainer.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@looks_in(
    "on_train_batch_end", "on_validation_batch_end", "on_test_batch_end", "on_predict_batch_end", "on_validation_end",
    "on_train_epoch_end",
)  # fmt: skip
class Calls(Callback):
    """Counts the calls of hooks, except those of the sanity check."""

    def __init__(self):
        self.number = Counter[str]()

    def look(self, hook, trainer):
        self.number[hook] += not trainer.sanity_checking

    def of(self, *hooks):
        return [self.number[f"on_{hook}_end"] for hook in hooks]


def count(train=None, val=None, **arguments):
    """Count the calls in a fit, with 8 training and 6 validation batches by default."""
    calls = Calls()
    trainer = ours(callbacks=[calls, *arguments.pop("callbacks", [])], **{"max_epochs": 1, **arguments})
    trainer.fit(Classifier(), data(16) if train is None else train, data(12) if val is None else val)
    return calls


# --- arguments ----------------------------------------------------------------------------------------------------


def parameters(function):
    return [(one.name, one.default, one.kind) for one in inspect.signature(function).parameters.values()]


def test_arguments_are_lightnings():
    theirs = parameters(LightningTrainer)
    assert parameters(Trainer)[: len(theirs)] == theirs
    assert {kind for *_, kind in parameters(Trainer)[len(theirs) :]} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("method", ["fit", "validate", "test", "predict", "save_checkpoint"])
def test_methods_have_lightnings_signatures(method):
    assert parameters(getattr(Trainer, method)) == parameters(getattr(LightningTrainer, method))


# --- length of a run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "train", "val", "validations"),
    [
        ({}, 8, 6, 1),
        ({"max_steps": 11, "max_epochs": -1}, 11, 6, 1),
        ({"max_steps": 3, "accumulate_grad_batches": 2}, 6, 0, 0),
        ({"limit_train_batches": 3, "limit_val_batches": 2}, 3, 2, 1),
        ({"limit_train_batches": 0}, 0, 0, 0),
        ({"fast_dev_run": 3}, 3, 3, 1),
        ({"overfit_batches": 0.25}, 2, 1, 1),
        ({"val_check_interval": 0.25}, 8, 24, 4),
        ({"check_val_every_n_epoch": 2, "max_epochs": 5}, 40, 12, 2),
        ({"check_val_every_n_epoch": None, "val_check_interval": 5, "max_epochs": 2}, 16, 18, 3),
    ],
    ids=str,
)
def test_how_many_batches_run(arguments, train, val, validations):
    assert count(**arguments).of("train_batch", "validation_batch", "validation") == [train, val, validations]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"val_check_interval": 20}, r"`val_check_interval` \(20\) must be less than or equal"),
        ({"train": stream_of(data(4)), "val_check_interval": 0.5}, "When using an IterableDataset"),
    ],
)
def test_impossible_interval_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        count(**arguments)


def test_max_time_stops_the_run():
    trainer = ours(max_epochs=-1, max_time={"seconds": 0})
    assert any(isinstance(callback, Timer) for callback in trainer.callbacks)
    trainer.fit(Learner(), data(16))
    assert trainer.global_step == 0


def test_max_time_with_a_timer_is_ignored_with_a_warning(caplog):
    with caplog.at_level("INFO"):
        callbacks = ours(max_time="00:00:01:00", callbacks=[timer := Timer("00:00:02:00")]).callbacks
    assert [callback for callback in callbacks if isinstance(callback, Timer)] == [timer]
    assert "Ignoring `Trainer(max_time=...)`, callbacks list already contains a Timer." in caplog.text


@pytest.mark.parametrize("epoch", [0, 1])
def test_should_stop_at_the_start_of_an_epoch_trains_no_batch(epoch):
    def stop(trainer, module):
        trainer.should_stop = trainer.current_epoch == epoch

    seen = count(callbacks=[LambdaCallback(on_train_epoch_start=stop)], max_epochs=5)
    assert seen.of("train_batch", "validation_batch", "train_epoch") == [8 * epoch, 12 * epoch, epoch + 1]


@pytest.mark.parametrize("limit", [0, 2])
def test_stop_with_a_limit_of_no_validation_validates_no_more(limit):
    def stop(trainer, *_):
        if trainer.global_step == 2:
            trainer.should_stop, trainer.limit_val_batches = True, limit

    def scenario(make):
        validations, module = [], Classifier()
        module.on_validation_start = lambda: validations.append(module.trainer.global_step)
        callbacks = [LambdaCallback(on_train_batch_end=stop)]
        make(max_epochs=2, num_sanity_val_steps=0, callbacks=callbacks).fit(module, data(8), data(4))
        return validations

    assert assert_agree(scenario) == [2] * bool(limit)


# --- one run after another ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Nothing to do")
def test_second_fit_continues_counters_and_scaler():
    trainer, module = ours(max_epochs=1, precision="16-mixed"), Learner()
    scaler = trainer.scaler
    trainer.fit(module, data(8))
    for max_epochs, steps in ((1, 4), (1, 4), (3, 12)):
        trainer.fit_loop.max_epochs = max_epochs
        trainer.fit(module, data(8))
        assert (trainer.current_epoch, trainer.global_step) == (max_epochs, steps)
    assert trainer.scaler is scaler
    assert scaler.state_dict()["_growth_tracker"] == 12


def test_no_module_at_all():
    with pytest.raises(TypeError, match="requires a `LightningModule` when it hasn't been passed in a previous run"):
        ours().validate(dataloaders=data(2))
    trainer = ours(max_epochs=1)
    trainer.fit(Classifier(), data(2), data(2))
    with pytest.raises(TypeError, match="got `NoneType`"):  # else it would resume from the best checkpoint
        trainer.fit(None, data(2))


# --- data ---------------------------------------------------------------------------------------------------------


class Data(LightningDataModule):
    def train_dataloader(self):
        return data(8)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def test_datamodule_by_keyword_or_as_the_dataloaders_argument():
    for passed in ({"datamodule": Data()}, {"train_dataloaders": Data()}):
        calls = Calls()
        trainer = ours(max_epochs=1, callbacks=[calls])
        trainer.fit(Classifier(), **passed)
        assert calls.of("train_batch", "validation_batch") == [4, 4]
        assert [trainer.datamodule] == [*passed.values()]
    trainer.test(Classifier(), Data(), verbose=False)
    trainer.predict(Classifier(), Data())
    assert calls.of("test_batch", "predict_batch") == [4, 4]


@pytest.mark.parametrize(
    ("passed", "stages"),
    [
        ({"train_dataloaders": Data(), "val_dataloaders": data(2)}, "validate"),
        ({"datamodule": Data(), "train_dataloaders": data(2)}, "train"),
        ({"datamodule": Data(), "train_dataloaders": Data()}, "train"),
        ({"datamodule": Data(), "train_dataloaders": data(2), "val_dataloaders": data(2)}, "train and validate"),
    ],
)
def test_datamodule_and_dataloaders_exclude_each_other(passed, stages):
    with pytest.raises(ConfigurationError, match=f"Got Data and dataloaders for {stages}\\.$"):
        ours().fit(Classifier(), **passed)


def test_unsuitable_dataloaders():
    with pytest.warns(UserWarning, match="sampler has shuffling enabled"):
        count(val=data(4, shuffle=True))
    with pytest.raises(TypeError, match="invalid dataloader"):
        count(train=5)


# --- flags --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, "warn"])
def test_deterministic_and_benchmark(given, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        ours(deterministic=given, benchmark=False)
        assert not torch.backends.cudnn.benchmark
        assert torch.are_deterministic_algorithms_enabled() is bool(given)
        assert torch.is_deterministic_algorithms_warn_only_enabled() is (given == "warn")
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.parametrize("given", [True, False])
def test_inference_mode(given):
    seen = {}

    def look(*_):
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        seen[f"{trainer.state.fn.value} {trainer.state.stage.value}"] = modes

    trainer, module = ours(max_epochs=1, inference_mode=given), Classifier()
    trainer.test_loop.inference_mode = not given
    module.register_forward_hook(look)
    trainer.fit(module, data(2), data(2))
    for evaluate in (trainer.validate, trainer.test, trainer.predict):
        evaluate(module, data(2))
    in_fit = dict.fromkeys(("fit sanity_check", "fit validate"), (False, False))  # tensors may meet those of training
    alone = {"validate validate": (given, False), "test test": (not given, False), "predict predict": (given, False)}
    assert seen == {"fit train": (False, True), **in_fit, **alone}


# --- more ---------------------------------------------------------------------------------------------------------


def test_predict_step_has_a_dataloader_idx_for_several_dataloaders_only():
    trainer, module = ours(), Classifier()

    class Several(Classifier):
        def predict_step(self, batch, batch_idx, dataloader_idx):
            return dataloader_idx

    with pytest.raises(RuntimeError, match="multiple `predict_dataloader`, but no `dataloader_idx` argument in"):
        trainer.predict(module, [data(4), data(2)])
    with pytest.raises(RuntimeError, match="only a single `predict_dataloader`, but have included `dataloader_idx`"):
        trainer.predict(Several(), data(4))


class Counting(torch.utils.data.Dataset[torch.Tensor]):
    loaded = 0

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.loaded += 1
        return torch.zeros(1)


def test_sanity_check_loads_no_more_than_it_runs():
    class Module(Learner):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            pass

        def on_train_start(self):
            assert [one.loaded for one in sets] == [2, 2]

    sets = [Counting() for _ in range(2)]
    trainer = ours(max_epochs=1, limit_val_batches=3, num_sanity_val_steps=2)
    trainer.fit(Module(), data(4), [DataLoader(one) for one in sets])
    assert [one.loaded for one in sets] == [2 + 3, 2 + 3]


@pytest.mark.parametrize("copied", [lambda trainer: pickle.loads(pickle.dumps(trainer)), deepcopy])
def test_trainer_can_be_copied_before_and_after_a_run(copied, tmp_path):
    arguments = {"precision": "16-mixed", "gradient_clip_val": 1.0, "default_root_dir": tmp_path}
    trainer = Trainer(max_epochs=1, accelerator="cpu", devices=1, **arguments)
    assert copied(trainer).max_epochs == 1
    trainer.fit(Classifier(), data(4), data(2))
    other = copied(trainer)
    assert other.global_step == 2
    assert other.scaler.get_scale() == trainer.scaler.get_scale()
    assert_same_weights(other.lightning_module, trainer.lightning_module)


def test_trainer_can_be_copied_during_a_fit():
    class Pairs(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[0], batch_idx)

    copies = []
    copying = LambdaCallback(on_train_batch_end=lambda trainer, *_: copies.append(deepcopy(trainer)))
    ours(max_epochs=1, callbacks=[copying]).fit(Pairs(), [data(4), stream_of(data(4))], data(4))
    assert [trainer.global_step for trainer in copies] == [1, 2]


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_fit_without_validation_has_no_validation_batches():
    """ModelCheckpoint reads the number of validation batches to save after the epoch if there are no batches."""

    def scenario(make):
        seen = []
        looks = LambdaCallback(on_train_epoch_end=lambda trainer, module: seen.append(trainer.num_val_batches))
        trainer, module = make(max_epochs=1, callbacks=[looks]), Classifier()
        trainer.validate(module, data(4), verbose=False)
        trainer.fit(module, data(4))
        return seen

    assert run_both(scenario) == ([[]], [[]])
