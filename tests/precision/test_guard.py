from functools import partial

import pytest
import torch
from torch import nn

from tests.support import OnMPS, warned_by
from trainer.precision.guard import StepGuard, _any_not_finite

INF, NAN = float("inf"), float("nan")


def parameters(*gradients):
    made = []
    for gradient in gradients:
        dtype, size = (torch.float32, 3) if gradient is None else (gradient.dtype, gradient.shape)
        made.append(nn.Parameter(torch.zeros(size, dtype=dtype)))
        made[-1].grad = gradient
    return made


def steps(*gradients, kind=torch.optim.SGD):
    """Return whether an optimizer steps on these gradients, by the guard and by the weights."""
    guard = StepGuard("cpu")
    held = parameters(*gradients)
    optimizer = kind(held, lr=1.0)
    guard.unscale_(optimizer)
    guard.step(optimizer)
    guard.update()
    outcome = guard.resolve_outcome()
    assert outcome.scale == outcome.next_scale == 1.0
    has_stepped = any(parameter.detach().any() for parameter in held)
    assert has_stepped is (outcome.skipped == ())
    return has_stepped


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_every_dtype(dtype, bad):
    assert steps(torch.tensor([1.0, 0.0, torch.finfo(dtype).max], dtype=dtype))
    assert not steps(torch.tensor([1.0, bad, 0.0], dtype=dtype))


@pytest.mark.parametrize("bad", [1.0, INF, NAN])
def test_on_mps_nothing_is_computed_in_double_precision(bad):
    gradients = [torch.tensor([1.0, bad], dtype=dtype).as_subclass(OnMPS) for dtype in (torch.float16, torch.float32)]
    assert float(_any_not_finite(gradients)) == (bad != 1.0)


@warned_by((2, 11), message="Sparse invariant checks are implicitly disabled")  # if configured to check them, too
def test_sparse_gradients():
    def embedding(value):
        return torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([[value, 1.0]]), (4, 2), check_invariants=True)

    assert steps(embedding(1.0), torch.ones(3))
    assert not steps(embedding(NAN), torch.ones(3))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_fused_optimizers(kind):
    fused = partial(kind, fused=True)
    assert steps(torch.ones(3), torch.ones(2), kind=fused)
    assert not steps(torch.ones(3), torch.tensor([1.0, INF]), kind=fused)


def test_optimizer_without_gradients_is_not_skipped():
    guard = StepGuard("cpu")
    idle, busy = (torch.optim.SGD(parameters(g), lr=1.0) for g in (None, torch.tensor([NAN])))
    for optimizer in (idle, busy):
        guard.unscale_(optimizer)
        guard.step(optimizer)
    guard.update()
    assert guard.resolve_outcome().skipped == (busy,)


def test_guard_appears_as_a_disabled_scaler():
    guard, loss = StepGuard("cpu"), torch.tensor(2.0)
    assert guard.scale(loss) is loss
    assert not guard.is_enabled()
    assert guard.skips_steps
    assert guard.state_dict() == {}
    guard.load_state_dict({"scale": 1024.0, "_growth_tracker": 3})
    assert guard.get_scale() == guard.current_scale == 1.0
