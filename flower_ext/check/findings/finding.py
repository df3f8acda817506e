"""A finding: what the check found in an app, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault of an app, or one limit of the app's guarantee, that the check found."""

    code: str
    text: str
    remedy: str
    refutes: bool = True
    place: str = ""
    """``path:line`` of the app's call that the remedy changes; "" if the app has none."""
