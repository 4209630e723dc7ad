"""The start, end and result of runs: small programs under Lightning's Trainer and ours."""

import copy
import io
import itertools
import textwrap
from contextlib import nullcontext
from unittest.mock import Mock

import lightning
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from rich.console import Console
from torch import nn

from tests.parity import Classifier, RecordingLogger, data, outcome, run_both
from tests.support import Regression, assert_identical, loader_of, loss_of, make_batches, make_trainer
from trainer.callbacks import NonFiniteGuard, RunSummary
from trainer.common.lightning_private import TunerExit
from trainer.errors import ConfigurationError

FUNCTIONS = ("fit", "validate", "test", "predict")


class Ends(Callback):
    """Records the end of a run."""

    def __init__(self):
        self.seen = []

    def on_exception(self, trainer, pl_module, exception):
        self.seen.append(("exception", type(exception), str(trainer.state)))

    def on_fit_end(self, trainer, pl_module):
        self.seen.append("fit end")

    def teardown(self, trainer, pl_module, stage):
        self.seen.append(("teardown", stage, str(trainer.state)))


# --- modules without methods, or with removed ones -----------------------------------------------------------------


class WithData(Classifier):
    def train_dataloader(self):
        return data(4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def without(name):
    return type(f"Without_{name}", (WithData,), {name: None})


def having(name):
    return type(f"Having_{name}", (WithData,), {name: lambda self, *args: None})


LACKING = {
    "fit": [
        *map(without, ("training_step", "configure_optimizers", "train_dataloader", "val_dataloader")),
        *map(having, ("training_epoch_end", "validation_epoch_end", "configure_sharded_model")),
    ],
    "validate": [*map(without, ("val_dataloader", "validation_step")), having("validation_epoch_end")],
    "test": [without("test_step"), having("test_epoch_end")],
    "predict": [LightningModule, *map(without, ("predict_dataloader", "predict_step", "forward"))],
}


@pytest.mark.parametrize(
    ("function", "module"), [(function, module) for function in FUNCTIONS for module in LACKING[function]]
)
def test_errors_about_missing_methods_equal_lightnings(function, module):
    theirs, mine = run_both(lambda make: outcome(getattr(make(fast_dev_run=True), function), module()))
    assert mine == theirs


def test_module_of_torch_is_refused_with_the_missing_methods():
    with pytest.raises(TypeError, match=r"must be a `LightningModule` .* got `Linear`") as caught:
        make_trainer(None).fit(nn.Linear(2, 1), data(2))
    (note,) = caught.value.__notes__
    assert "pass Module(Linear(...))" in note
    names = {"L": lightning, "torch": torch, "loss_function": nn.functional.mse_loss}
    exec(textwrap.dedent(note.partition(":\n")[2]), names)
    module = names["Module"](nn.Linear(6, 3))
    make_trainer(None, max_steps=2).fit(module, loader_of(make_batches(2)))
    assert module.trainer.global_step == 2


@pytest.mark.parametrize("evaluating", [[], ["net.0", "net.2"], [""]])
def test_warning_about_parts_in_eval_mode_equals_lightnings(evaluating):
    def scenario(make):
        module = Classifier()
        for name in evaluating:
            module.get_submodule(name).eval()
        started = outcome(make(max_epochs=1).fit, module, data(2), data(2))
        return started, outcome(make(max_epochs=0).fit, module, data(2), data(2))

    theirs, mine = run_both(scenario)
    assert mine == theirs


# --- ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "method", "error"),
    [
        ("fit", "setup", SystemExit),
        ("fit", "on_sanity_check_start", RuntimeError),
        ("fit", "training_step", SystemExit),
        ("fit", "on_train_epoch_end", RuntimeError),
        ("fit", "on_train_end", RuntimeError),
        ("validate", "validation_step", RuntimeError),
        ("predict", "predict_step", SystemExit),
    ],
)
def test_run_that_fails_leaves_the_trainer_as_lightnings_is(function, method, error):
    def scenario(make):
        ends, logger, module = Ends(), RecordingLogger(), Classifier()
        vars(module)[method] = Mock(side_effect=error)
        trainer = make(max_epochs=1, callbacks=[ends], logger=logger)
        raised = outcome(getattr(trainer, function), module, data(4), *[data(2)] * (function == "fit"))
        stages = (trainer.training, trainer.validating, trainer.testing, trainer.predicting, trainer.sanity_checking)
        state = (str(trainer.state), trainer.interrupted, stages, trainer.current_epoch, trainer.global_step)
        assert "log" not in vars(module)
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_autocast_enabled("cpu")
        again = outcome(trainer.validate, Classifier(), data(4), verbose=False)  # the run may continue
        return raised, state, again, ends.seen, logger.status

    theirs, mine = run_both(scenario)
    assert mine == theirs


class Runs(Callback):
    """Calls ``run(trainer, module)`` once, in one hook."""

    def __init__(self, hook, run):
        self.calls = itertools.count()
        setattr(self, hook, lambda *given: next(self.calls) or run(*given[:2]))


def start(trainer, function, module):
    getattr(trainer, function)(module, *[data(2)] * (1 + (function == "fit")))


@pytest.mark.filterwarnings("ignore:Nothing to do")  # of a fit after the fit
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("hook", "refused"), [("on_fit_start", True), ("on_train_batch_end", True), ("on_fit_end", False)]
)
def test_run_inside_a_fit_is_refused_except_at_its_end(tmp_path, function, hook, refused):
    runs = Runs(hook, lambda trainer, module: start(trainer, function, module))
    trainer = make_trainer(tmp_path, callbacks=[runs])
    message = rf"`trainer.{function}` was called in {hook} .* in on_fit_end"
    with pytest.raises(ConfigurationError, match=message) if refused else nullcontext():
        trainer.fit(Classifier(), data(4), data(2))
    assert next(runs.calls)
    assert (trainer.interrupted, trainer.state.finished) == (refused, not refused)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("hook", "copies", "refused"),
    [("on_train_batch_end", False, True), ("on_train_batch_end", True, False), ("on_fit_end", False, False)],
)
def test_another_trainer_needs_a_copy_of_the_module_during_a_fit(tmp_path, function, hook, copies, refused):
    def run(trainer, module):
        start(make_trainer(tmp_path), function, copy.deepcopy(module) if copies else module)

    module, trainer = Classifier(), make_trainer(tmp_path, callbacks=[Runs(hook, run)])
    message = rf"`Trainer.{function}` was called in {hook} .*copy.deepcopy"
    with pytest.raises(ConfigurationError, match=message) if refused else nullcontext():
        trainer.fit(module, data(4), data(2))
    if not refused:
        make_trainer(tmp_path).fit(alone := Classifier(), data(4), data(2))
        assert trainer.global_step == 2
        assert (function == "fit" and not copies) or all(map(torch.equal, alone.parameters(), module.parameters()))


def test_tuner_ends_the_run_successfully():
    def scenario(make):
        ends, tunes = Ends(), LambdaCallback(on_fit_start=Mock(side_effect=TunerExit))
        trainer = make(max_epochs=1, callbacks=[ends, tunes])
        return trainer.fit(WithData()), str(trainer.state), ends.seen, trainer.global_step

    theirs, mine = run_both(scenario)
    assert mine == theirs


def overflowing(steps):
    """Fits two columns; the gradients of its first ``steps`` batches are infinite."""

    class Overflowing(Regression):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (float("inf") if self.trainer.global_step < steps else 1.0)

    return Overflowing()


def test_fit_with_only_skipped_steps_fails_with_a_message(tmp_path, caplog):
    summary = RunSummary(console=Console(file=io.StringIO(), width=300))
    trainer, module = make_trainer(tmp_path, precision="16-mixed", callbacks=[summary]), overflowing(3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.fit(module, loader_of(make_batches(3)))
    (message,) = [one for one in caplog.messages if "No weight was updated" in one]
    assert "all 3 optimizer steps were skipped" in message
    assert "Overflowing.training_step" in message
    assert all(value.equal(before[name]) for name, value in module.state_dict().items())
    assert (summary.summary["status"], trainer.skipped_steps) == ("failed", 3)
    assert summary.summary["error"] == message


def test_one_completed_step_suffices_also_after_a_resume(tmp_path):
    loader = loader_of(make_batches(3))
    first = make_trainer(tmp_path, precision="16-mixed")
    first.fit(overflowing(2), loader)
    first.save_checkpoint(tmp_path / "first.ckpt")
    summary = RunSummary(console=Console(file=io.StringIO()))
    second = make_trainer(tmp_path, precision="16-mixed", max_epochs=2, callbacks=[summary])
    second.fit(overflowing(6), loader, ckpt_path=tmp_path / "first.ckpt")  # every step of this part is skipped
    assert (summary.summary["status"], second.skipped_steps) == ("completed", 5)


@pytest.mark.filterwarnings("ignore:Optimizer step 0 of epoch 0 was skipped")
def test_steps_that_are_skipped_in_float32_count_as_well(tmp_path, caplog):
    make_trainer(tmp_path, callbacks=[NonFiniteGuard("skip")]).fit(overflowing(3), loader_of(make_batches(3)))
    (message,) = [one for one in caplog.messages if "No weight was updated" in one]
    assert "all 3 optimizer steps were skipped" in message
    assert "Not finite in float32 either: mul in the forward pass, Overflowing.training_step" in message


class Idle(Regression):
    """Trains no batch, returns no loss, or takes no step in manual optimization."""

    def __init__(self, why):
        super().__init__()
        self.why = why
        self.automatic_optimization = why != "no step"

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.why == "no batch" else None

    def training_step(self, batch, batch_idx):
        return None if self.why == "no loss" else super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return None if self.why == "no optimizer" else super().configure_optimizers()


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize(("why", "options", "message"), [
    ("no batch", {}, "no batch was trained in 2 epochs"),
    ("no loss", {}, "`training_step` returned no loss with a weight above 0 in 6 batches. Return the loss, or set"
     " `self.automatic_optimization = False` if it steps the optimizers itself"),
    ("no step", {}, "the module stepped no optimizer in 6 batches (`automatic_optimization = False`)"),
    ("no optimizer", {}, None),
    ("no batch", {"limit_train_batches": 0}, None),
    ("no loss", {"max_epochs": 0}, None),
    ("no loss", {"fast_dev_run": 2}, None),
])  # fmt: skip
def test_fit_that_changes_no_weight_fails_with_the_reason(tmp_path, caplog, why, options, message):
    summary = RunSummary(console=Console(file=io.StringIO()))
    trainer = make_trainer(tmp_path, callbacks=[summary], **({"max_epochs": 2} | options))
    trainer.fit(Idle(why), loader_of(make_batches(3)))
    found = [one for one in caplog.messages if "updated no weight" in one]
    assert found == ([] if message is None else [f"The Trainer has updated no weight: {message}."])
    if found:
        assert (summary.summary["status"], summary.summary["error"]) == ("failed", found[0])


def test_fit_that_trains_no_step_after_an_earlier_fit_names_the_cause(tmp_path, caplog):
    """Of another module, which stays untrained, or of the same one. A complete run that is resumed needs no warning."""
    caplog.set_level("INFO")
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(Regression(), loader_of(make_batches(3)))
    path = tmp_path / "complete.ckpt"
    trainer.save_checkpoint(path)
    for module in (trainer.lightning_module, Regression()):
        before = copy.deepcopy(module.state_dict())
        with pytest.warns(UserWarning, match="Nothing to do") as caught:
            trainer.fit(module, loader_of(make_batches(3)))
        assert_identical(module.state_dict(), before)
        (text,) = {str(one.message) for one in caught}
        assert "already trained 3 optimizer steps in an earlier fit, and its counters continue" in text
        assert "To train another module, or the same one from the start, use a new Trainer." in text
        assert "a larger max_epochs (or max_steps) to a new Trainer, and a checkpoint of this run" in text
    make_trainer(tmp_path, max_epochs=1).fit(Regression(), loader_of(make_batches(3)), ckpt_path=path)
    assert "Nothing to do: the run has already trained 3 optimizer steps and is complete." in caplog.text


class Draws(Regression):
    """Draws ``count`` batches for a step."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def training_step(self, dataloader_iter):
        losses = [loss_of(self.net, next(dataloader_iter)[0]) for _ in range(self.count)]
        return torch.stack(losses).mean()


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@pytest.mark.parametrize("count", [2, 3, 4])
def test_step_that_draws_more_batches_than_an_epoch_has_is_an_error(tmp_path, count):
    trainer = make_trainer(tmp_path, max_epochs=2, limit_train_batches=3)
    message = r"The first training_step drew all 3 batches .* raise limit_train_batches"
    with nullcontext() if count < 4 else pytest.raises(ConfigurationError, match=message):
        trainer.fit(Draws(count), loader_of(make_batches(5)))
    assert trainer.global_step == 2 * (count < 4)


# --- predictions --------------------------------------------------------------------------------------------------


class Echo(Classifier):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch, batch_idx, dataloader_idx


@pytest.mark.parametrize(
    ("loaders", "return_predictions"),
    [
        (itertools.count, None),
        (itertools.count, False),
        (lambda: [[0, 1]], True),
        (lambda: [[0, 1], [2, 3, 4, 5]], None),
        (lambda: {"a": [0, 1], "b": [2, 3]}, True),
        (list, None),
    ],
    ids=["one", "not returned", "a list of one", "unequal", "named", "none"],
)
def test_predictions_have_lightnings_shape(loaders, return_predictions):
    def scenario(make):
        trainer = make(limit_predict_batches=3)
        returned = outcome(trainer.predict, Echo(), loaders(), return_predictions=return_predictions)
        return returned, trainer.predict_loop.predictions

    theirs, mine = run_both(scenario)
    assert mine == theirs


# --- the modes of submodules --------------------------------------------------------------------------------------


def test_frozen_parts_keep_their_mode_in_every_stage():
    class PartlyFrozen(WithData):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(2, 2).eval().requires_grad_(False)
            self.seen = []

        def forward(self, features):
            self.seen.append((str(self.trainer.state.stage), self.training, self.net.training, self.frozen.training))
            return super().forward(features)

        def on_test_model_train(self):
            """Leave the modes as they are in the test."""

    def scenario(make):
        trainer, module = make(max_epochs=1, val_check_interval=1), PartlyFrozen()
        for function in FUNCTIONS:
            outcome(getattr(trainer, function), module)
            module.seen.append((module.training, module.frozen.training))
        return module.seen

    theirs, mine = run_both(scenario)
    assert mine == theirs
    assert not any(seen[-1] for seen in mine)
