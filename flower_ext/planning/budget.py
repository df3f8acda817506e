"""Schedules for a privacy budget: rounds T*, weight λ* and noise, as published and provable."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from flower_ext.planning.convergence import DittoProblem
from flower_ext.planning.fairness import LinearFairness
from flower_ext.planning.search import Schedule, best_schedule
from flower_ext.privacy import ClippedSteps, Condition, RecordLevelPlan
from flower_ext.privacy.guarantee import Basis
from flower_ext.privacy.theorems.dp_ditto_theorem import dp_ditto_guarantees

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
