"""The package's mechanisms as experiments: tiny runs that a canary moves as far as it can.

All of them train the problem of `linear`. Each is a `LinearMechanism`: a plan for any noise and
number of rounds, the strategy under this plan, and each partition's data without and with the
canary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.serverapp.strategy import FedAvg, FedProx

from flower_ext.algorithms import DPDitto, DPFedAvg, Hosted
from flower_ext.algorithms.uldp import UldpAvg, UldpGroup, UldpNaive, UldpSgd
from flower_ext.data import ClientData, Examples
from flower_ext.federation import FederatedStrategy, Method
from flower_ext.privacy import (
    AdaptiveClipping,
    AdversaryView,
    ClippedSteps,
    CorrelatedNoise,
    FullParticipation,
    LocalObjective,
    ObjectivePerturbation,
    OutputPerturbation,
    PerturbationPlan,
    PoissonSampling,
    PrivacyPlan,
    RecordLevelPlan,
    ReleasePlan,
    Sampling,
    SecureScores,
    SecureSum,
    SpacedSampling,
)
from flower_ext.privacy.mechanisms.adaptive_clipping import SIDE
from flower_ext.privacy.mechanisms.correlated_noise import StrategyMatrix, Vector
from flower_ext.privacy.plans.release_mechanism import SpacedRelease
from flower_ext.training import DpSgdTraining, LocalTraining
from flower_ext_audit.experiment import NEXT_NORM, Observation, Score, projected
from flower_ext_audit.linear import (
    BEYOND,
    HUGE,
    LARGE,
    ONE_STEP,
    SIZE,
    LinearMechanism,
    axes,
    client_data,
    plain_app,
    pulls,
    silo_data,
)

DELTA = 1e-5
_MODELS = (AdversaryView.RELEASED_MODELS,)
_HONEST_SUM = SecureSum(colluding=0.0, dropouts=0.0)
_BACKWARDS, _FORWARDS = [client_data(-HUGE, 0.0)], [client_data(HUGE, 0.0)]
"""Two data sets of one client, each of two records. The first record pulls the model backwards in
one data set, and forwards in the other."""
_OTHER_USERS = silo_data([1, 2], [0.0, 0.0])
"""A silo of two users whose records do not pull."""

_record_plan = partial(RecordLevelPlan, sampling=FullParticipation(1), num_examples=2, delta=DELTA)


def release_plans(
    sampling: Sampling, *, noise_multiplier: float = 0.5, **options: Any
) -> Callable[[float, int], ReleasePlan]:
    """Return a function that makes plans with this sampling, and these options.

    The function takes a factor for ``noise_multiplier``, and the number of rounds.
    """
    return lambda noise, rounds: ReleasePlan(
        sampling=sampling,
        clipping_norm=1.0,
        noise_multiplier=noise_multiplier * noise,
        rounds=rounds,
        delta=DELTA,
        **options,
    )


def _run(method: Method, plan: PrivacyPlan, evaluate_every: int = 0) -> FederatedStrategy:
    return FederatedStrategy(method, plan, evaluate_every=evaluate_every)


_dp_fedavg = partial(_run, DPFedAvg(local=ONE_STEP))


_CLIENT_NOISE = LinearMechanism(
    name="client-noise",
    plan=release_plans(FullParticipation(2)),
    strategy=_dp_fedavg,
    without=[client_data(0.0), client_data(0.0)],
    present=[client_data(HUGE), client_data(0.0)],
    partitions=[0],
)
_POISSON_CLIENT_NOISE = replace(
    _CLIENT_NOISE,
    name="client-noise-poisson",
    # Sampling amplifies ε against an adversary that sees released models.
    plan=release_plans(PoissonSampling(2, 0.5), noise_multiplier=3.0),
    # The server refuses uploads that are improbably large for their noise.
    present=[client_data(LARGE), client_data(0.0)],
    views=_MODELS,
)


_RATE = 1e-2
"""Learning rate of the norm, so small that two rounds have nearly the same norm."""


def _adaptive_plans(sampling: Sampling, **options: Any) -> Callable[[float, int], ReleasePlan]:
    """Return `release_plans` with an adaptive norm.

    Half of the privacy loss comes from the counts by which the norm adapts.
    """
    fixed = release_plans(sampling, **options)

    def plan(noise: float, rounds: int) -> ReleasePlan:
        usual = fixed(noise, rounds)
        count_noise = usual.noise_multiplier / math.sqrt(2)
        clipping = AdaptiveClipping(initial=1.0, learning_rate=_RATE, bit_noise=count_noise)
        return replace(usual, clipping_norm=clipping)

    return plan


def _sided_score(*, silos: int = 1, partitions: Sequence[int] | None = None) -> Score:
    """Return a score for adaptive clipping.

    It adds up what three values reveal of the canary: the update, the entry `SIDE` that is sent
    with it, and the clipping norm of the next round.
    """
    # The canary's entry at `SIDE` has the same norm as its update, and `axes` has the norm √2. The
    # next clipping norm reveals this entry.
    norm = 2 * math.sqrt(2) / _RATE / silos
    direction = {**axes(SIZE), SIDE: np.array([-math.sqrt(2)]), NEXT_NORM: np.array([norm])}
    return projected(direction, signs=(1.0, -1.0), partitions=partitions)


_ADAPTIVE = replace(
    _CLIENT_NOISE,
    name="adaptive-clipping",
    plan=_adaptive_plans(FullParticipation(2)),
    score=_sided_score(partitions=[0]),
)


_TURNS = SpacedSampling(population=2, size=1, rounds_apart=2, participations=3)
_IN_TURNS = release_plans(_TURNS, correlation=CorrelatedNoise(), noise_placement="server")


def _in_turns_matrix(rounds: int) -> StrategyMatrix:
    mechanism = _IN_TURNS(1.0, rounds).mechanism()
    assert isinstance(mechanism, SpacedRelease)
    return mechanism.strategy


def of_correlated(moves: Vector) -> Score:
    """Return the score that best detects the canary under correlated noise.

    Let C be the `StrategyMatrix` of the noise. The product of C and the releases has independent
    noise, and the canary moves the product's rows by ``moves``. The score projects the product on
    ``moves``.
    """
    column = _in_turns_matrix(len(moves)).coefficients(len(moves))
    weights = [float(column[: len(moves) - n] @ moves[n:]) for n in range(len(moves))]
    return projected(axes(SIZE), signs=weights)


_IN_TURN_ROUNDS = 5
_CORRELATED = replace(
    _CLIENT_NOISE,
    name="correlated-noise",
    plan=_IN_TURNS,
    # The canary takes part in rounds 1, 3 and 5, and pulls in the same direction.
    score=of_correlated(
        _in_turns_matrix(_IN_TURN_ROUNDS).row_moves(
            _IN_TURN_ROUNDS, rounds_apart=2, participations=3
        )
    ),
    views=(AdversaryView.RELEASED_MODELS, AdversaryView.MODELS_AND_COHORTS),
    rounds=_IN_TURN_ROUNDS,
)


def _scored(*accuracies: float) -> ClientData:
    """Return data of a client whose update is zero and whose score is the ``accuracies``' mean."""
    test = Examples(torch.zeros(len(accuracies), SIZE), torch.tensor(accuracies))
    return ClientData(train=pulls(0.0), test=test)


def _of_scores(name: str) -> Score:
    """Return a score for audits of evaluations in which the canary reports by far the best metric.

    All other clients report ½, the middle of the bounds 0 and 1. From the released count and mean,
    the score rebuilds two noised sums: the number of clients, and the sum of (metric − ½).
    The canary adds at most 1 to the first sum and ½ to the second. The score projects the pair of
    sums on (1, ½).
    """

    def score(seen: Observation, view: AdversaryView) -> float:
        total = 0.0
        for means in seen.scores:
            count, mean = means.get("scored_clients", 0.0), means.get(f"{name}_mean", 0.5)
            total += count + 0.5 * count * (mean - 0.5)
        return total

    return score


_SECURE_SUM = LinearMechanism(
    name="secure-sum",
    # The server sees all messages of the protocol, and computes the sum from them.
    plan=release_plans(FullParticipation(3), noise_placement=_HONEST_SUM),
    strategy=_dp_fedavg,
    without=[client_data(0.0), client_data(0.0), client_data(0.0)],
    present=[client_data(HUGE), client_data(0.0), client_data(0.0)],
    views=(AdversaryView.RELEASED_MODELS, AdversaryView.SUM_ONLY),
    partitions=[0],
)

_OF_CLIENTS = (
    _CLIENT_NOISE,
    replace(
        _CLIENT_NOISE,
        name="server-noise",
        plan=release_plans(FullParticipation(2), noise_placement="server"),
    ),
    replace(_CLIENT_NOISE, name="client-noise-mod", app=plain_app),
    _CORRELATED,
    _ADAPTIVE,
    replace(
        _ADAPTIVE,
        name="adaptive-clipping-server",
        plan=_adaptive_plans(FullParticipation(2), noise_placement="server"),
    ),
    replace(
        _SECURE_SUM,
        name="adaptive-clipping-secure-sum",
        plan=_adaptive_plans(FullParticipation(3), noise_placement=_HONEST_SUM),
        score=_sided_score(partitions=[0]),
    ),
    _POISSON_CLIENT_NOISE,
    replace(
        _POISSON_CLIENT_NOISE,
        name="server-noise-poisson",
        plan=release_plans(PoissonSampling(2, 0.5), noise_multiplier=3.0, noise_placement="server"),
    ),
    _SECURE_SUM,
    replace(_SECURE_SUM, name="secure-sum-mod", app=plain_app),
    LinearMechanism(
        name="secure-scores",
        # Training has so much noise that the evaluations determine ε.
        plan=lambda noise, rounds: ReleasePlan(
            sampling=FullParticipation(3),
            clipping_norm=1.0,
            noise_multiplier=50.0,
            rounds=rounds,
            delta=DELTA,
            noise_placement=_HONEST_SUM,
            queries=(SecureScores(noise_multiplier=0.5 * noise, times=rounds),),
        ),
        strategy=partial(_dp_fedavg, evaluate_every=1),
        # Without the canary, the first client has no test examples.
        without=[_scored(), _scored(0.5), _scored(0.5)],
        present=[_scored(BEYOND), _scored(0.5), _scored(0.5)],
        views=_MODELS,
        metrics={"accuracy": lambda outputs, targets: float(targets.mean())},
        score=_of_scores("accuracy"),
    ),
)
"""Mechanisms whose unit is a client, with one update."""


_ULDP_AVG = LinearMechanism(
    name="uldp-avg",
    plan=release_plans(FullParticipation(3)),
    strategy=lambda plan: _run(UldpAvg(num_silos=2, local=ONE_STEP), plan),
    without=[_OTHER_USERS] * 2,
    present=[silo_data([0, 1, 2], [HUGE, 0.0, 0.0])] * 2,
)


_ULDP_SECURE_SUM = LinearMechanism(
    name="uldp-secure-sum",
    plan=release_plans(FullParticipation(3), noise_placement=_HONEST_SUM),
    strategy=lambda plan: _run(UldpAvg(num_silos=3, local=ONE_STEP), plan),
    without=[_OTHER_USERS] * 3,
    present=[silo_data([0, 1, 2], [BEYOND, 0.0, 0.0])] * 3,
    # A released model is a multiple of the sum, so an adversary that sees models sees sums.
    views=_MODELS,
)


def _grouped(local: DpSgdTraining) -> FederatedStrategy:
    method = UldpGroup(num_silos=2, num_users=2, group_size=2, local=local)
    return _run(method, method.plan(DELTA))


_OF_USERS = (
    _ULDP_AVG,
    replace(
        _ULDP_AVG,
        name="uldp-sgd",
        strategy=lambda plan: _run(UldpSgd(num_silos=2), plan),
    ),
    _ULDP_SECURE_SUM,
    replace(
        _ULDP_AVG,
        name="uldp-avg-by-records",
        strategy=lambda plan: _run(
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
            PoissonSampling(3, 0.05), noise_multiplier=1.0, noise_placement=_HONEST_SUM
        ),
        strategy=lambda plan: _run(UldpAvg(num_silos=3, user_draw="silos", local=ONE_STEP), plan),
        views=(AdversaryView.RELEASED_MODELS, AdversaryView.SUM_ONLY),
        app=lambda task: UldpAvg.client_app(replace(task, draw_key=bytes(32))),
        rounds=4,
    ),
    replace(
        _ULDP_AVG,
        name="uldp-adaptive",
        plan=_adaptive_plans(FullParticipation(3)),
        score=_sided_score(silos=2),
    ),
    replace(
        _ULDP_SECURE_SUM,
        name="uldp-adaptive-secure-sum",
        plan=_adaptive_plans(FullParticipation(3), noise_placement=_HONEST_SUM),
        score=_sided_score(silos=3),
    ),
    LinearMechanism(
        name="uldp-naive",
        plan=release_plans(FullParticipation(2), noise_multiplier=1.0),
        strategy=lambda plan: _run(UldpNaive(num_silos=2, local=ONE_STEP), plan),
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
"""Mechanisms whose unit is a user with records in several silos."""


def _dp_ditto(plan: RecordLevelPlan, local: LocalTraining = ONE_STEP) -> FederatedStrategy:
    return _run(DPDitto(local=local, personal_training=ONE_STEP), plan)


_ALONE: dict[str, Any] = {"min_train_nodes": 1, "min_available_nodes": 1, "fraction_evaluate": 0.0}
_OF_RECORDS = (
    LinearMechanism(
        name="ditto-uploads",
        # One record reverses the direction of the clipped model.
        plan=lambda noise, rounds: _record_plan(
            rounds=rounds, clipping_norm=1.0, noise_stddev=noise
        ),
        strategy=_dp_ditto,
        without=_BACKWARDS,
        present=_FORWARDS,
        whole=True,
    ),
    LinearMechanism(
        name="ditto-steps",
        # One record's clipped gradients reverse the direction of both noised steps.
        plan=lambda noise, rounds: _record_plan(
            rounds=rounds,
            clipping_norm=1e3,
            noise_stddev=0.7 * noise,
            steps=ClippedSteps(
                learning_rate=1.0, gradient_clipping_norm=1.0, num_examples=2, local_steps=2
            ),
        ),
        strategy=partial(_dp_ditto, local=LocalTraining(steps=2, batch_size=2, learning_rate=1.0)),
        without=_BACKWARDS,
        present=_FORWARDS,
    ),
    LinearMechanism(
        name="output-perturbation",
        plan=lambda noise, rounds: PerturbationPlan(
            sampling=FullParticipation(1),
            perturbation=OutputPerturbation(clipping_norm=1.0, noise_stddev=noise),
            delta=DELTA,
        ),
        strategy=lambda plan: _run(Hosted(FedAvg(**_ALONE), local=ONE_STEP), plan),
        without=_BACKWARDS,
        present=_FORWARDS,
        whole=True,
    ),
    LinearMechanism(
        name="objective-perturbation",
        # One record changes the sign of the perturbed exact minimiser, in one dimension.
        plan=lambda noise, rounds: PerturbationPlan(
            sampling=FullParticipation(1),
            perturbation=ObjectivePerturbation(rate=1 / noise),
            objective=LocalObjective(
                convex=True,
                generalised_linear=True,
                gradient_bound=1.0,
                curvature_bound=0.0,
                feature_norm_bound=1.0,
            ),
            delta=DELTA,
        ),
        strategy=lambda plan: _run(
            Hosted(FedProx(proximal_mu=1.0, **_ALONE), local=LocalTraining(tolerance=1e-9)), plan
        ),
        without=[client_data(-1.0, 0.0, size=1)],
        present=[client_data(1.0, 0.0, size=1)],
        size=1,
    ),
)
"""Mechanisms whose unit is one record of a client."""

MECHANISMS = {each.name: each for each in (*_OF_CLIENTS, *_OF_USERS, *_OF_RECORDS)}
"""Mechanisms by their names in ``flower-ext audit``."""
