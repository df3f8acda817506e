"""Search for rounds and weight of the global model by short training runs: DP-Ditto, Section V-C.

It serves where the unfairness R(λ) has no formula, so that `best_schedule` cannot compute λ*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flower_ext.errors import InvalidValue
from flower_ext.planning.convergence import check_global_weight


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a short run: mean training loss, and its spread over clients. Less is better."""

    loss: float
    unfairness: float


@dataclass(frozen=True, kw_only=True)
class EmpiricalSchedule:
    """(T*, λ*) found by short training runs.

    ``settled`` is true if both searches came to rest. If they cycle, the result is the point of the
    cycle with the smallest loss. ``outcomes`` has every run that was made.
    """

    rounds: int
    global_weight: float
    settled: bool
    outcomes: dict[tuple[int, float], Outcome]


def alternating_search(
    run: Callable[[int, float], Outcome],
    *,
    rounds: Sequence[int],
    global_weights: Sequence[float],
    start: float | None = None,
) -> EmpiricalSchedule:
    """Search T by loss, then λ by fairness, and repeat until neither changes (Section V-C).

    Parameters
    ----------
    run : Callable[[int, float], Outcome]
        Trains for T rounds at λ under the noise that T rounds need. Called once for each pair. It
        may return NaN or infinity for a run that diverged, which then loses every comparison.
    rounds, global_weights : Sequence
        Candidates. Of equally good candidates, the first wins.
    start : float, optional
        The first λ; by default the first of ``global_weights``.

    Raises
    ------
    ValueError
        There is no candidate, or one is out of range.
    """
    if not rounds or min(rounds) < 1:
        raise InvalidValue(f"rounds={list(rounds)!r}: expected at least one integer, all >= 1")
    if not global_weights:
        raise InvalidValue("global_weights=[]: expected at least one number in [0, 2]")
    for candidate in global_weights:
        check_global_weight(candidate)
    weight = global_weights[0] if start is None else start
    check_global_weight(weight)
    outcomes: dict[tuple[int, float], Outcome] = {}

    def outcome(T: int, candidate: float) -> Outcome:
        if (T, candidate) not in outcomes:
            outcomes[T, candidate] = run(T, candidate)
        return outcomes[T, candidate]

    def loss(pair: tuple[int, float]) -> float:
        return _or_infinite(outcome(*pair).loss)

    visited: list[tuple[int, float]] = []
    while True:
        current = weight
        T = min(rounds, key=lambda candidate: loss((candidate, current)))
        weight = min(
            global_weights, key=lambda candidate: _or_infinite(outcome(T, candidate).unfairness)
        )
        # Each search depends on the other's result alone, so a pair that recurs begins a cycle.
        if (T, weight) in visited:
            cycle = visited[visited.index((T, weight)) :]
            best_T, best_weight = min(cycle, key=loss)
            return EmpiricalSchedule(
                rounds=best_T,
                global_weight=best_weight,
                settled=len(cycle) == 1,
                outcomes=outcomes,
            )
        visited.append((T, weight))


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value
