"""Search for the number of rounds and the weight of the global model: DP-Ditto, Section V-B.

T is the number of rounds, and λ the weight of the global model. If there is a formula for the
unfairness R(λ), Eqn 33 applies. It takes for every T the fairest λ*(T) under the noise that T
rounds need, and then the T whose bound h(T, λ*(T)) is smallest. If there is no formula, use
`alternating_search`.

h bounds the distance to v_n*(λ), an optimum that depends on λ. So h tells how many rounds a λ
needs, and R tells which λ is best. `planned_schedules` searches the best T and λ for a privacy
budget, by the published and by the provable formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from flower_ext.checks import require_at_least_one
from flower_ext.errors import InvalidValue
from flower_ext.planning.convergence import (
    ConvergenceBound,
    DittoProblem,
    convergence_bound,
)
from flower_ext.planning.fairness import LinearFairness
from flower_ext.privacy import ClippedSteps, Condition, RecordLevelPlan
from flower_ext.privacy.guarantee import Basis
from flower_ext.privacy.theorems.dp_ditto_theorem import dp_ditto_guarantees


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
        """h(T*, λ*)."""
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


PlanOf = Callable[[int, Basis], RecordLevelPlan]
"""Takes a number of rounds and a basis; returns the plan that keeps the privacy budget."""


@dataclass(frozen=True, kw_only=True)
class PlannedSchedule:
    """A schedule, and a plan with enough noise to keep the privacy budget.

    Attributes
    ----------
    basis : {"published", "provable"}
        Whether the noise was calibrated by the paper's formulas or by provable ones.
    schedule : Schedule
        T* and λ*.
    plan : RecordLevelPlan or None
        The plan of T* rounds. With T* = 0 clients release nothing, so there is no plan.
    not_met : tuple[str, ...]
        Conditions of the theorem that do not hold.
    """

    basis: Basis
    schedule: Schedule
    plan: RecordLevelPlan | None
    not_met: tuple[str, ...]

    @property
    def noise_stddev(self) -> float:
        """σ_u, the standard deviation of the noise on each weight of an upload; 0 if T* is 0."""
        return 0.0 if self.plan is None else self.plan.upload_stddev

    @property
    def epsilons(self) -> dict[str, float]:
        """The plan's ε by up to three computations; empty without a plan.

        "as published" follows the paper. "worst case" holds for Algorithm 1, which clips models but
        no gradients. "gradients clipped" is present only if the plan's ``steps`` clip gradients.
        """
        plan = self.plan
        if plan is None:
            return {}
        uploads = replace(plan, noise_stddev=plan.upload_stddev, steps=None)
        published, provable = dp_ditto_guarantees(uploads, rounds=plan.rounds)
        epsilons = {"as published": published.epsilon, "worst case": provable.epsilon}
        if plan.steps is not None:
            loss = plan.steps.loss(plan.noise_stddev, delta=plan.delta, rounds=plan.rounds)
            epsilons["gradients clipped"] = loss.epsilon
        return epsilons


def planned_schedules(
    plan_of: PlanOf,
    problem: DittoProblem,
    global_weight: float | LinearFairness,
    *,
    max_rounds: int,
) -> list[PlannedSchedule]:
    """Return a list of one or two schedules.

    The schedule by the provable formulas is always there, as the last one. The schedule by the
    published formulas comes before it if ``problem`` has G₀ and M. ``global_weight`` is λ, or the
    fairness problem that determines λ.
    """
    bases: list[Basis] = ["provable"]
    if math.isfinite(problem.gradient_bound) and math.isfinite(problem.model_spread):
        bases.insert(0, "published")
    schedules = []
    for basis in bases:
        one_round = plan_of(1, basis)
        schedule = best_schedule(
            problem,
            global_weight,
            variance_per_round=one_round.upload_stddev**2,
            max_rounds=max_rounds,
            basis=basis,
        )
        conditions = [*schedule.bound.conditions, _one_full_step(one_round.steps)]
        if isinstance(global_weight, LinearFairness):
            norm = one_round.clipping_norm
            conditions.append(global_weight.uniqueness(clipping_norm=norm, basis=basis))
        schedules.append(
            PlannedSchedule(
                basis=basis,
                schedule=schedule,
                plan=plan_of(schedule.rounds, basis) if schedule.rounds else None,
                not_met=tuple(condition.text for condition in conditions if not condition.holds),
            )
        )
    return schedules


def _one_full_step(steps: ClippedSteps | None) -> Condition:
    """Return the condition of Theorem 1 that each round is a single step on all records.

    The condition also says whether it holds for ``steps``.
    """
    if steps is None:
        return Condition("one full-gradient step a round", True)
    batch = steps.batch_size or steps.num_examples
    return Condition(
        f"one full-gradient step a round (K = {steps.local_steps}, B = {batch} of "
        f"{steps.num_examples} records): the bound h assumes one such step, and the noise covers "
        "all steps",
        steps.local_steps == 1 and batch == steps.num_examples,
    )
