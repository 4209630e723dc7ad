"""Modules from the meta device get the values that they would have had without it, or an error says which have none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.parity import CLASSES, FEATURES, Learner, data, ours
from trainer.engine.initialisation import initialise
from trainer.errors import ConfigurationError

CPU = torch.device("cpu")


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 2))


def on_meta(make: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def test_each_module_fills_itself_as_when_it_was_made() -> None:
    torch.manual_seed(0)
    expected = build()
    with torch.device("meta"):
        model = build()
    torch.manual_seed(0)
    initialise(model, CPU)
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_what_has_values_keeps_them() -> None:
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    initialise(model, CPU)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.other.weight = self.one.weight
        self.one.weight.requires_grad_(False)


def test_what_is_shared_stays_shared() -> None:
    model = on_meta(Tied)
    initialise(model, CPU)
    assert model.one.weight is model.other.weight
    assert not model.one.weight.requires_grad
    assert model.one.weight.isfinite().all()


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))


def test_what_nobody_fills_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model.add_module("own", on_meta(Own))
    with pytest.raises(ConfigurationError, match=r"own\.scale \(Own\), own\.mask \(Own\).*reset_parameters\(\)"):
        initialise(model, CPU)


class Pretrained(nn.Module):
    """As in Hugging Face's models, a method of the whole fills its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.own = nn.Linear(3, 3), Own()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)
        elif isinstance(module, Own):
            nn.init.ones_(module.scale)


def test_a_module_around_may_fill_its_parts() -> None:
    model = on_meta(Pretrained)
    initialise(model, CPU)
    assert (model.layer.weight == 0.5).all()
    assert (model.own.scale == 1).all()


class Whole(Own):
    """It fills everything itself."""

    def __init__(self, leaves_out: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.leaves_out = leaves_out

    def init_weights(self) -> None:
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.fill_(0.25)
            self.mask.fill_(True)
            if not self.leaves_out:
                self.scale.fill_(2.0)


def test_init_weights_comes_before_all_others() -> None:
    model = on_meta(Whole)
    initialise(model, CPU)
    assert (model.layer.weight == 0.25).all()
    assert (model.scale == 2).all()


def test_what_init_weights_leaves_out_is_named() -> None:
    with torch.device("meta"):
        model = Whole(leaves_out=True)
    with pytest.raises(ConfigurationError, match=r"given values: scale\."):
        initialise(model, CPU)


class Configured(Learner):
    """A module that is made without memory, whichever engine it will run on."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.net = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def test_a_run_fills_what_configure_model_has_made() -> None:
    weights = []
    for module in (Configured(), Learner()):
        torch.manual_seed(3)
        if type(module) is Learner:
            module.net = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))
        ours(max_epochs=1).fit(module, data(8))
        weights.append(module.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
