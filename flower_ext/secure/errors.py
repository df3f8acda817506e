"""What goes wrong between parties."""

from __future__ import annotations


class ProtocolError(RuntimeError):
    """A step out of order, repeated, or without what must come before it."""


class IncompleteRound(ProtocolError):
    """A silo's message is missing. Without it the sum stays masked, and nothing is decrypted."""
