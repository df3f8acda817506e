"""Errors whose message is all that people need: a traceback would add nothing."""

from __future__ import annotations


class FlowerExtError(Exception):
    """Base class of the errors that commands print as one line."""


class InvalidValue(FlowerExtError, ValueError):
    """A value that the package refuses; the message says what it expected and what to change."""
