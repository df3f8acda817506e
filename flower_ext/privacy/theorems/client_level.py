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
from flower_ext.privacy.mechanisms.masked_noised_sum import MaskedNoisedSum
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems.claims import (
    DISCRETE,
    HIDDEN_DRAW,
    NO_SECURE_SUM,
    NONE_OF_THEM,
    ON_A_GRID,
    ONE_ANSWER,
    OUTLIVES,
    SECURE_SUM,
    SIGNED_SUM,
    WHAT_REVEALS_A_DRAW,
    WHOLE_UPLOADS,
    Bound,
    Claims,
    SumAssumptions,
    draw_assumption,
    noise_assumption,
)
from flower_ext.privacy.units import AdversaryView, NeighboringRelation

_ALWAYS = (
    "the population and the planned rounds are public",
    "clients' answers, and their absence, depend on no other client's data",
    OUTLIVES,
)
_SHARES = "clients clip and add their share of noise"
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

    * Released models: the adversary sees only the models. Sampling amplifies, because cohorts stay
      secret. The size of a cohort is secret, too, unless the sampling fixes it.
    * Sums only: the server knows who took part, so sampling amplifies nothing. The Gaussians of the
      rounds in which a client took part compose. Each Gaussian counts only the noise that clients
      added, because the server knows the noise that it added itself.
    * Each upload: as for sums, but only the client's own share of the noise protects its upload.
      This share has the noise multiplier σ/√cohort.

    If the server adds the noise, the last two guarantees have an infinite ε.

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
    sums, participations = _sums_of(mechanism), run.participations
    claims = Claims(
        unit=mechanism.unit,
        relation=NeighboringRelation.REPLACE_SPECIAL,
        delta=mechanism.delta,
        assumptions=(
            *_ALWAYS,
            sums.noise,
            noise_assumption(run.secure_noise),
            *sums.parties,
            *mechanism.assumptions,
        ),
        not_covered=run.not_covered,
    )
    # A server sees who took part, so a neighbouring data set replaces a unit's data by zeros.
    # Amplification is proved for the sampling's relation, which removes or replaces the unit.
    relation = mechanism.release.relation
    answers = "".join(f", {n} sums of {query}" for query, n in participations.answers.items())
    models = Bound(
        AdversaryView.RELEASED_MODELS,
        privacy_loss_of(releases, delta=mechanism.delta),
        f"{mechanism.sampling.describe()}, noise multiplier {mechanism.noise_multiplier:.4g}, "
        f"{participations.rounds} rounds{answers}"
        + (", sensitivity 2C" if relation.sensitivity_factor == 2 else ""),
        (
            *sums.models,
            *_hidden_cohorts(mechanism, run),
            "the server follows the protocol and keeps uploads to itself",
        ),
        relation,
    )
    if mechanism.noised_by_server:
        return [*claims.provable(models), *_nothing_before_noise(mechanism)]

    def most_exposed(weight: float) -> PrivacyLoss:
        """Return the loss of a client with ``weight`` releases; the server sees who took part."""
        # The server knows the cohorts, so sampling amplifies nothing.
        return gaussian_loss(mechanism.noise_multiplier, releases=weight, delta=mechanism.delta)

    in_sums, in_uploads = participations.in_sums, participations.in_uploads
    return claims.provable(
        models,
        Bound(
            AdversaryView.SUM_ONLY,
            most_exposed(in_sums),
            f"most exposed client: {in_sums:.4g} sums' worth{answers}{sums.on_sums}",
            sums.sums,
        ),
        Bound(
            AdversaryView.EACH_UPLOAD,
            most_exposed(in_uploads),
            f"noise multiplier σ/√{sums.share} of a single upload; most exposed client: "
            f"{in_uploads:.4g} sums' worth{answers}{sums.on_uploads}",
        ),
    )


def _sums_of(mechanism: NoisedSum) -> SumAssumptions:
    """Return the assumptions about the sums, which depend on who adds the noise."""
    if mechanism.noised_by_server:
        return SumAssumptions(noise=ON_A_GRID, models=())
    if not isinstance(mechanism, MaskedNoisedSum):
        return SumAssumptions(
            noise=ON_A_GRID, parties=(_SHARES,), sums=(WHOLE_UPLOADS, NO_SECURE_SUM), share="cohort"
        )
    return SumAssumptions(
        noise=DISCRETE,
        parties=(_SHARES,),
        models=(NONE_OF_THEM,),
        sums=of_secure_sum(mechanism),
        share="least answers",
        on_sums=", colluders' noise not counted",
        on_uploads=", if its masks fall",
    )


def _hidden_cohorts(mechanism: NoisedSum, run: RunSummary) -> tuple[str, ...]:
    """Return the assumptions under which sampling amplifies.

    The result is empty if nothing is drawn in secret: all clients take part, or rounds are spaced.
    """
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
    return claims.provable(*(Bound(view, loss, source) for view in views))


def of_secure_sum(mechanism: MaskedNoisedSum) -> tuple[str, ...]:
    """Return the assumptions under which a secure sum hides single uploads from the server."""
    sums, parameters = mechanism.secure_sum, mechanism.sum_parameters
    clients = mechanism.num_clients
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
