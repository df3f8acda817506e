"""The ways to account for a run: each computes ε from the noise, and the noise from ε.

The ways differ in the sampling, the neighbouring relation and the adversary's view. For clients,
one bound is claimed by a paper; all other bounds are provable. ``flower-ext calibrate`` compares
the ways in a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flower_ext.privacy.accounting.accountant import privacy_loss_of
from flower_ext.privacy.accounting.calibration import (
    calibrate_noise_multiplier,
    least_noise_multiplier,
)
from flower_ext.privacy.accounting.events import PrivacyLoss, Release
from flower_ext.privacy.accounting.group_privacy import DpSgd, group_loss
from flower_ext.privacy.accounting.sampling import (
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    Sampling,
)
from flower_ext.privacy.guarantee import Basis
from flower_ext.privacy.mechanisms.correlated_noise import CorrelatedNoise, StrategyMatrix
from flower_ext.privacy.theorems.dp2_fedsam_theorem import (
    dp2_fedsam_theorem2,
    dp2_fedsam_theorem2_noise_multiplier,
)
from flower_ext.privacy.theorems.uldp_group import group_loss_by_conversion, group_loss_by_renyi
from flower_ext.privacy.units import NeighboringRelation

_ADD_OR_REMOVE, _REPLACE = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE
_MODELS = "released models"
_COHORTS = "released models and who took part"
_LONGEST = 2_000
"""Largest number of rounds for which a strategy matrix is computed, within a second."""


@dataclass(frozen=True)
class NoiseChoice:
    """One way to account for a run.

    Attributes
    ----------
    name : str
        The sampling and the accountant, or the theorem.
    basis : {"published", "provable"}
    relation : NeighboringRelation
    view : str
        What the adversary sees.
    epsilon_at : Callable[[float], float]
        Function from the noise multiplier to ε.
    noise_for : Callable[[float], float]
        Function from ε to the least noise multiplier whose ε is not larger.
    """

    name: str
    basis: Basis
    relation: NeighboringRelation
    view: str
    epsilon_at: Callable[[float], float]
    noise_for: Callable[[float], float]


def ways_of_clients(
    poisson: PoissonSampling, fixed: FixedSizeSampling, rounds: int, delta: float
) -> list[NoiseChoice]:
    """Return the ways to account for a run whose privacy unit is one client."""
    theorem: dict[str, Any] = {"sampling_rate": poisson.rate, "rounds": rounds, "delta": delta}
    claim = NoiseChoice(
        "Theorem 2 (DP²-FedSAM)",
        "published",
        _ADD_OR_REMOVE,
        "each upload (claimed)",
        lambda s: dp2_fedsam_theorem2(noise_multiplier=s, **theorem).epsilon,
        lambda e: dp2_fedsam_theorem2_noise_multiplier(epsilon=e, **theorem),
    )

    def provable(
        name: str,
        sampling: Sampling,
        relation: NeighboringRelation,
        view: str = _MODELS,
        *,
        releases: float | None = None,
    ) -> NoiseChoice:
        # An adversary who knows the cohorts sees a known number of releases with each client's
        # data. Together they are one Gaussian mechanism, with less noise.
        scale, repeats = (1.0, rounds) if releases is None else (math.sqrt(releases), 1)
        options: dict[str, Any] = {"sampling": sampling, "relation": relation}

        def epsilon_at(noise_multiplier: float) -> float:
            release = Release(noise_multiplier=noise_multiplier / scale, **options)
            return privacy_loss_of({release: repeats}, delta=delta).epsilon

        def noise_for(epsilon: float) -> float:
            return scale * calibrate_noise_multiplier(
                epsilon=epsilon, delta=delta, rounds=repeats, **options
            )

        return NoiseChoice(name, "provable", relation, view, epsilon_at, noise_for)

    everyone, special = FullParticipation(fixed.population), NeighboringRelation.REPLACE_SPECIAL
    sums = "complete sums, in every round"
    uploads = f"each upload, every round, cohorts of {fixed.size}"
    return [
        claim,
        provable("Poisson, PLD", poisson, _ADD_OR_REMOVE),
        provable("fixed size, RDP", fixed, _REPLACE),
        *(
            provable(name, everyone, special, _COHORTS, releases=worth)
            for name, worth in _in_turn(fixed, rounds).items()
        ),
        provable("cohorts known", everyone, special, sums, releases=rounds),
        provable("uploads known", everyone, special, uploads, releases=rounds * fixed.size),
    ]


def _in_turn(fixed: FixedSizeSampling, rounds: int) -> dict[str, float]:
    """Return sens(C)² for each kind of noise that the server may add when clients take turns.

    sens(C) is the sensitivity of the noise's `StrategyMatrix` C, for the most exposed client. Let σ
    be the noise multiplier of each round's fresh noise. Then the run has the same ε as sens(C)²
    releases that all use the client's data, with independent noise of multiplier σ.
    """
    apart = fixed.population // fixed.size
    limits = {"rounds_apart": apart, "participations": math.ceil(rounds / apart)}
    independent = StrategyMatrix()
    matrices = {"in turn, independent noise": independent}
    if rounds <= _LONGEST:
        best = CorrelatedNoise().matrix(rounds, **limits)
        error = {
            matrix: matrix.model_error(rounds) * matrix.sensitivity(**limits)
            for matrix in (independent, best)
        }
        less = error[independent] / error[best]
        matrices[f"in turn, correlated noise: error of sums over rounds ÷ {less:.2g}"] = best
    return {name: matrix.sensitivity(**limits) ** 2 for name, matrix in matrices.items()}


def ways_of_groups(
    group_size: int, *, delta: float, rounds: int, sampling_rate: float
) -> list[NoiseChoice]:
    """Return three ways to account for all records of a user: two lemmas, and a tight bound."""

    def way(name: str, loss_of: Callable[..., PrivacyLoss]) -> NoiseChoice:
        def epsilon_at(noise_multiplier: float) -> float:
            silo = DpSgd(
                noise_multiplier=noise_multiplier, sampling_rate=sampling_rate, steps=rounds
            )
            return loss_of(silo, group_size=group_size, delta=delta).epsilon

        def noise_for(epsilon: float) -> float:
            target = f"epsilon={epsilon!r} at delta={delta!r} of {group_size} records by {name}"
            return least_noise_multiplier(lambda noise: epsilon_at(noise) <= epsilon, target)

        view = "each step of every silo"
        return NoiseChoice(name, "provable", _ADD_OR_REMOVE, view, epsilon_at, noise_for)

    covered = 1 << (group_size - 1).bit_length()
    return [
        way("Lemma 8 (Uldp-FL)", group_loss_by_conversion),
        way(f"Lemma 9 (Uldp-FL), {covered} records", group_loss_by_renyi),
        way("mixture of Gaussians, PLD", group_loss),
    ]
