"""Search for the number of rounds and the weight of the global model: DP-Ditto, Section V-B.

If the unfairness R(λ) is known, Eqn 33 applies: find for every T the fairest λ*(T) under the noise
that T rounds need, then the T whose bound h(T, λ*(T)) is smallest. If R is not known, use
`alternating_search`.

h bounds the distance to v_n*(λ), an optimum that moves with λ. So h tells how many rounds a λ
needs, and R tells which λ is best. `planned_schedules` does this for a privacy budget, by the
published and by the provable formulas.
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
    """(T*, λ*) and the bound h(·, λ*); T* is 0 if no number of rounds improves on the start."""

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
        With a number, λ is fixed and only T* is searched. With a fairness problem, each T gets its
        fairest λ*(T), and T* is searched among these pairs (Eqn 33 of the paper).
    variance_per_round, basis
        As for `convergence_bound`.
    max_rounds : int
        Largest T that is tried.

    Raises
    ------
    ValueError
        A parameter is out of range, or ``global_weight`` is a fairness problem with another number
        of clients or a different dimension from ``problem``.
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
            raise InvalidValue(f"{name}={value!r} of the fairness problem: expected {expected!r}")
    require_at_least_one("max_rounds", max_rounds)

    def fairest(rounds: int) -> Schedule:
        variance = variance_per_round * rounds
        weight = fairness.best_global_weight(upload_variance=variance, basis=basis)
        return Schedule(rounds=rounds, global_weight=weight, bound=bound_at(weight))

    # Try every T. The limit T′ of Section IV holds for one λ only, and here each T has its own λ.
    best = min(map(fairest, range(1, max_rounds + 1)), key=lambda schedule: schedule.value)
    return best if best.value < problem.initial_distance else replace(best, rounds=0)


PlanOf = Callable[[int, Basis], RecordLevelPlan]
"""Function of a number of rounds and a basis: it returns the plan that keeps the budget."""


@dataclass(frozen=True, kw_only=True)
class PlannedSchedule:
    """A schedule, and the plan whose noise keeps the budget according to one basis.

    Attributes
    ----------
    basis : {"published", "provable"}
        The basis by which the noise was calibrated.
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
        """σ_u of the noise on each weight of an upload; 0 if T* is 0."""
        return 0.0 if self.plan is None else self.plan.upload_stddev

    @property
    def epsilons(self) -> dict[str, float]:
        """ε of the plan: as published, at worst, and with clipped gradients if ``steps`` clip them.

        The worst case is Algorithm 1, which clips models but no gradients.
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
    """Return a published schedule (only if G₀ and M are known), then a provable one.

    ``global_weight`` is λ, or the fairness problem that determines λ.
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
    """Return the condition of Theorem 1 that a round is one step on all records."""
    if steps is None:
        return Condition("one full-gradient step a round", True)
    batch = steps.batch_size or steps.num_examples
    return Condition(
        f"one full-gradient step a round (K = {steps.local_steps}, B = {batch} of "
        f"{steps.num_examples} records): the bound h assumes one such step, the noise covers all",
        steps.local_steps == 1 and batch == steps.num_examples,
    )
