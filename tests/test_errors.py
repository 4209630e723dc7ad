import pickle
import re
import warnings
from pathlib import Path

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import trainer
from tests.parity import Learner, data, ours
from trainer.errors import (
    ConfigurationError,
    PrecisionError,
    TrainerError,
    UnsupportedError,
    did_you_mean,
    rank_zero_warn,
    warn,
)


@pytest.mark.parametrize("kind", [ConfigurationError, PrecisionError, UnsupportedError])
def test_configuration_error_is_caught_as_lightnings_and_travels_between_processes(kind):
    error = pickle.loads(pickle.dumps(kind("given")))
    assert {TrainerError, ValueError} <= set(kind.__mro__)
    with pytest.raises(MisconfigurationException, match="given"):
        raise error


@pytest.mark.parametrize(("given", "expected"), [("16-mixd", " Did you mean '16-mixed'?"), ("zebra", "")])
def test_did_you_mean(given, expected):
    assert did_you_mean(given, iter(["16-mixed", "bf16-mixed"])) == expected


# --- warnings ---------------------------------------------------------------------------------------------------------


def of_module(name, call):
    """Return a function of the module ``name`` that calls ``call``."""
    namespace = {"__name__": name, "call": call}
    exec(compile("def function():\n    call()", f"/{name}.py", "exec"), namespace)
    return namespace["function"]


@pytest.mark.parametrize("issue", [warn, rank_zero_warn])
@pytest.mark.parametrize("through", [(), ("trainer.loop.fit", "contextlib", "lightning.pytorch.core", "torch.nn")])
def test_warning_points_to_the_innermost_line_of_the_user(issue, through):
    def call():
        issue("text", RuntimeWarning)

    def call_by_user():
        inner()

    inner = of_module("trainer.x", lambda: issue("text", RuntimeWarning))
    own = inner.__globals__["call"].__code__.co_firstlineno
    for name in through:
        inner = of_module(name, inner)
    with pytest.warns(RuntimeWarning, match="text") as caught:
        call_by_user()
    assert (caught[0].filename, caught[0].lineno) == (__file__, own)
    with pytest.warns(RuntimeWarning) as caught:
        of_module("trainer.x", call)()
    assert (caught[0].filename, caught[0].lineno) == (__file__, call.__code__.co_firstlineno + 1)


def test_without_a_line_of_the_user_a_warning_points_to_its_own(monkeypatch):
    monkeypatch.setattr("trainer.errors._is_of_library", lambda frame: True)
    with pytest.warns(UserWarning, match="text") as caught:
        of_module("trainer.x", of_module("trainer.y", lambda: warn("text")))()
    assert caught[0].filename == __file__  # the line that calls `warn`


def test_warning_is_given_once_a_line_and_can_be_ignored_by_module():
    with warnings.catch_warnings(record=True, action="default") as caught:
        for _ in range(3):
            warn("once")
        warnings.filterwarnings("ignore", module=re.escape(__name__))
        warn("never")
    assert [str(one.message) for one in caught] == ["once"]


def test_all_warnings_of_the_package_are_given_by_these_functions():
    for path in Path(trainer.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "stacklevel" not in text, path
        assert not re.search(r"(?<!`)warnings\.warn\(", text), path
        assert not re.search(r"from lightning.*import.*\brank_zero_warn\b", text), path


def without(name):
    return type("Without", (Learner,), {name: lambda *_: None})()


def scenarios():
    def resumed(folder, **arguments):
        ours(max_epochs=1, callbacks=[EarlyStopping("loss", strict=False)]).fit(Learner(), data(4))
        first = ours(max_epochs=1, callbacks=[Keeps()])
        first.fit(Learner(), data(4))
        first.save_checkpoint(folder / "x.ckpt")
        ours(max_epochs=2).fit(Learner(), data(4), ckpt_path=folder / "x.ckpt", **arguments)

    return {
        "no max_epochs": lambda folder: ours(limit_train_batches=1, callbacks=[stops]).fit(Learner(), data(4)),
        "no loss": lambda folder: ours(max_epochs=1).fit(without("training_step"), data(4)),
        "no optimizer": lambda folder: ours(max_epochs=1).fit(without("configure_optimizers"), data(4)),
        "no ModelCheckpoint": lambda folder: ours(max_epochs=1, resume="auto").fit(Learner(), data(4)),
        "callbacks are missing": resumed,
        "any code": lambda folder: resumed(folder, weights_only=False),
    }


stops = LambdaCallback(on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", True))


class Keeps(Callback):
    def state_dict(self):
        return {"kept": 1}


@pytest.mark.parametrize("name", scenarios())
def test_warnings_of_runs_point_to_lines_of_the_user(tmp_path, name):
    with warnings.catch_warnings(record=True, action="always") as caught:
        scenarios()[name](tmp_path)
    own = [one for one in caught if Path(one.filename).is_relative_to(Path(trainer.__file__).parent)]
    assert [(str(one.message), one.lineno) for one in own] == []
    assert [one for one in caught if one.filename == __file__]
