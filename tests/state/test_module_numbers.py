"""Numbers in attributes of modules of other packages: which are saved, restored, or reported."""

import torch
from torch import nn

from trainer.state.module_numbers import ModuleNumbers


def modules():
    return [nn.Dropout(0.5), nn.BatchNorm1d(2), nn.CrossEntropyLoss()]


def test_only_changed_numbers_are_saved_and_restored():
    changed, new = modules(), modules()
    before, after = ModuleNumbers(changed), ModuleNumbers(new, {"training"})
    assert before.read() == {}
    changed[0].p, changed[1].momentum, changed[1].cache = 0.25, None, torch.ones(1)
    saved = before.read()
    assert saved == {0: ["Dropout", {"p": 0.25}], 1: ["BatchNorm1d", {"momentum": None}]}
    new[0].p = 0.25
    new[0].training = False
    assert after.read() == {0: ["Dropout", {"p": 0.25}]}
    assert after.write(saved) == ""
    assert (new[0].p, new[1].momentum, new[2].label_smoothing) == (0.25, None, 0.0)
    assert after.read() == saved


def test_modules_that_do_not_exist_any_more_are_named():
    message = ModuleNumbers([nn.Linear(1, 1)]).write({0: ["Dropout", {"p": 0.1}], 7: ["GELU", {"approximate": "tanh"}]})
    assert message.endswith("other modules now: Dropout.p, GELU.approximate.")
