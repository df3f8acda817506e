"""A finding: what the check found in an app, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that the check found."""

    code: str
    text: str
    remedy: str
    refutes: bool = True
    place: str = ""
    """``path:line`` of the app's call that the remedy changes; empty if the app has none."""
