"""``flower-ext calibrate``: noise, ε, rounds or sampling rate from the three others."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import typer

from flower_ext.cli.screen import console, titled_table
from flower_ext.privacy import (
    FixedSizeSampling,
    FullParticipation,
    NeighboringRelation,
    PoissonSampling,
    Sampling,
    calibrate_noise_multiplier,
    epsilon_text,
    privacy_loss,
    size_for_rate,
)
from flower_ext.privacy.accounting import Accountant, participations_loss
from flower_ext.privacy.calibration import MAX_ROUNDS, calibrate_rounds, calibrate_sampling_rate
from flower_ext.privacy.participations import Participations
from flower_ext.privacy.theorems.dp2_fedsam import (
    dp2_fedsam_theorem2,
    dp2_fedsam_theorem2_noise_multiplier,
)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to account the same run."""

    name: str
    relation: NeighboringRelation
    view: str
    basis: str
    epsilon_at: Callable[[float], float]
    noise_for: Callable[[float], float]


def calibrate(
    population: Annotated[int, typer.Option(min=1, help="N: clients in the federation.")],
    rounds: Annotated[int | None, typer.Option(min=1, help="T: planned rounds.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Target ε.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="σ.")] = None,
    delta: Annotated[float | None, typer.Option(help="δ; by default 1/N.")] = None,
    sampling_rate: Annotated[
        float | None, typer.Option(help="r: share of clients a round.")
    ] = None,
    cohort_size: Annotated[int | None, typer.Option(help="rN instead of the rate.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell the noise, ε, the rounds or the sampling rate: whichever of the four is not given.

    The noise multiplier σ is the standard deviation of the noise on a round's sum over the
    clipping norm C. The unit is one client.

    Example: flower-ext calibrate --population 100 --sampling-rate 0.1 --rounds 60 --epsilon 2, or
    with --noise-multiplier 1 in place of --rounds 60 for the most rounds
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
            "--cohort-size: the fourth is what you are told"
        )
    delta = 1 / population if delta is None else delta
    if rate is None or rounds is None:
        facts = {"epsilon": epsilon, "noise_multiplier": noise_multiplier, "delta": delta}
        found = _most(population, rate, rounds, facts)
        known = {"rounds": rounds} if rate is None else {"sampling_rate": rate}
        _print_most(found, {"population": population, **facts, **known}, as_json=as_json)
        return
    ways = _ways(population, rate, rounds, delta)
    if epsilon is not None:
        noises = {way.name: way.noise_for(epsilon) for way in ways}
    else:
        noises = {ways[0].name: noise_multiplier or 0.0}
    rows: list[dict[str, Any]] = [
        {
            "calibrated by": way.name,
            "basis": way.basis,
            "relation": way.relation.value,
            "adversary sees": way.view,
            "noise_multiplier": noises[way.name],
            "epsilon": {other.name: other.epsilon_at(noises[way.name]) for other in ways},
        }
        for way in ways
        if way.name in noises
    ]
    if as_json:
        known = {"population": population, "sampling_rate": rate, "rounds": rounds, "delta": delta}
        console.print_json(json.dumps({"unit": "client", **known, "rows": rows}))
        return
    console.print(
        f"Unit: one client of {population} · r = {rate:g} · T = {rounds} · δ = {delta:.3g}\n"
    )
    if epsilon is not None:
        _print_noise(rows, epsilon)
    _print_epsilon(ways, rows)
    _print_failed_conditions(rate, rounds, delta, rows[0]["noise_multiplier"])


def _most(
    population: int, rate: float | None, rounds: int | None, facts: Mapping[str, float | None]
) -> list[dict[str, Any]]:
    """By each accountant the most rounds, or the largest sampling rate, that ``facts`` allow."""
    given: dict[str, Any] = dict(facts)
    poisson: dict[str, Any] = _provable(NeighboringRelation.ADD_OR_REMOVE_ONE)
    names = {accountant: f"Poisson, {accountant.upper()}" for accountant in get_args(Accountant)}
    if rate is None:
        given |= {"population": population, "rounds": rounds}
        return [
            {
                "calibrated by": name,
                **poisson,
                "sampling_rate": calibrate_sampling_rate(accountant=accountant, **given),
            }
            for accountant, name in names.items()
        ]
    given["sampling"] = PoissonSampling(population, rate)
    rows = [
        {
            "calibrated by": name,
            **poisson,
            "rounds": calibrate_rounds(accountant=accountant, **given),
        }
        for accountant, name in names.items()
    ]
    given["sampling"] = FixedSizeSampling(population, size_for_rate(population, rate))
    replaced = _provable(NeighboringRelation.REPLACE_ONE)
    return [
        *rows,
        {"calibrated by": "fixed size, RDP", **replaced, "rounds": calibrate_rounds(**given)},
    ]


def _provable(relation: NeighboringRelation) -> dict[str, str]:
    return {"basis": "provable", "relation": relation.value, "adversary sees": "released models"}


def _print_most(rows: list[dict[str, Any]], facts: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        console.print_json(json.dumps({"unit": "client", **facts, "rows": rows}))
        return
    signs = {
        "epsilon": "ε",
        "noise_multiplier": "σ",
        "delta": "δ",
        "rounds": "T",
        "sampling_rate": "r",
    }
    given = " · ".join(f"{signs[n]} = {facts[n]:.4g}" for n in signs if facts.get(n) is not None)
    console.print(f"Unit: one client of {facts['population']} · {given}\n")
    asked = "rounds" if "rounds" in rows[0] else "sampling_rate"
    title = "Most rounds" if asked == "rounds" else "Largest sampling rate"
    described = ("calibrated by", "basis", "relation", "adversary sees")
    table = titled_table(title, (*described, signs[asked]))
    for row in rows:
        told = _rounds_text(row[asked]) if asked == "rounds" else _rate_text(row[asked])
        table.add_row(*(row[column] for column in described), told)
    console.print(table)


def _ways(population: int, rate: float, rounds: int, delta: float) -> list[Way]:
    add_remove, replace_one = (
        NeighboringRelation.ADD_OR_REMOVE_ONE,
        NeighboringRelation.REPLACE_ONE,
    )
    theorem: dict[str, Any] = {"sampling_rate": rate, "rounds": rounds, "delta": delta}

    def sound(
        name: str,
        sampling: Sampling,
        relation: NeighboringRelation,
        view: str,
        accountant: Accountant,
    ) -> Way:
        facts: dict[str, Any] = {
            "sampling": sampling,
            "relation": relation,
            "rounds": rounds,
            "delta": delta,
            "accountant": accountant,
        }
        return Way(
            name=name,
            relation=relation,
            view=view,
            basis="provable",
            epsilon_at=lambda s: privacy_loss(noise_multiplier=s, **facts).epsilon,
            noise_for=lambda e: calibrate_noise_multiplier(epsilon=e, **facts),
        )

    poisson = PoissonSampling(population, rate)
    fixed = FixedSizeSampling(population, size_for_rate(population, rate))
    everywhere = Participations.worst_case(rounds, fixed.size)

    def unamplified(name: str, view: str, participations: float) -> Way:
        facts: dict[str, Any] = {
            "participations": participations,
            "relation": NeighboringRelation.REPLACE_SPECIAL,
            "delta": delta,
        }
        # `participations` releases in which everyone takes part; they compose to one Gaussian.
        alone: dict[str, Any] = {
            "sampling": FullParticipation(population),
            "relation": NeighboringRelation.REPLACE_SPECIAL,
            "rounds": 1,
            "delta": delta,
        }
        return Way(
            name=name,
            relation=NeighboringRelation.REPLACE_SPECIAL,
            view=view,
            basis="provable",
            epsilon_at=lambda s: participations_loss(noise_multiplier=s, **facts).epsilon,
            noise_for=lambda e: (
                calibrate_noise_multiplier(epsilon=e, **alone) * math.sqrt(participations)
            ),
        )

    return [
        Way(
            name="Theorem 2 (DP²-FedSAM)",
            relation=add_remove,
            view="each upload (claimed)",
            basis="published",
            epsilon_at=lambda s: dp2_fedsam_theorem2(noise_multiplier=s, **theorem).epsilon,
            noise_for=lambda e: dp2_fedsam_theorem2_noise_multiplier(epsilon=e, **theorem),
        ),
        sound("Poisson, PLD", poisson, add_remove, "released models", "pld"),
        sound("Poisson, RDP", poisson, add_remove, "released models", "rdp"),
        sound("fixed size, RDP", fixed, replace_one, "released models", "pld"),
        unamplified("cohorts known", "complete sums, in every round", everywhere.in_sums),
        unamplified(
            "uploads known",
            f"each upload, every round, cohorts of {fixed.size}",
            everywhere.in_uploads,
        ),
    ]


def _print_noise(rows: list[dict[str, Any]], epsilon: float) -> None:
    described = ("calibrated by", "basis", "relation", "adversary sees")
    table = titled_table(f"Noise for ε = {epsilon:g}", (*described, "noise multiplier σ"))
    for row in rows:
        words = [str(row[column]) for column in described]
        table.add_row(*words, noise_text(row["noise_multiplier"]))
    console.print(table)


def _print_epsilon(ways: list[Way], rows: list[dict[str, Any]]) -> None:
    columns = ("σ", *(f"ε, {way.name}" for way in ways))
    table = titled_table("What each σ gives under each accounting", columns)
    for row in rows:
        epsilons = [epsilon_text(row["epsilon"][way.name]) for way in ways]
        table.add_row(noise_text(row["noise_multiplier"]), *epsilons)
    console.print(table)


def noise_text(noise_multiplier: float) -> str:
    """σ with four decimals, rounded up: the printed noise still meets its target."""
    # The guard keeps 2.0000000000000004 from becoming 2.0001.
    return f"{math.ceil(noise_multiplier * 1e4 - 1e-6) / 1e4:.4f}"


def _rounds_text(rounds: int) -> str:
    """The number, or that there may be more where the search ended."""
    return f"≥{rounds}" if 2 * rounds > MAX_ROUNDS else str(rounds)


def _rate_text(rate: float) -> str:
    """Three significant digits, rounded down: the printed rate still meets its target."""
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
