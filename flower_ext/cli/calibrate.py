"""``flower-ext calibrate``: compute noise, ε, rounds or sampling rate from the other three."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from flower_ext.cli.screen import console, titled_table
from flower_ext.privacy import (
    FixedSizeSampling,
    NeighboringRelation,
    PoissonSampling,
    PrivacyUnit,
    epsilon_text,
    size_for_rate,
)
from flower_ext.privacy.accounting.calibration import (
    MAX_ROUNDS,
    calibrate_rounds,
    calibrate_sampling_rate,
)
from flower_ext.privacy.guarantee import large_delta
from flower_ext.privacy.noise_choices import NoiseChoice, ways_of_clients, ways_of_groups
from flower_ext.privacy.theorems.dp2_fedsam_theorem import dp2_fedsam_theorem2

_WORDS = ("calibrated by", "basis", "relation", "adversary sees")
_SIGNS = {
    "epsilon": "ε",
    "noise_multiplier": "σ",
    "delta": "δ",
    "rounds": "T",
    "sampling_rate": "r",
}


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
            "--cohort-size counts clients, but silos sample records: with --unit user, give "
            "--sampling-rate"
        )


def _answers(
    name: str, population: int, group_size: int | None, **known: Any
) -> list[dict[str, Any]]:
    """Compute the quantity ``name`` from the ``known`` ones; return the rows of a table.

    Each row has the value that one way to account for the run gives, such as PLD or RDP.
    """
    if group_size is not None:
        if name not in ("epsilon", "noise_multiplier"):
            raise typer.BadParameter(
                "with --unit user, the command computes --epsilon or --noise-multiplier only: "
                "leave out one of the two, and give all other options"
            )
        target = known.pop("noise_multiplier" if name == "epsilon" else "epsilon")
        return _of_each(ways_of_groups(group_size, **known), name, target)
    if name == "sampling_rate":
        most = calibrate_sampling_rate(population=population, **known)
        return [{**_words("Poisson, PLD"), name: most}]
    rate = known.pop("sampling_rate")
    poisson = PoissonSampling(population, rate)
    fixed = FixedSizeSampling(population, size_for_rate(population, rate))
    if name == "rounds":
        most_poisson = calibrate_rounds(sampling=poisson, **known)
        most_fixed = calibrate_rounds(sampling=fixed, **known)
        return [
            {**_words("Poisson, PLD"), name: most_poisson},
            {**_words("fixed size, RDP", NeighboringRelation.REPLACE_ONE), name: most_fixed},
        ]
    target = known["noise_multiplier" if name == "epsilon" else "epsilon"]
    ways = ways_of_clients(poisson, fixed, known["rounds"], known["delta"])
    return _of_each(ways, name, target)


def _of_each(ways: Sequence[NoiseChoice], name: str, target: float) -> list[dict[str, Any]]:
    """Return a table row for each way to account for a run.

    If ``name`` is "epsilon", ``target`` is a noise multiplier, and the row has its ε. Otherwise
    ``target`` is an ε, and the row has the least noise multiplier for it.
    """
    return [
        {
            **_words(way.name, way.relation, way.view, way.basis),
            name: way.epsilon_at(target) if name == "epsilon" else way.noise_for(target),
        }
        for way in ways
    ]


def _words(
    name: str,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    view: str = "released models",
    basis: str = "provable",
) -> dict[str, str]:
    """Return the cells of a table row that name one way to account for a run."""
    return dict(zip(_WORDS, (name, basis, relation.value, view), strict=True))


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
