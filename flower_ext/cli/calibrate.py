"""``flower-ext calibrate``: compute noise, ε, rounds or sampling rate from the other three."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from flower_ext.cli.screen import console, titled_table
from flower_ext.privacy import (
    CorrelatedNoise,
    DpSgd,
    FixedSizeSampling,
    FullParticipation,
    NeighboringRelation,
    PoissonSampling,
    PrivacyUnit,
    Release,
    Sampling,
    calibrate_noise_multiplier,
    epsilon_text,
    privacy_loss_of,
    size_for_rate,
)
from flower_ext.privacy.accounting.calibration import (
    MAX_ROUNDS,
    calibrate_rounds,
    calibrate_sampling_rate,
    least_noise_multiplier,
)
from flower_ext.privacy.accounting.events import PrivacyLoss
from flower_ext.privacy.accounting.group_privacy import group_loss
from flower_ext.privacy.guarantee import large_delta
from flower_ext.privacy.mechanisms.correlated_noise import StrategyMatrix
from flower_ext.privacy.theorems.dp2_fedsam_theorem import (
    dp2_fedsam_theorem2,
    dp2_fedsam_theorem2_noise_multiplier,
)
from flower_ext.privacy.theorems.uldp_group import group_loss_by_conversion, group_loss_by_renyi

_ADD_OR_REMOVE, _REPLACE = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE
_MODELS = "released models"
_COHORTS = "released models and who took part"
_LONGEST = 2_000
"""Largest number of rounds for which the command computes a strategy matrix, within a second."""
_WORDS = ("calibrated by", "basis", "relation", "adversary sees")
_SIGNS = {
    "epsilon": "ε",
    "noise_multiplier": "σ",
    "delta": "δ",
    "rounds": "T",
    "sampling_rate": "r",
}


@dataclass(frozen=True)
class NoiseChoice:
    """One way to account for a run: ε from noise, noise from ε, and the words for a table."""

    words: dict[str, str]
    epsilon_at: Callable[[float], float]
    noise_for: Callable[[float], float]


def calibrate(
    population: Annotated[int, typer.Option(min=1, help="N: number of all clients, or all users.")],
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="T: planned rounds; with --unit user, steps of DP-SGD."),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Target ε.")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="σ: stddev of the noise on a round's sum, divided by C.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ; by default 1/N.")] = None,
    sampling_rate: Annotated[
        float | None,
        typer.Option(
            help="r: share of the clients in each round; with --unit user, of the records in "
            "each step."
        ),
    ] = None,
    cohort_size: Annotated[int | None, typer.Option(help="rN, in place of the rate.")] = None,
    unit: Annotated[
        PrivacyUnit, typer.Option(help="client, or user: all records of a person (ULDP-GROUP).")
    ] = PrivacyUnit.CLIENT,
    group_size: Annotated[
        int | None, typer.Option(min=1, help="k: most records of a user in all silos.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute the noise, ε, the rounds or the sampling rate: the one that is not given.

    The noise multiplier σ is the standard deviation of the noise on a round's sum, divided by the
    clipping norm C. The privacy unit is one client. With --unit user --group-size 8, it is one
    user with at most 8 records, whose silos train by DP-SGD with noise σC on each step's sum.

    Example: flower-ext calibrate --population 100 --sampling-rate 0.1 --rounds 60 --epsilon 2. To
    find the largest number of rounds, give --noise-multiplier 1 in place of --rounds 60.
    """
    _check_unit(unit, group_size, cohort_size)
    if sampling_rate is not None and cohort_size is not None:
        raise typer.BadParameter("give either --sampling-rate or --cohort-size")
    if cohort_size is not None and not 1 <= cohort_size <= population:
        raise typer.BadParameter(
            f"--cohort-size {cohort_size}: expected an integer from 1 to --population {population}"
        )
    values = {
        "epsilon": epsilon,
        "noise_multiplier": noise_multiplier,
        "delta": 1 / population if delta is None else delta,
        "rounds": rounds,
        "sampling_rate": sampling_rate if cohort_size is None else cohort_size / population,
    }
    unknown = [name for name, value in values.items() if value is None]
    if len(unknown) != 1:
        raise typer.BadParameter(
            "give three of --epsilon, --noise-multiplier, --rounds, and --sampling-rate or "
            "--cohort-size: the command computes the fourth"
        )
    (name,) = unknown
    known: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    rows = _answers(name, population, group_size, **known)
    if as_json:
        answer = {"unit": unit.value, "population": population, **known, "rows": rows}
        console.print_json(json.dumps(answer))
        return
    signs = " · ".join(f"{_SIGNS[name]} = {value:.4g}" for name, value in known.items())
    most = f" with at most {group_size} records" if group_size else ""
    console.print(f"Unit: one {unit.value} of {population}{most} · {signs}\n")
    if warning := large_delta(known["delta"], unit, population):
        console.print(f"{warning}\n")
    title, column, formatted = _TABLES[name]
    table = titled_table(title, (*_WORDS, column))
    for row in rows:
        table.add_row(*(row[word] for word in _WORDS), formatted(row[name]))
    console.print(table)
    if group_size is None and name in ("epsilon", "noise_multiplier"):
        noise = known.pop("noise_multiplier", None) or rows[0][name]
        known.pop("epsilon", None)
        _print_failed_conditions(noise_multiplier=noise, **known)


def _check_unit(unit: PrivacyUnit, group_size: int | None, cohort_size: int | None) -> None:
    """Refuse options that do not fit the privacy unit."""
    if unit is PrivacyUnit.RECORD:
        raise typer.BadParameter("--unit record: expected client or user")
    if (unit is PrivacyUnit.USER) != (group_size is not None):
        raise typer.BadParameter("give --unit user and --group-size together, or neither")
    if group_size and cohort_size is not None:
        raise typer.BadParameter(
            "--cohort-size counts clients: with --unit user, give --sampling-rate"
        )


def _answers(
    name: str, population: int, group_size: int | None, **known: Any
) -> list[dict[str, Any]]:
    """Return a table row for each way to account for a run, with the value of ``name``."""
    if group_size is not None:
        if name not in ("epsilon", "noise_multiplier"):
            raise typer.BadParameter(
                "with --unit user, the command computes --epsilon or --noise-multiplier: leave out "
                "one of these, and give all others"
            )
        target = known.pop("noise_multiplier" if name == "epsilon" else "epsilon")
        ways = _group_ways(group_size, **known)
        return [
            {**way.words, name: (way.epsilon_at if name == "epsilon" else way.noise_for)(target)}
            for way in ways
        ]
    if name == "sampling_rate":
        most = calibrate_sampling_rate(population=population, **known)
        return [{**_described("Poisson, PLD", _ADD_OR_REMOVE), name: most}]
    rate = known.pop("sampling_rate")
    poisson = PoissonSampling(population, rate)
    fixed = FixedSizeSampling(population, size_for_rate(population, rate))
    if name == "rounds":
        most_poisson = calibrate_rounds(sampling=poisson, **known)
        most_fixed = calibrate_rounds(sampling=fixed, **known)
        return [
            {**_described("Poisson, PLD", _ADD_OR_REMOVE), name: most_poisson},
            {**_described("fixed size, RDP", _REPLACE), name: most_fixed},
        ]
    ways = _ways(poisson, fixed, known["rounds"], known["delta"])
    if name == "epsilon":
        return [{**way.words, name: way.epsilon_at(known["noise_multiplier"])} for way in ways]
    return [{**way.words, name: way.noise_for(known["epsilon"])} for way in ways]


def _described(
    name: str, relation: NeighboringRelation, view: str = _MODELS, basis: str = "provable"
) -> dict[str, str]:
    return dict(zip(_WORDS, (name, basis, relation.value, view), strict=True))


def _ways(
    poisson: PoissonSampling, fixed: FixedSizeSampling, rounds: int, delta: float
) -> list[NoiseChoice]:
    theorem: dict[str, Any] = {"sampling_rate": poisson.rate, "rounds": rounds, "delta": delta}
    claim = NoiseChoice(
        _described("Theorem 2 (DP²-FedSAM)", _ADD_OR_REMOVE, "each upload (claimed)", "published"),
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

        return NoiseChoice(_described(name, relation, view), epsilon_at, noise_for)

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

    sens(C) is the sensitivity of the noise's `StrategyMatrix` C, for the most exposed client. If
    each round's fresh noise has the noise multiplier σ, ε is that of sens(C)² releases with the
    client's data, each with noise multiplier σ.
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


def _group_ways(
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

        return NoiseChoice(
            _described(name, _ADD_OR_REMOVE, "each step of every silo"), epsilon_at, noise_for
        )

    covered = 1 << (group_size - 1).bit_length()
    return [
        way("Lemma 8 (Uldp-FL)", group_loss_by_conversion),
        way(f"Lemma 9 (Uldp-FL), {covered} records", group_loss_by_renyi),
        way("mixture of Gaussians, PLD", group_loss),
    ]


def _print_failed_conditions(**run: Any) -> None:
    claim = dp2_fedsam_theorem2(**run)
    console.print(f"Conditions of Theorem 2 not met at σ = {noise_text(run['noise_multiplier'])}:")
    for condition in claim.conditions:
        if not condition.holds:
            console.print(f"  ✗ {condition.text}")


def noise_text(noise_multiplier: float) -> str:
    """Format σ with four decimals, rounded up, so that the printed noise still meets its target."""
    # Without the subtracted 1e-6, rounding would turn 2.0000000000000004 into 2.0001.
    return f"{math.ceil(noise_multiplier * 1e4 - 1e-6) / 1e4:.4f}"


def _rounds_text(rounds: int) -> str:
    """Format the number of rounds; prefix "≥" if the search ended at its limit."""
    return f"≥{rounds}" if 2 * rounds > MAX_ROUNDS else str(rounds)


def _rate_text(rate: float) -> str:
    """Format three significant digits, rounded down: the printed rate still meets its target."""
    unit = 10.0 ** (math.ceil(math.log10(rate)) - 3)
    return f"{math.floor(rate / unit) * unit:.3g}"


_TABLES: dict[str, tuple[str, str, Callable[[Any], str]]] = {
    "epsilon": ("Privacy loss", "ε", epsilon_text),
    "noise_multiplier": ("Least noise", "noise multiplier σ", noise_text),
    "rounds": ("Most rounds", "T", _rounds_text),
    "sampling_rate": ("Largest sampling rate", "r", _rate_text),
}
"""Title, column and format of the table of each quantity."""
