"""Provable guarantees for a client that uploads once a round, against each adversary."""

from dataclasses import replace

from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.events import PrivacyLoss
from flower_ext.privacy.accounting.sampling import (
    FixedSizeSampling,
    FullParticipation,
    SpacedSampling,
)
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems import assumptions
from flower_ext.privacy.theorems.claims import Claims, amplified_loss, exposed_loss
from flower_ext.privacy.units import AdversaryView, NeighboringRelation

_MEMORY = (
    "clients keep values between rounds (a personal head) or may keep them (a ClientApp of "
    "somebody else), but a client's upload does not reveal who was drawn before; this is not "
    "proven for cohorts of a fixed size"
)


def client_level_guarantees(mechanism: NoisedSum, run: RunSummary) -> list[Guarantee]:
    """Return the provable guarantees of a run of ``mechanism``, one for each adversary's view.

    * Released models: the adversary sees only the models. Sampling amplifies, because cohorts stay
      secret. The size of a cohort is secret, too, unless the sampling fixes it.
    * Sums only: the server knows who took part, so sampling amplifies nothing. The Gaussians of the
      rounds in which a client took part compose. Each Gaussian counts only the noise that clients
      added, because the server knows the noise that it added itself.
    * Each upload: as for sums, but with the client's own share of the noise only. If the sum has
      the noise multiplier σ, a share has σ/√cohort, or σ/√m in a secure sum of at least m answers.

    If the server adds the noise, the last two guarantees have an infinite ε.

    If cohorts or noise were drawn from a seed, the assumptions say so. If clients keep values
    between rounds, a client's upload depends on the rounds in which it was drawn. With a fixed
    cohort size, the upload thus reveals something about other clients' draws. The amplification of
    single rounds does not cover this, so the guarantee assumes that uploads reveal nothing about
    draws. Under Poisson sampling no such assumption is needed, because clients are drawn
    independently.

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
    by_server, participations = mechanism.noised_by_server, run.participations
    claims = Claims(
        unit=mechanism.unit,
        relation=NeighboringRelation.REPLACE_SPECIAL,
        delta=mechanism.delta,
        assumptions=(
            "the population and the planned rounds are public",
            "clients' answers, and their absence, depend on no other client's data",
            assumptions.OUTLIVES,
            assumptions.of_grid(mechanism),
            assumptions.of_noise(run.secure_noise),
            *(() if by_server else ("clients clip and add their share of noise",)),
            *mechanism.assumptions,
        ),
        not_covered=run.not_covered,
        view_assumptions=run.sums.assumptions,
    )
    # A server sees who took part, so a neighbouring data set replaces a unit's data by zeros.
    # Amplification is proved for the sampling's relation, which removes or replaces the unit.
    models = claims.provable(
        AdversaryView.RELEASED_MODELS,
        *amplified_loss(mechanism, participations),
        *(() if by_server else assumptions.of_others_noise(mechanism)),
        *_hidden_cohorts(mechanism, run),
        "the server follows the protocol and keeps uploads to itself",
        relation=mechanism.release.relation,
    )
    return [models, *_against_server(mechanism, run, claims)]


def _against_server(mechanism: NoisedSum, run: RunSummary, claims: Claims) -> list[Guarantee]:
    """Return the guarantees against a server that sees sums, and one that sees each upload."""
    if mechanism.noised_by_server:
        nothing = replace(claims, assumptions=(), not_covered=(), view_assumptions={})
        loss = PrivacyLoss.unbounded(mechanism.delta)
        source = "the server adds the noise after it has seen the uploads"
        views = (AdversaryView.SUM_ONLY, AdversaryView.EACH_UPLOAD)
        return [nothing.provable(view, loss, source) for view in views]
    participations = run.participations
    sums = exposed_loss(mechanism, participations, participations.in_sums)
    uploads = exposed_loss(mechanism, participations, participations.in_uploads)
    seen_sums = run.sums.secure_sum or assumptions.NO_SECURE_SUM
    hidden: tuple[str, ...] = (assumptions.WHOLE_UPLOADS, seen_sums)
    divisor, of_sums, of_uploads = "cohort", "", ""
    if mechanism.secure_sum is not None:
        hidden = assumptions.of_secure_sum(mechanism)
        divisor, of_sums = "least answers", ", without the noise of colluders"
        of_uploads = ", if no mask hides it"
    single = f"noise multiplier σ/√{divisor} of a single upload; {uploads.description}{of_uploads}"
    return [
        claims.provable(AdversaryView.SUM_ONLY, sums.loss, sums.description + of_sums, *hidden),
        claims.provable(AdversaryView.EACH_UPLOAD, uploads.loss, single),
    ]


def _hidden_cohorts(mechanism: NoisedSum, run: RunSummary) -> tuple[str, ...]:
    """Return the assumptions under which sampling amplifies.

    The result is empty if nothing is drawn in secret: all clients take part, or they take turns.
    """
    if isinstance(mechanism.sampling, FullParticipation | SpacedSampling):
        return ()
    drawn = assumptions.of_draw("cohorts", run.secure_cohorts)
    if not isinstance(mechanism.sampling, FixedSizeSampling):
        return (assumptions.HIDDEN_DRAW, drawn)
    # The size of a cohort is public.
    hidden = f"the adversary does not know who was drawn: {assumptions.WHAT_REVEALS_A_DRAW}"
    return (hidden, drawn, *((_MEMORY,) if run.method.keeps_memory else ()))
