"""Settings of private weighting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flower_ext.federation import Summation
from flower_ext.privacy import PrivacyPlan
from flower_ext.runs.settings import UnfitSetting
from flower_ext.secure.weighting.protocol import load_protocol
from uldp_fl_app.settings import Settings, integers

if TYPE_CHECKING:
    from flower_ext.secure.weighting.protocol import WeightingProtocol


def private_sum_of(settings: Settings) -> Callable[[PrivacyPlan], Summation]:
    """Return the sum whose weights no party learns. It needs the extra ``weighting``."""
    from flower_ext.algorithms.uldp import weighted_sum

    return weighted_sum(protocol_of(settings))


def protocol_of(settings: Settings) -> WeightingProtocol:
    """Return the protocol that keeps weights private, with its settings.

    Raises
    ------
    UnfitSetting
        ``allowed-totals`` is set, but the protocol is not Paillier.
    ValueError
        The protocol is not installed; the message says what to install.
    """
    from flower_ext.algorithms.uldp import PrivateWeighting

    protocol = load_protocol(settings.protocol)
    limits: dict[str, Any] = {
        "max_records_per_user": settings.max_records_per_user,
        "silo_record_limits": integers(settings.silo_record_limits),
        "draw_choices": settings.draw_choices or None,
    }
    if protocol is PrivateWeighting:
        return PrivateWeighting(
            key_bits=settings.key_bits,
            precision=settings.precision,
            allowed_totals=integers(settings.allowed_totals),
            allow_insecure_key_size=settings.allow_insecure_keys,
            **limits,
        )
    if settings.allowed_totals:
        raise UnfitSetting(
            f"run-config allowed-totals={settings.allowed_totals!r} with protocol="
            f"{settings.protocol!r}: expected protocol='paillier', or no allowed-totals"
        )
    return protocol(**limits)
