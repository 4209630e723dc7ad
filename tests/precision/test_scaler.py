"""The loss scaler in isolation, compared to torch's own."""

import copy
import pickle
import random

import pytest
import torch
from torch import nn

from tests.support import OnMPS
from trainer.errors import PrecisionError
from trainer.precision import LossScaler
from trainer.precision.guard import StepGuard
from trainer.precision.scaler import _any_of

INF, NAN = float("inf"), float("nan")


def parameter(value=1.0):
    return nn.Parameter(torch.tensor([value, value]))


def sgd(*parameters, **options):
    return torch.optim.SGD(parameters, lr=1.0, **options)


def backward(scaler, p, slope=1.0):
    """Compute the scaled gradient of ``slope * p``."""
    scaler.scale((p * slope).sum()).backward()


def train(scaler, p, optimizer, slope=1.0):
    """Train one step. Returns whether it was skipped."""
    p.grad = None
    backward(scaler, p, slope)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return bool(scaler.resolve_outcome().skipped)


# --- same as torch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"init_scale": 8.0, "growth_interval": 3},
        {"init_scale": 1000.5, "growth_factor": 1.7, "backoff_factor": 0.37, "growth_interval": 2},
        {"init_scale": 2.0**120, "growth_factor": 8.0, "growth_interval": 1, "backoff_factor": 0.9},
    ],
)
def test_any_sequence_of_overflows_and_growths(fused, settings):
    """Scale and growth tracker equal torch's, and the host's copy of the scale equals the device's."""
    dice = random.Random(0)
    ours, theirs = LossScaler("cpu", min_scale=1e-30, **settings), torch.amp.GradScaler("cpu", **settings)
    p, q = parameter(), parameter()
    optimizer, other = sgd(p, fused=fused), sgd(q, fused=fused)
    skips = 0
    for _ in range(200):
        slope = dice.choice([1.0, 1.0, 1.0, 0.0, INF, NAN])
        before = p.detach().clone()
        skipped = train(ours, p, optimizer, slope)
        skips += skipped
        assert skipped is (torch.equal(p, before) and slope != 0.0)
        q.grad = None
        theirs.scale((q * slope).sum()).backward()
        theirs.step(other)
        theirs.update()
        assert ours.get_scale() == theirs.get_scale() == ours.current_scale
        assert ours._get_growth_tracker() == theirs._get_growth_tracker() == ours._host_tracker
        assert torch.equal(p, q)
    assert 40 < skips < 120


def test_disabled_is_transparent():
    scaler, p = LossScaler("cpu", enabled=False), parameter()
    optimizer = sgd(p)
    loss = p.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.outcome_is_on_host, scaler.resolve_outcome()) == (True, ((), 1.0, 1.0, False))
    scaler.forget_steps()
    assert torch.equal(p, torch.zeros(2))
    assert (scaler.current_scale, scaler.get_scale(), scaler.state_dict()) == (1.0, 1.0, {})
    scaler.load_state_dict({})
    scaler.load_state_dict({"scale": 3.0, "_growth_tracker": 1})
    assert scaler.current_scale == 1.0


class UnscalesItself(torch.optim.SGD):
    """Steps as apex's ``FusedAdam(capturable=True)`` does: unscales and checks gradients if it is given the scaler."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, grad_scaler=None):
        (group,) = self.param_groups
        scale = torch.ones(()) if grad_scaler is None else grad_scaler._get_scale_async()
        if grad_scaler is None or not any(grad_scaler._check_inf_per_device(self).values()):
            for p in group["params"]:
                p.data.sub_(p.grad / scale, alpha=group["lr"])


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")
@pytest.mark.parametrize("guards", [False, True])
def test_gradients_are_unscaled_once_for_optimizers_that_unscale_them_themselves(guards):
    """pytorch #129922 is about this argument of ``step``. torch's scaler passes itself with scaled gradients."""
    scaler = StepGuard("cpu") if guards else LossScaler("cpu", init_scale=8.0)
    reference = torch.amp.GradScaler("cpu", init_scale=8.0)
    p, q = parameter(), parameter()
    mine, theirs = (UnscalesItself([one], lr=1.0) for one in (p, q))
    for slope in (1.0, INF, 2.0):
        assert train(scaler, p, mine, slope) is (slope == INF)
        q.grad = None
        reference.scale((q * slope).sum()).backward()
        reference.step(theirs)
        reference.update()
        assert torch.equal(p, q)
    assert p.tolist() == [-2.0, -2.0]


def test_gradients_of_an_optimizer_that_holds_another_are_unscaled_once():
    scaler, p = LossScaler("cpu", init_scale=8.0), parameter()
    optimizer = sgd(p)
    optimizer._optimizer = sgd(p)
    train(scaler, p, optimizer)
    assert torch.equal(p, torch.zeros(2))


def test_it_is_a_grad_scaler():
    scaler = LossScaler("cpu")
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled()
    assert scaler.state_dict() == torch.amp.GradScaler("cpu").state_dict() | {"min_scale": 1.0, "max_scale": INF}
    torch.amp.GradScaler("cpu").load_state_dict(scaler.state_dict())  # and torch's reads ours


def test_copies_and_pickles():
    scaler, p = LossScaler("cpu", init_scale=8.0, min_scale=2.0), parameter()
    train(scaler, p, sgd(p), INF)
    for copied in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert (copied.current_scale, copied.min_scale, copied.state_dict()) == (4.0, 2.0, scaler.state_dict())
        q = parameter()
        assert train(copied, q, sgd(q), INF)
        assert copied.get_scale() == copied.current_scale == 2.0


# --- floor and ceiling ----------------------------------------------------------------------------------------------


def test_setting_a_new_scale():
    scaler, p = LossScaler("cpu", init_scale=4.0, max_scale=100.0), parameter()
    scaler.update(16.0)  # before the first loss
    assert scaler.current_scale == scaler.get_scale() == 16.0
    optimizer = sgd(p)
    backward(scaler, p)
    assert torch.equal(p.grad, torch.full((2,), 16.0))
    scaler.step(optimizer)
    for given, scale in ((32.0, 32.0), (torch.tensor([64.0]), 64.0), (1000.0, 100.0)):
        scaler.update(given)
        assert scaler.current_scale == scaler.get_scale() == scale


# --- several optimizers, several steps ------------------------------------------------------------------------------


@pytest.mark.parametrize("overflow", [0, 1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_overflow_in_any_of_several_steps_halves_the_scale_once(fused, overflow):
    scaler, p = LossScaler("cpu", init_scale=8.0), parameter(0.0)
    optimizer = sgd(p, fused=fused)
    for step in range(3):
        p.grad = None
        backward(scaler, p, INF if step == overflow else 1.0)
        scaler.unscale_(optimizer)
        assert p.grad[0] == (INF if step == overflow else 1.0)
        scaler.unscale_(optimizer)  # torch raises
        assert p.grad[0] == (INF if step == overflow else 1.0)
        scaler.step(optimizer)
    scaler.update()
    assert scaler.resolve_outcome() == ((optimizer,), 8.0, 4.0, True)
    assert torch.equal(p, torch.full((2,), -2.0))
    assert scaler.get_scale() == scaler.current_scale == 4.0
    for _ in range(3):
        p.grad = None
        backward(scaler, p)
        scaler.step(optimizer)
    scaler.update()
    assert scaler._get_growth_tracker() == 1  # once, however many steps there were


@pytest.mark.parametrize("fused", [False, True])
def test_idle_optimizers_are_not_changed(fused):
    scaler, p, q = LossScaler("cpu", init_scale=8.0, growth_interval=3), parameter(), parameter()
    busy, idle = sgd(p, fused=fused), sgd(q, weight_decay=1.0, fused=fused)
    backward(scaler, p)
    for optimizer in (idle, busy):
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()
    assert torch.equal(q, torch.ones(2))
    assert torch.equal(p, torch.zeros(2))
    assert scaler._get_growth_tracker() == 1


def test_optimizer_without_gradients_may_have_some_before_the_update():
    scaler, p = LossScaler("cpu", init_scale=8.0), parameter()
    optimizer = sgd(p)
    scaler.scale(torch.zeros(()))
    for _ in range(2):
        scaler.step(optimizer)
        backward(scaler, p)
    scaler.update()
    assert torch.equal(p, torch.zeros(2))


@pytest.mark.parametrize("dampening", [0.0, 0.5])
@pytest.mark.parametrize("steps_at_once", [1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_fused_momentum_is_initialized(monkeypatch, dampening, steps_at_once, late):
    """After an overflow in the first step the result is as without that batch; uninitialized memory contains NaN."""
    fresh = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: fresh(*args, **options).fill_(NAN))
    assert torch.empty_like(torch.zeros(1)).isnan()

    def run(slopes, resets_at=None):
        scaler, p = LossScaler("cpu", init_scale=8.0), parameter()
        scaler.readback.arrives_at_once = not late
        optimizer = sgd(p, momentum=0.9, dampening=dampening, fused=True)
        optimizer.state[p]  # a look makes an entry
        for i, slope in enumerate(slopes):
            if i == resets_at:
                optimizer.state.clear()
            p.grad = None
            backward(scaler, p, slope)
            scaler.step(optimizer)
            if i % steps_at_once == 0:
                scaler.update()
        return p.detach(), optimizer.state[p]["momentum_buffer"]

    for mine, other in zip(run([INF, INF, 1.0, 0.5]), run([1.0, 0.5]), strict=True):
        assert torch.equal(mine, other)
    for mine, other in zip(run([1.0, 2.0, INF, 0.5], 2), run([1.0, 2.0, 0.5], 2), strict=True):
        assert torch.equal(mine, other)


def test_unscaled_gradients_without_a_step_lower_the_scale_as_in_torch():
    """The scale falls with them; no step was skipped."""
    scaler, p = LossScaler("cpu", init_scale=8.0), parameter()
    optimizer = sgd(p)
    backward(scaler, p, INF)
    scaler.unscale_(optimizer)
    scaler.update()
    assert scaler.resolve_outcome() == ((), 8.0, 4.0, False)
    assert scaler.get_scale() == 4.0


# --- outcomes that arrive late --------------------------------------------------------------------------------------


def late_scaler(**settings):
    """Emulate a GPU: the host does not have the found_inf flag of the device."""
    scaler = LossScaler("cpu", **settings)
    scaler.readback.arrives_at_once = False
    return scaler


def test_update_does_not_read_the_outcome_of_a_fused_optimizer(monkeypatch):
    scaler, p = late_scaler(init_scale=8.0), parameter()
    optimizer = sgd(p, fused=True)
    train(scaler, p, optimizer)
    backward(scaler, p, INF)
    with monkeypatch.context() as patched:
        for name in ("item", "tolist", "__bool__", "__float__"):
            patched.setattr(torch.Tensor, name, None)  # reads raise
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert not scaler.outcome_is_on_host
    assert scaler._scale.item() == 4.0  # the device is ahead of the host
    assert scaler.resolve_outcome() == ((optimizer,), 8.0, 4.0, True)
    assert scaler.outcome_is_on_host


@pytest.mark.parametrize("ask", [lambda s: s.current_scale, lambda s: s.update(), lambda s: s.forget_steps()])
def test_outcome_is_read_on_request(ask):
    scaler, p = late_scaler(init_scale=8.0), parameter()
    optimizer = sgd(p, fused=True)
    backward(scaler, p, INF)
    scaler.step(optimizer)
    scaler.update()
    is_kept = ask(scaler) == 4.0  # reading the scale keeps the outcome for others
    assert scaler.outcome_is_on_host
    assert scaler.current_scale == scaler.get_scale() == 4.0
    assert scaler.resolve_outcome() == (((optimizer,), 8.0, 4.0, True) if is_kept else ((), 4.0, 4.0, False))


@pytest.mark.parametrize("late", [False, True])
def test_scale_has_a_floor_and_a_ceiling(late):
    """On the device and on the host."""
    settings = {"init_scale": 2.0, "min_scale": 1.5, "max_scale": 3.0, "growth_interval": 1}
    scaler, p = late_scaler(**settings) if late else LossScaler("cpu", **settings), parameter()
    optimizer, seen = sgd(p, fused=late), []
    for slope in (INF, INF, 0.0, 0.0, 0.0):
        train(scaler, p, optimizer, slope)
        seen.append(scaler._scale.item())
        assert scaler.current_scale == seen[-1]
    assert seen == [1.5, 1.5, 3.0, 3.0, 3.0]


@pytest.mark.parametrize("found", [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_fused_kernel_receives_a_flag_of_one_for_several_devices(found):
    """The kernel skips at exactly 1."""
    assert _any_of([torch.tensor(number) for number in found], torch.device("cpu")).item() == max(found)


@pytest.mark.parametrize("kinds", ["dense", "sparse", "two dtypes"])
def test_gradients_of_any_kind_are_unscaled_as_by_torch(kinds):
    def gradients():
        torch.manual_seed(0)
        p, q = nn.Embedding(5, 3, sparse=kinds == "sparse"), nn.Linear(3, 2)
        q = q.to(torch.bfloat16) if kinds == "two dtypes" else q
        return [*p.parameters(), *q.parameters()], q(p(torch.tensor([1, 3, 3])).to(q.weight.dtype)).float().sum()

    found = []
    for scaler in (LossScaler("cpu", init_scale=1000.5), torch.amp.GradScaler("cpu", init_scale=1000.5)):
        parameters, loss = gradients()
        scaler.scale(loss).backward()
        scaler.unscale_(torch.optim.SGD(parameters, lr=0.1))
        found.append([p.grad.to_dense() for p in parameters])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_another_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        scaler, p = LossScaler("cpu", init_scale=8.0), nn.Parameter(torch.ones(2, dtype=torch.float32))
        assert train(scaler, p, sgd(p), INF) is True
        assert train(scaler, p, sgd(p, fused=True)) is False
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(p, torch.zeros(2))


# --- state ----------------------------------------------------------------------------------------------------------


def test_state_restores_scale_and_tracker_but_not_settings():
    scaler, p = LossScaler("cpu", init_scale=8.0, growth_interval=4), parameter()
    optimizer = sgd(p)
    for slope in (INF, 1.0, 1.0):
        train(scaler, p, optimizer, slope)
    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (4.0, 2)
    other = LossScaler("cpu", init_scale=2.0, growth_interval=3, growth_factor=3.0, backoff_factor=0.1)
    other.load_state_dict(state)
    assert other.current_scale == other.get_scale() == 4.0
    q = parameter()
    assert train(other, q, sgd(q)) is False
    assert other.current_scale == other.get_scale() == 12.0  # the third step: its own interval and factor
    assert train(other, q, sgd(q), INF)
    assert other.current_scale == pytest.approx(1.2)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("tracker", [5, 6, 1000])
def test_tracker_past_the_interval_still_leads_to_growth(tracker, used):
    scaler, p = LossScaler("cpu", init_scale=8.0, growth_interval=5), parameter()
    if used:
        train(scaler, p, sgd(p))
    scaler.load_state_dict({"scale": 8.0, "_growth_tracker": tracker})
    train(scaler, p, sgd(p))
    assert scaler.get_scale() == scaler.current_scale == 16.0


@pytest.mark.parametrize(("saved", "restored"), [(0.25, 1.0), (1e9, 128.0), (64.0, 64.0)])
def test_restored_scale_keeps_to_floor_and_ceiling(saved, restored):
    scaler = LossScaler("cpu", init_scale=8.0, max_scale=128.0)
    scaler.load_state_dict({"scale": saved, "_growth_tracker": 0})
    assert scaler.current_scale == scaler.get_scale() == restored


def test_empty_state_of_a_disabled_scaler_is_refused():
    with pytest.raises(ValueError, match=r"empty state.*without loss scaling"):
        LossScaler("cpu").load_state_dict({})


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"growth_factor": 1.0}, r"growth_factor=1.0, expected a number above 1"),
        ({"backoff_factor": 1.0}, r"backoff_factor=1.0, expected a number between 0 and 1"),
        ({"growth_interval": 0}, r"growth_interval=0, expected a whole number"),
        ({"min_scale": 0.0}, r"min_scale=0.0, expected above 0"),
        ({"min_scale": 8.0, "max_scale": 4.0}, r"min_scale=8.0.*max_scale=4.0"),
        ({"init_scale": 0.5}, r"init_scale=0.5, expected from 1.0"),
        ({"init_scale": 64.0, "max_scale": 32.0}, r"init_scale=64.0, expected from 1.0 to 32.0"),
        ({"init_scale": INF}, r"init_scale=inf"),
    ],
)
def test_impossible_settings(arguments, message):
    with pytest.raises(PrecisionError, match=message):
        LossScaler("cpu", **arguments)


def test_cuda_scaler_without_cuda():
    """Torch disables its own with a warning."""
    with pytest.raises(PrecisionError, match=r"'cuda', but CUDA is not available.*accelerator='cpu'"):
        LossScaler("cuda")


def test_closure_is_refused_while_the_loss_is_scaled():
    (weight,) = weights = [torch.ones(2, requires_grad=True)]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    scaler = LossScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(RuntimeError, match=r"Got a closure for SGD while the loss is scaled.*precision='bf16-mixed'"):
        scaler.step(optimizer, closure=lambda: pytest.fail("it is evaluated"))
    assert torch.equal(weight, torch.ones(2))
    assert LossScaler("cpu", enabled=False).step(torch.optim.SGD(weights, lr=0.1), closure=lambda: 5.0) == 5.0


def test_on_mps_nothing_is_computed_in_double_precision():
    assert LossScaler("mps")._inverse_scale(torch.tensor(4.0).as_subclass(OnMPS)).item() == 0.25
