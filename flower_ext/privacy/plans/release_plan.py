"""The plan of client- and user-level privacy: a run releases one noised sum per round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.calibration import calibrate_noise_multiplier
from flower_ext.privacy.accounting.events import Release
from flower_ext.privacy.accounting.sampling import Sampling, SpacedSampling
from flower_ext.privacy.base_plan import PrivacyPlan
from flower_ext.privacy.mechanisms.adaptive_clipping import AdaptiveClipping
from flower_ext.privacy.mechanisms.correlated_noise import CorrelatedNoise, StrategyMatrix
from flower_ext.privacy.mechanisms.noised_sum import ReleaseTerms
from flower_ext.privacy.plans.release_mechanism import (
    AdaptiveRelease,
    ReleaseMechanism,
    SpacedRelease,
)
from flower_ext.privacy.run_summary import MethodTraits, RunSummary

_OF_CLIENTS = MethodTraits(name="a method of clients")


@dataclass(frozen=True, kw_only=True)
class ReleasePlan(ReleaseTerms, PrivacyPlan):
    """A plan in which each round releases one noised average of updates.

    The privacy unit is a client, or a user with records in several silos under a method of Uldp-FL.

    Guarantees
    ----------
    `mechanism` makes a `NoisedSum` from this plan; see its guarantees.

    Parameters
    ----------
    sampling : Sampling
        Draws the cohorts; the accounting assumes the same sampling.
    clipping_norm : float or AdaptiveClipping
        L2 bound C on one unit's whole update, or the rule by which C follows a quantile of the
        updates' norms.
    noise_multiplier : float
        σ: each round's sum carries the noise N(0, (σC)² I).
    rounds : int
        Planned number of releases.
    delta : float
        δ at which the run reports ε.
    relation : NeighboringRelation, optional
        By default the relation for which amplification by ``sampling`` is proved.
    noise_placement : {"client", "server"} or SecureSum
        Party that adds the noise. With ``"client"``, every client adds a share of the noise before
        it sends, and the server adds the shares of clients that do not answer. With ``"server"``,
        the server adds all of the noise. With a `SecureSum`, uploads are whole numbers, the server
        sees only their sum, and each client adds a share of discrete Gaussian noise. A round needs
        a least number of answers, whose shares together carry the whole noise; with fewer answers,
        the round is discarded. If units are clients, a `SecureSum` needs cohorts of a fixed size.
    correlation : CorrelatedNoise, optional
        Correlates the server's noise over rounds. It needs ``noise_placement="server"``, a fixed
        ``clipping_norm`` and a `SpacedSampling`. With a `SpacedSampling`, all rounds together are
        one Gaussian mechanism of multiplier ``noise_multiplier``, with or without correlation.
    queries : tuple of VectorQuery
        Further releases of a run, which the same ε covers: `SecureScores` for the scores of
        evaluations, or queries of your own. Each answer is a secure sum over all clients. If no
        query is answered in evaluations, clients report scores without noise, which no ε covers.

    Examples
    --------
    >>> from flower_ext.privacy import FixedSizeSampling, ReleasePlan
    >>> plan = ReleasePlan.for_target(
    ...     epsilon=2.0,
    ...     delta=1e-5,
    ...     sampling=FixedSizeSampling(2000, 100),
    ...     rounds=40,
    ...     clipping_norm=1.0,
    ...     noise_placement="server",
    ... )
    >>> round(plan.noise_multiplier, 1)
    3.3
    """

    correlation: CorrelatedNoise | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.sampling, SpacedSampling):
            if self.correlation is not None:
                raise InvalidValue(
                    f"correlation={self.correlation!r} with {self.sampling.describe()}: expected "
                    "SpacedSampling, because the bound on ε for correlated noise needs a limit on "
                    "each client's participations and a least number of rounds between them"
                )
            return
        if not self.noised_by_server:
            raise InvalidValue(
                f"noise_placement={self.noise_placement!r} with spaced sampling: expected "
                "'server', because later rounds subtract noise of earlier rounds, and would also "
                "subtract noise that a client did not add because it dropped out"
            )
        if isinstance(self.clipping_norm, AdaptiveClipping):
            raise InvalidValue(
                f"clipping_norm={self.clipping_norm!r} with spaced sampling: expected a number, "
                "because later rounds subtract noise of earlier rounds, which must have the same "
                "scale, and an adaptive norm changes the scale"
            )

    @classmethod
    def for_target(
        cls,
        *,
        epsilon: float,
        delta: float,
        sampling: Sampling,
        rounds: int,
        clipping_norm: float | AdaptiveClipping,
        **options: Any,
    ) -> ReleasePlan:
        """Return the plan with the least noise whose provable ε is at most ``epsilon``.

        If the options contain ``queries``, ε covers all rounds and all planned answers together.
        The method then chooses the least noise of the rounds; the noise of the queries is given.

        The ε holds for `AdversaryView.RELEASED_MODELS`, amplified by the sampling. See
        `client_level_guarantees` for other views.
        """
        terms = {
            "sampling": sampling,
            "clipping_norm": clipping_norm,
            "rounds": rounds,
            "delta": delta,
            **options,
        }
        answers: Mapping[Release, int] = {}
        if options.get("queries"):
            # Pass any noise and norm of the rounds: the answers' releases do not depend on them.
            known = {**terms, "clipping_norm": 1.0}
            answers = cls(noise_multiplier=1.0, **known).mechanism().planned_answers
        multiplier = calibrate_noise_multiplier(
            other_releases=answers,
            epsilon=epsilon,
            delta=delta,
            sampling=sampling,
            # Under spaced sampling, all rounds are one Gaussian mechanism.
            rounds=1 if isinstance(sampling, SpacedSampling) else rounds,
            relation=options.get("relation"),
        )
        return cls(noise_multiplier=multiplier, **terms)

    def describe(self) -> str:
        """Describe the plan in one line, for the log."""
        sums, norm = self.secure_sum, self.clipping_norm
        clipped = norm.describe() if isinstance(norm, AdaptiveClipping) else f"{norm:g}"
        by = "client" if sums else self.noise_placement
        return " · ".join(
            [
                f"{self.sampling.describe()} · clipping norm {clipped}, noise "
                f"multiplier {self.noise_multiplier:.4g} added by the {by}",
                *([] if sums is None else [sums.describe()]),
                *([] if self.correlation is None else [self.correlation.describe()]),
                *(query.describe() for query in self.queries),
            ]
        )

    def num_units(self, run: RunSummary) -> int:
        """Return the size of the population from which units are drawn."""
        return self.sampling.population

    def mechanism(self, method: MethodTraits = _OF_CLIENTS) -> ReleaseMechanism:
        """Return the mechanism of a method's rounds; by default, of a method with clients as units.

        Refuse a method that needs single updates, or a secure sum of too few members.
        """
        if method.needs_each_update:
            raise InvalidValue(
                f"plan: the server of {method.name} needs each client's update, which a "
                "ReleasePlan hides; expected NonPrivatePlan, or PerturbationPlan or "
                "RecordLevelPlan for record-level privacy"
            )
        silos, norm = method.num_silos, self.clipping_norm
        if isinstance(self.sampling, SpacedSampling):
            if silos is not None or method.bounds_units:
                raise InvalidValue(
                    f"sampling={self.sampling!r} with {method.name}: expected a different kind of "
                    "sampling, because a user may take part through several silos, and "
                    "SpacedSampling needs participations that are counted in all silos together"
                )
            correlation, limits = self.correlation, self.sampling.limits
            independent = StrategyMatrix()
            matrix = correlation.matrix(self.rounds, **limits) if correlation else independent
            return SpacedRelease(strategy=matrix, **self.terms())
        if not isinstance(norm, AdaptiveClipping):
            return ReleaseMechanism(silos=silos, **self.terms())
        if silos is not None and not method.bounds_units:
            raise InvalidValue(
                f"clipping_norm={norm!r} with {method.name}: expected a number, because "
                "AdaptiveClipping needs a method whose silos clip each user's update, such as "
                "UldpAvg"
            )
        terms = self.terms()
        del terms["clipping_norm"]  # the mechanism computes its bound from each norm
        return AdaptiveRelease(clipping=norm, adaptive_norm=norm.initial_norm, silos=silos, **terms)
