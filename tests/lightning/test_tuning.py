"""The tuner and its callbacks have the same results and side effects with our Trainer and Lightning's."""

import itertools

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, EarlyStopping, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner

from tests.parity import Classifier, Logs, assert_agree, data, ours, plain, weights
from trainer.callbacks import GradientClipping


class Tunable(Classifier):
    """Creates dataloaders with a configurable batch size."""

    batch_size = 2
    memory = 1000

    def training_step(self, batch, batch_idx):
        if len(batch[1]) > self.memory:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        return data(16, batch_size=self.batch_size)

    def val_dataloader(self):
        return data(8, batch_size=self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr("lightning.pytorch.tuner.batch_size_scaling.garbage_collection_cuda", lambda: None)  # slow


def situation(trainer, module):
    loaders = [trainer.train_dataloader, trainer.val_dataloaders, trainer.test_dataloaders, trainer.predict_dataloaders]
    return {
        "progress": (trainer.global_step, trainer.current_epoch, trainer.should_stop, str(trainer.state.status)),
        "limits": [getattr(trainer, f"limit_{kind}_batches") for kind in ("train", "val", "test", "predict")],
        "max_steps": (trainer.max_steps, trainer.fit_loop.max_steps),
        "callbacks": [type(c).__name__ for c in trainer.callbacks if "lightning" in type(c).__module__],
        "batch size": (module.batch_size, *(getattr(loader, "batch_size", None) for loader in loaders)),
        "learning rate": round(module.learning_rate, 6),
        "weights": plain([parameter.sum() for parameter in module.parameters()]),
        "optimizers": [[group["lr"] for group in o.param_groups] for o in trainer.optimizers],
    }


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"num_training": 12, "early_stop_threshold": None}, {"accumulate_grad_batches": 2}),
        ({"num_training": 200, "max_lr": 100.0}, {}),  # diverges
        ({"num_training": 1}, {}),  # no suggestion
    ],
    ids=str,
)
def test_same_learning_rate(tmp_path, options, arguments):
    def scenario(make):
        module, trainer = Tunable(), make(max_epochs=2, default_root_dir=tmp_path, **arguments)
        finder = Tuner(trainer).lr_find(module, **options)
        found = [plain(finder.results), finder.suggestion(), finder._total_batch_idx, situation(trainer, module)]
        trainer.fit(module)
        return [*found, situation(trainer, module), list(tmp_path.iterdir())]

    assert_agree(scenario)


def test_rate_is_sought_with_the_clipping_of_a_callback():
    def losses(**arguments):
        tuner = Tuner(ours(max_epochs=2, **arguments))
        return tuner.lr_find(Tunable(), num_training=12, early_stop_threshold=None).results["loss"]

    assert losses(callbacks=[GradientClipping(0.01)]) == losses(gradient_clip_val=0.01) != losses()


@pytest.mark.filterwarnings("ignore:.*in eval mode at the start")  # as in Lightning
@pytest.mark.parametrize(
    ("method", "mode", "memory"),
    [("fit", "power", 99), ("fit", "binsearch", 5), ("validate", "binsearch", 99), ("test", "power", 99)],
)
def test_same_batch_size(tmp_path, method, mode, memory):
    def scenario(make):
        module, trainer = Tunable(), make(max_epochs=2, default_root_dir=tmp_path)
        module.memory, before = memory, trainer.fit_loop.state_dict()
        found = Tuner(trainer).scale_batch_size(module, method=method, mode=mode, max_trials=2, steps_per_trial=1)
        assert trainer.fit_loop.state_dict() == before
        after = situation(trainer, module)
        trainer.fit(module)
        return [found, after, situation(trainer, module), list(tmp_path.iterdir())]

    assert_agree(scenario)


@pytest.mark.parametrize("method", ["fit", "validate", "predict"])
def test_batch_size_finder_among_the_callbacks(tmp_path, method):
    def scenario(make):
        module = Tunable()
        finder = BatchSizeFinder(max_trials=2, steps_per_trial=1)
        trainer = make(max_epochs=2, default_root_dir=tmp_path, callbacks=[finder])
        results = getattr(trainer, method)(module)
        loop = getattr(trainer, f"{method}_loop")
        loop = loop.epoch_loop if method == "fit" else loop
        counted = loop.batch_progress.total.completed if method == "fit" else loop.batch_progress.current.completed
        return [finder.optimal_batch_size, counted, plain(results), situation(trainer, module)]

    assert_agree(scenario)


class InEpochs(LearningRateFinder):
    """Searches at the start of the given epochs, as in Lightning's documentation."""

    def __init__(self, *epochs, steps=20, **options):
        super().__init__(num_training_steps=steps, early_stop_threshold=None, **options)
        self.epochs = epochs

    def on_fit_start(self, *args):
        pass

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch in self.epochs:
            before = situation(trainer, pl_module)
            self.lr_find(trainer, pl_module)
            after = situation(trainer, pl_module)
            assert all(before[name] == after[name] for name in before if "rate" not in name and name != "optimizers")
            assert not trainer.fit_loop.restarting


def test_finders_inside_a_training_restore_its_loop(tmp_path):
    """Lightning's loop takes the interrupted epoch for complete; ours trains all its batches."""
    module = Tunable()
    finder = InEpochs(1, 2, steps=10, update_attr=False)
    trainer = ours(max_epochs=3, default_root_dir=tmp_path, callbacks=[finder])
    trainer.fit(module)
    assert trainer.global_step == 3 * 8
    assert len(finder.optimal_lr.results["lr"]) == 8  # trains the interrupted epoch

    undisturbed = Tunable()
    ours(max_epochs=3, default_root_dir=tmp_path).fit(undisturbed)
    assert all(map(torch.equal, module.parameters(), undisturbed.parameters()))


def test_batch_size_found_in_the_middle_of_a_training_is_used(tmp_path):
    sizes, module = [], Tunable()
    module.memory = 6
    module.on_train_batch_end = lambda outputs, batch, i: sizes.append(len(batch[1]))
    finder = BatchSizeFinder(max_trials=3, init_val=2, steps_per_trial=1)
    finder.on_fit_start = lambda *_: None
    finder.on_train_epoch_start = lambda run, _: run.current_epoch == 1 and finder.scale_batch_size(run, module)
    trainer = ours(max_epochs=2, default_root_dir=tmp_path, callbacks=[finder])
    trainer.fit(module)
    assert [(size, len(list(group))) for size, group in itertools.groupby(sizes)] == [(2, 8 + 1), (4, 1 + 4)]
    assert trainer.global_step == 8 + 4


def test_run_validates_after_a_finder_created_the_dataloaders_early():
    def scenario(make):
        validated, module = [], Tunable()
        module.on_validation_start = lambda: validated.append(module.current_epoch)
        finder = BatchSizeFinder(max_trials=1, steps_per_trial=1)
        make(max_epochs=4, callbacks=[finder], check_val_every_n_epoch=2, num_sanity_val_steps=0).fit(module)
        return validated

    assert assert_agree(scenario) == [1, 3]


def test_finder_that_fails_tidies_up(tmp_path):
    module = Scheduled("StepLR")
    module.memory = 1
    trainer = ours(max_epochs=1, default_root_dir=tmp_path, callbacks=[LearningRateFinder(num_training_steps=5)])
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.fit(module)
    assert list(tmp_path.iterdir()) == []


def test_steps_without_a_loss_count_for_the_finder(tmp_path):
    """They have a rate and no loss; without a count the finder would never end."""

    def scenario(make):
        module, trainer = Tunable(), make(max_epochs=3, default_root_dir=tmp_path)
        module.training_step = lambda batch, batch_idx: None if trainer.global_step in (2, 5) else module.loss(batch)
        losses = Tuner(trainer).lr_find(module, num_training=20, early_stop_threshold=None).results["loss"]
        return [i for i, loss in enumerate(losses) if loss != loss]

    assert assert_agree(scenario) == [2, 5]


LR = torch.optim.lr_scheduler
SCHEDULES = {
    "LambdaLR": lambda o, lr: LR.LambdaLR(o, lambda step: 0.9**step),
    "StepLR": lambda o, lr: LR.StepLR(o, 2, 0.5),
    "LinearLR": lambda o, lr: LR.LinearLR(o, 0.1, total_iters=6),
    "ReduceLROnPlateau": lambda o, lr: LR.ReduceLROnPlateau(o, factor=0.5, patience=0, min_lr=lr / 100),
    "OneCycleLR": lambda o, lr: LR.OneCycleLR(o, lr, total_steps=41),
    "SequentialLR": lambda o, lr: LR.SequentialLR(
        o, [LR.LinearLR(o, 0.1, total_iters=4), LR.CosineAnnealingLR(o, 10)], [4]
    ),
    "nested": lambda o, lr: LR.ChainedScheduler(
        [
            LR.SequentialLR(o, [LR.ConstantLR(o, 0.1, 3), LR.LambdaLR(o, lambda step: 0.9**step)], [4]),
            LR.ExponentialLR(o, 0.95),
        ]
    ),
}


class Scheduled(Tunable):
    """Two parameter groups, the second with a tenth of the rate; a schedule; records rates and weights."""

    def __init__(self, kind, learning_rate=1e-3, *, interval="step", uses=True):
        super().__init__()
        self.kind, self.learning_rate, self.interval, self.uses = kind, learning_rate, interval, uses
        self.rates = []

    def configure_optimizers(self):
        lr = self.learning_rate if self.uses else 1e-3
        groups = [{"params": list(self.net[0].parameters())}]
        groups.append({"params": list(self.net[2].parameters()), "lr": lr / (10 if self.uses else 1)})
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
        schedule = {"scheduler": SCHEDULES[self.kind](optimizer, lr), "interval": self.interval, "monitor": "loss"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def train_dataloader(self):
        return data(40)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        if not any("_LRCallback" in type(callback).__name__ for callback in self.trainer.callbacks):
            self.rates.append([float(group["lr"]) for group in optimizer.param_groups])


@pytest.mark.filterwarnings("ignore:A `OneCycleLR` scheduler", "ignore:The epoch parameter in")
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_fit_with_a_finder_equals_a_fit_with_the_found_rate(tmp_path, kind, interval):
    """Compares rates of all groups, weights, and the state of the schedule bit for bit."""

    def fit(module, *callbacks):
        torch.manual_seed(1)
        trainer = ours(max_epochs=2, default_root_dir=tmp_path, callbacks=[*callbacks])
        trainer.fit(module)
        (config,) = trainer.lr_scheduler_configs
        return module.rates, plain(config.scheduler.state_dict()), [p.tolist() for p in module.parameters()]

    options = {"num_training_steps": 20, "early_stop_threshold": None}
    finder = InEpochs(0) if interval == "epoch" else LearningRateFinder(**options)
    found = fit(module := Scheduled(kind, interval=interval), finder)
    assert finder.optimal_lr.suggestion() == module.learning_rate != 1e-3
    assert found == fit(Scheduled(kind, module.learning_rate, interval=interval))
    assert len(module.rates) == 40
    assert "lr_find" not in vars(finder)


@pytest.mark.parametrize("kind", ["LambdaLR", "LinearLR", "nested", "StepLR"])
def test_module_that_does_not_take_its_rate_from_the_attribute(tmp_path, kind):
    """The rate found replaces the configured one in both groups and in all parts of the schedule."""
    finder = LearningRateFinder(num_training_steps=20, early_stop_threshold=None)
    module, without = (Scheduled(kind, uses=False) for _ in range(2))
    ours(max_epochs=1, default_root_dir=tmp_path, callbacks=[finder]).fit(module)
    ours(max_epochs=1, default_root_dir=tmp_path).fit(without)
    factor = finder.optimal_lr.suggestion() / 1e-3
    for mine, other in zip(module.rates, without.rates, strict=True):
        assert mine == pytest.approx([rate * factor for rate in other])


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("LambdaLR", lambda step: 0.9**step), ("SequentialLR", None), ("StepLR", lambda step: 0.5 ** (step // 2 - 10))],
)
def test_rate_found_in_the_middle_of_a_training_stays(tmp_path, kind, factor):
    """It is used at the next step; schedules that compute rates from the configured one continue from it."""
    finder, module = InEpochs(1), Scheduled(kind)
    trainer = ours(max_epochs=2, default_root_dir=tmp_path, callbacks=[finder])
    trainer.fit(module)
    rate = finder.optimal_lr.suggestion()
    assert module.rates[20] == [rate, rate]
    found = [rates[0] for rates in module.rates[21:]]
    assert factor is None or found == pytest.approx([rate * factor(step) for step in range(21, 40)])
    assert all(one == other for one, other in module.rates[21:])
    (config,) = trainer.lr_scheduler_configs
    parts = [config.scheduler, *getattr(config.scheduler, "_schedulers", ())]
    assert all(part.base_lrs == [rate, rate] for part in parts if hasattr(part, "base_lrs"))


def test_schedule_with_its_own_rates_is_named_if_a_rate_is_found_too_late(tmp_path):
    finder, module = InEpochs(1), Scheduled("OneCycleLR")
    with pytest.warns(UserWarning, match=r"found [\d.e-]+, but OneCycleLR sets the rates that it was given"):
        ours(max_epochs=2, default_root_dir=tmp_path, callbacks=[finder]).fit(module)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_resumed_fit_with_a_finder_is_the_uninterrupted_one(tmp_path):
    def fit(ckpt_path=None):
        module, saver = Scheduled("SequentialLR"), ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        callbacks = [LearningRateFinder(num_training_steps=20, early_stop_threshold=None), saver]
        ours(max_epochs=2, callbacks=callbacks, enable_checkpointing=True).fit(module, ckpt_path=ckpt_path)
        return module

    whole, again = fit(), fit(tmp_path / "epoch=0.ckpt")
    assert again.rates == whole.rates
    assert all(map(torch.equal, whole.parameters(), again.parameters()))


# --- the checkpoint connector -----------------------------------------------------------------------------------------


class Draws(Tunable):
    """The loss depends on attributes that training steps change."""

    def __init__(self):
        super().__init__()
        self.rng, self.recent, self.factor = np.random.default_rng(1), [0.0], 1.0

    def training_step(self, batch, batch_idx):
        self.factor *= 0.9
        self.recent.append(self.rng.random())
        return super().training_step(batch, batch_idx) * self.factor * sum(self.recent)


def test_finders_leave_the_attributes_of_the_module():
    def end_of(find):
        torch.manual_seed(0)
        module, trainer = Draws(), ours(max_epochs=1)
        find(Tuner(trainer), module)
        module.batch_size = 2
        trainer.fit(module)
        return plain(weights(module)), module.factor, module.recent, module.rng.random()

    plainly = end_of(lambda tuner, module: None)
    assert end_of(lambda tuner, module: tuner.lr_find(module, num_training=3, update_attr=False)) == plainly
    assert end_of(lambda tuner, module: tuner.scale_batch_size(module, max_trials=2, steps_per_trial=1)) == plainly


@pytest.mark.parametrize("in_one", [True, False])
def test_checkpoint_is_put_back_part_by_part(tmp_path, in_one):
    def scenario(make):
        path, stopping, module = tmp_path / f"{make.__name__}.ckpt", EarlyStopping("val_loss", patience=9), Logs()
        trainer = make(max_epochs=2, callbacks=[stopping])
        trainer.fit(module, data(8), data(2))
        trainer.save_checkpoint(path)
        saved, found, connector = weights(module), [], trainer._checkpoint_connector
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, data(8), data(2))
        found.append((plain(stopping.state_dict()), trainer.current_epoch, trainer.global_step))
        if in_one:
            connector.restore(path)
        else:
            connector.resume_start(path)
            assert {"state_dict", "callbacks", "loops"} <= connector._loaded_checkpoint.keys()
            for part in ("datamodule", "model", "callbacks", "training_state"):
                getattr(connector, f"restore_{part}")()
            connector.resume_end()
        found.append((plain(stopping.state_dict()), trainer.current_epoch, trainer.global_step))
        assert all(map(torch.equal, saved, weights(module)))
        dumped = connector.dump_checkpoint(weights_only=True)
        return [*found, connector._loaded_checkpoint, dumped["epoch"], dumped["global_step"]]

    trained, restored, *_ = assert_agree(scenario)
    assert trained[0] != restored[0]
