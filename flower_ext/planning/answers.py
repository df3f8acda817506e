"""(T*, λ*) for a privacy budget, as published and provable, for ``flower-ext ditto-schedule``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.planning.convergence import DittoProblem
from flower_ext.planning.fairness import LinearFairness
from flower_ext.planning.search import Schedule, best_rounds, joint_search
from flower_ext.privacy import ClippedSteps, Condition, OutputPerturbation
from flower_ext.privacy.guarantee import Basis
from flower_ext.privacy.theorems.clipped_steps import (
    clipped_steps_epsilon,
    clipped_steps_noise_stddev,
    composed_noise_stddev,
)
from flower_ext.privacy.theorems.dp_ditto import dp_ditto_guarantees, dp_ditto_noise_stddev


@dataclass(frozen=True, kw_only=True)
class PrivacyBudget:
    """(ε, δ) for one record of a client, and the bounds on that record's influence."""

    epsilon: float
    delta: float
    num_clients: int
    num_examples: int
    clipping_norm: float
    steps: ClippedSteps | None = None

    def noise_stddev(self, rounds: int, basis: Basis) -> float:
        """Return the σ_u of each upload's noise with which ``rounds`` rounds keep the budget."""
        if basis == "published":
            return dp_ditto_noise_stddev(
                epsilon=self.epsilon,
                delta=self.delta,
                rounds=rounds,
                num_clients=self.num_clients,
                num_examples=self.num_examples,
                clipping_norm=self.clipping_norm,
            )
        target: dict[str, Any] = {"epsilon": self.epsilon, "delta": self.delta}
        ball = composed_noise_stddev(sensitivity=2 * self.clipping_norm, releases=rounds, **target)
        if self.steps is None:
            return ball
        step = clipped_steps_noise_stddev(self.steps, rounds=rounds, **target)
        return min(ball, self.steps.upload_stddev(step))

    def epsilons(self, noise_stddev: float, rounds: int) -> dict[str, float]:
        """Return ε of uploads with σ_u: as published, at worst, and with clipped gradients.

        The worst case is Algorithm 1, which clips models but no gradients.
        """
        published, provable = dp_ditto_guarantees(
            OutputPerturbation(clipping_norm=self.clipping_norm, noise_stddev=noise_stddev),
            num_clients=self.num_clients,
            num_examples=self.num_examples,
            rounds=rounds,
            delta=self.delta,
        )
        found = {"as published": published.epsilon, "worst case": provable.epsilon}
        if self.steps is not None:
            step = noise_stddev / self.steps.upload_stddev(1.0)
            found["gradients clipped"] = clipped_steps_epsilon(
                self.steps, noise_stddev=step, rounds=rounds, delta=self.delta
            )
        return found

    @property
    def provable_source(self) -> str:
        """The bound that the provable noise rests on, in words."""
        ball = self.noise_stddev(1, "provable")
        alone = PrivacyBudget(**{**vars(self), "steps": None}).noise_stddev(1, "provable")
        if self.steps is None or ball >= alone:
            return f"sensitivity 2C = {2 * self.clipping_norm:g} of a clipped model"
        return (
            f"records' gradients clipped to {self.steps.gradient_clipping_norm:g}, sensitivity "
            f"{self.steps.sensitivity:.4g} of a local step"
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The planner's answer by one basis: the published theorem, or the provable bound.

    Attributes
    ----------
    basis : {"published", "provable"}
        The basis by which the noise was calibrated.
    schedule : Schedule
        T* and λ*. With T* = 0 clients release nothing, so there is neither noise nor ε.
    noise_stddev : float
        σ_u of the noise on an upload.
    epsilons : dict[str, float]
        ε of this noise, by the name of each way to account for it.
    not_met : tuple[str, ...]
        Conditions of the theorem that do not hold.
    """

    basis: Basis
    schedule: Schedule
    noise_stddev: float
    epsilons: dict[str, float]
    not_met: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {
            "basis": self.basis,
            "rounds": self.schedule.rounds,
            "global_weight": self.schedule.global_weight,
            "bound": finite_or_none(float(self.schedule.bound.after(self.schedule.rounds))),
            "noise_stddev": self.noise_stddev,
            "epsilon": dict(self.epsilons),
            "conditions_not_met": list(self.not_met),
        }


def finite_or_none(bound: float) -> float | None:
    """Return None for infinity, which JSON cannot represent."""
    return bound if math.isfinite(bound) else None


def answers(
    budget: PrivacyBudget,
    problem: DittoProblem,
    *,
    max_rounds: int,
    global_weight: float | None = None,
    fairness: LinearFairness | None = None,
) -> list[Answer]:
    """Return one answer for each basis, without the published one if G₀ or M is unknown.

    Raises
    ------
    ValueError
        A parameter is out of range, or not exactly one of λ and the fairness problem is given.
    """
    if (global_weight is None) == (fairness is None):
        raise InvalidValue(
            "global_weight (λ) and fairness: expected one of them, because the fairness problem "
            "determines λ"
        )
    bases: list[Basis] = ["provable"]
    if math.isfinite(problem.gradient_bound) and math.isfinite(problem.model_spread):
        bases.insert(0, "published")
    found = []
    for basis in bases:
        facts: dict[str, Any] = {
            "variance_per_round": budget.noise_stddev(1, basis) ** 2,
            "max_rounds": max_rounds,
            "basis": basis,
        }
        if fairness is None:
            assert global_weight is not None
            schedule = best_rounds(problem, global_weight=global_weight, **facts)
        else:
            schedule = joint_search(problem, fairness, **facts)
        conditions = [*schedule.bound.conditions, _one_full_step(budget.steps)]
        if fairness is not None:
            conditions.append(fairness.uniqueness(clipping_norm=budget.clipping_norm, basis=basis))
        stddev = budget.noise_stddev(schedule.rounds, basis) if schedule.rounds else 0.0
        found.append(
            Answer(
                basis=basis,
                schedule=schedule,
                noise_stddev=stddev,
                epsilons=budget.epsilons(stddev, schedule.rounds) if schedule.rounds else {},
                not_met=tuple(one.text for one in conditions if not one.holds),
            )
        )
    return found


def _one_full_step(steps: ClippedSteps | None) -> Condition:
    """Return the condition of Theorem 1 on a round."""
    if steps is None:
        return Condition("one full-gradient step a round", True)
    batch = steps.batch_size or steps.num_examples
    return Condition(
        f"one full-gradient step a round (K = {steps.local_steps}, B = {batch} of "
        f"{steps.num_examples} records): h assumes one such step, the noise covers all steps",
        steps.local_steps == 1 and batch == steps.num_examples,
    )
