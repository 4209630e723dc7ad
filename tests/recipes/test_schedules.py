import math
import pickle

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recipes.schedules import cosine, onecycle, warmup_cosine


def sgd(*rates: float) -> Optimizer:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=1.0, momentum=0.9)


def rates_of(optimizer: Optimizer, scheduler: LRScheduler, steps: int) -> list[float]:
    """The first group's learning rate at each step, and after the last."""
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_onecycle_rises_to_the_optimizers_lr_and_falls_far_below_the_start():
    optimizer = sgd(0.5)
    rates = rates_of(optimizer, onecycle(optimizer, 101, pct_start=31 / 101), 101)

    assert rates[0] == pytest.approx(0.5 / 25)
    assert rates[15] == pytest.approx((0.5 + 0.5 / 25) / 2)
    assert rates[30] == pytest.approx(0.5)
    assert rates[65] == pytest.approx((0.5 + 0.5 / 25e4) / 2)
    assert rates[100] == pytest.approx(0.5 / 25 / 1e4)


def test_onecycle_uses_each_groups_peak_and_keeps_the_momentum():
    optimizer = sgd(0.5, 0.1)
    scheduler = onecycle(optimizer, 10, pct_start=0.5)
    for _ in range(4):
        optimizer.step()
        scheduler.step()

    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.1])
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0.9]


def test_onecycle_with_a_rise_of_no_length_falls_from_the_peak():
    optimizer = sgd(0.5)
    rates = rates_of(optimizer, onecycle(optimizer, 4, pct_start=0.25), 4)  # ZeroDivisionError in torch's own

    assert all(0.0 < rate < 0.5 for rate in rates)
    assert rates[3] == pytest.approx(0.5 / 25 / 1e4)


def test_cosine_falls_from_the_optimizers_lr_to_eta_min():
    optimizer = sgd(0.5)
    rates = rates_of(optimizer, cosine(optimizer, 100, eta_min=0.1), 100)

    assert rates[0] == 0.5
    assert rates[50] == pytest.approx(0.3)
    assert rates[99] == pytest.approx(0.1 + 0.4 * 0.5 * (1 + math.cos(math.pi * 0.99)))
    assert rates[100] == pytest.approx(0.1)


def test_warmup_cosine_rises_in_a_line_and_falls_along_a_cosine():
    optimizer = sgd(0.5)
    rates = rates_of(optimizer, warmup_cosine(optimizer, 100, warmup=0.2, final_factor=0.1), 120)

    assert rates[0] == pytest.approx(0.5 / 21)
    assert rates[9] == pytest.approx(0.5 * 10 / 21)
    assert rates[19] == pytest.approx(0.5 * 20 / 21)
    assert rates[20] == 0.5
    assert rates[60] == pytest.approx(0.5 * 0.55)
    assert rates[100] == pytest.approx(0.05)
    assert rates[120] == pytest.approx(0.05)


def test_warmup_cosine_leaves_a_step_to_fall():
    optimizer = sgd(0.5)
    assert rates_of(optimizer, warmup_cosine(optimizer, 2, warmup=0.9), 2) == [0.25, 0.5, 0.0]


@pytest.mark.parametrize("schedule", [onecycle, cosine, warmup_cosine])
def test_shortest_runs_have_a_schedule(schedule):
    for steps in (1, 2, 3):
        optimizer = sgd(0.5)
        rates = rates_of(optimizer, schedule(optimizer, steps), steps)
        assert all(0.0 <= rate <= 0.5 for rate in rates)
    pickle.loads(pickle.dumps(schedule(optimizer, 20)))
    with pytest.raises(ValueError, match="total_steps is 0, expected at least 1"):
        schedule(optimizer, 0)


@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_fraction_out_of_range_is_refused(fraction: float):
    with pytest.raises(ValueError, match=f"pct_start is {fraction}"):
        onecycle(sgd(0.5), 10, pct_start=fraction)
    with pytest.raises(ValueError, match=f"warmup is {fraction}"):
        warmup_cosine(sgd(0.5), 10, warmup=fraction)
