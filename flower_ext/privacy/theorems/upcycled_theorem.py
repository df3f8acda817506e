"""Record-level DP for clients that perturb their local models; the server sees every upload.

Source: Yin et al., Upcycled-FL (TMLR 2024), Section 6.

====================  =====================================================
paper                 here
====================  =====================================================
τ, σ                  ``OutputPerturbation``: ``clipping_norm``, ``noise_stddev``
α                     ``ObjectivePerturbation.rate``
u₁, u₂, μ             ``LocalObjective``: ``gradient_bound``, ``curvature_bound``,
                      ``proximal_weight``
``|D_i|``, M          ``num_examples``, ``participations`` (odd rounds that asked client i)
w̄                     model that the client received
ε̄                     mean ε over clients, reported beside the largest ε
====================  =====================================================

Theorem 6.2 assumes that one record moves a clipped model by at most τ/|D_i|. Nothing ensures that
in general: models trained on two neighbouring data sets may lie at opposite ends of the ball of
radius τ, 2τ apart. For the exact minimiser of a convex loss plus (μ/2)‖w − w̄‖² the distance is at
most 2u₁/(|D_i|μ). `clipped_model_sensitivity` returns the smaller of the bounds that hold. The
module returns guarantees in pairs: first the guarantee as published, then the provable one.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from flower_ext.checks import (
    Checked,
    NotNegative,
    Rule,
    is_number,
    require_at_least_one,
    require_count,
    require_delta,
)
from flower_ext.privacy.accounting.events import PrivacyLoss
from flower_ext.privacy.accounting.gaussian import EXACT_GAUSSIAN, gaussian_loss
from flower_ext.privacy.guarantee import Condition, Guarantee, PreconditionFailed
from flower_ext.privacy.mechanisms.protections import (
    ObjectivePerturbation,
    OutputPerturbation,
    Perturbation,
)
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems import assumptions
from flower_ext.privacy.theorems.claims import Claims
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit

_SOURCE = "Yin et al., Upcycled-FL, Theorem"
_ENDS = "training ends without an error, with finite numbers, whatever the records are"
NEGLIGIBLE_DISTANCE = 1e-8
"""Distance (L2) from the minimiser below which a guarantee assumes the model to be exact."""
_ROUNDINGS = 4
"""Safety factor of `clipped_model_sensitivity` for the rounding of a model to its precision.

A model is rounded once, before it is clipped in float64, and clipping does not enlarge the effect.
"""

Bound = Annotated[float, Rule("a number >= 0", lambda x: is_number(x) and x >= 0)]
"""A bound, which is infinite if none is known."""


@dataclass(frozen=True, kw_only=True)
class LocalObjective(Checked):
    """Known properties of a client's problem: minimise F_i(w) + (μ/2)‖w − w̄‖² over w.

    w̄ is the received model. F_i(w) is the mean over records d of a loss F̂(w; d). The defaults
    mean that nothing is known. Each bound must hold for every possible record and every w. The last
    four properties depend on the training, and a plan takes them from the run
    (`PerturbationPlan.objective_in`).

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
        divided by the model's norm or by the clipping norm, whichever is larger: 2⁻²⁴ in single
        precision, 2⁻¹¹ in half precision and 2⁻⁸ in bfloat16. It includes the rounding of subnormal
        numbers if this matters.
    memoryless : bool
        True if the problem depends only on the records and on messages to and from the client. It
        is False if a client keeps control variates or a personal model.
    """

    convex: bool = False
    generalised_linear: bool = False
    gradient_bound: Bound = math.inf
    curvature_bound: Bound = math.inf
    feature_norm_bound: Bound = math.inf
    proximal_weight: NotNegative = 0.0
    distance_to_minimiser: Bound = math.inf
    rounding: Bound = 2.0**-24
    memoryless: bool = False

    def stability(self, num_examples: int) -> float:
        """Return the largest L2 distance by which replacing one record moves the trained model.

        ``num_examples`` is |D_i|, u₁ is ``gradient_bound`` and μ is ``proximal_weight``. The exact
        minimiser moves by at most 2u₁/(|D_i|μ) (Chaudhuri, Monteleoni, Sarwate 2011, Lemma 7). The
        function adds twice ``distance_to_minimiser``, once for each of the two models. The result
        is infinite unless the problem is convex and memoryless, μ > 0, and u₁ and
        ``distance_to_minimiser`` are finite.
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
        """Return the least number of examples that meets `size_condition`.

        Raises
        ------
        PreconditionFailed
            Another condition of the theorem fails.
        """
        _refuse_unless(self.theorem_6_3_conditions())
        least = max(1, math.floor(2 * self.curvature_bound / self.proximal_weight))
        while not self.size_condition(least).holds:  # the division may have rounded down
            least += 1
        return least

    def size_condition(self, num_examples: int) -> Condition:
        """Return the condition u₂ ≤ 0.5 |D_i| μ of Theorem 6.3 on the smallest client."""
        bound = 0.5 * num_examples * self.proximal_weight
        return Condition(
            f"u₂ ≤ 0.5 |D_i| μ ({self.curvature_bound:.4g} against {bound:.4g} for the smallest "
            "client)",
            num_examples > 0 and self.curvature_bound <= bound,
        )

    def solution_conditions(self) -> list[Condition]:
        """Return the two conditions on training: it finds the minimiser, and keeps no state."""
        distance = self.distance_to_minimiser
        return [
            Condition(
                f"local models are exact minimisers (distance at most {distance:.4g})"
                if math.isfinite(distance)
                else "local models are exact minimisers (training by SGD gives no bound)",
                distance <= NEGLIGIBLE_DISTANCE,
            ),
            Condition("clients keep no state that depends on their records", self.memoryless),
        ]


def _refuse_unless(conditions: Sequence[Condition]) -> None:
    failed = [condition.text for condition in conditions if not condition.holds]
    if failed:
        raise PreconditionFailed(
            "Theorem 6.3 (objective perturbation) does not apply; these conditions must hold: "
            + "; ".join(failed)
        )


def upcycled_theorem_6_2(
    perturbation: OutputPerturbation, *, num_examples: int, participations: int, delta: float
) -> float:
    """Return ε of output perturbation as published: 2√(a ln(1/δ)) + a with a = Mτ²/(2σ²|D_i|²)."""
    require_delta(delta)
    require_at_least_one("num_examples", num_examples)
    require_count("participations", participations)
    ratio = perturbation.clipping_norm / (perturbation.noise_stddev * num_examples)
    a = participations * ratio**2 / 2
    return 2 * math.sqrt(a * math.log(1 / delta)) + a


def upcycled_theorem_6_3(
    perturbation: ObjectivePerturbation,
    objective: LocalObjective,
    *,
    num_examples: int,
    participations: int,
) -> float:
    """Return ε (at δ = 0) of objective perturbation: M (2αu₁μ + 2.8u₂) / (|D_i|μ).

    Raises
    ------
    PreconditionFailed
        The message names every precondition that fails.
    """
    require_count("participations", participations)
    _refuse_unless([*objective.theorem_6_3_conditions(), objective.size_condition(num_examples)])
    u1, u2, mu = objective.gradient_bound, objective.curvature_bound, objective.proximal_weight
    epsilon = (2 * perturbation.rate * u1 * mu + 2.8 * u2) / (num_examples * mu)
    return participations * epsilon


def clipped_model_sensitivity(
    perturbation: OutputPerturbation, objective: LocalObjective, num_examples: int | None
) -> float:
    """Return the largest L2 distance by which one record moves the clipped model, before noise.

    Two bounds hold, and the function returns the smaller one. The first is 2τ, the diameter of the
    ball of radius τ to which models are clipped. The second is `LocalObjective.stability` plus the
    rounding of both models, which counts `_ROUNDINGS` times for safety. Clipping keeps the second
    bound, because it moves no two models further apart.
    """
    stable = math.inf if num_examples is None else objective.stability(num_examples)
    norm = perturbation.clipping_norm
    return min(2 * norm, stable + 2 * _ROUNDINGS * objective.rounding * norm)


def epsilons_by_client(
    perturbation: Perturbation, objective: LocalObjective, run: RunSummary, *, delta: float
) -> dict[int, tuple[float, float]]:
    """Return the published ε and the provable ε of each client that the server asked.

    An ε is infinite if no such guarantee holds for the client. A client that never reported its
    number of examples is included, and counts as if it had uploaded.
    """
    require_delta(delta)
    solved = all(condition.holds for condition in objective.solution_conditions())

    def of_client(size: int | None, uploads: int) -> tuple[float, float]:
        published = math.inf
        if isinstance(perturbation, ObjectivePerturbation):
            with suppress(PreconditionFailed):
                published = upcycled_theorem_6_3(
                    perturbation, objective, num_examples=size or 0, participations=uploads
                )
            return published, published if solved else math.inf
        if size is not None:
            published = upcycled_theorem_6_2(
                perturbation, num_examples=size, participations=uploads, delta=delta
            )
        moved = clipped_model_sensitivity(perturbation, objective, size)
        if moved == 0:  # no record can move the model, so it does not depend on the data
            return published, 0.0
        multiplier = perturbation.noise_stddev / moved
        return published, gaussian_loss(multiplier, releases=uploads, delta=delta).epsilon

    return {
        client: of_client(run.num_examples.get(client), uploads)
        for client, uploads in run.participations.uploads.items()
    }


def perturbation_guarantees(
    perturbation: Perturbation, objective: LocalObjective, run: RunSummary, *, delta: float
) -> list[Guarantee]:
    """Return the published and the provable guarantee of a perturbation, for one record.

    Each ε is the largest of all clients; the text in ``source`` also gives the smallest and the
    mean.
    """
    by_client = epsilons_by_client(perturbation, objective, run, delta=delta)
    published, provable = zip(*by_client.values(), strict=True) if by_client else ((), ())
    if isinstance(perturbation, OutputPerturbation):
        return _output_guarantees(perturbation, objective, run, delta, published, provable)
    return _objective_guarantees(objective, run, published, provable)


def _output_guarantees(
    perturbation: OutputPerturbation,
    objective: LocalObjective,
    run: RunSummary,
    delta: float,
    published: Sequence[float],
    provable: Sequence[float],
) -> list[Guarantee]:
    """Return the guarantees of output perturbation, given the ε of all clients on either basis."""
    tau = perturbation.clipping_norm
    sizes = [run.num_examples.get(client) for client in run.participations.uploads]
    moves = [clipped_model_sensitivity(perturbation, objective, size) for size in sizes]
    sensitivity = f"sensitivity 2τ = {2 * tau:.4g}"
    if (largest := max(moves, default=2 * tau)) < 2 * tau:
        sensitivity = f"sensitivity 2u₁/(|D_i|μ), at most {largest:.4g}"
    condition = Condition(
        f"one record moves a clipped local model by at most τ/|D_i| (what holds is {sensitivity})",
        all(size is not None and m <= tau / size for size, m in zip(sizes, moves, strict=True)),
    )
    # A client whose training fails sends the received model, far from the minimiser of its
    # neighbour. Only the diameter of the ball, 2τ, bounds that distance.
    ends = (_ENDS,) if min(moves, default=math.inf) < 2 * tau else ()
    claims = _claims(run, delta, *ends, arithmetic=assumptions.ON_A_GRID)
    return [
        claims.published(
            AdversaryView.EACH_UPLOAD,
            max(published, default=0.0),
            accountant="closed form (moments accountant)",
            source=f"{_SOURCE} 6.2; {_spread(published)}",
            conditions=(condition,),
            not_covered=tuple(run.not_covered),
        ),
        claims.provable(
            AdversaryView.EACH_UPLOAD,
            PrivacyLoss(epsilon=max(provable, default=0.0), delta=delta, accountant=EXACT_GAUSSIAN),
            f"{sensitivity}; {_spread(provable)}",
        ),
    ]


def _objective_guarantees(
    objective: LocalObjective,
    run: RunSummary,
    published: Sequence[float],
    provable: Sequence[float],
) -> list[Guarantee]:
    """Return the guarantees of objective perturbation, at δ = 0, as `_output_guarantees` does."""
    # One guarantee for all clients: it must hold for the client with the fewest records.
    sizes = (run.num_examples.get(client, 0) for client in run.participations.uploads)
    conditions = (
        *objective.theorem_6_3_conditions(),
        objective.size_condition(min(sizes, default=0)),
        *objective.solution_conditions(),
    )
    claims = _claims(
        run,
        0.0,
        _ENDS,  # training adds the noise, so a client must not send a model whose training failed
        arithmetic=f"a model within {NEGLIGIBLE_DISTANCE:g} of the minimiser acts like the exact "
        "one, and floats like real numbers (not proven against attacks on low-order bits)",
    )
    return [
        claims.published(
            AdversaryView.EACH_UPLOAD,
            max(published, default=0.0),
            accountant="closed form (pure DP)",
            source=f"{_SOURCE} 6.3; {_spread(published)}",
            conditions=conditions,
            not_covered=tuple(run.not_covered),
        ),
        claims.provable(
            AdversaryView.EACH_UPLOAD,
            PrivacyLoss(
                epsilon=max(provable, default=0.0),
                delta=0.0,
                accountant="sum over releases (pure DP)",
            ),
            f"{_SOURCE} 6.3; {_spread(provable)}",
            conditions=conditions,
        ),
    ]


def _claims(run: RunSummary, delta: float, *of_training: str, arithmetic: str) -> Claims:
    return Claims(
        unit=PrivacyUnit.RECORD,
        relation=NeighboringRelation.REPLACE_ONE,
        delta=delta,
        assumptions=(
            assumptions.AS_INSTRUCTED,
            *of_training,
            assumptions.PUBLIC_SIZES,
            "bounds on the loss hold for every possible record",
            assumptions.LOADS,
            assumptions.OUTLIVES,
            arithmetic,
            assumptions.of_noise(run.secure_noise),
        ),
        not_covered=run.not_covered,
    )


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "no client was asked"
    mean = sum(values) / len(values)
    return f"{len(values)} clients: min {min(values):.4g}, mean {mean:.4g}, max {max(values):.4g}"
