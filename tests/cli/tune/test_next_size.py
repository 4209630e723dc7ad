"""The largest number that fits: found exactly, in few tries, none of them twice."""

from __future__ import annotations

import pytest

from trainer.cli.tune.batch_size import next_size


def search(capacity: int, start: int = 64, most: int | None = None, multiple_of: int = 1) -> tuple[int, list[int]]:
    tried: list[int] = []

    size: int | None = start
    found, too_large = 0, None
    while size is not None:
        tried.append(size)
        if size <= capacity:
            found = size
        else:
            too_large = size
        size = next_size(found, too_large, most, multiple_of)
    assert len(set(tried)) == len(tried)
    assert all(size >= 1 for size in tried)
    assert most is None or max(tried) <= max(most, start)
    return found, tried


@pytest.mark.parametrize("start", [1, 7, 64, 1000])
@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 63, 64, 65, 100, 1023, 1024, 1025])
def test_search_is_exact(capacity, start):
    found, tried = search(capacity, start)
    assert found == capacity
    assert len(tried) <= 24


def test_order_of_the_tries():
    assert search(100, 16) == (100, [16, 32, 64, 128, 96, 112, 104, 100, 102, 101])
    assert search(5, 64) == (5, [64, 32, 16, 8, 4, 6, 5])


@pytest.mark.parametrize(
    ("capacity", "found"), [(100, 96), (96, 96), (95, 88), (7, 7), (8, 8), (5, 5), (15, 8), (16, 16)]
)
def test_multiples_of_eight_and_below_it_any(capacity, found):
    assert search(capacity, 64, multiple_of=8)[0] == found


def test_start_next_to_a_multiple():
    found, tried = search(100, 50, multiple_of=8)
    assert found == 100  # one of the sizes on the way
    assert tried == [50, 100, 200, 144, 120, 104]


def test_limit_of_the_number():
    assert search(10**9, 64, most=1257) == (1257, [64, 128, 256, 512, 1024, 1257])
    assert search(1200, 64, most=1257, multiple_of=8)[0] == 1200
    assert search(10**9, 64, most=64) == (64, [64])
