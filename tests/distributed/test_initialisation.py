"""Modules created on the meta device get the values of a normal construction, or an error names the missing ones."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from tests.parity import CLASSES, FEATURES, Learner, assert_same_weights, data, ours
from trainer.distributed.initialisation import initialise
from trainer.errors import ConfigurationError

CPU = torch.device("cpu")


def build():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 2))


def on_meta(make):
    with torch.device("meta"):
        return make()


def test_modules_are_initialized_as_by_their_constructors():
    torch.manual_seed(0)
    expected, model = build(), on_meta(build)
    torch.manual_seed(0)
    initialise(model, CPU)
    assert_same_weights(model, expected)


def test_initialized_parameters_keep_their_values():
    model = build()
    before = deepcopy(model)
    initialise(model, CPU)
    assert_same_weights(model, before)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.other.weight = self.one.weight
        self.one.weight.requires_grad_(False)


def test_shared_parameters_stay_shared():
    model = on_meta(Tied)
    initialise(model, CPU)
    assert model.one.weight is model.other.weight
    assert not model.one.weight.requires_grad
    assert model.one.weight.isfinite().all()


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))


def test_uninitialized_parameters_are_named():
    model = nn.Sequential(nn.Linear(3, 3))
    model.add_module("own", on_meta(Own))
    with pytest.raises(ConfigurationError, match=r"own\.scale \(Own\), own\.mask \(Own\).*reset_parameters\(\)"):
        initialise(model, CPU)


class Pretrained(nn.Module):
    """As in Hugging Face's models, a method of the parent initializes its parts."""

    def __init__(self):
        super().__init__()
        self.layer, self.own = nn.Linear(3, 3), Own()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)
        elif isinstance(module, Own):
            nn.init.ones_(module.scale)


def test_module_around_may_fill_its_parts():
    model = on_meta(Pretrained)
    initialise(model, CPU)
    assert (model.layer.weight == 0.5).all()
    assert (model.own.scale == 1).all()


class Whole(Own):
    """Initializes all parameters itself."""

    def __init__(self, leaves_out=False):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.leaves_out = leaves_out

    def init_weights(self):
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.fill_(0.25)
            self.mask.fill_(True)
            if not self.leaves_out:
                self.scale.fill_(2.0)


@pytest.mark.parametrize("method", ["init_weights", "_init_weights"])
def test_integers_that_no_method_fills_are_named(method):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("ids", torch.arange(3))

    setattr(Positions, method, lambda *_: None)
    with pytest.raises(ConfigurationError, match=r"without values: ids"):
        initialise(on_meta(Positions), CPU)
    setattr(Positions, method, lambda self, *_: self.ids.copy_(torch.arange(3)))
    initialise(filled := on_meta(Positions), CPU)
    assert filled.ids.tolist() == [0, 1, 2]


def test_init_weights_has_precedence():
    model = on_meta(Whole)
    initialise(model, CPU)
    assert (model.layer.weight == 0.25).all()
    assert (model.scale == 2).all()


def test_parameters_left_out_by_init_weights_are_named():
    with pytest.raises(ConfigurationError, match=r"without values: scale\."):
        initialise(on_meta(lambda: Whole(leaves_out=True)), CPU)


class Configured(Learner):
    """A module created on the meta device for any engine."""

    def configure_model(self):
        with torch.device("meta"):
            self.net = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def test_run_initializes_the_modules_of_configure_model():
    nets = []
    for module in (Configured(), Learner()):
        torch.manual_seed(3)
        if type(module) is Learner:
            module.net = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))
        ours(max_epochs=1).fit(module, data(8))
        nets.append(module.net)
    assert_same_weights(*nets)
