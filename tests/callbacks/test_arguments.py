"""Arguments that callbacks refuse."""

from __future__ import annotations

from typing import Any

import pytest

from trainer import callbacks

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("AlignmentAdvisor", {"max_lines": 0}, "Got max_lines=0, expected a number of lines"),
    ("Compile", {"modules": []}, r"Got modules=\[\], expected at least one pattern"),
    (
        "Compile",
        {"mode": "default", "options": {"a": True}},
        r"Got mode='default' and options=\{'a': True\}, expected one",
    ),
    ("Curves", {"max_points": 1}, "max_points=1: a curve needs at least 2"),
    ("GradientAccumulation", {}, "batches=None and schedule=None, expected exactly one"),
    ("GradientAccumulation", {"batches": 2, "schedule": {0: 2}}, "batches=2 and schedule={0: 2}, expected exactly one"),
    ("GradientAccumulation", {"batches": 0}, "Got 0 batches from epoch 0 on, expected a whole number of at least 1"),
    ("GradientAccumulation", {"batches": 1.5}, "Got 1.5 batches"),
    ("GradientAccumulation", {"schedule": {0: 2, 3: 0}}, "Got 0 batches from epoch 3 on"),
    ("GradientAccumulation", {"schedule": {-1: 2}}, "Got 2 batches from epoch -1 on, .* an epoch of at least 0"),
    ("GradientCheck", {"samples": 0}, "Got samples=0, expected a number above 0"),
    ("GradientCheck", {"attempts": 0}, "Got attempts=0, expected a number above 0"),
    ("GradientClipping", {}, "max_norm=None and clip_value=None, expected exactly one"),
    ("GradientClipping", {"max_norm": 1.0, "clip_value": 1.0}, "max_norm=1.0 and clip_value=1.0, expected exactly one"),
    ("GradientClipping", {"max_norm": 0.0}, "Got 0.0 as the limit of gradient clipping, expected a number above 0"),
    ("GradientClipping", {"max_norm": "1"}, "Got '1' as the limit"),
    ("GradientClipping", {"max_norm": True}, "Got True as the limit"),
    ("LayerNorms", {"every_n_steps": 0}, "expected a whole number of steps of at least 1"),
    ("LayerNorms", {"every_n_steps": 2.5}, "expected a whole number of steps of at least 1"),
    ("NonFiniteGuard", {"policy": "ignore"}, "policy"),
    ("NonFiniteGuard", {"max_in_a_row": 0}, "max_in_a_row"),
    ("OverflowReport", {"after": 2}, "after=2, expected at least 3 skipped steps in a row, or None"),
    ("OverflowReport", {"at_step": -1}, "at_step=-1, expected a step number of at least 0"),
    ("OverflowReport", {"collapse_after": 2}, "collapse_after=2, expected at least 3"),
    ("OverflowReport", {"at_floor": 0}, "at_floor=0, expected at least 1"),
    ("ProgressBar", {"refresh_rate": -1}, "refresh_rate"),
    ("ProgressBar", {"seconds_between_lines": 0}, "seconds_between_lines"),
    ("RollBackOnLossSpike", {"threshold": 1.0}, "Got .*threshold="),
    ("RollBackOnLossSpike", {"window": 0}, "Got .*window="),
    ("RollBackOnLossSpike", {"margin": -1}, "Got .*margin="),
    ("RollBackOnLossSpike", {"max_rollbacks": -1}, "Got .*max_rollbacks="),
    ("ScaleMonitor", {"window": 0}, "window=0.*at least 1"),
    ("ScaleMonitor", {"every_n_steps": -1}, "every_n_steps=-1.*at least 0"),
    ("ScaleMonitor", {"worst_layers": -1}, "worst_layers=-1.*at least 0"),
    ("SyncDetector", {"batches": 0}, "expected at least"),
    ("SyncDetector", {"after": -1}, "expected at least"),
    ("Throughput", {"warmup_batches": -1}, "warmup_batches=.*: expected"),
    ("Throughput", {"flops_per_sample": 0}, "flops_per_sample=.*: expected"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), REFUSED)
def test_arguments_out_of_range_are_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(callbacks, name)(**arguments)
