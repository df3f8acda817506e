"""``flower-ext calibrate``: compute noise, ε, rounds or sampling rate from the other three."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from flower_ext.checks import require_positive, require_rate, require_scale
from flower_ext.cli.screen import console, titled_table
from flower_ext.privacy import PrivacyUnit, epsilon_text
from flower_ext.privacy.guarantee import large_delta
from flower_ext.privacy.theorems.dp2_fedsam_theorem import dp2_fedsam_theorem2
from flower_ext_planner.comparison import Row, compare_accountings, default_delta
from flower_ext_planner.rounds_and_rates import MAX_ROUNDS

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
            help="r: fraction of the clients in each round; with --unit user, of the records in "
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
        delta=default_delta(population) if delta is None else delta,
        rounds=rounds,
        sampling_rate=sampling_rate,
    )
    (name,) = _SIGNS.keys() - known.keys()
    if group_size is not None and name not in ("epsilon", "noise_multiplier"):
        raise typer.BadParameter(
            "with --unit user, the command computes --epsilon or --noise-multiplier only: "
            "leave out one of the two, and give all other options"
        )
    rows = compare_accountings(name, population, group_size, **known)
    if as_json:
        as_dicts = [{**row.texts(), name: row.value} for row in rows]
        answer = {"unit": unit.value, "population": population, **known, "rows": as_dicts}
        console.print_json(json.dumps(answer))
        return
    signs = " · ".join(f"{_SIGNS[name]} = {value:.4g}" for name, value in known.items())
    most = f" with at most {group_size} records" if group_size else ""
    console.print(f"Unit: one {unit.value} of {population}{most} · {signs}\n")
    if warning := large_delta(known["delta"], unit, population):
        console.print(f"{warning}\n")
    _print_rows(name, rows)
    if group_size is None and name in ("epsilon", "noise_multiplier"):
        noise = known.pop("noise_multiplier", None) or rows[0].value
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
        raise typer.BadParameter("give --sampling-rate or --cohort-size, but not both")
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
    for name, require in _RULES.items():
        if name in known:
            require(name, known[name])
    return known


_RULES = {
    "epsilon": require_positive,
    "noise_multiplier": require_scale,
    "sampling_rate": require_rate,
}


def _print_rows(name: str, rows: Sequence[Row]) -> None:
    """Print the table of the quantity ``name``."""
    title, column, formatted = _TABLES[name]
    table = titled_table(title, (*rows[0].texts(), column))
    for row in rows:
        table.add_row(*row.texts().values(), formatted(row.value))
    console.print(table)


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
