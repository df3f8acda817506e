"""Perturbing a client's whole local model: record-level DP before a server that sees every upload.

Source: Yin et al., Upcycled-FL (TMLR 2024), Section 6.

====================  =====================================================
paper                 here
====================  =====================================================
τ, σ                  ``OutputPerturbation``: ``clipping_norm``, ``noise_stddev``
α                     ``ObjectivePerturbation.rate``
u₁, u₂, μ             ``LocalObjective``: ``gradient_bound``, ``curvature_bound``,
                      ``proximal_weight``
|D_i|, M              ``num_examples``, ``participations`` (odd rounds that asked client i)
ε̄                     the mean over clients, next to the largest
====================  =====================================================

Theorem 6.2 takes τ/|D_i| for the distance that one record can move a clipped model. Nothing bounds
it like that in general: training may send two neighbouring data sets to opposite ends of the ball,
2τ apart. What does hold for the exact minimiser of a convex loss plus (μ/2)‖w − w̄‖² is
2u₁/(|D_i|μ). `sensitivity` is the smaller of the two that apply; every guarantee here comes as a
pair, as published and provable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flower_ext.privacy.accounting import EXACT_GAUSSIAN, gaussian_loss
from flower_ext.privacy.bounds import Update, check_arrays, clip, in_float64, in_precision_of
from flower_ext.privacy.guarantee import (
    LOADS,
    ON_A_GRID,
    Basis,
    Condition,
    Guarantee,
    noise_assumption,
)
from flower_ext.privacy.noise import NoiseSource
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit

NEGLIGIBLE_DISTANCE = 1e-8
"""A minimiser found to within this (L2) passes for exact, as floating point allows no better."""


class PreconditionFailed(ValueError):
    """A theorem says nothing about this setting; the message lists what would have to change."""


# Mechanisms -------------------------------------------------------------------------------------


_IN_FLOATS = "arithmetic and noise in floating point (not proof against attacks on low-order bits)"
_ROUNDINGS = 4
"""How many times what rounding to a model's precision does to it, in clipping norms, is counted. It
happens once, before the model is clipped in float64, which takes what it did no further."""


@dataclass(frozen=True, kw_only=True)
class OutputPerturbation:
    """Clip the whole local model to norm τ, add N(0, σ² I).

    Parameters
    ----------
    clipping_norm : float
        τ > 0, the L2 norm over all arrays together.
    noise_stddev : float
        σ > 0: a standard deviation, in the unit of the weights.
    """

    clipping_norm: float
    noise_stddev: float

    def __post_init__(self) -> None:
        _require("clipping_norm", self.clipping_norm)
        _require("noise_stddev", self.noise_stddev)

    def __str__(self) -> str:
        return (
            f"output perturbation: clipping norm {self.clipping_norm:g}, "
            f"noise stddev {self.noise_stddev:g}"
        )

    def apply(self, model: Update, noise: NoiseSource) -> dict[str, Any]:
        """The model as it may leave the client.

        It is clipped and noised in float64, whatever its precision, and rounded to that afterwards.

        Raises
        ------
        NonFiniteUpdate, TypeError, ValueError
            As `clip`; or what is released is too large for the model's precision.
        """
        check_arrays(model)
        bounded = clip(in_float64(model), self.clipping_norm).value
        noised = noise.add_gaussian(bounded, self.noise_stddev)
        return in_precision_of(model, noised)


@dataclass(frozen=True, kw_only=True)
class ObjectivePerturbation:
    """Add ⟨n, w⟩ to the local objective, with n of density ∝ exp(−α‖n‖₂).

    Parameters
    ----------
    rate : float
        α > 0. The norm of n is Gamma distributed with mean d/α for d parameters.
    """

    rate: float

    def __post_init__(self) -> None:
        _require("rate", self.rate)

    def __str__(self) -> str:
        return f"objective perturbation: rate {self.rate:g}"

    def direction(self, like: Update, noise: NoiseSource) -> dict[str, np.ndarray]:
        """n as float64 arrays of the names and shapes of ``like``."""
        check_arrays(like)
        sizes = [math.prod(array.shape) for array in like.values()]
        parts = np.split(noise.gamma_direction(sum(sizes), 1 / self.rate), np.cumsum(sizes)[:-1])
        return {
            name: part.reshape(tuple(array.shape))
            for (name, array), part in zip(like.items(), parts, strict=True)
        }


Perturbation = OutputPerturbation | ObjectivePerturbation
"""What a client does to its model before it leaves."""


# What is known of the local problem -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LocalObjective:
    """What is known of a client's problem: minimise F_i(w) + (μ/2)‖w − w̄‖² over w.

    F_i is the mean over records of a loss F̂(w; d). The defaults say that nothing is known.
    Bounds hold for every record that could be there, and for every w. The last four are facts of
    the training, which a strategy fills in itself.

    Parameters
    ----------
    convex : bool
        F̂ is convex in w.
    generalised_linear : bool
        F̂ depends on w through ⟨w, x⟩ alone, x being the features, and is twice continuously
        differentiable. Logistic regression of two classes is; softmax regression is not.
    gradient_bound : float
        u₁ ≥ ‖∇F̂‖₂.
    curvature_bound : float
        u₂ ≥ |F̂''|, the second derivative in ⟨w, x⟩.
    feature_norm_bound : float
        ‖x‖₂, a constant feature for the bias included.
    proximal_weight : float
        μ.
    distance_to_minimiser : float
        How far the trained model can be from the exact minimiser (L2); 0 for an exact one.
    rounding : float
        How far rounding to its own precision moves a trained model (L2), over its norm or the
        clipping norm, whichever is less: 2⁻²⁴ in single precision, 2⁻¹¹ in half precision and 2⁻⁸
        in bfloat16 (and what numbers below the smallest normal one lose, where that matters).
    memoryless : bool
        Beyond the records, the problem depends on what was sent to and from the client alone;
        control variates and personal models that a client keeps break this.
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
        for name in (
            "gradient_bound",
            "curvature_bound",
            "feature_norm_bound",
            "proximal_weight",
            "distance_to_minimiser",
            "rounding",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number >= 0")
        if math.isinf(self.proximal_weight):
            raise ValueError("proximal_weight=inf: expected a finite number >= 0")

    def stability(self, num_examples: int) -> float:
        """How far replacing one of |D_i| records moves the trained model (L2); infinite if unknown.

        2u₁/(|D_i|μ) for the exact minimiser (Chaudhuri, Monteleoni, Sarwate 2011, Lemma 7), and
        twice the distance to it.
        """
        if not (self.convex and self.memoryless and self.proximal_weight > 0):
            return math.inf
        exact = 2 * self.gradient_bound / (num_examples * self.proximal_weight)
        return exact + 2 * self.distance_to_minimiser

    def theorem_6_3_conditions(self) -> list[Condition]:
        """What Theorem 6.3 asks of the loss, whatever the client."""
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
        """The fewest examples with which u₂ ≤ 0.5 |D_i| μ (Theorem 6.3).

        Raises
        ------
        PreconditionFailed
            Another condition of the theorem fails already.
        """
        _refuse_unless(self.theorem_6_3_conditions())
        least = max(1, math.floor(2 * self.curvature_bound / self.proximal_weight))
        while not _large_enough(self, least).holds:  # the division may have been rounded
            least += 1
        return least

    def solution_conditions(self) -> list[Condition]:
        """What the proofs take for granted of the solver."""
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


# Theorems as published --------------------------------------------------------------------------


def upcycled_theorem_6_2(
    perturbation: OutputPerturbation, *, num_examples: int, participations: int, delta: float
) -> float:
    """ε of output perturbation as published: 2√(a ln(1/δ)) + a with a = Mτ²/(2σ²|D_i|²)."""
    _check_delta(delta)
    a = _moments(perturbation, num_examples, participations)
    return 2 * math.sqrt(a * math.log(1 / delta)) + a


def upcycled_theorem_6_2_delta(
    perturbation: OutputPerturbation, *, num_examples: int, participations: int, epsilon: float
) -> float:
    """δ of output perturbation as published: exp(−a (ε/(2a) − 1/2)²).

    Raises
    ------
    PreconditionFailed
        ε < a = Mτ²/(2σ²|D_i|²), where the theorem says nothing.
    """
    a = _moments(perturbation, num_examples, participations)
    if a == 0:
        return 0.0
    if not epsilon >= a:
        raise PreconditionFailed(
            f"epsilon={epsilon!r}: Theorem 6.2 speaks of ε ≥ Mτ²/(2σ²|D|²) = {a:.4g}"
        )
    return math.exp(-a * (epsilon / (2 * a) - 0.5) ** 2)


def upcycled_theorem_6_3(
    perturbation: ObjectivePerturbation,
    objective: LocalObjective,
    *,
    num_examples: int,
    participations: int,
) -> float:
    """ε (at δ = 0) of objective perturbation: M (2αu₁μ + 2.8u₂) / (|D_i|μ).

    Raises
    ------
    PreconditionFailed
        Names every precondition that fails.
    """
    _check_participations(participations)
    _refuse_unless([*objective.theorem_6_3_conditions(), _large_enough(objective, num_examples)])
    u1, u2, mu = objective.gradient_bound, objective.curvature_bound, objective.proximal_weight
    one = (2 * perturbation.rate * u1 * mu + 2.8 * u2) / (num_examples * mu)
    return participations * one


# Guarantees of a run ----------------------------------------------------------------------------


def sensitivity(
    perturbation: OutputPerturbation, objective: LocalObjective, num_examples: int | None
) -> float:
    """How far one record can move what is noised (L2): min(2τ, what stability gives).

    Clipping is a projection onto a ball, so it moves no two models apart; rounding may, each of
    them by its ``rounding``, counted `_ROUNDINGS` times.
    """
    stable = math.inf if num_examples is None else objective.stability(num_examples)
    norm = perturbation.clipping_norm
    return min(2 * norm, stable + 2 * _ROUNDINGS * objective.rounding * norm)


def epsilons(
    perturbation: Perturbation,
    objective: LocalObjective,
    *,
    num_examples: Mapping[int, int],
    participations: Mapping[int, int],
    delta: float,
) -> dict[int, tuple[float, float]]:
    """(published, provable) ε of each client that was asked; infinite where nothing is promised.

    A client that was asked but never told its number of examples counts as one that uploaded.
    """
    _check_delta(delta)
    covered = all(condition.holds for condition in objective.theorem_6_3_conditions())
    solved = all(condition.holds for condition in objective.solution_conditions())
    by_client = {}
    for client, uploads in participations.items():
        size = num_examples.get(client)
        if isinstance(perturbation, OutputPerturbation):
            published = math.inf
            if size is not None:
                published = upcycled_theorem_6_2(
                    perturbation, num_examples=size, participations=uploads, delta=delta
                )
            moved, provable = sensitivity(perturbation, objective, size), 0.0
            if moved > 0:
                multiplier = perturbation.noise_stddev / moved
                provable = gaussian_loss(multiplier, releases=uploads, delta=delta).epsilon
        else:
            published = provable = math.inf
            if covered and size is not None and _large_enough(objective, size).holds:
                published = upcycled_theorem_6_3(
                    perturbation, objective, num_examples=size, participations=uploads
                )
                provable = published if solved else math.inf
        by_client[client] = (published, provable)
    return by_client


def perturbation_guarantees(
    perturbation: Perturbation,
    objective: LocalObjective,
    *,
    num_examples: Mapping[int, int],
    participations: Mapping[int, int],
    delta: float,
    secure_noise: bool = True,
    not_covered: Sequence[str] = (),
) -> list[Guarantee]:
    """What protects one record of any client: as published, and provable.

    ε is the largest of any client; the source names the smallest and the mean as well.

    Parameters
    ----------
    num_examples, participations : Mapping[int, int]
        |D_i| and uploads by client.
    """
    by_client = epsilons(
        perturbation,
        objective,
        num_examples=num_examples,
        participations=participations,
        delta=delta,
    )
    published, provable = zip(*by_client.values(), strict=True) if by_client else ((), ())
    output = isinstance(perturbation, OutputPerturbation)
    theorem = f"Yin et al., Upcycled-FL, Theorem 6.{2 if output else 3}"
    sizes = [num_examples.get(client) for client in participations]
    solution = objective.solution_conditions()
    if isinstance(perturbation, OutputPerturbation):
        conditions = [_published_sensitivity(perturbation, objective, sizes)]
        provable_source = _how_sensitive(perturbation, objective, sizes)
    else:
        smallest = _large_enough(objective, min((size or 0 for size in sizes), default=0))
        conditions = [*objective.theorem_6_3_conditions(), smallest, *solution]
        provable_source = theorem

    def guarantee(
        basis: Basis, values: Sequence[float], accountant: str, source: str, **more: Any
    ) -> Guarantee:
        return Guarantee(
            unit=PrivacyUnit.RECORD,
            relation=NeighboringRelation.REPLACE_ONE,
            view=AdversaryView.EACH_UPLOAD,
            epsilon=max(values, default=0.0),
            delta=delta if output else 0.0,
            basis=basis,
            accountant=accountant,
            source=f"{source}; {_spread(values)}",
            not_covered=tuple(not_covered),
            **more,
        )

    # The noise of objective perturbation is in the training: no model without it may stand in.
    ends = () if output else ("training ends without an error, and finite, for every record",)
    assumptions = (
        "clients train, clip and add noise as told",
        *ends,
        "the planned rounds and each client's number of examples are public",
        "bounds on the loss hold for every record that could be there",
        LOADS,
        ON_A_GRID if output else _IN_FLOATS,
        noise_assumption(secure_noise),
    )
    return [
        guarantee(
            "published",
            published,
            "closed form (moments accountant)" if output else "closed form (pure DP)",
            theorem,
            conditions=tuple(conditions),
        ),
        guarantee(
            "provable",
            provable,
            EXACT_GAUSSIAN if output else "sum over releases (pure DP)",
            provable_source,
            assumptions=assumptions,
            conditions=() if output else tuple(conditions),
        ),
    ]


def _published_sensitivity(
    perturbation: OutputPerturbation, objective: LocalObjective, sizes: Sequence[int | None]
) -> Condition:
    """Whether τ/|D_i| bounds what one record can do, for every client."""
    tau = perturbation.clipping_norm
    return Condition(
        "one record moves a clipped local model by at most τ/|D_i| (what holds is "
        f"{_how_sensitive(perturbation, objective, sizes)})",
        all(
            size is not None and sensitivity(perturbation, objective, size) <= tau / size
            for size in sizes
        ),
    )


def _how_sensitive(
    perturbation: OutputPerturbation, objective: LocalObjective, sizes: Sequence[int | None]
) -> str:
    ceiling = 2 * perturbation.clipping_norm
    largest = max((sensitivity(perturbation, objective, size) for size in sizes), default=ceiling)
    if largest < ceiling:
        return f"sensitivity 2u₁/(|D_i|μ), at most {largest:.4g}"
    return f"sensitivity 2τ = {ceiling:.4g}"


def _large_enough(objective: LocalObjective, num_examples: int) -> Condition:
    bound = 0.5 * num_examples * objective.proximal_weight
    return Condition(
        f"u₂ ≤ 0.5 |D_i| μ ({objective.curvature_bound:.4g} against {bound:.4g} of the smallest "
        "client)",
        num_examples > 0 and objective.curvature_bound <= bound,
    )


def _refuse_unless(conditions: Sequence[Condition]) -> None:
    failed = [condition.text for condition in conditions if not condition.holds]
    if failed:
        raise PreconditionFailed(
            "Theorem 6.3 (objective perturbation) does not apply; these do not hold: "
            + "; ".join(failed)
        )


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "no client was asked"
    mean = sum(values) / len(values)
    return f"{len(values)} clients: min {min(values):.4g}, mean {mean:.4g}, max {max(values):.4g}"


def _moments(perturbation: OutputPerturbation, num_examples: int, participations: int) -> float:
    if num_examples < 1:
        raise ValueError(f"num_examples={num_examples!r}: expected an integer >= 1")
    _check_participations(participations)
    ratio = perturbation.clipping_norm / (perturbation.noise_stddev * num_examples)
    return participations * ratio**2 / 2


def _check_participations(participations: int) -> None:
    if participations < 0:
        raise ValueError(f"participations={participations!r}: expected an integer >= 0")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta!r}: expected a number in (0, 1)")


def _require(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r}: expected a finite number > 0")
