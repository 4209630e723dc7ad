"""Looking for the largest number that fits, in few tries."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], start: int, most: Callable[[], int | None], multiple_of: int = 1) -> int:
    """The largest size that fits, where every smaller one fits, too.

    From ``start`` on the size is doubled until it does not fit (or halved until it does), and what is between the two
    is bisected.

    Args:
        fits: tries a size; called once for each.
        start: the first size, at least 1.
        most: no larger one is tried; None for no such bound. Asked after each try, which may have found it out.
        multiple_of: sizes in between are multiples of this. Below it, any number is one.

    Returns:
        The size; 0 where not even 1 fits.
    """
    low, high = 0, start
    while fits(high):
        low, bound = high, most()
        if bound is not None and low >= bound:
            return low
        high = 2 * low if bound is None else min(2 * low, bound)
    while low == 0 and high > 1:
        if fits(high // 2):
            low = high // 2
        else:
            high //= 2
    while low > 0 and (middle := _between(low, high, multiple_of)) is not None:
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _between(low: int, high: int, multiple_of: int) -> int | None:
    """The size in the middle between two; None where there is none."""
    unit = multiple_of if high > multiple_of else 1
    first, last = low // unit + 1, (high - 1) // unit
    return (first + last) // 2 * unit if first <= last else None
