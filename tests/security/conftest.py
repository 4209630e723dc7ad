"""A project of a user, and a file written by the payload as proof of execution."""

from tests.cli.conftest import given, project, trained  # noqa: F401  # fixtures
