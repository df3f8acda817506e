"""Schedules (T*, λ*) for a privacy budget, with their noise: as published, and provable."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flower_ext.planning.convergence import DittoProblem
from flower_ext.planning.fairness import LinearFairness
from flower_ext.planning.search import Schedule, best_schedule
from flower_ext.privacy import ClippedSteps, Condition, OutputPerturbation
from flower_ext.privacy.guarantee import Basis
from flower_ext.privacy.theorems.clipped_steps import composed_noise_stddev
from flower_ext.privacy.theorems.dp_ditto_theorem import dp_ditto_guarantees, dp_ditto_noise_stddev


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
        return min(self._provable_stddevs(rounds).values())

    def _provable_stddevs(self, rounds: int) -> dict[str, float]:
        """Return σ_u by each bound on a record's influence; both hold, so the smaller suffices."""
        target: dict[str, Any] = {"epsilon": self.epsilon, "delta": self.delta}
        reach, steps = 2 * self.clipping_norm, self.steps
        stddevs = {
            f"sensitivity 2C = {reach:g} of a clipped model": composed_noise_stddev(
                sensitivity=reach, releases=rounds, **target
            )
        }
        if steps is not None:
            source = (
                f"records' gradients clipped to {steps.gradient_clipping_norm:g}, sensitivity "
                f"{steps.sensitivity:.4g} of a local step"
            )
            stddevs[source] = steps.upload_stddev(steps.noise_stddev(rounds=rounds, **target))
        return stddevs

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
        epsilons = {"as published": published.epsilon, "worst case": provable.epsilon}
        if self.steps is not None:
            of_steps = noise_stddev / self.steps.upload_stddev(1.0)
            loss = self.steps.loss(of_steps, delta=self.delta, rounds=rounds)
            epsilons["gradients clipped"] = loss.epsilon
        return epsilons

    @property
    def provable_source(self) -> str:
        """The bound that the provable noise rests on, in words."""
        stddevs = self._provable_stddevs(1)
        return min(stddevs, key=lambda source: stddevs[source])


@dataclass(frozen=True, kw_only=True)
class CalibratedSchedule:
    """A schedule with the noise that keeps the budget, by one basis.

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
            "bound": self.schedule.value if math.isfinite(self.schedule.value) else None,
            "noise_stddev": self.noise_stddev,
            "epsilon": dict(self.epsilons),
            "conditions_not_met": list(self.not_met),
        }


def calibrated_schedules(
    budget: PrivacyBudget,
    problem: DittoProblem,
    global_weight: float | LinearFairness,
    *,
    max_rounds: int,
) -> list[CalibratedSchedule]:
    """Return one schedule for each basis, without the published one if G₀ or M is unknown.

    ``global_weight`` is λ, or the fairness problem that determines it.
    """
    bases: list[Basis] = ["provable"]
    if math.isfinite(problem.gradient_bound) and math.isfinite(problem.model_spread):
        bases.insert(0, "published")
    schedules = []
    for basis in bases:
        schedule = best_schedule(
            problem,
            global_weight,
            variance_per_round=budget.noise_stddev(1, basis) ** 2,
            max_rounds=max_rounds,
            basis=basis,
        )
        conditions = [*schedule.bound.conditions, _one_full_step(budget.steps)]
        if isinstance(global_weight, LinearFairness):
            norm = budget.clipping_norm
            conditions.append(global_weight.uniqueness(clipping_norm=norm, basis=basis))
        rounds = schedule.rounds
        stddev = budget.noise_stddev(rounds, basis) if rounds else 0.0
        schedules.append(
            CalibratedSchedule(
                basis=basis,
                schedule=schedule,
                noise_stddev=stddev,
                epsilons=budget.epsilons(stddev, rounds) if rounds else {},
                not_met=tuple(condition.text for condition in conditions if not condition.holds),
            )
        )
    return schedules


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
