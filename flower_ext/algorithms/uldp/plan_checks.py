"""Checks that a plan suits the methods of Uldp-FL."""

from __future__ import annotations

from flower_ext.errors import InvalidValue
from flower_ext.privacy import FixedSizeSampling, PoissonSampling
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism


def sums_of_users(mechanism: RoundMechanism) -> NoisedSum:
    """Return ``mechanism`` itself, or refuse it if the methods of Uldp-FL cannot train with it."""
    if not isinstance(mechanism, NoisedSum):
        raise InvalidValue(f"plan={type(mechanism).__name__}: expected a ReleasePlan for users")
    if mechanism.noised_by_server:
        raise InvalidValue(
            "noise_placement='server' of the plan: expected 'client' or a SecureSum, because the "
            "silos, which are the clients, add the noise"
        )
    if isinstance(mechanism.sampling, FixedSizeSampling):
        raise InvalidValue(
            f"sampling={mechanism.sampling!r} of the plan: expected FullParticipation or "
            "PoissonSampling"
        )
    return mechanism


def check_silos_can_draw(mechanism: NoisedSum) -> None:
    """Require Poisson sampling and ``SecureSum(colluding=0)``, so that silos can draw in secret."""
    if not isinstance(mechanism.sampling, PoissonSampling):
        raise InvalidValue(
            f"user_draw='silos' with sampling={mechanism.sampling!r}: expected PoissonSampling, "
            "because silos draw every user independently"
        )
    if mechanism.secure_sum is None or mechanism.secure_sum.colluding:
        raise InvalidValue(
            f"user_draw='silos' with noise_placement={mechanism.noise_placement!r}: expected "
            "SecureSum(colluding=0), because the server may see only sums, and a silo that "
            "colludes with the server could tell it which users were drawn"
        )
