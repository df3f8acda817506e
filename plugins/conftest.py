"""Fixtures of the core's tests, for the tests of its plug-ins."""

from tests.conftest import logged, without_report

__all__ = ["logged", "without_report"]
