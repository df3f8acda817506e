"""Guarantees of Uldp-FL for one user with records in several silos: NAIVE, AVG and SGD.

Source: Kato et al., Uldp-FL (PVLDB 2024), Theorems 3 and 5, as published and as provable here.

====================  =====================================================
paper                 here
====================  =====================================================
σ, C                  ``noise_multiplier``, ``clipping_norm`` (of the plan)
S, U, q               ``num_silos``, the plan's sampling of users
T                     ``rounds``
====================  =====================================================

NAIVE (Theorem 3) assumes that one user moves a silo's clipped update by at most C. Clipping
projects onto a ball, and without the user training may end on its opposite side, 2C away. AVG and
SGD clip each user's own update, which vanishes without the user, so for them C is right.
See `silos` for secure sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from flower_ext.checks import (
    require_at_least_one,
    require_count,
    require_delta,
    require_one_of,
    require_positive,
)
from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.accountant import privacy_loss_of
from flower_ext.privacy.accounting.approximation import with_approximation_error
from flower_ext.privacy.accounting.events import total_approximation_error
from flower_ext.privacy.accounting.gaussian import gaussian_loss, participations_loss
from flower_ext.privacy.accounting.loss import PrivacyLoss
from flower_ext.privacy.accounting.sampling import FixedSizeSampling, FullParticipation
from flower_ext.privacy.guarantee import Condition, Guarantee
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum, ReleaseTerms
from flower_ext.privacy.mechanisms.plan import PrivacyPlan
from flower_ext.privacy.theorems.assumptions import (
    HIDDEN_DRAW,
    NOISE_OF_OTHERS,
    NONE_OF_THEM,
    WHOLE_UPLOADS,
    noise_assumption,
)
from flower_ext.privacy.theorems.silo_claims import (
    OF_SILOS,
    OF_SILOS_IN_CELLS,
    SECURE_SUM,
    exposures,
    published_shield,
    shield_of,
    user_claims,
)
from flower_ext.privacy.units import AdversaryView, NeighboringRelation

Weighting = Literal["equal", "by-records"]
"""Rule for w_{s,u}: 1/|S| for all users, or the silo's share of the user's records."""

_AT_SERVER = NeighboringRelation.REPLACE_SPECIAL
"""The server knows the sample, so in a neighbouring data set a sampled user's records vanish."""
_DRAWN = "sampled users are drawn by a cryptographic generator keyed by the operating system"
_DRAWN_BY_SEED = "SIMULATION: sampled users are reproducible from the seed, which clients are told"


@lru_cache(maxsize=256)
def uldp_closed_form(*, noise_multiplier: float, rounds: int, delta: float) -> float:
    """Return ε of Theorems 3 and 5: Tα/(2σ²) + log((α-1)/α) - (log δ + log α)/(α-1), best α > 1.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """
    require_positive("noise_multiplier", noise_multiplier)
    require_count("rounds", rounds)
    require_delta(delta)
    if rounds == 0:
        return 0.0
    above = np.logspace(-6, 8, 100_000)  # α - 1
    alpha = 1 + above
    epsilon = rounds * alpha / (2 * noise_multiplier**2) + np.log(above / alpha)
    epsilon -= (math.log(delta) + np.log(alpha)) / above
    return max(0.0, float(epsilon.min()))


def uldp_naive_guarantees(
    *,
    noise_multiplier: float,
    rounds: int,
    delta: float,
    plan: NoisedSum | None = None,
    secure_noise: bool = True,
    not_covered: Sequence[str] = (),
) -> list[Guarantee]:
    """Return the guarantees of ULDP-NAIVE: each silo clips its update to C and adds noise σC√|S|.

    All uploads together form a vector that one user moves by at most 2C√|S|. The provable guarantee
    therefore has a noise multiplier of σ/2, even against a server that sees each upload. With
    secure sums, it also holds for the sums, whichever silos collude.

    Parameters
    ----------
    noise_multiplier : float
        σ.
    rounds : int
        Number of releases so far, including discarded ones.
    plan : NoisedSum, optional
        The silos' plan, for its secure sums; by default there are no secure sums.

    Raises
    ------
    ValueError
        As `uldp_closed_form`.
    """
    published = uldp_closed_form(noise_multiplier=noise_multiplier, rounds=rounds, delta=delta)
    loss = gaussian_loss(noise_multiplier / 2, releases=rounds, delta=delta)
    source = (
        f"noise multiplier {noise_multiplier:.4g}, {rounds} rounds, sensitivity 2C of every silo's "
        "update"
    )
    shield = shield_of(plan)
    claims = user_claims(
        delta,
        *(OF_SILOS_IN_CELLS if shield else OF_SILOS),
        noise_assumption(secure_noise),
        not_covered=not_covered,
    )
    sums = [claims.provable(AdversaryView.SUM_ONLY, loss, source, *shield)] if shield else []
    return [
        claims.published(
            AdversaryView.SUM_ONLY,
            published,
            accountant="closed form (RDP)",
            source="Kato et al., Uldp-FL, Theorem 3",
            assumptions=published_shield(plan),
            conditions=(
                Condition(
                    "one user moves a silo's clipped update by at most C (what holds is 2C: "
                    "without the user, training may end at the other side of the ball)",
                    False,
                ),
            ),
        ),
        *sums,
        claims.provable(AdversaryView.EACH_UPLOAD, loss, source),
    ]


@dataclass(frozen=True, kw_only=True)
class UserRun:
    """The facts of a run on users in silos that its guarantees rest on.

    Parameters
    ----------
    num_silos : int
    rounds : int
        Number of releases so far, including discarded ones.
    weighting : {"equal", "by-records"}
    participations : float, optional
        The most rounds in which any one user was sampled, each weighted by (σ/σ_t)² if the silos
        supplied another noise σ_t; by default all rounds. In secure sums σ_t is the noise of honest
        silos only, as `Participations` counts it.
    in_uploads : float, optional
        The same number for an adversary that sees each upload; by default ``participations``.
    secure_noise, secure_sampling : bool
        True if they come from a cryptographic generator, False if from a seed.
    secure_sum : str
        Assumption that hides single uploads from the server.
    hidden_draw : str
        Assumption that hides the sample from the server; empty if the server knows the sample.
    batching : str
        Assumption under which no bit of a user's training depends on other users (see
        `batching_assumption`).
    not_covered : Sequence[str]
        Values that leave the silos without being covered by a guarantee.
    """

    num_silos: int
    rounds: int
    weighting: Weighting = "equal"
    participations: float | None = None
    in_uploads: float | None = None
    secure_noise: bool = True
    secure_sampling: bool = True
    secure_sum: str = SECURE_SUM
    hidden_draw: str = ""
    batching: str = ""
    not_covered: Sequence[str] = ()


def uldp_avg_guarantees(plan: NoisedSum, run: UserRun) -> list[Guarantee]:
    """Return the guarantees of ULDP-AVG and ULDP-SGD: Theorem 5, and the provable ones by view.

    * Released models: amplified by sampling users, because the sample stays secret.
    * Sums only: the server knows the sample, so releases compose without amplification. If a
      protocol hides the draw from the server too, sums and uploads are amplified like released
      models.
    * Each upload: a silo's share of the noise is σC/√|S|, or σC/√m in a secure sum of at least m
      answers. With equal weights, a user moves each upload by C/|S| and all of them together by
      C/√|S|, so this view costs nothing extra. With weights by records, a user may have all its
      weight in one silo.

    Parameters
    ----------
    plan : NoisedSum
        The mechanism of the silos' sums, with sampling of users and noise by the silos.

    Raises
    ------
    ValueError
        A parameter is out of range, or the plan does not fit these methods.
    """
    check_user_plan(plan, run.num_silos, run.weighting)
    loss = privacy_loss_of({plan.release: run.rounds}, delta=plan.delta)
    shield = shield_of(plan)
    in_sums, in_uploads = exposures(
        plan, run.rounds, run.weighting, run.participations, run.in_uploads
    )
    claims = user_claims(
        plan.delta,
        *(OF_SILOS_IN_CELLS if shield else OF_SILOS),
        "a user's weights depend on that user's records alone and sum to at most 1 over the silos",
        "a user's training sees that user's records and the model, nothing of others",
        *filter(None, (run.batching,)),
        noise_assumption(run.secure_noise),
        not_covered=run.not_covered,
    )
    in_rounds = (
        f"{plan.sampling.describe()}, noise multiplier {plan.noise_multiplier:.4g}, "
        f"{run.rounds} rounds"
    )

    def source_at_server(exposure: float) -> str:
        return in_rounds if run.hidden_draw else f"most exposed user: {exposure:.4g} sums' worth"

    spread, of_one_share = _share_of_noise(plan, run)
    from_server = (run.hidden_draw,) if run.hidden_draw else ()
    return [
        _theorem_5(plan, run.rounds),
        claims.provable(
            AdversaryView.RELEASED_MODELS,
            loss,
            in_rounds,
            "the server follows the protocol and keeps sums and uploads to itself",
            *((NONE_OF_THEM,) if shield else NOISE_OF_OTHERS),
            *_hidden_sample(plan, run),
        ),
        claims.provable(
            AdversaryView.SUM_ONLY,
            _loss_at_server(plan, run, in_sums),
            source_at_server(in_sums) + (", colluders' noise not counted" if shield else ""),
            *(shield or (WHOLE_UPLOADS, run.secure_sum)),
            *from_server,
            relation=_AT_SERVER,
        ),
        claims.provable(
            AdversaryView.EACH_UPLOAD,
            _loss_at_server(
                replace(plan, noise_multiplier=plan.noise_multiplier / spread), run, in_uploads
            ),
            f"all uploads together: noise multiplier σ{of_one_share}; "
            + source_at_server(in_uploads)
            + (", should all masks fall" if shield else ""),
            *from_server,
            relation=_AT_SERVER,
        ),
    ]


def _share_of_noise(plan: NoisedSum, run: UserRun) -> tuple[float, str]:
    """Return by how much less noise than a sum's hides a user in all uploads, also in words.

    With weights by records a user may have all its weight in one silo, whose share hides it.
    """
    if run.weighting == "equal":
        return 1.0, ""
    if plan.secure_sum is None:
        shares, factor = run.num_silos, "/√|S|"
    else:
        shares, factor = plan.sum_parameters.least_answers, "/√least answers"
    return math.sqrt(shares), factor if shares > 1 else ""


def _loss_at_server(plan: NoisedSum, run: UserRun, exposure: float) -> PrivacyLoss:
    """Return the loss to a server, which knows the sample unless a protocol hides the draw."""
    if run.hidden_draw:
        return privacy_loss_of({plan.release: run.rounds}, delta=plan.delta)
    return with_approximation_error(
        lambda delta: participations_loss(
            noise_multiplier=plan.release.noise_multiplier,
            participations=exposure,
            relation=_AT_SERVER,
            delta=delta,
        ),
        total_approximation_error({plan.release: run.rounds}),
        plan.delta,
    )


def _hidden_sample(plan: NoisedSum, run: UserRun) -> tuple[str, ...]:
    """Return the assumptions under which sampling amplifies; none if all users take part."""
    if isinstance(plan.sampling, FullParticipation):
        return ()
    return (HIDDEN_DRAW, _DRAWN if run.secure_sampling else _DRAWN_BY_SEED)


def _theorem_5(plan: NoisedSum, rounds: int) -> Guarantee:
    if isinstance(plan.sampling, FullParticipation):
        accountant, view = "closed form (RDP)", AdversaryView.SUM_ONLY
        source, assumptions = "Kato et al., Uldp-FL, Theorem 5", published_shield(plan)
        epsilon = uldp_closed_form(
            noise_multiplier=plan.noise_multiplier, rounds=rounds, delta=plan.delta
        )
    else:
        accountant, view = "RDP", AdversaryView.RELEASED_MODELS
        source = "Kato et al., Uldp-FL, Theorem 5 and Remark 1"
        assumptions = ("who was sampled stays secret",)
        exact = replace(plan, sensitivity=1.0, approximation_error=0.0)
        epsilon = privacy_loss_of(
            {exact.release: rounds}, delta=plan.delta, accountant="rdp"
        ).epsilon
    return user_claims(plan.delta).published(
        view, epsilon, accountant=accountant, source=source, assumptions=assumptions
    )


def check_user_plan(plan: PrivacyPlan | NoisedSum, num_silos: int, weighting: str) -> None:
    """Refuse a plan that the methods of Uldp-FL cannot carry out.

    Raises
    ------
    ValueError
        A field of the plan does not fit; the message names it.
    """
    if not isinstance(plan, ReleaseTerms):
        raise InvalidValue(f"plan={type(plan).__name__}: expected a ReleasePlan of users")
    if plan.noised_by_server:
        raise InvalidValue(
            "noise_placement='server' of the plan: expected 'client' or a SecureSum, because the "
            "silos, which are the clients, add the noise"
        )
    if isinstance(plan.sampling, FixedSizeSampling):
        raise InvalidValue("sampling of the plan: expected FullParticipation or PoissonSampling")
    require_at_least_one("num_silos", num_silos)
    require_one_of("weighting", weighting, ("equal", "by-records"))
