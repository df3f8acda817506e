"""Fixtures of the core's tests, for the tests of its plug-ins."""

from tests.conftest import forked_runs, logged, pytest_collection_finish, without_report

__all__ = ["forked_runs", "logged", "pytest_collection_finish", "without_report"]
