"""Weights of modules outside of the LightningModule: which are saved, restored, or reported."""

import torch
from torch import nn

from trainer.state.outside_modules import OutsideModules


def test_only_changed_tensors_are_saved_and_restored():
    modules = [nn.BatchNorm1d(2), nn.Linear(2, 1)]
    outside = OutsideModules(modules)
    assert outside.read(copies=True) == {}
    modules[0].num_batches_tracked.add_(1)
    modules[1].weight.data.mul_(2)  # does not change the tensor's version
    saved = {number: value.clone() for number, value in outside.read(copies=True).items() if value is not None}
    assert [(number, value.shape) for number, value in saved.items()] == [(4, ()), (5, (1, 2))]
    new = [nn.BatchNorm1d(2), nn.Linear(2, 1)]
    resumed = OutsideModules(new)
    assert resumed.write(saved) == ""
    assert new[0].num_batches_tracked == 1
    assert torch.equal(new[1].weight, modules[1].weight)
    assert [*resumed.read(copies=True)] == [4, 5]


def test_tensors_that_are_saved_elsewhere_are_left_out():
    module = nn.Linear(2, 1)
    outside = OutsideModules([module], {module.weight.untyped_storage()._cdata})
    module.weight.data.zero_()
    assert outside.read(copies=True) == {}


def test_tensors_that_are_not_restored_are_named():
    module = nn.Linear(2, 1)
    outside = OutsideModules([module])
    module.bias.data.add_(1)
    assert outside.read(copies=False) == {1: None}
    assert "Linear.bias. Either several processes wrote the checkpoint" in outside.write({1: None})
    assert "Linear.weight, Linear.bias, tensor 2" in outside.write({n: torch.zeros(3) for n in range(3)})
