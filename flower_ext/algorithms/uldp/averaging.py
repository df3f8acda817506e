"""ULDP-AVG and ULDP-SGD: every silo clips the update of every single user.

Source: Kato, Xiong, Takagi, Cao, Yoshikawa, "Uldp-FL: Federated Learning with Across-Silo
User-Level Differential Privacy" (PVLDB 2024), Algorithms 3 and 4.

====================  =====================================================
paper                 here
====================  =====================================================
x                     the shared model (``arrays``)
S, U, q               ``num_silos``; ``plan.sampling``: ``population``, ``sampling_rate``
C, σ                  ``plan.clipping_norm``, ``plan.noise_multiplier``
w_{s,u}               ``weighting``; see `weights`
Δ_{s,u}, Δ_s          update of user u in silo s; upload of silo s
Q, η_l                ``local.epochs`` (or ``steps``), ``local.learning_rate``
η_g                   ``server.learning_rate``; the paper's theory takes `theory_learning_rate`
====================  =====================================================

The Flower nodes are the silos, and all of them take part in every round. The plan's units are
users; each round uses the same sample of users in every silo. A user's mini-batches depend only on
that user's number and records.

Under a plan with secure sums, the secure sum runs over the silos. With a `weighted_sum`, no party
learns the weights w_{s,u}. The module `silo_training` trains a silo's users.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Literal

import numpy as np

from flower_ext.algorithms.uldp.silo_answers import answer_server, ask_silos
from flower_ext.algorithms.uldp.silo_method import SiloMethod, sums_of_users
from flower_ext.algorithms.uldp.silo_training import WeightedTotal, users_training
from flower_ext.algorithms.uldp.weights import (
    DISCLOSURES,
    NUM_USERS,
    RATE,
    USER_WEIGHTS,
    check_weights,
    user_weights,
    users_groups,
    weights_of_round,
)
from flower_ext.data import Examples
from flower_ext.data.users import owned
from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    Arrays,
    ClientMethod,
    ClientWork,
    Cohort,
    Connected,
    LocalResult,
    Memory,
    Population,
    Released,
    State,
    Steps,
    Summation,
)
from flower_ext.federation.population import HiddenUsers
from flower_ext.federation.sums.summation import UsersTotal
from flower_ext.privacy import Guarantee, PoissonSampling, PrivacyPlan
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.protections import ClipAndNoise
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.privacy.run_summary import MethodTraits, RunSummary
from flower_ext.privacy.theorems.uldp_theorem import Weighting, drawn_by_silos, uldp_avg_guarantees
from flower_ext.training import LocalTraining

log = getLogger("flwr")

SILOS, WEIGHTS = "silos", "weights"
"""Names in the state: the group of the silos' answers, and the weights w_{s,u} in this group.

The group has no weights if the server does not know them.
"""
GRADIENT = LocalTraining(steps=1, batch_size=2**31 - 1, learning_rate=1.0)
"""One step at rate 1 on all records, whose update is the negative gradient."""


def users_of_round(work: ClientWork) -> tuple[dict[int, Examples], UsersTotal]:
    """Return the users whose weight in this silo is above 0, and an empty total for their updates.

    Refuse a protection that does not bound each user's update.
    """
    num_users, protection = int(work.settings[NUM_USERS]), work.protection
    if not (isinstance(protection, ClipAndNoise) and protection.of_units):
        raise InvalidValue.tellable(
            f"the server asks for the protection {type(protection).__name__}: expected one that "
            "clips each user's update"
        )
    data = owned(work.data, num_users)
    total = work.hidden_sum(num_users, protection.clipping_norm)
    if total is None:
        total = WeightedTotal(work.received, protection, weights_of_round(work).tolist())
    users = {user: records for user, records in data.by_user().items() if total.includes(user)}
    return users, total


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Return Σ_u w_{s,u} clip(Δ_{s,u}): lines 9–19 of Algorithm 3 without the noise."""
    users, total = users_of_round(work)
    yield users_training(work, users, total, int(work.settings[NUM_USERS]))
    return LocalResult(update=total.value)


def theory_learning_rate(*, num_silos: int, num_users: int, epochs: int) -> float:
    """Return η_g = |S| √(|U| Q), for which the paper's convergence bound matches FedAvg's."""
    return num_silos * math.sqrt(num_users * epochs)


@dataclass(frozen=True, kw_only=True)
class UldpAvg(SiloMethod):
    """Federated averaging over silos with user-level DP.

    All users have the same weight, whatever their number of records. ``weighting`` divides a user's
    weight among the silos. The plan is a `ReleasePlan` whose population is the set of users. The
    silos add the noise. Each round uses all users, or a Poisson sample of them.

    Parameters
    ----------
    num_silos : int
        Number of silos. The server asks all of them in every round.
    weighting : {"equal", "by-records"}
        "equal" sets w_{s,u} = 1/|S|. "by-records" sets w_{s,u} to the fraction of the user's
        records that silo s holds. Silos then send the server how many records each user has,
        unless the run uses a `weighted_sum`.
    user_draw : {"server", "silos"}
        The party that draws the users of a round, unless a `weighted_sum` with ``draw_choices``
        draws them. With "silos", the silos draw from a key that the server does not have
        (`Task.draw_key`). The server then does not learn who takes part, so sampling also lowers
        the ε against the server. Every silo learns who takes part. With "silos", the plan needs a
        `PoissonSampling` and a `SecureSum` without colluding silos.
    local : LocalTraining
        Training of the whole model on one user's records.
    **options
        Fields of `Method`.
    """

    bounds_units = True
    client = ClientMethod(
        name="uldp_avg",
        local_update=local_update,
        answer=answer_server,
        memory=Memory.NONE,  # a resumed run sets up keys of a weighted sum anew
        takes_weighted_sums=True,
    )

    weighting: Weighting = "equal"
    user_draw: Literal["server", "silos"] = "server"
    local: LocalTraining = LocalTraining()

    @property
    def traits(self) -> MethodTraits:
        """The method's traits, with its number of silos and its weighting."""
        return replace(super().traits, weighting=self.weighting)

    def mechanism(self, plan: PrivacyPlan) -> RoundMechanism:
        """Return the mechanism of the silos' sum; refuse a plan that protects no users in silos."""
        sums = sums_of_users(super().mechanism(plan))
        if self.user_draw == "silos":
            _check_silos_can_draw(sums)
        return sums

    def population(self, plan: PrivacyPlan, summation: Summation) -> Population:
        """Return the users, as `HiddenUsers` under a weighted sum or a draw by the silos."""
        by_server = self.user_draw == "server" and not summation.hidden_draw
        if summation.brings_weights or not by_server:
            return HiddenUsers(plan.sampling, self.num_silos, drawn_by_server=by_server)
        return super().population(plan, summation)

    def settings(self, plan: PrivacyPlan) -> Mapping[str, float]:
        """Return what silos need: the number of users |U|, and the rate q if silos draw users."""
        rate = {RATE: plan.sampling.sampling_rate} if self.user_draw == "silos" else {}
        return {NUM_USERS: plan.sampling.population, **rate}

    def connect(self, connected: Connected, state: State) -> State:
        """Ask the silos what the run needs to know, and return the state with the answers.

        The server asks for each user's number of records only if it computes weights by records.
        """
        mechanism = sums_of_users(connected.summation.mechanism)
        brings_weights = connected.summation.brings_weights
        histogram = ask_silos(
            connected,
            mechanism.sampling.population,
            histogram=self.weighting == "by-records" and not brings_weights,
            silos_draw=self.user_draw == "silos",
        )
        if mechanism.masked is not None:
            cells = mechanism.clipping_norm / mechanism.masked.cell / self.num_silos
            _warn_of_rounding(cells, connected.model)
        weights = {} if brings_weights else {WEIGHTS: user_weights(self.weighting, histogram)}
        return state.updated(server={SILOS: weights})

    def begin_round(self, cohort: Cohort, model: Arrays, state: State) -> Cohort:
        """Return the cohort with the weights of its users for each silo (line 5 of Algorithm 4).

        If silos draw the users, the cohort holds all users. With a weighted sum, the cohort stays
        unchanged, because the sum computes the weights. A silo's entry in the cohort's ``norms``
        is the total weight of its users: its sum has at most this norm, in clipping norms.
        """
        weights = state.server[SILOS].get(WEIGHTS)
        if weights is None:
            return cohort  # the weighted sum computes the weights itself
        users = cohort.units
        is_common = weights.shape[1] == 1  # one column then stands for all users
        if not is_common:
            weights = weights[:, np.asarray(users, dtype=np.int64)]
        check_weights(weights, self.num_silos, users, self.weighting)
        totals = weights.sum(axis=1) * (len(users) if is_common else 1)
        groups = users_groups(weights, users, cohort.population)
        return replace(
            cohort,
            norms=dict(enumerate(totals.tolist())),
            requests={silo: {USER_WEIGHTS: group} for silo, group in enumerate(groups)},
        )

    def step(self, model: Arrays, released: Released, state: State) -> tuple[Arrays, State]:
        """Return x + η_g Σ_s Δ_s / (q|U||S|); the plan has already divided by q|U|."""
        over_silos = {name: array / self.num_silos for name, array in released.mean.items()}
        return super().step(model, replace(released, mean=over_silos), state)

    def mean_noise(self, mechanism: RoundMechanism) -> float:
        """Return the stddev of the noise in each coordinate of the mean over users and silos."""
        return super().mean_noise(mechanism) / self.num_silos

    def disclosures(self, summation: Summation) -> Sequence[str]:
        """Return, for the run's report, what the computation of the weights reveals."""
        if summation.brings_weights:
            return summation.disclosures
        return DISCLOSURES[self.weighting]

    def claims(self, run: RunSummary, mechanism: RoundMechanism) -> list[Guarantee]:
        """Return the guarantee of Theorem 5, and a provable guarantee against each adversary."""
        sums = sums_of_users(mechanism)
        if self.user_draw == "silos":
            by_silos = drawn_by_silos(sums, run.participations.rounds)
            run = replace(run, sums=replace(run.sums, hidden_draw=by_silos))
        return uldp_avg_guarantees(sums, run)


@dataclass(frozen=True, kw_only=True)
class UldpSgd(UldpAvg):
    """ULDP-AVG with one gradient over all of a user's records in place of an update.

    Silos clip the gradient itself, without a local learning rate. The server moves against the mean
    gradient, so the learning rate of ``server`` is the rate of the descent.

    Parameters
    ----------
    **options
        Fields of `UldpAvg`, except ``local``.
    """

    local: LocalTraining = GRADIENT

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local != GRADIENT:
            raise InvalidValue(
                "local: leave it out, because ULDP-SGD has no local training; or use UldpAvg"
            )


def _check_silos_can_draw(mechanism: NoisedSum) -> None:
    """Require Poisson sampling and ``SecureSum(colluding=0)``, so that silos can draw in secret."""
    if not isinstance(mechanism.sampling, PoissonSampling):
        raise InvalidValue(
            f"user_draw='silos' with sampling={mechanism.sampling!r}: expected PoissonSampling, "
            "because silos draw every user independently"
        )
    if mechanism.secure_sum is None or mechanism.secure_sum.colluding:
        raise InvalidValue(
            f"user_draw='silos' with noise_placement={mechanism.noise_placement!r}: expected "
            "SecureSum(colluding=0), because the server may see only sums, and a silo that "
            "colludes with the server could tell it which users were drawn"
        )


def _warn_of_rounding(cells: float, model: Arrays) -> None:
    """Warn if a typical coordinate of a user's update is smaller than one cell of the grid.

    Rounding then loses much of the update. ``cells`` is the norm of a clipped update in one silo,
    in cells of the grid.
    """
    numbers = sum(array.size for array in model.values())
    if (usual := cells / math.sqrt(numbers)) < 1:
        log.warning(
            "secure sums round each number to whole cells of a grid, and a typical number of a "
            "user's clipped update in one silo is only %.2g cells, so rounding loses most of the "
            "update: lower the noise multiplier, or train fewer parameters",
            usual,
        )
