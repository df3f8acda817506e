"""The result of an accountant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PrivacyLoss:
    """An (ε, δ) upper bound and the accountant that gave it."""

    epsilon: float
    delta: float
    accountant: str
