"""Persistent ranks, which run the functions of many tests."""

import os


def set_and_get(value):
    """Set the seed of Lightning, and return the one from before."""
    before = os.environ.get("PL_GLOBAL_SEED")
    os.environ["PL_GLOBAL_SEED"] = value
    return before


def test_environment_of_a_call_is_not_that_of_the_next(ranks):
    assert [ranks.call(set_and_get, value) for value in ("1", "2")] == [[None, None], [None, None]]
