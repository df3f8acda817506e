"""The package's mechanisms as experiments: tiny runs that a canary moves as far as it can.

All of them train the problem of `linear`. Each is a `LinearMechanism`: a plan for any noise and
number of rounds, the strategy under this plan, and each partition's data without and with the
canary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from flwr.serverapp.strategy import FedAvg, FedProx

from flower_ext.algorithms import DPDitto, DPFedAvg, Hosted
from flower_ext.algorithms.uldp import UldpAvg, UldpGroup, UldpNaive, UldpSgd
from flower_ext.auditing.experiment import of_scores
from flower_ext.auditing.linear import (
    BEYOND,
    HUGE,
    LARGE,
    ONE_STEP,
    SIZE,
    LinearMechanism,
    client_data,
    pulls,
    silo_data,
)
from flower_ext.auditing.plain_app import plain_app
from flower_ext.data import ClientData, Examples
from flower_ext.federation import FederatedStrategy, Method
from flower_ext.privacy import (
    AdversaryView,
    ClippedSteps,
    FullParticipation,
    LocalObjective,
    ObjectivePerturbation,
    OutputPerturbation,
    PerturbationPlan,
    PoissonSampling,
    PrivacyPlan,
    RecordLevelPlan,
    ReleasePlan,
    SecureScores,
    SecureSum,
)
from flower_ext.training import DpSgdTraining, LocalTraining

DELTA = 1e-5
_MODELS = (AdversaryView.RELEASED_MODELS,)
_HONEST_SUM = SecureSum(colluding=0.0, dropouts=0.0)
_BACKWARDS, _FORWARDS = [client_data(-HUGE, 0.0)], [client_data(HUGE, 0.0)]
"""One client's data: one of two records pulls the model, in opposite directions."""
_OTHER_USERS = silo_data([1, 2], [0.0, 0.0])
"""A silo of two users whose records do not pull."""

_release_plan = partial(ReleasePlan, clipping_norm=1.0, delta=DELTA)
_user_plan = partial(_release_plan, sampling=FullParticipation(3))
_record_plan = partial(RecordLevelPlan, sampling=FullParticipation(1), num_examples=2, delta=DELTA)


def _run(method: Method, plan: PrivacyPlan, evaluate_every: int = 0) -> FederatedStrategy:
    return FederatedStrategy(method, plan, evaluate_every=evaluate_every)


def _group(method: UldpGroup) -> FederatedStrategy:
    return _run(method, method.plan(DELTA))


# One client's update ------------------------------------------------------------------------------


def _dp_fedavg(plan: ReleasePlan, evaluate_every: int = 0) -> FederatedStrategy:
    return _run(DPFedAvg(local=ONE_STEP), plan, evaluate_every=evaluate_every)


_CLIENT_NOISE = LinearMechanism(
    name="client level, noise by the client",
    plan=lambda noise, rounds: _release_plan(
        sampling=FullParticipation(2), noise_multiplier=0.5 * noise, rounds=rounds
    ),
    strategy=_dp_fedavg,
    without=[client_data(0.0), client_data(0.0)],
    present=[client_data(HUGE), client_data(0.0)],
    partitions=[0],
)
_SERVER_NOISE = replace(
    _CLIENT_NOISE,
    name="client level, noise by the server",
    plan=lambda noise, rounds: _release_plan(
        sampling=FullParticipation(2),
        noise_multiplier=0.5 * noise,
        rounds=rounds,
        noise_placement="server",
    ),
)
_FOREIGN_APP = replace(
    _CLIENT_NOISE,
    name="client level, noise by the client, in a mod around a foreign ClientApp",
    app=plain_app,
)
_POISSON_CLIENT_NOISE = replace(
    _CLIENT_NOISE,
    name="client level, Poisson sampling, noise by the client",
    # Sampling amplifies ε against an adversary that sees released models.
    plan=lambda noise, rounds: _release_plan(
        sampling=PoissonSampling(2, 0.5), noise_multiplier=3.0 * noise, rounds=rounds
    ),
    present=[client_data(LARGE), client_data(0.0)],
    views=_MODELS,
)
_POISSON_SERVER_NOISE = replace(
    _POISSON_CLIENT_NOISE,
    name="client level, Poisson sampling, noise by the server",
    plan=lambda noise, rounds: _release_plan(
        sampling=PoissonSampling(2, 0.5),
        noise_multiplier=3.0 * noise,
        rounds=rounds,
        noise_placement="server",
    ),
)
_SECURE_SUM = LinearMechanism(
    name="client level, secure sums",
    # The server sees all messages of the protocol, and computes the sum from them.
    plan=lambda noise, rounds: _release_plan(
        sampling=FullParticipation(3),
        noise_multiplier=0.5 * noise,
        rounds=rounds,
        noise_placement=_HONEST_SUM,
    ),
    strategy=_dp_fedavg,
    without=[client_data(0.0), client_data(0.0), client_data(0.0)],
    present=[client_data(HUGE), client_data(0.0), client_data(0.0)],
    views=(AdversaryView.RELEASED_MODELS, AdversaryView.SUM_ONLY),
    partitions=[0],
)


def _scored(*accuracies: float) -> ClientData:
    """Return a client's data whose training moves nothing and whose mean target is its score."""
    test = Examples(torch.zeros(len(accuracies), SIZE), torch.tensor(accuracies))
    return ClientData(train=pulls(0.0), test=test)


_SECURE_SCORES = LinearMechanism(
    name="scores in secure sums",
    # Training has so much noise that the evaluations determine ε.
    plan=lambda noise, rounds: _release_plan(
        sampling=FullParticipation(3),
        noise_multiplier=50.0,
        rounds=rounds,
        noise_placement=_HONEST_SUM,
        queries=(SecureScores(noise_multiplier=0.5 * noise, times=rounds),),
    ),
    strategy=partial(_dp_fedavg, evaluate_every=1),
    # Without the canary, the first client has no test examples.
    without=[_scored(), _scored(0.5), _scored(0.5)],
    present=[_scored(BEYOND), _scored(0.5), _scored(0.5)],
    views=_MODELS,
    metrics={"accuracy": lambda outputs, targets: float(targets.mean())},
    score=of_scores("accuracy"),
)


# One user with records in several silos -----------------------------------------------------------

_ULDP_AVG = LinearMechanism(
    name="ULDP-AVG",
    plan=lambda noise, rounds: _user_plan(noise_multiplier=0.5 * noise, rounds=rounds),
    strategy=lambda plan: _run(UldpAvg(num_silos=2, local=ONE_STEP), plan),
    without=[_OTHER_USERS] * 2,
    present=[silo_data([0, 1, 2], [HUGE, 0.0, 0.0])] * 2,
)
_ULDP_SGD = replace(
    _ULDP_AVG,
    name="ULDP-SGD",
    strategy=lambda plan: _run(UldpSgd(num_silos=2), plan),
)
_ULDP_SECURE_SUM = LinearMechanism(
    name="ULDP-AVG, secure sums",
    plan=lambda noise, rounds: _user_plan(
        noise_multiplier=0.5 * noise, rounds=rounds, noise_placement=_HONEST_SUM
    ),
    strategy=lambda plan: _run(UldpAvg(num_silos=3, local=ONE_STEP), plan),
    without=[_OTHER_USERS] * 3,
    present=[silo_data([0, 1, 2], [BEYOND, 0.0, 0.0])] * 3,
    # A released model is a multiple of the sum, so an adversary that sees models sees sums.
    views=_MODELS,
)
_ULDP_BY_RECORDS = replace(
    _ULDP_AVG,
    name="ULDP-AVG, weighted by records",
    strategy=lambda plan: _run(UldpAvg(num_silos=2, weighting="by-records", local=ONE_STEP), plan),
    # The canary has all its weight in one silo, as it may under encrypted weights.
    present=[silo_data([0, 1, 2], [HUGE, 0.0, 0.0]), _OTHER_USERS],
    partitions=[0],
)
_ULDP_NAIVE = LinearMechanism(
    name="ULDP-NAIVE",
    plan=lambda noise, rounds: _user_plan(
        sampling=FullParticipation(2), noise_multiplier=noise, rounds=rounds
    ),
    strategy=lambda plan: _run(UldpNaive(num_silos=2, local=ONE_STEP), plan),
    # With the canary, both silos' updates point the other way.
    without=[silo_data([1], [-HUGE])] * 2,
    present=[silo_data([0, 1], [3 * HUGE, -HUGE])] * 2,
)
_ULDP_GROUP = LinearMechanism(
    name="ULDP-GROUP-2",
    plan=lambda noise, rounds: DpSgdTraining(
        steps=1,
        sampling_rate=1.0,
        batch_size=1.0,
        learning_rate=1.0,
        clipping_norm=1.0,
        noise_multiplier=noise,
    ),
    strategy=lambda local: _group(UldpGroup(num_silos=2, num_users=2, group_size=2, local=local)),
    without=[silo_data([1], [0.0])] * 2,
    present=[silo_data([0, 0, 1], [HUGE, HUGE, 0.0]), silo_data([1], [0.0])],
    partitions=[0],
    gaussian=True,  # every step uses all records
)


# One record of a client ---------------------------------------------------------------------------


def _dp_ditto(plan: RecordLevelPlan, local: LocalTraining = ONE_STEP) -> FederatedStrategy:
    return _run(DPDitto(local=local, personal_training=ONE_STEP), plan)


_DITTO_UPLOADS = LinearMechanism(
    name="DP-Ditto, uploads",
    # One record reverses the direction of the clipped model.
    plan=lambda noise, rounds: _record_plan(rounds=rounds, clipping_norm=1.0, noise_stddev=noise),
    strategy=_dp_ditto,
    without=_BACKWARDS,
    present=_FORWARDS,
    whole=True,
)
_DITTO_STEPS = LinearMechanism(
    name="DP-Ditto, clipped steps",
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
)
_fed_avg = partial(FedAvg, min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)
_fed_prox = partial(
    FedProx, proximal_mu=1.0, min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0
)
_OUTPUT_PERTURBATION = LinearMechanism(
    name="output perturbation",
    plan=lambda noise, rounds: PerturbationPlan(
        sampling=FullParticipation(1),
        perturbation=OutputPerturbation(clipping_norm=1.0, noise_stddev=noise),
        delta=DELTA,
    ),
    strategy=lambda plan: _run(Hosted(_fed_avg(), local=ONE_STEP), plan),
    without=_BACKWARDS,
    present=_FORWARDS,
    whole=True,
)
_OBJECTIVE_PERTURBATION = LinearMechanism(
    name="objective perturbation",
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
    strategy=lambda plan: _run(Hosted(_fed_prox(), local=LocalTraining(tolerance=1e-9)), plan),
    without=[client_data(-1.0, 0.0, size=1)],
    present=[client_data(1.0, 0.0, size=1)],
    size=1,
)


MECHANISMS: dict[str, LinearMechanism] = {
    "client-noise": _CLIENT_NOISE,
    "server-noise": _SERVER_NOISE,
    "client-noise-mod": _FOREIGN_APP,
    "client-noise-poisson": _POISSON_CLIENT_NOISE,
    "server-noise-poisson": _POISSON_SERVER_NOISE,
    "secure-sum": _SECURE_SUM,
    "secure-scores": _SECURE_SCORES,
    "uldp-avg": _ULDP_AVG,
    "uldp-sgd": _ULDP_SGD,
    "uldp-secure-sum": _ULDP_SECURE_SUM,
    "uldp-avg-by-records": _ULDP_BY_RECORDS,
    "uldp-naive": _ULDP_NAIVE,
    "uldp-group": _ULDP_GROUP,
    "ditto-uploads": _DITTO_UPLOADS,
    "ditto-steps": _DITTO_STEPS,
    "output-perturbation": _OUTPUT_PERTURBATION,
    "objective-perturbation": _OBJECTIVE_PERTURBATION,
}
"""Mechanisms by their names in ``flower-ext audit``."""
