"""A builder of the guarantees of one run, and the losses that several guarantees share."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flower_ext.privacy.accounting.accountant import privacy_loss_of, with_approximation_error
from flower_ext.privacy.accounting.events import Counts, PrivacyLoss, Release
from flower_ext.privacy.accounting.gaussian import gaussian_loss
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit


class DescribedLoss(NamedTuple):
    """A privacy loss, and a description of how it arises, for a guarantee's ``source``."""

    loss: PrivacyLoss
    description: str


@dataclass(frozen=True, kw_only=True)
class Claims:
    """The fields that all guarantees of a run have in common.

    Parameters
    ----------
    unit, relation, delta
        As in `Guarantee`.
    assumptions : tuple of str
        Assumptions of every provable guarantee. A published guarantee has only the assumptions of
        its theorem.
    not_covered : Sequence[str]
        Values that leave the clients and that no provable guarantee covers. A published guarantee
        names them only if they are among its ``details``.
    view_assumptions : Mapping[AdversaryView, Sequence[str]]
        Further assumptions of every provable guarantee against each adversary.
    """

    unit: PrivacyUnit
    relation: NeighboringRelation
    delta: float
    assumptions: tuple[str, ...] = ()
    not_covered: Sequence[str] = ()
    view_assumptions: Mapping[AdversaryView, Sequence[str]] = field(default_factory=dict)

    def published(self, view: AdversaryView, epsilon: float, **details: Any) -> Guarantee:
        """Return the guarantee of a theorem as its paper states it.

        ``details`` are other fields of `Guarantee`.
        """
        return Guarantee(
            unit=self.unit,
            relation=self.relation,
            view=view,
            epsilon=epsilon,
            delta=self.delta,
            basis="published",
            **details,
        )

    def provable(
        self,
        view: AdversaryView,
        loss: PrivacyLoss,
        source: str,
        *assumptions: str,
        relation: NeighboringRelation | None = None,
        **details: Any,
    ) -> Guarantee:
        """Return a provable guarantee against one adversary.

        ``assumptions`` are added to the run's assumptions. By default, ``relation`` is the run's
        relation. ``details`` are other fields of `Guarantee`.
        """
        relation = relation or self.relation
        return Guarantee(
            unit=self.unit,
            relation=relation,
            view=view,
            epsilon=loss.epsilon,
            delta=self.delta,
            releases=_under(relation, loss.releases),
            basis="provable",
            accountant=loss.accountant,
            source=source,
            assumptions=(*self.assumptions, *assumptions, *self.view_assumptions.get(view, ())),
            not_covered=tuple(self.not_covered),
            **details,
        )


def _under(relation: NeighboringRelation, releases: Counts | None) -> Counts | None:
    """Return the releases restated under ``relation``, with the same loss.

    Return None if ``releases`` is None, or if a release has another relation and its sampling
    amplifies privacy. Amplification is proved only for the release's own relation.
    """
    if releases is None or any(
        release.relation is not relation and release.sampling.sampling_rate < 1
        for release, _ in releases
    ):
        return None
    return tuple(
        (release if release.relation is relation else release.under(relation), count)
        for release, count in releases
    )


def amplified_loss(
    mechanism: NoisedSum, participations: Participations, *, noise: float = 1.0
) -> DescribedLoss:
    """Return the loss to an adversary that does not know who was drawn.

    ``noise`` is the part of the noise, as a fraction of its standard deviation, that protects what
    the adversary sees.
    """
    seen: Counter[Release] = Counter()  # with less noise, two releases may be equal
    for release, count in mechanism.releases(participations).items():
        seen[release.with_noise(noise)] += count
    multiplier = mechanism.noise_multiplier * noise
    return DescribedLoss(
        privacy_loss_of(seen, delta=mechanism.delta),
        f"{mechanism.sampling.describe()}, noise multiplier {multiplier:.4g}, "
        f"{participations.rounds} rounds{_answers(participations)}"
        + (", sensitivity 2C" if mechanism.release.relation.sensitivity_factor == 2 else ""),
    )


def exposed_loss(
    mechanism: NoisedSum, participations: Participations, weight: float, *, noise: float = 1.0
) -> DescribedLoss:
    """Return the loss to an adversary that knows who was drawn.

    Sampling then amplifies nothing. ``weight`` belongs to the most exposed unit: the run reveals as
    much about this unit as ``weight`` sums, each with the unit's whole contribution and the whole
    noise. ``noise`` is as in `amplified_loss`.
    """
    release = mechanism.release.with_noise(noise)
    # A protocol's errors add up over all rounds, not only those of the most exposed unit.
    loss = with_approximation_error(
        lambda delta: gaussian_loss(release.noise_multiplier, releases=weight, delta=delta),
        {release: participations.rounds},
        mechanism.delta,
    )
    exposed = f"most exposed {mechanism.unit.value}: loss of {weight:.4g} sums with the whole noise"
    return DescribedLoss(loss, exposed + _answers(participations))


def _answers(participations: Participations) -> str:
    answers = participations.answers.items()
    return "".join(f", {n} sum{'s' if n > 1 else ''} of {query}" for query, n in answers)
