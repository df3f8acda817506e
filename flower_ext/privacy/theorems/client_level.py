"""Provable guarantees for a client that uploads once a round, against each adversary."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.accountant import privacy_loss_of
from flower_ext.privacy.accounting.events import PrivacyLoss, Release
from flower_ext.privacy.accounting.gaussian import gaussian_loss
from flower_ext.privacy.accounting.sampling import (
    FixedSizeSampling,
    FullParticipation,
    SpacedSampling,
)
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.secure_sum import SecureSum
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems.claims import (
    DISCRETE,
    HIDDEN_DRAW,
    NO_SECURE_SUM,
    NOISE_OF_OTHERS,
    NONE_OF_THEM,
    ON_A_GRID,
    ONE_ANSWER,
    OUTLIVES,
    SECURE_SUM,
    SIGNED_SUM,
    WHAT_REVEALS_A_DRAW,
    WHOLE_UPLOADS,
    Claims,
    draw_assumption,
    noise_assumption,
)
from flower_ext.privacy.units import AdversaryView, NeighboringRelation

_ALWAYS = (
    "the population and the planned rounds are public",
    "clients' answers, and their absence, depend on no other client's data",
    OUTLIVES,
)
_HIDDEN_PLACES = f"the adversary does not know who was drawn: {WHAT_REVEALS_A_DRAW}"
_MEMORY = (
    "clients keep values between rounds (a personal head) or may keep them (a ClientApp of "
    "somebody else), but a client's upload does not reveal who was drawn before: not proven for "
    "cohorts of fixed size"
)


def client_level_guarantees(
    mechanism: NoisedSum, run: RunSummary, releases: Mapping[Release, int]
) -> list[Guarantee]:
    """Return the provable guarantees of a run of ``mechanism``, one for each adversary.

    * Released models: sampling amplifies, because cohorts stay secret. The cohort size is secret,
      too, unless it is fixed.
    * Sums only: the server knows who took part, so sampling amplifies nothing. The Gaussians of the
      rounds in which a client took part compose. Each counts only the noise that clients added,
      because the server knows the noise that it added itself.
    * Each upload: as for sums, but one client's share of the noise alone, σ/√cohort, protects it.

    If cohorts or noise were drawn from a seed, the assumptions say so. If clients keep values
    between rounds, a client's upload depends on the rounds in which it was drawn. With a fixed
    cohort size, the upload thus reveals something about other clients' draws. The amplification of
    single rounds does not cover this, so the guarantee assumes that it reveals nothing. Under
    Poisson sampling no such assumption is needed, because clients are drawn independently.

    Parameters
    ----------
    releases : Mapping[Release, int]
        All releases of the run with their counts, including answers to queries.

    Raises
    ------
    ValueError
        A unit is not a client, or may contribute to more than one upload.
    """
    if mechanism.silos is not None or mechanism.sensitivity != 1:
        raise InvalidValue(
            f"silos={mechanism.silos!r} and sensitivity={mechanism.sensitivity!r}: expected None "
            "and 1, because these guarantees hold only if each unit is a client with one upload"
        )
    participations = run.participations
    sums = mechanism.secure_sum
    if mechanism.noised_by_server:
        sharing: tuple[str, ...] = ()
        release: tuple[str, ...] = ()
    else:
        sharing = ("clients clip and add their share of noise",)
        release = (NONE_OF_THEM,) if sums else NOISE_OF_OTHERS
    claims = Claims(
        unit=mechanism.unit,
        relation=NeighboringRelation.REPLACE_SPECIAL,
        delta=mechanism.delta,
        assumptions=(
            *_ALWAYS,
            ON_A_GRID if sums is None else DISCRETE,
            noise_assumption(run.secure_noise),
            *sharing,
            *mechanism.assumptions,
        ),
        not_covered=run.not_covered,
    )
    # A server sees who took part, so a neighbouring data set replaces a unit's data by zeros.
    # Amplification is proved for the sampling's relation, which removes or replaces the unit.
    relation = mechanism.release.relation
    answers = "".join(f", {n} sums of {query}" for query, n in participations.answers.items())
    models = claims.provable(
        AdversaryView.RELEASED_MODELS,
        privacy_loss_of(releases, delta=mechanism.delta),
        f"{mechanism.sampling.describe()}, noise multiplier {mechanism.noise_multiplier:.4g}, "
        f"{participations.rounds} rounds{answers}"
        + (", sensitivity 2C" if relation.sensitivity_factor == 2 else ""),
        *release,
        *_hidden_cohorts(mechanism, run),
        "the server follows the protocol and keeps uploads to itself",
        relation=relation,
    )
    if mechanism.noised_by_server:
        return [models, *_nothing_before_noise(mechanism)]

    def most_exposed(weight: float) -> PrivacyLoss:
        """Return the largest loss of any client, against a server that sees who took part."""
        # The server knows the cohorts, so sampling amplifies nothing.
        return gaussian_loss(mechanism.noise_multiplier, releases=weight, delta=mechanism.delta)

    return [
        models,
        claims.provable(
            AdversaryView.SUM_ONLY,
            most_exposed(participations.in_sums),
            f"most exposed client: {participations.in_sums:.4g} sums' worth{answers}"
            + (", colluders' noise not counted" if sums else ""),
            *((WHOLE_UPLOADS, NO_SECURE_SUM) if sums is None else of_secure_sum(mechanism, sums)),
        ),
        claims.provable(
            AdversaryView.EACH_UPLOAD,
            most_exposed(participations.in_uploads),
            f"noise multiplier σ/√{'cohort' if sums is None else 'least answers'} of a "
            "single upload; most exposed client: "
            f"{participations.in_uploads:.4g} sums' worth{answers}"
            + (", if its masks fall" if sums else ""),
        ),
    ]


def _hidden_cohorts(mechanism: NoisedSum, run: RunSummary) -> tuple[str, ...]:
    """Return the assumptions under which sampling amplifies; empty if no draw is secret."""
    if isinstance(mechanism.sampling, FullParticipation | SpacedSampling):
        return ()
    drawn = draw_assumption("cohorts", run.secure_cohorts)
    if isinstance(mechanism.sampling, FixedSizeSampling):  # the cohort's size is public
        return (_HIDDEN_PLACES, drawn, *((_MEMORY,) if run.method.keeps_memory else ()))
    return (HIDDEN_DRAW, drawn)


def _nothing_before_noise(mechanism: NoisedSum) -> list[Guarantee]:
    """Return guarantees with infinite ε: the adversary sees sums or uploads without the noise."""
    claims = Claims(
        unit=mechanism.unit, relation=NeighboringRelation.REPLACE_SPECIAL, delta=mechanism.delta
    )
    loss = PrivacyLoss(epsilon=math.inf, delta=mechanism.delta, accountant="none")
    source = "the server adds the noise after it has seen the uploads"
    views = (AdversaryView.SUM_ONLY, AdversaryView.EACH_UPLOAD)
    return [claims.provable(view, loss, source) for view in views]


def of_secure_sum(mechanism: NoisedSum, sums: SecureSum) -> tuple[str, ...]:
    """Return the assumptions under which a secure sum protects against its own server."""
    parameters, clients = mechanism.sum_parameters, mechanism.num_clients
    drawn = "" if parameters.members == clients else ", all but surely (1 - 2^-40 a run)"
    return (
        SIGNED_SUM if sums.signed else SECURE_SUM,
        *(() if sums.resist_equivocation else (ONE_ANSWER,)),
        f"at most {sums.colluders_among(clients)} of {clients} clients collude with the server "
        f"({sums.colluding:.3g}), who were fixed before cohorts and neighbours were drawn at "
        f"random: then at most {parameters.colluders} of each cohort of {parameters.members} "
        f"collude{drawn}; each client has {parameters.neighbors} neighbours, of whom "
        f"{parameters.threshold} could unmask it",
        "the server sees who was asked, who took part and when, and sums of at least "
        f"{parameters.least_answers} uploads"
        + (f", of which {parameters.honest_answers} honest ones" if sums.signed else ""),
    )
