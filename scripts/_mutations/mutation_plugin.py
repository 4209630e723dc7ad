"""A pytest plugin that records the tests that reach a fault, or runs the listed tests in the order of the list."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mutation_probe
import pytest

TIERS = {"nightly": "nightly", "representative": "quick", "whole": "whole"}
"""The first of these markers that a test has determines its tier; without any of them it is ``quick``."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "MUTATION_TESTS" not in os.environ:
        return
    order = {name: place for place, name in enumerate(Path(os.environ["MUTATION_TESTS"]).read_text().splitlines())}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in order])
    items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


@contextlib.contextmanager
def set_up_of(fixture: str) -> Iterator[None]:
    """Attribute the faults that are reached in this context, also in processes that it starts, to the fixture."""
    outer = os.environ.get("MUTATION_FIXTURE")
    os.environ["MUTATION_FIXTURE"] = fixture
    try:
        yield
    finally:
        os.environ.pop("MUTATION_FIXTURE")
        if outer is not None:
            os.environ["MUTATION_FIXTURE"] = outer


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[None]:
    """Record which faults the set-up of a shared fixture reaches: all tests that use the fixture reach them."""
    if fixturedef.scope == "function" or "MUTATION_RECORD" not in os.environ:
        return (yield)
    name = f"{fixturedef.baseid}::{fixturedef.argname}"
    with set_up_of(name):
        result = yield
    if type(result).__name__ == "Ranks":  # starts its processes later, and keeps them for several tests
        result._start = set_up_of(name)(result._start)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    os.environ.pop("MUTATION_FIXTURE", None)  # a fixture may have started this process
    started = time.perf_counter()
    try:
        return (yield)
    finally:
        if "MUTATION_RECORD" in os.environ:
            tier = next((tier for name, tier in TIERS.items() if item.get_closest_marker(name)), "quick")
            known = getattr(item, "_fixtureinfo", None)
            shared = [
                f"{definition.baseid}::{name}"
                for name, definitions in (known.name2fixturedefs if known else {}).items()
                for definition in definitions
                if definition.scope != "function"
            ]
            mutation_probe.write("test", item.nodeid, tier, f"{time.perf_counter() - started:.3f}", *shared)
