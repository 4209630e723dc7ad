"""A project of a user's, and proof that code ran: a file that the payload makes."""

from __future__ import annotations

from tests.cli.conftest import project  # noqa: F401  # a fixture
