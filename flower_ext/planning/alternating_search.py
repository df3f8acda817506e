"""Search for rounds and weight of the global model by short training runs: DP-Ditto, Section V-C.

T is the number of rounds, λ the weight of the global model. If there is a formula for the
unfairness R(λ), `best_schedule` computes the best λ. Use this search if there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flower_ext.errors import InvalidValue
from flower_ext.planning.convergence import check_global_weight


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a short run: the mean training loss, and how it varies over clients.

    Lower values are better for both.
    """

    loss: float
    unfairness: float


@dataclass(frozen=True, kw_only=True)
class EmpiricalSchedule:
    """The best ``rounds`` (T*) and ``global_weight`` (λ*) that short training runs have found.

    ``settled`` is true if a further step of the search would change neither T* nor λ*. It is false
    if the search ran in a cycle of several pairs (T, λ). The result is then the pair of this cycle
    with the smallest loss. ``outcomes`` holds the outcome of every run, by (T, λ).
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
    """Search the T with the lowest loss, then the λ with the lowest unfairness, and repeat.

    The search ends when neither changes, or when it comes back to an earlier pair (Section V-C).

    Parameters
    ----------
    run : Callable[[int, float], Outcome]
        Takes T and λ, trains for T rounds with λ and the noise that T rounds need, and returns the
        outcome. The search calls it at most once for each pair (T, λ). If a run diverges, it may
        return NaN or infinity, which count as worse than every number.
    rounds, global_weights : Sequence
        Candidates for T and for λ. Of equally good candidates, the search takes the first.
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
