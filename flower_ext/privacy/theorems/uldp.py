"""Guarantees of Uldp-FL for one user with records in several silos: NAIVE, AVG and SGD.

Source: Kato et al., Uldp-FL (PVLDB 2024), Theorems 3 and 5, as published and as provable here.

====================  =====================================================
paper                 here
====================  =====================================================
σ, C                  ``noise_multiplier``, ``clipping_norm`` (of the plan)
S, U, q               ``num_silos``, the plan's sampling of users
T                     ``rounds``
====================  =====================================================

Theorem 3, on NAIVE, assumes that one user moves a silo's clipped update by at most C. But clipping
projects the update onto a ball of radius C, and the updates with and without the user may lie on
opposite sides of this ball, 2C apart. AVG and SGD clip the update of each single user, which is
missing without the user, so their bound C holds. See `silo_claims` for secure sums.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import numpy as np

from flower_ext.checks import require_count, require_delta, require_positive
from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.accountant import privacy_loss_of, with_approximation_error
from flower_ext.privacy.accounting.events import PrivacyLoss, Release
from flower_ext.privacy.accounting.gaussian import gaussian_loss
from flower_ext.privacy.accounting.group_privacy import DpSgd, group_loss
from flower_ext.privacy.accounting.sampling import (
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
)
from flower_ext.privacy.guarantee import Condition, Guarantee, epsilon_text
from flower_ext.privacy.mechanisms.masked_noised_sum import MaskedNoisedSum
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems.claims import (
    HIDDEN_DRAW,
    Bound,
    draw_assumption,
    noise_assumption,
)
from flower_ext.privacy.theorems.silo_claims import (
    DrawAndSum,
    exposures,
    sums_of_silos,
    user_claims,
)
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, UserDraw

Weighting = Literal["equal", "by-records"]
"""Rule for w_{s,u}: 1/|S| for all users, or the silo's share of the user's records."""

_AT_SERVER = NeighboringRelation.REPLACE_SPECIAL
"""The server knows the sample, so in a neighbouring data set a sampled user contributes zeros."""


@lru_cache(maxsize=256)
def uldp_closed_form(*, noise_multiplier: float, rounds: int, delta: float) -> float:
    """Return ε of Theorems 3 and 5, at the order α > 1 with the smallest ε.

    ε is Tα/(2σ²) + log((α-1)/α) - (log δ + log α)/(α-1).

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
    # The bound holds at every order, so a grid of orders gives a bound as well.
    above = np.logspace(-6, 8, 100_000)  # α - 1
    alpha = 1 + above
    epsilon = rounds * alpha / (2 * noise_multiplier**2) + np.log(above / alpha)
    epsilon -= (math.log(delta) + np.log(alpha)) / above
    return max(0.0, float(epsilon.min()))


def uldp_naive_guarantees(mechanism: NoisedSum, run: RunSummary) -> list[Guarantee]:
    """Return the guarantees of ULDP-NAIVE: each silo clips its update to C and adds noise σC√|S|.

    All uploads together form a vector that one user moves by at most 2C√|S|. The provable guarantee
    therefore has a noise multiplier of σ/2, even against a server that sees each upload. With
    secure sums, the function returns the same guarantee for sums, whichever silos collude.

    Parameters
    ----------
    mechanism : NoisedSum
        The mechanism of the plan, with the plan's σ as its noise multiplier. (Do not pass the
        result of `UldpNaive.mechanism`, which counts all silos' noise and a sensitivity of 2C.)
    """
    rounds, sigma, delta = run.participations.rounds, mechanism.noise_multiplier, mechanism.delta
    loss = gaussian_loss(sigma / 2, releases=rounds, delta=delta)
    source = f"noise multiplier {sigma:.4g}, {rounds} rounds, sensitivity 2C of every silo's update"
    sums = sums_of_silos(mechanism)
    claims = user_claims(
        delta,
        *sums.parties,
        sums.noise,
        noise_assumption(run.secure_noise),
        not_covered=run.not_covered,
    )
    theorem_3 = claims.published(
        AdversaryView.SUM_ONLY,
        uldp_closed_form(noise_multiplier=sigma, rounds=rounds, delta=delta),
        accountant="closed form (RDP)",
        source="Kato et al., Uldp-FL, Theorem 3",
        assumptions=sums.published,
        conditions=(
            Condition(
                "one user moves a silo's clipped update by at most C (what holds is 2C: "
                "without the user, training may end at the other side of the ball)",
                False,
            ),
        ),
    )
    bounds = [Bound(AdversaryView.EACH_UPLOAD, loss, source)]
    if isinstance(mechanism, MaskedNoisedSum):
        bounds.insert(0, Bound(AdversaryView.SUM_ONLY, loss, source, sums.sums))
    return [theorem_3, *claims.provable(*bounds)]


def uldp_avg_guarantees(
    mechanism: NoisedSum, run: RunSummary, protocol: DrawAndSum
) -> list[Guarantee]:
    """Return the guarantees of ULDP-AVG and ULDP-SGD: Theorem 5, and a provable one for each view.

    * Released models: sampling of users amplifies, because the sample stays secret.
    * Sums only: the server knows the sample, so sampling amplifies nothing. If a protocol hides the
      sample from the server, sampling amplifies for sums and uploads as for released models.
    * Each upload: a silo's share of the noise has stddev σC/√|S|, or σC/√m in a secure sum of at
      least m answers. With equal weights, a user moves each upload by C/|S| and all uploads
      together by C/√|S|, so ε is that of the sums. With weights by records, a user may have all its
      weight in one silo, and only that silo's share of the noise hides the user.

    Parameters
    ----------
    mechanism : NoisedSum
        The mechanism of the silos' sums. Its units are users, and the silos add the noise.
    run : RunSummary
        A run of a method with silos. With secure sums, its participations count only the noise of
        honest silos, unless the silos draw the users.
    protocol : DrawAndSum
        The draw of users, and the sum of their updates.
    """
    rounds, is_hidden = run.participations.rounds, protocol.draw.is_hidden
    from_server = (_assumed_draw(mechanism, rounds, protocol),) if is_hidden else ()
    sums = sums_of_silos(mechanism, protocol.secure_sum)
    claims = user_claims(
        mechanism.delta,
        *sums.parties,
        sums.noise,
        "a user's weights depend on that user's records alone and sum to at most 1 over the silos",
        "a user's training sees that user's records and the model, nothing of others",
        *((protocol.batching,) if protocol.batching else ()),
        noise_assumption(run.secure_noise),
        *mechanism.assumptions,
        not_covered=run.not_covered,
    )

    # For the accountant, one upload is a sum with less noise, so the same formulas hold.
    spread, of_share = _share_of_noise(mechanism, run, sums.share)
    upload = replace(mechanism, noise_multiplier=mechanism.noise_multiplier / spread)
    if is_hidden:
        # Exposures count the noise of honest silos only. Without them, the noise itself counts so.
        to_sums, in_sums = _amplified(_with_least_noise(mechanism, run), rounds)
        to_uploads, in_uploads = _amplified(upload, rounds)
    else:
        of_sums, of_uploads = exposures(mechanism, run)
        to_sums, in_sums = _exposed(mechanism, rounds, of_sums)
        to_uploads, in_uploads = _exposed(upload, rounds, of_uploads)
    bounds = (
        Bound(
            AdversaryView.RELEASED_MODELS,
            *_amplified(mechanism, rounds),
            (
                _two_numbers(mechanism, rounds),
                "the server follows the protocol and keeps sums and uploads to itself",
                *sums.models,
                *_hidden_sample(mechanism, run.secure_cohorts or is_hidden),
            ),
        ),
        Bound(
            AdversaryView.SUM_ONLY,
            to_sums,
            f"{in_sums}{sums.on_sums}",
            (*sums.sums, *from_server),
            _AT_SERVER,
        ),
        Bound(
            AdversaryView.EACH_UPLOAD,
            to_uploads,
            f"all uploads together: noise multiplier σ{of_share}; {in_uploads}{sums.on_uploads}",
            from_server,
            _AT_SERVER,
        ),
    )
    return [_theorem_5(mechanism, rounds), *claims.provable(*bounds, of_view=protocol.assumptions)]


def _amplified(mechanism: NoisedSum, rounds: int) -> tuple[PrivacyLoss, str]:
    """Return a user's loss against an adversary that does not know the sample, and a text."""
    loss = privacy_loss_of({mechanism.release: rounds}, delta=mechanism.delta)
    multiplier = f"noise multiplier {mechanism.noise_multiplier:.4g}"
    return loss, f"{mechanism.sampling.describe()}, {multiplier}, {rounds} rounds"


def _exposed(mechanism: NoisedSum, rounds: int, exposure: float) -> tuple[PrivacyLoss, str]:
    """Return the loss of a user with ``exposure`` releases of its whole weight, and a text."""
    multiplier = mechanism.release.noise_multiplier
    # A protocol's errors add up over all rounds, not only the most exposed user's rounds.
    loss = with_approximation_error(
        lambda delta: gaussian_loss(multiplier, releases=exposure, delta=delta),
        {mechanism.release: rounds},
        mechanism.delta,
    )
    return loss, f"most exposed user: {exposure:.4g} sums' worth"


def _with_least_noise(mechanism: NoisedSum, run: RunSummary) -> NoisedSum:
    """Return the mechanism with the least noise in a sum that a lying server can see.

    With secure sums and weights by records, such a sum has only the noise of honest silos. In all
    other cases the result is ``mechanism`` itself. With equal weights, a sum of fewer silos has
    less noise, but it also holds less of a user, so ε does not grow.
    """
    if not isinstance(mechanism, MaskedNoisedSum) or run.method.weighting == "equal":
        return mechanism
    part = math.sqrt(mechanism.honest_noise)
    return replace(mechanism, noise_multiplier=mechanism.noise_multiplier * part)


def _share_of_noise(mechanism: NoisedSum, run: RunSummary, share: str) -> tuple[float, str]:
    """Return the number by which σ is divided if the server sees each upload, and a text for it.

    With equal weights, the number is 1. With weights by records, a user may have all its weight in
    one silo. Only that silo's share of the noise then hides the user, so the number is the square
    root of the number of shares.
    """
    shares = mechanism.silos or 1
    if isinstance(mechanism, MaskedNoisedSum):
        shares = mechanism.sum_parameters.least_answers
    if shares == 1 or run.method.weighting == "equal":
        return 1.0, ""
    return math.sqrt(shares), f"/√{share}"


def _hidden_sample(mechanism: NoisedSum, secure: bool) -> tuple[str, ...]:
    """Return the assumptions under which sampling amplifies; none if all users take part."""
    if isinstance(mechanism.sampling, FullParticipation):
        return ()
    return (HIDDEN_DRAW, draw_assumption("sampled users", secure))


def _assumed_draw(mechanism: NoisedSum, rounds: int, protocol: DrawAndSum) -> str:
    """Return the text of the assumption under which the server does not know the sample.

    If silos draw the users, the text also gives ε against a silo. A silo knows who is drawn, so
    sampling amplifies nothing against it, and it can subtract its own share of the noise. This ε
    counts every user as drawn in every round, because the server does not know the real draws.
    """
    if protocol.draw is UserDraw.PROTOCOL:
        return protocol.hidden_draw
    assert isinstance(mechanism, MaskedNoisedSum)  # see `check_silos_can_draw`
    parameters = mechanism.sum_parameters
    others = parameters.honest_answers - 1
    of_others = mechanism.noise_multiplier * math.sqrt(others / parameters.least_answers)
    against_silo = math.inf
    if of_others > 0:
        against_silo = gaussian_loss(of_others, releases=rounds, delta=mechanism.delta).epsilon
    return (
        "silos draw users by a key that only they have, HMAC-SHA-256 and ChaCha20 act as random "
        "functions, and the server sends all silos the same request, and none twice; every silo "
        "knows who is drawn: against a silo that sees the released models, ε of users' records "
        f"in the other silos is {epsilon_text(against_silo)}"
    )


def _two_numbers(mechanism: NoisedSum, rounds: int) -> str:
    """Return a sentence about ε of a person who has two user numbers by mistake.

    The person counts as two users, drawn independently, each of whom moves the sum by at most C.
    The loss is that of a group of two records in DP-SGD.
    """
    epsilon = _epsilon_of_two_numbers(mechanism.release, rounds, mechanism.delta)
    return (
        "a person has one number; a person whom silos know by two numbers, for example because of "
        f"a misspelt name, has ε = {epsilon_text(epsilon)}"
    )


@lru_cache(maxsize=256)
def _epsilon_of_two_numbers(release: Release, rounds: int, delta: float) -> float:
    if rounds == 0:
        return 0.0
    releases = DpSgd(
        noise_multiplier=release.noise_multiplier,
        sampling_rate=release.sampling.sampling_rate,
        steps=rounds,
    )
    # Two users have twice the approximation error of one user, so its square counts four times.
    return with_approximation_error(
        lambda delta: group_loss(releases, group_size=2, delta=delta), {release: 4 * rounds}, delta
    ).epsilon


def _theorem_5(mechanism: NoisedSum, rounds: int) -> Guarantee:
    claims = user_claims(mechanism.delta)
    if isinstance(mechanism.sampling, FullParticipation):
        sigma = mechanism.noise_multiplier
        return claims.published(
            AdversaryView.SUM_ONLY,
            uldp_closed_form(noise_multiplier=sigma, rounds=rounds, delta=mechanism.delta),
            accountant="closed form (RDP)",
            source="Kato et al., Uldp-FL, Theorem 5",
            assumptions=(*sums_of_silos(mechanism).published, *mechanism.assumptions),
        )
    # The theorem covers no approximation error of a protocol, and no second upload of a user.
    release = replace(mechanism, sensitivity=1.0, approximation_error=0.0).release
    loss = privacy_loss_of({release: rounds}, delta=mechanism.delta, accountant="rdp")
    return claims.published(
        AdversaryView.RELEASED_MODELS,
        loss.epsilon,
        accountant="RDP",
        source="Kato et al., Uldp-FL, Theorem 5 and Remark 1",
        assumptions=("who was sampled stays secret", *mechanism.assumptions),
    )


def sums_of_users(mechanism: RoundMechanism) -> NoisedSum:
    """Return ``mechanism`` itself, or refuse it if the methods of Uldp-FL cannot train with it.

    Raises
    ------
    InvalidValue
        A field of the plan does not fit; the message names it.
    """
    if not isinstance(mechanism, NoisedSum):
        raise InvalidValue(f"plan={type(mechanism).__name__}: expected a ReleasePlan of users")
    if mechanism.noised_by_server:
        raise InvalidValue(
            "noise_placement='server' of the plan: expected 'client' or a SecureSum, because the "
            "silos, which are the clients, add the noise"
        )
    if isinstance(mechanism.sampling, FixedSizeSampling):
        raise InvalidValue(
            f"sampling={mechanism.sampling!r} of the plan: expected FullParticipation or "
            "PoissonSampling"
        )
    return mechanism


def check_silos_can_draw(mechanism: NoisedSum) -> None:
    """Refuse a mechanism with which silos cannot draw users without the server's knowledge.

    Raises
    ------
    InvalidValue
        The sampling is not Poisson sampling, or the server sees uploads, or a silo may collude with
        the server.
    """
    if not isinstance(mechanism.sampling, PoissonSampling):
        raise InvalidValue(
            f"user_draw='silos' with sampling={mechanism.sampling!r}: expected PoissonSampling, "
            "because silos draw every user independently"
        )
    if not isinstance(mechanism, MaskedNoisedSum) or mechanism.secure_sum.colluding:
        raise InvalidValue(
            f"user_draw='silos' with noise_placement={mechanism.noise_placement!r}: expected "
            "SecureSum(colluding=0), because the server may see only sums, and a silo that "
            "colludes with the server could tell it which users were drawn"
        )
