"""A project of a user's, and proof that code ran: a file that the payload makes."""

from __future__ import annotations

from tests.cli.conftest import logging_as_before, project  # noqa: F401  # fixtures
