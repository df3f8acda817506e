"""Search for the number of rounds and the weight of the global model: DP-Ditto, Section V.

T is the number of rounds, and λ the weight of the global model. If there is a formula for the
unfairness R(λ), Eqn 33 applies. It takes for every T the fairest λ*(T) under the noise that T
rounds need, and then the T whose bound h(T, λ*(T)) is smallest. If there is no formula, use
`alternating_search`, which makes short training runs (Section V-C).

h bounds the distance of client n's personal model to its optimum v_n*(λ), which depends on λ. So
compare numbers of rounds T by h, and values of λ by R.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flower_ext.checks import require_at_least_one
from flower_ext.errors import InvalidValue
from flower_ext.privacy.guarantee import Basis
from flower_ext.privacy.theorems.dp_ditto_theorem import check_global_weight
from flower_ext_planner.convergence import ConvergenceBound, DittoProblem, convergence_bound
from flower_ext_planner.fairness import LinearFairness


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The best number of rounds T*, the best weight λ* of the global model, and the bound h for λ*.

    T* is 0 if no number of rounds makes the bound smaller than at the start.
    """

    rounds: int
    global_weight: float
    bound: ConvergenceBound

    @property
    def value(self) -> float:
        """The bound h(T*, λ*)."""
        return float(self.bound.after(self.rounds))


def best_schedule(
    problem: DittoProblem,
    global_weight: float | LinearFairness,
    *,
    variance_per_round: float,
    max_rounds: int,
    basis: Basis = "provable",
) -> Schedule:
    """Return the schedule with the smallest bound h on the distance of personal models.

    Parameters
    ----------
    global_weight : float | LinearFairness
        If it is a number, λ is fixed, and only T* is searched. If it is a fairness problem, the
        fairest λ*(T) is computed for each T, and the best of these pairs is returned (Eqn 33).
    variance_per_round, basis
        See `convergence_bound`.
    max_rounds : int
        Largest T that is tried.

    Raises
    ------
    ValueError
        A parameter is out of range, or ``global_weight`` is a fairness problem whose number of
        clients or dimension differs from that of ``problem``.
    """

    def bound_at(weight: float) -> ConvergenceBound:
        return convergence_bound(
            problem, global_weight=weight, variance_per_round=variance_per_round, basis=basis
        )

    if not isinstance(global_weight, LinearFairness):
        bound = bound_at(global_weight)
        rounds = bound.best_rounds(max_rounds)
        return Schedule(rounds=rounds, global_weight=global_weight, bound=bound)
    fairness = global_weight
    for name in ("num_clients", "dimension"):
        expected, value = getattr(problem, name), getattr(fairness, name)
        if value != expected:
            raise InvalidValue(
                f"{name}={value!r} of the fairness problem: expected {expected!r}, as in the "
                "DittoProblem"
            )
    require_at_least_one("max_rounds", max_rounds)

    def fairest(rounds: int) -> Schedule:
        variance = variance_per_round * rounds
        weight = fairness.best_global_weight(upload_variance=variance, basis=basis)
        return Schedule(rounds=rounds, global_weight=weight, bound=bound_at(weight))

    # Try every T. The limit T′ of Section IV holds for one λ only, and here each T has its own λ.
    best = min(map(fairest, range(1, max_rounds + 1)), key=lambda schedule: schedule.value)
    return best if best.value < problem.initial_distance else replace(best, rounds=0)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a short run: the mean training loss, and its variation over clients (unfairness).

    Lower values of ``loss`` and ``unfairness`` are better.
    """

    loss: float
    unfairness: float


@dataclass(frozen=True, kw_only=True)
class EmpiricalSchedule:
    """The best ``rounds`` (T*) and ``global_weight`` (λ*) that short training runs have found.

    ``settled`` is true if a further step of the search would change neither T* nor λ*.
    ``settled`` is false if the search ran in a cycle of several pairs (T, λ). The result is then
    the pair of this cycle with the smallest loss. ``outcomes`` holds the outcome of every run, by
    (T, λ).
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
    """Find the T with the lowest loss, then the λ with the lowest unfairness, and repeat.

    The search ends when neither T nor λ changes, or when it comes back to an earlier pair (T, λ)
    (Section V-C).

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

    def measured(name: str, T: int, weight: float) -> float:
        if (T, weight) not in outcomes:
            outcomes[T, weight] = run(T, weight)
        value: float = getattr(outcomes[T, weight], name)
        return math.inf if math.isnan(value) else value

    # The search for T depends only on λ, and that for λ only on T. So a pair that comes back begins
    # a cycle.
    visited, pair = list[tuple[int, float]](), (0, weight)
    while pair not in visited:
        visited.append(pair)
        T = min(rounds, key=lambda candidate: measured("loss", candidate, weight))
        weight = min(global_weights, key=lambda candidate: measured("unfairness", T, candidate))
        pair = (T, weight)
    cycle = visited[visited.index(pair) :]
    best_T, best_weight = min(cycle, key=lambda pair: measured("loss", *pair))
    return EmpiricalSchedule(
        rounds=best_T, global_weight=best_weight, settled=len(cycle) == 1, outcomes=outcomes
    )
