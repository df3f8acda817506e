"""The properties of a client's training problem that Section 6 of Upcycled-FL needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flower_ext.checks import is_number
from flower_ext.errors import InvalidValue
from flower_ext.privacy.guarantee import Condition, PreconditionFailed

NEGLIGIBLE_DISTANCE = 1e-8
"""Distance (L2) below which a minimiser counts as exact, since floating point allows no better."""


@dataclass(frozen=True, kw_only=True)
class LocalObjective:
    """Known properties of a client's problem: minimise F_i(w) + (μ/2)‖w − w̄‖² over w.

    F_i(w) is the mean over records d of a loss F̂(w; d). The defaults mean that nothing is known.
    Each bound must hold for every possible record and every w. The last four properties depend on
    the training, and a plan takes them from the run (`PerturbationPlan.objective_in`).

    Parameters
    ----------
    convex : bool
        True if F̂ is convex in w.
    generalised_linear : bool
        True if F̂ is twice continuously differentiable and depends on w only through ⟨w, x⟩, where
        x are the features. Logistic regression with two classes qualifies; softmax regression does
        not.
    gradient_bound : float
        u₁: bound on the gradient's norm ‖∇F̂‖₂.
    curvature_bound : float
        u₂: bound on |F̂''|, the second derivative with respect to ⟨w, x⟩.
    feature_norm_bound : float
        Bound on ‖x‖₂. If there is a bias, x includes its constant feature.
    proximal_weight : float
        Weight μ of the proximal term.
    distance_to_minimiser : float
        Largest L2 distance of the trained model from the exact minimiser.
    rounding : float
        Largest L2 distance by which rounding to the model's precision moves a trained model,
        divided by the model's norm or by the clipping norm, whichever is smaller: 2⁻²⁴ in single
        precision, 2⁻¹¹ in half precision and 2⁻⁸ in bfloat16. It includes the rounding of subnormal
        numbers if this matters.
    memoryless : bool
        True if the problem depends only on the records and on messages to and from the client. It
        is False if a client keeps control variates or a personal model.
    """

    convex: bool = False
    generalised_linear: bool = False
    gradient_bound: float = math.inf
    curvature_bound: float = math.inf
    feature_norm_bound: float = math.inf
    proximal_weight: float = 0.0
    distance_to_minimiser: float = math.inf
    rounding: float = 2.0**-24
    memoryless: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_truth = name in ("convex", "generalised_linear", "memoryless")
            if not is_truth and not (is_number(value) and value >= 0):
                raise InvalidValue(f"{name}={value!r}: expected a number >= 0")
        if math.isinf(self.proximal_weight):
            raise InvalidValue("proximal_weight=inf: expected a finite number >= 0")

    def stability(self, num_examples: int) -> float:
        """Return the largest L2 distance by which replacing one record moves the trained model.

        ``num_examples`` is |D_i|. The exact minimiser moves by at most 2u₁/(|D_i|μ) (Chaudhuri,
        Monteleoni, Sarwate 2011, Lemma 7). The function adds twice ``distance_to_minimiser``, once
        for each of the two models. The result is infinite unless the problem is convex and
        memoryless, μ > 0, and u₁ and ``distance_to_minimiser`` are finite.
        """
        if not (self.convex and self.memoryless and self.proximal_weight > 0):
            return math.inf
        exact = 2 * self.gradient_bound / (num_examples * self.proximal_weight)
        return exact + 2 * self.distance_to_minimiser

    def theorem_6_3_conditions(self) -> list[Condition]:
        """Return the conditions of Theorem 6.3 on the loss, which are the same for every client."""
        u1, u2, norm = self.gradient_bound, self.curvature_bound, self.feature_norm_bound
        return [
            Condition("the loss is a generalised linear model", self.generalised_linear),
            Condition("the loss is convex", self.convex),
            Condition(f"gradients of a record are bounded (u₁ = {u1:.4g})", math.isfinite(u1)),
            Condition(f"curvature is bounded (u₂ = {u2:.4g})", math.isfinite(u2)),
            Condition(f"features have norm at most 1 (at most {norm:.4g})", norm <= 1),
            Condition(
                f"the proximal weight is above 0 (μ = {self.proximal_weight:.4g})",
                self.proximal_weight > 0,
            ),
        ]

    def least_examples(self) -> int:
        """Return the least number of examples with u₂ ≤ 0.5 |D_i| μ (Theorem 6.3).

        Raises
        ------
        PreconditionFailed
            Another condition of the theorem fails.
        """
        refuse_unless(self.theorem_6_3_conditions())
        least = max(1, math.floor(2 * self.curvature_bound / self.proximal_weight))
        while not large_enough(self, least).holds:  # the division may have rounded down
            least += 1
        return least

    def solution_conditions(self) -> list[Condition]:
        """Return the two conditions on training: it finds the minimiser, and keeps no state."""
        distance = self.distance_to_minimiser
        return [
            Condition(
                f"local models are exact minimisers (distance at most {distance:.4g})"
                if math.isfinite(distance)
                else "local models are exact minimisers (training by SGD bounds no distance)",
                distance <= NEGLIGIBLE_DISTANCE,
            ),
            Condition("clients keep no state that depends on their records", self.memoryless),
        ]


def large_enough(objective: LocalObjective, num_examples: int) -> Condition:
    """Return the condition u₂ ≤ 0.5 |D_i| μ of Theorem 6.3, where |D_i| is ``num_examples``."""
    bound = 0.5 * num_examples * objective.proximal_weight
    return Condition(
        f"u₂ ≤ 0.5 |D_i| μ ({objective.curvature_bound:.4g} against {bound:.4g} of the smallest "
        "client)",
        num_examples > 0 and objective.curvature_bound <= bound,
    )


def refuse_unless(conditions: Sequence[Condition]) -> None:
    """Refuse to apply Theorem 6.3 if a condition fails.

    Raises
    ------
    PreconditionFailed
        The message names each condition that fails.
    """
    failed = [condition.text for condition in conditions if not condition.holds]
    if failed:
        raise PreconditionFailed(
            "Theorem 6.3 (objective perturbation) does not apply; these conditions must hold: "
            + "; ".join(failed)
        )
