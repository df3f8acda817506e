"""``flower-ext calibrate``: compute noise, ε, rounds or sampling rate from the other three."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import typer

from flower_ext.cli.screen import console, titled_table
from flower_ext.privacy import (
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
from flower_ext.privacy.accounting.accountant import Accountant
from flower_ext.privacy.accounting.calibration import (
    MAX_ROUNDS,
    calibrate_rounds,
    calibrate_sampling_rate,
)
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.guarantee import large_delta
from flower_ext.privacy.theorems.dp2_fedsam_theorem import (
    dp2_fedsam_theorem2,
    dp2_fedsam_theorem2_noise_multiplier,
)

_ADD_OR_REMOVE, _REPLACE = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE
_NAME = "calibrated by"
_WORDS = (_NAME, "basis", "relation", "adversary sees")
_SIGNS = {
    "epsilon": "ε",
    "noise_multiplier": "σ",
    "delta": "δ",
    "rounds": "T",
    "sampling_rate": "r",
}


@dataclass(frozen=True)
class Way:
    """One way to account for the same run, and the words that describe it in a table."""

    words: dict[str, str]
    epsilon_at: Callable[[float], float]
    noise_for: Callable[[float], float]

    @property
    def name(self) -> str:
        """Its name in tables."""
        return self.words[_NAME]


def calibrate(
    population: Annotated[int, typer.Option(min=1, help="N: clients in the federation.")],
    rounds: Annotated[int | None, typer.Option(min=1, help="T: planned rounds.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Target ε.")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="σ: stddev of the noise on a round's sum, over C.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ; by default 1/N.")] = None,
    sampling_rate: Annotated[
        float | None, typer.Option(help="r: share of the clients in each round.")
    ] = None,
    cohort_size: Annotated[int | None, typer.Option(help="rN, in place of the rate.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute the noise, ε, the rounds or the sampling rate from the other three.

    The noise multiplier σ is the standard deviation of the noise on a round's sum, divided by the
    clipping norm C. The privacy unit is one client.

    Example: flower-ext calibrate --population 100 --sampling-rate 0.1 --rounds 60 --epsilon 2. To
    find the largest number of rounds, give --noise-multiplier 1 in place of --rounds 60.
    """
    if sampling_rate is not None and cohort_size is not None:
        raise typer.BadParameter("give either --sampling-rate or --cohort-size")
    if cohort_size is not None and not 1 <= cohort_size <= population:
        raise typer.BadParameter(
            f"--cohort-size {cohort_size}: expected an integer from 1 to --population {population}"
        )
    rate = sampling_rate if cohort_size is None else cohort_size / population
    if [epsilon, noise_multiplier, rounds, rate].count(None) != 1:
        raise typer.BadParameter(
            "give three of --epsilon, --noise-multiplier, --rounds, and --sampling-rate or "
            "--cohort-size: the command computes the fourth"
        )
    delta = 1 / population if delta is None else delta
    if rate is None or rounds is None:
        target = {"epsilon": epsilon, "noise_multiplier": noise_multiplier, "delta": delta}
        most = _most(population, rate, rounds, target)
        known = {"rounds": rounds} if rate is None else {"sampling_rate": rate}
        _print_most(most, {"population": population, **target, **known}, as_json=as_json)
        return
    ways = _ways(population, rate, rounds, delta)
    if epsilon is not None:
        noises = [(way, way.noise_for(epsilon)) for way in ways]
    else:
        noises = [(ways[0], noise_multiplier or 0.0)]
    rows: list[dict[str, Any]] = [
        {
            **way.words,
            "noise_multiplier": noise,
            "epsilon": {other.name: other.epsilon_at(noise) for other in ways},
        }
        for way, noise in noises
    ]
    if as_json:
        known = {"population": population, "sampling_rate": rate, "rounds": rounds, "delta": delta}
        console.print_json(json.dumps({"unit": "client", **known, "rows": rows}))
        return
    console.print(
        f"Unit: one client of {population} · r = {rate:g} · T = {rounds} · δ = {delta:.3g}\n"
    )
    if warning := large_delta(delta, PrivacyUnit.CLIENT, population):
        console.print(f"{warning}\n")
    if epsilon is not None:
        needed = [noise_text(row["noise_multiplier"]) for row in rows]
        _print_described(f"Noise for ε = {epsilon:g}", rows, "noise multiplier σ", needed)
    _print_epsilon(ways, rows)
    _print_failed_conditions(rate, rounds, delta, rows[0]["noise_multiplier"])


def _most(
    population: int, rate: float | None, rounds: int | None, known: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return, for each accountant, the largest number of rounds or sampling rate allowed.

    The function computes whichever of ``rate`` and ``rounds`` is None.
    """
    most: list[dict[str, Any]] = []
    for accountant in get_args(Accountant):
        words = _described(f"Poisson, {accountant.upper()}", _ADD_OR_REMOVE)
        given: dict[str, Any] = {**known, "accountant": accountant}
        if rate is None:
            given |= {"population": population, "rounds": rounds}
            most.append({**words, "sampling_rate": calibrate_sampling_rate(**given)})
        else:
            largest = calibrate_rounds(sampling=PoissonSampling(population, rate), **given)
            most.append({**words, "rounds": largest})
    if rate is not None:
        fixed = FixedSizeSampling(population, size_for_rate(population, rate))
        words = _described("fixed size, RDP", _REPLACE)
        most.append({**words, "rounds": calibrate_rounds(sampling=fixed, **known)})
    return most


def _described(
    name: str,
    relation: NeighboringRelation,
    view: str = "released models",
    basis: str = "provable",
) -> dict[str, str]:
    return dict(zip(_WORDS, (name, basis, relation.value, view), strict=True))


def _print_most(rows: list[dict[str, Any]], known: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        console.print_json(json.dumps({"unit": "client", **known, "rows": rows}))
        return
    given = " · ".join(f"{_SIGNS[n]} = {known[n]:.4g}" for n in _SIGNS if known.get(n) is not None)
    console.print(f"Unit: one client of {known['population']} · {given}\n")
    if "rounds" in rows[0]:
        _print_described("Most rounds", rows, "T", [_rounds_text(row["rounds"]) for row in rows])
    else:
        rates = [_rate_text(row["sampling_rate"]) for row in rows]
        _print_described("Largest sampling rate", rows, "r", rates)


def _print_described(
    title: str, rows: list[dict[str, Any]], column: str, cells: Sequence[str]
) -> None:
    table = titled_table(title, (*_WORDS, column))
    for row, cell in zip(rows, cells, strict=True):
        table.add_row(*(row[word] for word in _WORDS), cell)
    console.print(table)


def _ways(population: int, rate: float, rounds: int, delta: float) -> list[Way]:
    theorem: dict[str, Any] = {"sampling_rate": rate, "rounds": rounds, "delta": delta}
    claim = Way(
        _described("Theorem 2 (DP²-FedSAM)", _ADD_OR_REMOVE, "each upload (claimed)", "published"),
        lambda s: dp2_fedsam_theorem2(noise_multiplier=s, **theorem).epsilon,
        lambda e: dp2_fedsam_theorem2_noise_multiplier(epsilon=e, **theorem),
    )

    def provable(
        name: str,
        sampling: Sampling,
        relation: NeighboringRelation,
        *,
        view: str = "released models",
        scale: float = 1.0,
        rounds: int = rounds,
        accountant: Accountant = "pld",
    ) -> Way:
        def epsilon(noise_multiplier: float) -> float:
            release = Release(
                sampling=sampling, noise_multiplier=noise_multiplier / scale, relation=relation
            )
            return privacy_loss_of({release: rounds}, delta=delta, accountant=accountant).epsilon

        def noise_multiplier(epsilon: float) -> float:
            return scale * calibrate_noise_multiplier(
                epsilon=epsilon,
                delta=delta,
                sampling=sampling,
                rounds=rounds,
                relation=relation,
                accountant=accountant,
            )

        return Way(_described(name, relation, view), epsilon, noise_multiplier)

    poisson = PoissonSampling(population, rate)
    fixed = FixedSizeSampling(population, size_for_rate(population, rate))
    seen = Participations.worst_case(rounds, fixed.size)
    sums, uploads = math.sqrt(seen.in_sums), math.sqrt(seen.in_uploads)
    sums_view = "complete sums, in every round"
    uploads_view = f"each upload, every round, cohorts of {fixed.size}"
    # An adversary who knows the cohorts sees a known number of releases with each client's data.
    # Together they are one Gaussian mechanism.
    everyone, special = FullParticipation(population), NeighboringRelation.REPLACE_SPECIAL
    return [
        claim,
        provable("Poisson, PLD", poisson, _ADD_OR_REMOVE, accountant="pld"),
        provable("Poisson, RDP", poisson, _ADD_OR_REMOVE, accountant="rdp"),
        provable("fixed size, RDP", fixed, _REPLACE),
        provable("cohorts known", everyone, special, view=sums_view, scale=sums, rounds=1),
        provable("uploads known", everyone, special, view=uploads_view, scale=uploads, rounds=1),
    ]


def _print_epsilon(ways: list[Way], rows: list[dict[str, Any]]) -> None:
    columns = ("σ", *(f"ε, {way.name}" for way in ways))
    table = titled_table("What each σ gives under each accounting", columns)
    for row in rows:
        epsilons = [epsilon_text(row["epsilon"][way.name]) for way in ways]
        table.add_row(noise_text(row["noise_multiplier"]), *epsilons)
    console.print(table)


def noise_text(noise_multiplier: float) -> str:
    """Format σ with four decimals, rounded up, so that the printed noise still meets its target."""
    # Without the subtracted 1e-6, rounding would turn 2.0000000000000004 into 2.0001.
    return f"{math.ceil(noise_multiplier * 1e4 - 1e-6) / 1e4:.4f}"


def _rounds_text(rounds: int) -> str:
    """Format the number of rounds; prefix "≥" where the search ended at its limit."""
    return f"≥{rounds}" if 2 * rounds > MAX_ROUNDS else str(rounds)


def _rate_text(rate: float) -> str:
    """Format three significant digits, rounded down: the printed rate still meets its target."""
    unit = 10.0 ** (math.ceil(math.log10(rate)) - 3)
    return f"{math.floor(rate / unit) * unit:.3g}"


def _print_failed_conditions(
    rate: float, rounds: int, delta: float, noise_multiplier: float
) -> None:
    claim = dp2_fedsam_theorem2(
        noise_multiplier=noise_multiplier, sampling_rate=rate, rounds=rounds, delta=delta
    )
    console.print(f"Conditions of Theorem 2 not met at σ = {noise_text(noise_multiplier)}:")
    for condition in claim.conditions:
        if not condition.holds:
            console.print(f"  ✗ {condition.text}")
