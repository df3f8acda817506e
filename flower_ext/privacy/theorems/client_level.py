"""Provable guarantees of a client that uploads once a round, against each adversary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.accountant import privacy_loss_of
from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.accounting.gaussian import participations_loss
from flower_ext.privacy.accounting.loss import PrivacyLoss
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.accounting.sampling import FixedSizeSampling, FullParticipation
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.secure_sum import SecureSum
from flower_ext.privacy.theorems.assumptions import (
    DISCRETE,
    HIDDEN_DRAW,
    NO_SECURE_SUM,
    NOISE_OF_OTHERS,
    NONE_OF_THEM,
    ON_A_GRID,
    ONE_ANSWER,
    OUTLIVES,
    SECURE_SUM,
    TELLS,
    WHOLE_UPLOADS,
    noise_assumption,
)
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit

_ALWAYS = (
    "the population and the planned rounds are public",
    "clients' answers, and their absence, depend on no other client's data",
    OUTLIVES,
)
_HIDDEN_PLACES = f"the adversary does not know who was drawn: {TELLS}"
_DRAWN = "cohorts are drawn by a cryptographic generator keyed by the operating system"
_MEMORY = (
    "clients keep memory (a personal head), or may (a ClientApp of somebody else), and what "
    "one sends does not reveal who was drawn before: not proven for cohorts of fixed size"
)
_DRAWN_BY_SEED = "SIMULATION: cohorts are reproducible from the seed, which the clients receive"


def client_level_guarantees(
    plan: NoisedSum,
    participations: Participations,
    *,
    releases: Mapping[Release, int] | None = None,
    secure_noise: bool = True,
    secure_cohorts: bool = True,
    not_covered: Sequence[str] = (),
    memory: bool = False,
) -> list[Guarantee]:
    """Return the provable guarantees of a run of ``plan``, one for each adversary.

    * Released models: amplified by sampling, because it stays secret who took part, and how many
      did unless their number is fixed.
    * Sums only: no amplification. Gaussian composition over the realised participations, each
      with the noise that clients really supplied; the server knows any noise that it added.
    * Each upload: one client's share of the noise alone, σ/√cohort.

    A guarantee says so if cohorts or noise were drawn from a seed (``secure_cohorts``,
    ``secure_noise``). If clients keep memory between rounds (``memory``), what they send depends
    on the rounds in which they were drawn. With a fixed cohort size that reveals something about
    who else was drawn, which the amplification of single rounds does not cover; the guarantee
    then lists it as an assumption. Under Poisson sampling clients are drawn independently.
    ``releases`` are all releases of the run, evaluations included; by default its rounds.

    Raises
    ------
    ValueError
        The plan does not have clients as units with one upload each (see `check_client_plan`).
    """
    check_client_plan(plan)
    sums = plan.secure_aggregation
    common = (*_ALWAYS, ON_A_GRID if sums is None else DISCRETE, noise_assumption(secure_noise))
    by_clients = plan.noise_placement == "client"
    honest_clients = ("clients clip and add their share of noise",) if by_clients else ()
    relation = plan.release.relation
    made = {plan.release: participations.rounds} if releases is None else releases
    loss = privacy_loss_of(made, delta=plan.delta)
    scored = f", {participations.evaluations} evaluations" if participations.evaluations else ""
    hidden: tuple[str, ...] = ()
    if not isinstance(plan.sampling, FullParticipation):
        fixed = isinstance(plan.sampling, FixedSizeSampling)  # how many is public
        hidden = (
            _HIDDEN_PLACES if fixed else HIDDEN_DRAW,
            _DRAWN if secure_cohorts else _DRAWN_BY_SEED,
            *((_MEMORY,) if fixed and memory else ()),
        )
    models = _guarantee(
        plan,
        AdversaryView.RELEASED_MODELS,
        loss,
        relation=relation,
        source=f"{plan.sampling.describe()}, noise multiplier {plan.noise_multiplier:.4g}, "
        f"{participations.rounds} rounds"
        + scored
        + (", sensitivity 2C" if relation.sensitivity_factor == 2 else ""),
        assumptions=(
            *common,
            *honest_clients,
            *((NONE_OF_THEM,) if sums else NOISE_OF_OTHERS if by_clients else ()),
            *hidden,
            "the server follows the protocol and keeps uploads to itself",
        ),
        not_covered=tuple(not_covered),
    )
    if not by_clients:
        nothing = PrivacyLoss(epsilon=math.inf, delta=plan.delta, accountant="none")
        source = "the server adds the noise after it has seen the uploads"
        views = (AdversaryView.SUM_ONLY, AdversaryView.EACH_UPLOAD)
        return [models, *(_guarantee(plan, view, nothing, source=source) for view in views)]

    def seen(weight: float) -> PrivacyLoss:
        """Return the loss of the most exposed client to a server that sees who took part."""
        return participations_loss(
            noise_multiplier=plan.noise_multiplier,
            participations=weight,
            relation=NeighboringRelation.REPLACE_SPECIAL,
            delta=plan.delta,
        )

    return [
        models,
        _guarantee(
            plan,
            AdversaryView.SUM_ONLY,
            seen(participations.in_sums),
            source=f"most exposed client: {participations.in_sums:.4g} sums' worth{scored}"
            + (", colluders' noise not counted" if sums else ""),
            assumptions=(
                *common,
                *honest_clients,
                *((WHOLE_UPLOADS, NO_SECURE_SUM) if sums is None else of_secure_sum(plan, sums)),
            ),
            not_covered=tuple(not_covered),
        ),
        _guarantee(
            plan,
            AdversaryView.EACH_UPLOAD,
            seen(participations.in_uploads),
            source=f"noise multiplier σ/√{'cohort' if sums is None else 'least answers'} of a "
            "single upload; most exposed client: "
            f"{participations.in_uploads:.4g} sums' worth{scored}"
            + (", if its masks fall" if sums else ""),
            assumptions=(*common, *honest_clients),
            not_covered=tuple(not_covered),
        ),
    ]


def of_secure_sum(plan: NoisedSum, sums: SecureSum) -> tuple[str, ...]:
    """Return the assumptions about a secure sum, for a server that sees what the sum shows."""
    found, clients = plan.sum_parameters, plan.num_clients
    drawn = "" if found.members == clients else ", all but surely (1 - 2^-40 a run)"
    return (
        SECURE_SUM,
        *(() if sums.resist_equivocation else (ONE_ANSWER,)),
        f"at most {sums.colluders_among(clients)} of {clients} clients collude with the server "
        f"({sums.colluding:.3g}), who were fixed before cohorts and neighbours were drawn at "
        f"random: then at most {found.colluders} of each cohort of {found.members} collude{drawn}; "
        f"each client has {found.neighbors} neighbours, of whom {found.threshold} could unmask it",
        "the server sees who was asked, who took part and when, and sums of at least "
        f"{found.least_answers} uploads",
    )


def check_client_plan(plan: NoisedSum) -> None:
    """Refuse a plan whose units are not clients, or whose clients make several uploads.

    Raises
    ------
    ValueError
        The message names the setting.
    """
    if plan.unit is not PrivacyUnit.CLIENT:
        raise InvalidValue(
            f"unit={plan.unit.value!r} of the plan: expected 'client', because it bounds each "
            "client's update as a whole"
        )
    if plan.sensitivity != 1:
        raise InvalidValue(
            f"sensitivity={plan.sensitivity!r} of the plan: expected 1, as a client has one upload"
        )


def _guarantee(
    plan: NoisedSum,
    view: AdversaryView,
    loss: PrivacyLoss,
    *,
    relation: NeighboringRelation = NeighboringRelation.REPLACE_SPECIAL,
    **more: Any,
) -> Guarantee:
    return Guarantee(
        unit=plan.unit,
        relation=relation,
        view=view,
        epsilon=loss.epsilon,
        delta=plan.delta,
        basis="provable",
        accountant=loss.accountant,
        **more,
    )
