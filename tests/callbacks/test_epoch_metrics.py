"""OptunaPruning reads the metrics of an epoch, also those that the module logs in ``on_train_epoch_end``."""

from types import SimpleNamespace

import pytest

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.callbacks import OptunaPruning


@pytest.mark.parametrize(
    ("validates", "metric", "values", "most"),
    [
        (False, "number", [0.0, 1.0, 2.0], 2),
        (True, "number", [0.0, 1.0, 2.0], 9),
        (True, "twice", [10.0, 11.0, 12.0], 2),
        (False, "nothing", [], 2),
    ],
)
def test_reports_to_a_study(tmp_path, monkeypatch, validates, metric, values, most):
    """The trial is pruned after ``most`` reports."""
    reports = []
    known = SimpleNamespace(intermediate_values={}, state=SimpleNamespace(is_finished=lambda: False))
    trial = SimpleNamespace(
        study=SimpleNamespace(get_trials=lambda deepcopy: [known]),
        report=lambda value, step: reports.append((step, value)),
        should_prune=lambda: len(reports) >= most,
    )
    monkeypatch.setattr("trainer.callbacks.optuna_pruning.trial_of", lambda *_: trial)
    pruning, again = (OptunaPruning("storage", "study", 0, metric) for _ in range(2))
    trainer = make_trainer(tmp_path, max_epochs=3, callbacks=[pruning], num_sanity_val_steps=0)
    module = Regression()
    module.on_train_epoch_end = lambda: module.log("number", float(module.current_epoch))
    if validates:
        module.validation_step = lambda batch, batch_idx: module.log("twice", 10.0 + module.current_epoch, batch_size=4)
    trainer.fit(module, *[loader_of(make_batches(2))] * (1 + validates))
    assert reports == [*enumerate(values[:most])]
    assert pruning.pruned is bool(values and most == 2)
    assert trainer.current_epoch == (2 if pruning.pruned else 3)
    again.load_state_dict(pruning.state_dict())
    assert again.validations == len(reports)
