"""Evaluation on several ranks, one of them in this process. Whole runs are in tests/distributed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from trainer.data.unpadded import Span
from trainer.loops.distributed_pass import DistributedPass
from trainer.state.metrics import MetricStore

INF = float("inf")


class Engine:
    """One of two ranks with counted collectives."""

    supports_uneven_evaluation = True

    def __init__(self, forward_runs_collectives: bool = False, others: list[bool] | None = None) -> None:
        self.forward_runs_collectives = forward_runs_collectives
        self.global_rank = 0
        self.others = others or []
        self.done: list[Any] = []
        self.count = 0

    def idle_forward(self) -> None:
        self.done.append("idle")
        self.count += 2 * self.forward_runs_collectives

    def any_rank(self, decision: bool) -> bool:
        self.done.append(decision)
        return decision or self.others.pop(0)

    def num_collectives(self) -> int:
        return self.count

    def forbid_collectives(self, error: Exception) -> Any:
        self.done.append(f"forbidden: {error}")
        return nullcontext()

    def exchange(self) -> None:
        self.count += 1

    def forward(self) -> None:
        self.done.append("batch")
        self.count += 2 * self.forward_runs_collectives


def pace_of(engine: Engine, *spans: Span, whole: tuple[Span, ...] = (), watches: bool = True) -> DistributedPass:
    loop: Any = SimpleNamespace(engine=engine, module=nn.Linear(1, 1), stage="validation", is_shared=watches)
    loop.metrics = MetricStore(training=False)
    return DistributedPass(loop, spans, whole or spans)


def run(engine: Engine, pace: DistributedPass, *batches: int, step: Callable[[int], None] | None = None) -> None:
    for dataloader_idx, count in enumerate(batches):
        for index in range(count):

            def evaluate(index: int = index) -> None:
                engine.forward()
                if step is not None:
                    step(index)

            pace.run(dataloader_idx, evaluate)
        pace.finish(dataloader_idx)


def test_process_without_a_batch_takes_part_in_forwards_that_exchange() -> None:
    engine = Engine(forward_runs_collectives=True)
    run(engine, pace_of(engine, Span(1, 3), Span(0, 1), watches=False), 1, 0)
    assert engine.done == ["idle", "batch", "idle", "idle", "idle"]


def test_ranks_agree_before_each_batch_of_unknown_lengths() -> None:
    engine = Engine(forward_runs_collectives=True, others=[True, True, False])
    run(engine, pace_of(engine, Span(0, INF), watches=False), 1)
    assert engine.done == ["idle", True, "batch", False, "idle", False, "idle", False]
    engine = Engine()  # without collectives in their forwards
    run(engine, pace_of(engine, Span(0, INF)), 1)
    assert engine.done == ["idle", "batch"]


def test_values_of_a_batch_are_reduced_if_all_ranks_have_it() -> None:
    engine = Engine()
    pace = pace_of(engine, Span(1, 2), Span(1, 1))
    shared: list[bool] = []
    run(engine, pace, 2, 1, step=lambda index: shared.append(pace._metrics.shares_steps))
    assert shared == [True, False, True]
    assert [one for one in engine.done if one.startswith("forbidden")] == [engine.done[3]]


def test_sanity_check_of_equal_length_warns() -> None:
    engine = Engine()
    pace = pace_of(engine, Span(1, 1), whole=(Span(2, 3),))
    with pytest.warns(UserWarning, match=r"\(2 to 3\)"):
        pace.run(0, engine.exchange)
