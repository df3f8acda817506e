"""Settings of private weighting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flwr.app import UserConfig

from flower_ext.federation import Summation
from flower_ext.privacy import PrivacyPlan
from flower_ext.runs.settings import UnfitSetting, choice, flag, integer, integers, number

if TYPE_CHECKING:
    from flower_ext.algorithms.uldp.weighting.protocol import WeightingProtocol


def private_sum_of(config: UserConfig) -> Callable[[PrivacyPlan], Summation]:
    """Return the sum whose weights no party learns, which needs the extra ``weighting``."""
    from flower_ext.algorithms.uldp import weighted_sum

    return weighted_sum(protocol_of(config))


def protocol_of(config: UserConfig) -> WeightingProtocol:
    """Return the protocol that keeps weights private, with its settings.

    Raises
    ------
    UnfitSetting
        A setting of Paillier for another protocol, which has nothing like it.
    """
    from flower_ext.algorithms.uldp import LatticeWeighting, PrivateWeighting

    if choice(config, "protocol", ("paillier", "lattice")) == "lattice":
        if config["allowed-totals"]:
            raise UnfitSetting(
                f"run-config allowed-totals={config['allowed-totals']!r} with protocol='lattice': "
                "expected protocol='paillier', or no allowed-totals"
            )
        return LatticeWeighting(
            max_records_per_user=integer(config, "max-records-per-user"),
            silo_record_limits=integers(config, "silo-record-limits"),
            draw_choices=integer(config, "draw-choices") or None,
        )
    return PrivateWeighting(
        key_bits=integer(config, "key-bits"),
        precision=number(config, "precision"),
        max_records_per_user=integer(config, "max-records-per-user"),
        allowed_totals=integers(config, "allowed-totals"),
        silo_record_limits=integers(config, "silo-record-limits"),
        draw_choices=integer(config, "draw-choices") or None,
        allow_insecure_key_size=flag(config, "allow-insecure-keys"),
    )
