"""The result of an accountant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PrivacyLoss:
    """An upper bound (ε, δ), and the accountant that computed it."""

    epsilon: float
    delta: float
    accountant: str
