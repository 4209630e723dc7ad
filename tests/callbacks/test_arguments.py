"""Arguments that callbacks refuse."""

import pytest

from trainer import callbacks

RANGES = {
    "AlignmentAdvisor": {"max_lines": 0},
    "GradientCheck": {"samples": 0, "attempts": 0},
    "LayerNorms": {"every_n_steps": 2.5},
    "NonFiniteGuard": {"policy": "ignore", "max_in_a_row": 0},
    "OverflowReport": {"after": 2, "at_step": -1, "collapse_after": 2, "at_floor": 0},
    "ProgressBar": {"refresh_rate": -1, "seconds_between_lines": 0},
    "RollBackOnLossSpike": {"threshold": 1.0, "window": 0, "margin": -1, "max_rollbacks": -1},
    "ScaleMonitor": {"window": 0, "every_n_steps": -1, "worst_layers": -1},
    "SyncDetector": {"batches": 0, "after": -1},
    "Throughput": {"warmup_batches": -1, "flops_per_sample": 0},
}
REFUSED = [
    *(
        (name, {argument: value}, f"{argument}={value!r}.*expected")
        for name, arguments in RANGES.items()
        for argument, value in arguments.items()
    ),
    ("Compile", {"modules": []}, r"Got modules=\[\], expected at least one pattern"),
    ("Compile", {"mode": "default", "options": {"a": True}}, r"mode='default' and options=\{'a': True\}, expected one"),
    ("Curves", {"max_points": 1}, "max_points=1: a curve needs at least 2"),
    ("GradientAccumulation", {}, "batches=None and schedule=None, expected exactly one"),
    ("GradientAccumulation", {"batches": 1.5}, "Got 1.5 batches from epoch 0 on, expected a whole number of at least"),
    ("GradientAccumulation", {"schedule": {-1: 2}}, "Got 2 batches from epoch -1 on, .* an epoch of at least 0"),
    ("GradientClipping", {"max_norm": 1.0, "clip_value": 1.0}, "max_norm=1.0 and clip_value=1.0, expected exactly one"),
    ("GradientClipping", {"max_norm": 0.0}, "Got 0.0 as the limit of gradient clipping, expected a number above 0"),
    ("GradientClipping", {"max_norm": True}, "Got True as the limit"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), REFUSED)
def test_arguments_out_of_range_are_refused(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        getattr(callbacks, name)(**arguments)
