"""What ε means: every guarantee names its unit, relation, view, δ, accountant and assumptions.

Published theorems are functions here, next to what is provable for the same run. Where the two
disagree, reports print both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from flower_ext.privacy.accounting import participations_loss, privacy_loss_of
from flower_ext.privacy.noise import IMPROBABLE
from flower_ext.privacy.participations import Participations
from flower_ext.privacy.release_plan import ReleasePlan
from flower_ext.privacy.sampling import FixedSizeSampling, FullParticipation
from flower_ext.privacy.units import AdversaryView, NeighboringRelation, PrivacyUnit

Basis = Literal["published", "provable"]


def noise_assumption(secure: bool) -> str:
    """What a guarantee assumes of its noise: a cryptographic generator, or a seed."""
    if secure:
        return "noise from a cryptographic generator keyed by the operating system"
    return "SIMULATION: noise is reproducible from the seed, which clients are told"


ON_A_GRID = (
    "noise is rounded to a public grid with what it is added to, and the generator's Gaussian is "
    "exact to the grid's resolution"
)
"""What is assumed of Gaussian noise in floating point (see `privacy.noise`)."""
WHOLE_UPLOADS = "uploads are of single precision or wider, in which they add up on the grid"
"""What is assumed where sums are protected by noise that their parts carry."""
LOADS = "no single record keeps a client from loading its data (Task.data)"
"""The assumption where one record must not show in whether its client answers."""


def epsilon_text(epsilon: float) -> str:
    """ε with three significant digits, rounded up: what is printed is never less than was spent."""
    if math.isinf(epsilon):
        return "none"
    return _rounded_up(epsilon)


_LARGE_DELTA = 1e-3
"""Above it a guarantee says that δ is large, as 1/N is for few clients."""


def _rounded_up(value: float) -> str:
    if value == 0:
        return "0"
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    # The guard keeps 2.0000000000000004 from becoming 2.01.
    return f"{math.ceil(value / step - 1e-6) * step:.3g}"


@dataclass(frozen=True)
class Condition:
    """A precondition of a theorem and whether this run meets it."""

    text: str
    holds: bool


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """An ε with everything it needs to mean something.

    ``epsilon`` is infinite where nothing is promised.
    """

    unit: PrivacyUnit
    relation: NeighboringRelation
    view: AdversaryView
    epsilon: float
    delta: float
    basis: Basis
    accountant: str
    source: str
    assumptions: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()

    @property
    def conditions_hold(self) -> bool:
        """Whether every precondition is met."""
        return all(condition.holds for condition in self.conditions)

    def statement(self) -> str:
        """The guarantee as one paragraph."""
        if math.isinf(self.epsilon):
            promise = "No (ε, δ) is promised"
        else:
            promise = f"ε = {epsilon_text(self.epsilon)} at δ = {_rounded_up(self.delta)}"
        parts = [
            f"{promise} for one {self.unit.value} under the relation {self.relation.value}, "
            f"against an adversary who sees {_SEES[self.view]} "
            f"({self.basis}; {self.accountant}; {self.source})."
        ]
        if self.delta > _LARGE_DELTA and math.isfinite(self.epsilon):
            parts.append(
                f"This δ is large: with that probability all of one {self.unit.value} may show; "
                f"usual is far below 1 / number of {self.unit.value}s."
            )
        failed = [condition.text for condition in self.conditions if not condition.holds]
        if failed:
            parts.append("Conditions NOT met: " + "; ".join(failed) + ".")
        if self.assumptions:
            parts.append("Assumes: " + "; ".join(self.assumptions) + ".")
        if self.not_covered:
            parts.append("Not covered: " + "; ".join(self.not_covered) + ".")
        return " ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; an infinite ε becomes null."""
        facts = asdict(self)
        facts["epsilon"] = None if math.isinf(self.epsilon) else self.epsilon
        return {name: list(v) if isinstance(v, tuple) else v for name, v in facts.items()}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Guarantee:
        """A guarantee from its JSON form."""
        known = {field.name for field in fields(cls)}
        if unknown := set(facts) - known:
            raise ValueError(f"unknown fields {sorted(unknown)} in a guarantee")
        values = dict(facts)
        return cls(
            **{
                **values,
                "unit": PrivacyUnit(values["unit"]),
                "relation": NeighboringRelation(values["relation"]),
                "view": AdversaryView(values["view"]),
                "epsilon": math.inf if values["epsilon"] is None else float(values["epsilon"]),
                "assumptions": tuple(values.get("assumptions", ())),
                "not_covered": tuple(values.get("not_covered", ())),
                "conditions": tuple(Condition(**c) for c in values.get("conditions", ())),
            }
        )


_SEES = {
    AdversaryView.EACH_UPLOAD: "every upload and who sent it",
    AdversaryView.SUM_ONLY: "each round's sum and who took part",
    AdversaryView.RELEASED_MODELS: "the released models, not who took part",
}

# DP²-FedSAM, Theorem 2 -------------------------------------------------------------------------


def dp2_fedsam_theorem2(
    *, noise_multiplier: float, sampling_rate: float, rounds: int, delta: float
) -> Guarantee:
    """Theorem 2 of DP²-FedSAM, as published.

    σ² ≥ 7 r² T (ε + 2 ln(1/δ)) / ε², solved for the smallest ε. Its proof takes the sub-sampled
    Gaussian's closed form (its Lemma 4), whose two conditions are checked at the proof's order
    α = 1 + 2 ln(1/δ)/ε. The paper prints the second with the sensitivity C inside; noise here is
    measured in multiples of C, so the factor is 1.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """
    _check_theorem2(sampling_rate, rounds, delta)
    if not 0 < noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier={noise_multiplier!r}: expected a finite number > 0")
    variance, log_inverse = noise_multiplier**2, math.log(1 / delta)
    linear = 7 * sampling_rate**2 * rounds
    epsilon = (linear + math.sqrt(linear**2 + 8 * variance * linear * log_inverse)) / (2 * variance)
    order = 1 + 2 * log_inverse / epsilon
    ratio = sampling_rate * order * (1 + variance)
    largest_order = 1 + (2 / 3) * variance * math.log(1 / ratio)
    return Guarantee(
        unit=PrivacyUnit.CLIENT,
        relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        view=AdversaryView.EACH_UPLOAD,
        epsilon=epsilon,
        delta=delta,
        basis="published",
        accountant="closed form (RDP)",
        source="Zhang, Guo, Gong, DP²-FedSAM, Theorem 2",
        conditions=(
            Condition(f"σ² ≥ 0.7 (σ² = {variance:.4g})", variance >= 0.7),
            Condition(
                f"ε < 2 ln(1/δ) ({epsilon:.4g} against {2 * log_inverse:.4g})",
                epsilon < 2 * log_inverse,
            ),
            Condition(
                f"α ≤ 1 + (2/3) σ² ln(1/(r α (1 + σ²))) (α = {order:.4g}, "
                f"bound {largest_order:.4g})",
                order <= largest_order,
            ),
            Condition(
                "sampling and relation match: the theorem samples a fixed number of clients "
                "without replacement but takes the sensitivity C of adding or removing one "
                "(replacing one moves the sum by 2C)",
                False,
            ),
            Condition(
                "noise matches the adversary: the paper's server sees single uploads, each with "
                "variance σ²C²/(rN), but the proof counts the noise σ²C² of their sum",
                False,
            ),
        ),
    )


def dp2_fedsam_theorem2_noise_multiplier(
    *, epsilon: float, delta: float, sampling_rate: float, rounds: int
) -> float:
    """Smallest σ that Theorem 2 of DP²-FedSAM asks for, as published."""
    _check_theorem2(sampling_rate, rounds, delta)
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon!r}: expected a finite number > 0")
    needed = epsilon + 2 * math.log(1 / delta)
    return math.sqrt(7 * sampling_rate**2 * rounds * needed) / epsilon


def theorem2_of_plan(plan: ReleasePlan, rounds: int) -> Guarantee:
    """`dp2_fedsam_theorem2` for a plan, after ``rounds`` rounds."""
    return dp2_fedsam_theorem2(
        noise_multiplier=plan.noise_multiplier,
        sampling_rate=plan.sampling.sampling_rate,
        rounds=rounds,
        delta=plan.delta,
    )


def _check_theorem2(sampling_rate: float, rounds: int, delta: float) -> None:
    if not 0 < sampling_rate <= 1:
        raise ValueError(f"sampling_rate={sampling_rate!r}: expected a number in (0, 1]")
    if rounds < 1:
        raise ValueError(f"rounds={rounds!r}: expected an integer >= 1")
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta!r}: expected a number in (0, 1)")


# What is provable for a run of a plan ----------------------------------------------------------

_ALWAYS = (
    "the population and the planned rounds are public",
    "clients' answers, and their absence, depend on no other client's data",
    ON_A_GRID,
)
_TELLS = (
    "the server's log and all of the run directory but the model tell it (metrics.jsonl, "
    "missing.jsonl, ledger.jsonl, guarantee.json, clients.csv, checkpoints, report and figures) "
    "and stay with the server"
)
_HIDDEN_PLACES = f"who was drawn is not known to the adversary: {_TELLS}"
HIDDEN_DRAW = (
    "neither who was drawn nor how many is known to the adversary: who is asked learns how many, "
    f"and {_TELLS}"
)
NOISE_OF_OTHERS = (
    WHOLE_UPLOADS,
    "the adversary is none of those who add noise: each could take its own share off",
    f"no honest upload is refused for its norm: each is with probability {IMPROBABLE:g} at most, "
    "which δ does not count",
)
"""What is assumed of released models where a server adds up noise that others made."""
_DRAWN = "cohorts are drawn by a cryptographic generator keyed by the operating system"
_MEMORY = (
    "clients remember something (a personal head), and what one sends does not tell who was drawn "
    "before: not proven for cohorts of fixed size"
)
_DRAWN_BY_SEED = "SIMULATION: cohorts are reproducible from the seed, which clients are told"


def client_level_guarantees(
    plan: ReleasePlan,
    participations: Participations,
    *,
    secure_noise: bool = True,
    secure_cohorts: bool = True,
    not_covered: Sequence[str] = (),
    memory: bool = False,
) -> list[Guarantee]:
    """What is provable against each adversary for a run of ``plan``, one guarantee a view.

    Cohorts and noise drawn from a seed (``secure_cohorts``, ``secure_noise``) are named as such.
    Where clients remember something between rounds (``memory``), what they send depends on the
    rounds that they were drawn in. With a fixed cohort size these tell something of who else was
    drawn, which the amplification of each round by itself does not see: it is then assumed not to
    matter. Under Poisson sampling clients are drawn independently.

    * Released models: amplified by sampling, since who took part stays secret, and how many unless
      their number is fixed.
    * Sums only: no amplification; Gaussian composition over the realised participations, each
      with the noise that clients really supplied (the server knows what it topped up itself).
    * Each upload: one client's share of the noise alone, σ/√cohort.

    Raises
    ------
    ValueError
        The plan is not one of clients with one upload each (see `check_client_plan`).
    """
    check_client_plan(plan)
    common = (*_ALWAYS, noise_assumption(secure_noise))
    by_clients = plan.noise_placement == "client"
    honest_clients = ("clients clip and add their share of noise",) if by_clients else ()
    relation = plan.release.relation
    loss = privacy_loss_of({plan.release: participations.rounds}, delta=plan.delta)
    hidden: tuple[str, ...] = ()
    if not isinstance(plan.sampling, FullParticipation):
        fixed = isinstance(plan.sampling, FixedSizeSampling)  # how many is public
        hidden = (
            _HIDDEN_PLACES if fixed else HIDDEN_DRAW,
            _DRAWN if secure_cohorts else _DRAWN_BY_SEED,
            *((_MEMORY,) if fixed and memory else ()),
        )
    models = Guarantee(
        unit=plan.unit,
        relation=relation,
        view=AdversaryView.RELEASED_MODELS,
        epsilon=loss.epsilon,
        delta=plan.delta,
        basis="provable",
        accountant=loss.accountant,
        source=f"{plan.sampling.describe()}, noise multiplier {plan.noise_multiplier:.4g}, "
        f"{participations.rounds} rounds"
        + (", sensitivity 2C" if relation.sensitivity_factor == 2 else ""),
        assumptions=(
            *common,
            *honest_clients,
            *(NOISE_OF_OTHERS if by_clients else ()),
            *hidden,
            "the server follows the protocol and keeps uploads to itself",
        ),
        not_covered=tuple(not_covered),
    )
    if not by_clients:
        return [models, *(_unprotected(plan, view) for view in _SERVER_VIEWS)]
    sums = participations_loss(
        noise_multiplier=plan.noise_multiplier,
        participations=participations.in_sums,
        relation=NeighboringRelation.REPLACE_SPECIAL,
        delta=plan.delta,
    )
    uploads = participations_loss(
        noise_multiplier=plan.noise_multiplier,
        participations=participations.in_uploads,
        relation=NeighboringRelation.REPLACE_SPECIAL,
        delta=plan.delta,
    )
    return [
        models,
        Guarantee(
            unit=plan.unit,
            relation=NeighboringRelation.REPLACE_SPECIAL,
            view=AdversaryView.SUM_ONLY,
            epsilon=sums.epsilon,
            delta=plan.delta,
            basis="provable",
            accountant=sums.accountant,
            source=f"most exposed client: {participations.in_sums:.4g} sums' worth",
            assumptions=(
                *common,
                *honest_clients,
                WHOLE_UPLOADS,
                "secure aggregation, which this run does not provide: the server sees no upload",
            ),
            not_covered=tuple(not_covered),
        ),
        Guarantee(
            unit=plan.unit,
            relation=NeighboringRelation.REPLACE_SPECIAL,
            view=AdversaryView.EACH_UPLOAD,
            epsilon=uploads.epsilon,
            delta=plan.delta,
            basis="provable",
            accountant=uploads.accountant,
            source="noise multiplier σ/√cohort of a single upload; most exposed client: "
            f"{participations.in_uploads:.4g} sums' worth",
            assumptions=(*common, *honest_clients),
            not_covered=tuple(not_covered),
        ),
    ]


def check_client_plan(plan: ReleasePlan) -> None:
    """Refuse a plan of other units, or of clients that have a part in several uploads.

    Raises
    ------
    ValueError
        Names the setting.
    """
    if plan.unit is not PrivacyUnit.CLIENT:
        raise ValueError(
            f"unit={plan.unit.value!r} of the plan: expected 'client', as each client's update is "
            "bounded as a whole"
        )
    if plan.sensitivity != 1:
        raise ValueError(
            f"sensitivity={plan.sensitivity!r} of the plan: expected 1, as a client has one upload"
        )


_SERVER_VIEWS = (AdversaryView.SUM_ONLY, AdversaryView.EACH_UPLOAD)


def _unprotected(plan: ReleasePlan, view: AdversaryView) -> Guarantee:
    return Guarantee(
        unit=plan.unit,
        relation=NeighboringRelation.REPLACE_SPECIAL,
        view=view,
        epsilon=math.inf,
        delta=plan.delta,
        basis="provable",
        accountant="none",
        source="the server adds the noise, after it has seen what it protects",
    )
