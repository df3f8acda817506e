"""The package's mechanisms as experiments: tiny runs that a canary moves as far as it can.

All of them train the problem of `linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from flwr.serverapp.strategy import FedAvg, FedProx

from flower_ext.algorithms import DPDitto, DPFedAvg, Hosted
from flower_ext.algorithms.uldp import UldpAvg, UldpGroup, UldpNaive, UldpSgd
from flower_ext.auditing.experiment import Experiment, of_scores
from flower_ext.auditing.linear import (
    BEYOND,
    HUGE,
    LARGE,
    ONE_STEP,
    SIZE,
    client_data,
    linear_experiment,
    pulls,
    silo_data,
)
from flower_ext.auditing.plain_app import plain_app
from flower_ext.data import ClientData, Examples
from flower_ext.federation import FederatedStrategy
from flower_ext.privacy import (
    AdversaryView,
    ClippedSteps,
    FullParticipation,
    LocalObjective,
    ObjectivePerturbation,
    OutputPerturbation,
    PerturbationPlan,
    PoissonSampling,
    PrivacyUnit,
    RecordLevelPlan,
    ReleasePlan,
    Sampling,
    SecureScores,
    SecureSum,
)
from flower_ext.training import DpSgdTraining, LocalTraining

DELTA = 1e-5


def _plan(sampling: Sampling, noise_multiplier: float, rounds: int, **more: Any) -> ReleasePlan:
    return ReleasePlan(
        sampling=sampling,
        clipping_norm=1.0,
        noise_multiplier=noise_multiplier,
        rounds=rounds,
        delta=DELTA,
        **more,
    )


TURNED_AROUND: dict[str, Any] = {
    "without": [client_data(-HUGE, 0.0)],
    "present": [client_data(HUGE, 0.0)],
}
"""Data in which one of two records pulls the other way."""


def client_level(
    placement: Any = "client",
    *,
    sampled: bool = False,
    foreign: bool = False,
    noise: float = 1.0,
    rounds: int = 1,
) -> Experiment:
    """`DPFedAvg` over two clients, one of them the canary.

    With ``sampled``, Poisson sampling amplifies ε against an adversary that sees released models.
    With ``foreign``, the ClientApp is not of this package, and `client_level_dp_mod` protects its
    uploads.
    """
    sampling = PoissonSampling(2, 0.5) if sampled else FullParticipation(2)
    sigma = (3.0 if sampled else 0.5) * noise
    plan = _plan(sampling, sigma, rounds, noise_placement=placement)
    return linear_experiment(
        f"client level, {'Poisson sampling, ' if sampled else ''}noise by the {placement}"
        f"{', in a mod around a foreign ClientApp' if foreign else ''}",
        lambda: FederatedStrategy(DPFedAvg(local=ONE_STEP), plan, evaluate_every=0),
        without=[client_data(0.0), client_data(0.0)],
        present=[client_data(LARGE if sampled else HUGE), client_data(0.0)],
        views=[AdversaryView.RELEASED_MODELS] if sampled else tuple(AdversaryView),
        rounds=rounds,
        partitions=[0],
        app=plain_app if foreign else None,
    )


def secure_sum(*, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """`DPFedAvg` over three clients whose uploads are summed securely, one of them the canary.

    The server sees all messages of the protocol, and computes the sum from them.
    """
    sums = SecureSum(colluding=0.0, dropouts=0.0)
    plan = _plan(FullParticipation(3), 0.5 * noise, rounds, secure_aggregation=sums)
    return linear_experiment(
        "client level, secure sums",
        lambda: FederatedStrategy(DPFedAvg(local=ONE_STEP), plan, evaluate_every=0),
        without=[client_data(0.0), client_data(0.0), client_data(0.0)],
        present=[client_data(HUGE), client_data(0.0), client_data(0.0)],
        views=[AdversaryView.RELEASED_MODELS, AdversaryView.SUM_ONLY],
        partitions=[0],
        rounds=rounds,
    )


def secure_scores(*, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """`DPFedAvg` whose evaluations are summed securely over three clients, one of them the canary.

    The canary reports an accuracy of `BEYOND`, or has no test examples. Training moves nothing, and
    has so much noise that the evaluations determine ε.
    """
    plan = _plan(
        FullParticipation(3),
        50.0,
        rounds,
        secure_aggregation=SecureSum(colluding=0.0, dropouts=0.0),
        scores=SecureScores(noise_multiplier=0.5 * noise, evaluations=rounds),
    )

    def rated(*told: float) -> ClientData:
        test = Examples(torch.zeros(len(told), SIZE), torch.tensor(told))
        return ClientData(train=pulls(0.0), test=test)

    return linear_experiment(
        "scores in secure sums",
        lambda: FederatedStrategy(DPFedAvg(local=ONE_STEP), plan, evaluate_every=1),
        without=[rated(), rated(0.5), rated(0.5)],
        present=[rated(BEYOND), rated(0.5), rated(0.5)],
        views=[AdversaryView.RELEASED_MODELS],
        rounds=rounds,
        metrics={"accuracy": lambda outputs, targets: float(targets.mean())},
        score=of_scores("accuracy"),
    )


def uldp(method: Any = UldpAvg, *, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """`UldpAvg` or `UldpSgd`: a user with a record in each of two silos."""
    plan = _plan(FullParticipation(3), 0.5 * noise, rounds, unit=PrivacyUnit.USER)
    local = {"local": ONE_STEP} if method is UldpAvg else {}
    return linear_experiment(
        "ULDP-AVG" if method is UldpAvg else "ULDP-SGD",
        lambda: FederatedStrategy(method(num_silos=2, **local), plan, evaluate_every=0),
        without=[silo_data([1, 2], [0.0, 0.0])] * 2,
        present=[silo_data([0, 1, 2], [HUGE, 0.0, 0.0])] * 2,
        rounds=rounds,
    )


def uldp_secure_sum(*, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """`UldpAvg` over three silos whose sums over users are summed securely.

    The canary user has a record in each silo; the records of the other two users do not pull. A
    released model is a multiple of the sum, so an adversary that sees models sees sums.
    """
    plan = _plan(
        FullParticipation(3),
        0.5 * noise,
        rounds,
        unit=PrivacyUnit.USER,
        secure_aggregation=SecureSum(colluding=0.0, dropouts=0.0),
    )
    return linear_experiment(
        "ULDP-AVG, secure sums",
        lambda: FederatedStrategy(UldpAvg(num_silos=3, local=ONE_STEP), plan, evaluate_every=0),
        without=[silo_data([1, 2], [0.0, 0.0])] * 3,
        present=[silo_data([0, 1, 2], [BEYOND, 0.0, 0.0])] * 3,
        views=[AdversaryView.RELEASED_MODELS],
        rounds=rounds,
    )


def uldp_by_records(*, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """`UldpAvg` weighted by records, as under encryption: a user with all weight in one silo."""
    plan = _plan(FullParticipation(3), 0.5 * noise, rounds, unit=PrivacyUnit.USER)
    return linear_experiment(
        "ULDP-AVG, weighted by records",
        lambda: FederatedStrategy(
            UldpAvg(num_silos=2, weighting="by-records", local=ONE_STEP), plan, evaluate_every=0
        ),
        without=[silo_data([1, 2], [0.0, 0.0])] * 2,
        present=[silo_data([0, 1, 2], [HUGE, 0.0, 0.0]), silo_data([1, 2], [0.0, 0.0])],
        rounds=rounds,
        partitions=[0],
    )


def uldp_naive(*, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """`UldpNaive`: with the canary user, both silos' updates point the other way."""
    plan = _plan(FullParticipation(2), noise, rounds, unit=PrivacyUnit.USER)
    return linear_experiment(
        "ULDP-NAIVE",
        lambda: FederatedStrategy(UldpNaive(num_silos=2, local=ONE_STEP), plan, evaluate_every=0),
        without=[silo_data([1], [-HUGE])] * 2,
        present=[silo_data([0, 1], [3 * HUGE, -HUGE])] * 2,
        rounds=rounds,
    )


def uldp_group(*, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """`UldpGroup` with two records of the canary in one silo; every step uses all records."""
    local = DpSgdTraining(
        steps=1,
        sampling_rate=1.0,
        batch_size=1.0,
        learning_rate=1.0,
        clipping_norm=1.0,
        noise_multiplier=noise,
    )
    method = UldpGroup(num_silos=2, num_users=2, group_size=2, local=local)
    return linear_experiment(
        "ULDP-GROUP-2",
        lambda: FederatedStrategy(method, method.plan(DELTA), evaluate_every=0),
        without=[silo_data([1], [0.0])] * 2,
        present=[silo_data([0, 0, 1], [HUGE, HUGE, 0.0]), silo_data([1], [0.0])],
        rounds=rounds,
        partitions=[0],
        gaussian=True,  # no step samples
    )


def _ditto(
    name: str, *, local: LocalTraining, whole: bool, rounds: int, **noise: Any
) -> Experiment:
    plan = RecordLevelPlan(
        sampling=FullParticipation(1), num_examples=2, rounds=rounds, delta=DELTA, **noise
    )
    return linear_experiment(
        name,
        lambda: FederatedStrategy(
            DPDitto(local=local, personal_training=ONE_STEP), plan, evaluate_every=0
        ),
        **TURNED_AROUND,
        rounds=rounds,
        whole=whole,
    )


def ditto_uploads(*, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """`DPDitto` with noise on clipped models: one record reverses the direction of the model."""
    return _ditto(
        "DP-Ditto, uploads",
        local=ONE_STEP,
        whole=True,
        rounds=rounds,
        clipping_norm=1.0,
        noise_stddev=noise,
    )


def ditto_steps(*, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """`DPDitto` with clipped and noised steps: one record's gradients reverse their direction."""
    return _ditto(
        "DP-Ditto, clipped steps",
        local=LocalTraining(steps=2, batch_size=2, learning_rate=1.0),
        whole=False,
        rounds=rounds,
        clipping_norm=1e3,
        noise_stddev=0.7 * noise,
        steps=ClippedSteps(
            learning_rate=1.0, gradient_clipping_norm=1.0, num_examples=2, local_steps=2
        ),
    )


ONE_CLIENT: dict[str, Any] = {
    "min_train_nodes": 1,
    "min_available_nodes": 1,
    "fraction_evaluate": 0.0,
}


def output_perturbation(*, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """FedAvg with clipped and noised models: one record reverses the direction of the model."""
    plan = PerturbationPlan(
        sampling=FullParticipation(1),
        perturbation=OutputPerturbation(clipping_norm=1.0, noise_stddev=noise),
        delta=DELTA,
    )
    return linear_experiment(
        "output perturbation",
        lambda: FederatedStrategy(
            Hosted(FedAvg(**ONE_CLIENT), local=ONE_STEP), plan, evaluate_every=0
        ),
        **TURNED_AROUND,
        rounds=rounds,
        whole=True,
    )


def objective_perturbation(*, noise: float = 1.0, rounds: int = 1) -> Experiment:
    """FedProx with perturbed exact minimisers, in one dimension: one record changes its sign."""
    plan = PerturbationPlan(
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
    )
    exact = LocalTraining(tolerance=1e-9)
    return linear_experiment(
        "objective perturbation",
        lambda: FederatedStrategy(
            Hosted(FedProx(proximal_mu=1.0, **ONE_CLIENT), local=exact), plan, evaluate_every=0
        ),
        without=[client_data(-1.0, 0.0, size=1)],
        present=[client_data(1.0, 0.0, size=1)],
        rounds=rounds,
        size=1,
    )


MECHANISMS: dict[str, Callable[..., Experiment]] = {
    "client-noise": client_level,
    "server-noise": lambda **more: client_level("server", **more),
    "client-noise-mod": lambda **more: client_level(foreign=True, **more),
    "client-noise-poisson": lambda **more: client_level(sampled=True, **more),
    "server-noise-poisson": lambda **more: client_level("server", sampled=True, **more),
    "secure-sum": secure_sum,
    "secure-scores": secure_scores,
    "uldp-avg": uldp,
    "uldp-sgd": lambda **more: uldp(UldpSgd, **more),
    "uldp-secure-sum": uldp_secure_sum,
    "uldp-avg-by-records": uldp_by_records,
    "uldp-naive": uldp_naive,
    "uldp-group": uldp_group,
    "ditto-uploads": ditto_uploads,
    "ditto-steps": ditto_steps,
    "output-perturbation": output_perturbation,
    "objective-perturbation": objective_perturbation,
}
"""Experiments by their names in ``flower-ext audit``. Each takes ``rounds``, and ``noise`` as a
multiple of its default."""
