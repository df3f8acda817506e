"""One quantity of a run, such as ε or the least noise, by every accounting method."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flower_ext.privacy import (
    CorrelatedNoise,
    DpSgd,
    FixedSizeSampling,
    FullParticipation,
    NeighboringRelation,
    PoissonSampling,
    Release,
    Sampling,
    calibrate_noise_multiplier,
    privacy_loss_of,
    size_for_rate,
)
from flower_ext.privacy.accounting.calibration import least_noise_multiplier
from flower_ext.privacy.accounting.events import PrivacyLoss
from flower_ext.privacy.accounting.group_privacy import group_loss
from flower_ext.privacy.guarantee import Basis
from flower_ext.privacy.mechanisms.correlated_noise import StrategyMatrix
from flower_ext.privacy.theorems.dp2_fedsam_theorem import (
    dp2_fedsam_theorem2,
    dp2_fedsam_theorem2_noise_multiplier,
)
from flower_ext_planner.rounds_and_rates import calibrate_rounds, calibrate_sampling_rate
from flower_ext_planner.uldp_lemmas import group_loss_by_conversion, group_loss_by_renyi

_LONGEST = 2_000
"""Largest number of rounds for which a strategy matrix is computed, within a second."""


def default_delta(units: int) -> float:
    """Return the δ of commands to which no δ is given: 0.01 / ``units``, and at most 0.001.

    `is_large` is never true for this δ. (A mechanism with δ = 1 / ``units`` may publish all data of
    one unit.)
    """
    return min(1e-3, 0.01 / units)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The value of a quantity by one accounting method, such as PLD or RDP.

    Parameters
    ----------
    value : float
    method : str
        The accounting method.
    basis : {"provable", "published"}
    relation : NeighboringRelation
    view : str
        What the adversary sees, in words.
    """

    value: float
    method: str
    basis: Basis = "provable"
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    view: str = "released models"

    def texts(self) -> dict[str, str]:
        """Return all but the value, by the headings of a table."""
        return {
            "calibrated by": self.method,
            "basis": self.basis,
            "relation": self.relation.value,
            "adversary sees": self.view,
        }


def compare_accountings(
    name: str, population: int, group_size: int | None, **known: Any
) -> list[Row]:
    """Compute the quantity ``name`` from the ``known`` ones, by each accounting method.

    The privacy unit is one client of ``population`` or, with ``group_size``, a user with
    ``group_size`` records. For users, the quantity is ``epsilon`` or ``noise_multiplier``.
    """
    if group_size is not None:
        return _rows_of_users(group_size, **known)
    if name == "sampling_rate":
        largest = calibrate_sampling_rate(population=population, **known)
        return [Row(value=largest, method="Poisson, PLD")]
    rate = known.pop("sampling_rate")
    poisson = PoissonSampling(population, rate)
    fixed = FixedSizeSampling(population, size_for_rate(population, rate))
    if name == "rounds":
        return [
            Row(value=calibrate_rounds(sampling=poisson, **known), method="Poisson, PLD"),
            Row(
                value=calibrate_rounds(sampling=fixed, **known),
                method="fixed size, RDP",
                relation=NeighboringRelation.REPLACE_ONE,
            ),
        ]
    return _rows_of_clients(poisson, fixed, **known)


def _rows_of_clients(
    poisson: PoissonSampling,
    fixed: FixedSizeSampling,
    *,
    rounds: int,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float = 0.0,
) -> list[Row]:
    """Return a row for each accounting method, for a run whose privacy unit is one client.

    Each row has the least noise for ``epsilon`` or, without it, the ε of ``noise_multiplier``.
    """
    run: dict[str, Any] = {"sampling_rate": poisson.rate, "rounds": rounds, "delta": delta}
    if epsilon is None:
        claimed = dp2_fedsam_theorem2(noise_multiplier=noise_multiplier, **run).epsilon
    else:
        claimed = dp2_fedsam_theorem2_noise_multiplier(epsilon=epsilon, **run)

    def value(
        sampling: Sampling, relation: NeighboringRelation, releases: float | None = None
    ) -> float:
        # An adversary who knows the cohorts sees a known number of releases with each client's
        # data. Together they are one Gaussian mechanism, with less noise.
        scale, repeats = (1.0, rounds) if releases is None else (math.sqrt(releases), 1)
        options: dict[str, Any] = {"sampling": sampling, "relation": relation}
        if epsilon is None:
            release = Release(noise_multiplier=noise_multiplier / scale, **options)
            return privacy_loss_of({release: repeats}, delta=delta).epsilon
        noise = calibrate_noise_multiplier(epsilon=epsilon, delta=delta, rounds=repeats, **options)
        return scale * noise

    # Views in which sampling amplifies nothing: what the adversary sees, and how many releases with
    # one client's data it sees.
    gaussian_views = {
        method: ("released models and who took part", releases)
        for method, releases in _releases_in_turn(fixed, rounds)
    }
    gaussian_views["cohorts known"] = ("complete sums, in every round", rounds)
    uploads = f"each upload, every round, cohorts of {fixed.size}"
    gaussian_views["uploads known"] = (uploads, rounds * fixed.size)
    everyone = FullParticipation(fixed.population)
    return [
        Row(
            value=claimed,
            method="Theorem 2 (DP²-FedSAM)",
            basis="published",
            view="each upload (claimed)",
        ),
        Row(value=value(poisson, NeighboringRelation.ADD_OR_REMOVE_ONE), method="Poisson, PLD"),
        Row(
            value=value(fixed, NeighboringRelation.REPLACE_ONE),
            method="fixed size, RDP",
            relation=NeighboringRelation.REPLACE_ONE,
        ),
        *(
            Row(
                value=value(everyone, NeighboringRelation.REPLACE_SPECIAL, releases),
                method=method,
                relation=NeighboringRelation.REPLACE_SPECIAL,
                view=view,
            )
            for method, (view, releases) in gaussian_views.items()
        ),
    ]


def _releases_in_turn(fixed: FixedSizeSampling, rounds: int) -> Iterator[tuple[str, float]]:
    """Yield (name, sens(C)²) for each kind of noise that the server may add if clients take turns.

    sens(C) is the sensitivity of the noise's `StrategyMatrix` C, for the most exposed client. Let σ
    be the noise multiplier of each round's fresh noise. Then the run has the same ε as sens(C)²
    releases that all use the client's data, with independent noise of multiplier σ.
    """
    apart = fixed.population // fixed.size
    limits = {"rounds_apart": apart, "participations": math.ceil(rounds / apart)}
    independent = StrategyMatrix()
    yield "in turn, independent noise", independent.sensitivity(**limits) ** 2
    if rounds <= _LONGEST:
        best = CorrelatedNoise().matrix(rounds, **limits)
        error, least = (
            matrix.model_error(rounds) * matrix.sensitivity(**limits)
            for matrix in (independent, best)
        )
        method = f"in turn, correlated noise: error of sums over rounds ÷ {error / least:.2g}"
        yield method, best.sensitivity(**limits) ** 2


def _rows_of_users(
    group_size: int,
    *,
    rounds: int,
    delta: float,
    sampling_rate: float,
    epsilon: float | None = None,
    noise_multiplier: float = 0.0,
) -> list[Row]:
    """Return a row for each bound on the ε of a user with a group of records.

    Two bounds are lemmas of Uldp-FL, and the third is tight. Each row has the least noise for
    ``epsilon`` or, without it, the ε of ``noise_multiplier``.
    """

    def row(method: str, loss_of: Callable[..., PrivacyLoss]) -> Row:
        def epsilon_at(noise: float) -> float:
            silo = DpSgd(noise_multiplier=noise, sampling_rate=sampling_rate, steps=rounds)
            return loss_of(silo, group_size=group_size, delta=delta).epsilon

        if epsilon is None:
            value = epsilon_at(noise_multiplier)
        else:
            target = f"epsilon={epsilon!r} at delta={delta!r} of {group_size} records by {method}"
            value = least_noise_multiplier(lambda noise: epsilon_at(noise) <= epsilon, target)
        return Row(value=value, method=method, view="each step of every silo")

    covered = 1 << (group_size - 1).bit_length()
    return [
        row("Lemma 8 (Uldp-FL)", group_loss_by_conversion),
        row(f"Lemma 9 (Uldp-FL), {covered} records", group_loss_by_renyi),
        row("mixture of Gaussians, PLD", group_loss),
    ]
