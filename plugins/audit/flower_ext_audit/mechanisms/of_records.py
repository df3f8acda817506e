"""Mechanisms whose unit is one record of a client."""

from functools import partial
from typing import Any

from flwr.serverapp.strategy import FedAvg, FedProx

from flower_ext.algorithms import DPDitto, Hosted
from flower_ext.federation import FederatedStrategy
from flower_ext.privacy import (
    ClippedSteps,
    FullParticipation,
    LocalObjective,
    ObjectivePerturbation,
    OutputPerturbation,
    PerturbationPlan,
    RecordLevelPlan,
)
from flower_ext.training import LocalTraining
from flower_ext_audit.linear import HUGE, ONE_STEP, LinearMechanism, client_data
from flower_ext_audit.mechanisms.plans import DELTA, strategy_of

_BACKWARDS, _FORWARDS = [client_data(-HUGE, 0.0)], [client_data(HUGE, 0.0)]
"""Two data sets of one client, each of two records. The first record pulls the model backwards in
one data set, and forwards in the other."""
_record_plan = partial(RecordLevelPlan, sampling=FullParticipation(1), num_examples=2, delta=DELTA)


def _dp_ditto(plan: RecordLevelPlan, local: LocalTraining = ONE_STEP) -> FederatedStrategy:
    return strategy_of(DPDitto(local=local, personal_training=ONE_STEP), plan)


_ALONE: dict[str, Any] = {"min_train_nodes": 1, "min_available_nodes": 1, "fraction_evaluate": 0.0}
OF_RECORDS = (
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
        strategy=lambda plan: strategy_of(Hosted(FedAvg(**_ALONE), local=ONE_STEP), plan),
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
        strategy=lambda plan: strategy_of(
            Hosted(FedProx(proximal_mu=1.0, **_ALONE), local=LocalTraining(tolerance=1e-9)), plan
        ),
        without=[client_data(-1.0, 0.0, size=1)],
        present=[client_data(1.0, 0.0, size=1)],
        size=1,
    ),
)
