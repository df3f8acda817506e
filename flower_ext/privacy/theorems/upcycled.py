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
ε̄                     the mean over clients, reported beside the largest
====================  =====================================================

Theorem 6.2 assumes that one record moves a clipped model by at most τ/|D_i|. Nothing ensures that
in general: models trained on two neighbouring data sets may lie at opposite ends of the ball of
radius τ, 2τ apart. For the exact minimiser of a convex loss plus (μ/2)‖w − w̄‖² the distance is at
most 2u₁/(|D_i|μ). `sensitivity` returns the smaller of the bounds that hold. The module returns
guarantees in pairs: first the guarantee as published, then the provable one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from flower_ext.checks import require_at_least_one, require_count, require_delta, require_positive
from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.events import PrivacyLoss
from flower_ext.privacy.accounting.gaussian import EXACT_GAUSSIAN, gaussian_loss
from flower_ext.privacy.guarantee import Condition, Guarantee, PreconditionFailed
from flower_ext.privacy.mechanisms.protections import (
    ObjectivePerturbation,
    OutputPerturbation,
    Perturbation,
)
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems.claims import (
    LOADS,
    ON_A_GRID,
    OUTLIVES,
    Claims,
    noise_assumption,
)
from flower_ext.privacy.theorems.local_objective import LocalObjective, large_enough, refuse_unless
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit

_SOURCE = "Yin et al., Upcycled-FL, Theorem"
_IN_FLOATS = "arithmetic and noise in floating point (not proof against attacks on low-order bits)"
_ROUNDINGS = 4
"""Safety factor on the rounding of a model to its precision, in clipping norms. Rounding happens
once, before the model is clipped in float64; clipping does not enlarge its effect."""


def upcycled_theorem_6_2(
    perturbation: OutputPerturbation, *, num_examples: int, participations: int, delta: float
) -> float:
    """Return ε of output perturbation as published: 2√(a ln(1/δ)) + a with a = Mτ²/(2σ²|D_i|²)."""
    require_delta(delta)
    a = _moment_of_theorem_6_2(perturbation, num_examples, participations)
    return 2 * math.sqrt(a * math.log(1 / delta)) + a


def upcycled_theorem_6_2_delta(
    perturbation: OutputPerturbation, *, num_examples: int, participations: int, epsilon: float
) -> float:
    """Return δ of output perturbation as published: exp(−a (ε/(2a) − 1/2)²) for ε ≥ a.

    This is the inverse of `upcycled_theorem_6_2`, with the same a, and it makes the same assumption
    that one record moves a model by at most τ/|D_i|. For a provable δ, search for the δ at which
    `epsilons` returns your ε.

    Raises
    ------
    ValueError
        ``epsilon`` is below a, so that the theorem does not apply, or another argument is out of
        range.
    """
    require_positive("epsilon", epsilon)
    a = _moment_of_theorem_6_2(perturbation, num_examples, participations)
    if epsilon < a:
        raise InvalidValue(f"epsilon={epsilon!r}: expected at least Mτ²/(2σ²|D_i|²) = {a:.4g}")
    return math.exp(-((epsilon - a) ** 2) / (4 * a)) if a > 0 else 0.0


def _moment_of_theorem_6_2(
    perturbation: OutputPerturbation, num_examples: int, participations: int
) -> float:
    require_at_least_one("num_examples", num_examples)
    require_count("participations", participations)
    ratio = perturbation.clipping_norm / (perturbation.noise_stddev * num_examples)
    return participations * ratio**2 / 2


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
    refuse_unless([*objective.theorem_6_3_conditions(), large_enough(objective, num_examples)])
    u1, u2, mu = objective.gradient_bound, objective.curvature_bound, objective.proximal_weight
    epsilon = (2 * perturbation.rate * u1 * mu + 2.8 * u2) / (num_examples * mu)
    return participations * epsilon


def sensitivity(
    perturbation: OutputPerturbation, objective: LocalObjective, num_examples: int | None
) -> float:
    """Return the largest L2 distance by which one record moves the clipped model, before noise.

    Two bounds hold, and the function returns the smaller one. The first is 2τ, the diameter of the
    ball to which models are clipped. The second is `LocalObjective.stability` plus the rounding of
    both models, which counts `_ROUNDINGS` times for safety. Clipping keeps the second bound,
    because it moves no two models further apart.
    """
    stable = math.inf if num_examples is None else objective.stability(num_examples)
    norm = perturbation.clipping_norm
    return min(2 * norm, stable + 2 * _ROUNDINGS * objective.rounding * norm)


def epsilons(
    perturbation: Perturbation, objective: LocalObjective, run: RunSummary, *, delta: float
) -> dict[int, tuple[float, float]]:
    """Return for each client that was asked its published ε and its provable ε.

    An ε is infinite if no such guarantee holds for the client. A client that was asked but never
    reported its number of examples is included, as if it had uploaded.
    """
    require_delta(delta)
    solved = all(condition.holds for condition in objective.solution_conditions())

    def of_output(
        output: OutputPerturbation, size: int | None, uploads: int
    ) -> tuple[float, float]:
        published, provable = math.inf, 0.0
        if size is not None:
            published = upcycled_theorem_6_2(
                output, num_examples=size, participations=uploads, delta=delta
            )
        # If no record can move the model, it does not depend on the data, and ε is 0.
        if (moved := sensitivity(output, objective, size)) > 0:
            multiplier = output.noise_stddev / moved
            provable = gaussian_loss(multiplier, releases=uploads, delta=delta).epsilon
        return published, provable

    def of_objective(
        noise: ObjectivePerturbation, size: int | None, uploads: int
    ) -> tuple[float, float]:
        try:
            published = upcycled_theorem_6_3(
                noise, objective, num_examples=size or 0, participations=uploads
            )
        except PreconditionFailed:
            published = math.inf
        return published, published if solved else math.inf

    return {
        client: of_output(perturbation, run.num_examples.get(client), uploads)
        if isinstance(perturbation, OutputPerturbation)
        else of_objective(perturbation, run.num_examples.get(client), uploads)
        for client, uploads in run.participations.uploads.items()
    }


def perturbation_guarantees(
    perturbation: Perturbation, objective: LocalObjective, run: RunSummary, *, delta: float
) -> list[Guarantee]:
    """Return the published and the provable guarantee for one record of any client.

    Each ε is the largest of all clients; the text in ``source`` also gives the smallest and the
    mean.
    """
    # One guarantee for all clients: it must hold for the client with the fewest records.
    by_client = epsilons(perturbation, objective, run, delta=delta)
    published, provable = zip(*by_client.values(), strict=True) if by_client else ((), ())
    sizes = [run.num_examples.get(client) for client in by_client]
    if isinstance(perturbation, OutputPerturbation):
        theorem = _theorem_6_2(perturbation, objective, sizes)
    else:
        theorem, delta = _theorem_6_3(objective, sizes), 0.0
    claims = Claims(
        unit=PrivacyUnit.RECORD,
        relation=NeighboringRelation.REPLACE_ONE,
        delta=delta,
        assumptions=(
            "clients train, clip and add noise as instructed",
            *theorem.finite,
            "the planned rounds and each client's number of examples are public",
            "bounds on the loss hold for every possible record",
            LOADS,
            OUTLIVES,
            theorem.arithmetic,
            noise_assumption(run.secure_noise),
        ),
        not_covered=run.not_covered,
    )
    largest = max(provable, default=0.0)
    loss = PrivacyLoss(epsilon=largest, delta=delta, accountant=theorem.accountant)
    reason = f"{theorem.reason}; {_spread(provable)}"
    return [
        claims.published(
            AdversaryView.EACH_UPLOAD,
            max(published, default=0.0),
            accountant=theorem.closed_form,
            source=f"{theorem.source}; {_spread(published)}",
            conditions=theorem.conditions,
            not_covered=tuple(run.not_covered),
        ),
        claims.provable(AdversaryView.EACH_UPLOAD, loss, reason, conditions=theorem.needed),
    ]


class _Theorem(NamedTuple):
    """Texts and conditions of two guarantees: of a theorem as published, and of a provable one."""

    source: str
    closed_form: str
    conditions: tuple[Condition, ...]
    reason: str
    accountant: str
    arithmetic: str
    needed: tuple[Condition, ...] = ()
    finite: tuple[str, ...] = ()


def _theorem_6_2(
    perturbation: OutputPerturbation, objective: LocalObjective, sizes: Sequence[int | None]
) -> _Theorem:
    reason, tau = _how_sensitive(perturbation, objective, sizes), perturbation.clipping_norm
    claimed = f"one record moves a clipped local model by at most τ/|D_i| (what holds is {reason})"
    holds = all(
        size is not None and sensitivity(perturbation, objective, size) <= tau / size
        for size in sizes
    )
    return _Theorem(
        source=f"{_SOURCE} 6.2",
        closed_form="closed form (moments accountant)",
        conditions=(Condition(claimed, holds),),
        reason=reason,
        accountant=EXACT_GAUSSIAN,
        arithmetic=ON_A_GRID,
    )


def _theorem_6_3(objective: LocalObjective, sizes: Sequence[int | None]) -> _Theorem:
    conditions = (
        *objective.theorem_6_3_conditions(),
        large_enough(objective, min((size or 0 for size in sizes), default=0)),
        *objective.solution_conditions(),
    )
    return _Theorem(
        source=f"{_SOURCE} 6.3",
        closed_form="closed form (pure DP)",
        conditions=conditions,
        reason=f"{_SOURCE} 6.3",
        accountant="sum over releases (pure DP)",
        arithmetic=_IN_FLOATS,
        needed=conditions,
        # Training adds the noise, so a client must not send a model whose training failed.
        finite=("training ends without an error, and finite, for every record",),
    )


def _how_sensitive(
    perturbation: OutputPerturbation, objective: LocalObjective, sizes: Sequence[int | None]
) -> str:
    ceiling = 2 * perturbation.clipping_norm
    largest = max((sensitivity(perturbation, objective, size) for size in sizes), default=ceiling)
    if largest < ceiling:
        return f"sensitivity 2u₁/(|D_i|μ), at most {largest:.4g}"
    return f"sensitivity 2τ = {ceiling:.4g}"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "no client was asked"
    mean = sum(values) / len(values)
    return f"{len(values)} clients: min {min(values):.4g}, mean {mean:.4g}, max {max(values):.4g}"
