import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainer.diagnosis.trace import _REPLAY, Magnitude, Trace, _place_in, measure


class Net(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.eye_(self.first.weight)
        nn.init.zeros_(self.first.bias)
        self.step = step

    def forward(self, x):
        return self.last(self.step(self.first(x))).sum()


def followed(step):
    """Return the trace of a forward and a backward pass."""
    net = Net(step)
    x = torch.arange(4.0).expand(2, 4)
    trace = Trace(net)
    with trace:
        loss = net(x)
        with trace.follow(loss):
            loss.backward()
    return trace


def traced(step):
    """Return the origins in the forward and the backward pass."""
    trace = followed(step)
    return trace.forward, trace.backward


FORWARD = {
    "div": lambda x: (x - x) / (x - x),
    "log": lambda x: (x - 5).log(),
    "sqrt": lambda x: (x - 5).sqrt(),
    "exp": lambda x: (x * 1000).exp(),
    "pow": lambda x: (x - 5) ** 0.5,
    "std": lambda x: x[:1].std(dim=0).expand(2, 4),
    "softmax": lambda x: F.softmax(x.masked_fill(x > -1, -torch.inf), dim=1),
}


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("name", FORWARD)
def test_the_operation_of_the_forward_pass(name):
    forward, _ = traced(FORWARD[name])
    assert (forward.name, forward.phase, forward.module, forward.kind) == (name, "forward", "", "Net")
    assert forward.file == __file__
    assert forward.source.strip().startswith(f'"{name}": lambda')
    assert "first" in forward.sources or name == "exp"
    assert forward.inputs.not_finite == 0 or name == "softmax"
    assert forward.outputs.not_finite > 0
    assert forward.is_nan is (name != "exp")


def test_a_nan_made_of_an_infinity_goes_back_to_it():
    forward, _ = traced(lambda x: (x * 1000).exp() - (x * 1000).exp())
    assert (forward.name, forward.is_nan) == ("exp", False)


@pytest.mark.parametrize(
    "fill", [lambda x: x.masked_fill(x > 2, -torch.inf), lambda x: torch.where(x > 2, torch.inf, x)]
)
def test_an_infinity_that_is_written_on_purpose_does_not_count(fill):
    forward, _ = traced(lambda x: F.softmax(-fill(x).abs(), dim=1))
    assert forward is None


@pytest.mark.parametrize(
    ("name", "step"), [("sqrt", lambda x: x.sqrt()), ("pow", lambda x: x**0.5), ("acos", lambda x: (x / 3).acos())]
)
def test_the_operation_of_the_backward_pass(name, step):
    forward, backward = traced(step)
    assert forward is None
    assert (backward.name, backward.phase) == (name, "backward")
    assert backward.file == __file__
    assert backward.sources[0] == "first"
    assert (backward.inputs.not_finite, backward.outputs.not_finite > 0) == (0, True)


def test_a_module_in_which_it_is_made():
    class Inner(nn.Module):
        def forward(self, x):
            return (x - 5).log()

    forward, _ = traced(Inner())
    assert (forward.module, forward.kind, forward.place) == ("step", "Inner", "'step' (Inner)")


def test_nothing_where_all_is_finite_and_hooks_are_removed():
    assert traced(nn.ReLU()) == (None, None)
    assert not nn.modules.module._global_forward_hooks | nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([torch.tensor([1.0, -3.0])], Magnitude(3.0, 0, 2, "float32")),
        ([torch.tensor([1.0, torch.nan, -torch.inf])], Magnitude(1.0, 2, 3, "float32")),
        ([torch.tensor([1.0]), torch.tensor([torch.inf]).half()], Magnitude(1.0, 1, 2, "float16")),
        ([torch.tensor([3 + 4j])], Magnitude(4.0, 0, 2, "float32")),
        ([torch.tensor([1])], None),
        ([torch.tensor([])], None),
    ],
)
def test_the_elements_of_tensors(tensors, expected):
    assert measure(tensors) == expected


@pytest.mark.filterwarnings("ignore:.*torch.jit:")
def test_scripted_modules_and_function_transforms():
    """The first cannot have hooks, and the tensors of the second cannot be read."""

    def step(net, x):
        return torch.func.vmap(torch.func.grad(lambda row: (net.layer(row) * 2).sum()))(x).sum() * float("nan")

    net = nn.Module()
    net.layer = torch.jit.trace(nn.Linear(3, 3), torch.ones(1, 3))
    with Trace(net) as trace:
        step(net, torch.ones(2, 3))
    assert trace.forward.name == "mul"


class Divides(torch.autograd.Function):
    """Divides by 0 in one of the passes."""

    @staticmethod
    def forward(ctx, x, phase):
        ctx.phase = phase
        return x / 0 if phase == "forward" else x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 0, None


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_code_of_a_custom_function(phase):
    trace = followed(lambda x: Divides.apply(x, phase))
    found = trace.without_gradient if phase == "forward" else trace.backward
    assert (found.name, found.phase, found.module, found.file) == ("div", phase, "", __file__)
    assert "/ 0" in found.source


def test_operations_without_gradients_are_separate():
    @torch.no_grad()
    def step(x):
        return (x - 5).log() + torch.empty(4).fill_(torch.nan)

    net = Net(lambda x: x + step(x))
    with Trace(net) as trace:
        net(torch.arange(4.0).expand(2, 4))
    assert trace.forward is None
    assert trace.without_gradient.name == "log"


def test_place_is_in_the_program_or_without_one_in_an_installed_package(tmp_path):
    package = str(tmp_path / "site-packages" / "net.py")
    file, function = _REPLAY
    place = {
        "mode": (file, 5, "__torch_function__"), "replay": (file, 1, function), "package": (package, 2, "forward"),
        "user": (__file__, 3, "training_step"), "torch": (torch.__file__, 4, "log"),
    }  # fmt: skip
    for names, expected in {
        "mode torch package user replay": "user", "torch package replay user": "package", "torch replay user": None,
    }.items():  # fmt: skip
        assert _place_in(place[name] for name in names.split()) == place.get(expected, ("", 0))[:2]
