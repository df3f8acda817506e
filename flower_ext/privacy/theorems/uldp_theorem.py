"""Guarantees of Uldp-FL for one user with records in several silos: NAIVE, AVG and SGD.

Source: Kato et al., Uldp-FL (PVLDB 2024), Theorems 3 and 5, as published and as provable here.

====================  =====================================================
paper                 here
====================  =====================================================
σ, C                  ``noise_multiplier``, ``clipping_norm`` (of the plan)
S, U                  silos, as many as ``NoisedSum.silos``; users
q                     rate of the plan's sampling of users
T                     ``rounds``
w_{s,u}               weight of the update from the records of user u in silo s
====================  =====================================================

Theorem 3, on NAIVE, assumes that one user moves a silo's clipped update by at most C. But clipping
projects the update onto a ball of radius C, and the updates with and without the user may lie on
opposite sides of this ball, 2C apart. AVG and SGD clip the update of each single user. Without the
user, this update is missing, so one user moves the sum by at most C.

The members of a secure sum are the n silos, all of them in every round. At least m silos answer,
and each adds a discrete Gaussian share of variance σ²C²/m. Let c silos collude with the server.
They can subtract their own shares of the noise, and their own uploads before noise, from the sum.
Below, h' is the number of honest silos in a sum.

* Weights by records: a user may have all its weight in honest silos, and then moves their sum by C.
  Their sum carries at least m − c shares of noise, so the noise multiplier is σ√((m − c)/m).
* Equal weights: a user moves the sum of h' honest silos by C h'/n, and this sum carries noise of
  stddev σC √(h'/m). The noise multiplier is σ n/√(m h') ≥ σ, so collusion costs nothing.
* ULDP-NAIVE: a user moves the sum of h' honest silos by 2C h', and this sum carries noise of stddev
  σC n √(h'/m). The noise multiplier is (σ/2) n/√(m h') ≥ σ/2, so again collusion costs nothing.

With secure sums, users may be drawn by Poisson sampling, although clients may not. The number of
silos that are asked, the number of shares in a sum and the size of each share depend on n and m
only, so the noise does not reveal the number of drawn users. If the server draws the users, it
tells the silos, and sampling amplifies nothing against a server that sees sums.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from flower_ext.checks import require_count, require_delta, require_positive
from flower_ext.privacy.accounting.accountant import privacy_loss_of, with_approximation_error
from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.accounting.gaussian import gaussian_loss
from flower_ext.privacy.accounting.group_privacy import DpSgd, group_loss
from flower_ext.privacy.accounting.sampling import FullParticipation
from flower_ext.privacy.guarantee import Condition, Guarantee, epsilon_text
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems import assumptions
from flower_ext.privacy.theorems.claims import Claims, DescribedLoss, amplified_loss, exposed_loss
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit

Weighting = Literal["equal", "by-records"]
"""Rule for a user's weight in a silo: 1/|S|, or the fraction of the user's records in the silo."""

_Losses = tuple[DescribedLoss, DescribedLoss]
"""A user's loss to a server that sees sums, and to a server that sees each upload."""
_AT_SERVER = NeighboringRelation.REPLACE_SPECIAL
"""Relation for a server that knows the sample: a neighbouring data set replaces a user by zeros."""
_OF_DATA = (
    "the numbers of users, silos and rounds are public",
    "users have the same id in every silo",
    "no user's records keep a silo from loading its data (Task.data)",
    assumptions.OUTLIVES,
)
OF_SILOS = (
    *_OF_DATA,
    "silos train, clip and add noise as instructed, and do not collude",
    assumptions.ON_A_GRID,
)
_OF_BATCHES = (
    "users of a silo train one by one, or in batches where a plug-in promises that no bit of a "
    "user's model depends on other users, or a trial with random users on the silo's machine found "
    "no such bit (evidence, not proof)"
)
"""The assumption about users whose models train together.

It is the same for all runs: a silo that has no records cannot say how it would train users, so its
answer would show whether it has any.
"""
_NOT_HELD = "ε covers only those of a user's records that no colluding silo holds"
_NO_SECURE_SUM_OF_SILOS = (
    f"secure aggregation, {assumptions.NOT_PROVIDED}: the server sees no silo's upload"
)
"""Assumption of guarantees about sums, if silos send their uploads without a secure sum."""


def user_claims(delta: float, *of_run: str, **fields: Any) -> Claims:
    """Return `Claims` about a user with records in several silos; ``of_run`` are assumptions."""
    return Claims(
        unit=PrivacyUnit.USER,
        relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        delta=delta,
        assumptions=of_run,
        **fields,
    )


def _parties(mechanism: NoisedSum) -> tuple[str, ...]:
    """Return the assumptions about the silos and their noise."""
    if mechanism.secure_sum is None:
        return OF_SILOS
    rounding = "silos train, clip, round and add noise as instructed"
    return (*_OF_DATA, rounding, assumptions.of_grid(mechanism))


def _published_sum(mechanism: NoisedSum, run: RunSummary) -> tuple[str, ...]:
    """Return the assumptions of a theorem that counts the noise of all silos in a sum."""
    if mechanism.secure_sum is None:
        return (run.sums.secure_sum or _NO_SECURE_SUM_OF_SILOS,)
    return (assumptions.SECURE_SUM, "silos do not collude with the server")


def _hidden_sum(mechanism: NoisedSum, run: RunSummary) -> tuple[str, ...]:
    """Return the assumptions under which the server sees sums and no single upload."""
    if mechanism.secure_sum is None:
        return (assumptions.WHOLE_UPLOADS, run.sums.secure_sum or _NO_SECURE_SUM_OF_SILOS)
    return (*assumptions.of_secure_sum(mechanism), _NOT_HELD)


@lru_cache(maxsize=256)
def uldp_closed_form(*, noise_multiplier: float, rounds: int, delta: float) -> float:
    """Return ε of Theorems 3 and 5, at the Rényi order α > 1 with the smallest ε.

    ε is Tα/(2σ²) + log((α-1)/α) - (log δ + log α)/(α-1), where T is ``rounds`` and σ is
    ``noise_multiplier``.
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

    |S| is the number of silos, C the clipping norm and σ the noise multiplier. All uploads together
    form a vector that one user moves by at most 2C√|S|. The provable guarantee therefore has a
    noise multiplier of σ/2, even against a server that sees each upload. With secure sums, the
    function returns the same guarantee for sums, whichever silos collude.

    ``mechanism`` is the result of `UldpNaive.mechanism`: it counts the noise of all silos together,
    σC|S|, and a sensitivity of 2C|S|.
    """
    assert mechanism.silos is not None
    rounds, delta = run.participations.rounds, mechanism.delta
    sigma = mechanism.noise_multiplier / mechanism.silos
    loss = gaussian_loss(mechanism.release.noise_multiplier, releases=rounds, delta=delta)
    source = f"noise multiplier {sigma:.4g}, {rounds} rounds, sensitivity 2C of every silo's update"
    claims = user_claims(
        delta,
        *_parties(mechanism),
        assumptions.of_noise(run.secure_noise),
        not_covered=run.not_covered,
    )
    theorem_3 = claims.published(
        AdversaryView.SUM_ONLY,
        uldp_closed_form(noise_multiplier=sigma, rounds=rounds, delta=delta),
        accountant="closed form (RDP)",
        source="Kato et al., Uldp-FL, Theorem 3",
        assumptions=_published_sum(mechanism, run),
        conditions=(
            Condition(
                "one user moves a silo's clipped update by at most C (what holds is 2C: "
                "without the user, training may end at the other side of the ball)",
                False,
            ),
        ),
    )
    uploads = claims.provable(AdversaryView.EACH_UPLOAD, loss, source)
    if mechanism.secure_sum is None:
        return [theorem_3, uploads]
    hidden = _hidden_sum(mechanism, run)
    return [theorem_3, claims.provable(AdversaryView.SUM_ONLY, loss, source, *hidden), uploads]


def uldp_avg_guarantees(mechanism: NoisedSum, run: RunSummary) -> list[Guarantee]:
    """Return the guarantees of ULDP-AVG and ULDP-SGD: Theorem 5, and a provable one for each view.

    * Released models: sampling of users amplifies, because the sample stays secret.
    * Sums only: the server knows the sample, so sampling amplifies nothing. If the sample is hidden
      from the server, sampling amplifies for sums and uploads as for released models.
    * Each upload: the noise of the sum has stddev σC. A silo's share of it has stddev σC/√|S|,
      where |S| is the number of silos, or σC/√m in a secure sum of at least m answers. With equal
      weights, a user moves each upload by C/|S| and all uploads together by C/√|S|, so ε is that of
      the sums. With weights by records, a user may have all its weight in one silo, and only that
      silo's share of the noise hides the user.

    The mechanism's units are users, and the silos add the noise. With secure sums, if the server
    draws the users, ``run.participations`` counts only the noise of honest silos. If silos draw the
    users, ``run.sums.hidden_draw`` is the text of `drawn_by_silos`.
    """
    claims = user_claims(
        mechanism.delta,
        *_parties(mechanism),
        "a user's weights depend on that user's records alone and sum to at most 1 over the silos",
        "a user's training uses that user's records and the model, and nothing of other users",
        _OF_BATCHES,
        assumptions.of_noise(run.secure_noise),
        *mechanism.assumptions,
        not_covered=run.not_covered,
        view_assumptions=run.sums.assumptions,
    )
    sums, uploads = _losses_to_server(mechanism, run)
    hidden_draw = () if run.sums.hidden_draw is None else (run.sums.hidden_draw,)
    return [
        _theorem_5(mechanism, run),
        claims.provable(
            AdversaryView.RELEASED_MODELS,
            *amplified_loss(mechanism, run.participations),
            _two_numbers(mechanism.release, run.participations.rounds, mechanism.delta),
            "the server follows the protocol and keeps sums and uploads to itself",
            *assumptions.of_others_noise(mechanism),
            *_hidden_sample(mechanism, run),
        ),
        claims.provable(
            AdversaryView.SUM_ONLY,
            *sums,
            *_hidden_sum(mechanism, run),
            *hidden_draw,
            relation=_AT_SERVER,
        ),
        claims.provable(AdversaryView.EACH_UPLOAD, *uploads, *hidden_draw, relation=_AT_SERVER),
    ]


def _hidden_sample(mechanism: NoisedSum, run: RunSummary) -> tuple[str, ...]:
    """Return the assumptions under which sampling amplifies; none if all users take part."""
    if isinstance(mechanism.sampling, FullParticipation):
        return ()
    is_secret = run.secure_cohorts or run.sums.hidden_draw is not None
    return (assumptions.HIDDEN_DRAW, assumptions.of_draw("sampled users", is_secret))


def _losses_to_server(mechanism: NoisedSum, run: RunSummary) -> _Losses:
    """Return a user's loss to a server that sees sums, and to a server that sees each upload."""
    masked, shares, divisor = mechanism.masked, mechanism.silos or 1, "|S|"
    if masked is not None:
        shares, divisor = masked.parameters.least_answers, "least answers"
    # For the accountant, one upload is a sum with less noise, so the same formulas hold.
    upload_noise = 1.0 if run.method.weighting == "equal" else 1 / math.sqrt(shares)
    losses = _losses_of_known_draw if run.sums.hidden_draw is None else _losses_of_hidden_draw
    sums, uploads = losses(mechanism, run, upload_noise)
    share = "" if upload_noise == 1 else f"/√{divisor}"
    together = f"all uploads together: noise multiplier σ{share}; {uploads.description}"
    if masked is not None:
        sums = DescribedLoss(sums.loss, f"{sums.description}, without the noise of colluders")
        together += ", if no mask hides them"
    return sums, DescribedLoss(uploads.loss, together)


def _losses_of_hidden_draw(mechanism: NoisedSum, run: RunSummary, upload_noise: float) -> _Losses:
    """Return the losses for sums and for uploads; sampling amplifies both.

    ``upload_noise`` is the noise of one upload as a fraction of the noise that the plan requires.
    """
    sum_noise = 1.0
    if mechanism.masked is not None and run.method.weighting != "equal":
        # A lying server can see a sum with the noise of honest silos only. With equal weights, a
        # sum of fewer silos also holds less of a user, so ε does not grow.
        sum_noise = math.sqrt(mechanism.masked.parameters.honest_noise)
    sums = amplified_loss(mechanism, run.participations, noise=sum_noise)
    return sums, amplified_loss(mechanism, run.participations, noise=upload_noise)


def _losses_of_known_draw(mechanism: NoisedSum, run: RunSummary, upload_noise: float) -> _Losses:
    """Return the losses as `_losses_of_hidden_draw` does; sampling amplifies nothing."""
    # Releases with the whole weight of the most exposed user; see `Participations`.
    in_sums = run.participations.in_sums
    in_uploads = float(max(run.participations.uploads.values(), default=0))
    if mechanism.masked is None:
        # The adversary may see refused uploads, too, and sums with too little noise count more.
        in_sums = in_uploads = max(in_sums, in_uploads)
    elif run.method.weighting == "equal":  # collusion costs nothing (see the top of this module)
        in_sums *= mechanism.masked.parameters.honest_noise
    sums = exposed_loss(mechanism, run.participations, in_sums)
    return sums, exposed_loss(mechanism, run.participations, in_uploads, noise=upload_noise)


def drawn_by_silos(mechanism: NoisedSum, rounds: int) -> str:
    """Return the assumption under which the server does not know the users that silos draw.

    The text also gives ε against a silo. A silo knows who is drawn, so sampling amplifies nothing
    against it, and it can subtract its own share of the noise. This ε counts every user as drawn in
    every round, because the server does not know the real draws.
    """
    assert mechanism.masked is not None  # `UldpAvg` checks it
    parameters = mechanism.masked.parameters
    others = parameters.honest_answers - 1
    of_others = mechanism.noise_multiplier * math.sqrt(others / parameters.least_answers)
    against_silo = math.inf
    if of_others > 0:
        against_silo = gaussian_loss(of_others, releases=rounds, delta=mechanism.delta).epsilon
    return (
        "silos draw users by a key that only they have, HMAC-SHA-256 and ChaCha20 act as random "
        "functions, and the server sends all silos the same request, and no request twice; every "
        "silo knows who is drawn: against a silo that sees the released models, ε of users' "
        f"records in the other silos is {epsilon_text(against_silo)}"
    )


@lru_cache(maxsize=256)
def _two_numbers(release: Release, rounds: int, delta: float) -> str:
    """Return a sentence about ε of a person who has two user numbers by mistake.

    The person counts as two users, drawn independently, each of whom moves the sum by at most C.
    The loss is that of a group of two records in DP-SGD.
    """
    epsilon = 0.0
    if rounds:
        steps = DpSgd(
            noise_multiplier=release.noise_multiplier,
            sampling_rate=release.sampling.sampling_rate,
            steps=rounds,
        )
        # Two users have twice the approximation error of one user, so its square counts four times.
        epsilon = with_approximation_error(
            lambda delta: group_loss(steps, group_size=2, delta=delta), {release: 4 * rounds}, delta
        ).epsilon
    return (
        "a person has one user number; a person whom silos know by two numbers, for example "
        f"because of a misspelt name, has ε = {epsilon_text(epsilon)}"
    )


def _theorem_5(mechanism: NoisedSum, run: RunSummary) -> Guarantee:
    sigma, delta = mechanism.noise_multiplier, mechanism.delta
    rounds = run.participations.rounds
    if isinstance(mechanism.sampling, FullParticipation):
        view, accountant, remark = AdversaryView.SUM_ONLY, "closed form (RDP)", ""
        epsilon = uldp_closed_form(noise_multiplier=sigma, rounds=rounds, delta=delta)
        of_view = _published_sum(mechanism, run)
    else:
        view, accountant, remark = AdversaryView.RELEASED_MODELS, "RDP", " and Remark 1"
        # The theorem covers no approximation error of a protocol, and no second upload of a user.
        release = replace(mechanism.release, noise_multiplier=sigma, approximation_error=0.0)
        epsilon = privacy_loss_of({release: rounds}, delta=delta, accountant="rdp").epsilon
        of_view = ("who was sampled stays secret",)
    return user_claims(delta).published(
        view,
        epsilon,
        accountant=accountant,
        source=f"Kato et al., Uldp-FL, Theorem 5{remark}",
        assumptions=(*of_view, *mechanism.assumptions),
    )
