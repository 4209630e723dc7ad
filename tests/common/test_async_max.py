"""Sent and received values; two real ranks are in ``tests/distributed/test_interruption.py``."""

from __future__ import annotations

from trainer.common.async_max import MOST_BATCHES, SECONDS, AsyncMax


class Others:
    """A stand-in for the group with one other rank and its position."""

    def __init__(self):
        self.numbers = [0, 0, -MOST_BATCHES]
        self.questions = []

    def allreduce(self, tensors, options):
        (tensor,) = tensors
        self.questions.append(tensor.tolist())
        tensor.copy_(tensor.new_tensor([max(pair) for pair in zip(tensor.tolist(), self.numbers, strict=True)]))
        return self

    def wait(self):
        pass


def test_answer_is_read_a_batch_later(clock):
    others = Others()
    asked = AsyncMax(others, 2)
    clock.now += 10.0
    assert asked.reduce([0, 1]) == [0, 0]
    others.numbers = [3, 0, 0]
    assert asked.reduce([0, 1]) == [0, 1]
    assert asked.reduce([0, 0]) == [0, 0]
    assert asked.reduce([0, 0]) == [3, 0]
    assert [question[:2] for question in others.questions] == [[0, 1], [0, 0]]


def test_exchange_happens_at_each_slow_batch_and_at_some_fast_ones(clock):
    others = Others()
    asked = AsyncMax(others, 2)
    for seconds, questions in ((2 * SECONDS, 10), (SECONDS / 9.5, 1), (SECONDS / 1e6, 0)):
        del others.questions[:]
        for _ in range(10):
            clock.now += seconds
            asked.reduce([0, 0])
        assert abs(len(others.questions) - questions) <= 1
    del others.questions[:]
    for _ in range(3 * (MOST_BATCHES + 2)):
        clock.now += SECONDS / 1e6
        asked.reduce([0, 0])
    assert 3 <= len(others.questions) <= 4
    others.numbers[-1] = 0  # the other one is slow
    for _ in range(MOST_BATCHES + 2):
        asked.reduce([0, 0])
    del others.questions[:]
    for _ in range(10):
        asked.reduce([0, 0])
    assert len(others.questions) >= 9


def test_request_is_answered_with_the_pending_value(clock):
    others = Others()
    asked = AsyncMax(others, 2)
    assert asked.reduce_now([0, 0]) == [0, 0]
    clock.now += 10.0
    asked.reduce_now([0, 0])
    asked.reduce([2, 0])
    assert asked.reduce_now([0, 1]) == [2, 1]
    asked.reduce([0, 0])
    asked.close()
    asked.close()
    assert asked.reduce([0, 0]) == [0, 0]
