"""Mechanisms whose unit is a user with records in several silos."""

from dataclasses import replace

from flower_ext.algorithms.uldp import UldpAvg, UldpGroup, UldpNaive, UldpSgd
from flower_ext.federation import FederatedStrategy
from flower_ext.privacy import AdversaryView, FullParticipation, PoissonSampling
from flower_ext.training import DpSgdTraining
from flower_ext_audit.linear import BEYOND, HUGE, ONE_STEP, LinearMechanism, silo_data
from flower_ext_audit.mechanisms.plans import (
    DELTA,
    HONEST_SUM,
    MODELS,
    adaptive_plans,
    release_plans,
    sided_score,
    strategy_of,
)

_OTHER_USERS = silo_data([1, 2], [0.0, 0.0])
"""A silo of two users whose records do not pull."""

_ULDP_AVG = LinearMechanism(
    name="uldp-avg",
    plan=release_plans(FullParticipation(3)),
    strategy=lambda plan: strategy_of(UldpAvg(num_silos=2, local=ONE_STEP), plan),
    without=[_OTHER_USERS] * 2,
    present=[silo_data([0, 1, 2], [HUGE, 0.0, 0.0])] * 2,
)


_ULDP_SECURE_SUM = LinearMechanism(
    name="uldp-secure-sum",
    plan=release_plans(FullParticipation(3), noise_placement=HONEST_SUM),
    strategy=lambda plan: strategy_of(UldpAvg(num_silos=3, local=ONE_STEP), plan),
    without=[_OTHER_USERS] * 3,
    present=[silo_data([0, 1, 2], [BEYOND, 0.0, 0.0])] * 3,
    # A released model is a multiple of the sum, so an adversary that sees models sees sums.
    views=MODELS,
)


def _grouped(local: DpSgdTraining) -> FederatedStrategy:
    method = UldpGroup(num_silos=2, num_users=2, group_size=2, local=local)
    return strategy_of(method, method.plan(DELTA))


OF_USERS = (
    _ULDP_AVG,
    replace(
        _ULDP_AVG,
        name="uldp-sgd",
        strategy=lambda plan: strategy_of(UldpSgd(num_silos=2), plan),
    ),
    _ULDP_SECURE_SUM,
    replace(
        _ULDP_AVG,
        name="uldp-avg-by-records",
        strategy=lambda plan: strategy_of(
            UldpAvg(num_silos=2, weighting="by-records", local=ONE_STEP), plan
        ),
        # The canary has all its weight in one silo, as it may under encrypted weights.
        present=[silo_data([0, 1, 2], [HUGE, 0.0, 0.0]), _OTHER_USERS],
        partitions=[0],
    ),
    replace(
        _ULDP_SECURE_SUM,
        name="uldp-silos-draw",
        # The rate is so small that sampling determines ε, and silos tell nobody whom they draw.
        plan=release_plans(
            PoissonSampling(3, 0.05), noise_multiplier=1.0, noise_placement=HONEST_SUM
        ),
        strategy=lambda plan: strategy_of(
            UldpAvg(num_silos=3, user_draw="silos", local=ONE_STEP), plan
        ),
        views=(AdversaryView.RELEASED_MODELS, AdversaryView.SUM_ONLY),
        app=lambda task: UldpAvg.client_app(replace(task, draw_key=bytes(32))),
        rounds=4,
    ),
    replace(
        _ULDP_AVG,
        name="uldp-adaptive",
        plan=adaptive_plans(FullParticipation(3)),
        score=sided_score(silos=2),
    ),
    replace(
        _ULDP_SECURE_SUM,
        name="uldp-adaptive-secure-sum",
        plan=adaptive_plans(FullParticipation(3), noise_placement=HONEST_SUM),
        score=sided_score(silos=3),
    ),
    LinearMechanism(
        name="uldp-naive",
        plan=release_plans(FullParticipation(2), noise_multiplier=1.0),
        strategy=lambda plan: strategy_of(UldpNaive(num_silos=2, local=ONE_STEP), plan),
        # With the canary, both silos' updates point the other way.
        without=[silo_data([1], [-HUGE])] * 2,
        present=[silo_data([0, 1], [3 * HUGE, -HUGE])] * 2,
    ),
    LinearMechanism(
        name="uldp-group",
        plan=lambda noise, rounds: DpSgdTraining(
            steps=1,
            sampling_rate=1.0,
            batch_size=1.0,
            learning_rate=1.0,
            clipping_norm=1.0,
            noise_multiplier=noise,
        ),
        strategy=_grouped,
        without=[silo_data([1], [0.0])] * 2,
        present=[silo_data([0, 0, 1], [HUGE, HUGE, 0.0]), silo_data([1], [0.0])],
        partitions=[0],
        gaussian=True,  # every step uses all records
    ),
)
