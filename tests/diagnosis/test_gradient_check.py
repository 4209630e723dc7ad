"""GradientCheck reports a wrong backward, accepts a correct one, and does not affect training."""

import re
from itertools import count

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support import Regression, assert_identical, loader_of, make_batches, make_trainer
from trainer.callbacks import GradientCheck
from trainer.errors import ConfigurationError, GradientCheckError


def check(folder, module, batches=None, **arguments):
    """Run the check on ``module``."""
    callback = GradientCheck(**arguments)
    trainer = make_trainer(folder, precision="64-true", callbacks=[callback], max_epochs=3)
    trainer.fit(module, loader_of(batches or make_batches(5)))
    assert trainer.global_step == 1  # it ends the run
    return callback


class Net(nn.Module):
    """A net with random numbers, running statistics, a buffer, kinks, a tied weight, and a recurrence."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.lstm = nn.LSTM(6, 4, batch_first=True)
        self.head = nn.Linear(4, 3)
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x):
        self.gain *= 1.5
        x = self.gain * self.second(F.dropout(F.relu(self.norm(self.first(x))), 0.3, self.training))
        return self.head(self.lstm(x.unsqueeze(1).expand(-1, 3, -1))[0][:, -1])


class Logging(Regression):
    logs = 0

    def log(self, *args, **kwargs):
        self.logs += 1
        super().log(*args, **kwargs)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=4)
        self.log_dict({"x": 1.0})
        return {"loss": loss, "weight": 1.0}


def test_right_backward_passes_and_nothing_is_disturbed(tmp_path, capsys):
    """Weights, statistics, dropout and logs equal those without the check."""
    callback = GradientCheck()
    outcomes = []
    for callbacks in ([callback], []):
        module = Logging(Net())
        trainer = make_trainer(tmp_path, precision="64-true", callbacks=callbacks, limit_train_batches=1)
        torch.manual_seed(3)
        trainer.fit(module, loader_of(make_batches(2)))
        drawn = torch.rand(1)
        outcomes.append([dict(module.state_dict()), trainer.callback_metrics, drawn, module.logs, sorted(vars(module))])
    assert_identical(*outcomes)
    assert callback.problems == {}
    assert "The gradients of 11 parameters agree with finite differences of the loss.\n" in capsys.readouterr().out


def test_sparse_gradients(tmp_path):
    class Words(nn.Embedding):
        def forward(self, x):
            return super().forward(x.argmax(1) % 5)

    assert check(tmp_path, Regression(nn.Sequential(Words(5, 4, sparse=True), nn.Linear(4, 3)))).problems == {}


# --- wrong gradients --------------------------------------------------------------------------------------------------


def product(weight_gain=1.0, input_gain=1.0, missing=False):
    """Compute x @ weight.T with a custom backward, correct or wrong."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.T

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            of_weight = gradient.T @ x
            if missing:
                of_weight[-1] = 0.0
            return input_gain * (gradient @ weight), weight_gain * of_weight

    return Product.apply


class Custom(nn.Module):
    def __init__(self, apply):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.apply_ = apply

    def forward(self, x):
        return self.last(torch.tanh(self.apply_(torch.tanh(self.first(x)), self.middle.weight) + self.middle.bias))


@pytest.mark.parametrize(
    ("mistake", "wrong"),
    [
        ({"weight_gain": 1.01}, ["net.middle.weight"]),
        ({"missing": True}, ["net.middle.weight"]),
        ({"input_gain": 0.5}, ["net.first.weight", "net.first.bias"]),
    ],
)
def test_parameters_with_a_wrong_gradient_are_named(tmp_path, capsys, mistake, wrong):
    check(tmp_path, Regression(Custom(product())))
    assert "agree" in capsys.readouterr().out
    with pytest.raises(GradientCheckError) as error:
        check(tmp_path, Regression(Custom(product(**mistake))))
    message = str(error.value)
    number = f"{len(wrong)} parameter{'s' * (len(wrong) > 1)}"
    assert f" {number} are not the derivatives of the loss, at 3 points" in message
    assert re.findall(r"\n  (\S+): along .*, numerical: \S+, analytical: \S+", message) == wrong
    if "weight_gain" in mistake:
        numerical, analytical = map(float, re.findall(r"(?:numerical|analytical): ([-0-9.e]+)", message))
        assert analytical == pytest.approx(mistake["weight_gain"] * numerical, rel=1e-3)
    assert f"the loss depends on {wrong[-1]!r}" in message
    assert "agree" not in capsys.readouterr().out


def test_small_gradients_are_seen(tmp_path):
    """The derivative of a wide layer is below the tolerance along a random direction, but not along its gradient."""
    torch.manual_seed(0)
    wide, apply = nn.Linear(64, 64, bias=False), product(weight_gain=2.0)
    net = nn.Sequential(nn.Linear(6, 64), wide, nn.Linear(64, 3))
    wide.forward = lambda x: apply(x, wide.weight)
    with pytest.raises(GradientCheckError, match=r"gradients of 1 parameter .*\n  net.1.weight: "):
        check(tmp_path, Regression(net, change=lambda loss, _: loss * 1e-6))


def test_detached_parameter_is_wrong_and_an_unused_one_is_not(tmp_path, capsys):
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.detached = nn.Linear(6, 3), nn.Linear(6, 3)
            self.unused, self.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x):
            return self.used(x) + self.detached(x).detach() + self.frozen

    with pytest.raises(GradientCheckError, match=r"net.detached.weight: .* analytical: 0\n") as error:
        check(tmp_path, Regression(Detached()))
    assert "unused" not in str(error.value)
    assert "frozen" not in str(error.value)
    check(tmp_path, Regression(Detached()), parameters=["net.used.*", "net.unused"])
    assert "The loss does not depend on net.unused.\n" in capsys.readouterr().out


def test_ties_of_the_initialization_are_accepted(tmp_path):
    """A residual branch initialized to zero puts the ReLU behind it on its kink where the trunk is zero."""

    class Residual(nn.Linear):
        def forward(self, x):
            x = F.relu(x)
            return F.relu(x + super().forward(x))

    def net():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), Residual(16, 16), nn.Linear(16, 3))
        for parameter in net[1].parameters():
            nn.init.zeros_(parameter)
        return net

    check(tmp_path, Regression(net()))
    with pytest.raises(GradientCheckError, match=r"net\.1\.bias: "):
        check(tmp_path, Regression(net()), jitter=0.0)


def test_kink_at_the_evaluated_point_is_accepted(tmp_path):
    class Kinked(nn.Linear):
        def forward(self, x):
            biases.append(self.bias.detach().clone())
            return super().forward(x) + 5 * F.relu(self.bias - kink)

    def check_it(attempts):
        torch.manual_seed(0)
        return check(tmp_path, Regression(Kinked(6, 3)), attempts=attempts)

    biases = []
    kink = torch.full((3,), 1e9, dtype=torch.float64)  # far away
    check_it(2)
    kink, second = biases[2], biases[11]  # after two evaluations that must be equal, and four for each parameter
    with pytest.raises(GradientCheckError, match=r"net\.bias: "):
        check_it(1)
    assert check_it(2).problems == {}
    kink = second
    assert check_it(2).problems == {}


# --- inputs of the check ----------------------------------------------------------------------------------------------


def test_first_samples_and_the_precision_of_the_run(tmp_path):
    class Looking(Regression):
        def training_step(self, batch):  # without batch_idx
            x, y, gain = batch["x"]
            seen.append((x.shape, y.shape, gain.shape, len(batch["names"]), torch.zeros(1).dtype))
            return F.mse_loss(self.net(x), y) * gain

    seen = []
    batches = [{"x": tuple(batch), "names": ["a", "b", "c", "d"]} for batch in make_batches(1)]
    check(tmp_path, Looking(), batches, samples=2)
    assert set(seen[:-1]) == {((2, 6), (2, 3), (), 2, torch.float64)}
    assert seen[-1][0] == (4, 6)  # the training step that follows


# --- unsupported modules ----------------------------------------------------------------------------------------------


CALLS = count(1)


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (lambda loss, _: loss * next(CALLS), {}, r"Got a loss of \S+ and then of \S+ for the same w"),
        (lambda loss, _: loss / 0.0, {"samples": 3}, r"a loss of inf and then of inf for the same weights, 3 samples"),
        (lambda loss, _: loss.float(), {}, r"Got torch.float32 of shape \(\) as the loss .* such as x.float\(\)"),
        (lambda *_: None, {}, "Got None as the loss of training_step, expected one float64 number"),
        (lambda loss, _: loss.detach(), {}, r"Got torch.float64 of shape \(\) as the loss .* that requires a gradient"),
        (None, {"parameters": "net.0.wieght"}, "Got 'net.0.wieght' .* Did you mean 'net.0.weight'?"),
    ],
)
def test_unsupported_modules_raise(tmp_path, change, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        check(tmp_path, Regression(change=change), **arguments)


def test_other_precisions_and_manual_optimization_are_refused(tmp_path):
    module, manual = Regression(), Regression()
    manual.automatic_optimization = False
    trainer = make_trainer(tmp_path, precision="bf16-mixed", callbacks=[GradientCheck()])
    with pytest.raises(ConfigurationError, match=r"Got precision='bf16-mixed', .* torch.float32; expected '64-true'"):
        trainer.fit(module, loader_of(make_batches(1)))
    with pytest.raises(ConfigurationError, match="Got Regression with manual optimization"):
        check(tmp_path, manual)
