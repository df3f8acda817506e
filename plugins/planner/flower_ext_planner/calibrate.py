"""``flower-ext calibrate``: compute noise, ε, rounds or sampling rate from the other three."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from flower_ext.privacy.theorems.uldp_group_theorem import (
    group_loss_by_conversion,
    group_loss_by_renyi,
)

_WORDS = ("calibrated by", "basis", "relation", "adversary sees")
_SIGNS = {
    "epsilon": "ε",
    "noise_multiplier": "σ",
    "delta": "δ",
    "rounds": "T",
    "sampling_rate": "r",
}
_LONGEST = 2_000
"""Largest number of rounds for which a strategy matrix is computed, within a second."""
_LARGEST_DELTA, _SHARE_OF_DELTA = 1e-3, 0.01
"""The default δ is `_SHARE_OF_DELTA` / N, and at most `_LARGEST_DELTA`: `is_large` never warns of
it. A mechanism with δ = 1/N may publish all data of one unit, drawn at random from N units."""


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
    delta: Annotated[
        float | None,
        typer.Option(
            help="δ; by default 1/(100 N), and at most 0.001: a hundredth of the δ that permits "
            "publishing all data of one random client or user."
        ),
    ] = None,
    sampling_rate: Annotated[
        float | None,
        typer.Option(
            help="r: share of the clients in each round; with --unit user, of the records in "
            "each step."
        ),
    ] = None,
    cohort_size: Annotated[
        int | None, typer.Option(help="rN: clients in each round, in place of r.")
    ] = None,
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
    user with at most 8 records. Silos then train by DP-SGD, and add noise of standard deviation σC
    to each step's sum.

    Example: flower-ext calibrate --population 100 --sampling-rate 0.1 --rounds 60 --epsilon 2. To
    find the largest number of rounds, give --noise-multiplier 2 in place of --rounds 60.
    """
    known = _known_values(
        population,
        unit,
        group_size,
        cohort_size,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=min(_LARGEST_DELTA, _SHARE_OF_DELTA / population) if delta is None else delta,
        rounds=rounds,
        sampling_rate=sampling_rate,
    )
    (name,) = _SIGNS.keys() - known.keys()
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
    _print_rows(name, rows)
    if group_size is None and name in ("epsilon", "noise_multiplier"):
        noise = known.pop("noise_multiplier", None) or rows[0][name]
        known.pop("epsilon", None)
        console.print(f"Conditions of Theorem 2 not met at σ = {noise_text(noise)}:")
        for condition in dp2_fedsam_theorem2(noise_multiplier=noise, **known).conditions:
            if not condition.holds:
                console.print(f"  ✗ {condition.text}")


def _known_values(
    population: int,
    unit: PrivacyUnit,
    group_size: int | None,
    cohort_size: int | None,
    **values: float | None,
) -> dict[str, Any]:
    """Return the four known values by name; refuse options that contradict each other."""
    if unit is PrivacyUnit.RECORD:
        raise typer.BadParameter("--unit record: expected client or user")
    if (unit is PrivacyUnit.USER) != (group_size is not None):
        raise typer.BadParameter("give --unit user and --group-size together, or neither")
    if group_size and cohort_size is not None:
        raise typer.BadParameter(
            "--cohort-size counts clients, but silos sample records: with --unit user, give "
            "--sampling-rate"
        )
    if values["sampling_rate"] is not None and cohort_size is not None:
        raise typer.BadParameter("give either --sampling-rate or --cohort-size")
    if cohort_size is not None and not 1 <= cohort_size <= population:
        raise typer.BadParameter(
            f"--cohort-size {cohort_size}: expected an integer from 1 to --population {population}"
        )
    if cohort_size is not None:
        values["sampling_rate"] = cohort_size / population
    known = {name: value for name, value in values.items() if value is not None}
    if len(known) != len(values) - 1:
        raise typer.BadParameter(
            "give three of --epsilon, --noise-multiplier, --rounds, and --sampling-rate or "
            "--cohort-size: the command computes the fourth"
        )
    return known


def _print_rows(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of the quantity ``name``."""
    title, column, formatted = _TABLES[name]
    table = titled_table(title, (*_WORDS, column))
    for row in rows:
        table.add_row(*(row[word] for word in _WORDS), formatted(row[name]))
    console.print(table)


def _answers(
    name: str, population: int, group_size: int | None, **known: Any
) -> list[dict[str, Any]]:
    """Compute the quantity ``name`` from the ``known`` ones; return the rows of a table.

    Each row holds the value by one accounting method, such as PLD or RDP.
    """
    if group_size is not None:
        if name not in ("epsilon", "noise_multiplier"):
            raise typer.BadParameter(
                "with --unit user, the command computes --epsilon or --noise-multiplier only: "
                "leave out one of the two, and give all other options"
            )
        return _of_groups(group_size, **known)
    if name == "sampling_rate":
        most = calibrate_sampling_rate(population=population, **known)
        return [_row(name, most, "Poisson, PLD")]
    rate = known.pop("sampling_rate")
    poisson = PoissonSampling(population, rate)
    fixed = FixedSizeSampling(population, size_for_rate(population, rate))
    if name == "rounds":
        most_fixed = calibrate_rounds(sampling=fixed, **known)
        return [
            _row(name, calibrate_rounds(sampling=poisson, **known), "Poisson, PLD"),
            _row(name, most_fixed, "fixed size, RDP", NeighboringRelation.REPLACE_ONE),
        ]
    return _of_clients(poisson, fixed, **known)


def _row(
    name: str,
    value: float,
    way: str,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    view: str = "released models",
    basis: str = "provable",
) -> dict[str, Any]:
    """Return a table row: the value of the quantity ``name`` by one accounting method."""
    return {**dict(zip(_WORDS, (way, basis, relation.value, view), strict=True)), name: value}


def _of_clients(
    poisson: PoissonSampling,
    fixed: FixedSizeSampling,
    *,
    rounds: int,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float = 0.0,
) -> list[dict[str, Any]]:
    """Return a row for each accounting method, for a run whose privacy unit is one client.

    Each row has the least noise for ``epsilon`` or, without it, the ε of ``noise_multiplier``.
    """
    run: dict[str, Any] = {"sampling_rate": poisson.rate, "rounds": rounds, "delta": delta}
    if epsilon is None:
        name = "epsilon"
        claimed = dp2_fedsam_theorem2(noise_multiplier=noise_multiplier, **run).epsilon
    else:
        name = "noise_multiplier"
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

    add, replace = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE
    special, everyone = NeighboringRelation.REPLACE_SPECIAL, FullParticipation(fixed.population)
    known = {way: ("released models and who took part", n) for way, n in _in_turn(fixed, rounds)}
    known["cohorts known"] = ("complete sums, in every round", rounds)
    uploads = f"each upload, every round, cohorts of {fixed.size}"
    known["uploads known"] = (uploads, rounds * fixed.size)
    return [
        _row(name, claimed, "Theorem 2 (DP²-FedSAM)", add, "each upload (claimed)", "published"),
        _row(name, value(poisson, add), "Poisson, PLD"),
        _row(name, value(fixed, replace), "fixed size, RDP", replace),
        *(
            _row(name, value(everyone, special, releases), way, special, view)
            for way, (view, releases) in known.items()
        ),
    ]


def _in_turn(fixed: FixedSizeSampling, rounds: int) -> Iterator[tuple[str, float]]:
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
        way = f"in turn, correlated noise: error of sums over rounds ÷ {error / least:.2g}"
        yield way, best.sensitivity(**limits) ** 2


def _of_groups(
    group_size: int,
    *,
    rounds: int,
    delta: float,
    sampling_rate: float,
    epsilon: float | None = None,
    noise_multiplier: float = 0.0,
) -> list[dict[str, Any]]:
    """Return a row for each bound on the ε of a user with a group of records.

    Two bounds are lemmas of Uldp-FL, and the third is tight. Each row has the least noise for
    ``epsilon`` or, without it, the ε of ``noise_multiplier``.
    """

    def row(way: str, loss_of: Callable[..., PrivacyLoss]) -> dict[str, Any]:
        def epsilon_at(noise: float) -> float:
            silo = DpSgd(noise_multiplier=noise, sampling_rate=sampling_rate, steps=rounds)
            return loss_of(silo, group_size=group_size, delta=delta).epsilon

        if epsilon is None:
            name, value = "epsilon", epsilon_at(noise_multiplier)
        else:
            target = f"epsilon={epsilon!r} at delta={delta!r} of {group_size} records by {way}"
            name = "noise_multiplier"
            value = least_noise_multiplier(lambda noise: epsilon_at(noise) <= epsilon, target)
        return _row(name, value, way, view="each step of every silo")

    covered = 1 << (group_size - 1).bit_length()
    return [
        row("Lemma 8 (Uldp-FL)", group_loss_by_conversion),
        row(f"Lemma 9 (Uldp-FL), {covered} records", group_loss_by_renyi),
        row("mixture of Gaussians, PLD", group_loss),
    ]


def noise_text(noise_multiplier: float) -> str:
    """Format σ with four decimals, rounded up, so that the printed noise still meets its target."""
    # Without the subtracted 1e-6, rounding would turn 2.0000000000000004 into 2.0001.
    return f"{math.ceil(noise_multiplier * 1e4 - 1e-6) / 1e4:.4f}"


def _rounds_text(rounds: int) -> str:
    """Format the number of rounds; write "≥" before it if the search ended at its limit."""
    return f"≥{rounds}" if 2 * rounds > MAX_ROUNDS else str(rounds)


def _rate_text(rate: float) -> str:
    """Format r with three digits, rounded down, so that the printed rate still meets its target."""
    unit = 10.0 ** (math.ceil(math.log10(rate)) - 3)
    return f"{math.floor(rate / unit) * unit:.3g}"


_TABLES: dict[str, tuple[str, str, Callable[[Any], str]]] = {
    "epsilon": ("Privacy loss", "ε", epsilon_text),
    "noise_multiplier": ("Least noise", "noise multiplier σ", noise_text),
    "rounds": ("Most rounds", "T", _rounds_text),
    "sampling_rate": ("Largest sampling rate", "r", _rate_text),
}
"""Title, column and format of the table of each quantity."""
