import math
import pickle

import pytest
import torch

from recipes.schedules import cosine, onecycle, warmup_cosine


def sgd(*rates):
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=1.0, momentum=0.9)


def rates_of(optimizer, scheduler, steps):
    """The first group's learning rate at each step, and after the last."""
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


START, END = 0.5 / 25, 0.5 / 25e4


@pytest.mark.parametrize(
    ("schedule", "options", "steps", "expected"),
    [
        (
            onecycle,
            {"pct_start": 31 / 101},
            101,
            {0: START, 15: (0.5 + START) / 2, 30: 0.5, 65: (0.5 + END) / 2, 100: END},
        ),
        (onecycle, {"pct_start": 0.25}, 4, {0: START, 3: END}),  # a rise of no length: ZeroDivisionError in torch's own
        (cosine, {"eta_min": 0.1}, 100, {0: 0.5, 50: 0.3, 99: 0.3 + 0.2 * math.cos(math.pi * 0.99), 100: 0.1}),
        (
            warmup_cosine,
            {"warmup": 0.2, "final_factor": 0.1},
            100,
            {0: 0.5 / 21, 9: 0.5 * 10 / 21, 19: 0.5 * 20 / 21, 20: 0.5, 60: 0.275, 100: 0.05},
        ),
        (warmup_cosine, {"warmup": 0.9}, 2, {0: 0.25, 1: 0.5, 2: 0.0}),  # leaves a step to fall
    ],
)
def test_rates(schedule, options, steps, expected):
    optimizer = sgd(0.5)
    rates = rates_of(optimizer, schedule(optimizer, steps, **options), steps)
    assert {step: rates[step] for step in expected} == pytest.approx(expected)


def test_onecycle_uses_each_groups_peak_and_keeps_the_momentum():
    optimizer = sgd(0.5, 0.1)
    rates_of(optimizer, onecycle(optimizer, 10, pct_start=0.5), 4)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.1])
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0.9]


@pytest.mark.parametrize("schedule", [onecycle, cosine, warmup_cosine])
def test_shortest_runs_have_a_schedule(schedule):
    for steps in (1, 2, 3):
        optimizer = sgd(0.5)
        assert all(0.0 <= rate <= 0.5 for rate in rates_of(optimizer, schedule(optimizer, steps), steps))
    pickle.loads(pickle.dumps(schedule(optimizer, 20)))
    with pytest.raises(ValueError, match="total_steps is 0, expected at least 1"):
        schedule(optimizer, 0)


@pytest.mark.parametrize(("schedule", "name"), [(onecycle, "pct_start"), (warmup_cosine, "warmup")])
@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_fraction_out_of_range_is_refused(schedule, name, fraction):
    with pytest.raises(ValueError, match=f"{name} is {fraction}"):
        schedule(sgd(0.5), 10, **{name: fraction})
