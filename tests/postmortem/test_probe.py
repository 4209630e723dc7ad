from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanSquaredError

from tests.postmortem.layers import Amplifier, Huge, OwnCode, Residual, sequential
from trainer.postmortem.probe import Magnitude, Probe, measure
from trainer.postmortem.replay import backward


def probed(net: nn.Module, x: Tensor | None = None, scale: float = 1.0) -> Probe:
    """Run one forward and backward pass under float16 autocast, as a replay does."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)) if x is None else x
    with Probe(net) as probe:
        with torch.autocast("cpu", torch.float16):
            loss = net(x).float().square().mean()
        probe.start_backward()
        backward(loss, scale, dict(net.named_parameters()), probe.look)
        probe.end_backward()
    return probe


# --- magnitudes ---------------------------------------------------------------------------------------------------


def test_magnitude_of_a_tensor():
    tensor = torch.tensor([1.0, -3.0, math.inf, math.nan, -math.inf], dtype=torch.float16)
    assert measure([tensor]) == Magnitude(3.0, 3, 5, "float16")
    assert measure([torch.full((2,), math.nan)]) == Magnitude(0.0, 2, 2, "float32")


def test_magnitude_of_several():
    finite, broken = torch.tensor([2.0, -8.0]), torch.tensor([math.inf, 4.0], dtype=torch.float16)
    assert measure([finite, broken]) == Magnitude(8.0, 1, 4, "float16")
    assert measure([broken, finite]) == Magnitude(8.0, 1, 4, "float16")
    assert measure([finite, finite.half()]) == Magnitude(8.0, 0, 4, "float32")


def test_tensors_without_a_magnitude():
    assert measure([torch.arange(3), torch.empty(0)]) is None


# --- places -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(1, 7))
def test_infinity_forward(place):
    probe = probed(sequential(Huge(), place))
    assert probe.first_output is not None
    assert (probe.first_output.name, probe.first_output.kind) == (str(place), "Huge")
    assert probe.first_output.inputs is not None
    assert not probe.first_output.inputs.not_finite
    assert probe.first_output.outputs is not None
    assert probe.first_output.outputs.not_finite


@pytest.mark.parametrize("place", range(1, 7))
def test_infinity_backward(place):
    probe = probed(sequential(Amplifier(), place), scale=1024.0)
    origin = probe.origin()
    assert probe.first_output is None
    assert origin is not None
    assert origin.after is None
    assert origin.parameter is None
    assert (origin.call.name, origin.call.kind) == (str(place), "Amplifier")
    assert origin.call.gradient_in is not None
    assert not origin.call.gradient_in.not_finite
    assert origin.call.gradient_out is not None
    assert origin.call.gradient_out.not_finite
    assert probe.first_gradient is not None
    assert probe.first_gradient.name == str(place - 1)  # it receives the gradient of this layer


def test_which_parameters():
    net = sequential(Amplifier(), 5)
    assert set(probed(net, scale=1024.0).parameters) == {
        "0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"
    }  # fmt: skip


def test_no_finding_for_finite_values():
    probe = probed(sequential())
    assert (probe.first_output, probe.first_gradient, probe.origin(), probe.parameters) == (None, None, None, [])


def test_weight_gradient_that_overflows_by_itself():
    """The gradient of the weight is a sum over the batch; those of the inputs are not."""
    net = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 1, bias=False))
    for layer in net:
        nn.init.constant_(layer.weight, 1e-3)
    x = torch.full((4096, 6), 100.0)
    with Probe(net) as probe:
        with torch.autocast("cpu", torch.float16):
            loss = net(x).float().sum()
        probe.start_backward()
        backward(loss, 4096.0, dict(net.named_parameters()), probe.look)
    origin = probe.origin()
    assert origin is not None
    assert (origin.call.name, origin.parameter, probe.first_gradient) == ("1", "1.weight", None)
    assert origin.call.inputs is not None
    assert origin.call.inputs.largest == pytest.approx(0.6, abs=1e-3)


@pytest.mark.parametrize("forward", [True, False])
def test_code_between_layers(forward):
    net = sequential(OwnCode(forward), 5)
    probe = probed(net, scale=1024.0)
    if forward:
        assert probe.first_output is not None
        assert probe.first_output.name == "5.second"
        assert probe.first_output.inputs is not None
        assert probe.first_output.inputs.not_finite
        assert probe.first_output.caller is not None
        assert probe.first_output.caller.name == "5"
    else:
        origin = probe.origin()
        assert origin is not None
        assert origin.after is not None
        assert (origin.call.name, origin.after.name) == ("5", "5.first")


def test_input_with_two_users_blames_the_right_one():
    net = nn.Sequential(nn.Linear(6, 16), Residual(nn.Linear(16, 16), Amplifier(), nn.Linear(16, 16)), nn.Linear(16, 3))
    origin = probed(net, scale=1024.0).origin()
    assert origin is not None
    assert origin.call.name == "1.body.1"

    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.good, self.bad = (
                nn.Linear(6, 16),
                nn.Linear(16, 3),
                nn.Sequential(Amplifier(), nn.Linear(16, 3)),
            )

        def forward(self, x):
            x = self.stem(x)
            return self.bad(x) + self.good(x)

    origin = probed(Fork(), scale=1024.0).origin()
    assert origin is not None
    assert origin.call.name == "bad.0"


def test_deep_nesting_and_repeated_calls():
    shared = nn.Linear(16, 16)
    net = nn.Sequential(
        nn.Linear(6, 16), nn.Sequential(shared, nn.Sequential(shared, Huge(), shared)), nn.Linear(16, 3)
    )
    probe = probed(net)
    assert probe.first_output is not None
    assert probe.first_output.name == "1.1.1"
    net[1][1][1] = nn.Identity()
    torch.nn.init.constant_(shared.weight, 100.0)
    probe = probed(net)
    assert probe.first_output is not None
    assert (probe.first_output.name, probe.first_output.number) == ("1.0", 2)
    assert probe.first_output.caller is not None
    assert probe.first_output.caller.name == "1.1"


def test_activation_checkpointing():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.body, self.head = (
                nn.Linear(6, 16),
                nn.Sequential(nn.Linear(16, 16), Amplifier()),
                nn.Linear(16, 3),
            )

        def forward(self, x):
            return self.head(checkpoint(self.body, self.stem(x), use_reentrant=False))

    probe = probed(Checkpointed(), scale=1024.0)
    origin = probe.origin()
    assert origin is not None
    assert (origin.call.name, origin.call.number) == ("body.1", 1)
    assert set(probe._calls.values()) == {1}  # the recomputation is not a second call
    assert probe.first_output is None


def test_gradients_inside_the_forward_are_not_watched():
    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(6, 1)

        def forward(self, x):
            x = x.clone().requires_grad_()
            y = self.net(x)
            (gradient,) = torch.autograd.grad(y.float().sum() * math.inf, x, retain_graph=True)
            return y + 0 * torch.nan_to_num(gradient.sum())

    probe = probed(Penalty())
    assert (probe.first_gradient, probe.origin(), probe.parameters) == (None, None, [])


def test_metrics_are_not_inputs():
    class Measured(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.metric = nn.Linear(6, 3), MeanSquaredError()

        def forward(self, x):
            y = self.net(x)
            self.metric(torch.full((2,), math.inf), torch.ones(2))
            return y

    assert probed(Measured()).first_output is None


def test_inputs_by_keyword_and_in_tuples():
    class Pair(nn.Module):
        def forward(self, pair, *, other):
            return pair[0] + pair[1] * other

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.pair, self.amplify = nn.Linear(6, 3), Pair(), Amplifier()

        def forward(self, x):
            x = self.stem(x)
            return self.pair((x, self.amplify(x)), other=x.detach())

    probe = probed(Net(), scale=1024.0)
    origin = probe.origin()
    assert origin is not None
    assert origin.call.name == "amplify"


def test_hooks_are_removed():
    net = sequential(Amplifier(), 3)
    probed(net)
    for part in net.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
        assert not part._forward_hooks_always_called
        assert not part._forward_hooks_with_kwargs
    assert all(not p._backward_hooks for p in net.parameters())
