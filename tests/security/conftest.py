"""A project of a user, and a file written by the payload as proof of execution."""

from __future__ import annotations

from tests.cli.conftest import project  # noqa: F401  # a fixture
