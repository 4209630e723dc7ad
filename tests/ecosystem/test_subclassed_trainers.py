"""A Trainer's subclass with its own loop, as in torch-uncertainty, or its own parts, as in ptlflow."""

import pytest
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from tests.parity import QUIET, Classifier, data, run_both
from trainer import Trainer
from trainer.errors import ConfigurationError


class TableLoop(_EvaluationLoop):
    """Prints logged values of a test in a custom format."""

    verbose: bool

    @staticmethod
    def _print_results(results, stage):
        print(stage, [sorted((name, f"{value.item():.3%}") for name, value in result.items()) for result in results])


class PoliteLoop(_EvaluationLoop):
    def on_run_end(self):
        return super().on_run_end()


class Logging(Classifier):
    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("loss", self.loss(batch))


def with_table(base):
    class TableTrainer(base):
        def __init__(self, inference_mode=True, **kwargs):
            super().__init__(inference_mode=inference_mode, **kwargs)
            self.test_loop = TableLoop(self, TrainerFn.TESTING, RunningStage.TESTING, inference_mode=inference_mode)

    return TableTrainer


def test_loop_with_its_own_table(capsys):
    def scenario(make):
        trainer = with_table(type(make()))(**QUIET)
        results = trainer.test(Logging(), [data(4), data(6, seed=1)])
        return results, capsys.readouterr().out, trainer.test_loop.verbose

    theirs, mine = run_both(scenario)
    assert mine == theirs
    assert "dataloader_idx_1" in mine[1]


@pytest.mark.parametrize("place", ["test_loop", "fit_loop"])
def test_loop_that_would_not_run_is_refused(place):
    class OwnFitLoop(_FitLoop):
        def advance(self):
            pass

    trainer = Trainer(**QUIET)
    stage = (TrainerFn.TESTING, RunningStage.TESTING)
    loop = OwnFitLoop(trainer) if place == "fit_loop" else PoliteLoop(trainer, *stage)
    with pytest.raises(ConfigurationError, match=rf"for `{place}`, expected .* not (advance|on_run_end): the loops"):
        setattr(trainer, place, loop)


class OwnRun(Trainer):
    def _run(self, *args, **kwargs):
        return super()._run(*args, **kwargs)


class OwnConnector(Trainer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._checkpoint_connector = _CheckpointConnector(self)


@pytest.mark.parametrize(("kind", "name"), [(OwnRun, "_run"), (OwnConnector, "_checkpoint_connector")])
def test_private_parts_that_would_not_run_are_refused(kind, name):
    with pytest.raises(ConfigurationError, match=rf"Got a {kind.__name__} with its own {name}, expected"):
        kind(**QUIET).fit(Classifier(), data(2))
